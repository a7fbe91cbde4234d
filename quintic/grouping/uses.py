"""Finds the uses of a model's parameters: the module that computes with each, the attribute, and the modules around it.

A parameter may be registered in another module than the one that uses it. Wrappers stand between a module and its
parent (`names.py`). PyTorch's parametrizations compute a weight from a tensor that they hold in a module of their own:
weight and spectral normalisation only scale this tensor, so it counts as the weight itself; the tensors of other
parametrizations do not.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from quintic.optim.groups.names import clean_names, unwrap_module

__all__ = ["ParameterUse", "attribute_of", "first_names", "has_attribute", "is_tuner", "stored", "uses_of"]

# Parametrizations that multiply the rows of their tensor, or the whole tensor, by numbers.
_SCALING = frozenset({"_WeightNorm", "_SpectralNorm"})

# Suffixes of the functions that came before parametrizations, `torch.nn.utils.weight_norm` and `spectral_norm`.
_SCALED = ("_v", "_orig")


class ParameterUse(NamedTuple):
    """One place where a parameter is used."""

    name: str
    """The name of the parameter there, without wrappers."""
    given_name: str
    """The name with wrappers."""
    module: nn.Module
    """The module that computes with it."""
    attribute: str
    """The parameter's name in this module: `weight`, also where the weight is computed from the parameter."""
    module_name: str
    above: tuple[nn.Module, ...]
    """The parent of `module`, the parent's parent, and so on, without wrappers."""

    @property
    def last(self) -> str:
        """Return the name of the module in its parent."""
        return self.module_name.rpartition(".")[2]

    def siblings(self, *, later: bool = False) -> Iterator[nn.Module]:
        """Yield the modules registered beside this one, without wrappers; with `later` only those after it."""
        is_past = not later
        for child in map(unwrap_module, self.above[0].children() if self.above else ()):
            if child is self.module:
                is_past = True
            elif is_past:
                yield child


def uses_of(model: nn.Module) -> dict[Tensor, list[ParameterUse]]:
    """Return the uses of every parameter, in the order of the model's modules."""
    clean = clean_names(model)
    modules: dict[str, nn.Module] = {}
    uses: dict[Tensor, list[ParameterUse]] = {}
    # With duplicates: a module that is registered twice may be recognisable under its second name only.
    for name, module in model.named_modules(remove_duplicate=False):
        # A wrapper and its module have the same clean name; the module comes later and stays.
        modules[clean[name]] = module
        for key, param in module._parameters.items():
            if param is None:
                continue
            own, attribute = clean[name], _weight_of(module, key)
            if isinstance(module, ParametrizationList) and key == _scaled_key(module):
                # layer.parametrizations.weight.original1 is used as layer.weight
                own, _, attribute = own.rpartition(".")
                own = own.removesuffix("parametrizations").removesuffix(".")
            above = tuple(modules[higher] for higher in _prefixes(own))
            given = f"{name}.{key}" if name else key
            uses.setdefault(param, []).append(ParameterUse(clean[given], given, modules[own], attribute, own, above))
    return uses


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of a module's parents, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _weight_of(module: nn.Module, key: str) -> str:
    """Return `weight` for the `weight_v` or `weight_orig` of a normalisation; other names unchanged."""
    name, mark, suffix = key.rpartition("_")
    return name if mark + suffix in _SCALED and name not in module._parameters and has_attribute(module, name) else key


def _scaled_key(kept: ParametrizationList) -> str | None:
    """Return the name of a parametrization's tensor if all of them only scale it; else None."""
    if not all(type(one).__name__ in _SCALING for one in kept):
        return None
    return "original" if "original" in kept._parameters else "original1"


def attribute_of(source: object, name: str, default: Any = None) -> Any:
    """Return an attribute of a user's module; the default where it is missing, or a property that cannot be read."""
    try:
        return getattr(source, name, default)
    except Exception:  # a property may raise anything while the model is not ready for it
        return default


def has_attribute(source: object, name: str) -> bool:
    """Return whether a user's module has an attribute that can be read."""
    missing = object()
    return attribute_of(source, name, missing) is not missing


def is_tuner(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT that adapts another one, its `base_layer`."""
    return any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)


def _adapted(module: nn.Module) -> nn.Module:
    base = module._modules.get("base_layer") if is_tuner(module) else None
    return module if base is None else unwrap_module(base)


def first_names(module: nn.Module) -> Iterator[str]:
    """Yield the first names of all paths that `stored` can resolve in a module."""
    yield from module._parameters
    yield from module._modules
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None:
        yield from parametrizations._modules


def stored(module: nn.Module, path: str) -> Tensor | None:
    """Return the parameter that is used as the tensor at a path below a module, such as `attn.qkv.weight`.

    Only registered names are followed: other attributes may be copies. Wrappers and adapters are skipped on the path.
    """
    *children, attribute = path.split(".")
    for name in children:
        child = module._modules.get(name)
        if child is None:
            return None
        module = _adapted(unwrap_module(child))
    candidates = [attribute, *(attribute + suffix for suffix in _SCALED)]
    param = next((p for key in candidates if (p := module._parameters.get(key)) is not None), None)
    parametrizations = module._modules.get("parametrizations")
    kept = parametrizations._modules.get(attribute) if parametrizations is not None else None
    if param is None and isinstance(kept, ParametrizationList):
        key = _scaled_key(kept)
        param = None if key is None else kept._parameters.get(key)
    return param
