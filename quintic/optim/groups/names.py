"""Names of parameters without what wrappers add: a compiled or data-parallel model has the names of the bare one.

`torch.compile`, activation checkpointing, FSDP and Lightning Fabric hold a model under names that nothing else has.
DDP, `DataParallel`, averaged copies and DeepSpeed hold theirs as `module`, which is also a name for a layer. Where a
model is at hand, the type of the wrapper tells the two apart (`clean_names`). Where only names are, `module` is left
out if all names begin with it (`without_wrappers`). Either way distinct parameters keep distinct names.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

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
    "shortened",
    "unwrap_module",
    "without_holders",
    "without_wrappers",
    "wrapped_child",
]

# Names of children that belong to wrappers alone.
_MARKS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"})

# Classes that hold a whole model as `module`, by their names and those of their bases.
_HOLDERS = frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"})

_HELD = "module"

_MADE_UP = re.compile(r"group\d+\.param\d+")

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is an index into a stack of layers."""


def wrapped_child(module: nn.Module) -> str | None:
    """Return the name under which a wrapper holds the module it stands for; None for other modules."""
    # Not `get`, which the children of TorchScript's modules lack.
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
    """Return {name: name without wrappers} of parameters and modules, with all names of what is registered repeatedly.

    Parameters whose clean names would be equal keep the names they have.
    """
    modules: dict[str, str] = {"": ""}
    params: dict[str, str] = {}
    added: dict[str, str | None] = {}
    # A module comes before what it holds.
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if name:
            modules[name] = modules[parent] if added[parent] == last else _joined(modules[parent], last)
        added[name] = wrapped_child(module)
        own = [key for key, param in module._parameters.items() if param is not None]
        params |= {_joined(name, key): _joined(modules[name], key) for key in own}
    taken = Counter(params.values())
    return modules | {name: clean if taken[clean] == 1 else name for name, clean in params.items()}


def model_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name without wrappers and the parameter, as `model.named_parameters()`: each once, in its order."""
    clean = clean_names(model)
    # Some wrappers have a method of their own that changes names.
    for name, param in nn.Module.named_parameters(model):
        yield clean[name], param


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Return parameter names without what wrappers add, told by the names alone; unchanged if two became equal."""
    before = list(names)
    after = [_unmarked(name) for name in before]
    while after and all(name.startswith(f"{_HELD}.") for name in after):
        after = [name.removeprefix(f"{_HELD}.") for name in after]
    return after if len(set(after)) == len(set(before)) else before


def made_up(group: int, index: int) -> str:
    """Return the name of a parameter that came without one, from its place: messages and plans need some."""
    return f"group{group}.param{index}"


def is_made_up(name: str) -> bool:
    """Return whether a name is one of `made_up`, which says where a parameter was and not which one it is."""
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
    """Return the known name that a name with or without wrappers means; the name itself if it means none."""
    return next((variant for variant in name_variants(name) if variant in known), name)


def without_holders(name: str) -> str:
    """Return a name without wrappers, and without `module` wherever that stands."""
    return ".".join(part for part in _unmarked(name).split(".") if part != _HELD)


def mask_layer_indices(name: str) -> str:
    """Return a name with `*` for the numbers of layers: those of repeated layers are equal."""
    return NUMBER.sub("*", name)


def _unmarked(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _MARKS)


def _joined(above: str, last: str) -> str:
    return f"{above}.{last}" if above else last


def shortened(text: str, size: int) -> str:
    """Return a text that is too long with dots in its middle; of a name its end says more than its beginning."""
    if len(text) <= size:
        return text
    kept = max(2, size - 3)
    head = kept * 2 // 5
    return f"{text[:head]}...{text[len(text) - (kept - head) :]}"
