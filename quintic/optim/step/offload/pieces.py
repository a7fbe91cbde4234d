"""The pieces of a bucket with state in host memory: the tensors that are loaded and computed at a time.

    Muon     one piece, the bucket's matrices, with a batch for each pass: momentum to compute directions, and masters,
             if there are any, to write weights
    AdamW    the ranges that the plan decided (`offload_size.adamw_pieces`), with one batch of moments and masters for
             the whole update

State that stages on whole matrices advance (AdaMuon's second moment) is loaded with momentum, and the step copies it
for the stages. Their results are stored with masters, and need no load. Masters are loaded twice for stages that read
weights.

A bucket often has only some matrices of a parameter, of a bank or of heads. Its computation then gets blocks of
weights, gradients and state instead of whole tensors, so that no more state is loaded than is stepped.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.pieces import Piece, block_of
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.offload_size import DIRECTIONS, WEIGHTS, MemberEntries
from quintic.optim.rules.rule import STEP, UpdateRule
from quintic.optim.state.state import master_key
from quintic.optim.step.offload.transfers import BufferPool, CopyDirection, TransferBatch
from quintic.optim.step.operands import BucketCache, Operands
from quintic.optim.step.triton_backend import with_one_gradient_dtype

__all__ = ["BLOCKS", "BucketPiece"]


class _Blocks(View):
    """The view of tensors that are already blocks of matrices, (b, g, r, n)."""

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)


BLOCKS = _Blocks()
"""The view of the operands of a piece of matrices."""


class BucketPiece:
    """Members of a bucket, or ranges of them, that are computed at a time, and the batches of their state.

    It is kept as long as the same members are stepped and their state stays where it is.

    Args:
        bucket: the bucket.
        group: its group.
        entries: the members, by position in the lists below, and the range of each; consecutive members.
        members: the members that are stepped.
        states: their state in host memory.
        pools: by pass the buffers for batches; they need not exist before the piece is used.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        entries: Sequence[MemberEntries],
        members: Sequence[Piece],
        states: Sequence[Mapping[str, Tensor]],
        pools: Mapping[int, BufferPool],
    ) -> None:
        self._is_matrices, self._has_kernels = bucket.rule.orthogonalizes, bucket.kernels == "triton"
        self._view, self._entries, self._pools = group.view, entries, pools
        # Where the members are: positions, and the members themselves, which find blocks in whole tensors.
        self.members = slice(entries[0][0], entries[-1][0] + 1)
        self._stepped = members[self.members]
        # Lookups and tables for the piece's operands; other tensors are in the bucket's own cache.
        self.cache = BucketCache()
        # The state that each pass needs by name, and the batch of it, name by name.
        self._copied = _copied_state(bucket.rule, states[0])
        self.batches: dict[int, TransferBatch] = {}
        for of_pass, copied in self._copied.items():
            columns = [(self._of_piece([state[name] for state in states]), how) for name, how in copied.items()]
            self.batches[of_pass] = TransferBatch([(tensor, how) for tensors, how in columns for tensor in tensors])
        # The members of the operands, whose tensors are the blocks; the same objects in every step, for caches.
        self._members = tuple(
            replace(member, matrices=tuple(range(member.batch_size)), box=None) if self._is_matrices else member
            for member in self._stepped
        )
        # Position of a member that begins in an earlier piece -> its count of steps here, see `_step_of`.
        later = [number for number, run in entries if run is not None and run.start]
        self._later_steps = {number: torch.empty_like(states[number][STEP]) for number in later}

    def operands(self, active: Operands) -> Operands:
        """Return the piece of a bucket's operands, with state in buffers; `loaded` brings the values."""
        # Gradients are cast as whole tensors, since blocks would not keep their strides.
        if self._is_matrices and self._has_kernels:
            active = with_one_gradient_dtype(active)
        # All state of each member, although the values of the two passes are not there at the same time.
        passes = list(map(self._device_states, self.batches))
        states: list[Mapping[str, Tensor]] = []
        for place, (number, _) in enumerate(self._entries):
            state = {name: value for of_pass in passes for name, value in of_pass[place].items()}
            if STEP in active.states[number]:
                state[STEP] = self._step_of(number, active.states[number])
            states.append(state)
        params, gradients = self._of_piece(active.params), self._of_piece(active.gradients)
        num_matrices = sum(member.batch_size for member in self._members)
        return Operands(self._members, params, gradients, states, num_matrices)

    @contextmanager
    def loaded(self, of_pass: int) -> Iterator[Sequence[Mapping[str, Tensor]]]:
        """Provide each member's state for a pass on the device within the block; afterwards it is stored.

        Loads and stores run in the background. Without masters, for example, there may be no state for a pass.
        """
        if of_pass not in self.batches:
            yield ()
            return
        with self._pools[of_pass].use(self.batches[of_pass]):
            yield self._device_states(of_pass)

    def _device_states(self, of_pass: int) -> list[dict[str, Tensor]]:
        """Return each member's state for a pass, as it is in a buffer when it is loaded."""
        device_views = iter(self._pools[of_pass].device_views(self.batches[of_pass]))
        # The batch has all tensors of the first name, then all of the next.
        columns = [[next(device_views) for _ in self._entries] for _ in self._copied[of_pass]]
        return [dict(zip(self._copied[of_pass], row, strict=True)) for row in zip(*columns, strict=True)]

    def _of_piece(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the piece of each member's tensor: its block of matrices, or its range of entries."""
        if self._is_matrices:
            return [block_of(tensor, member, self._view) for tensor, member in zip(tensors, self._stepped, strict=True)]
        return [
            tensors[number] if run is None else in_memory_order(tensors[number])[run] for number, run in self._entries
        ]

    def _step_of(self, number: int, state: Mapping[str, Tensor]) -> Tensor:
        """Return the count of steps that the update of a range reads and increases."""
        # The update of a member's first range increases its count. Later ranges get a copy that is one less, so that
        # they compute with the same count.
        if number in self._later_steps:
            return torch.sub(state[STEP], 1, out=self._later_steps[number])
        return state[STEP]


def _copied_state(rule: UpdateRule, state: Mapping[str, Tensor]) -> dict[int, dict[str, CopyDirection]]:
    """Return by pass the offloaded state that it needs, by name; passes that need none are left out."""
    passes: dict[int, dict[str, CopyDirection]] = {DIRECTIONS: {}, WEIGHTS: {}}
    for spec in rule.direction.state:
        if spec.shape == "param":
            passes[DIRECTIONS][spec.name] = "both"
    for spec in rule.matrix_state:
        passes[DIRECTIONS][spec.name], passes[WEIGHTS][spec.name] = "load", "store"
    for spec in () if rule.drift is None else rule.drift.state:
        passes[WEIGHTS][spec.name] = "both"
    master = master_key(state)
    if master is not None:
        passes[WEIGHTS if rule.orthogonalizes else DIRECTIONS][master] = "both"
        if rule.reads_weights:
            passes[DIRECTIONS][master] = "load"
    return {of_pass: copied for of_pass, copied in passes.items() if copied}
