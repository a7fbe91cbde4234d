"""The options of parameter groups: each is declared once, as a row of the tables below.

A row is a dataclass field with the type of the option. `option(...)` gives its other properties:

* `default`: the value that a group has if none is given. A test compares it with the signature of `quintic.Muon`.
* `values`: a check of the value alone, with the words that an error uses for values that pass. Checks that need other
  options or the parameters are in `validate.py`.
* `affects`: a set of consequences of a change. "plan": the plan is built anew, and the state is fitted to it. "ranks":
  ranks with common parameters must have equal values, and compare them. "graph": a captured CUDA graph contains the
  value, so the step is captured anew. Without `affects` an option has all three, which is safe and may be slow.
* `is_scheduled`: schedules change the option at every step, so that a change must be cheap: it is checked alone, and
  the rest of the group is not checked again.
* `saved`: "restored": checkpoints contain the value, and loading sets it. "value", "text": checkpoints contain the
  value, or its text, only for people to read; an optimizer that loads them keeps its own value.
* `algorithm`: the only algorithm whose groups use the option; None if groups of all algorithms do.
* `is_keyword`: whether the constructor has a keyword with this name.
* `other_names`: names in other libraries; an error about such a name suggests the option.
* `old_names`: names in earlier versions, which still work, with a warning.

Everything else follows from the tables: the fields of `Group`, the checks of `Muon`, the comparison between ranks, the
values that checkpoints restore, the changes after which a step is captured anew, suggestions for misspelt names, and
`docs/reference/options.md`.
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
from quintic.optim.numeric.bf16_state import StateDtype
from quintic.optim.polar.forms import Method, Polynomials
from quintic.optim.rules.rates import ADAMW_LR
from quintic.optim.rules.rule import Algorithm, UpdateRule
from quintic.optim.rules.update import AdjustLr, Cautious, DecayCoupling

__all__ = [
    "OLD_NAMES",
    "OPTIONS",
    "SCHEDULED_OPTIONS",
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
"""The name of one of the library's methods, or a function of the user's."""

# The values of `affects` and `saved`, see the head of this file.
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
    """Return a dataclass field that declares an option; `values` is only the words if `validate.py` has the check."""
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
    # The metadata of the field carries the declaration to `OPTIONS`.
    return field(default=default, metadata={"option": declared})


# At least 0, but a schedule that ends at 0 may end a rounding error below it.
_RATES = number(slack=1e-12)
_SWITCH = one_of(False, True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options that a step reads."""

    # The algorithm, and the matrices in each parameter: these two are set by how parameters are grouped.
    algorithm: Algorithm = option("muon", "'muon' or 'adamw'", saved="value", is_keyword=False)
    view: View = option(Matrix(), "a view, such as quintic.Heads(n)", saved="text", is_keyword=False)

    # Rates and coefficients of averages that schedules change. Kernels read them from device memory, so a change needs
    # no new plan and no new graph.
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
    # Passed to kernels by value, so a graph contains it.
    normalize_beta: float = option(0.95, number(below=1), affects={"graph"}, is_scheduled=True, algorithm="muon")

    # The update. Options with a say in memory, batches or messages affect all three; options with "graph" alone
    # change only numbers. Functions and dtypes cannot be saved as plain values, so checkpoints have their text.
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
    orthogonalizer_steps: int | None = option(None, or_none(count()), algorithm="muon", other_names=["ns_steps"])
    coefficients: Polynomials | None = option(
        None,
        "a name such as 'deepseek_v4', one triple (a, b, c) or one per step, or None",
        algorithm="muon",
        other_names=["ns_coefficients"],
    )
    compute_dtype: torch.dtype | None = option(None, "a floating dtype, or None", saved="text", algorithm="muon")
    update_rule: str | UpdateRule | None = option(
        None, "None, the name of an update rule, or a quintic.UpdateRule", saved="value", algorithm="muon"
    )
    normalize: Literal["neuron", "element"] | None = option(
        None, one_of(None, "neuron", "element"), saved="value", algorithm="muon"
    )
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
    # The plan is the same for every value, but all ranks must step a group at the same steps.
    step_every: int = option(1, count(), affects={"ranks", "graph"})
    qk_clip: Any = option(None, "None or a quintic.QKClip", affects={"ranks", "graph"}, saved="text", algorithm="muon")
    # (name of the original, whether the copy is its transpose), set by `Muon.tie`.
    tied_to: tuple[str, bool] | None = option(None, or_none(tie(), none_first=True), is_keyword=False)

    # Where the work is done, and in how much memory: each run has its own.
    comms: Literal["none", "averaged", "replicated", "sharded", "sharded_sparse"] = option(
        "none", one_of("none", "averaged", "replicated", "sharded", "sharded_sparse"), saved="value"
    )
    # Each rank has its own object, so ranks compare the layouts that follow from it.
    process_group: Any = option(None, "a ProcessGroup, or None", affects={"plan", "graph"}, saved="text")
    replicas: Literal["auto", "divide", "repeat"] = option("auto", one_of("auto", "divide", "repeat"), saved="value")
    offload: bool = option(False, _SWITCH, saved="value")
    max_workspace_bytes: int | None = option(2**31, or_none(count("a positive integer")), saved="value")
    # Messages do not depend on it, so ranks may have different values.
    kernels: KernelsOption = option(
        "auto",
        one_of("auto", "torch", "triton"),
        affects={"plan", "graph"},
        saved="text",
        other_names=["foreach", "fused"],
    )

    # State, and what happens around a step.
    master: Literal["fp32", "mantissa", "8bit"] | None = option(
        None, one_of(None, "fp32", "mantissa", "8bit"), saved="value"
    )
    state_dtype: StateDtype = option(None, one_of(None, "bf16", "int8"), saved="value")
    on_nonfinite: Literal["propagate", "skip", "raise"] = option("propagate", one_of("propagate", "skip", "raise"))
    telemetry_every: int | None = option(None, or_none(count()), affects={"graph"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DictionaryOptions:
    """Options that are only in a group's dictionary: `Muon` reads them, and the steps of buckets do not."""

    # A new AdamW group takes its `lr` and `weight_decay` from these.
    adamw_lr: float = option(ADAMW_LR, "a number of at least 0", affects=set(), algorithm="adamw")
    adamw_weight_decay: float = option(0.0, "a number of at least 0", affects=set(), algorithm="adamw")
    # With `step_every`: the number of steps since the one that stepped the group. Counted at every step.
    pending_steps: int = option(0, "an integer", affects=set(), is_keyword=False)


OPTIONS: dict[str, Option] = {
    one.name: one.metadata["option"] for table in (Options, DictionaryOptions) for one in fields(table)
}
"""All options of a group, by name. Other keys of a group belong to PyTorch or to other code."""

STEP_OPTIONS = tuple(one.name for one in fields(Options))
"""The names of the options that a step reads."""

SCHEDULED_OPTIONS = tuple(name for name in STEP_OPTIONS if OPTIONS[name].is_scheduled)
"""The names of the options that schedules change, and that may be tensors or arrays, which are changed in place."""

OLD_NAMES = {old: name for name, one in OPTIONS.items() for old in one.old_names}
"""Old name of an option -> its present name."""


def options_affecting(effect: Effect) -> tuple[str, ...]:
    """Return the names of the options whose row has this effect in `affects`."""
    return tuple(name for name, one in OPTIONS.items() if effect in one.affects)


def group_defaults(**keywords: Any) -> dict[str, Any]:
    """Return all options with the values that groups begin with: these keywords, and defaults for the others."""
    return {name: one.default for name, one in OPTIONS.items()} | keywords


def is_old_option(key: str, value: object) -> bool:
    """Return whether a key and its value are an option under its old name.

    The exception is a number under `lr_scale`: timm, MAE and BEiT keep a factor on a group's learning rate there, by
    which their schedules multiply.
    """
    return key in OLD_NAMES and (value is None or isinstance(value, str) or callable(value))


def with_new_names(options: dict[str, Any], what: str, *, stacklevel: int) -> dict[str, Any]:
    """Return options under their new names, and warn of each old name that was used.

    Args:
        options: the options by name; not changed.
        what: the beginning of the warning, such as the name of the caller.
        stacklevel: as for `warnings.warn`, counted from the caller.

    Raises:
        ValueError: an option is given under its old and its new name.
    """
    for old in OLD_NAMES.keys() & options.keys():
        # A number under `lr_scale` belongs to another library.
        if not is_old_option(old, options[old]):
            continue
        new = OLD_NAMES[old]
        if new in options:
            raise ValueError(f"{what}: {old!r} is the old name of {new!r}, and both are given; leave {old!r} out")
        message = f"{what}: {old!r} is called {new!r} now: {new}={options[old]!r}; the old name will go"
        warnings.warn(message, FutureWarning, stacklevel=stacklevel + 1)
        # A new dictionary, with the option at its old place.
        options = {new if key == old else key: value for key, value in options.items()}
    return options


def adopt_old_names(options: dict[str, Any]) -> list[str]:
    """Return the old names of options in a group's dictionary, after replacing them by new names in place."""
    # In place, because PyTorch and schedules hold the dictionary.
    found = [key for key in OLD_NAMES if key in options and is_old_option(key, options[key])]
    for key in found:
        options[OLD_NAMES[key]] = options.pop(key)
    return found
