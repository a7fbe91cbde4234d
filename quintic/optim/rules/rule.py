"""An update rule: a frozen value made of stages, and each stage declares the state that it needs.

A step of a matrix goes through the stages of its rule in this order. Some stages are element-wise and run on each rank,
on the pieces of parameters that it holds. The others need whole matrices, (b, m, n), and run at the owner of the
matrices, one of the ranks:

    direction   element-wise: momentum, another `GradientStage`, or the whole of AdamW
    before      whole matrices: changes directions before they are orthogonalised
    polar       whole matrices: orthogonalises them, in one round or as a `PolarStage` does; a rule with
                `orthogonalizes=False` ends before it
    after       whole matrices: returns updates, and factors (b, m or 1, n or 1) that multiply them
    constrain   whole matrices: compares weights and updates, and returns factors of both (`WeightStage`)
    write       element-wise: decay and step (`update.decay_and_step_`), or weights and updates times their factors
    drift       element-wise: adds to weights something that follows from their step (`DriftStage`)

All code that makes, moves, loads, saves, offloads, plans or explains state reads the `StateSpec`s of the stages and
knows no rule by name. A new rule is a file with its stages and a value of `UpdateRule`, and a line in `table.py`, which
gives it a name. A rule of a user's own needs no name: it is itself a value of the option `update_rule`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quintic.optim.rules.stages import (
    WEIGHT,
    Direction,
    DriftStage,
    GradientStage,
    MatrixStage,
    PolarStage,
    StageOptions,
    StateSpec,
    VectorShape,
    WeightStage,
    check_declarations,
)
from quintic.optim.rules.update import AdjustLr, adjust_lr_factor
from quintic.optim.rules.wide_state import store, widened

__all__ = [
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MANTISSA",
    "MANTISSA_BYTE",
    "MASTER",
    "MASTER_SPECS",
    "MOMENTUM",
    "MOMENTUM_DIRECTION",
    "PARAM_SHAPED_STATE",
    "STATE_KEYS",
    "STEP",
    "Algorithm",
    "UpdateRule",
]

Algorithm = Literal["muon", "adamw"]

# Keys of `optimizer.state[param]`. PyTorch's optimizers have the keys in the first line, too.
MOMENTUM, EXP_AVG, EXP_AVG_SQ, STEP = "momentum_buffer", "exp_avg", "exp_avg_sq", "step"
MASTER, MANTISSA, MANTISSA_BYTE = "master", "mantissa", "mantissa_byte"

MASTER_SPECS = {
    "fp32": StateSpec(MASTER, "float32", "param"),
    "mantissa": StateSpec(MANTISSA, "uint16", "param"),
    "8bit": StateSpec(MANTISSA_BYTE, "uint8", "param"),
}
"""Value of the option `master` -> the state with the bits that low-precision weights lack (`precision.py`)."""

WEIGHT_SPEC = StateSpec(WEIGHT, "wide", "param")
"""Weights as stages read them; no state."""

MOMENTUM_DIRECTION = Direction((StateSpec(MOMENTUM, "average", "param"),), ("momentum",))
"""The direction of most rules on matrices: momentum, as kept in `momentum_buffer`."""

STATE_KEYS: set[str] = set()
"""Names of all state of the rules that were made so far; other keys of a parameter's state are the user's."""

PARAM_SHAPED_STATE: set[str] = set()
"""Names of the state that has the parameter's shape and lies as the parameter does."""

# Name -> its declaration, and the title of the rule that made it first.
_declared: dict[str, tuple[StateSpec, str]] = {}


def _declare(specs: Sequence[StateSpec], title: str) -> None:
    """Add the state of a rule to the names above; a ValueError if another rule declares a name otherwise."""
    for spec in specs:
        other, owner = _declared.get(spec.name, (spec, title))
        # A rule of the same title is a newer form of it, as when the cell of a notebook is run again.
        if other != spec and owner != title:
            raise ValueError(
                f"{title}: its state {spec.name!r} is declared as {spec}, and the rule {owner!r} has {other}; choose "
                f"another name"
            )
        _declared[spec.name] = spec, owner
        STATE_KEYS.add(spec.name)
        (PARAM_SHAPED_STATE.add if spec.shape == "param" else PARAM_SHAPED_STATE.discard)(spec.name)


_declare(tuple(MASTER_SPECS.values()), "masters")


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One way to update parameters, for the option `update_rule`. `table.py` lists the library's rules.

    Raises:
        ValueError: the stages do not fit each other, or another rule has state of one of these names in another form.
    """

    title: str
    """The name of the rule for people, such as "NorMuon"."""
    algorithm: Algorithm = "muon"
    """The option `algorithm` of the groups with this rule; several rules may have one algorithm."""
    direction: Direction | GradientStage = MOMENTUM_DIRECTION
    before: tuple[MatrixStage, ...] = ()
    """Stages on directions, in order, before the polar step."""
    polar: PolarStage | None = None
    """None orthogonalises once."""
    orthogonalizes: bool = True
    """Whether directions are orthogonalised as matrices; otherwise the rule is element-wise and has no matrices."""
    after: tuple[MatrixStage, ...] = ()
    """Stages on orthogonalised directions, in order."""
    constrain: WeightStage | None = None
    """None for decay and step."""
    drift: DriftStage | None = None
    scale: AdjustLr = None
    """The `adjust_lr` that the rule needs; None if the group's option `adjust_lr` decides."""

    def __post_init__(self) -> None:
        """Raise a ValueError for stages that do not fit, and declare the state."""
        self._check_kinds()
        if any(stage.factors for stage in self.before):
            raise ValueError(f"{self.title}: factors multiply updates, so stages in before cannot have them")
        if sum(stage.factors is not None for stage in self.after) > 1:
            raise ValueError(f"{self.title}: only one stage in after can have factors")
        elementwise = [stage for stage in (self.direction, self.drift) if isinstance(stage, GradientStage | DriftStage)]
        for stage in elementwise:
            if any(spec.shape != "param" for spec in stage.state):
                raise ValueError(
                    f"{self.title}: {type(stage).__name__} is element-wise, and can only have state of the shape "
                    f"'param'"
                )
        names = [spec.name for spec in self.state]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{self.title}: its state {name!r} is declared in two ways; choose another name for one"
                )
        _declare(self.state, self.title)

    def _check_kinds(self) -> None:
        """Raise a TypeError or ValueError for stages of a wrong kind, or without their declarations."""
        if not isinstance(self.title, str):
            raise TypeError(f"title={self.title!r} must be a text, the name of the rule for people")
        if not callable(self.scale):
            try:
                adjust_lr_factor(self.scale, 1, 1)
            except ValueError as error:
                raise ValueError(f"{self.title}: {str(error).replace('adjust_lr', 'scale', 1)}") from None
        for field, kind in (("before", MatrixStage), ("after", MatrixStage)):
            stages: object = getattr(self, field)
            if not isinstance(stages, tuple) or not all(isinstance(stage, kind) for stage in stages):
                raise TypeError(f"{self.title}: {field}={stages!r} must be a tuple of MatrixStages, as (MyStage(),)")
        others: tuple[tuple[str, tuple[type, ...]], ...] = (
            ("direction", (Direction, GradientStage)),
            ("polar", (PolarStage, type(None))),
            ("constrain", (WeightStage, type(None))),
            ("drift", (DriftStage, type(None))),
        )
        for field, kinds in others:
            stage = getattr(self, field)
            if not isinstance(stage, kinds):
                expected = "GradientStage" if field == "direction" else kinds[0].__name__
                raise TypeError(f"{self.title}: {field}={stage!r} must be a {expected}")
        for stage in (self.direction, *self.before, self.polar, *self.after, self.constrain, self.drift):
            if stage is not None and not isinstance(stage, Direction):
                check_declarations(stage)

    def __str__(self) -> str:
        """Return the rule as checkpoints name it: its title and its stages, with their settings."""
        stages = (self.direction, *self.before, self.polar, *self.after, self.constrain, self.drift)
        own = [repr(stage) for stage in stages if stage is not None and type(stage) is not Direction]
        return f"{self.title}: {', '.join(own)}" if own else self.title

    @cached_property
    def gradient_stage(self) -> GradientStage | None:
        """The direction, if the backends do not have it."""
        return self.direction if isinstance(self.direction, GradientStage) else None

    @cached_property
    def stages(self) -> tuple[MatrixStage | WeightStage, ...]:
        """The stages on whole matrices, in order, without the polar step."""
        return (*self.before, *self.after, *(() if self.constrain is None else (self.constrain,)))

    @cached_property
    def state(self) -> tuple[StateSpec, ...]:
        """The state of all stages; stages that declare the same state share it."""
        stages = (spec for stage in self.stages for spec in stage.state)
        drift = () if self.drift is None else self.drift.state
        return tuple(dict.fromkeys((*self.direction.state, *stages, *drift)))

    @cached_property
    def packed_state(self) -> Mapping[str, torch.dtype]:
        """The averages that `state_dtype="int8"` keeps in 8 bits: names -> dtypes."""
        if type(self.direction) is not Direction:
            return {}
        kinds = {"average": torch.int8, "square": torch.uint8}
        return {spec.name: kinds[spec.dtype] for spec in self.direction.state if spec.dtype in kinds}

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
        # State of element-wise stages is left out: it is advanced on the pieces.
        stages = dict.fromkeys(spec for stage in self.stages for spec in stage.state)
        return tuple(spec for spec in stages if spec.shape == "param")

    @cached_property
    def state_of_updates(self) -> tuple[StateSpec, ...]:
        """State of the parameter's shape that follows from the polar factor, or from the steps of weights."""
        return (*self.matrix_state, *(() if self.drift is None else self.drift.state))

    @cached_property
    def reads_weights(self) -> bool:
        """Whether a stage on whole matrices needs the weights, which are sent to the owners of matrices then."""
        return self.constrain is not None or any(stage.reads_weights for stage in (*self.before, *self.after))

    @cached_property
    def sent_state(self) -> tuple[StateSpec, ...]:
        """Sent to the owners of matrices beside directions: `matrix_state`, and weights if stages read them."""
        return (*self.matrix_state, *((WEIGHT_SPEC,) if self.reads_weights else ()))

    @cached_property
    def vectors_of_kernels(self) -> tuple[str, ...]:
        """The names of vector state that stages with kernels find by address."""
        return tuple(stage.state[0].name for stage in (*self.before, *self.after) if stage.has_kernel)

    @cached_property
    def vector_state(self) -> tuple[StateSpec, ...]:
        """The state with numbers for each matrix, which owners advance and send to the other ranks."""
        return tuple(spec for spec in self.state if spec.is_vector)

    @cached_property
    def factors(self) -> VectorShape | None:
        """The shape of the factors that a stage after the polar step returns; None if none does."""
        return next((stage.factors for stage in self.after if stage.factors is not None), None)

    @cached_property
    def numbers(self) -> tuple[VectorShape, ...]:
        """The shapes of the numbers that owners send with updates: of weights and updates, of updates, or nothing."""
        if self.constrain is not None:
            return (self.constrain.numbers, self.constrain.numbers)
        return () if self.factors is None else (self.factors,)

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

    def constrained(
        self, update: Tensor, scales: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and of updates (b, m, n) that `constrain` gives; state as in `finish`."""
        stage = self.constrain
        assert stage is not None
        wide = widened(state, [spec.name for spec in stage.state])
        result = stage.apply(state[WEIGHT], update, scales, wide, options)
        store(state, wide)
        return result


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
        wide = widened(kept, [spec.name for spec in stage.state])
        weights = {WEIGHT: kept[WEIGHT]} if stage.reads_weights else {}
        matrices, own = stage.apply(matrices, wide | weights, options)
        # Factors are multiplied into the update only when weights are written.
        if own is not None:
            factors = own if factors is None else factors * own
        store(kept, wide)
    # Some layouts send updates to other ranks in this dtype, so all layouts round to it: all have the same bits.
    return matrices.to(given.dtype), factors
