"""Options of groups that follow other ones, because schedulers and callbacks know only one of the two.

* Momentum: schedulers that cycle momentum (`OneCycleLR`, `CyclicLR`) write it into `betas` where groups have betas, as
  Adam's. `momentum` of Muon groups follows the first of them.
* Learning rates: a group without `algorithm` may have become several. A callback that adds a group and sets the rate of
  the last one afterwards (Lightning's `BackboneFinetuning`) means all of them.

Neither tells the optimizer, so `LinkedOptions` remembers the values and compares them at every use of the groups.
"""

from collections.abc import Sequence
from typing import Any

from quintic.optim.rules.table import orthogonalizes

__all__ = ["ADDED_WITH", "LinkedOptions"]

ADDED_WITH = "added_with"
"""The key of groups that were one when they were added: the number of the first of them."""

# The key that schedulers leave in groups whose momentum they cycle.
_CYCLED_KEY = "max_momentum"


class LinkedOptions:
    """Copies values that were written in one option to the options linked with it."""

    def __init__(self) -> None:
        self._betas: list[tuple[dict[str, Any], object]] = []
        """Muon groups, each with its `betas` when they were compared last."""
        self._rates: list[list[tuple[dict[str, Any], Any]]] = []
        """Sets of groups that were added as one, the last one last, each with its `lr` when it was compared last."""

    def watch(self, groups: Sequence[dict[str, Any]]) -> None:
        """Remember the values of all groups: only values that are written from now on are copied."""
        self._betas = [(group, group["betas"]) for group in groups if orthogonalizes(group["algorithm"])]
        # {number of the first group: groups that were added with it, and their rates}
        together: dict[Any, list[tuple[dict[str, Any], Any]]] = {}
        for group in groups:
            if group.get(ADDED_WITH) is not None:
                together.setdefault(group[ADDED_WITH], []).append((group, group["lr"]))
        self._rates = [linked for linked in together.values() if len(linked) > 1]

    def follow(self) -> None:
        """Copy the values that were written since the last call."""
        # Compared by identity: this runs several times in every step, and values may be tensors on a device.
        for place, (group, seen) in enumerate(self._betas):
            if group["betas"] is not seen:
                # A user who sets `betas` means AdamW's; only a scheduler that cycles leaves this key.
                if _CYCLED_KEY in group:
                    group["momentum"] = group["betas"][0]
                self._betas[place] = group, group["betas"]
        for place, linked in enumerate(self._rates):
            *others, (last, before) = linked
            if last["lr"] is before:
                continue
            for group, rate in others:
                # A group whose rate a scheduler or the user has set keeps it.
                if group["lr"] is rate and (rate is before or float(rate) == float(before)):
                    group["lr"] = last["lr"]
            self._rates[place] = [(group, group["lr"]) for group, _ in linked]
