"""Masters that were saved in another form than the optimizer keeps now, or on one side only.

The saved form is loaded, and the next use of state converts it, as if the option had been changed after loading
(`state/sync.py`). Converting at once may need the weights, and these are often loaded after the optimizer.

PyTorch's distributed checkpoints may lose or mix masters, which the saved options tell. `dcp.load` reads only keys that
the optimizer has, and so no master where `master=None`. With `full_state_dict=True` PyTorch adds this optimizer's own
master to a saved state without one of this form.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.rules.rule import MASTER, MASTER_SPECS
from quintic.optim.state.placement import empty_master
from quintic.optim.state.shards import StateShard
from quintic.optim.state.state import MASTER_KEYS, master_key

__all__ = ["in_saved_form", "lacks_master", "named_masters", "replace_master", "warn_of_lost_masters", "without_own"]

_Groups = Sequence[Mapping[str, Any]]


def named_masters(saved_groups: _Groups) -> dict[str, str]:
    """Return {state key: option} for the masters that may have been saved, by the options of saved groups.

    All of them, if a group lacks the option.
    """
    is_known = all("master" in group for group in saved_groups)
    options = {str(group["master"]) for group in saved_groups} if is_known else MASTER_SPECS.keys()
    return {spec.name: option for option, spec in MASTER_SPECS.items() if option in options}


def without_own(name: str, saved: Mapping[str, Any], named: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a saved state without the master that PyTorch has added to it, from this optimizer.

    Args:
        name: the parameter's name, for errors.
        saved: its saved state.
        named: as `named_masters` returns it.

    Raises:
        ValueError: another form was saved, which other ranks may lack.
    """
    # PyTorch adds under this optimizer's key, which the saved options do not name.
    added = next((key for key in MASTER_KEYS if key in saved and key not in named), None)
    if added is None:
        return saved
    if named:
        option = next(iter(named.values()))
        raise ValueError(
            f"{name}: the state was saved with master={option!r}, and torch.distributed.checkpoint has put "
            f"{added!r} of this optimizer into it; make it with master={option!r}, load, and change the option then"
        )
    return _without_master(saved)


def lacks_master(param: Tensor, group: Group, saved: Mapping[str, Any], saved_group: Mapping[str, Any]) -> bool:
    """Return whether low-precision weights have no master from now on, and a saved group had one."""
    # Float32 weights have no master, with any option.
    is_lost = str(saved_group.get("master")) in MASTER_SPECS and master_key(saved) is None
    return is_lost and group.master is None and param.dtype.itemsize < 4


def warn_of_lost_masters(lost: Mapping[str, Sequence[str]], stacklevel: int) -> None:
    """Warn once of parameters whose masters were not loaded: {option that they were saved with: names}."""
    for option, names in lost.items():
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        warnings.warn(
            f"{names[0]}{more}: saved with master={option!r}, and loaded without: torch.distributed.checkpoint leaves "
            f"out what an optimizer with master=None has no place for, and the weights alone go on; to keep all bits, "
            f"make it with master={option!r}, load again, and change the option then",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


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
