"""Runs a bucket of `comms="sharded"`: gradients to their owners, the owners' step, weights to everybody.

Averages are sums in the order of the ranks, in float32, divided and rounded once: the same on all ranks and in every
layout, whatever a library's own reduction would do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms import ProcessGroup, start_all_gather, start_all_to_all
from quintic.optim.device_memory import upload
from quintic.optim.pipeline import Observer, Operands, Passes, State, dense_gradient
from quintic.optim.plan import Bucket
from quintic.optim.sharded import CUT_KEYS, Part, Sharding, in_memory_order, shaped
from quintic.optim.travel_step import TravelMemory, as_rows, factors_of_pieces, orthogonalized_units

__all__ = ["ShardedMemory", "average_", "averaged", "step_sharded"]


class ShardedMemory(TravelMemory):
    """What a bucket with divided state keeps between steps, besides state."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Tensor] | None = None
        self.states: list[Mapping[str, Tensor]] = []
        self.elsewhere: tuple[list[Tensor], Tensor] | None = None
        """Counts of steps of parameters that only other ranks update, and where their first parts stand."""


def averaged(received: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of the first dimension's tensors, summed in order in float32 or wider and rounded once.

    Args:
        received: (ranks, entries).
        dtype: of the result.
    """
    total = received[0].to(torch.promote_types(received.dtype, torch.float32), copy=True)
    for part in received[1:]:
        total += part
    return total.div_(received.shape[0]).to(dtype)


def average_(
    tensors: Sequence[Tensor], num_ranks: int, group: ProcessGroup, max_workspace_bytes: int | None = None
) -> None:
    """Replace tensors by their means over the ranks, the same bits everywhere. All ranks of the group must call it.

    Args:
        tensors: of one dtype, the same shapes on all ranks; changed.
        num_ranks: of the group.
        group: the process group.
        max_workspace_bytes: bound of what is under way at a time (a single tensor may exceed it); None for none.
    """
    # What is sent, what is received, sums in float32, and the result.
    per_entry = 3 * tensors[0].itemsize + 4 if tensors else 1
    limit = 2**62 if max_workspace_bytes is None else max(1, max_workspace_bytes // per_entry)
    together: list[Tensor] = []
    entries = 0
    for tensor in tensors:
        if together and entries + tensor.numel() > limit:
            _average_together_(together, num_ranks, group)
            together, entries = [], 0
        together.append(tensor)
        entries += tensor.numel()
    _average_together_(together, num_ranks, group)


def _average_together_(tensors: Sequence[Tensor], num_ranks: int, group: ProcessGroup) -> None:
    numel = sum(tensor.numel() for tensor in tensors)
    if not numel:
        return
    size = -(-numel // num_ranks)
    flat = tensors[0].new_zeros(size * num_ranks)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:numel])
    received = start_all_to_all(flat, [size] * num_ranks, [size] * num_ranks, group).wait()
    mean = averaged(received.view(num_ranks, size), flat.dtype)
    whole = start_all_gather(mean, num_ranks, group).wait()[:numel]
    parts = whole.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


def step_sharded(
    bucket: Bucket,
    group: Mapping[str, Any],
    memory: ShardedMemory,
    state: State,
    process_group: ProcessGroup,
    go: Tensor,
    make_passes: Callable[[Operands], Passes],
    step_adamw: Callable[[Operands], None],
    observer: Observer | None,
) -> Iterator[None]:
    """Step a bucket of parts; yields twice, while a collective is under way.

    Args:
        bucket: of the plan.
        group: its parameter group.
        memory: the bucket's own.
        state: of all parameters.
        process_group: of the ranks.
        go: (parts,) int32 on the device: where it is zero a part stays as it was.
        make_passes: returns the passes over this rank's parts.
        step_adamw: steps them, for AdamW.
        observer: is shown what this rank orthogonalises, or None.
    """
    sharding = bucket.sharding
    assert sharding is not None
    params = group["params"]
    entries = sharding.entries
    mine, num_ranks = entries[sharding.position], len(sharding.ranks)
    send = torch.cat([_gradient(params[part.index], part) for part in sharding.parts])
    pending = start_all_to_all(send, entries, [mine] * num_ranks, process_group)
    del send
    yield
    gradients = averaged(pending.wait().view(num_ranks, mine), bucket.dtype)
    if memory.pieces is None:
        owned = [(part, params[part.index]) for part in sharding.owned]
        memory.pieces = [shaped(_run(param, part), part, param) for part, param in owned]
        memory.states = [_state(state[param], part, param) for part, param in owned]
    runs = gradients.split([part.numel for part in sharding.owned])
    active = Operands(
        bucket.members,
        memory.pieces,
        [shaped(run, part, params[part.index]) for run, part in zip(runs, sharding.owned, strict=True)],
        memory.states,
        len(sharding.owned),
    )
    if bucket.travel is not None:
        _step_matrices(bucket, group, memory, state, active, go, make_passes, observer)
    else:
        if active.params:
            step_adamw(active)
        _count_elsewhere(bucket, sharding, memory, params, state, go)
    del gradients, active
    most = max(entries)
    weights = torch.empty(most, dtype=bucket.dtype, device=bucket.device)
    if memory.pieces:
        torch.cat([_run(params[part.index], part) for part in sharding.owned], out=weights[:mine])
    pending = start_all_gather(weights, num_ranks, process_group)
    del weights
    yield
    of_ranks = pending.wait().view(num_ranks, most)
    targets, sources = [], []
    for owner, (found, of_owner) in enumerate(zip(of_ranks, sharding.of_owners, strict=True)):
        parts = sharding.parts[of_owner]
        if owner != sharding.position and parts:
            targets += [_run(params[part.index], part) for part in parts]
            sources += list(found[: entries[owner]].split([part.numel for part in parts]))
    if targets:
        torch._foreach_copy_(targets, sources)


def _step_matrices(
    bucket: Bucket,
    group: Mapping[str, Any],
    memory: ShardedMemory,
    state: State,
    active: Operands,
    go: Tensor,
    make_passes: Callable[[Operands], Passes],
    observer: Observer | None,
) -> None:
    travel = bucket.travel
    assert travel is not None
    if not active.params:
        return
    passes = make_passes(active)
    directions = passes.directions()
    units = directions.contiguous().view(len(active.params), *travel.exchange.unit_shape)
    updates, factors = orthogonalized_units(bucket, group, memory, state, units, go, observer)
    passes.apply(as_rows(updates), factors_of_pieces(factors, travel))


def _count_elsewhere(
    bucket: Bucket, sharding: Sharding, memory: ShardedMemory, params: Sequence[Tensor], state: State, go: Tensor
) -> None:
    """Count the steps of AdamW parameters of which only other ranks have state, so that all ranks save the same."""
    if memory.elsewhere is None:
        # A parameter's parts may be in several buckets: it is counted with its first one.
        rows = [(number, state[params[part.index]]) for number, part in enumerate(sharding.parts) if part.start == 0]
        others = [(number, found["step"]) for number, found in rows if not found["exp_avg"].numel()]
        numbers = upload(torch.tensor([number for number, _ in others], dtype=torch.int64), bucket.device)
        memory.elsewhere = [step for _, step in others], numbers
    steps, numbers = memory.elsewhere
    if steps:
        torch._foreach_add_(steps, list(go[numbers].to(steps[0].dtype).unbind()))


def _run(param: Tensor, part: Part) -> Tensor:
    return in_memory_order(param.detach())[part.start : part.stop]


def _gradient(param: Tensor, part: Part) -> Tensor:
    gradient = param.grad
    if gradient is None:
        return param.new_zeros(part.numel)
    dense = dense_gradient(param, gradient, part.name).detach()
    return in_memory_order(dense)[part.start : part.stop].to(param.dtype)


def _state(found: Mapping[str, Tensor], part: Part, param: Tensor) -> dict[str, Tensor]:
    """Return the state of one part: of the flat tensors that hold all parts of the parameter on this rank its run."""
    cut = {key: value for key, value in found.items() if key in CUT_KEYS}
    runs = {key: shaped(value[part.offset : part.offset + part.numel], part, param) for key, value in cut.items()}
    return {**found, **runs}
