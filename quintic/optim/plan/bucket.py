"""Buckets: what one batched computation updates, and how its parts lie on ranks."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from quintic.kernels.dispatch import Kernels
from quintic.optim.layout.views import Unit, View, is_plain, is_transposed
from quintic.optim.plan.exchange import Exchange
from quintic.optim.plan.members import Kind, Member
from quintic.optim.plan.offload_size import Offloaded
from quintic.optim.plan.row_division import RowDivision
from quintic.optim.plan.schedule import Stages
from quintic.optim.polar.forms import Form
from quintic.optim.state.parts import Part

__all__ = ["Bucket", "Sharding", "Travel", "TravellingUnit"]


@dataclass(frozen=True, slots=True)
class TravellingUnit:
    """A unit of one parameter."""

    name: str
    index: int
    """Position of the parameter in its group."""
    unit: Unit
    first_matrices: tuple[int, ...]
    """Position of each of its matrices among all matrices of the parameter."""


@dataclass(frozen=True)
class Travel:
    """How the matrices of one bucket come together and their updates go back."""

    exchange: Exchange
    units: tuple[TravellingUnit, ...]
    """In the order of their owners."""
    view: View
    """What matrices a unit is made of."""
    kinds: tuple[Kind, ...]
    """One for each matrix of a unit."""

    @cached_property
    def is_plain(self) -> bool:
        """Return whether a unit is one matrix or its transpose, with no groups of rows."""
        return is_plain(self.view, self.exchange.unit_shape)

    @cached_property
    def is_transposed(self) -> bool:
        """Return whether a unit stores (in, out), a matrix being (out, in)."""
        return is_transposed(self.view)

    @property
    def owned(self) -> tuple[TravellingUnit, ...]:
        """Return the units that this rank orthogonalises."""
        return self.units[self.exchange.owned]


@dataclass(frozen=True)
class Sharding:
    """How the parts of one bucket are divided among ranks."""

    ranks: tuple[int, ...]
    position: int
    """This rank's place among them."""
    parts: tuple[Part, ...]
    """In the order of their owners."""
    is_direct: bool = False
    """Whether the parts are one whole parameter, in the order of its memory: then messages need no packing."""
    rows: RowDivision | None = None
    """How its rows are divided, where only those that were touched need to travel (`comms="sharded_sparse"`)."""

    @cached_property
    def of_owners(self) -> list[slice]:
        """Return for each rank which of the parts it owns."""
        stops = list(accumulate(Counter(part.owner for part in self.parts)[owner] for owner in range(len(self.ranks))))
        return [slice(start, stop) for start, stop in pairwise([0, *stops])]

    @cached_property
    def entries(self) -> list[int]:
        """Return how many entries each rank owns."""
        return [sum(part.numel for part in self.parts[of_owner]) for of_owner in self.of_owners]

    @cached_property
    def owned(self) -> tuple[Part, ...]:
        """Return the parts of this rank."""
        return self.parts[self.of_owners[self.position]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The parameters, or parts of them, that one batched computation updates."""

    algorithm: str
    group: int
    """Position of the parameter group in `optimizer.param_groups`."""
    members: tuple[Member, ...]
    shape: tuple[int, int] | None
    """(m, n) of every matrix; None for AdamW."""
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    """Implementation of the element-wise passes."""
    form: Form | None
    """How the matrices are orthogonalised; None for AdamW and for a user's function."""
    numel: int
    flops: int
    """Floating-point operations of orthogonalisation (matrix products only); 0 for AdamW."""
    workspace_bytes: int
    """Upper bound of the temporary memory this bucket's batched computation needs."""
    travel: Travel | None = None
    """How its matrices come together, where they lie on several ranks; `members` are then this rank's pieces."""
    stages: Stages | None = None
    """Temporary memory by stage, where the bucket is stepped with collectives under way."""
    shared_stages: Stages | None = None
    """The same of the rank that needs most: all ranks must agree about what is under way at a time."""
    sharding: Sharding | None = None
    """Who owns which part, where state is divided among ranks; `members` are then this rank's parts."""
    offloaded: Offloaded | None = None
    """Which of its state is in host memory, with `offload=True`."""

    @property
    def num_matrices(self) -> int:
        """Return how many matrices the batched computation has on this rank."""
        if self.travel is not None:
            return self.travel.exchange.num_owned * len(self.travel.kinds)
        return sum(member.num_matrices for member in self.members)

    @property
    def travels(self) -> bool:
        """Return whether stepping it needs collectives, which all ranks run in the same order."""
        return self.sharding is not None or (self.travel is not None and not self.travel.exchange.is_local)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks among which it is divided; none where this rank is alone with it."""
        if self.sharding is not None:
            return self.sharding.ranks
        return self.travel.exchange.ranks if self.travel is not None else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters that ranks have a part of in it."""
        parts = self.sharding.parts if self.sharding is not None else self.members
        return tuple(part.name for part in (self.travel.units if self.travel is not None else parts))

    @property
    def name(self) -> str:
        """Return the name of the first parameter."""
        return self.travel.units[0].name if self.travel is not None else self.members[0].name

    @property
    def num_parts(self) -> int:
        """Return how many parts of parameters the bucket has."""
        return len(self.travel.units) if self.travel is not None else len(self.members)

    @property
    def method(self) -> str:
        """Return how this bucket is updated, in one word or two."""
        if self.algorithm == "adamw":
            return "adamw" if self.sharding is None or self.sharding.rows is None else "adamw, sparse"
        return str(self.form) if self.form is not None else "function"
