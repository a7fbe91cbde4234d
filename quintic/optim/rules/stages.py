"""The stages that update rules are made of, and the state that a stage declares.

A stage is a frozen dataclass; its fields are its settings. The class attributes are for the plan: the name in a
profile, the state, and the other things that the stage reads and returns beside matrices. `rule.py` lists the kinds of
stages in the order of a step.

Every stage is plain PyTorch and must not wait for the device: numbers of `StageOptions` that schedules change may be
tensors on it, which arithmetic accepts as it does floats. A stage on whole matrices may also have a Triton kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from math import prod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.numeric.bf16_state import StateDtype, moment_dtype_of
from quintic.optim.rules.update import second_moment_shape

__all__ = [
    "WEIGHT",
    "Direction",
    "DriftStage",
    "GradientStage",
    "MatrixStage",
    "PolarStage",
    "StageOptions",
    "StateSpec",
    "VectorShape",
    "WeightStage",
    "WholeGradient",
    "check_declarations",
    "vector_shape",
]

VectorShape = Literal["neurons", "rows", "matrix"]
"""The shape of numbers that a matrix (m, n) has: one for each of its rows, (m, 1); `"neurons"`, one for each row of a
tall matrix and for each column of a wide one, (m, 1) or (1, n); or one in all, (1, 1)."""

WEIGHT = "weight"
"""The name under which stages with `reads_weights` find the weights among their state."""


def vector_shape(shape: VectorShape, m: int, n: int) -> tuple[int, int]:
    """Return the shape of such numbers of an (m, n) matrix."""
    if shape == "neurons":
        return second_moment_shape(m, n)
    return (m, 1) if shape == "rows" else (1, 1)


_DTYPES = ("average", "square", "wide", "float32", "uint16", "uint8")
_SHAPES = ("param", "scalar", *get_args(VectorShape))


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The declaration of one tensor of a parameter's state, which begins as zeros."""

    name: str
    """The key in `optimizer.state[param]`; all rules with this name must declare it alike."""
    dtype: Literal["average", "square", "wide", "float32", "uint16", "uint8"]
    """`"average"` and, for averages of squares, `"square"`: float32, or as `state_dtype` says; `"wide"`: float32. All
    three are float64 for float64 parameters. The others hold for all parameters."""
    shape: Literal["param", "scalar"] | VectorShape
    """`"param"`: has the parameter's shape and lies on the same ranks; only such state is moved by `offload`.

    A `VectorShape`: one vector with the numbers of all matrices. Every rank has all of it, and the owner of a matrix
    sends its numbers to the other ranks. `"scalar"`: one number, on all ranks, for element-wise rules alone.
    """

    def __post_init__(self) -> None:
        """Raise a ValueError for another dtype or shape."""
        for field, values in (("dtype", _DTYPES), ("shape", _SHAPES)):
            if getattr(self, field) not in values:
                choices = ", ".join(map(repr, values))
                raise ValueError(f"StateSpec({self.name!r}): {field}={getattr(self, field)!r}; choose {choices}")

    @property
    def is_vector(self) -> bool:
        """Return whether it has numbers for each matrix rather than one for each entry."""
        return self.shape in ("neurons", "rows", "matrix")

    def vector_shape(self, m: int, n: int) -> tuple[int, int]:
        """Return the shape of this state of one (m, n) matrix, if it is a vector."""
        assert self.shape in ("neurons", "rows", "matrix")
        return vector_shape(self.shape, m, n)

    def dtype_for(self, weights: torch.dtype, state_dtype: StateDtype) -> torch.dtype:
        """Return the dtype of this state for weights of dtype `weights`, in a group with this option `state_dtype`.

        State of 8 bits depends on more: `placement.state_forms`.
        """
        # Averages may be kept in bfloat16 to save memory, if the group asks for it.
        if self.dtype in ("average", "square"):
            return moment_dtype_of(weights, state_dtype)
        if self.dtype == "wide":
            return torch.promote_types(weights, torch.float32)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shape_for(self, shapes: Sequence[tuple[int, int, int]]) -> tuple[int, ...] | None:
        """Return the shape of this state, or None for the parameter's own shape.

        `shapes` has (count, m, n) for each kind of matrix in the parameter.
        """
        if self.shape == "param":
            return None
        return () if self.shape == "scalar" else (sum(b * prod(self.vector_shape(m, n)) for b, m, n in shapes),)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of a group that stages may read.

    The first three may be 0-d float64 tensors on the device, because schedules change them between replays of a
    captured step.
    """

    lr: float | Tensor = 0.02
    weight_decay: float | Tensor = 0.0
    momentum: float | Tensor = 0.95
    nesterov: bool = True
    normalize_beta: float = 0.95
    """Coefficient of the average of squares that a stage normalises by."""
    kernels: Kernels = "torch"
    """An argument of `norms`: `"triton"` where the bucket has kernels."""


@dataclass(frozen=True)
class Direction:
    """The first stage of a rule, which is element-wise.

    This class declares state only: `update.py` has the arithmetic of momentum and AdamW, and the two backends run it
    (`step/torch_backend.py`, `step/triton_backend.py`). A `GradientStage` has arithmetic of its own.
    """

    state: tuple[StateSpec, ...]
    averages: tuple[str, ...]
    """Names of options that are coefficients of this state, if it is of dtype `"average"`: bfloat16 state cannot follow
    coefficients that are too close to 1, which checks of options reject."""


class GradientStage:
    """A first stage with arithmetic of its own, in place of momentum.

    It is element-wise: it runs on the pieces of a gradient that a rank holds, in any shape and order.
    """

    label: ClassVar[str]
    """Its name in a profile."""
    state: ClassVar[tuple[StateSpec, ...]] = ()
    """State of the shape `"param"`."""
    averages: ClassVar[tuple[str, ...]] = ()
    """See `Direction.averages`."""

    def apply(self, gradient: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return the direction, of the gradient's shape; it may be the gradient, and no tensor of the state.

        Args:
            gradient: entries of a gradient, in float32, or float64 for float64 weights; not changed.
            state: the same entries of the state by name, in float32 or float64, changed in place.
            options: the group's options.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class WholeGradient(GradientStage):
    """The gradient itself as direction, for rules whose averages need whole rows or matrices."""

    label = "gradients"

    def apply(self, gradient: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return the gradient."""
        return gradient


class MatrixStage:
    """A stage on whole matrices; each stage of a rule is a subclass that is a frozen dataclass.

    A subclass implements `apply` in plain PyTorch, which runs on CPUs and GPUs. It may set `has_kernel = True` and also
    implement `apply_kernel`, a Triton kernel with the same results, which then runs where the bucket has kernels.
    """

    label: ClassVar[str]
    """Its name in a profile."""
    state: ClassVar[tuple[StateSpec, ...]] = ()
    averages: ClassVar[tuple[str, ...]] = ()
    """See `Direction.averages`."""
    factors: ClassVar[VectorShape | None] = None
    """The shape of the factors that a stage after the polar step returns; None if it returns none."""
    reads_weights: ClassVar[bool] = False
    """Whether it needs the weights: where matrices lie in pieces they are sent to the owners, too."""
    has_kernel: ClassVar[bool] = False
    """Whether there is an `apply_kernel`."""

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return new matrices (b, m, n), and factors to multiply them with, or None if there are no factors.

        A result must not depend, to the last bit, on the other matrices of the batch, because layouts batch them
        differently: add up with `sums.py`. The plan runs it on tensors of the meta device, too, which have no values,
        to count its memory.

        Args:
            matrices: (b, m, n); they must not be changed.
            state: by name (b, m, n), or for vectors (b, m or 1, n or 1), in float32 or float64; it is changed in place.
                With `reads_weights` also `WEIGHT`, (b, m, n) in float32 or float64, which must not be changed.
            options: the group's options.

        Returns:
            (matrices (b, m, n), factors of the shape `factors`, (b, m or 1, n or 1), or None).
        """
        raise NotImplementedError

    def apply_kernel(
        self, matrices: Tensor, addresses: Tensor, factors: Tensor, options: StageOptions, mask: Tensor | None
    ) -> Tensor:
        """Return `factors` times the factors that `apply` would return; the matrices stay as they are.

        Only for stages with a single vector as state. The kernel advances this state in place. The plan counts its
        memory as that of `apply`; `kernels.launch.launch` does nothing with tensors of the meta device.

        Args:
            matrices: (b, m, n).
            addresses: (b,) int64, the memory address of each matrix' state.
            factors: (b, m or 1, n or 1), the factors so far.
            options: the group's options.
            mask: () or (b,) int32; where it is zero, state keeps its bits. None for nowhere.
        """
        raise NotImplementedError


class PolarStage:
    """A way to orthogonalise in several rounds; a frozen dataclass."""

    def rounds_of(self, m: int, n: int) -> int:
        """Return how often `apply` orthogonalises an (m, n) matrix, for counts of operations."""
        raise NotImplementedError

    def apply(self, matrices: Tensor, orthogonalize: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the update directions (b, m, n), in the dtype of `orthogonalize`'s result.

        Args:
            matrices: (b, m, n) in any floating dtype; not changed.
            orthogonalize: the group's orthogonalisation, from (b, m, n) in the dtype of `matrices` to new (b, m, n).
        """
        raise NotImplementedError


class WeightStage:
    """A last stage on whole matrices: decides how weights w take an update u, w <- keep w - rate u.

    It takes the place of decay and step; weight decay is the stage's own business. Factors of earlier stages are in the
    update already. A subclass is a frozen dataclass.
    """

    label: ClassVar[str]
    """Its name in a profile."""
    state: ClassVar[tuple[StateSpec, ...]] = ()
    averages: ClassVar[tuple[str, ...]] = ()
    """See `Direction.averages`."""
    numbers: ClassVar[VectorShape]
    """The shape of `keep` and of `rate`."""

    def apply(
        self, weights: Tensor, updates: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return (keep, rate), each of the shape `numbers`; as with `MatrixStage.apply` without a trace of the batch.

        Args:
            weights: (b, m, n) in float32 or float64, with the bits of masters; not changed.
            updates: (b, m, n) in any floating dtype; not changed.
            scales: (b, 1, 1), the factor from `adjust_lr` times the matrix' entry in `lr_multipliers`.
            state: as for `MatrixStage.apply`.
            options: the group's options.
        """
        raise NotImplementedError


class DriftStage:
    """An element-wise stage after a step: adds to weights something that follows from the step they have made."""

    label: ClassVar[str]
    """Its name in a profile."""
    state: ClassVar[tuple[StateSpec, ...]] = ()
    """State of the shape `"param"`."""

    def apply(self, step: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return the addition, of the step's shape.

        Args:
            step: the change of some entries of a weight, in float32 or float64.
            state: the same entries of the state by name, in float32 or float64, changed in place.
            options: the group's options.
        """
        raise NotImplementedError


def check_declarations(stage: Any) -> None:
    """Raise a TypeError or ValueError for a stage that lacks what the plan has to know of it."""
    kind = type(stage)
    # Rules are keys, and checkpoints name them by their stages' fields.
    if not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{kind.__name__} must be a frozen dataclass: put @dataclass(frozen=True) above the class")
    try:
        hash(stage)
    except TypeError:
        raise TypeError(f"{stage}: its fields must be hashable; give tuples in place of lists") from None
    if isinstance(stage, PolarStage):
        return
    if not isinstance(getattr(stage, "label", None), str):
        raise TypeError(f"{kind.__name__} has no label: give it one, such as label = 'my stage'")
    if not isinstance(stage.state, tuple) or not all(isinstance(spec, StateSpec) for spec in stage.state):
        raise TypeError(f"{kind.__name__}: state must be a tuple of StateSpecs, as (StateSpec(...),)")
    if any(spec.name == WEIGHT for spec in stage.state):
        raise ValueError(
            f"{kind.__name__}: its state {WEIGHT!r} is named like the weights for stages; choose another name"
        )
    for field in ("factors", "numbers"):
        shape = getattr(stage, field, None)
        is_needed = field == "numbers" and isinstance(stage, WeightStage)
        if shape not in get_args(VectorShape) and (shape is not None or is_needed):
            choices = ", ".join(map(repr, get_args(VectorShape)))
            raise ValueError(f"{kind.__name__}: {field}={shape!r}; choose {choices}")
