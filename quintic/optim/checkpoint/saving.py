"""Makes state dicts in PyTorch's format from parameter groups and state, and prepares state for pickling.

A state dict has `"state"`, {number of a parameter: its state}, and `"param_groups"`, whose `"params"` are such numbers;
they count parameters through all groups. Options become types that `torch.load(weights_only=True)` accepts: views and
callables are saved as text, NumPy's numbers as Python's.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import has_process_group
from quintic.optim.groups.options import OPTIONS
from quintic.optim.layout.layouts import is_dtensor
from quintic.optim.numeric.numbers import to_python_scalar
from quintic.optim.rules.rule import MANTISSA, STATE_KEYS, UpdateRule

__all__ = ["check_can_pickle", "saved_state", "with_mantissas"]

# Options that are objects; loading never restores them from their text.
_SAVED_AS_TEXT = frozenset(name for name, option in OPTIONS.items() if option.saved == "text")


def saved_state(groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state dict in PyTorch's format; its tensors share memory with the states.

    Entries of `states` under keys other than parameters are kept. If frozen parameters have no state, `"frozen"` lists
    their numbers, so that loading can tell them from parameters whose state was lost.
    """
    keys = {param: key for key, param in enumerate(param for group in groups for param in group["params"])}
    state: dict[Any, Any] = {}
    # In the order of the groups, equal on all ranks: libraries run collectives over the entries in their order.
    for param, key in keys.items():
        if states.get(param):
            state[key] = values = dict(states[param])
            # Distributed checkpoints send state through collectives, which do not support uint16.
            if MANTISSA in values and has_process_group():
                values[MANTISSA] = values[MANTISSA].to(torch.int32)
    # The user's own entries, whose keys must not be numbers of parameters.
    others = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    taken = next((key for key in others if isinstance(key, int) and 0 <= key < len(keys)), None)
    if taken is not None:
        raise ValueError(
            f"optimizer.state has a key of your own, {taken}, which is the number of a parameter in state dicts; use a "
            f"string as key instead"
        )
    state |= others
    # Groups with numbers in place of parameters.
    saved_groups = []
    for group in groups:
        saved = {
            key: str(value) if key in _SAVED_AS_TEXT and value is not None else _without_numpy(value)
            for key, value in group.items()
            if key != "params"
        }
        saved_groups.append({**saved, "params": [keys[param] for param in group["params"]]})
    saved_dict = {"state": state, "param_groups": saved_groups}
    frozen = [key for param, key in keys.items() if states.get(param, {}).keys().isdisjoint(STATE_KEYS)]
    return {**saved_dict, "frozen": frozen} if frozen else saved_dict


def check_can_pickle(kind: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse to pickle an optimizer of this class whose groups have a process group; a TypeError says what to do."""
    if any(group.get("process_group") is not None for group in groups):
        raise TypeError(
            f"a {kind} with a process_group cannot be pickled: save optimizer.state_dict(), or set process_group to "
            f"None in optimizer.defaults and all optimizer.param_groups before"
        )


def _without_numpy(value: Any) -> Any:
    """Return an option, or a tuple of them, with Python's numbers in place of NumPy's; a rule as text."""
    if type(value) is tuple:
        return tuple(map(_without_numpy, value))
    if isinstance(value, UpdateRule):
        return str(value)
    return to_python_scalar(value)


def with_mantissas(states: Mapping[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    """Return state with mantissas viewed as `dtype`: int16, which `pickle` can load, or uint16, which steps use."""
    # A `DTensor` cannot be viewed as another dtype and is left as it is.
    given: dict[Any, Any] = defaultdict(dict)
    for key, state in states.items():
        mantissa = state.get(MANTISSA) if isinstance(key, Tensor) else None
        given[key] = state if mantissa is None or is_dtensor(mantissa) else {**state, MANTISSA: mantissa.view(dtype)}
    return given
