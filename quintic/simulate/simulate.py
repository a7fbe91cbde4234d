"""Simulation of an optimizer's step on many ranks: operations, messages and memory of each rank, on one machine.

The plans are made by the functions that ranks use (`gathered.shared_buckets`, `planning.local_buckets`), from
parameters on the meta device. Nothing is allocated or communicated. Phases of `simulate_plan`:

1. lay out all parameters on the mesh, and choose the ranks that share the work on copies;
2. find classes of ranks with equal plans (`_rank_classes`), so that each plan is made only once;
3. buckets with collectives: assign owners once, and derive each rank's load from the exchange;
4. buckets without collectives: one plan for all ranks that hold boxes of the same shapes;
5. add up temporary memory, along each rank's schedule, and the state.

All tensors in the results are (ranks,) int64 unless noted.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.errors import ConfigError
from quintic.optim.comms.sharing import gather_layouts
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, size_of
from quintic.optim.layout.pieces import Piece
from quintic.optim.muon import Muon
from quintic.optim.plan.bucket import Bucket, Gathered
from quintic.optim.plan.exchange import ExchangeBytes, traffic_of
from quintic.optim.plan.gathered import SharedBucket, gathered_buckets, shared_buckets
from quintic.optim.plan.order import order_buckets
from quintic.optim.plan.plan import bytes_beyond_gradients, small_bytes
from quintic.optim.plan.planning import local_buckets
from quintic.optim.plan.replicas import ReplicaChoice, choose_replica_strategies, layouts_for_work, renumbered
from quintic.optim.plan.schedule import PhaseBytes, Schedule, overlapping_bytes
from quintic.optim.plan.workspace.buckets import memory_keys
from quintic.optim.state.owners import balance
from quintic.optim.validate import check_offloaded
from quintic.simulate.meta_tensors import MetaTensors
from quintic.simulate.parallelism import layouts_by_name
from quintic.simulate.stored import StoredBytes, cut_state_bytes, cut_state_traffic, offload_buffer_bytes, stored_bytes

__all__ = ["BucketLoad", "Simulation", "simulate_plan"]


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketLoad:
    """The load of one bucket on every rank; tensors are (ranks,) int64, `present` is (ranks,) bool."""

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
    """Bytes sent to ranks of other nodes; zeros without `node_size`."""
    exchange_bytes: ExchangeBytes | None = None
    """The bucket's exchange with the bytes of its messages; None without messages."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """The loads of one step on `num_ranks` ranks."""

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    bucket_loads: tuple[BucketLoad, ...]
    """The buckets in the order of the groups; a bucket that only some ranks have is included with its `present`."""
    stored: StoredBytes
    """Bytes of weights and state on each rank."""
    workspace_bytes: Tensor
    """Peak temporary memory of each rank by its plan, (ranks,) int64; with offload, all have the buffers of rank 0."""
    state_traffic: tuple[Tensor, Tensor]
    """For 8-bit state whose groups ranks share, the bytes that each rank sends, and receives, and those sent to other
    nodes."""
    choices: tuple[ReplicaChoice, ...] = ()
    """How ranks share the work on parameters with several copies, if `replicas="auto"` had to choose."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.mesh)

    @property
    def state_bytes(self) -> Tensor:
        """Return the bytes of the optimizer's state on each rank, in host memory too, (ranks,) int64."""
        return self.stored.state

    @property
    def flops(self) -> Tensor:
        """Return the floating-point operations of orthogonalisation on each rank, (ranks,) int64."""
        return _sum([load.flops for load in self.bucket_loads], self.num_ranks)

    @property
    def bytes_sent(self) -> Tensor:
        """Return the bytes that each rank sends, (ranks,) int64."""
        return _sum([load.bytes_sent for load in self.bucket_loads], self.num_ranks) + self.state_traffic[0]

    @property
    def bytes_received(self) -> Tensor:
        """Return the bytes that each rank receives, (ranks,) int64."""
        return _sum([load.bytes_received for load in self.bucket_loads], self.num_ranks) + self.state_traffic[0]

    @property
    def bytes_between(self) -> Tensor:
        """Return the bytes that each rank sends to ranks of other nodes, (ranks,) int64."""
        return _sum([load.bytes_between for load in self.bucket_loads], self.num_ranks) + self.state_traffic[1]

    @property
    def balance(self) -> float:
        """Return the operations of the busiest rank divided by the mean; 1 is perfect."""
        return balance(self.flops.tolist())  # Python's integers, because the sum may overflow int64


def simulate_plan(
    optimizer: Muon, mesh: Sequence[int], names: Sequence[str], *, device: str = "cuda", node_size: int | None = None
) -> Simulation:
    """Return the loads of one step of an optimizer on a mesh of ranks.

    Args:
        optimizer: an optimizer of the whole model's parameters, which may be on the meta device. Its `comms` and
            `process_group` are ignored; `names` determine the layout of the model.
        mesh: number of ranks along each dimension, such as (8, 4).
        names: kind of each dimension, see `parallelism.PARALLELISMS`.
        device: type of the ranks' devices, which determines methods and kernels. Triton's kernels are only counted if
            Triton is installed here.
        node_size: number of consecutive ranks on one node; None if unknown. Without it, all ranks share the work of
            groups with `replicas="auto"`.

    Raises:
        ConfigError: the mesh, a name or the node size is invalid. The message begins with `mesh=`, `layout=` or
            `node_size=`.
        ValueError: the layout cuts groups of 8-bit state that is offloaded.
    """
    if node_size is not None and node_size < 1:
        raise ConfigError(f"node_size={node_size}: give at least one rank per node")
    meta_tensors = MetaTensors(device)
    groups = [
        replace(
            group,
            comms="averaged" if "dp" in names else "none",
            params=tuple(meta_tensors.of(param, param.shape) for param in group.params),
        )
        for group in optimizer._plans.current_groups()
    ]
    num_ranks = math.prod(mesh)
    everywhere = layouts_by_name(groups, mesh, names)
    for group, whole in zip(groups, everywhere, strict=True):
        if group.state_dtype == "int8" and group.offload:
            for name, layout in zip(group.param_names, whole, strict=True):
                check_offloaded(name, layout)
    layouts: list[list[Layout | None]] = [
        gather_layouts(group, whole) if num_ranks > 1 else [None] * len(whole)
        for group, whole in zip(groups, everywhere, strict=True)
    ]
    # Without `node_size` all ranks count as one node, so that nothing is sent between nodes.
    nodes = [rank // (node_size or num_ranks) for rank in range(num_ranks)]
    choices = choose_replica_strategies(groups, layouts, {} if node_size is None else {tuple(range(num_ranks)): nodes})
    # Each class of ranks with the buckets that its ranks share.
    classes = [(one, shared_buckets(groups, one.layouts)[0]) for one in _rank_classes(groups, layouts, choices, nodes)]
    loads: list[BucketLoad] = []
    comm_buckets: list[list[_CommBucket]] = [[] for _ in classes]
    counted: set[tuple[int, Piece]] = set()
    local: list[Bucket] = []
    for number, (group, sent, whole) in enumerate(zip(groups, layouts, everywhere, strict=True)):
        for (ranks, shared), comms in zip(classes, comm_buckets, strict=True):
            for one in shared:
                if one.key.group != number:
                    continue
                phase_bytes = _bytes_of_ranks(one)
                loads.append(_comm_load(one, phase_bytes, ranks.like, nodes, counted))
                if not one.exchange.is_local:
                    buckets = gathered_buckets(one, ranks.layouts[number], one.exchange.ranks[0])
                    comms += [_CommBucket(bucket, phase_bytes) for bucket in buckets]
        still = [index for index, layout in enumerate(sent) if layout is None]
        for bucket, present in _local_buckets(number, group, still, whole, num_ranks, meta_tensors):
            local.append(bucket)
            loads.append(_local_load(bucket, present))
    orders = optimizer._plans.orders.resolved(groups)
    workspaces = torch.zeros(num_ranks, dtype=torch.int64)
    for (ranks, _), comms in zip(classes, comm_buckets, strict=True):
        in_order, schedule = order_buckets([one.bucket for one in comms], groups, orders)
        bytes_of = {id(one.bucket): dict(zip(one.bucket.ranks, one.phase_bytes, strict=True)) for one in comms}
        _fill_workspaces_(workspaces, [bytes_of[id(bucket)] for bucket in in_order], schedule, loads, ranks.like)
    if num_ranks == 1 and optimizer._plans.frees_all_gradients():
        workspaces.fill_(bytes_beyond_gradients(local))
    # Flags and tables that kernels need on every rank.
    workspaces += small_bytes(param.device for group in groups for param in group.params)
    workspaces += cut_state_bytes(groups, everywhere, num_ranks)
    if any(group.offload for group in groups):
        workspaces += offload_buffer_bytes(groups, everywhere, classes[0][0].layouts)
    stored = stored_bytes(groups, everywhere, num_ranks)
    traffic = cut_state_traffic(groups, everywhere, nodes)
    return Simulation(tuple(mesh), tuple(names), tuple(loads), stored, workspaces, traffic, tuple(choices.values()))


class _RankClass(NamedTuple):
    """Ranks whose plans are equal up to a renumbering of the ranks."""

    layouts: list[list[Layout | None]]
    """The layouts of one of their plans, which stands for all."""
    like: dict[int, int]
    """Each rank of the class -> the rank that stands for it in `layouts`."""


def _rank_classes(
    groups: Sequence[Group],
    layouts: Sequence[Sequence[Layout | None]],
    choices: Mapping[tuple[int, ...], ReplicaChoice],
    nodes: Sequence[int],
) -> list[_RankClass]:
    """Divide all ranks into classes with equal plans."""
    by_plan: dict[Any, tuple[_RankClass, list[int]]] = {}
    left = dict.fromkeys(range(len(nodes)))
    known = {tuple(left): nodes}
    while left:
        divided = layouts_for_work(groups, layouts, choices, known, next(iter(left)))
        distinct = list(dict.fromkeys(layout for of_group in divided for layout in of_group if layout is not None))
        everyone = sorted({rank for layout in distinct for rank in layout.ranks}) or list(left)
        numbers = {rank: number for number, rank in enumerate(everyone)}
        # Renumber ranks and nodes from 0: plans that are then equal differ only in the numbers.
        boxes = tuple((tuple(numbers[rank] for rank in one.ranks), one.boxes, one.copies) for one in distinct)
        key = boxes, tuple(renumbered(nodes[rank] for rank in everyone))
        alike, like = by_plan.setdefault(key, (_RankClass(divided, {}), everyone))
        for rank in [rank for rank in left if all(rank in layout.ranks for layout in distinct)]:
            alike.like[rank] = like[numbers[rank]]
            del left[rank]
    return [alike for alike, _ in by_plan.values()]


class _CommBucket(NamedTuple):
    """A bucket with collectives as planned by its first rank, and the temporary memory of each of its ranks."""

    bucket: Gathered
    phase_bytes: list[PhaseBytes]


def _comm_load(
    shared: SharedBucket,
    phase_bytes: Sequence[PhaseBytes],
    like: Mapping[int, int],
    nodes: Sequence[int],
    counted: set[tuple[int, Piece]],
) -> BucketLoad:
    """Return the load of a bucket with several ranks, on all ranks of a class.

    Args:
        shared: the bucket as planned for the class.
        phase_bytes: temporary memory of each of the bucket's ranks.
        like: each rank of the class -> the rank of the bucket that stands for it.
        nodes: node of each rank.
        counted: (group, unit) pairs whose matrices earlier loads include; the bucket's units are added.
    """
    exchange, kinds, exchange_bytes = shared.exchange, shared.units.kinds, shared.exchange_bytes
    positions = torch.tensor([exchange.ranks.index(rank) for rank in like.values()])

    def to_all_ranks(values: Tensor) -> Tensor:
        """Spread values of the bucket's ranks to all ranks, (ranks,); zero for ranks of other classes."""
        return values.new_zeros(len(nodes)).index_copy_(0, torch.tensor(list(like)), values[positions])

    counts = torch.tensor(exchange.counts)
    present = counts > 0 if exchange.is_local else torch.ones_like(counts, dtype=torch.bool)
    sent = received = between = torch.zeros_like(counts)
    if exchange_bytes is not None:
        sent, received = traffic_of(exchange_bytes)
        hosts = torch.tensor(renumbered(nodes[rank] for rank in exchange.ranks))
        between, _ = traffic_of(exchange_bytes, hosts)
    units = {(shared.key.group, unit) for unit in shared.units.all} - counted
    counted |= units
    return BucketLoad(
        group=shared.key.group,
        method="function" if kinds[0].form is None else str(kinds[0].form),
        shapes=tuple(kind.shape for kind in kinds),
        num_matrices=len(kinds) * len(units),
        dtype=shared.key.spec.dtype,
        present=to_all_ranks(present),
        flops=to_all_ranks(counts * shared.units.flops),
        workspace_bytes=to_all_ranks(torch.tensor([phase.most for phase in phase_bytes]) * present),
        bytes_sent=to_all_ranks(sent),
        bytes_received=to_all_ranks(received),
        bytes_between=to_all_ranks(between),
        exchange_bytes=exchange_bytes,
    )


def _bytes_of_ranks(shared: SharedBucket) -> list[PhaseBytes]:
    """Return the temporary memory of each of a bucket's ranks, computed once for ranks with equal needs."""
    alike: dict[Hashable, PhaseBytes] = {}
    needs = memory_keys(shared.exchange)
    for position, need in enumerate(needs):
        if need not in alike:
            alike[need] = shared.phase_bytes(replace(shared.exchange, position=position))
    return [alike[need] for need in needs]


def _fill_workspaces_(
    workspaces: Tensor,
    phase_bytes: Sequence[Mapping[int, PhaseBytes]],
    schedule: Schedule,
    loads: Sequence[BucketLoad],
    like: Mapping[int, int],
) -> None:
    """Set the peak temporary bytes of each rank of a class in `workspaces`, (ranks,) int64.

    `phase_bytes` has rank -> temporary memory for each bucket with collectives, in the order of execution. Ranks with
    equal memory are computed once.
    """
    local = [load.workspace_bytes.tolist() for load in loads if load.exchange_bytes is None]
    alike: dict[Any, int] = {}
    for rank, other in like.items():
        key = tuple(of_bucket[other] for of_bucket in phase_bytes), max((sizes[rank] for sizes in local), default=0)
        if key not in alike:
            alike[key] = overlapping_bytes(key[0], schedule, key[1])
        workspaces[rank] = alike[key]


def _local_buckets(
    number: int,
    group: Group,
    indices: Sequence[int],
    layouts: Sequence[Layout],
    num_ranks: int,
    meta_tensors: MetaTensors,
) -> Iterator[tuple[Bucket, Tensor]]:
    """Yield buckets without collectives, one for all ranks that hold boxes of the same shapes, and which ranks do."""
    distinct = list(dict.fromkeys(layouts[index] for index in indices))
    sizes = [[size_of(layout.box_of(rank)) for rank in range(num_ranks)] for layout in distinct]
    alike: dict[Any, list[int]] = {}
    for rank, shapes in enumerate(zip(*sizes, strict=True)):
        alike.setdefault(shapes, []).append(rank)
    for shapes, ranks in alike.items():
        shape_of = dict(zip(distinct, shapes, strict=True))
        params = list(group.params)
        for index in indices:
            params[index] = meta_tensors.of(params[index], shape_of[layouts[index]])
        present = torch.zeros(num_ranks, dtype=torch.bool)
        present[ranks] = True
        for bucket in local_buckets(number, replace(group, params=tuple(params)), indices):
            yield bucket, present


def _local_load(bucket: Bucket, present: Tensor) -> BucketLoad:
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


def _sum(values: Sequence[Tensor], num_ranks: int) -> Tensor:
    return sum(values, torch.zeros(num_ranks, dtype=torch.int64))
