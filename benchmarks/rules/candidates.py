"""What is compared: the named rules, pairs of them, AdamW, and the settings that are tried of each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quintic.optim.rules.library.ema_nesterov import Lookahead
from quintic.optim.rules.library.muon_plus import Renormalize
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.radial import RadialBrake
from quintic.optim.rules.library.two_rate import TwoRateMomentum
from quintic.optim.rules.rule import MOMENTUM_DIRECTION, UpdateRule
from quintic.optim.rules.table import ADAMW, RULES
from quintic.train.config import Config

BASELINE = "muon"
ADAMW_NAME = "adamw"

PAIRS = (
    "muoneq+normuon",
    "two_rate+normuon",
    "two_rate+muoneq",
    "two_rate+nanochat",
    "hyperball+normuon",
    "two_rate+hyperball",
    "muown+normuon",
    "ema_nesterov+normuon",
    "aurora+normuon",
)
"""Rules of several stages that are tried unless `--rules` names others; names joined by + are one rule."""

_AS_GIVEN = ""
# Rule -> label -> the stages that another setting changes.
_SETTINGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "two_rate": {
        "rates 0.8, 0.95": {"direction": TwoRateMomentum(0.8, 0.95)},
        "rates 0.95, 0.99": {"direction": TwoRateMomentum(0.95, 0.99)},
    },
    "ema_nesterov": {
        "rate 0.95": {"drift": Lookahead(rate=0.95)},
        "ahead 1": {"drift": Lookahead(ahead=1.0)},
    },
    "muoneq": {"rows and columns": {"before": (Equalize("both"),)}},
    "muon_plus": {"frobenius": {"after": (Renormalize("frobenius"),)}},
    "radial_brake": {"outward 0": {"constrain": RadialBrake(outward=0.0)}},
}
# Rule -> options for all of its settings. The decay that suits Muon is wrong where decay acts on norms alone, or where
# updates shrink with the weight: with it both rules lose 0.7 nats at depth 8.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "muown": {"weight_decay": 0.0},
    "relative_update": {"weight_decay": 0.0},
}
# A setting that is tried of all, since Muon is free to choose it. The default of training is 0.9.
_HIGH_MOMENTUM = ("momentum 0.95", {"momentum": 0.95})


@dataclass(frozen=True)
class Setting:
    """One way to run a candidate."""

    rule: UpdateRule
    values: Mapping[str, Any]
    """Options of `quintic train`."""


@dataclass(frozen=True)
class Candidate:
    """A rule, and what is tried of it."""

    name: str
    title: str
    settings: Mapping[str, Setting]
    """By label; the first one, with an empty label, is the library's."""

    @property
    def rate_option(self) -> str:
        """The option of the matrices' learning rate."""
        return "adamw_lr" if self.name == ADAMW_NAME else "muon_lr"

    @property
    def is_small(self) -> bool:
        """Whether rates are of AdamW's size."""
        return self.settings[_AS_GIVEN].rule.scale == "match_rms_adamw"

    def center(self, base: Config) -> float:
        """Return the middle of the first grid of rates."""
        if self.name == ADAMW_NAME:
            return base.optim.adamw_lr
        return base.optim.muon_lr / (_size_of_updates(base) if self.is_small else 1.0)

    def values(self, label: str, rate: float, aux: float, base: Config) -> dict[str, Any]:
        """Return the options of `quintic train` for a setting.

        Args:
            label: of the setting.
            rate: of the matrices.
            aux: factor on the rates of AdamW's groups: embeddings, head and scalars.
            base: the configuration with what all runs have in common.
        """
        optim = base.optim
        head = "adamw_head_lr" if self.name == ADAMW_NAME else "head_lr"
        scaled = {name: getattr(optim, name) * aux for name in ("embedding_lr", head, "scalar_lr")}
        # Rates of AdamW's size are smaller; with more decay per unit, as much decays.
        decay = {"weight_decay": optim.weight_decay * _size_of_updates(base)} if self.is_small else {}
        own = {"optimizer": "adamw"} if self.name == ADAMW_NAME else {"optimizer": "muon"}
        return {**own, self.rate_option: rate, **scaled, **decay, **self.settings[label].values}


def _size_of_updates(base: Config) -> float:
    """Return the factor of `match_rms_adamw` for a square matrix of the residual stream."""
    model = base.model
    width = -(-model.aspect_ratio * model.depth // model.head_dim) * model.head_dim
    return 0.2 * math.sqrt(width)


def combined(name: str) -> UpdateRule:
    """Return the rule of a name, or of several joined by +, whose stages are put together.

    Raises:
        SystemExit: a name is unknown, or two rules have different stages for the same place.
    """
    parts = name.split("+")
    for part in parts:
        if part not in RULES:
            raise SystemExit(f"--rules {name}: {part!r} is no rule; choose {', '.join(RULES)}, or several joined by +")
    if len(parts) == 1:
        return RULES[name]
    return _put_together(name, [RULES[part] for part in parts])


def _put_together(name: str, rules: list[UpdateRule]) -> UpdateRule:
    found: dict[str, Any] = {}
    for place, nothing in (("direction", MOMENTUM_DIRECTION), ("polar", None), ("constrain", None), ("drift", None)):
        stages = [stage for rule in rules if (stage := getattr(rule, place)) != nothing]
        if len(stages) > 1:
            raise SystemExit(f"--rules {name}: two of its rules have a stage {place!r}; a rule has one")
        found[place] = stages[0] if stages else nothing
    scales = [rule.scale for rule in rules if rule.scale is not None]
    before, after = (tuple(stage for rule in rules for stage in getattr(rule, place)) for place in ("before", "after"))
    return UpdateRule(
        title=" + ".join(rule.title for rule in rules),
        before=before,
        after=after,
        scale=scales[0] if scales else None,
        **found,
    )


def candidate(name: str) -> Candidate:
    """Return a candidate by name: `adamw`, a rule, or rules joined by +."""
    if name == ADAMW_NAME:
        return Candidate(name, "AdamW for all", {_AS_GIVEN: Setting(ADAMW, {})})
    rule = combined(name)
    parts = name.split("+")
    options = {key: value for part in parts for key, value in _OPTIONS.get(part, {}).items()}
    settings = {_AS_GIVEN: Setting(rule, options)}
    for part in parts:
        for label, stages in _SETTINGS.get(part, {}).items():
            changed = {**{other: RULES[other] for other in parts}, part: replace(RULES[part], **stages)}
            rules = [changed[other] for other in parts]
            settings[label] = Setting(rules[0] if len(rules) == 1 else _put_together(name, rules), options)
    label, values = _HIGH_MOMENTUM
    settings[label] = Setting(rule, {**options, **values})
    return Candidate(name, rule.title, settings)


def names_of_all() -> list[str]:
    """Return the names of all candidates, the baseline first."""
    return [*RULES, ADAMW_NAME, *PAIRS]


def next_rates(losses: Mapping[float, float], center: float, most: int = 6) -> list[float]:
    """Return the rates to try next, none if the best one is known well enough.

    First half, once and twice the center. While the best rate is the least or the largest, the grid grows by a factor
    of two; then comes the middle between the best rate and the better one of its neighbours.

    Args:
        losses: of the rates tried, infinite where training diverged.
        center: of the first grid.
        most: rates in all.
    """
    if not losses:
        return [rounded(center * factor) for factor in (0.5, 1.0, 2.0)]
    if len(losses) >= most:
        return []
    rates = sorted(losses)
    place = rates.index(min(rates, key=lambda rate: losses[rate]))
    best = rates[place]
    if place == 0:
        return [rounded(best / 2)]
    if place == len(rates) - 1:
        return [rounded(best * 2)]
    left, right = rates[place - 1], rates[place + 1]
    if min(right / best, best / left) < 1.7:  # a middle was tried
        return []
    near = left if losses[left] <= losses[right] else right
    return [rounded(math.sqrt(near * best))]


def next_factors(losses: Mapping[float, float], most: int = 5) -> list[float]:
    """Return the factors on AdamW's rates to try next: half and twice, and further while the best one is at an end."""
    if len(losses) >= most:
        return []
    best = min(sorted(losses), key=lambda factor: losses[factor])
    return [factor for factor in (rounded(best / 2), rounded(best * 2)) if factor not in losses]


def rounded(rate: float) -> float:
    """Return a rate with three digits."""
    return float(f"{rate:.3g}")
