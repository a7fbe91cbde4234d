"""Learning rates and decays that a new AdamW group begins with, and those that follow what is written elsewhere.

A schedule with absolute rates (`OneCycleLR(max_lr=...)`, `eta_min`, `min_lr`, `swa_lr`) gives all groups the same
number: right for Muon, and far too much for AdamW. With `adamw_lr_ratio` that number is every group's `lr`, and
AdamW groups are stepped with `lr * adamw_lr_ratio`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ADAMW_LR", "ADDED_WITH", "CycledMomentum", "SharedRates", "fill_adamw_rates", "first_name"]

ADAMW_LR = 3e-4
"""Learning rate of AdamW groups unless another one is given."""

ADDED_WITH = "added_with"
"""The key of groups that one group was divided into: the number of the first of them."""

# What schedulers leave in groups whose momentum they cycle.
_CYCLED_KEY = "max_momentum"


def fill_adamw_rates(number: int, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Set the `lr` and `weight_decay` that a new AdamW group lacks; a ValueError if a ratio would change its own."""
    if group.get("adamw_lr_ratio", defaults["adamw_lr_ratio"]) is None:
        group.setdefault("lr", group.get("adamw_lr", defaults["adamw_lr"]))
    elif "adamw_lr_ratio" not in group and (own := group.keys() & {"lr", "adamw_lr"}):
        key = max(own)
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): {key}={group[key]!r} is a learning rate of its own, "
            f"while the optimizer has adamw_lr_ratio={defaults['adamw_lr_ratio']!r}; give the group an adamw_lr_ratio "
            f"in place of {key}, or adamw_lr_ratio=None besides, to set its rate apart"
        )
    group.setdefault("weight_decay", group.get("adamw_weight_decay", defaults["adamw_weight_decay"]))


def first_name(group: Mapping[str, Any]) -> str:
    """Return the name of the first parameter of a group, for messages; the group need not be complete."""
    first = next(iter(group["params"]), None)
    return str(first[0] if isinstance(first, tuple) else next(iter(group.get("param_names", [])), "no parameters"))


class CycledMomentum:
    """Takes the momentum of Muon groups from `betas`, where schedulers write it in optimizers that have these."""

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], object]] = []
        """Muon groups, with the `betas` they had when they were last looked at."""

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the groups as they are: only what is written from now on counts."""
        self._seen = [(group, group["betas"]) for group in groups if group["algorithm"] == "muon"]

    def follow(self) -> None:
        """Set the momentum of groups whose `betas` a scheduler has written since."""
        for place, (group, seen) in enumerate(self._seen):
            if group["betas"] is not seen:
                if _CYCLED_KEY in group:
                    group["momentum"] = group["betas"][0]
                self._seen[place] = group, group["betas"]


class SharedRates:
    """Lets groups that one group was divided into have one learning rate, where a callback sets that of the last."""

    def __init__(self) -> None:
        self._sets: list[list[tuple[dict[str, Any], Any]]] = []
        """Groups that were added together, the last one last, each with the rate that it had."""

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the groups as they are: only what is written from now on counts."""
        together: dict[Any, list[tuple[dict[str, Any], Any]]] = {}
        for group in groups:
            if group.get(ADDED_WITH) is not None:
                together.setdefault(group[ADDED_WITH], []).append((group, group["lr"]))
        self._sets = [alike for alike in together.values() if len(alike) > 1]

    def follow(self) -> None:
        """Give the other groups the rate of the last one, where that alone was written since."""
        for place, alike in enumerate(self._sets):
            *others, (last, before) = alike
            if last["lr"] is before:
                continue
            for group, rate in others:
                # One with a rate of its own, set by a scheduler or by hand, keeps it.
                if group["lr"] is rate and (rate is before or float(rate) == float(before)):
                    group["lr"] = last["lr"]
            self._sets[place] = [(group, group["lr"]) for group, _ in alike]
