"""Clips gradients by their total norm, with one result for every layout.

    collect    this rank's pieces of the gradients in scope; gradients that the optimizer averages over ranks (`comms`)
               are averaged here, and the next step uses these averages
    square     the squared norm of each piece, on its device, in float64
    reduce     over the mesh: pieces along a sharded axis are added, copies along a replicated one count once
    total      the sum over all parameters of all connected ranks, each parameter counted once
    scale      this rank's pieces in place

Only squared norms are sent between ranks, one number per parameter, (n,).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, group_ranks, has_process_group, start_all_gather
from quintic.optim.comms.communicators import Communicators
from quintic.optim.layout.layouts import (
    local_tensor,
    placed_as,
    reject_plain_gradient,
    reject_sparse,
    writable_gradient,
)
from quintic.optim.muon import Muon, muon_in
from quintic.optim.numeric.batches import group_by_device_dtype, scale_
from quintic.optim.numeric.dynamo import disable_dynamo
from quintic.optim.numeric.numbers import is_number
from quintic.optim.rules.device import host_tensor, upload

if TYPE_CHECKING:  # importing it takes a second; avoid it when DTensor is unused
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_grad_norm_"]

_SCOPES = ("adamw", "all")

# Keeps the division finite, as in torch.nn.utils.clip_grad_norm_.
_NORM_EPS = 1e-6


@disable_dynamo
@torch.no_grad()
def clip_grad_norm_(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    *,
    scope: Literal["adamw", "all"] = "adamw",
    error_if_nonfinite: bool = False,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients down if their total norm is above `max_norm`, which bounds a step; return that norm.

    Call it between `backward` and `step`, in place of `torch.nn.utils.clip_grad_norm_`; with `torch.amp.GradScaler`
    after `unscale_`. By default only gradients of AdamW groups are counted and scaled. Muon orthogonalises its update,
    which has the same size for any size of the gradient. Clipping Muon's gradients would not bound its step, but only
    weight the steps in the momentum differently; and the large gradients of matrices would dominate the norm, by which
    AdamW's gradients are scaled, too.

    Gradients are multiplied in place by min(1, max_norm / (norm + 1e-6)), where norm is the 2-norm of all whole
    gradients: pieces on different ranks are added, copies count once, gradients that are None count as zeros. A
    `Partial` gradient of a `DTensor` is replaced by the sum over ranks, also on ranks that have none (see
    `docs/explanation/several-ranks.md`).

    If the optimizer averages gradients, the norm is that of the averages, which are computed here instead of in the
    next step. With `comms="replicated"` they replace `p.grad`; with `"sharded"` and `"sharded_sparse"` each rank keeps
    the clipped averages of the pieces it owns for the step, and `p.grad` does not change (all rows of
    `"sharded_sparse"` tables are sent). Gradients that change between this call and `step` are averaged again there,
    and not clipped.

    Ranks that share parameters, directly or through other ranks, clip by one norm: that of all their parameters, each
    counted once, by its name. If ranks have parameters of one name that they do not share (copies that the optimizer
    does not know about, or experts of each rank), the largest norm counts. See `docs/explanation/several-ranks.md`.

    Collective: all these ranks (and the ranks of `process_group`) must call it, with the same parameters in the same
    order, also if some gradients are None on some ranks. Does not wait for the device unless `error_if_nonfinite`.
    Groups that are not due in the next step (`step_every`) are not clipped, since their gradients still add up.

    Args:
        optimizer: `quintic.Muon` whose gradients are clipped, also as Accelerate or Lightning have wrapped it; weights
            and state are not read.
        max_norm: upper bound of the total norm, > 0; `math.inf` measures without scaling.
        scope: `"adamw"`: gradients of AdamW groups; `"all"`: of all groups.
        error_if_nonfinite: raise if the norm is infinite or undefined, without scaling. Waits for the device.
        process_group: ranks that share no parameters and whose squared norms are added: one rank of every stage of a
            pipeline. None if there are no stages, or if groups have a `process_group` of all stages.

    Returns:
        () float32: the total norm before clipping, on the device of the first gradient; equal on all connected ranks
        and those of `process_group`. Squares are added in float64 (float32 on devices without it) in a fixed order, so
        that the norm is that of a single device except for rare differences in the last rounding to float32.

    Raises:
        TypeError: `optimizer` is not a `quintic.Muon`.
        ValueError: `scope` is unknown, `max_norm` is not positive, or a gradient is sparse.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; or ranks were given different parameters
            or options; or a gradient here is `Partial` that was `Partial` on no rank before the first step or clipping:
            then nothing was sent or scaled, and only ranks with such a gradient raise.

    Source: R. Pascanu et al. 2013, arXiv 1211.5063, algorithm 1; interface as `torch.nn.utils.clip_grad_norm_`.
    """
    optimizer = muon_in(optimizer, "clip_grad_norm_")
    if scope not in _SCOPES:
        raise ValueError(f"unknown scope {scope!r}; choose 'adamw' or 'all'")
    is_infinite = isinstance(max_norm, float) and max_norm == math.inf
    if not (is_infinite or is_number(max_norm, least=math.ulp(0.0))):
        raise ValueError(f"max_norm must be a positive number, got {max_norm!r}; math.inf measures without clipping")
    # Collect, and square.
    gradients, sharded = _collect_gradients(optimizer, scope)
    device = _device_of(optimizer, gradients)
    plans, runner = optimizer._plans, optimizer._plans.planned()
    names, squares = _squared_norms(gradients, device, plans.communicators)
    # Sharded averages: each rank has some pieces of every parameter.
    for ranks, shards in sharded.items():
        names += [shard.name for shard in shards]
        squares.append(_squared_norms_of_shards(shards, plans.communicators[ranks], len(ranks), device))
    # Total, () over all connected ranks, and over the stages of a pipeline.
    squared = runner.consensus.connected.total(names, torch.cat(squares))
    if process_group is not None:
        squared = _gathered(squared.view(1), process_group, len(group_ranks(process_group))).sum()
    norm = squared.sqrt()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of the gradients in scope {scope!r} is {norm.item()}, so they cannot be clipped; nothing "
            f"was scaled (error_if_nonfinite=False scales anyway)"
        )
    # Scale; averages that were made for the step count as unchanged.
    if math.isfinite(max_norm):
        of_shards = [shard for shards in sharded.values() for shard in shards]
        pieces = [one.local for one in (*gradients, *of_shards) if one.local is not None]
        scale_(pieces, (max_norm / (norm + _NORM_EPS)).clamp(max=1.0))
        plans.reduction.accept_gradients()
    return norm.float()


class _Gradient(NamedTuple):
    """A gradient in scope, on this rank."""

    name: str
    param: Tensor
    # This rank's piece, with the parameter's placements; with sharded state the averages of the pieces it owns,
    # (entries,); None without a gradient.
    local: Tensor | None


def _collect_gradients(optimizer: Muon, scope: str) -> tuple[list[_Gradient], dict[tuple[int, ...], list[_Gradient]]]:
    """Return the gradients in scope: those in their parameters' layouts, and sharded averages by their ranks.

    Computes the averages of groups that are due. All ranks that share parameters must call it.
    """
    gradients: list[_Gradient] = []
    sharded: dict[tuple[int, ...], list[_Gradient]] = {}
    plans = optimizer._plans
    runner = plans.connected() if has_process_group() else plans.planned()
    # Only groups that the next step steps.
    steps_waited = plans.steps_waited()
    due = [
        group
        for group, pending in zip(plans.groups, steps_waited, strict=True)
        if pending == 0 and scope in ("all", group.algorithm)
    ]
    numbers = [group.number for group in due]
    for tie in runner.ties:
        if steps_waited[tie.head_group] == 0:
            tie.add_gradient()  # the head's gradient then includes its copy's, as in the step
    # Drop averages of gradients that have changed since, before this function changes gradients itself.
    plans.reduction.valid()
    if has_process_group():
        runner.consensus.reduce_partial_gradients(numbers)
    # By group number, for the groups that the optimizer averages.
    averages = plans.reduction.precompute(numbers)
    for group in due:
        # The gradient is final on this rank.
        if group.number not in averages:
            rows = zip(group.param_names, group.params, strict=True)
            gradients += [_Gradient(name, param, _own_gradient(name, param)) for name, param in rows]
            continue
        # An average, whole on every rank ("replicated") or sharded over `ranks`.
        averaged = zip(group.param_names, averages[group.number].items(), strict=True)
        ranks = plans.reduction.ranks[group.number]
        target = gradients if group.comms == "replicated" else sharded.setdefault(ranks, [])
        target += [_Gradient(name, param, average) for name, (param, average) in averaged]
    return gradients, sharded


def _own_gradient(name: str, param: Any) -> Tensor | None:
    """Return this rank's piece of a dense gradient, with the placements of its parameter; None without a gradient."""
    gradient: Any = writable_gradient(param)
    if gradient is None:
        return None
    reject_sparse(name, gradient)
    reject_plain_gradient(name, param, gradient)
    given, wanted = getattr(gradient, "placements", None), getattr(param, "placements", None)
    if given != wanted and given is not None and wanted is not None:
        # Stored as the gradient, so that `step` need not redistribute it again.
        param.grad = gradient = placed_as(name, param, gradient)
    return local_tensor(gradient)


def _device_of(optimizer: Muon, gradients: Sequence[_Gradient]) -> torch.device:
    """Return the device of this rank's first gradient, or of its first parameter if it has no gradients."""
    for gradient in gradients:
        if gradient.local is not None:
            return gradient.local.device
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next((param.device for param in params), torch.device("cpu"))


def _sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which squares are added on a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _squared_norms(
    gradients: Sequence[_Gradient], device: torch.device, communicators: Communicators
) -> tuple[list[str], list[Tensor]]:
    """Return the names of parameters, and the squared norms of their whole gradients on `device`.

    The norms are a list of (n,) tensors, one per mesh and device, in the order of the names.
    """
    # Sort the parameters by mesh and device; plain tensors have no mesh. Ranks outside a mesh hold nothing of it.
    norms = _gradient_norms(gradients)
    places: dict[tuple[DeviceMesh | None, torch.device], list[int]] = {}
    for place, (_, param, _) in enumerate(gradients):
        mesh = getattr(param, "device_mesh", None)
        if mesh is None or mesh.get_coordinate() is not None:
            places.setdefault((mesh, param.device), []).append(place)
    names: list[str] = []
    shards = [torch.zeros(0, dtype=_sum_dtype(device), device=device)]
    # Meshes in one order on all ranks, since a rank of several meshes runs a collective in each.
    for (mesh, where), members in sorted(places.items(), key=lambda item: _mesh_ranks(item[0][0])):
        # (n,) for the n parameters of this mesh and device.
        zero = torch.zeros((), dtype=_sum_dtype(where), device=where)
        squares = torch.stack([norms.get(place, zero) for place in members]).square()
        if mesh is not None:
            squares = _over_mesh(squares, mesh, [gradients[place].param for place in members], communicators)
        names += [gradients[place].name for place in members]
        shards.append(squares.to(device))
    return names, shards


def _mesh_ranks(mesh: "DeviceMesh | None") -> list[int]:
    return [] if mesh is None else sorted(mesh.mesh.flatten().tolist())


def _squared_norms_of_shards(
    shards: Sequence[_Gradient], group: ProcessGroup, num_ranks: int, device: torch.device
) -> Tensor:
    """Return the (n,) squared norms of sharded averages, summed over the ranks of a group. All of them must call it."""
    # A rank without a piece of a parameter adds zero.
    norms = _gradient_norms(shards)
    zero = torch.zeros((), dtype=_sum_dtype(device), device=device)
    squares = torch.stack([norms.get(place, zero).to(device) for place in range(len(shards))]).square()
    return _gathered(squares, group, num_ranks).sum(dim=0)


def _gradient_norms(gradients: Sequence[_Gradient]) -> dict[int, Tensor]:
    """Return the () 2-norm of each gradient, by its position; those without entries or gradient are left out."""
    norms: dict[int, Tensor] = {}
    pieces = [gradient.local for gradient in gradients]
    # One fused call per device and dtype.
    for (device, _), places in group_by_device_dtype(pieces).items():
        together = [piece for place in places if (piece := pieces[place]) is not None]
        norms |= zip(places, torch._foreach_norm(together, 2, dtype=_sum_dtype(device)), strict=True)
    return norms


def _over_mesh(squares: Tensor, mesh: "DeviceMesh", params: Sequence[Any], communicators: Communicators) -> Tensor:
    """Return the (n,) squared norms of whole gradients from this rank's (n,) squared norms of pieces.

    `params` are the n parameters, all on `mesh`. All ranks of the mesh must call it.
    """
    if mesh.size() == 1:
        return squares
    ranks = _mesh_ranks(mesh)
    # (ranks, n), gathered in the process group of the whole mesh, since the groups of its axes may not be connected.
    squares = _gathered(squares, communicators[tuple(ranks)], len(ranks))
    # Rows from ascending ranks to the order of the mesh, then (*mesh.shape, n).
    if ranks != mesh.mesh.flatten().tolist():
        places = [ranks.index(rank) for rank in mesh.mesh.flatten().tolist()]
        squares = squares[upload(host_tensor(places), squares.device)]
    squares = squares.view(*mesh.mesh.shape, len(params))
    # Reduce the first axis that is left: pieces are added; of copies take the largest, since they are equal unless a
    # rank lacks the gradient.
    for axis in range(mesh.ndim):
        of_ranks = squares
        is_copy = [param.placements[axis].is_replicate() for param in params]
        if all(is_copy):
            squares = of_ranks.amax(dim=0)
        elif not any(is_copy):
            squares = of_ranks.sum(dim=0)
        else:
            squares = torch.where(
                upload(host_tensor(is_copy), squares.device), of_ranks.amax(dim=0), of_ranks.sum(dim=0)
            )
    return squares


def _gathered(values: Tensor, group: ProcessGroup, num_ranks: int) -> Tensor:
    """Return the (num_ranks, n) values of all ranks from this rank's (n,). All ranks of the group must call it."""
    return start_all_gather(values, num_ranks, group).wait().view(num_ranks, -1)
