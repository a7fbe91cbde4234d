"""The update rules of the library, and the one place that decides which of them a group has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from quintic.optim.rules.adamuon import ADAMUON
from quintic.optim.rules.rule import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER_SPECS,
    MOMENTUM_DIRECTION,
    STEP,
    Algorithm,
    Direction,
    MatrixStage,
    StageOptions,
    StateSpec,
    UpdateRule,
)
from quintic.optim.rules.update import neuron_factors_

__all__ = [
    "ADAMW",
    "ALGORITHMS",
    "MUON",
    "NEURON_MOMENT",
    "NORMUON",
    "PARAM_SHAPED_STATE",
    "RULES",
    "STATE_KEYS",
    "orthogonalizes",
    "rule_of",
]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

NEURON_MOMENT = "second_momentum_buffer"


@dataclass(frozen=True)
class NeuronSecondMoment(MatrixStage):
    """Factors that even out the neurons of updates: NorMuon, see `update.neuron_factors_`."""

    label = "normalize neurons"
    state = (StateSpec(NEURON_MOMENT, "wide", "neurons"),)
    has_kernel = True

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """See `MatrixStage`."""
        return matrices, neuron_factors_(matrices, state[NEURON_MOMENT], beta=float(options.normalize_beta))

    def apply_kernel(
        self, matrices: Tensor, addresses: Tensor, factors: Tensor, options: StageOptions, mask: Tensor | None
    ) -> Tensor:
        """See `MatrixStage`."""
        from quintic.kernels.update.neuron import advance_neuron_factors_

        return advance_neuron_factors_(
            matrices, addresses, factors, beta=float(options.normalize_beta), apply_mask=mask
        )


MUON = UpdateRule(title="Muon", algorithm="muon", direction=MOMENTUM_DIRECTION)
NORMUON = UpdateRule(title="NorMuon", algorithm="muon", direction=MOMENTUM_DIRECTION, after=(NeuronSecondMoment(),))
ADAMW = UpdateRule(
    title="AdamW",
    algorithm="adamw",
    direction=Direction(
        (
            StateSpec(STEP, "float32", "scalar"),
            StateSpec(EXP_AVG, "average", "param"),
            StateSpec(EXP_AVG_SQ, "average", "param"),
        ),
        ("betas",),
    ),
    orthogonalizes=False,
)

# (algorithm, normalize) -> rule; AdamW's groups may have any `normalize`, which they do not read.
RULES: Mapping[tuple[Algorithm, str | None], UpdateRule] = {
    ("muon", None): MUON,
    ("muon", "neuron"): NORMUON,
    ("muon", "element"): ADAMUON,
    ("adamw", None): ADAMW,
}

_SPECS = (
    *(spec for rule in RULES.values() for spec in rule.state),
    *MASTER_SPECS.values(),
)

STATE_KEYS = frozenset(spec.name for spec in _SPECS)
"""Names of all state; other keys of a parameter's state are the user's."""

# In one order on all ranks, which make collectives of it.
PARAM_SHAPED_STATE = tuple(dict.fromkeys(spec.name for spec in _SPECS if spec.shape == "param"))
"""Names of the state that has the parameter's shape and lies as the parameter does."""


def orthogonalizes(algorithm: str) -> bool:
    """Return whether groups of an algorithm hold matrices; the others are stepped entry by entry."""
    return algorithm == "muon"


def rule_of(algorithm: Algorithm, normalize: str | None) -> UpdateRule:
    """Return the rule of a validated group with these options."""
    return RULES[algorithm, normalize if orthogonalizes(algorithm) else None]
