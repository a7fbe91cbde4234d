"""Keys of parameter groups: options, old names of options, and keys of other code.

Groups are PyTorch's, and so is the rule: a key that is no option stays where it is, is copied, saved and loaded with
its group, and does nothing here. SAM keeps `rho` there, DINOv2 `lr_multiplier`, BEiT `layer_id`, schedulers
`initial_lr`. Three kinds of keys are no one else's, and are not passed over:

1. A slip of typing. The name is one letter away from an option's (one more, one less, another one, or two exchanged),
   or differs in capitals or hyphens, and the value is one that the option takes. So `momentun=0.9` is an error, while
   `lr_multiplier=0.5` stays: `lr_multipliers` are several. Names of fewer than five letters, names with a digit
   (`beta1`) and names that begin with an underscore are never taken for slips.
2. An option of PyTorch's optimizers that changes their update, at another value than its default: `maximize=True`.
3. An old name of an option (`OLD_NAMES`), which is replaced, with a warning.

`use_muon` (Keller Jordan's Muon) and `use_fallback` (timm's) say which algorithm a group is for, and are believed.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from quintic.optim.groups.options import OLD_NAMES, OPTIONS, adopt_old_names, with_new_names
from quintic.optim.validate import check_group, check_options

__all__ = [
    "WATCHED_KEYS",
    "check_keys",
    "check_loaded",
    "check_supported",
    "settle_keys",
    "suggests_options",
    "with_algorithm",
]

Init = TypeVar("Init", bound=Callable[..., None])

# Other libraries' names of options, where the spelling is too different for a suggestion.
_OTHER_NAMES = {other: name for name, option in OPTIONS.items() for other in option.other_names}


# Options of PyTorch's optimizers that change their update, and that `quintic.Muon` does not have -> (values that change
# nothing, what to do for the effect of other values).
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "maximize": ((False, None), "negate the loss"),
    "amsgrad": ((False, None), "quintic.Muon does not have it; leave it out"),
    "differentiable": ((False, None), "steps of quintic.Muon are not differentiated; leave it out"),
    "dampening": ((0, None), "momentum is an average of gradients here; leave it out"),
    "decoupled_weight_decay": (
        (True, None),
        "weight decay never goes through the gradient here; leave it out, and choose weight_decay anew",
    ),
    "adjust_lr_fn": ((None, "original"), "set adjust_lr"),
    "ns_steps": ((5, None), "set orthogonalizer_steps"),
    "ns_coefficients": (((3.4445, -4.775, 2.0315), None), "set coefficients"),
}

WATCHED_KEYS = frozenset((*OLD_NAMES, *_UNSUPPORTED))
"""Keys that are no options, and may be set at any time to what must not be passed over: see `settle_keys`."""

# Keys and values that say which algorithm a group is for.
_ALGORITHMS = {("use_muon", True): "muon", ("use_muon", False): "adamw", ("use_fallback", True): "adamw"}

# Keys that say which parameters a group has.
_MEMBERS = {"params", "param_names"}

# Shorter names are one letter away from too many others.
_LEAST_LETTERS = 5


def check_keys(number: int, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Reject slips of typing in a new group, and an option of the optimizer; a ValueError names the right key."""
    for key in ("comm_order", "compute_order", "release_gradients"):
        if key in group:
            raise ValueError(
                f"parameter group {number}: {key} is an option of the whole optimizer; give it as a keyword: "
                f"quintic.Muon(..., {key}={group[key]!r})"
            )
    for key in group.keys() - OPTIONS.keys() - _MEMBERS:
        meant = _option_meant(number, key, group[key], defaults)
        if meant is not None:
            raise ValueError(
                f"parameter group {number}: unknown option {key!r}; did you mean {meant!r}? If {key!r} is a key of "
                f"your own, set it once the optimizer is made"
            )


def settle_keys(number: int, group: dict[str, Any]) -> None:
    """Replace old names of options in a complete group, with a warning, and reject unsupported options."""
    for old in adopt_old_names(group):
        new = OLD_NAMES[old]
        message = f"parameter group {number}: {old!r} is called {new!r} now: group[{new!r}] = {group[new]!r}"
        warnings.warn(message, FutureWarning, stacklevel=2)
    check_supported(number, group)


def check_supported(number: int, group: Mapping[str, Any]) -> None:
    """Reject options of PyTorch's optimizers that would change the update of a complete group; a ValueError."""
    for key in _UNSUPPORTED.keys() & group.keys():
        value, (defaults, instead) = group[key], _UNSUPPORTED[key]
        if (tuple(value) if isinstance(value, list) else value) in defaults:
            continue
        if key == "decoupled_weight_decay" and not group["weight_decay"]:
            continue  # without any decay both kinds are the same, and this is the default of torch.optim.Adam
        raise ValueError(
            f"parameter group {number}: {key}={value!r}, as PyTorch's optimizers have it, is not supported; {instead}"
        )


def check_loaded(number: int, group: Mapping[str, Any]) -> None:
    """Reject a complete group with values that were saved: as when it is added, or changed."""
    check_supported(number, group)
    check_group(number, group)


def with_algorithm(number: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return a new group with the algorithm that other libraries' keys name; a ValueError if it has another one."""
    for (key, value), algorithm in _ALGORITHMS.items():
        if key in group and group[key] is value and group.setdefault("algorithm", algorithm) != algorithm:
            raise ValueError(
                f"parameter group {number}: {key}={value} means algorithm={algorithm!r}, and the group has "
                f"algorithm={group['algorithm']!r}; leave one of them out"
            )
    return group


# Keywords of the constructor that are no options of a group: old name -> name now.
_OLD_KEYWORDS = {"launch_order": "comm_order", "work_order": "compute_order"}


def suggests_options(init: Init) -> Init:
    """Let a constructor say which of its keywords is nearest to one that it does not have."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: Any, **options: Any) -> None:
        options = with_new_names(options, "quintic.Muon", stacklevel=2)
        for old, new in _OLD_KEYWORDS.items():
            if old in options:
                if new in options:
                    raise ValueError(
                        f"quintic.Muon: {old} is the old name of {new}, and both are given; leave {old} out"
                    )
                warnings.warn(
                    f"quintic.Muon: {old} is called {new} now; the old name will go", DeprecationWarning, stacklevel=2
                )
                options[new] = options.pop(old)
        for key in options:
            if key in OLD_NAMES:
                raise TypeError(
                    f"{key}={options[key]!r} is no option of quintic.Muon: {OLD_NAMES[key]} says how a matrix' shape "
                    f"scales its learning rate, and a factor on a group's rate stands in the group, where schedules "
                    f"multiply with it"
                )
            if key not in known:
                raise TypeError(_unknown(key, known))
        init(*args, **options)

    return cast(Init, checked)


def _unknown(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    synonym = _OTHER_NAMES.get(key)
    if synonym is None and key in _UNSUPPORTED:
        return f"unknown option {key!r}; {_UNSUPPORTED[key][1]}"
    nearest = [synonym] if synonym in names else difflib.get_close_matches(str(key), names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"the options are {', '.join(names)}"
    return f"unknown option {key!r}; {hint}"


def _option_meant(number: int, key: object, value: object, defaults: Mapping[str, Any]) -> str | None:
    """Return the option that a key misspells; None for other keys."""
    if not isinstance(key, str) or value is None or key.startswith("_") or any(letter.isdigit() for letter in key):
        return None
    name = key.lower().replace("-", "_")
    for option in sorted(OPTIONS):
        if len(option) >= _LEAST_LETTERS and (name == option or _is_one_slip(name, option)):
            try:
                check_options(number, {**defaults, "params": [], option: value})
            except (TypeError, ValueError, RuntimeError):
                continue  # a value that the option would refuse was never meant for it
            return option
    return None


def _is_one_slip(name: str, other: str) -> bool:
    """Return whether two different names differ by one letter: inserted, replaced, or exchanged with the next."""
    short, long = sorted((name, other), key=len)
    place = next((i for i, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short))
    rest, other_rest = short[place:], long[place:]
    if len(short) < len(long):
        return rest == other_rest[1:]
    return rest[1:] == other_rest[1:] or (rest[:2] == other_rest[1::-1] and rest[2:] == other_rest[2:])
