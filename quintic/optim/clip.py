"""Clipping of gradients by their total norm, whatever ranks their pieces lie on.

The squared norm of each parameter's gradient is made where its pieces are, brought together along the axes of its mesh
(pieces of a sharded axis are added, copies of a replicated one count once), and added up. Only these numbers travel.
Gradients that the optimizer averages over ranks (`comms`) are averaged first, for the next step too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, group_ranks, has_process_group, start_all_gather
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import AVERAGING, layouts_of, sharding_ranks
from quintic.optim.layout.layouts import (
    local_tensor,
    placed_as,
    reject_plain_gradient,
    reject_sparse,
    writable_gradient,
)
from quintic.optim.muon import Muon, muon_in
from quintic.optim.rules.batches import group_by_device_dtype, scale_
from quintic.optim.rules.device import host_tensor, upload
from quintic.optim.rules.dynamo import disable_dynamo
from quintic.optim.rules.numbers import is_number
from quintic.optim.step.averaging import GroupAverages

if TYPE_CHECKING:  # importing it takes a second, which who has no DTensor should not pay
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
    """Keep a step from being too large: scale gradients down if their total norm is above `max_norm`; return that norm.

    Call it between `backward` and `step`, in place of `torch.nn.utils.clip_grad_norm_`; with `torch.amp.GradScaler`
    after `unscale_`. By default only gradients of AdamW groups are counted and scaled. Muon's update is orthogonalised:
    it has the same size whatever the size of the gradient. Clipping Muon's gradients does not bound its step; it only
    weights the steps in the momentum differently, and the large gradients of matrices would decide how much of the
    others is left.

    Gradients are multiplied in place by min(1, max_norm / (norm + 1e-6)), where norm is their total 2-norm. The norm is
    that of the whole gradients in every layout: pieces on different ranks are added, copies count once, gradients that
    are None count as zeros. A gradient that is still to be added up over ranks (a `DTensor` with `Partial`) is replaced
    by the sum, also on ranks that have none (see `docs/explanation/several-ranks.md`).

    Where the optimizer averages gradients, the norm is that of the averages, and they are made here instead of in the
    next step. With `comms="replicated"` they are in `p.grad` then; with `"sharded"` and `"sharded_sparse"` each rank
    keeps those of the shards it owns for the step, clipped, and `p.grad` is left alone (of `"sharded_sparse"` all rows
    travel). Gradients that are touched between this call and `step` are averaged again there, and not clipped.

    Ranks that share parameters, also through other ranks, clip by one norm: that of all their parameters, each counted
    once, by its name. Where ranks have parameters of one name that they do not share (copies that the optimizer knows
    nothing of, or experts of each rank), the largest counts. See `docs/explanation/several-ranks.md`.

    Collective: all these ranks (and those of `process_group`) must call it, with the same parameters in the
    same order, whichever gradients are None on which rank. Does not wait for the device unless `error_if_nonfinite`.
    Groups that are between two of their steps (`step_every`) are left alone: their gradients still add up.

    Args:
        optimizer: `quintic.Muon` whose gradients are clipped, also as Accelerate or Lightning have wrapped it; weights
            and state are not read.
        max_norm: upper bound of the total norm, > 0; `math.inf` measures without scaling.
        scope: `"adamw"`: gradients of AdamW groups; `"all"`: of all groups.
        error_if_nonfinite: raise if the norm is infinite or undefined; nothing was scaled then. Waits for the device.
        process_group: ranks that share no parameters, whose squared norms are added: those of the pipeline's stages,
            one rank of every stage. None if there are no stages, or if groups have a `process_group` of all stages.

    Returns:
        () float32: the total norm before clipping, on the device of the (first) gradients; the same on all ranks that
        parameters connect, and of `process_group`. Squares are added in float64 (where a device has none, in float32)
        in a fixed order, so that the norm is the one of a single device up to the last rounding to float32, which
        hardly ever falls the other way.

    Raises:
        TypeError: `optimizer` is not a `quintic.Muon`.
        ValueError: `scope` is unknown, `max_norm` is not positive, or a gradient is sparse.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; ranks were given different parameters or
            options; or this rank has a gradient as `Partial` that no rank had as such before the first step, or the
            first clipping: nothing was sent or scaled then, and only ranks that have such a gradient raise.

    Source: R. Pascanu et al. 2013, arXiv 1211.5063, algorithm 1; interface as `torch.nn.utils.clip_grad_norm_`.
    """
    optimizer = muon_in(optimizer, "clip_grad_norm_")
    if scope not in _SCOPES:
        raise ValueError(f"unknown scope {scope!r}; choose 'adamw' or 'all'")
    is_infinite = isinstance(max_norm, float) and max_norm == math.inf
    if not (is_infinite or is_number(max_norm, least=math.ulp(0.0))):
        raise ValueError(f"max_norm must be a positive number, got {max_norm!r}; math.inf measures without clipping")
    gradients, sharded = _collect_gradients(optimizer, scope)
    device = _device_of(optimizer, gradients)
    plans, runner = optimizer._plans, optimizer._plans.planned()
    names, squares = _squared_norms(gradients, device, plans.communicators)
    for ranks, shards in sharded.items():
        names += [shard.name for shard in shards]
        squares.append(_squared_norms_of_shards(shards, plans.communicators[ranks], len(ranks), device))
    squared = runner.consensus.connected.total(names, torch.cat(squares))
    if process_group is not None:
        squared = _gathered(squared.view(1), process_group, len(group_ranks(process_group))).sum()
    norm = squared.sqrt()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of the gradients in scope {scope!r} is {norm.item()}, so they cannot be clipped; nothing "
            f"was scaled (error_if_nonfinite=False scales anyway)"
        )
    if math.isfinite(max_norm):
        of_shards = [shard for shards in sharded.values() for shard in shards]
        pieces = [one.local for one in (*gradients, *of_shards) if one.local is not None]
        scale_(pieces, (max_norm / (norm + _NORM_EPS)).clamp(max=1.0))
        plans.precomputed.accept_gradients()
    return norm.float()


class _Gradient(NamedTuple):
    """A gradient that the scope counts."""

    name: str
    param: Tensor
    local: Tensor | None
    """This rank's piece, cut as the parameter is; or, where ranks shard the state, its shards of the average."""


def _collect_gradients(optimizer: Muon, scope: str) -> tuple[list[_Gradient], dict[tuple[int, ...], list[_Gradient]]]:
    """Return the gradients that lie as their parameters do, and those of which ranks have shards, by these ranks."""
    gradients: list[_Gradient] = []
    sharded: dict[tuple[int, ...], list[_Gradient]] = {}
    plans = optimizer._plans
    runner = plans.connected() if has_process_group() else plans.planned()
    steps_until_due = plans.steps_until_due()
    due = [
        group
        for group, pending in zip(plans.groups, steps_until_due, strict=True)
        if pending == 0 and scope in ("all", group.algorithm)
    ]
    numbers = [group.number for group in due]
    for tie in runner.ties:
        if steps_until_due[tie.head_group] == 0:
            tie.add_gradient()  # and with it the norm
    plans.precomputed.fresh()  # forgets what was touched, before what remains is touched here
    if has_process_group():
        runner.consensus.reduce_partial_gradients(numbers)
    averages: Mapping[int, GroupAverages] = {}
    if any(group.comms in AVERAGING for group in due):
        averages = runner.precompute_averages(numbers)
    for group in due:
        if group.number not in averages:
            rows = zip(group.param_names, group.params, strict=True)
            gradients += [_Gradient(name, param, _own_gradient(name, param)) for name, param in rows]
            continue
        averaged = zip(group.param_names, averages[group.number].tensors(), strict=True)
        ranks = sharding_ranks(group, layouts_of(group))
        target = sharded.setdefault(ranks, []) if ranks else gradients
        target += [_Gradient(name, param, average) for name, (param, average) in averaged]
    return gradients, sharded


def _own_gradient(name: str, param: Any) -> Tensor | None:
    """Return this rank's piece of a gradient that is not sparse, cut as the parameter is; None where there is none."""
    gradient: Any = writable_gradient(param)
    if gradient is None:
        return None
    reject_sparse(name, gradient)
    reject_plain_gradient(name, param, gradient)
    cut, wanted = getattr(gradient, "placements", None), getattr(param, "placements", None)
    if cut != wanted and cut is not None and wanted is not None:
        # Kept, so that `step` need not do it again.
        param.grad = gradient = placed_as(name, param, gradient)
    return local_tensor(gradient)


def _device_of(optimizer: Muon, gradients: Sequence[_Gradient]) -> torch.device:
    """Return the device of the first gradient; where this rank has none, of the first parameter."""
    for gradient in gradients:
        if gradient.local is not None:
            return gradient.local.device
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next((param.device for param in params), torch.device("cpu"))


def _wide(device: torch.device) -> torch.dtype:
    """Return the dtype in which squares are added."""
    return torch.float32 if device.type == "mps" else torch.float64


def _squared_norms(
    gradients: Sequence[_Gradient], device: torch.device, communicators: Communicators
) -> tuple[list[str], list[Tensor]]:
    """Return names of parameters, and on a device the squared norm of each whole gradient, (n,) for those of a mesh."""
    norms = _norms(gradients)
    places: dict[tuple[DeviceMesh | None, torch.device], list[int]] = {}
    for place, (_, param, _) in enumerate(gradients):
        mesh = getattr(param, "device_mesh", None)
        if mesh is None or mesh.get_coordinate() is not None:
            places.setdefault((mesh, param.device), []).append(place)
    names: list[str] = []
    shards = [torch.zeros(0, dtype=_wide(device), device=device)]
    # In one order everywhere: ranks of several meshes wait for each other.
    for (mesh, where), members in sorted(places.items(), key=lambda item: _ranks(item[0][0])):
        zero = torch.zeros((), dtype=_wide(where), device=where)
        squares = torch.stack([norms.get(place, zero) for place in members]).square()
        if mesh is not None:
            squares = _over_mesh(squares, mesh, [gradients[place].param for place in members], communicators)
        names += [gradients[place].name for place in members]
        shards.append(squares.to(device))
    return names, shards


def _ranks(mesh: "DeviceMesh | None") -> list[int]:
    return [] if mesh is None else sorted(mesh.mesh.flatten().tolist())


def _squared_norms_of_shards(
    shards: Sequence[_Gradient], group: ProcessGroup, num_ranks: int, device: torch.device
) -> Tensor:
    """Return the (n,) squared norms of what the ranks of a group have shards of, on `device`. All must call it."""
    norms = _norms(shards)
    zero = torch.zeros((), dtype=_wide(device), device=device)
    squares = torch.stack([norms.get(place, zero).to(device) for place in range(len(shards))]).square()
    return _gathered(squares, group, num_ranks).sum(dim=0)


def _norms(gradients: Sequence[_Gradient]) -> dict[int, Tensor]:
    """Return the 2-norm of each gradient that has entries, by its place."""
    norms: dict[int, Tensor] = {}
    pieces = [gradient.local for gradient in gradients]
    for (device, _), places in group_by_device_dtype(pieces).items():
        together = [piece for place in places if (piece := pieces[place]) is not None]
        norms |= zip(places, torch._foreach_norm(together, 2, dtype=_wide(device)), strict=True)
    return norms


def _over_mesh(squares: Tensor, mesh: "DeviceMesh", params: Sequence[Any], communicators: Communicators) -> Tensor:
    """Return (n,) squared norms of whole gradients, on every rank of their mesh, from those of pieces."""
    if mesh.size() == 1:
        return squares
    ranks = _ranks(mesh)
    # In the mesh's own process group, where collectives have run before: not in those of its axes.
    squares = _gathered(squares, communicators[tuple(ranks)], len(ranks))
    if ranks != mesh.mesh.flatten().tolist():
        places = [ranks.index(rank) for rank in mesh.mesh.flatten().tolist()]
        squares = squares[upload(host_tensor(places), squares.device)]
    squares = squares.view(*mesh.mesh.shape, len(params))
    for axis in range(mesh.ndim):
        of_ranks = squares
        is_copy = [param.placements[axis].is_replicate() for param in params]
        # Of copies the largest counts: they are equal, unless a rank lacks the gradient.
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
    """Return (num_ranks, n) from the (n,) of every rank. All ranks of the group must call it."""
    return start_all_gather(values, num_ranks, group).wait().view(num_ranks, -1)
