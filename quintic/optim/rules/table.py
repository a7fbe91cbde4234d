"""The update rules of the library by name, and the one place that decides which rule a group has."""

from collections.abc import Mapping
from typing import get_args

from quintic.optim.rules.library.adamuon import ADAMUON
from quintic.optim.rules.library.aurora import AURORA
from quintic.optim.rules.library.ema_nesterov import EMA_NESTEROV
from quintic.optim.rules.library.hyperball import HYPERBALL
from quintic.optim.rules.library.muon_plus import MUON_PLUS, NANOCHAT
from quintic.optim.rules.library.muoneq import MUONEQ
from quintic.optim.rules.library.muown import MUOWN
from quintic.optim.rules.library.normuon import NORMUON
from quintic.optim.rules.library.radial import RADIAL_BRAKE, RELATIVE_UPDATE
from quintic.optim.rules.library.two_rate import TWO_RATE
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, STEP, Algorithm, UpdateRule
from quintic.optim.rules.stages import Direction, StateSpec

__all__ = ["ADAMW", "ALGORITHMS", "MUON", "RULES", "SHORT_FORMS", "check_rule", "orthogonalizes", "rule_of"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

MUON = UpdateRule(title="Muon")
ADAMW = UpdateRule(
    title="AdamW",
    algorithm="adamw",
    direction=Direction(
        (
            StateSpec(STEP, "float32", "scalar"),
            StateSpec(EXP_AVG, "average", "param"),
            StateSpec(EXP_AVG_SQ, "square", "param"),
        ),
        ("betas",),
    ),
    orthogonalizes=False,
)

RULES: Mapping[str, UpdateRule] = {
    "muon": MUON,
    "normuon": NORMUON,
    "adamuon": ADAMUON,
    "muoneq": MUONEQ,
    "muon_plus": MUON_PLUS,
    "nanochat": NANOCHAT,
    "muown": MUOWN,
    "hyperball": HYPERBALL,
    "radial_brake": RADIAL_BRAKE,
    "relative_update": RELATIVE_UPDATE,
    "two_rate": TWO_RATE,
    "ema_nesterov": EMA_NESTEROV,
    "aurora": AURORA,
}
"""The values of the option `update_rule` that are names -> rules."""

SHORT_FORMS: Mapping[str | None, str] = {None: "muon", "neuron": "normuon", "element": "adamuon"}
"""Value of the option `normalize` -> the name of the rule that it stands for."""


def orthogonalizes(algorithm: str) -> bool:
    """Return whether groups of an algorithm hold matrices; the others are stepped entry by entry."""
    return algorithm == "muon"


def check_rule(update_rule: object, normalize: str | None) -> None:
    """Raise a ValueError or TypeError for an `update_rule` that is no rule, or another one than `normalize` means."""
    if update_rule is None:
        return
    if isinstance(update_rule, str):
        if update_rule not in RULES:
            raise ValueError(f"update_rule={update_rule!r}: choose {', '.join(map(repr, RULES))}, or an UpdateRule")
    elif not isinstance(update_rule, UpdateRule):
        raise TypeError(f"update_rule={update_rule!r}: give the name of a rule, or a quintic.UpdateRule")
    elif not update_rule.orthogonalizes:
        raise ValueError(
            f"update_rule={update_rule.title}: it does not orthogonalise; groups with algorithm='adamw' have AdamW, "
            f"and update_rule is for matrices"
        )
    if normalize is not None and rule_of("muon", None, update_rule) != RULES[SHORT_FORMS[normalize]]:
        raise ValueError(
            f"normalize={normalize!r} is short for update_rule={SHORT_FORMS[normalize]!r}, and update_rule="
            f"{update_rule if isinstance(update_rule, str) else update_rule.title!r} is given, too; leave one out"
        )


def rule_of(algorithm: Algorithm, normalize: str | None, update_rule: str | UpdateRule | None) -> UpdateRule:
    """Return the rule of a validated group with these options."""
    if not orthogonalizes(algorithm):
        return ADAMW
    if isinstance(update_rule, UpdateRule):
        return update_rule
    return RULES[SHORT_FORMS[normalize] if update_rule is None else update_rule]
