"""Default learning rates and weight decays of new AdamW groups.

A schedule with absolute rates (`OneCycleLR(max_lr=...)`, `eta_min`, `min_lr`, `swa_lr`) gives all groups the same rate,
which is right for Muon and far too large for AdamW. With `adamw_lr_ratio` it is every group's `lr`, and AdamW groups
are stepped with `lr * adamw_lr_ratio`.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["ADAMW_LR", "check_keywords", "fill_adamw_rates", "first_name"]

ADAMW_LR = 3e-4
"""Default learning rate of AdamW groups."""


def check_keywords(adamw_lr: float, adamw_lr_ratio: float | None, *, release_gradients: bool) -> None:
    """Raise a ValueError that names keywords of the constructor which no check of a group looks at."""
    if adamw_lr_ratio is not None and adamw_lr != ADAMW_LR:
        raise ValueError(f"adamw_lr={adamw_lr!r} and adamw_lr_ratio={adamw_lr_ratio!r}: give one of them")
    if not isinstance(release_gradients, bool):
        raise ValueError(f"release_gradients={release_gradients!r} must be False or True")


def fill_adamw_rates(number: int, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Set a new AdamW group's missing `lr` and `weight_decay`; a ValueError if a ratio would change its own rate."""
    # Without a ratio the group's rate is AdamW's own; with one, `lr` is the optimizer's, unless the group has its own.
    if group.get("adamw_lr_ratio", defaults["adamw_lr_ratio"]) is None:
        group.setdefault("lr", group.get("adamw_lr", defaults["adamw_lr"]))
    elif "adamw_lr_ratio" not in group and (own := group.keys() & {"lr", "adamw_lr"}):
        key = max(own)
        raise ValueError(
            f"parameter group {number} ({first_name(group)}): {key}={group[key]!r} is a learning rate of its own, "
            f"while the optimizer has adamw_lr_ratio={defaults['adamw_lr_ratio']!r}; give the group an adamw_lr_ratio "
            f"instead of {key}, or also give it adamw_lr_ratio=None, so that {key} is not multiplied by the ratio"
        )
    group.setdefault("weight_decay", group.get("adamw_weight_decay", defaults["adamw_weight_decay"]))


def first_name(group: Mapping[str, Any]) -> str:
    """Return the name of the first parameter of a group, for messages; the group need not be complete."""
    first = next(iter(group["params"]), None)
    return str(first[0] if isinstance(first, tuple) else next(iter(group.get("param_names", [])), "no parameters"))
