"""Parameters that have another view, algorithm or update rule than they were saved with.

With `strict=False` such a parameter loads state of the same name, such as momentum, and the rest begins anew.
State of stages on whole matrices always begins anew, because it averages updates of the old matrices.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from quintic.optim.rules.rule import STATE_KEYS, UpdateRule
from quintic.optim.rules.table import RULES, SHORT_FORMS, orthogonalizes
from quintic.optim.state.state import MASTER_KEYS

__all__ = ["Change", "change_error", "changed_option", "state_after", "warn_of_changes"]

_Value = TypeVar("_Value")


Change: TypeAlias = tuple[str, str, str]
"""An option of a parameter, the value that it was saved with, and the value now."""


def changed_option(group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> Change | None:
    """Return the option in which parameters of a group differ from a saved group, or None."""
    for option in ("algorithm", "view"):
        if option in saved_group and str(saved_group[option]) != str(group[option]):
            return option, str(saved_group[option]), str(group[option])
    # `normalize` stands for a rule, too; states from before `update_rule` have it alone.
    if "normalize" not in saved_group or not orthogonalizes(group["algorithm"]):
        return None
    saved, now = (_rule_text(one.get("update_rule"), one["normalize"]) for one in (saved_group, group))
    # A rule of the library may be given by name or as an `UpdateRule`.
    is_same = str(RULES.get(saved, saved)) == str(RULES.get(now, now))
    return None if is_same else ("update_rule", repr(saved), repr(now))


def _rule_text(update_rule: str | UpdateRule | None, normalize: str | None) -> str:
    """Return a rule as checkpoints name it: by its name in the library, or an `UpdateRule` as text."""
    return SHORT_FORMS.get(normalize, str(normalize)) if update_rule is None else str(update_rule)


def change_error(name: str, number: int, change: Change) -> ValueError:
    """Return the error about a changed parameter of group `number`, where `strict` is True."""
    option, saved, now = change
    return ValueError(
        f"{name} was saved with {option}={saved}, parameter group {number} has {now}; make the optimizer with the "
        f"rules it was saved with, or load the state that both have, while the rest begins anew: "
        f"optimizer.load_state_dict(state_dict, strict=False)"
    )


def state_after(
    rule: UpdateRule, state: Mapping[str, _Value], saved: Mapping[str, Any]
) -> tuple[Mapping[str, _Value], Mapping[str, _Value], Mapping[str, Any]]:
    """Return the state of a changed parameter in two mappings, to load and to begin anew, and the saved state to load.

    A master is never begun anew: it completes the weight. `masters.py` has made both sides alike.

    Args:
        rule: its rule now.
        state: its state here.
        saved: its saved state.
    """
    restarted = {spec.name for stage in rule.stages for spec in stage.state}
    own = {key: value for key, value in state.items() if key in STATE_KEYS}  # other keys are the user's
    loaded = {key: own[key] for key in own if key in MASTER_KEYS or (key in saved and key not in restarted)}
    anew = {key: own[key] for key in own if key not in loaded}
    return loaded, anew, {key: saved[key] for key in saved if key in MASTER_KEYS or key in loaded}


def warn_of_changes(changes: Mapping[str, tuple[Change, Sequence[str], Sequence[str]]], stacklevel: int) -> None:
    """Warn once of all changed parameters: {name: (change, names of loaded state, names of state begun anew)}."""
    alike: dict[str, list[str]] = {}
    for name, ((option, saved, now), loaded, anew) in changes.items():
        if not loaded and not anew:
            continue  # it was saved without state
        what_became = [
            f"{', '.join(keys)} {word}" for keys, word in ((loaded, "loaded"), (anew, "begins anew")) if keys
        ]
        text = f"{option}={saved} when saved and {now} now ({'; '.join(what_became)})"
        alike.setdefault(text, []).append(name)
    if alike:
        texts = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {text}" for text, names in alike.items()
        ]
        warnings.warn(
            f"parameters are not what they were when the state was saved: {'; '.join(texts)}",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
