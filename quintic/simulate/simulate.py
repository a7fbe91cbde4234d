"""A step on many ranks, planned on one machine without them: who computes, sends and keeps how much.

The plans are those that the ranks would make (`gathered.shared_buckets`, `planning.local_buckets`), from parameters
that have shapes only. Owners are assigned once; what one rank does in a bucket follows from the exchange's geometry,
for all ranks at a time. Where copies of parameters are stepped by ranks of their own, that is done once for those that
do the same. Nothing is allocated and nothing is communicated.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.errors import ConfigError
from quintic.optim.comms.sharing import travelling
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, numel_of, size_of
from quintic.optim.muon import Muon
from quintic.optim.plan.bucket import Gathered, Local, ParameterUnit
from quintic.optim.plan.exchange import Cargo, traffic_of
from quintic.optim.plan.gathered import SharedBucket, gathered_buckets, shared_buckets
from quintic.optim.plan.memory.buckets import needs_of
from quintic.optim.plan.order import arranged
from quintic.optim.plan.plan import small_bytes
from quintic.optim.plan.planning import local_buckets
from quintic.optim.plan.replicas import ReplicaChoice, choose_ways, divided_layouts, renumbered
from quintic.optim.plan.schedule import Schedule, Stages, overlapping_bytes
from quintic.optim.state.owners import balance
from quintic.simulate.parallelism import layouts_by_name

__all__ = ["BucketLoad", "Simulation", "simulate_plan"]


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketLoad:
    """The cost of one bucket on every rank; tensors are (ranks,) int64, and bool for `present`."""

    group: int
    method: str
    shapes: tuple[tuple[int, int], ...]
    """(m, n) of the matrices of one unit; empty for AdamW."""
    num_matrices: int
    """Matrices in the whole model; 0 for AdamW."""
    dtype: torch.dtype
    present: Tensor
    """True for ranks that have the bucket in their plan."""
    flops: Tensor
    workspace_bytes: Tensor
    bytes_sent: Tensor
    bytes_received: Tensor
    bytes_between: Tensor
    """Sent to ranks of other nodes; zeros where nothing is known of nodes."""
    cargo: Cargo | None = None
    """The bucket's exchange, and the bytes of its messages; None for no traffic."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """The costs of one step on `num_ranks` ranks."""

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    bucket_loads: tuple[BucketLoad, ...]
    """In the order of the plans. A bucket that only some ranks have, because it depends on what they keep, is one."""
    state_bytes: Tensor
    """Bytes of the optimizer's state on each rank, (ranks,) int64."""
    workspace_bytes: Tensor
    """The most temporary memory on each rank, as its plan has it, (ranks,) int64."""
    choices: tuple[ReplicaChoice, ...] = ()
    """The ranks that divide the work on parameters with several copies, where `replicas="auto"` chose them."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.mesh)

    @property
    def flops(self) -> Tensor:
        """Return the floating-point operations of orthogonalisation on each rank, (ranks,) int64."""
        return _sum([load.flops for load in self.bucket_loads], self.num_ranks)

    @property
    def bytes_sent(self) -> Tensor:
        """Return the bytes that leave each rank for others, (ranks,) int64."""
        return _sum([load.bytes_sent for load in self.bucket_loads], self.num_ranks)

    @property
    def bytes_received(self) -> Tensor:
        """Return the bytes that each rank gets from others, (ranks,) int64."""
        return _sum([load.bytes_received for load in self.bucket_loads], self.num_ranks)

    @property
    def bytes_between(self) -> Tensor:
        """Return the bytes that leave each rank for ranks of other nodes, (ranks,) int64."""
        return _sum([load.bytes_between for load in self.bucket_loads], self.num_ranks)

    @property
    def balance(self) -> float:
        """Return the operations of the busiest rank over the mean; 1 is perfect."""
        return balance(self.flops.tolist())  # in integers that do not overflow


def simulate_plan(
    optimizer: Muon, mesh: Sequence[int], names: Sequence[str], *, device: str = "cuda", node_size: int | None = None
) -> Simulation:
    """Return the costs of one step of an optimizer on a mesh of ranks.

    Args:
        optimizer: of the whole model's parameters, which may be on the meta device. Its `comms` and `process_group` do
            not count: `names` say how the model is laid out.
        mesh: ranks along each dimension, such as (8, 4).
        names: the kind of each dimension, see `parallelism.PARALLELISMS`.
        device: the ranks' type of device; the choice of methods and kernels depends on it. Kernels are those that
            would be chosen here: Triton's need an installed Triton.
        node_size: consecutive ranks that are on one node; None if nothing is known of nodes. Then all ranks divide the
            work of groups with `replicas="auto"`.

    Raises:
        ConfigError: the mesh, a name or the node does not fit; the message begins with `mesh=`, `layout=` or
            `node_size=`.
    """
    if node_size is not None and node_size < 1:
        raise ConfigError(f"node_size={node_size}: give at least one rank per node")
    shadows = _Shadows(device)
    groups = [
        replace(
            group,
            comms="averaged" if "dp" in names else "none",
            params=tuple(shadows.of(param, param.shape) for param in group.params),
        )
        for group in optimizer.typed_groups
    ]
    num_ranks = math.prod(mesh)
    everywhere = layouts_by_name(groups, mesh, names)
    layouts: list[list[Layout | None]] = [
        travelling(group, whole) if num_ranks > 1 else [None] * len(whole)
        for group, whole in zip(groups, everywhere, strict=True)
    ]
    nodes = [rank // (node_size or num_ranks) for rank in range(num_ranks)]
    choices = choose_ways(groups, layouts, {} if node_size is None else {tuple(range(num_ranks)): nodes})
    alike = [(one, shared_buckets(groups, one.layouts)[0]) for one in _alike(groups, layouts, choices, nodes)]
    loads: list[BucketLoad] = []
    moving: list[list[_Moving]] = [[] for _ in alike]
    counted: set[tuple[int, ParameterUnit]] = set()
    for number, (group, sent, whole) in enumerate(zip(groups, layouts, everywhere, strict=True)):
        for (ranks, shared), moves in zip(alike, moving, strict=True):
            for one in shared:
                if one.key.group != number:
                    continue
                stages = _stages_of_ranks(one)
                loads.append(_travelling_load(one, stages, ranks.like, nodes, counted))
                if not one.exchange.is_local:
                    buckets = gathered_buckets(one, ranks.layouts[number], one.exchange.ranks[0])
                    moves += [_Moving(bucket, stages) for bucket in buckets]
        still = [index for index, layout in enumerate(sent) if layout is None]
        loads += _local_loads(number, group, still, whole, num_ranks, shadows)
    orders = optimizer.current.orders.resolved(groups)
    workspaces = torch.zeros(num_ranks, dtype=torch.int64)
    for (ranks, _), moves in zip(alike, moving, strict=True):
        in_order, schedule = arranged([one.bucket for one in moves], groups, orders)
        stages_of = {id(one.bucket): dict(zip(one.bucket.ranks, one.stages, strict=True)) for one in moves}
        _fill_workspaces_(workspaces, [stages_of[id(bucket)] for bucket in in_order], schedule, loads, ranks.like)
    workspaces += small_bytes(param.device for group in groups for param in group.params)
    state = _state_bytes(optimizer, everywhere, num_ranks)
    return Simulation(tuple(mesh), tuple(names), tuple(loads), state, workspaces, tuple(choices.values()))


class _Alike(NamedTuple):
    """Ranks whose plans differ in nothing but the numbers of the ranks."""

    layouts: list[list[Layout | None]]
    """As one of them sees them."""
    like: dict[int, int]
    """Each of these ranks -> its counterpart in these layouts."""


def _alike(
    groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choices: Mapping[tuple[int, ...], ReplicaChoice],
    nodes: Sequence[int],
) -> list[_Alike]:
    """Return all ranks, those with equal plans together."""
    by_plan: dict[Any, tuple[_Alike, list[int]]] = {}
    left = dict.fromkeys(range(len(nodes)))
    known = {tuple(left): nodes}
    while left:
        divided = divided_layouts(groups, layouts, choices, known, next(iter(left)))
        distinct = list(dict.fromkeys(layout for of_group in divided for layout in of_group if layout is not None))
        everyone = sorted({rank for layout in distinct for rank in layout.ranks}) or list(left)
        numbers = {rank: number for number, rank in enumerate(everyone)}
        cuts = tuple((tuple(numbers[rank] for rank in one.ranks), one.boxes, one.copies) for one in distinct)
        key = cuts, tuple(renumbered(nodes[rank] for rank in everyone))
        alike, like = by_plan.setdefault(key, (_Alike(divided, {}), everyone))
        for rank in [rank for rank in left if all(rank in layout.ranks for layout in distinct)]:
            alike.like[rank] = like[numbers[rank]]
            del left[rank]
    return [alike for alike, _ in by_plan.values()]


class _Moving(NamedTuple):
    """A bucket with collectives, as the first rank has it, and the memory that each of its ranks needs for it."""

    bucket: Gathered
    stages: list[Stages]


class _Shadow(Tensor):
    """A tensor on the meta device that says it is on another one, which need not exist here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # views are plain tensors
    claimed: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of the simulated ranks."""
        return self.claimed


class _Shadows:
    """Tensors with shape, dtype and the ranks' device, but without memory; equal ones are the same."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._made: dict[Any, _Shadow] = {}

    def of(self, param: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the shadow of a part of a parameter that has `shape`, in the parameter's order of dimensions."""
        strides = param.stride()
        order = sorted(range(param.ndim), key=lambda dim: (-strides[dim], dim))
        key = (tuple(shape), tuple(order), param.dtype)
        if key not in self._made:
            made = torch.empty_permuted(tuple(shape), order, dtype=param.dtype, device="meta").as_subclass(_Shadow)
            made.claimed = self._device
            self._made[key] = made
        return self._made[key]


def _travelling_load(
    shared: SharedBucket,
    stages: Sequence[Stages],
    like: Mapping[int, int],
    nodes: Sequence[int],
    counted: set[tuple[int, ParameterUnit]],
) -> BucketLoad:
    """Return the cost of a bucket on the ranks that have it, or one like it: `like` has the bucket's rank for each.

    Units whose matrices were not `counted` before, as (group, unit), are added to that set.
    """
    exchange, kinds, cargo = shared.exchange, shared.units.kinds, shared.cargo
    positions = torch.tensor([exchange.ranks.index(rank) for rank in like.values()])

    def of_all(of_ranks: Tensor) -> Tensor:
        """Return numbers of all ranks, given those of the bucket's; zero where a rank has nothing like it."""
        return of_ranks.new_zeros(len(nodes)).index_copy_(0, torch.tensor(list(like)), of_ranks[positions])

    counts = torch.tensor(exchange.counts)
    present = counts > 0 if exchange.is_local else torch.ones_like(counts, dtype=torch.bool)
    sent = received = between = torch.zeros_like(counts)
    if cargo is not None:
        sent, received = traffic_of(cargo)
        between = traffic_of(cargo, torch.tensor(renumbered(nodes[rank] for rank in exchange.ranks))).sent
    units = {(shared.key.group, unit) for unit in shared.units.everywhere} - counted
    counted |= units
    return BucketLoad(
        group=shared.key.group,
        method="function" if kinds[0].form is None else str(kinds[0].form),
        shapes=tuple(kind.shape for kind in kinds),
        num_matrices=len(kinds) * len(units),
        dtype=shared.key.of.dtype,
        present=of_all(present),
        flops=of_all(counts * shared.units.flops),
        workspace_bytes=of_all(torch.tensor([stage.most for stage in stages]) * present),
        bytes_sent=of_all(sent),
        bytes_received=of_all(received),
        bytes_between=of_all(between),
        cargo=cargo,
    )


def _stages_of_ranks(shared: SharedBucket) -> list[Stages]:
    """Return the temporary bytes on each rank: computed once for ranks that have and do the same."""
    alike: dict[Hashable, Stages] = {}
    needs = needs_of(shared.exchange)
    for position, need in enumerate(needs):
        if need not in alike:
            alike[need] = shared.stages(replace(shared.exchange, position=position))
    return [alike[need] for need in needs]


def _fill_workspaces_(
    workspaces: Tensor,
    stages: Sequence[Mapping[int, Stages]],
    schedule: Schedule,
    loads: Sequence[BucketLoad],
    like: Mapping[int, int],
) -> None:
    """Fill in the most temporary bytes on each rank, (ranks,) int64: computed once for ranks that need the same.

    `stages` are those of the buckets with collectives, in the order in which they are worked on, by rank.
    """
    alone = [load.workspace_bytes.tolist() for load in loads if load.cargo is None]
    alike: dict[Any, int] = {}
    for rank, other in like.items():
        key = tuple(of_bucket[other] for of_bucket in stages), max((sizes[rank] for sizes in alone), default=0)
        if key not in alike:
            alike[key] = overlapping_bytes(key[0], schedule, key[1])
        workspaces[rank] = alike[key]


def _local_loads(
    number: int,
    group: Group,
    indices: Sequence[int],
    layouts: Sequence[Layout],
    num_ranks: int,
    shadows: _Shadows,
) -> Iterator[BucketLoad]:
    """Yield the buckets that ranks step alone, once for all ranks that keep boxes of the same shapes."""
    distinct = list(dict.fromkeys(layouts[index] for index in indices))
    sizes = [[size_of(layout.box_of(rank)) for rank in range(num_ranks)] for layout in distinct]
    alike: dict[Any, list[int]] = {}
    for rank, shapes in enumerate(zip(*sizes, strict=True)):
        alike.setdefault(shapes, []).append(rank)
    for shapes, ranks in alike.items():
        shape_of = dict(zip(distinct, shapes, strict=True))
        params = list(group.params)
        for index in indices:
            params[index] = shadows.of(params[index], shape_of[layouts[index]])
        present = torch.zeros(num_ranks, dtype=torch.bool)
        present[ranks] = True
        for bucket in local_buckets(number, replace(group, params=tuple(params)), indices):
            yield _local_load(bucket, present)


def _local_load(bucket: Local, present: Tensor) -> BucketLoad:
    zeros = torch.zeros(len(present), dtype=torch.int64)
    is_muon = bucket.shape is not None
    return BucketLoad(
        group=bucket.group,
        method=bucket.method,
        shapes=() if bucket.shape is None else (bucket.shape,),
        num_matrices=bucket.num_matrices if is_muon else 0,
        dtype=bucket.dtype,
        present=present,
        flops=bucket.flops * present,
        workspace_bytes=bucket.workspace_bytes * present,
        bytes_sent=zeros,
        bytes_received=zeros,
        bytes_between=zeros,
    )


def _state_bytes(optimizer: Muon, layouts: Sequence[Sequence[Layout]], num_ranks: int) -> Tensor:
    """Return the bytes of state on each rank: tensors of the parameter's shape are cut like it, others are whole."""
    per_entry: dict[Layout, int] = {}
    whole, states = 0, optimizer.state
    for group, its_layouts in zip(optimizer.typed_groups, layouts, strict=True):
        for param, layout in zip(group.params, its_layouts, strict=True):
            for value in states[param].values():
                if value.shape == param.shape:
                    per_entry[layout] = per_entry.get(layout, 0) + value.dtype.itemsize
                else:
                    whole += value.numel() * value.dtype.itemsize
    total = torch.full((num_ranks,), whole)
    for layout, size in per_entry.items():
        total += size * torch.tensor([numel_of(layout.box_of(rank)) for rank in range(num_ranks)])
    return total


def _sum(values: Sequence[Tensor], num_ranks: int) -> Tensor:
    return sum(values, torch.zeros(num_ranks, dtype=torch.int64))
