"""Patterns of rules: which names a pattern matches, and which pattern tells some parameters from all others."""

import fnmatch
from collections.abc import Collection, Iterable

from quintic.optim.groups.names import mask_layer_indices

__all__ = ["matches", "patterns_of"]


def matches(name: str, pattern: str) -> bool:
    """Return whether a shell-style pattern matches a name; a name with brackets in it matches itself, too."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def patterns_of(names: Iterable[str], others: Collection[str]) -> dict[str, str]:
    """Return for each name a pattern for a rule that matches none of the others.

    Layers that differ in their numbers share one, `layers.*.weight`, unless it would match another parameter, as
    `*.weight` of `nn.Sequential` would. Else the pattern is the name.
    """
    patterns: dict[str, str] = {}
    is_safe: dict[str, bool] = {}
    for name in names:
        pattern = mask_layer_indices(name)
        if pattern not in is_safe:
            is_safe[pattern] = not any(matches(other, pattern) for other in others)
        patterns[name] = pattern if is_safe[pattern] and matches(name, pattern) else name
    return patterns
