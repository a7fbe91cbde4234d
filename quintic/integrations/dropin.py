"""`DropIn`: a `quintic.Muon` that is constructed in the words of another library's optimizer.

A subclass per optimizer has the constructor of the original: `torch_optim.py`, `keller_jordan.py` and `dion.py`.
Its groups are translated when they are added, and have Quintic's options from then on.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quintic.optim.muon import Muon

__all__ = ["LARGEST_GUARD", "DropIn", "check_guard", "check_momentum", "split_by", "translated"]

LARGEST_GUARD = 1e-6
"""Guards of a norm up to this do nothing but avoid 0 / 0, which Quintic avoids without any."""


class DropIn(Muon):
    """Translates every group that is added, and is a `quintic.Muon` in all else."""

    @abstractmethod
    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the groups, in Quintic's options, that stand for one group of the original.

        Args:
            group: as a user of the original writes it; not modified.
            where: what messages call the group.

        Raises:
            ValueError: an option has no counterpart; the message names it and says what to do.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the original, as one or several groups of Quintic's; none of them if one is refused.

        Raises:
            ValueError, TypeError: the group, or an option of it, cannot be translated, or as `quintic.Muon`.
        """
        before = len(self.param_groups)
        try:
            for group in self.translate(param_group, f"parameter group {before}"):
                # Groups of the originals are matrices unless they say otherwise: nothing is guessed about them.
                super().add_param_group({"algorithm": "muon", **group})
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise


def translated(group: Mapping[str, Any], names: Mapping[str, str], unused: frozenset[str]) -> dict[str, Any]:
    """Return a copy of a group with options renamed, and without those that Quintic has no use for."""
    return {names.get(key, key): value for key, value in group.items() if key not in unused}


def split_by(group: dict[str, Any], options_of: Callable[[str, Tensor], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a group for each set of options that its parameters need, in the order of their first parameters.

    A group whose parameters need the same options stays one group.

    Args:
        group: in Quintic's options; its `params` are one or many tensors or (name, tensor) pairs.
        options_of: what else a parameter, given with its name for messages, needs.
    """
    params = group["params"]
    if isinstance(params, set):
        return [group]  # PyTorch's own message is right
    rows = [params] if isinstance(params, Tensor) else list(params)
    names = group.get("param_names")
    parts: list[tuple[dict[str, Any], list[int]]] = []
    for place, row in enumerate(rows):
        name, param = row if isinstance(row, tuple) else (names[place] if names else f"parameter {place}", row)
        options = options_of(name, param) if isinstance(param, Tensor) else {}
        places = next((places for known, places in parts if known == options), None)
        if places is None:
            parts.append((options, [place]))
        else:
            places.append(place)
    if not parts:
        return [{**group, "params": rows}]
    groups = []
    for options, places in parts:
        own: dict[str, Any] = {**group, **options, "params": [rows[place] for place in places]}
        if names is not None:
            own["param_names"] = [names[place] for place in places]
        groups.append(own)
    return groups


def check_guard(value: float, option: str, where: str, remedy: str) -> None:
    """Refuse a guard of the norm that would make updates smaller: Quintic normalises directions of any size."""
    if not 0 <= value <= LARGEST_GUARD:
        raise ValueError(
            f"{where}: {option}={value!r} is above {LARGEST_GUARD}, where it makes updates of small gradients smaller, "
            f"which quintic.Muon does not: it normalises a direction of any size; {remedy}"
        )


def check_momentum(value: Any, option: str, where: str) -> None:
    """Refuse a momentum that has no moving average: sums with a coefficient of 1 or more forget nothing."""
    if not (isinstance(value, Tensor) or 0 <= value < 1):
        raise ValueError(f"{where}: {option}={value!r} must be in [0, 1): quintic.Muon keeps a moving average")
