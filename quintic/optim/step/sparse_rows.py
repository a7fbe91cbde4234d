"""`comms="sharded_sparse"`: of a table's gradient only the rows that some token touched travel to their owners.

What happens when:

    announce_rows   marks of this rank's rows -> their owners, counts -> all ranks and on to the host, all of it while
                    the backward pass runs
    step            what was not announced is read off the gradient, and sent likewise; the host waits for counts, which
                    tell all ranks alike whether touched rows travel or all rows
                    touched rows -> owners, while every rank looks whether the rest of an announced gradient is zeros
                    mean, AdamW, and weights to all ranks, as with `comms="sharded"`

Marks travel in a process group of their own: ranks announce when they please, or not at all, and may use their other
process groups in between. In it, tables come in the order of the parameter groups, once a step. The arithmetic is in
`row_sharding.py`.
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
from quintic.optim.groups.options import Group, found_parameter
from quintic.optim.plan.bucket import Bucket, ShardedTable
from quintic.optim.plan.row_sharding import RowSharding, mean_of_rows, places_of, rows_to_send, touched_rows
from quintic.optim.rules.device import HostCopy, is_capturing, upload
from quintic.optim.step.operands import dense_gradient

__all__ = ["AnnouncedRows", "Table", "start_mean_of_rows"]


class Table:
    """A parameter whose touched rows travel, and what ranks know of them during one step."""

    def __init__(self, name: str, param: Tensor, group: int, bucket: ShardedTable) -> None:
        self.name, self.param, self.group = name, param, group
        self.device = param.device
        self.ranks, self.position = bucket.ranks, bucket.position
        self.sharding: RowSharding = bucket.rows
        self.is_complete = False
        """Whether everything has been announced that will be."""
        self.is_sent = False
        """Whether the marks of this step are on their way."""
        # Of this rank. What is sent is kept until the step is over, also for the stream that copies counts to the host.
        self._touched_mask = self._counts = torch.empty(0)
        self._is_announced = False
        self._pinned: tuple[Tensor | None] | None = None
        # Of all ranks.
        self._pending_mask: Pending | None = None
        self._read_counts: Callable[[], list[list[int]]] | None = None
        self._stream: Any = None
        # The number of a rank whose announcement was not right, counted from 1.
        self._pending_offender: Pending | None = None
        self._offender: HostCopy | None = None

    def announce(self, rows: Tensor, *, is_complete: bool) -> None:
        """Mark rows, (n,) int64 on the device, the last ones of a step if complete; see `Muon.announce_rows`."""
        if self.is_sent:
            raise RuntimeError(
                f"{self.name}: announce_rows was called again after the rows of this step were sent; give more=True to "
                f"all calls of a step but the last, and call withdraw_rows() where a step is left out"
            )
        if not self._is_announced:
            self._touched_mask, self._is_announced = self._empty_mask(), True
        self._touched_mask[: self.sharding.num_rows].index_fill_(0, rows, 1)
        self.is_complete = is_complete

    def send(self, process_group: ProcessGroup) -> None:
        """Start to send marks to the owners of the rows, and counts to all ranks. All ranks must call it once a step.

        They are those of what was announced, or else of what the gradient has.
        """
        if not self._is_announced:
            self._touched_mask = self._empty_mask()
            gradient = self.gradient()
            if gradient is not None:
                self._touched_mask[: self.sharding.num_rows] = touched_rows(gradient)
        num_ranks, each = self.sharding.num_ranks, self.sharding.rows_per_rank
        self._counts = torch.empty(1, num_ranks + 1, dtype=torch.int64, device=self.param.device)
        self._counts[0, :num_ranks] = self._touched_mask.view(num_ranks, each).sum(1)
        self._counts[0, num_ranks] = self._is_announced
        pending = start_all_gather(self._counts, num_ranks, process_group)
        self._pending_mask = start_all_to_all(self._touched_mask, [each] * num_ranks, [each] * num_ranks, process_group)
        if self.param.is_cuda:
            # Beside the computation, which must not wait until the other ranks have come so far.
            self._stream = self._stream or torch.cuda.Stream(self.param.device)
            with torch.cuda.stream(self._stream):
                self._read_counts = cache(HostCopy(pending.wait()).read)
        else:
            self._read_counts = cache(lambda: HostCopy(pending.wait()).read())
        self.is_sent = True

    def pin_gradient(self, gradient: Tensor | None) -> None:
        """Keep this rank's gradient of a step that begins, contiguous, or that it has none; until `unpin`."""
        self._pinned = (gradient,)

    def unpin(self) -> None:
        """Forget what `pin_gradient` was given: gradients may be other ones now."""
        self._pinned = None

    def gradient(self) -> Tensor | None:
        """Return this rank's gradient, contiguous."""
        gradient = self.param.grad if self._pinned is None else self._pinned[0]
        # What is held has the parameter's strides.
        return None if gradient is None else dense_gradient(self.param, gradient, self.name).detach()

    def is_sparse(self) -> bool:
        """Return whether touched rows travel in this step, the same on all ranks; waits until all have sent counts."""
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
        """Return the places of each rank's rows among those that this one receives, see `places_of`."""
        assert self._pending_mask is not None
        marks, self._pending_mask = self._pending_mask.wait(), None
        return places_of(marks.view(self.sharding.num_ranks, -1)[:, : self.sharding.rows_of(self.position)])

    def start_check(self, gradient: Tensor | None, process_group: ProcessGroup) -> None:
        """Start to find out whether some rank's gradient has rows that its announcement left out."""
        if not any(counts[-1] for counts in self._all_counts()):
            return
        offender = torch.zeros(1, dtype=torch.int32, device=self.param.device)
        if gradient is not None:
            left_out = touched_rows(gradient) & (self._touched_mask[: self.sharding.num_rows] == 0)
            offender += left_out.any() * (self.position + 1)
        self._pending_offender = start_all_max(offender, process_group)

    def guarded(self, apply_mask: Tensor) -> Tensor:
        """Return flags on the device, int32, with zeros instead if some rank's announcement left rows out."""
        if self._pending_offender is None:
            return apply_mask
        offender, self._pending_offender = self._pending_offender.wait(), None
        self._offender = HostCopy(offender)
        return apply_mask * (offender == 0)

    def check(self, wait: bool) -> None:
        """Raise a RuntimeError on all ranks if the last step found rows that an announcement had left out.

        That is, as far as it is known; with `wait` the host waits for the device.
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
        """Forget everything about the step, once nothing of it is under way."""
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
        """Return for each rank how many rows it sends to each owner, and whether they were announced."""
        assert self._read_counts is not None
        return self._read_counts()


def start_mean_of_rows(bucket: Bucket, table: Table, process_group: ProcessGroup) -> Callable[[], Tensor]:
    """Send touched rows once marks were sent; the function returned waits for the mean of this rank's rows."""
    row_size, gradient = table.sharding.row_size, table.gradient()
    sends, receives = ([count * row_size for count in counts] for counts in (table.sends(), table.receives()))
    if gradient is None:
        send = torch.zeros(sum(sends), dtype=bucket.dtype, device=bucket.device)
    else:
        send = gradient.view(-1, row_size).index_select(0, table.rows()).to(bucket.dtype)
    pending = start_all_to_all(send, sends, receives, process_group)
    places = table.places()
    table.start_check(gradient, process_group)
    return lambda: mean_of_rows(pending.wait().view(-1, row_size), places, bucket.kernels).view(-1)


class AnnouncedRows:
    """The tables of one optimizer whose touched rows travel; they outlive its plans."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self.tables: dict[Tensor, Table] = {}
        """By parameter, in the order in which ranks send marks; without those that always travel whole."""
        self._due: list[Table] = []

    def sync_tables(self, buckets: Iterable[Bucket], groups: Sequence[Group]) -> None:
        """Find the tables of a new plan; those known before keep what was announced."""
        tables: dict[tuple[int, int], Table] = {}
        for bucket in buckets:
            if isinstance(bucket, ShardedTable):
                shard = bucket.shards[0]
                param = groups[bucket.group].params[shard.index]
                table = self.tables.get(param)
                known = (bucket.rows, bucket.ranks, bucket.device)
                if table is None or (table.sharding, table.ranks, table.device) != known:
                    table = Table(shard.name, param, bucket.group, bucket)
                tables[bucket.group, shard.index] = table
        self.tables = {table.param: table for _, table in sorted(tables.items())}

    def announce(
        self,
        groups: Sequence[Group],
        steps_until_due: Sequence[int],
        param: Tensor | str,
        rows: Tensor,
        *,
        more: bool,
        may_send: bool,
    ) -> None:
        """See `Muon.announce_rows`; marks are sent at once only where ranks have compared their plans (`may_send`)."""
        self.check(wait=False)
        target = _parameter_meant(groups, param)
        if not isinstance(rows, Tensor) or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
            what = f"a {type(rows).__name__}" if not isinstance(rows, Tensor) else f"of dtype {rows.dtype}"
            raise TypeError(f"rows announced are {what}: they must be a tensor of integers, the numbers of rows")
        table = self.tables.get(target)
        if table is None:
            return
        _check_no_capture(table)
        table.announce(_numbers(rows, table), is_complete=not more and steps_until_due[table.group] == 0)
        if may_send:
            self._send_complete(steps_until_due)

    def withdraw(self, steps_until_due: Sequence[int], *, may_have_sent: bool) -> None:
        """See `Muon.withdraw_rows`; arguments as in `announce`."""
        for table in self.tables.values():
            if not table.is_sent and may_have_sent and steps_until_due[table.group] == 0:
                # Other ranks may wait for it.
                table.send(self._communicators.sparse_group(table.ranks))
            table.reset()

    def begin_step(self, steps_until_due: Sequence[int]) -> None:
        """Send the marks of all tables that are stepped now. All ranks that share them must call it.

        Raises:
            RuntimeError: the step before found rows that had not been announced, or a CUDA graph is being captured.
        """
        due = [table for table in self.tables.values() if steps_until_due[table.group] == 0]
        for table in due:
            _check_no_capture(table)
        if due:  # a CUDA graph that leaves tables out waits for nothing
            self.check(wait=True)
        self._due = due
        for table in due:
            if not table.is_sent:
                table.send(self._communicators.sparse_group(table.ranks))

    def end_step(self) -> None:
        """Forget what was announced for the step."""
        for table in self._due:
            table.reset()
        for table in self.tables.values():
            table.unpin()
        self._due = []

    def check(self, wait: bool) -> None:
        """Raise if the last step found rows that had not been announced, see `Table.check`."""
        for table in self.tables.values():
            table.check(wait)

    def _send_complete(self, steps_until_due: Sequence[int]) -> None:
        """Send the marks of tables that are announced, and none after one that is not: all ranks keep the order."""
        for table in self.tables.values():
            if table.is_sent or steps_until_due[table.group] != 0:
                continue
            if not table.is_complete:
                return
            table.send(self._communicators.sparse_group(table.ranks))


def _numbers(rows: Tensor, table: Table) -> Tensor:
    """Return (n,) int64 on the table's device."""
    rows = rows.reshape(-1).long()
    if rows.device.type != "cpu":
        return rows.to(table.param.device)
    if rows.numel():
        low, high = (int(bound) for bound in rows.aminmax())
        if low < 0 or high >= table.sharding.num_rows:
            raise IndexError(
                f"{table.name}: rows from {low} to {high} were announced, the parameter has {table.sharding.num_rows}"
            )
    return upload(rows, table.param.device)


def _parameter_meant(groups: Sequence[Group], param: Tensor | str) -> Tensor:
    """Return the parameter that is meant; a ValueError if there is none, or its group has another `comms`."""
    group, index = found_parameter(groups, param, "rows were announced for")
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
            f"cannot have; use quintic.CapturedStep, which leaves them out, or comms='sharded' to capture steps"
        )
