"""Learning rates and decays that a new AdamW group begins with.

A schedule with absolute rates (`OneCycleLR(max_lr=...)`, `eta_min`, `min_lr`, `swa_lr`) gives all groups the same
number: right for Muon, and far too much for AdamW. With `adamw_lr_ratio` that number is every group's `lr`, and
AdamW groups are stepped with `lr * adamw_lr_ratio`.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["ADAMW_LR", "fill_adamw_rates", "first_name"]

ADAMW_LR = 3e-4
"""Learning rate of AdamW groups unless another one is given."""


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
