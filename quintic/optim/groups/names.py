"""Parameter names without the prefixes of wrappers: a compiled or data-parallel model has the names of the bare one.

`torch.compile`, activation checkpointing, FSDP and Lightning Fabric hold a model under names that nothing else uses.
DDP, `DataParallel`, averaged copies and DeepSpeed hold theirs as `module`, which may also be the name of a layer. With
a model at hand, the type of the wrapper tells which it is (`clean_names`). From names only, `module` is dropped if
all names begin with it (`without_wrappers`). Either way distinct parameters keep distinct names.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

__all__ = [
    "NUMBER",
    "clean_names",
    "is_made_up",
    "made_up",
    "mask_layer_indices",
    "model_parameters",
    "name_variants",
    "resolve_name",
    "strip_wrappers",
    "unwrap_module",
    "without_holders",
    "without_wrappers",
    "wrapped_child",
]

# Names of children that only wrappers use.
_MARKS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"})

# Classes, or base classes, of wrappers that hold a whole model as `module`.
_HOLDERS = frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"})

_HELD = "module"

_MADE_UP = re.compile(r"group\d+\.param\d+")

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches an index into a stack of layers in a name."""


def wrapped_child(module: nn.Module) -> str | None:
    """Return the name under which a wrapper holds its module; None for modules that are no wrappers."""
    # TorchScript's modules have children without `get`.
    children = {name for name, child in module._modules.items() if child is not None}
    for name in _MARKS:
        if name in children:
            return name
    if _HELD in children and any(base.__name__ in _HOLDERS for base in type(module).__mro__):
        return _HELD
    return None


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside any number of wrappers."""
    while (name := wrapped_child(module)) is not None:
        module = module.get_submodule(name)
    return module


def clean_names(model: nn.Module) -> dict[str, str]:
    """Return {name: name without wrappers} of parameters and modules; of tied ones, all names.

    Parameters whose clean names would be equal keep the names they have.
    """
    modules: dict[str, str] = {"": ""}
    params: dict[str, str] = {}
    added: dict[str, str | None] = {}
    # A module comes before its children.
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if name:
            modules[name] = modules[parent] if added[parent] == last else _join(modules[parent], last)
        added[name] = wrapped_child(module)
        own = [key for key, param in module._parameters.items() if param is not None]
        params |= {_join(name, key): _join(modules[name], key) for key in own}
    taken = Counter(params.values())
    return modules | {name: clean if taken[clean] == 1 else name for name, clean in params.items()}


def model_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name without wrappers and the parameter, as `model.named_parameters()`: each once, in its order."""
    clean = clean_names(model)
    # Some wrappers override `named_parameters` and change names.
    for name, param in nn.Module.named_parameters(model):
        yield clean[name], param


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Return parameter names without wrappers, judged by the names; unchanged if two would become equal."""
    before = list(names)
    after = [_unmarked(name) for name in before]
    while after and all(name.startswith(f"{_HELD}.") for name in after):
        after = [name.removeprefix(f"{_HELD}.") for name in after]
    return after if len(set(after)) == len(set(before)) else before


def strip_wrappers(groups: Sequence[dict[str, Any]]) -> None:
    """Give the parameters of groups names without wrappers, judged by all of the names together."""
    names = iter(without_wrappers(name for group in groups for name in group["param_names"]))
    for group in groups:
        group["param_names"] = [next(names) for _ in group["param_names"]]


def made_up(group: int, index: int) -> str:
    """Return a name for a parameter without one, from its position: messages and plans need a name."""
    return f"group{group}.param{index}"


def is_made_up(name: str) -> bool:
    """Return whether a name comes from `made_up`, so that it tells a position and not a parameter."""
    return _MADE_UP.fullmatch(name) is not None


def name_variants(name: str) -> list[str]:
    """Return the names that a name with wrappers may mean, the likeliest first and each once."""
    shorter = _unmarked(name)
    names = [name, shorter]
    while shorter.startswith(f"{_HELD}."):
        shorter = shorter.removeprefix(f"{_HELD}.")
        names.append(shorter)
    return list(dict.fromkeys([*names, without_holders(shorter)]))


def resolve_name(name: str, known: Collection[str]) -> str:
    """Return the known name that a name with or without wrappers refers to, else the name itself."""
    return next((variant for variant in name_variants(name) if variant in known), name)


def without_holders(name: str) -> str:
    """Return a name without wrappers, and without `module` in any position."""
    return ".".join(part for part in _unmarked(name).split(".") if part != _HELD)


def mask_layer_indices(name: str) -> str:
    """Return a name with `*` for layer indices, so that repeated layers get equal names."""
    return NUMBER.sub("*", name)


def _unmarked(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _MARKS)


def _join(above: str, last: str) -> str:
    return f"{above}.{last}" if above else last
