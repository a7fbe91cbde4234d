"""`DropIn`: base of `quintic.Muon`s with the constructor of another library's optimizer.

Each optimizer has a subclass, in `torch_optim.py`, `keller_jordan.py` and `dion.py`. A parameter group is translated
when it is added: afterwards `param_groups` has Quintic's options.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from quintic.optim.muon import Muon

__all__ = ["LARGEST_GUARD", "DropIn", "check_guard", "check_momentum", "split_by", "translated"]

LARGEST_GUARD = 1e-6
"""Up to this value, an epsilon beside a norm only avoids 0 / 0, which Quintic avoids without it."""


class DropIn(Muon):
    """A `quintic.Muon` that translates every group that is added."""

    @abstractmethod
    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the groups with Quintic's options that are equivalent to one group of the original.

        Args:
            group: as written for the original; not modified.
            where: name of the group in messages.

        Raises:
            ValueError: an option has no counterpart. The message names it and says how to proceed.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the original as one or several groups; if one of these is invalid, none is added.

        Raises:
            ValueError, TypeError: the group cannot be translated, or as `quintic.Muon`.
        """
        # One group of the original may become several, so remove those already added if a later one is invalid.
        before = len(self.param_groups)
        try:
            for group in self.translate(param_group, f"parameter group {before}"):
                # The originals orthogonalise all parameters of a group unless it says otherwise, so do not guess.
                super().add_param_group({"algorithm": "muon", **group})
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise


def translated(group: Mapping[str, Any], names: Mapping[str, str], unused: frozenset[str]) -> dict[str, Any]:
    """Return a copy of a group with options renamed by `names`, and without the options in `unused`."""
    return {names.get(key, key): value for key, value in group.items() if key not in unused}


def split_by(group: dict[str, Any], options_of: Callable[[str, Tensor], dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a group by the options that its parameters need; return the groups in order of their first parameters.

    Args:
        group: has Quintic's options; its `params` are one or several tensors or (name, tensor) pairs.
        options_of: returns the additional options of a parameter, given its name for messages and the parameter.
    """
    params = group["params"]
    if isinstance(params, set):
        return [group]  # PyTorch raises an error for sets
    rows = [params] if isinstance(params, Tensor) else list(params)
    names = group.get("param_names")
    # Options may hold views and functions, which compare but do not hash, so look for equal ones in a list.
    by_options: list[tuple[dict[str, Any], list[int]]] = []
    for index, row in enumerate(rows):
        name, param = row if isinstance(row, tuple) else (names[index] if names else f"parameter {index}", row)
        options = options_of(name, param) if isinstance(param, Tensor) else {}
        indices = next((indices for known, indices in by_options if known == options), None)
        if indices is None:
            by_options.append((options, [index]))
        else:
            indices.append(index)
    if not by_options:
        return [{**group, "params": rows}]
    groups = []
    for options, indices in by_options:
        own: dict[str, Any] = {**group, **options, "params": [rows[index] for index in indices]}
        if names is not None:
            own["param_names"] = [names[index] for index in indices]
        groups.append(own)
    return groups


def check_guard(value: float, option: str, where: str, remedy: str) -> None:
    """Reject an epsilon beside a norm that is large enough to shrink updates, because Quintic has no such option."""
    if not 0 <= value <= LARGEST_GUARD:
        raise ValueError(
            f"{where}: {option}={value!r} is above {LARGEST_GUARD}, so it would shrink updates of small gradients, "
            f"but quintic.Muon normalises directions of any size; {remedy}"
        )


def check_momentum(value: Any, option: str, where: str) -> None:
    """Reject a momentum outside of [0, 1), for which Quintic's moving average does not exist."""
    if not (isinstance(value, Tensor) or 0 <= value < 1):
        raise ValueError(f"{where}: {option}={value!r} must be in [0, 1): quintic.Muon keeps a moving average")
