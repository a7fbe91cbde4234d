"""An update rule: a frozen value made of stages, and each stage declares the state that it needs.

A step of a matrix goes through the stages of its rule in this order. Some stages are element-wise and run on each rank,
on the pieces of parameters that it holds. The others need whole matrices, (b, m, n), and run at the owner of the
matrices, one of the ranks:

    direction   element-wise: momentum, or the whole of AdamW
    before      whole matrices: changes directions before they are orthogonalised
    polar       whole matrices: orthogonalises them; a rule with `orthogonalizes=False` ends before it
    after       whole matrices: returns updates, and factors (b, m or 1, n or 1) that multiply them
    write       element-wise: decay and step, the same for all rules (`update.decay_and_step_`)

All code that makes, moves, loads, saves, offloads, plans or explains state reads the `StateSpec`s of the stages and
knows no rule by name. A new rule is a file with its stages and a value of `UpdateRule`, a line in `table.py`, and a
value of the option `normalize` in `groups/options.py` that chooses the rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from quintic.optim.numeric.bf16_state import moment_dtype_of
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
    "Algorithm",
    "Direction",
    "MatrixStage",
    "StageOptions",
    "StateSpec",
    "UpdateRule",
]

Algorithm = Literal["muon", "adamw"]

# Keys of `optimizer.state[param]`. PyTorch's optimizers have the keys in the first line, too.
MOMENTUM, EXP_AVG, EXP_AVG_SQ, STEP = "momentum_buffer", "exp_avg", "exp_avg_sq", "step"
MASTER, MANTISSA = "master", "mantissa"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The declaration of one tensor of a parameter's state."""

    name: str
    dtype: Literal["average", "wide", "float32", "uint16"]
    """`"average"`: float32, or bfloat16 with `state_dtype="bf16"`; `"wide"`: float32. Either is float64 for float64
    parameters. `"float32"` and `"uint16"` hold for all parameters."""
    shape: Literal["param", "neurons", "scalar"]
    """`"param"`: has the parameter's shape and lies on the same ranks; only such state is moved by `offload`.

    `"neurons"`: one vector with a number for each row of tall matrices, and for each column of wide ones. Every rank
    has all of it, and the owner of a matrix sends its numbers to the other ranks. `"scalar"`: one number, on all ranks.
    """

    def dtype_for(self, weights: torch.dtype, state_dtype: Literal["bf16"] | None) -> torch.dtype:
        """Return the dtype of this state for weights of dtype `weights`, in a group with this option `state_dtype`."""
        # Averages may be kept in bfloat16 to save memory, if the group asks for it.
        if self.dtype == "average":
            return moment_dtype_of(weights, state_dtype)
        if self.dtype == "wide":
            return torch.promote_types(weights, torch.float32)
        return torch.float32 if self.dtype == "float32" else torch.uint16

    def shape_for(self, shapes: Sequence[tuple[int, int, int]]) -> tuple[int, ...] | None:
        """Return the shape of this state, or None for the parameter's own shape.

        `shapes` has (count, m, n) for each kind of matrix in the parameter.
        """
        if self.shape == "param":
            return None
        # A vector of the neurons of all matrices: max(m, n) numbers for each.
        return () if self.shape == "scalar" else (sum(b * prod(second_moment_shape(m, n)) for b, m, n in shapes),)


MASTER_SPECS = {"fp32": StateSpec(MASTER, "float32", "param"), "mantissa": StateSpec(MANTISSA, "uint16", "param")}
"""Value of the option `master` -> the state with the bits that low-precision weights lack (`precision.py`)."""


class StageOptions(Protocol):
    """The options that stages on whole matrices may read; a `Group` has them."""

    @property
    def normalize_beta(self) -> float:
        """Coefficient of the average of squares that a stage normalises by."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The first stage of a rule, which is element-wise.

    It declares state only: `update.py` has the arithmetic, and the two backends run it (`step/torch_backend.py`,
    `step/triton_backend.py`).
    """

    state: tuple[StateSpec, ...]
    averages: tuple[str, ...]
    """Names of options that are coefficients of this state, if it is of dtype `"average"`: bfloat16 state cannot follow
    coefficients that are too close to 1, which checks of options reject."""


MOMENTUM_DIRECTION = Direction((StateSpec(MOMENTUM, "average", "param"),), ("momentum",))
"""The direction of all rules on matrices: momentum, as kept in `momentum_buffer`."""


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
    has_kernel: ClassVar[bool] = False
    """Whether there is an `apply_kernel`."""

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return new matrices (b, m, n), and factors to multiply them with, or None if there are no factors.

        A result must not depend, to the last bit, on the other matrices of the batch, because layouts batch them
        differently: add up with `sums.py`. The plan runs it on tensors of the meta device, too, which have no values,
        to count its memory. Only a stage with `"neurons"` state may return factors, since they are sent
        to other ranks in the message of that state.

        Args:
            matrices: (b, m, n); they must not be changed.
            state: by name (b, m, n), or for `"neurons"` (b, m, 1) or (b, 1, n), in float32 or float64; it is changed
                in place.
            options: the group's options.

        Returns:
            (matrices (b, m, n), factors (b, m, 1) or (b, 1, n) or None).
        """
        raise NotImplementedError

    def apply_kernel(
        self, matrices: Tensor, addresses: Tensor, factors: Tensor, options: StageOptions, mask: Tensor | None
    ) -> Tensor:
        """Return `factors` times the factors that `apply` would return; the matrices stay as they are.

        Only for stages with a single `"neurons"` state. The kernel advances this state in place. The plan counts its
        memory as that of `apply`; `kernels.launch.launch` does nothing with tensors of the meta device.

        Args:
            matrices: (b, m, n).
            addresses: (b,) int64, the memory address of each matrix' state.
            factors: (b, m or 1, n or 1), the factors so far.
            options: the group's options.
            mask: () or (b,) int32; where it is zero, state keeps its bits. None for nowhere.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One way to update parameters. `table.py` lists the library's rules."""

    title: str
    """The name of the rule for people, such as "NorMuon"."""
    algorithm: Algorithm
    """The option `algorithm` of the groups with this rule; several rules may have one algorithm."""
    direction: Direction
    before: tuple[MatrixStage, ...] = ()
    """Stages on directions, in order, before the polar step."""
    orthogonalizes: bool = True
    """Whether directions are orthogonalised as matrices; otherwise the rule is element-wise and has no matrices."""
    after: tuple[MatrixStage, ...] = ()
    """Stages on orthogonalised directions, in order."""
    scale: AdjustLr = None
    """The `adjust_lr` that the rule needs; None if the group's option `adjust_lr` decides."""

    def __post_init__(self) -> None:
        """Raise a ValueError for state that the stages cannot have."""
        if any(spec.shape == "neurons" for stage in self.before for spec in stage.state):
            raise ValueError(f"{self.title}: factors multiply updates, so 'neurons' state is for stages in after alone")

    @cached_property
    def stages(self) -> tuple[MatrixStage, ...]:
        """The stages on whole matrices, in order, without the polar step."""
        return (*self.before, *self.after)

    @cached_property
    def state(self) -> tuple[StateSpec, ...]:
        """The state of all stages."""
        stages = (spec for stage in self.stages for spec in stage.state)
        return (*self.direction.state, *stages)

    @cached_property
    def averages(self) -> tuple[str, ...]:
        """See `Direction.averages`: the names of all stages."""
        stages = (name for stage in self.stages for name in stage.averages)
        return (*self.direction.averages, *stages)

    @cached_property
    def matrix_state(self) -> tuple[StateSpec, ...]:
        """State of the parameter's shape that stages on whole matrices need.

        It lies with the pieces, so at each step it is sent to the owner of the matrices and back.
        """
        # Momentum is left out: it is advanced on the pieces.
        stages = (spec for stage in self.stages for spec in stage.state)
        return tuple(spec for spec in stages if spec.shape == "param")

    @cached_property
    def neuron_state(self) -> StateSpec | None:
        """The state with a number for each neuron, or None; a rule has one such state at most."""
        return next((spec for spec in self.state if spec.shape == "neurons"), None)

    @cached_property
    def neuron_key(self) -> str | None:
        """The name of `neuron_state`, or None."""
        return None if self.neuron_state is None else self.neuron_state.name

    def lr_factor(self, adjust_lr: AdjustLr, m: int, n: int) -> float:
        """Return the factor on the learning rate of an (m, n) matrix of a group with this `adjust_lr`."""
        return adjust_lr_factor(adjust_lr if self.scale is None else self.scale, m, n)

    def prepare(self, directions: Tensor, state: Mapping[str, Tensor], options: StageOptions) -> Tensor:
        """Return directions (b, m, n) as the stages in `before` change them; like `finish`, without factors."""
        return _apply_in_place(self.before, directions, None, state, options)[0]

    def finish(
        self, update: Tensor, factors: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the update (b, m, n) as the stages in `after` change it, and `factors` times the stages' factors.

        The update keeps its dtype. State is advanced in place, in the dtypes in which it is kept. The reference of
        `quintic.verify` uses this method; steps use `polar/matrix_stages.py`, which also knows masks and kernels.
        """
        matrices, product = _apply_in_place(self.after, update, factors, state, options)
        assert product is not None
        return matrices, product


def _apply_in_place(
    stages: Sequence[MatrixStage],
    given: Tensor,
    factors: Tensor | None,
    kept: Mapping[str, Tensor],
    options: StageOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return matrices (b, m, n) after some stages, in the dtype that they had, and `factors` times the stages' own."""
    # Each stage gets the result of the one before it.
    matrices = given
    for stage in stages:
        # bfloat16 state is advanced in float32 and rounded once.
        state = {spec.name: kept[spec.name] for spec in stage.state}
        wide = {name: value if value.itemsize >= 4 else value.float() for name, value in state.items()}
        matrices, own = stage.apply(matrices, wide, options)
        # Factors are multiplied into the update only when weights are written.
        if own is not None:
            factors = own if factors is None else factors * own
        for name, value in wide.items():
            # Only copies in float32 have to be stored; other state was advanced itself.
            if value is not state[name]:
                state[name].copy_(value)
    # Some layouts send updates to other ranks in this dtype, so all layouts round to it: all have the same bits.
    return matrices.to(given.dtype), factors
