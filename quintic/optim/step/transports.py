"""The messages of a bucket while it is stepped, and the shapes in which matrices travel.

`bucket_step.py` has the algorithm; this file brings its tensors from one rank to another. A bucket that this rank has
whole needs no transport. The two other kinds of buckets have one each:

    Gather      matrices lie in pieces on several ranks (FSDP2, tensor parallelism), or every rank has them and ranks
                divide the work (`comms="averaged"`). Parameters and state stay where they are.
                    directions of pieces    -> the owners of the matrices
                    updates, their numbers  -> the ranks that hold the pieces
    Shard       every rank has the weights and its own gradient; state lies with owners (`comms="sharded"`).
                    gradients               -> the owners of their entries, who average them
                    weights                 -> all ranks

Every method that starts a message returns a function that waits for it and returns the received tensors. All ranks of
the process group must call the method and this function in the same order, with or without gradients, or they wait for
each other forever. On CUDA devices the function makes the current stream wait, and the host does not.

A unit is the smallest box of a parameter that holds whole matrices, one of each kind (`layout/views.py`). Matrices
travel as units, (units, *unit shape), and are orthogonalised by kind, (units, m, n): `split_units`, `join_units`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup
from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Box
from quintic.optim.layout.packing import MemorySpan, Packing, span_of
from quintic.optim.layout.pieces import Piece
from quintic.optim.plan.bucket import Gathered, Sharded, Units
from quintic.optim.rules.device import host_tensor, upload
from quintic.optim.rules.rule import EXP_AVG, STEP
from quintic.optim.rules.stages import vector_shape
from quintic.optim.state.shards import state_of_shard, view_as_shard
from quintic.optim.step.operands import GRADIENT, Operands, State, are_contiguous
from quintic.optim.step.reduce_scatter import ReduceScatter
from quintic.optim.step.sparse_rows import Table, start_mean_of_rows

__all__ = ["Gather", "Shard", "Transport", "as_rows", "factors_of_pieces", "join_units", "split_units"]


class Gather:
    """Brings directions of pieces to the owners of their matrices, and updates back."""

    def __init__(self, bucket: Gathered, communicators: Communicators) -> None:
        self.bucket, self._communicators = bucket, communicators

    @cached_property
    def process_group(self) -> ProcessGroup:
        """The process group of the bucket's ranks, which are connected before the first step and stay so."""
        return self._communicators[self.bucket.ranks]

    def start_gather(self, pieces: Tensor | None) -> Callable[[], Tensor]:
        """Send directions of this rank's pieces to the owners; wait for the directions of the units that it owns.

        Args:
            pieces: (units, rows, columns) of any strides, in the order of all units; None where this rank has none.

        Returns:
            A function that returns (owned, *unit shape) contiguous.
        """
        bucket, exchange = self.bucket, self.bucket.exchange
        if pieces is None:
            # This rank sends nothing, and may receive pieces of the units that it owns.
            pieces = torch.empty((exchange.num_units, 0), dtype=bucket.direction_dtype, device=bucket.device)
        return exchange.start_gather(pieces.contiguous(), self.process_group)

    def start_gather_state(self, group: Group, batches: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Send state and weights that stages on whole matrices need to the owners, in messages like that of directions.

        Args:
            group: the bucket's group, from which a rank without pieces knows the dtype of the state.
            batches: by name (units, rows, columns), in the order of all units; none where this rank has no pieces.

        Returns:
            A function that returns by name (owned, *unit shape) contiguous.
        """
        bucket, exchange = self.bucket, self.bucket.exchange
        waits: dict[str, Callable[[], Tensor]] = {}
        for spec in bucket.rule.sent_state:
            pieces = batches.get(spec.name)
            # This rank holds no pieces: an empty tensor takes their place in the message.
            if pieces is None:
                dtype = spec.dtype_for(bucket.dtype, group.state_dtype)
                pieces = torch.empty((exchange.num_units, 0), dtype=dtype, device=bucket.device)
            waits[spec.name] = exchange.start_gather(pieces, self.process_group)
        if exchange.is_replicated:
            # The owned units are views of the units of all ranks. Copies let the memory of the others be freed.
            return lambda: {name: wait().clone() for name, wait in waits.items()}
        return lambda: {name: wait() for name, wait in waits.items()}

    def start_scatter_state(self, batches: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Send state that this rank advanced back, (owned, *unit shape) by name; wait for (units, *piece shape)."""
        exchange, process_group = self.bucket.exchange, self.process_group
        waits = {name: exchange.start_scatter(batch, process_group) for name, batch in batches.items()}
        return lambda: {name: wait() for name, wait in waits.items()}

    def start_scatter(self, updates: Tensor) -> Callable[[], Tensor]:
        """Send the updates of this rank's units, (owned, *unit shape) of any strides, to the ranks that hold pieces.

        Returns:
            A function that returns the updates of this rank's pieces, (units, *piece shape).
        """
        return self.bucket.exchange.start_scatter(updates, self.process_group)

    def start_numbers(
        self, numbers: Sequence[Sequence[Tensor]], vectors: Sequence[Mapping[str, Sequence[Tensor]]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Send numbers and vector state of the units that this rank owns to all ranks, in one message.

        Args:
            numbers: for each kind of matrix the rule's numbers, each (owned, m or 1, n or 1).
            vectors: for each kind by name the state of all units, each (1, m or 1, n or 1), as views of the state.

        Returns:
            A function that writes the received state to `vectors`, and returns for each kind the numbers of all units,
            each (units, m or 1, n or 1); no numbers if the rule has none.
        """
        units, exchange, rule = self.bucket.units, self.bucket.exchange, self.bucket.rule
        # Without numbers of the rule's own, the scales stand in `numbers`, which every rank has.
        rows = [number.flatten(1) for of_kind in numbers for number in of_kind] if rule.numbers else []
        # Only the owner advances its state. All ranks get copies, so that any rank can save it, and can own the unit in
        # a later plan. A rank that owns no unit sends nothing, (0, entries).
        for of_kind in vectors:
            for of_units in of_kind.values():
                own = of_units[units.local_slice]
                row = torch.cat(list(own)).flatten(1) if own else of_units[0].flatten(1)[:0]
                rows.append(row.to(numbers[0][0].dtype))
        # (owned, entries of all numbers, then of all state)
        wait_for_rows = exchange.start_all_gather(torch.cat(rows, dim=1), self.process_group)

        def finish() -> list[list[Tensor]]:
            received = wait_for_rows()  # (units, entries of all numbers, then of all state)
            # If nothing was sent, this rank has advanced all state itself.
            if not exchange.is_local and rule.vector_state:
                self._vectors_packing.unpack(received.view(-1), [v for k in vectors for us in k.values() for v in us])
            shapes = [[vector_shape(shape, *kind.shape) for shape in rule.numbers] for kind in units.kinds]
            # Split by kind and number: (units, m * 1 or 1 * n or 1) each.
            sizes = [m * n for of_kind in shapes for m, n in of_kind]
            columns = iter(received[:, : sum(sizes)].split(sizes, dim=1) if sizes else ())
            return [[next(columns).reshape(-1, *shape) for shape in of_kind] for of_kind in shapes]

        return finish

    @cached_property
    def _vectors_packing(self) -> Packing:
        """The copies from a received message, seen as one vector, to the vector state of all units, kind by kind."""
        bucket, rule = self.bucket, self.bucket.rule
        kinds = bucket.units.kinds
        before = sum(prod(vector_shape(shape, *kind.shape)) for kind in kinds for shape in rule.numbers)
        numels = [prod(spec.vector_shape(*kind.shape)) for kind in kinds for spec in rule.vector_state]
        width = before + sum(numels)
        # A unit's row has all numbers, then all state.
        spans: list[MemorySpan] = []
        for number, numel in enumerate(numels):
            for unit in range(len(bucket.units.all)):
                place = unit * width + before + sum(numels[:number])
                spans.append(MemorySpan(len(spans), 0, numel, place))
        return Packing(spans, bucket.kernels, bucket.device)


class Shard:
    """Brings the means of gradients to the owners of their entries, and the owners' new weights to all ranks.

    Args:
        bucket: its pieces are ranges of parameters, or units of matrices, each with an owner.
        params: the parameters of the bucket's group.
        table: with `comms="sharded_sparse"` knows which rows of the bucket's one parameter travel; otherwise None.
        communicators: the optimizer's process groups.
    """

    def __init__(
        self,
        bucket: Sharded,
        params: Sequence[Tensor],
        table: Table | None,
        communicators: Communicators,
    ) -> None:
        self.bucket, self.table = bucket, table
        self._of_group, self._communicators = params, communicators
        # Within a step: averages of the group's gradients if clipping has made them, (entries,) of this rank for each
        # parameter (`reduction.py`). Then no gradients are sent.
        self.averages: Mapping[Tensor, Tensor | None] | None = None
        # A parameter may have several pieces in the bucket, but is listed once here; `places` are positions in this
        # list.
        names = {shard.index: shard.name for shard in bucket.shards}
        places = {index: place for place, index in enumerate(names)}
        self._params = [params[index] for index in names]
        # Whole parameters without state, which lies with the owners.
        members = tuple(Piece(name, index) for index, name in names.items())
        self._local = Operands(members, self._params, [], [{}] * len(members), bucket.num_matrices)
        self._contiguous = all(param.is_contiguous() for param in self._params)
        # For each rank the ranges of parameters that it owns: (place, start, stop).
        self._reduce_scatter = ReduceScatter(
            [[(places[p.index], p.start, p.stop) for p in bucket.shards[owned]] for owned in bucket.of_owners],
            bucket.position,
            bucket.dtype,
            bucket.device,
            bucket.kernels,
            is_direct=bucket.is_direct,
        )
        self.invalidate_views()

    def invalidate_views(self) -> None:
        """Forget where weights and state are, because their memory may have changed."""
        # This rank's pieces without gradients, and for each gradient its shape, its strides, and its start in the mean.
        self._owned: tuple[Operands, list[tuple[torch.Size, tuple[int, ...], int]]] | None = None
        # Counts of steps of parameters whose moments are on other ranks, and the flags of these parameters in a mask.
        self._unowned: tuple[list[Tensor], Tensor] | None = None

    @cached_property
    def process_group(self) -> ProcessGroup:
        """The process group of the bucket's ranks, which are connected before the first step and stay so."""
        return self._communicators[self.bucket.ranks]

    def local_operands(self) -> Operands:
        """Return the whole parameters that have a gradient on this rank, with gradients that are not averaged yet."""
        gradients = list(map(GRADIENT, self._params))
        # The usual case: every gradient is there and contiguous.
        if self._contiguous and are_contiguous(gradients):
            return self._local._replace(gradients=gradients)
        return self._local.present(gradients)

    def start_gradients(self, local: Operands) -> Callable[[], Tensor]:
        """Send this rank's gradients to the owners; wait for the mean gradient of the entries that it owns, (entries,).

        Nothing is sent if clipping has averaged already; of a sparse table only touched rows are sent.
        """
        # All ranks have averages of the same groups, so all of them leave this message out, or none does.
        if self.averages is not None:
            # The empty tensor is for ranks that own nothing of the bucket.
            empty = torch.empty(0, dtype=self.bucket.dtype, device=self.bucket.device)
            mean = torch.cat([empty, *self._ranges_in(self.averages)])
            return lambda: mean
        if self.table is not None and self.table.is_sparse():
            return start_mean_of_rows(self.bucket, self.table, self.process_group)
        if local.missing:
            return self.start_mean(local)
        return self._reduce_scatter.start_mean(local.gradients, self.process_group)

    def start_mean(self, local: Operands) -> Callable[[], Tensor]:
        """Send whole gradients, zeros in place of missing ones; wait for the mean of the owned entries, (entries,)."""
        gradients: Sequence[Tensor | None] = local.gradients
        # Messages are equally long on all ranks. None in this list is sent as zeros.
        if local.missing:
            by_param = dict(zip(local.params, local.gradients, strict=True))
            gradients = [by_param.get(param) for param in self._params]
        return self._reduce_scatter.start_mean(gradients, self.process_group)

    def average(self, averages: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
        """Write the means of owned entries to `averages`, laid out as the attribute; yields twice, as `BucketStep.run`.

        All ranks must call it.
        """
        wait_for_mean = self.start_mean(self.local_operands())
        yield
        mean = wait_for_mean()
        del wait_for_mean  # and the gradients that were sent
        # Copied into the flat averages: the memory of the mean is free again.
        targets = self._ranges_in(averages)
        for target, values in zip(targets, mean.split([target.numel() for target in targets]), strict=True):
            target.copy_(values)
        yield

    def _ranges_in(self, averages: Mapping[Tensor, Tensor | None]) -> list[Tensor]:
        """Return the ranges of flat averages that belong to the pieces of the bucket that this rank owns, in order."""
        owned = []
        for shard in self.bucket.members:
            average = averages[self._of_group[shard.index]]
            assert average is not None
            owned.append(average[shard.offset : shard.offset + shard.numel])
        return owned

    def owned_operands(self, group: Group, state: State, mean: Tensor) -> Operands:
        """Return the pieces of weights and state that this rank owns, with their mean gradients.

        `mean`, (entries,), has the mean gradients of these pieces one after the other.
        """
        # Everything but the gradients follows from the plan, and is made once.
        if self._owned is None:
            owned = [(shard, group.params[shard.index]) for shard in self.bucket.members]
            pieces = [
                view_as_shard(span_of(param.detach(), shard.start, shard.numel), shard, param) for shard, param in owned
            ]
            states: list[Mapping[str, Tensor]] = [state_of_shard(state[param], shard, param) for shard, param in owned]
            starts = accumulate((shard.numel for shard, _ in owned), initial=0)
            spans = [(p.shape, p.stride(), start) for p, start in zip(pieces, starts, strict=False)]
            self._owned = Operands(self.bucket.members, pieces, [], states, len(owned)), spans
        operands, spans = self._owned
        first = mean.storage_offset()
        return operands._replace(gradients=[mean.as_strided(shape, stride, first + at) for shape, stride, at in spans])

    def count_unowned_steps(self, group: Group, state: State, mask: Tensor) -> None:
        """Count a step for AdamW parameters whose moments are only on other ranks.

        This rank updates none of their entries, but all ranks must save the same counts. `mask`, (pieces of all ranks,)
        int32, is 1 for pieces that are stepped and 0 for the others.
        """
        if self._unowned is None:
            bucket, params = self.bucket, group.params
            # A parameter may have pieces in several buckets, but must be counted once: with the piece at its start.
            rows = [
                (number, state[params[shard.index]]) for number, shard in enumerate(bucket.shards) if shard.start == 0
            ]
            # Parameters with moments here are counted by the update itself.
            others = [(number, values[STEP]) for number, values in rows if not values[EXP_AVG].numel()]
            numbers = upload(host_tensor([number for number, _ in others], torch.int64), bucket.device)
            self._unowned = [step for _, step in others], numbers
        steps, numbers = self._unowned
        if steps:
            torch._foreach_add_(steps, list(mask[numbers].to(steps[0].dtype).unbind()))

    def start_weights(self) -> Callable[[], None]:
        """Send the weights of the pieces that this rank owns to all ranks; wait for the pieces of the others."""
        return self._reduce_scatter.start_all_gather(self._params, self.process_group)


Transport = Gather | Shard


def split_units(values: Tensor, units: Units) -> list[Tensor]:
    """Return for each kind its matrices, (count, g, r, n), as views of contiguous values (count, *unit shape).

    A matrix of m rows is g groups of r rows, m = g r; the groups may lie at any distance from each other.
    """
    if units.is_plain:
        m, n = units.kinds[0].shape
        # The unit is the one matrix itself, or its transpose.
        return [values.view(-1, 1, n, m).mT if units.is_transposed else values.view(-1, 1, m, n)]
    # Take shape and strides of each matrix from one unit on the meta device, without memory. Since units follow each
    # other, the first stride of the result is the number of entries of a unit.
    unit = torch.empty(units.shape, device="meta")
    return [
        values.as_strided(
            (values.shape[0], *matrix.shape),
            (unit.numel(), *matrix.stride()),
            values.storage_offset() + matrix.storage_offset(),
        )
        for block in units.view.blocks(unit)
        for matrix in block
    ]


def join_units(updates: Sequence[Tensor], units: Units) -> Tensor:
    """Return units (count, *unit shape) made of the updates (count, m, n) of each kind."""
    count = updates[0].shape[0]
    if units.is_plain:
        update = updates[0].mT if units.is_transposed else updates[0]
        return update.reshape(count, *units.shape)
    # Kinds may have been orthogonalised in different dtypes; units have the widest.
    dtype = reduce(torch.promote_types, (update.dtype for update in updates))
    values = torch.empty((count, *units.shape), dtype=dtype, device=updates[0].device)
    for block, update in zip(split_units(values, units), updates, strict=True):
        # (count, m, n) -> (count, g, r, n)
        block.copy_(update.view(block.shape) if block.shape[1] == 1 else update.unflatten(1, block.shape[1:3]))
    return values


def factors_of_pieces(factors: Sequence[Tensor], units: Units, piece: Box | None) -> Tensor:
    """Return the factors of a piece of each unit, (units, rows or 1, columns or 1).

    Args:
        factors: for each kind of matrix (units, m or 1, n or 1).
        units: the bucket's units.
        piece: the box of every unit that this rank holds, in coordinates of the unit; None for whole units.
    """
    if len(factors) == 1 and factors[0].shape[1:] == (1, 1):
        # One number for each unit, which has one matrix.
        return factors[0]
    count = factors[0].shape[0]
    if units.is_plain:
        m, n = units.kinds[0].shape
        whole = factors[0].expand(count, m, n)
        whole = whole.mT if units.is_transposed else whole
        # A plain unit has two dimensions, after any leading ones of size one, so the reshape copies nothing.
        values = whole.reshape(count, *units.shape)
    else:
        values = factors[0].new_empty((count, *units.shape))
        for block, factor in zip(split_units(values, units), factors, strict=True):
            # (count, m or 1, n or 1) -> (count, g or 1, r or 1, n or 1)
            over = factor.unsqueeze(1) if factor.shape[1] == 1 else factor.unflatten(1, block.shape[1:3])
            block.copy_(over)
    # Keep the box of this rank from every unit.
    if piece is not None:
        values = values[(slice(None), *(slice(start, stop) for start, stop in piece))]
    return as_rows(values)


def as_rows(pieces: Tensor) -> Tensor:
    """Return pieces (count, *piece shape) as (count, rows, columns).

    The first two of four or more dimensions become rows: pieces (count, a, b, c, d) become (count, a b, c d).
    """
    return pieces if pieces.ndim == 3 else pieces.flatten(3).flatten(1, 2)
