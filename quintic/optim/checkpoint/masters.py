"""Masters that were saved in another form than the optimizer keeps now, or on one side only.

The saved form is loaded, and the next use of state converts it, as if the option had been changed after loading
(`state/sync.py`). Converting at once may need the weights, and these are often loaded after the optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.rules.rule import MASTER, MASTER_SPECS
from quintic.optim.state.placement import empty_master
from quintic.optim.state.shards import StateShard
from quintic.optim.state.state import MASTER_KEYS, master_key

__all__ = ["in_saved_form", "replace_master"]


def in_saved_form(
    name: str,
    param: Tensor,
    group: Group,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    shards: Sequence[StateShard] | None,
    *,
    strict: bool,
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]] | None:
    """Return a parameter's state and saved state with masters of one form, or None if they are, or cannot be converted.

    Args:
        name: the parameter's name, for errors.
        param: the parameter.
        group: its group.
        own: its state. The returned state has a new master of the saved form, or none where none was saved.
        saved: its saved state. The returned one has no master if this optimizer keeps none.
        shards: this rank's shards, if its state is sharded.
        strict: whether it is an error that a saved master would be dropped.

    Raises:
        ValueError: only the saved state has a master, and `strict` is true.
    """
    key, saved_key = master_key(own), master_key(saved)
    if key == saved_key:
        return None
    # A master that was not saved begins with the weights, which hold all there is to know.
    if saved_key is None:
        return _without_master(own), saved
    # Wider weights lack the bits, and mantissas of bfloat16 weights complete no others: both sides differ in more.
    if param.dtype.itemsize >= 4 or (saved_key != MASTER and param.dtype != torch.bfloat16):
        return None
    if key is not None:
        return {**_without_master(own), saved_key: empty_master(saved_key, param, group, shards)}, saved
    if strict:
        option = next(option for option, spec in MASTER_SPECS.items() if spec.name == saved_key)
        raise ValueError(
            f"{name}: the state was saved with master={option!r} and this optimizer has master=None, which drops bits "
            f"that the weight lacks; make it with master={option!r} or another form, or drop them on purpose: "
            f"optimizer.load_state_dict(state_dict, strict=False)"
        )
    return own, _without_master(saved)


def replace_master(state: dict[str, Any], loaded: Mapping[str, Tensor]) -> None:
    """Give a parameter's state, in place, the master that `loaded` has, or none."""
    kept, key = _without_master(state), master_key(loaded)
    state.clear()
    state.update(kept if key is None else {**kept, key: loaded[key]})


def _without_master(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in MASTER_KEYS}
