"""An update rule: a frozen value made of stages, each of which declares the state that it needs.

A step of a matrix goes through the stages of its rule in this order. Shapes: a parameter's pieces lie on the ranks as
its layout has them; matrices are whole, (b, m, n), at their owner.

    direction   element-wise, on the pieces: momentum, or the whole of AdamW
    before      whole matrices, before they are orthogonalised
    polar       whole matrices; a rule without it (`orthogonalizes=False`) ends with its direction
    after       whole matrices: updates, and factors (b, m or 1, n or 1) that multiply them
    write       element-wise, on the pieces: decay and step, the same for all rules (`update.apply_`)

State follows from the specs: how it is made, moved, loaded, saved, offloaded, planned and explained. A new rule is a
file with its stages and a value of `UpdateRule`, and a line in `table.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from quintic.optim.rules.bf16_state import moment_dtype_of
from quintic.optim.rules.update import AdjustLr, adjust_lr_factor, second_moment_shape

__all__ = [
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MANTISSA",
    "MASTER",
    "MASTER_SPECS",
    "MOMENTUM",
    "MOMENTUM_DIRECTION",
    "STEP",
    "Direction",
    "MatrixStage",
    "StageOptions",
    "StateSpec",
    "UpdateRule",
]

Algorithm = Literal["muon", "adamw"]

MOMENTUM, EXP_AVG, EXP_AVG_SQ, STEP = "momentum_buffer", "exp_avg", "exp_avg_sq", "step"
MASTER, MANTISSA = "master", "mantissa"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The declaration of one tensor of a parameter's state."""

    name: str
    dtype: Literal["average", "wide", "float32", "uint16"]
    """`"average"`: float32 or `state_dtype`; `"wide"`: float32; either is float64 for float64 parameters."""
    shape: Literal["param", "neurons", "scalar"]
    """`"param"`: lies as the parameter does, on the same ranks, and is what `offload` moves to the host.

    `"neurons"`: a number for each row of a tall matrix, column of a wide one, in one vector; whole on every rank, and
    sent to all of them by the owner of the matrix. `"scalar"`: one number, on every rank.
    """

    def dtype_for(self, weights: torch.dtype, state_dtype: Literal["bf16"] | None) -> torch.dtype:
        """Return the dtype beside weights of a dtype; the option `state_dtype` is that of their group."""
        if self.dtype == "average":
            return moment_dtype_of(weights, state_dtype)
        if self.dtype == "wide":
            return torch.promote_types(weights, torch.float32)
        return torch.float32 if self.dtype == "float32" else torch.uint16

    def shape_for(self, shapes: Sequence[tuple[int, int, int]]) -> tuple[int, ...] | None:
        """Return the shape, None for the parameter's own; `shapes` are (count, m, n) for each kind of its matrices."""
        if self.shape == "param":
            return None
        return () if self.shape == "scalar" else (sum(b * prod(second_moment_shape(m, n)) for b, m, n in shapes),)


MASTER_SPECS = {"fp32": StateSpec(MASTER, "float32", "param"), "mantissa": StateSpec(MANTISSA, "uint16", "param")}
"""The state that holds the extra precision of low-precision weights, by the option `master`; see `precision.py`."""


class StageOptions(Protocol):
    """The options of a group that stages on whole matrices read."""

    @property
    def normalize_beta(self) -> float:
        """Averaging coefficient of a second moment."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The first, element-wise stage. `update.py` has its arithmetic, the passes of a step run it."""

    state: tuple[StateSpec, ...]
    averages: tuple[str, ...]
    """Options that are coefficients of averages kept in `state_dtype`."""


MOMENTUM_DIRECTION = Direction((StateSpec(MOMENTUM, "average", "param"),), ("momentum",))
"""The momentum that rules on matrices begin with."""


class MatrixStage:
    """A stage on whole matrices; stages of rules are subclasses that are frozen dataclasses.

    A stage with a kernel twin has `has_kernel = True` and `apply_kernel`; the others run in plain PyTorch on GPUs, too.
    """

    label: ClassVar[str]
    """Its name in a profile."""
    state: ClassVar[tuple[StateSpec, ...]] = ()
    averages: ClassVar[tuple[str, ...]] = ()
    """Options that are coefficients of averages kept in `state_dtype`."""
    temporaries: ClassVar[int] = 0
    """Tensors of float32 as large as the matrices that `apply` needs at one time, for the plan's bound of memory."""
    has_kernel: ClassVar[bool] = False

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return matrices (b, m, n) in place of those given, and factors on them, None for 1.

        Factors, (b, m, 1) or (b, 1, n), are for stages with `"neurons"` state, in whose message they travel. Each
        matrix must come out as it would by itself, to the last bit: sums as in `sums.py`. State by name, (b, m, n), or
        (b, m, 1) or (b, 1, n) for `"neurons"`, in float32 or float64, is changed in place; the matrices are not.
        """
        raise NotImplementedError

    def apply_kernel(
        self, matrices: Tensor, addresses: Tensor, factors: Tensor, options: StageOptions, mask: Tensor | None
    ) -> Tensor:
        """Return factors times those of `apply`, for a stage of one `"neurons"` state that returns its matrices.

        Addresses, (b,) int64, are those of each matrix' state in memory; `mask`, () or (b,) int32, is zero where the
        state stays as it is.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One way to update parameters; the rules of the library are values of it in `table.py`."""

    title: str
    """Its name for people."""
    algorithm: Algorithm
    """The `algorithm` of its groups."""
    direction: Direction
    before: tuple[MatrixStage, ...] = ()
    orthogonalizes: bool = True
    """Whether it steps matrices; without it the rule is element-wise."""
    after: tuple[MatrixStage, ...] = ()
    scale: AdjustLr = None
    """The `adjust_lr` that belongs to the rule; None for that of the group."""

    @cached_property
    def state(self) -> tuple[StateSpec, ...]:
        """The state of all stages."""
        stages = (spec for stage in (*self.before, *self.after) for spec in stage.state)
        return (*self.direction.state, *stages)

    @cached_property
    def averages(self) -> tuple[str, ...]:
        """The options that are coefficients of averages kept in `state_dtype`."""
        stages = (name for stage in (*self.before, *self.after) for name in stage.averages)
        return (*self.direction.averages, *stages)

    @cached_property
    def matrix_state(self) -> tuple[StateSpec, ...]:
        """State of the parameter's shape that stages on whole matrices need: it goes to the owner and comes back."""
        stages = (spec for stage in (*self.before, *self.after) for spec in stage.state)
        return tuple(spec for spec in stages if spec.shape == "param")

    @cached_property
    def neuron_state(self) -> StateSpec | None:
        """The state with a number for each neuron, which a rule has one of at most."""
        return next((spec for spec in self.state if spec.shape == "neurons"), None)

    @cached_property
    def temporaries(self) -> int:
        """The most temporary tensors of any stage on whole matrices, see `MatrixStage.temporaries`."""
        return max((stage.temporaries for stage in (*self.before, *self.after)), default=0)

    def lr_factor(self, adjust_lr: AdjustLr, m: int, n: int) -> float:
        """Return the factor on the learning rate of an (m, n) matrix of a group with this `adjust_lr`."""
        return adjust_lr_factor(adjust_lr if self.scale is None else self.scale, m, n)

    def prepare(self, directions: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return directions (b, m, n) after the stages before the polar step, in their dtype."""
        matrices = directions
        for stage in self.before:
            matrices, _ = stage.apply(matrices, state, options)
        return matrices if matrices is directions else matrices.to(directions.dtype)

    def finish(
        self, update: Tensor, factors: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the update (b, m, n) after the last stages on whole matrices, in its dtype, and factors times theirs.

        State, in the dtypes in which it is kept, is advanced in place.
        """
        matrices, kept = update, state
        # bfloat16 state is advanced in float32 and rounded once.
        state = {name: value if value.itemsize >= 4 else value.float() for name, value in kept.items()}
        for stage in self.after:
            matrices, own = stage.apply(matrices, state, options)
            factors = factors if own is None else factors * own
        for name, value in state.items():
            if value is not kept[name]:
                kept[name].copy_(value)
        # Updates travel in one dtype: rounded here, every layout has the same bits.
        return matrices.to(update.dtype), factors
