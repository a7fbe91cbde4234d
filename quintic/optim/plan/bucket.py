"""Buckets: the matrices or parameters that one batched computation updates. There are three kinds.

Bucket      this rank has weights, gradients and state whole, and sends no messages
Gathered    matrices lie in pieces on several ranks, or every rank has them and ranks divide the work: directions go to
            an owner, updates go back to the pieces (FSDP2, tensor parallelism, `comms="averaged"`)
Sharded     every rank has the weights and its own gradient, and state lies with owners: gradients go to the
            owners, new weights go back to all ranks (`comms="sharded"`)

Buckets are frozen and hold no tensors; the parameter groups alone decide which buckets there are. `step/bucket_step.py`
steps them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.layout.pieces import Piece
from quintic.optim.layout.views import View, is_plain, is_transposed
from quintic.optim.plan.exchange import Exchange
from quintic.optim.plan.kinds import Kind, direction_dtype, update_dtype
from quintic.optim.plan.offload_size import Offloaded
from quintic.optim.plan.row_sharding import RowSharding
from quintic.optim.plan.schedule import PhaseBytes
from quintic.optim.polar.forms import Form
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.state.shards import StateShard

__all__ = ["Bucket", "Gathered", "Sharded", "Units"]


@dataclass(frozen=True)
class Units:
    """The units of one bucket, all of one shape and view; every unit has an owner among the ranks."""

    # The shape of each unit.
    shape: tuple[int, ...]
    # The view of each unit, which finds the matrices in it.
    view: View
    # The kind of each matrix of a unit: shape, form and cost.
    kinds: tuple[Kind, ...]
    # The units of all ranks, in the order of their owners; each has one matrix of each kind.
    all: tuple[Piece, ...]
    # The positions in `all` of the units that this rank owns, and so orthogonalises.
    local_slice: slice

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of one unit's orthogonalisation."""
        return sum(kind.flops for kind in self.kinds)

    def direction_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which directions are sent, for weights of this dtype: the widest of all kinds."""
        return max((direction_dtype(kind.form, dtype) for kind in self.kinds), key=lambda one: one.itemsize)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which updates are sent, for weights of this dtype: the widest of all kinds."""
        return max((update_dtype(kind.form, dtype) for kind in self.kinds), key=lambda one: one.itemsize)

    @cached_property
    def local(self) -> tuple[Piece, ...]:
        """The units that this rank orthogonalises."""
        return self.all[self.local_slice]

    @cached_property
    def local_matrices(self) -> list[list[Piece]]:
        """For each kind the matrices in `local`, as a piece each."""
        return [
            [replace(unit, matrices=(unit.matrices[number],), box=None) for unit in self.local]
            for number, _ in enumerate(self.kinds)
        ]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """The (m, n) of each kind."""
        return [kind.shape for kind in self.kinds]

    @cached_property
    def is_plain(self) -> bool:
        """Whether a unit is one matrix or its transpose, with no groups of rows."""
        # Then a batch of units (b, *shape) is a batch of matrices (b, m, n) without a copy.
        return len(self.kinds) == 1 and is_plain(self.view, self.shape)

    @cached_property
    def is_transposed(self) -> bool:
        """Whether a unit stores the transpose of its matrices: (in, out), where a matrix is (out, in)."""
        return is_transposed(self.view)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Matrices, or parameters under AdamW, that this rank has whole. The other kinds of bucket build on it."""

    # The update rule of the parameter group.
    rule: UpdateRule
    # The global ranks that step it together, in the order of their process group; () if this rank has it whole.
    ranks: tuple[int, ...] = ()
    # Position of the parameter group in `optimizer.param_groups`.
    group: int
    # The matrices, pieces or whole parameters that this rank holds, or owns where state is sharded.
    members: tuple[Piece, ...]
    # (m, n) of every matrix, or of the first matrix of every unit; None for AdamW.
    shape: tuple[int, int] | None = None
    # The dtype and the device of the weights.
    dtype: torch.dtype
    device: torch.device
    # Implementation of the element-wise passes.
    kernels: Kernels
    # How matrices of this shape are orthogonalised; None for AdamW and for a user's function.
    form: Form | None = None
    # The units with the matrices, where every unit has an owner among several ranks.
    units: Units | None = None
    # The number of entries in the bucket, on all ranks together.
    numel: int
    # Floating-point operations of this rank's orthogonalisation, matrix products only; 0 for AdamW.
    flops: int = 0
    # Upper bounds of this rank's temporary bytes; without messages there is only the phase `computing`.
    phase_bytes: PhaseBytes
    # The size of the state that is in host memory; None without `offload=True`.
    offloaded: Offloaded | None = None

    @cached_property
    def needs_comm(self) -> bool:
        """Whether its step sends messages."""
        return bool(self.ranks)

    @property
    def workspace_bytes(self) -> int:
        """Return an upper bound of the temporary bytes at any time of the bucket's step."""
        return self.phase_bytes.most

    @cached_property
    def direction_dtype(self) -> torch.dtype:
        """The dtype of update directions before they are orthogonalised, see `kinds.direction_dtype`."""
        return direction_dtype(self.form, self.dtype)

    @property
    def algorithm(self) -> str:
        """Return the option `algorithm` of the bucket's group."""
        return self.rule.algorithm

    @property
    def num_matrices(self) -> int:
        """Return the number of matrices that this rank computes as one batch; 0 for AdamW."""
        return sum(member.batch_size for member in self.members) if self.rule.orthogonalizes else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each member's parameter; a parameter with several members is named several times."""
        return tuple(member.name for member in self.members)

    @property
    def name(self) -> str:
        """Return the name of the first parameter."""
        return self.names[0]

    @property
    def num_pieces(self) -> int:
        """Return the number of members; `Plan.to_table` prints the first name and how many more there are."""
        return len(self.members)

    @property
    def method(self) -> str:
        """Return the name of the bucket's update: "adamw", a form such as "gram fp16", or "function" (the user's)."""
        if not self.rule.orthogonalizes:
            return self.rule.algorithm
        return str(self.form) if self.form is not None else "function"


@dataclass(frozen=True, kw_only=True)
class Gathered(Bucket):
    """Matrices that lie in pieces on several ranks; `members` are this rank's pieces: one of each unit, or none."""

    units: Units
    exchange: Exchange
    # The largest `phase_bytes` of any rank: all ranks decide by them, and so alike, how many buckets are under way.
    max_phase_bytes: PhaseBytes

    @cached_property
    def needs_comm(self) -> bool:
        """Whether its step sends messages; if not, this rank holds and owns all units whole."""
        return not self.exchange.is_local

    @property
    def num_matrices(self) -> int:
        """Return the number of matrices that this rank orthogonalises."""
        # Every unit has one matrix of each kind.
        return self.exchange.num_owned * len(self.units.kinds)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each unit's parameter, for the units of all ranks."""
        return tuple(unit.name for unit in self.units.all)

    @property
    def num_pieces(self) -> int:
        """Return the number of units in the bucket."""
        return len(self.units.all)


@dataclass(frozen=True, kw_only=True)
class Sharded(Bucket):
    """Pieces of parameters, each with an owner that has its state; with Muon each piece is a unit."""

    # The largest `phase_bytes` of any rank, as `Gathered.max_phase_bytes`.
    max_phase_bytes: PhaseBytes
    # This rank's position among `ranks`.
    position: int
    members: tuple[StateShard, ...]
    # The pieces of all ranks, in the order of their owners; `members` are this rank's.
    shards: tuple[StateShard, ...]
    # Whether the pieces are one whole parameter in the order of its memory, so that messages need no packing.
    is_direct: bool
    # The rows of an embedding table that sends only touched rows of its gradient (`comms="sharded_sparse"`), or None.
    rows: RowSharding | None = None

    @cached_property
    def of_owners(self) -> list[slice]:
        """For each rank the positions in `shards` of the pieces that it owns."""
        # Pieces are sorted by owner, so that each owner's are consecutive.
        stops = list(
            accumulate(Counter(shard.owner for shard in self.shards)[owner] for owner in range(len(self.ranks)))
        )
        return [slice(start, stop) for start, stop in pairwise([0, *stops])]

    @cached_property
    def local_slice(self) -> slice:
        """The positions in `shards` of the pieces that this rank owns."""
        return self.of_owners[self.position]

    @cached_property
    def entries(self) -> list[int]:
        """The number of entries that each rank owns."""
        return [sum(shard.numel for shard in self.shards[of_owner]) for of_owner in self.of_owners]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each piece's parameter, for the pieces of all ranks."""
        return tuple(shard.name for shard in self.shards)

    @property
    def num_pieces(self) -> int:
        """Return the number of units of all ranks, or of ranges of AdamW's parameters that this rank owns."""
        return len(self.members if self.units is None else self.shards)

    @property
    def method(self) -> str:
        """Return the name of the bucket's update; "adamw, sparse" for a table that sends touched rows."""
        return super().method if self.rows is None else f"{super().method}, sparse"
