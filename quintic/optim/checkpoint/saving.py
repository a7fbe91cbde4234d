"""Makes state dicts in PyTorch's format from parameter groups and state, and prepares state for pickling."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import has_process_group
from quintic.optim.layout.layouts import is_dtensor
from quintic.optim.rules.numbers import plain
from quintic.optim.rules.rule import MANTISSA
from quintic.optim.rules.table import STATE_KEYS
from quintic.optim.state.state import CODE_KEYS

__all__ = ["saved_state", "with_mantissas"]

_SAVED_AS_TEXT = frozenset(("view", *CODE_KEYS))


def saved_state(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state dict as PyTorch's, with views and callables as text; its tensors share memory with the states.

    Keys of `states` that are no parameters are kept. Numbers of NumPy become Python's: `torch.load(weights_only=True)`
    refuses the others. Mantissas become int32 where there are process groups, whose collectives do not know uint16.
    Where frozen parameters have no state, `"frozen"` lists their keys: loading can tell them from those whose state was
    lost.
    """
    keys = {param: key for key, param in enumerate(param for group in groups for param in group["params"])}
    state: dict[Any, Any] = {}
    for param, key in keys.items():  # in one order on all ranks: some make collectives of it
        if states.get(param):
            state[key] = values = dict(states[param])
            if MANTISSA in values and has_process_group():
                values[MANTISSA] = values[MANTISSA].to(torch.int32)
    others = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    taken = next((key for key in others if isinstance(key, int) and 0 <= key < len(keys)), None)
    if taken is not None:
        raise ValueError(
            f"optimizer.state has a key of your own, {taken}, which is that of a parameter in state dicts; choose a "
            f"string instead"
        )
    state |= others
    saved_groups = []
    for group in groups:
        saved = {
            key: str(value) if key in _SAVED_AS_TEXT and value is not None else _plain(value)
            for key, value in group.items()
            if key != "params"
        }
        saved_groups.append({**saved, "params": [keys[param] for param in group["params"]]})
    saved_dict = {"state": state, "param_groups": saved_groups}
    frozen = [key for param, key in keys.items() if states.get(param, {}).keys().isdisjoint(STATE_KEYS)]
    return {**saved_dict, "frozen": frozen} if frozen else saved_dict


def _plain(value: Any) -> Any:
    """Return an option with Python's numbers in place of NumPy's."""
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return plain(value)


def with_mantissas(states: Mapping[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Return state with mantissas viewed as int16, which `pickle` can load, or as uint16, which steps use."""
    given: dict[Any, Any] = defaultdict(dict)
    for key, state in states.items():
        mantissa = state.get(MANTISSA) if isinstance(key, Tensor) else None
        given[key] = state if mantissa is None or is_dtensor(mantissa) else {**state, MANTISSA: mantissa.view(dtype)}
    return given
