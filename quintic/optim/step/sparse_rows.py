"""`comms="sharded_sparse"`: only the rows of a table's gradient that some token touched are sent to their owners.

    announce_rows   this rank's touched rows are marked; marks -> owners, counts -> all ranks and on to the host, while
                    the backward pass runs
    step            a table without an announcement is marked from its gradient, and sent in the same way
                    the host waits for the counts, from which all ranks decide alike: touched rows, or all rows
                    touched rows -> owners; every rank checks that the rest of an announced gradient is zeros
                    mean, AdamW, and weights -> all ranks, as with `comms="sharded"`

Marks have a process group of their own: a rank may announce at any time, or not at all, and use its other process
groups in between. In this one every table is sent once a step, in the order of the parameter groups. The arithmetic
without messages is in `row_sharding.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import (
    Pending,
    ProcessGroup,
    start_all_gather,
    start_all_max,
    start_all_to_all,
)
from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group, find_parameter
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.row_sharding import RowSharding, mean_of_rows, places_of, rows_to_send, touched_rows
from quintic.optim.rules.device import HostCopy, is_capturing, upload
from quintic.optim.step.operands import dense_gradient

__all__ = ["AnnouncedRows", "Table", "start_mean_of_rows"]


class Table:
    """A parameter whose touched rows are sent, with the marks and counts of one step.

    Args:
        name: of the parameter.
        param: the parameter, the same on all ranks.
        group: the position of its parameter group.
        bucket: which is of this parameter only.
        sharding: how its rows are sharded.
    """

    def __init__(self, name: str, param: Tensor, group: int, bucket: Sharded, sharding: RowSharding) -> None:
        self.name, self.param, self.group = name, param, group
        self.device = param.device
        self.ranks, self.position = bucket.ranks, bucket.position
        self.sharding = sharding
        self.is_complete = False
        """Whether all rows of the step have been announced."""
        self.is_sent = False
        """Whether the marks of this step are on their way."""
        # The marks and counts of this rank. They are kept until the step is over: a message, or the stream that copies
        # counts to the host, may still read them.
        self._touched_mask = self._counts = torch.empty(0)
        self._is_announced = False
        self._pinned: tuple[Tensor | None] | None = None
        # The marks and counts of all ranks.
        self._pending_mask: Pending | None = None
        self._read_counts: Callable[[], list[list[int]]] | None = None
        self._stream: Any = None
        # The position of a rank whose announcement left rows out, counted from 1; 0 if all announcements were right.
        self._pending_offender: Pending | None = None
        self._offender: HostCopy | None = None

    def announce(self, rows: Tensor, *, is_complete: bool) -> None:
        """Mark rows as touched, see `Muon.announce_rows`.

        Args:
            rows: (n,) int64 on the device.
            is_complete: whether they are the last rows of the step.
        """
        if self.is_sent:
            raise RuntimeError(
                f"{self.name}: announce_rows was called again after the rows of this step were sent; give more=True to "
                f"all calls of a step but the last, and call withdraw_rows() where a step is left out"
            )
        if not self._is_announced:
            self._touched_mask, self._is_announced = self._empty_mask(), True
        # Marks have a byte for each row, and padding so that every owner gets equally many.
        self._touched_mask[: self.sharding.num_rows].index_fill_(0, rows, 1)
        self.is_complete = is_complete

    def send(self, process_group: ProcessGroup) -> None:
        """Start to send marks to the owners of the rows, and counts to all ranks. All ranks must call it once a step.

        Announced rows are marked; without an announcement all rows of the gradient that are not zero.
        """
        if not self._is_announced:
            self._touched_mask = self._empty_mask()
            gradient = self.gradient()
            if gradient is not None:
                self._touched_mask[: self.sharding.num_rows] = touched_rows(gradient)
        # Owners have consecutive rows, so that (ranks, rows_per_rank) has the marks of one owner in each row.
        num_ranks, each = self.sharding.num_ranks, self.sharding.rows_per_rank
        # (1, ranks + 1): the rows for each owner, and whether they were announced.
        self._counts = torch.empty(1, num_ranks + 1, dtype=torch.int64, device=self.param.device)
        self._counts[0, :num_ranks] = self._touched_mask.view(num_ranks, each).sum(1)
        self._counts[0, num_ranks] = self._is_announced
        pending = start_all_gather(self._counts, num_ranks, process_group)
        self._pending_mask = start_all_to_all(self._touched_mask, [each] * num_ranks, [each] * num_ranks, process_group)
        if self.param.is_cuda:
            # On a stream of its own: the backward pass must not wait until the other ranks have sent their counts.
            self._stream = self._stream or torch.cuda.Stream(self.param.device)
            with torch.cuda.stream(self._stream):
                self._read_counts = cache(HostCopy(pending.wait()).read)
        else:
            # The host waits when it first asks, and not while rows are announced.
            self._read_counts = cache(lambda: HostCopy(pending.wait()).read())
        self.is_sent = True

    def pin_gradient(self, gradient: Tensor | None) -> None:
        """Let `gradient` return this contiguous gradient, or None if this rank has none, until `unpin`."""
        self._pinned = (gradient,)

    def unpin(self) -> None:
        """Let `gradient` return `p.grad` again."""
        self._pinned = None

    def gradient(self) -> Tensor | None:
        """Return this rank's gradient, (rows, ...) contiguous; None if it has none."""
        gradient = self.param.grad if self._pinned is None else self._pinned[0]
        # A copy only if `p.grad` has other strides than the parameter.
        return None if gradient is None else dense_gradient(self.param, gradient, self.name).detach()

    def is_sparse(self) -> bool:
        """Return whether only touched rows are sent in this step: equal on all ranks, whose counts the host awaits."""
        return self.sharding.is_sparse([counts[:-1] for counts in self._all_counts()])

    def sends(self) -> list[int]:
        """Return the number of rows that this rank sends to each owner."""
        return self._all_counts()[self.position][:-1]

    def receives(self) -> list[int]:
        """Return the number of rows that each rank sends to this one."""
        return [counts[self.position] for counts in self._all_counts()]

    def rows(self) -> Tensor:
        """Return (n,) int64: the rows that this rank sends."""
        return rows_to_send(self._touched_mask, sum(self.sends()))

    def places(self) -> Tensor:
        """Return (ranks, rows) int32: where each rank's rows are among the received ones, see `places_of`."""
        assert self._pending_mask is not None
        marks, self._pending_mask = self._pending_mask.wait(), None  # (ranks * rows_per_rank,) uint8
        # The last owners have fewer rows than marks.
        return places_of(marks.view(self.sharding.num_ranks, -1)[:, : self.sharding.rows_of(self.position)])

    def start_check(self, gradient: Tensor | None, process_group: ProcessGroup) -> None:
        """Start to find out whether some rank's gradient has rows that its announcement left out."""
        # Marks that were read off the gradients need no check; all ranks know whether some rank announced.
        if not any(counts[-1] for counts in self._all_counts()):
            return
        offender = torch.zeros(1, dtype=torch.int32, device=self.param.device)
        if gradient is not None:
            left_out = touched_rows(gradient) & (self._touched_mask[: self.sharding.num_rows] == 0)
            # The largest position wins in the all-reduce: one rank is enough for the message.
            offender += left_out.any() * (self.position + 1)
        self._pending_offender = start_all_max(offender, process_group)

    def guarded(self, apply_mask: Tensor) -> Tensor:
        """Return the int32 mask on the device, all zeros if some rank's announcement left rows out."""
        if self._pending_offender is None:
            return apply_mask
        offender, self._pending_offender = self._pending_offender.wait(), None
        # The parameter stays as it is now, on all ranks; the host learns of it later, and raises.
        self._offender = HostCopy(offender)
        return apply_mask * (offender == 0)

    def check(self, wait: bool) -> None:
        """Raise a RuntimeError on all ranks if the last step found rows that an announcement had left out.

        Args:
            wait: whether the host waits for the answer; otherwise it raises only if the answer has arrived.
        """
        if self._offender is None or not (wait or self._offender.is_there):
            return
        [offender] = self._offender.read()
        self._offender = None
        if offender:
            raise RuntimeError(
                f"{self.name}: rank {self.ranks[offender - 1]} has a gradient in rows that it had not announced, so "
                f"that the last step left this parameter as it was; announce all rows that a backward pass touches, or "
                f"none"
            )

    def reset(self) -> None:
        """Forget the marks and counts of the step, after the messages that read them."""
        # Messages under way still use this memory.
        if self.is_sent:
            self._all_counts()
        for pending in (self._pending_mask, self._pending_offender):
            if pending is not None:
                pending.wait()
        self._pending_mask = self._pending_offender = self._read_counts = None
        self._touched_mask = self._counts = torch.empty(0)
        self.is_complete = self.is_sent = self._is_announced = False

    def _empty_mask(self) -> Tensor:
        return torch.zeros(self.sharding.padded_rows, dtype=torch.uint8, device=self.param.device)

    def _all_counts(self) -> list[list[int]]:
        """Return for each rank the number of rows for each owner, and 1 if they were announced; waits."""
        assert self._read_counts is not None
        return self._read_counts()


def start_mean_of_rows(bucket: Bucket, table: Table, process_group: ProcessGroup) -> Callable[[], Tensor]:
    """Send the touched rows; wait for the mean of this rank's rows, (rows * row size,). Marks have been sent before.

    All ranks that share the table must call it.
    """
    row_size, gradient = table.sharding.row_size, table.gradient()
    sends, receives = ([count * row_size for count in counts] for counts in (table.sends(), table.receives()))
    if gradient is None:
        # This rank may have announced rows, and then has no gradient: its owners expect them.
        send = torch.zeros(sum(sends), dtype=bucket.dtype, device=bucket.device)
    else:
        send = gradient.view(-1, row_size).index_select(0, table.rows()).to(bucket.dtype)
    pending = start_all_to_all(send, sends, receives, process_group)
    # While the rows are under way.
    places = table.places()
    table.start_check(gradient, process_group)
    return lambda: mean_of_rows(pending.wait().view(-1, row_size), places, bucket.kernels).view(-1)


class AnnouncedRows:
    """The tables of one optimizer whose touched rows are sent; they outlive its plans."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self.tables: dict[Tensor, Table] = {}
        """By parameter, in the order in which ranks send marks. Small tables, always sent whole, are not among them."""
        self._due: list[Table] = []

    def sync_tables(self, buckets: Iterable[Bucket], groups: Sequence[Group]) -> None:
        """Take over the tables of a new plan; a table that is as it was before keeps its announcement."""
        tables: dict[tuple[int, int], Table] = {}
        for bucket in buckets:
            if isinstance(bucket, Sharded) and bucket.rows is not None:
                shard = bucket.shards[0]
                param = groups[bucket.group].params[shard.index]
                table = self.tables.get(param)
                known = (bucket.rows, bucket.ranks, bucket.device)
                # Messages under way fit only a table that is sharded among the same ranks in the same way.
                if table is None or (table.sharding, table.ranks, table.device) != known:
                    table = Table(shard.name, param, bucket.group, bucket, bucket.rows)
                tables[bucket.group, shard.index] = table
        # By the position of the group, then of the parameter: the same order on all ranks.
        self.tables = {table.param: table for _, table in sorted(tables.items())}

    def announce(
        self,
        groups: Sequence[Group],
        steps_waited: Sequence[int],
        param: Tensor | str,
        rows: Tensor,
        *,
        more: bool,
        may_send: bool,
    ) -> None:
        """Mark rows of a table as touched, and send the marks of complete tables, see `Muon.announce_rows`.

        Args:
            groups: the parameter groups.
            steps_waited: for each group 0 if the next step steps it.
            param: the table, or its name.
            rows: integers of any shape.
            more: whether another call for this table follows before the step.
            may_send: whether ranks have compared their plans: else marks are sent with the step.
        """
        self.check(wait=False)
        target = _sparse_parameter(groups, param)
        if not isinstance(rows, Tensor) or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
            what = f"a {type(rows).__name__}" if not isinstance(rows, Tensor) else f"of dtype {rows.dtype}"
            raise TypeError(f"rows announced are {what}: they must be a tensor of integers, the numbers of rows")
        table = self.tables.get(target)
        # A small table is sent whole: an announcement is allowed, and changes nothing.
        if table is None:
            return
        _check_no_capture(table)
        table.announce(_row_indices(rows, table), is_complete=not more and steps_waited[table.group] == 0)
        if may_send:
            self._send_complete(steps_waited)

    def withdraw(self, steps_waited: Sequence[int], *, may_have_sent: bool) -> None:
        """Forget announced rows, see `Muon.withdraw_rows`; arguments as in `announce`."""
        for table in self.tables.values():
            if not table.is_sent and may_have_sent and steps_waited[table.group] == 0:
                # Other ranks may have announced and sent: they wait for this rank's message.
                table.send(self._communicators.sparse_group(table.ranks))
            table.reset()

    def begin_step(self, steps_waited: Sequence[int]) -> None:
        """Send the marks of all tables that are stepped now. All ranks that share them must call it.

        Raises:
            RuntimeError: the last step found rows that had not been announced, or a CUDA graph is being captured.
        """
        due = [table for table in self.tables.values() if steps_waited[table.group] == 0]
        for table in due:
            _check_no_capture(table)
        # Only if a table is stepped: a captured step leaves tables out, and must not wait for the device.
        if due:
            self.check(wait=True)
        self._due = due
        for table in due:
            if not table.is_sent:
                table.send(self._communicators.sparse_group(table.ranks))

    def end_step(self) -> None:
        """Forget the announcements of the step."""
        for table in self._due:
            table.reset()
        for table in self.tables.values():
            table.unpin()
        self._due = []

    def check(self, wait: bool) -> None:
        """Raise if the last step found rows that had not been announced, see `Table.check`."""
        for table in self.tables.values():
            table.check(wait)

    def _send_complete(self, steps_waited: Sequence[int]) -> None:
        """Send the marks of announced tables, up to the first one that is not complete: ranks keep one order."""
        for table in self.tables.values():
            if table.is_sent or steps_waited[table.group] != 0:
                continue
            # Ranks may announce in different orders; messages must start in the same one.
            if not table.is_complete:
                return
            table.send(self._communicators.sparse_group(table.ranks))


def _row_indices(rows: Tensor, table: Table) -> Tensor:
    """Return row indices as (n,) int64 on the table's device.

    Raises:
        IndexError: an index on the CPU is out of range.
    """
    rows = rows.reshape(-1).long()
    # Rows on the device are not checked, which would wait for it.
    if rows.device.type != "cpu":
        return rows.to(table.param.device)
    if rows.numel():
        low, high = (int(bound) for bound in rows.aminmax())
        if low < 0 or high >= table.sharding.num_rows:
            raise IndexError(
                f"{table.name}: rows from {low} to {high} were announced, the parameter has {table.sharding.num_rows}"
            )
    return upload(rows, table.param.device)


def _sparse_parameter(groups: Sequence[Group], param: Tensor | str) -> Tensor:
    """Return a parameter, given it or its name.

    Raises:
        ValueError: it is unknown, or its group has another `comms`.
    """
    group, index = find_parameter(groups, param, "rows were announced for")
    if group.comms != "sharded_sparse":
        raise ValueError(
            f"{group.param_names[index]}: rows are announced for comms='sharded_sparse', its group has "
            f"comms={group.comms!r}"
        )
    return group.params[index]


def _check_no_capture(table: Table) -> None:
    if is_capturing(table.device):
        raise RuntimeError(
            f"{table.name}: with comms='sharded_sparse' messages have another size in every step, which a CUDA graph "
            f"cannot capture; use quintic.CapturedStep, which leaves them out, or comms='sharded' to capture steps"
        )
