"""The reference step: `Muon.step` once more, slow and simple, which `verify.py` compares with the real one.

For each parameter, on every rank that holds a piece of it:

    gradient    this rank's box, averaged over ranks if the optimizer averages
    gather      weight, momentum, master and gradient in the parameter's whole shape (`parameters.py`)
    step        one matrix (1, m, n) after the other: momentum, polar factor, second moments, decay and step
    scatter     this rank's pieces back to weight and state

It calls the pure functions of `update.py` and `orthogonalize.py` in plain PyTorch, and uses no buckets, exchanges or
kernels. Shared with the real step are the update rule itself, the layouts, the owners of sharded state
(`comms="sharded"`), and the places where directions and averages are rounded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import (
    ProcessGroup,
    all_agree_,
    all_gather_uneven,
    all_gather_values,
    num_ranks,
)
from quintic.optim.comms.sharing import AVERAGING, user_linked_ranks
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import gradient_dtype, local_gradients, local_tensor, placed_as, reject_sparse
from quintic.optim.layout.views import View
from quintic.optim.muon import Muon, muon_in
from quintic.optim.numeric.int8_state import is_packed, read_packed, store_packed_
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, PARAM_SHAPED_STATE, STEP
from quintic.optim.rules.stages import StateSpec
from quintic.optim.rules.update import adamw_
from quintic.optim.state.parameters import Parameter
from quintic.optim.state.placement import state_on_device
from quintic.optim.state.state import copy_, master_of, vectors_of
from quintic.optim.step.partial_gradients import PartialSpec, partial_spec, zero_addend
from quintic.optim.step.reduction import Averages
from quintic.optim.verify.matrix_step import Rounding, step_matrix

__all__ = ["Roundings", "reference_step", "run_reference"]

Roundings = dict[tuple[Tensor, int], Rounding]
"""(parameter, number of its matrix) -> the effect of rounding on that matrix."""


def reference_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the step of `optimizer.step()` slowly: every matrix by itself, whole, in plain PyTorch, on every rank.

    For tests and for `quintic.verify`, not for training. Weights, state and the countdowns of `step_every` change as in
    a step; counts of steps, telemetry and hooks of the optimizer do not, and QK-clip is not applied. A parameter that
    several ranks hold (a `DTensor`, or `comms="averaged"`) is stepped if all of them have a gradient; with
    `comms="replicated"` and `"sharded"`, and if a `DTensor`'s gradient is `Partial`, it is stepped if any rank has one,
    and missing gradients count as zeros.

    Needs several times the memory of one whole Muon parameter with its gradient and state (with `comms="sharded"` of
    any parameter, and the gradients of all ranks). All ranks that share parameters must call it; they wait for the
    device and for each other.

    Args:
        optimizer: `quintic.Muon`, also as Accelerate or Lightning have wrapped it, with gradients in `p.grad`. Only
            gradients of tied parameters are modified.

    Raises:
        TypeError: it is not a `quintic.Muon`.
        ValueError: a gradient is sparse.
        FloatingPointError: a gradient is not finite and `on_nonfinite="raise"`; nothing was changed.
        RuntimeError: as `optimizer.step()`: a gradient is `Partial` that no rank had as such before the first step.
    """
    muon = muon_in(optimizer, "reference_step")
    run_reference(muon, None)
    # Averages made for this step by clipping are used up, as after `optimizer.step()`.
    muon._plans.reduction.forget(n for n, group in enumerate(muon.param_groups) if group["pending_steps"] == 0)


@torch.no_grad()
def run_reference(optimizer: Muon, roundings: Roundings | None) -> None:
    """Make the step of `reference_step`, and store the effect of rounding on every matrix in `roundings`, if given."""
    # The groups that are due, their tied parameters, and the order of parameters.
    plans = optimizer._plans
    runner = plans.planned()
    steps_waited = plans.steps_waited()
    ties = [tie for tie in runner.ties if steps_waited[tie.head_group] == 0]
    for tie in ties:
        tie.add_gradient()
    runner.consensus.check_partial(steps_waited)
    everything, averages = plans.parameters(), plans.reduction.valid()
    # All ranks of a process group go through their common parameters in the same order, so collectives match.
    parameters = [parameter for parameter in everything if steps_waited[parameter.group.number] == 0]
    is_finite = _all_finite(optimizer, everything, parameters)
    states = optimizer.state
    for parameter in parameters:
        # Two collectives, which every rank of the parameter must call.
        partial = _partial_spec_of(parameter)
        is_stepped = _is_stepped(parameter, partial is not None and not partial.has_copies(parameter.param))
        if is_stepped and (is_finite or parameter.group.on_nonfinite == "propagate"):
            gradient = _gradient_of(parameter, partial, averages.get(parameter.group.number))
            with state_on_device(parameter.param, states[parameter.param]) as state:
                _step_parameter(parameter, gradient, state, roundings)
    for group, pending in zip(optimizer.param_groups, steps_waited, strict=True):
        group["pending_steps"] = pending % group["step_every"]
    for tie in ties:
        tie.write()


def _all_finite(optimizer: Muon, everything: list[Parameter], due: list[Parameter]) -> bool:
    """Return whether all gradients of groups with an `on_nonfinite` policy are finite, on all connected ranks.

    All of these ranks must call it, with all parameters and with the ones that are due. A FloatingPointError if not,
    and if the policy of any rank is "raise".
    """
    policies = [parameter for parameter in due if parameter.group.on_nonfinite != "propagate"]
    bad = [f for f in policies if f.param.grad is not None and not local_tensor(f.param.grad).isfinite().all()]
    is_raised = any(parameter.group.on_nonfinite == "raise" for parameter in policies)
    # The process groups that connect this rank with others: by shared parameters, or because the user links them.
    groups = {
        parameter.ranks: (parameter.process_group, parameter.param)
        for parameter in everything
        if parameter.layout is not None
    }
    for group in optimizer._plans.groups:
        bound = user_linked_ranks(group)
        if bound:
            groups[bound] = group.process_group, group.params[0]
    # 0 on any rank is 0 on all: [all are finite, no rank raises].
    flags = _least_of_connected([int(not bad), int(not is_raised)], groups)
    if flags == [0, 0]:
        where = bad[0].name if bad else "on another rank"
        raise FloatingPointError(f"{where}: the gradient has an infinite or undefined entry; nothing was updated")
    return bool(flags[0])


def _least_of_connected(
    flags: list[int], groups: Mapping[tuple[int, ...], tuple[ProcessGroup | None, Tensor]]
) -> list[int]:
    """Return the minimum of each flag over all ranks that process groups connect, directly or through other ranks.

    `groups` has for each set of ranks their process group, and a tensor on the device that they communicate on.
    """
    # A group of all ranks spreads a flag everywhere in one round; otherwise each round takes it at least one rank on.
    num_rounds = 1 if any(len(ranks) == num_ranks() for ranks in groups) else num_ranks()
    for _ in range(num_rounds):
        for _, (process_group, param) in sorted(groups.items(), key=lambda item: item[0]):
            on_device = torch.tensor(flags, dtype=torch.int32, device=param.device)
            all_agree_(on_device, process_group)
            flags = on_device.tolist()
    return flags


def _partial_spec_of(parameter: Parameter) -> PartialSpec | None:
    """Return how a `DTensor`'s gradient is `Partial` on the first rank that has such a gradient; None if none has."""
    if parameter.process_group is None or not hasattr(parameter.param, "device_mesh"):
        return None
    # Ranks without a gradient must learn of it, to take part in the reduction.
    return next(
        (partial for partial in all_gather_values(partial_spec(parameter.param), parameter.process_group) if partial),
        None,
    )


def _is_stepped(parameter: Parameter, may_lack_addends: bool) -> bool:
    """Return whether all ranks have a gradient, or, if gradients are averaged or `Partial`, whether any rank has."""
    one_is_enough: bool = may_lack_addends or parameter.group.comms in AVERAGING
    # The minimum over ranks of "has a gradient", or of "has none" where one is enough.
    flag = torch.tensor(
        (parameter.param.grad is None) == one_is_enough, dtype=torch.int32, device=parameter.param.device
    )
    if parameter.process_group is not None:
        all_agree_(flag, parameter.process_group)
    return bool(flag) is not one_is_enough


def _gradient_of(parameter: Parameter, partial: PartialSpec | None, averages: Averages | None) -> Tensor:
    """Return this rank's box of the gradient, averaged over ranks if the optimizer averages this group's gradients.

    `partial` says how the gradient is `Partial` on some rank; `averages` come from clipping, for the whole group.
    """
    # Other ranks have a Partial gradient: take part in its reduction with zeros.
    if partial is not None and parameter.param.grad is None:
        param: Any = parameter.param
        return local_tensor(placed_as(parameter.name, param, zero_addend(param, partial)))
    (gradient,) = local_gradients([parameter.param], [parameter.name])
    if gradient is not None:
        reject_sparse(parameter.name, gradient)
    if parameter.group.comms not in AVERAGING or parameter.process_group is None:
        assert gradient is not None
        return gradient
    # Averaged already: sharded over ranks, in place, or in memory of its own where this rank had no gradient.
    if averages is not None:
        average = averages[parameter.param]
        assert average is not None
        return average if parameter.sharded is None else parameter.whole_of_shards(average)
    # Sum all ranks' gradients in rank order, in float32 or wider, divide, and round once.
    if gradient is None:
        gradient = torch.zeros_like(parameter.param, dtype=gradient_dtype(parameter.param))
    if parameter.sharded is not None:
        gradient = gradient.to(parameter.param.dtype)  # the dtype in which the real step sends it
    everyone = all_gather_uneven(
        gradient.reshape(-1), [gradient.numel()] * len(parameter.ranks), parameter.process_group
    )
    total = torch.zeros_like(everyone[0], dtype=torch.promote_types(gradient.dtype, torch.float32))
    for one in everyone:
        total += one
    # The divisor is a tensor: PyTorch would multiply by the reciprocal of a Python number on GPUs, which rounds twice.
    count = torch.full((), len(everyone), dtype=total.dtype, device=total.device)
    return (total / count).to(gradient.dtype).view(gradient.shape)


def _step_parameter(
    parameter: Parameter, gradient: Tensor, state: Mapping[str, Tensor], roundings: Roundings | None
) -> None:
    """Step one parameter from this rank's box of its gradient; all ranks that share it must call it."""
    local = {"weight": local_tensor(parameter.param), **{key: local_tensor(value) for key, value in state.items()}}
    is_adamw = not parameter.group.rule.orthogonalizes
    # AdamW is element-wise: step this rank's piece, unless state is sharded otherwise than the weight, or its groups of
    # 8 bits lie on several ranks.
    if is_adamw and parameter.sharded is None and not parameter.is_cut:
        _step_adamw(local, gradient, parameter.group)
        return
    # Gather: all in the parameter's whole shape, and the vectors of all matrices.
    names = {"weight", *PARAM_SHAPED_STATE}
    whole = {key: parameter.whole_of(key, value) for key, value in local.items() if key in names}
    packed = [key for key in parameter.group.rule.packed_state if is_packed(whole[key])]
    whole |= {key: read_packed(whole[key]) for key in packed}
    # In the memory order of the weight, which the gradient may not have.
    whole["gradient"] = torch.empty_like(whole["weight"], dtype=gradient.dtype).copy_(parameter.whole(gradient))
    specs = parameter.group.rule.vector_state
    vectors = {spec: parameter.whole_vectors(spec, local[spec.name]) for spec in specs if spec.name in local}
    if is_adamw:
        _step_adamw({STEP: local[STEP], **whole}, whole["gradient"], parameter.group)
    else:
        _step_matrices(parameter, whole, vectors, roundings)
    for key in packed:
        wide, whole[key] = whole[key], torch.empty_like(whole[key], dtype=local[key].dtype)
        store_packed_(whole[key], wide, local.get(STEP))  # second moments are rounded by AdamW's count of steps
    # Scatter: this rank's pieces.
    for key, value in local.items():
        if key in names and value.numel():
            copy_(value, parameter.local_of(key, whole[key]))
    for spec, vector in vectors.items():
        local[spec.name].copy_(vector)


def _step_adamw(local: Mapping[str, Tensor], gradient: Tensor, group: Group) -> None:
    """Step a parameter, or a piece of one, entry by entry with AdamW."""
    adamw_(
        local["weight"],
        master_of(local),
        gradient,
        local[EXP_AVG],
        local[EXP_AVG_SQ],
        local[STEP],
        lr=group.effective_lr,
        betas=(float(group.betas[0]), float(group.betas[1])),
        eps=float(group.eps),
        weight_decay=float(group.weight_decay),
        decay_coupling=group.decay_coupling,
        cautious=group.cautious,
    )


def _step_matrices(
    parameter: Parameter,
    whole: Mapping[str, Tensor],
    vectors: Mapping[StateSpec, Tensor],
    roundings: Roundings | None,
) -> None:
    """Step the whole weight, and its state, one matrix after the other."""
    view: View = parameter.group.view
    # (b, m, n) for each kind of matrix. Cloned, since some views give copies and others not.
    batches = {key: [batch.clone() for batch in view.batches(tensor)] for key, tensor in whole.items()}
    shape = whole["weight"].shape
    of_blocks = {spec.name: vectors_of(spec, vector, shape, view) for spec, vector in vectors.items()}
    number = 0
    for block, weights in enumerate(batches["weight"]):
        for index in range(weights.shape[0]):
            matrix = {key: batch[block][index : index + 1] for key, batch in batches.items()}
            matrix |= {name: blocks[block][index : index + 1] for name, blocks in of_blocks.items()}
            if matrix["weight"].numel():
                rounding = step_matrix(matrix, number, parameter, measure=roundings is not None)
                if roundings is not None and rounding is not None:
                    roundings[parameter.param, number] = rounding
            number += 1
    for key, batch in batches.items():
        view.write_(whole[key], batch)
