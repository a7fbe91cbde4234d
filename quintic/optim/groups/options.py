"""The options of parameter groups: each is declared once, as a row of the tables below.

A row is a typed field, and `option(...)` holds the other properties:

* `default`: what `quintic.Muon` begins with. A test compares it with the constructor's signature.
* `values`: a check that needs nothing but the value, and words for it. Checks that need the rest of the group, or its
  parameters, are in `validate.py`.
* `affects`: "plan": when the option changes, the plan is built anew and the state is fitted to it. "ranks": ranks that
  share parameters must have equal values, and compare them. "graph": a captured step holds the value, and is captured
  anew when it changes. A new option affects all three unless its row says otherwise, which is safe and may be slow.
* `is_scheduled`: schedules change it at every step, so a change is checked by itself and not with the whole group.
* `saved`: "restored": checkpoints have its value, and loading restores it. "value", "text": checkpoints have its value,
  or its text, for people, and the optimizer that loads them keeps its own.
* `algorithm`: the only algorithm whose groups use it.
* `is_keyword`: the constructor has a keyword for it.
* `other_names`, `old_names`: names in other libraries, which are suggested from; and in older versions, which work.

All else follows from the tables: the fields of `Group`, the checks of `Muon`, the comparison between ranks, what
checkpoints restore, when a step is captured anew, suggestions for misspelt names, and `docs/reference/options.md`.
"""

import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption
from quintic.optim.groups.values import Values, count, number, number_pair, numbers_per_matrix, one_of, or_none, tie
from quintic.optim.layout.views import Matrix, View
from quintic.optim.polar.coefficients import DEFAULT_STEPS
from quintic.optim.polar.forms import Method, Polynomials
from quintic.optim.rules.rates import ADAMW_LR
from quintic.optim.rules.rule import Algorithm
from quintic.optim.rules.update import AdjustLr, Cautious, DecayCoupling

__all__ = [
    "OLD_NAMES",
    "OPTIONS",
    "STEP_OPTIONS",
    "Number",
    "Option",
    "Options",
    "Orthogonalizer",
    "adopt_old_names",
    "group_defaults",
    "is_old_option",
    "options_affecting",
    "with_new_names",
]

Number = float | Tensor
"""A number, or a tensor of one entry, which may be on a device."""

Orthogonalizer = Method | Callable[[Tensor], Tensor]

Effect = Literal["plan", "ranks", "graph"]
Saved = Literal["restored", "value", "text"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option; the head of this file explains each field."""

    default: Any
    values: Values
    affects: Set[Effect]
    is_scheduled: bool
    saved: Saved
    algorithm: Algorithm | None
    is_keyword: bool
    other_names: Sequence[str]
    old_names: Sequence[str]


def option(
    default: Any,
    values: Values | str,
    *,
    affects: Set[Effect] = frozenset({"plan", "ranks", "graph"}),
    is_scheduled: bool = False,
    saved: Saved = "restored",
    algorithm: Algorithm | None = None,
    is_keyword: bool = True,
    other_names: Sequence[str] = (),
    old_names: Sequence[str] = (),
) -> Any:
    """Return a field that declares an option; `values` may be words only, where `validate.py` checks the value."""
    declared = Option(
        default=default,
        values=Values(values) if isinstance(values, str) else values,
        affects=affects,
        is_scheduled=is_scheduled,
        saved=saved,
        algorithm=algorithm,
        is_keyword=is_keyword,
        other_names=other_names,
        old_names=old_names,
    )
    return field(default=default, metadata={"option": declared})


# A schedule of a rate or a decay that ends at 0 may end a rounding below it.
_RATES = number(slack=1e-12)
_SWITCH = one_of(False, True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options that a step reads."""

    algorithm: Algorithm = option("muon", "'muon' or 'adamw'", saved="value", is_keyword=False)
    view: View = option(Matrix(), "a view, such as quintic.Heads(n)", saved="text", is_keyword=False)

    # Rates and averages that schedules change: kernels read them from device memory, a replayed graph as well.
    lr: Number = option(0.02, _RATES, affects=set(), is_scheduled=True, other_names=["learning_rate"])
    weight_decay: Number = option(0.0, _RATES, affects=set(), is_scheduled=True, other_names=["wd"])
    momentum: Number = option(
        0.95, number(below=1), affects=set(), is_scheduled=True, algorithm="muon", other_names=["mu"]
    )
    betas: tuple[Number, Number] = option(
        (0.9, 0.95),
        number_pair("(0.9, 0.95)"),
        affects=set(),
        is_scheduled=True,
        algorithm="adamw",
        other_names=["beta1", "beta2"],
    )
    eps: Number = option(1e-8, number(), affects=set(), is_scheduled=True, algorithm="adamw")
    # Passed to kernels by value, so a graph holds it.
    normalize_beta: float = option(0.95, number(below=1), affects={"graph"}, is_scheduled=True, algorithm="muon")

    # The update. Options that decide about memory, batches or messages affect plan and ranks, others only numbers.
    # Functions and dtypes cannot be saved as plain values, so checkpoints have their text.
    nesterov: bool = option(True, _SWITCH, affects={"graph"}, algorithm="muon")
    decay_coupling: DecayCoupling = option("lr", one_of("lr", "lr_squared"))
    scale_decay: bool = option(False, _SWITCH, algorithm="muon")
    cautious: Cautious = option(False, one_of(False, True, "strict"))
    orthogonalizer: Orthogonalizer = option(
        "auto",
        "'auto', 'polar_express', 'gram', 'newton_schulz', 'svd', or a function",
        saved="text",
        algorithm="muon",
    )
    orthogonalizer_steps: int = option(DEFAULT_STEPS, count(), algorithm="muon", other_names=["ns_steps"])
    coefficients: Polynomials | None = option(
        None,
        "one triple (a, b, c) or one per step, or None",
        algorithm="muon",
        other_names=["ns_coefficients"],
    )
    compute_dtype: torch.dtype | None = option(None, "a floating dtype, or None", saved="text", algorithm="muon")
    normalize: Literal["neuron", "element"] | None = option(None, one_of(None, "neuron", "element"), algorithm="muon")
    adjust_lr: AdjustLr = option(
        "spectral",
        "'spectral', 'match_rms_adamw', 'unit_rms', None, or a function",
        affects={"graph"},
        saved="text",
        algorithm="muon",
        other_names=["adjust_lr_fn"],
        old_names=["lr_scale"],
    )
    lr_multipliers: Sequence[float] | None = option(
        None, or_none(numbers_per_matrix()), affects={"graph"}, algorithm="muon"
    )
    adamw_lr_ratio: float | None = option(None, or_none(number()), affects={"graph"}, algorithm="adamw")
    # The plan is the same for every cadence, but all ranks must step a group at the same time.
    step_every: int = option(1, count(), affects={"ranks", "graph"})
    qk_clip: Any = option(None, "None or a quintic.QKClip", affects={"ranks", "graph"}, saved="text", algorithm="muon")
    # Set by `Muon.tie`.
    tied_to: tuple[str, bool] | None = option(None, or_none(tie(), none_first=True), is_keyword=False)

    # Where the work is done, and in how much memory: each run has its own.
    comms: Literal["none", "averaged", "replicated", "sharded", "sharded_sparse"] = option(
        "none", one_of("none", "averaged", "replicated", "sharded", "sharded_sparse"), saved="value"
    )
    # Another object on each rank; ranks are compared by the layouts that follow from it.
    process_group: Any = option(None, "a ProcessGroup, or None", affects={"plan", "graph"}, saved="text")
    replicas: Literal["auto", "divide", "repeat"] = option("auto", one_of("auto", "divide", "repeat"), saved="value")
    offload: bool = option(False, _SWITCH, saved="value")
    max_workspace_bytes: int | None = option(2**31, or_none(count("a positive integer")), saved="value")
    # Decides nothing about messages, so each rank may have its own.
    kernels: KernelsOption = option(
        "auto",
        one_of("auto", "torch", "triton"),
        affects={"plan", "graph"},
        saved="text",
        other_names=["foreach", "fused"],
    )

    # State, and what happens around a step.
    master: Literal["fp32", "mantissa"] | None = option(None, one_of(None, "fp32", "mantissa"))
    state_dtype: Literal["bf16"] | None = option(None, one_of(None, "bf16"), saved="value")
    on_nonfinite: Literal["propagate", "skip", "raise"] = option("propagate", one_of("propagate", "skip", "raise"))
    telemetry_every: int | None = option(None, or_none(count()), affects={"graph"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DictionaryOptions:
    """Keys of a group's dictionary that no step reads."""

    # A new AdamW group takes its `lr` and `weight_decay` from these.
    adamw_lr: float = option(ADAMW_LR, "a number of at least 0", affects=set(), algorithm="adamw")
    adamw_weight_decay: float = option(0.0, "a number of at least 0", affects=set(), algorithm="adamw")
    # Counted by `Muon` at every step, for `step_every`.
    pending_steps: int = option(0, "an integer", affects=set(), is_keyword=False)


OPTIONS: dict[str, Option] = {
    one.name: one.metadata["option"] for table in (Options, DictionaryOptions) for one in fields(table)
}
"""All options of a group, by name; a group's other keys belong to other code."""

STEP_OPTIONS = tuple(one.name for one in fields(Options))
"""The names of the options that a step reads."""

OLD_NAMES = {old: name for name, one in OPTIONS.items() for old in one.old_names}
"""Old name of an option -> its name now."""


def options_affecting(effect: Effect) -> tuple[str, ...]:
    """Return the names of the options that affect the plan, the other ranks, or a captured graph."""
    return tuple(name for name, one in OPTIONS.items() if effect in one.affects)


def group_defaults(**keywords: Any) -> dict[str, Any]:
    """Return the options with which groups begin: the constructor's keywords, and the defaults of all others."""
    return {name: one.default for name, one in OPTIONS.items()} | keywords


def is_old_option(key: str, value: object) -> bool:
    """Return whether a key and its value are an option under its old name.

    A number under `lr_scale` is another thing: the factor on a group's learning rate that timm, MAE and BEiT keep
    there, and that their schedules multiply with.
    """
    return key in OLD_NAMES and (value is None or isinstance(value, str) or callable(value))


def with_new_names(options: dict[str, Any], what: str, *, stacklevel: int) -> dict[str, Any]:
    """Return options under their new names; warns of each old one, in a message that begins with `what`.

    A ValueError if one is given under both. `stacklevel` counts from the caller, as for `warnings.warn`.
    """
    for old in OLD_NAMES.keys() & options.keys():
        if not is_old_option(old, options[old]):
            continue
        new = OLD_NAMES[old]
        if new in options:
            raise ValueError(f"{what}: {old!r} is the old name of {new!r}, and both are given; leave {old!r} out")
        message = f"{what}: {old!r} is called {new!r} now: {new}={options[old]!r}; the old name will go"
        warnings.warn(message, FutureWarning, stacklevel=stacklevel + 1)
        options = {new if key == old else key: value for key, value in options.items()}
    return options


def adopt_old_names(options: dict[str, Any]) -> list[str]:
    """Replace the old names of options in a group's dictionary; returns the old names that were found."""
    found = [key for key in OLD_NAMES if key in options and is_old_option(key, options[key])]
    for key in found:
        options[OLD_NAMES[key]] = options.pop(key)
    return found
