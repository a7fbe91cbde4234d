"""State that one parameter hands to another, in the same order of its dimensions or transposed, whoever has it."""

from collections.abc import Mapping

from torch import Tensor

from quintic.optim.current import Current
from quintic.optim.groups.options import Group, found_parameter
from quintic.optim.groups.ties import check_shapes
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.state.parts import CUT_KEYS
from quintic.optim.state.placement import needed_state, state_on_device

__all__ = ["carry"]


def carry(
    current: Current,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    source: Tensor | str,
    target: Tensor | str,
    *,
    transposed: bool,
) -> None:
    """Do as `Muon.carry_state`, given what is planned and the state of all parameters, which is changed."""
    groups = current.groups
    places = [found_parameter(groups, param, "carry_state was given") for param in (source, target)]
    params = [group.params[index] for group, index in places]
    _check(*places, transposed=transposed)
    by_param = {found.param: found for found in current.parameters()}
    given, taken = (by_param.get(param) for param in params)
    if given is None and taken is None:
        return
    if given is None or taken is None or given.ranks != taken.ranks:
        names = " and ".join(group.param_names[index] for group, index in places)
        raise ValueError(f"{names} are on different ranks: carry_state needs both on all ranks that have one of them")
    with (
        state_on_device(given.param, states[given.param]) as values,
        state_on_device(taken.param, states[taken.param]) as kept,
    ):
        for key, value in kept.items():
            if key in CUT_KEYS:
                whole = given.whole_of(key, local_tensor(values[key]))
                piece = taken.local_of(key, whole.mT if transposed else whole)
                if piece.numel():
                    local_tensor(value).copy_(piece)
            elif key == "second_momentum_buffer":
                value.copy_(given.whole_second_moments(values[key]))
            else:
                value.copy_(values[key])


def _check(source: tuple[Group, int], target: tuple[Group, int], *, transposed: bool) -> None:
    """Reject two parameters of which one cannot have the state of the other; a ValueError names both."""
    (group, index), (other_group, other_index) = source, target
    param, other = group.params[index], other_group.params[other_index]
    names = f"the state of {group.param_names[index]} cannot be carried to {other_group.param_names[other_index]}"
    if param is other:
        raise ValueError(f"{names}: they are the same parameter")
    check_shapes(names, param, other, transposed=transposed)
    if group.algorithm != other_group.algorithm:
        raise ValueError(f"{names}: their groups have algorithm={group.algorithm!r} and {other_group.algorithm!r}")
    needed, other_needed = (
        {key: str(form.dtype) for key, form in needed_state(*pair).items()}
        for pair in ((param, group), (other, other_group))
    )
    if needed != other_needed:
        raise ValueError(
            f"{names}: one has {needed}, the other {other_needed}; give both parameters the same dtype, and their "
            f"groups the same state_dtype, master and normalize"
        )
    if "second_momentum_buffer" in needed and (transposed or group.view != other_group.view):
        raise ValueError(
            f"{names}: NorMuon's second moments belong to rows or columns of the matrices of a view; carry them to a "
            f"parameter of the same view, which is not transposed, or set normalize=None for both"
        )
