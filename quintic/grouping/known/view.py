"""`KnownView`, an entry of the registry: the view of one parameter of one kind of module; and functions to write one.

An entry's view is a function of the owner and the parameter, because the owner has the sizes that the view needs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from quintic.grouping.uses import attribute_of, has_attribute
from quintic.optim.layout.views import Matrix, Split, View

__all__ = [
    "KnownView",
    "UnknownLayoutError",
    "always",
    "equal_parts",
    "num_heads_of",
    "num_key_value_heads_of",
    "parts",
    "same_view_for",
    "size_of",
    "split_of",
]

ViewOf = Callable[[nn.Module, Tensor], View | None]
"""Returns the view of an owner's parameter; None means AdamW.

It may raise `AttributeError` or `ValueError` when sizes do not fit, and then the parameter has no assignment. With an
`UnknownLayoutError` the entry counts as missing.
"""


class UnknownLayoutError(Exception):
    """An entry does not know how its owner slices the parameter, and leaves it to other rules."""


@dataclass(frozen=True)
class KnownView:
    """The view of one parameter of one kind of module."""

    parameter: str
    """Its name within its owner, e.g. `"query_key_value.weight"`."""
    view: ViewOf
    why: str
    """Shown to the user by `quintic.explain`."""
    classes: tuple[str, ...] = ()
    """Names of the owner's class or of its base classes; empty for any class with these `attributes`."""
    attributes: tuple[str, ...] = ()
    """Names of the attributes that the owner must have."""
    libraries: tuple[str, ...] = ()
    """Packages of the class, where its name is a common one, e.g. `Attention`; empty for any."""
    holds: tuple[str, ...] = ()
    """QK-clip's names of the matrices of its `Split`, in their order: `("query", "key", "value")`."""

    def view_of(self, owner: nn.Module, param: Tensor) -> View | None:
        """Return the view of a parameter, with the names of its matrices where they are known."""
        view = self.view(owner, param)
        if isinstance(view, Split) and len(view.sizes) == len(self.holds):
            return replace(view, names=self.holds)
        return view

    def recognises(self, owner: nn.Module) -> bool:
        """Return whether `owner` has the classes, packages and attributes of this entry."""
        bases = type(owner).__mro__
        if self.libraries:
            bases = tuple(base for base in bases if base.__module__.partition(".")[0] in self.libraries)
        if not bases or (self.classes and not any(base.__name__ in self.classes for base in bases)):
            return False
        return all(has_attribute(owner, attribute) for attribute in self.attributes)


def same_view_for(parameters: str, view: ViewOf, why: str, **owner: tuple[str, ...]) -> tuple[KnownView, ...]:
    """Return an entry for each of several parameters, whose names are separated by spaces."""
    return tuple(KnownView(parameter, view, why, **owner) for parameter in parameters.split())


def size_of(owner: nn.Module, *names: str) -> int:
    """Return the first of `names` that the owner, or else its configuration, has."""
    for source in (owner, attribute_of(owner, "config")):
        for name in names:
            value = attribute_of(source, name)
            if isinstance(value, int):
                return value
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def num_heads_of(owner: nn.Module) -> int:
    """Return the number of attention heads, under any of its names."""
    return size_of(owner, "num_attention_heads", "num_heads", "n_heads", "n_head")


def num_key_value_heads_of(owner: nn.Module) -> int:
    """Return the number of heads of keys and values, under any of its names."""
    return size_of(owner, "num_key_value_heads", "num_kv_heads")


def split_of(*sizes: int, groups: int = 1, transposed: bool = False) -> View:
    """Return a `Split` without sizes of 0; a single size makes a `Matrix`."""
    present = tuple(size for size in sizes if size)
    if len(present) == 1:
        return Matrix(transposed)
    return Split(present, transposed, groups)


def always(view: View | None) -> ViewOf:
    """Return a function that gives the same view for all owners; None for AdamW."""
    return lambda _owner, _param: view


def parts(*names: str, per_head: bool = False) -> ViewOf:
    """Return the function for a `Split` whose sizes are these attributes of the owner; repeated for each head."""

    def view(owner: nn.Module, _param: Tensor) -> View:
        sizes = [size_of(owner, name) for name in names]
        return split_of(*sizes, groups=num_heads_of(owner) if per_head else 1)

    return view


def equal_parts(count: int | str, times: int = 1, *, per_head: bool = False) -> ViewOf:
    """Return the function for a `Split` into times * count equal sizes, perhaps for each head.

    A count that is a string names an attribute of the owner.
    """

    def view(owner: nn.Module, param: Tensor) -> View:
        number = times * (size_of(owner, count) if isinstance(count, str) else count)
        heads = num_heads_of(owner) if per_head else 1
        return Split((param.shape[0] // (number * heads),) * number, groups=heads)

    return view
