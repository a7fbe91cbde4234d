"""The registry: views of fused, transposed, interleaved and stacked matrices, which module types cannot tell.

`nn.Linear(512, 1536)` may be one matrix, or a query, a key and a value; only the code that slices its output knows.
`KNOWN_VIEWS` has this knowledge for the models of `transformers` (`known/transformers.py`), timm, torchtitan and
diffusers (`known/libraries.py`), as frozen data: a class, one of its parameters, a view. Classes are recognised by name
and package, also through base classes, or by attributes. So no library is imported, and a subclass (also one made by
FSDP2) is recognised like its base.

Each entry states how the model's own forward pass slices the tensor, and the tests check it by running that forward
pass (`test_registry.py`, `test_registry_libraries.py`). If a view does not add up to the tensor's shape, the parameter
is reported as covered by no rule: a guess would change the update rule in silence. Your own models need no entry here,
since a `quintic.Rule` with a view does the same by parameter name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from quintic.grouping.known.libraries import LIBRARIES
from quintic.grouping.known.transformers import TRANSFORMERS
from quintic.grouping.known.view import KnownView, UnknownLayoutError
from quintic.grouping.uses import first_names, stored
from quintic.optim.layout.views import View

__all__ = ["KNOWN_VIEWS", "RegistryMatch", "registry_matches"]

KNOWN_VIEWS: tuple[KnownView, ...] = (*TRANSFORMERS, *LIBRARIES)
"""All entries. Of several entries for one parameter, the first that recognises the owner counts."""


@dataclass(frozen=True)
class RegistryMatch:
    """An entry that recognised the owner of a parameter, and the view it gives."""

    entry: KnownView
    view: View | None
    """None for AdamW, or if there is a `problem`."""
    problem: str | None = None
    """Why the entry does not fit the parameter although it recognised the owner; None if it fits."""


def registry_matches(modules: Iterable[nn.Module]) -> dict[Tensor, list[RegistryMatch]]:
    """Return the registry's matches for the parameters of `modules`, one for each owner that is recognised.

    The outermost owner knows most and wins: GPT-2's attention splits the weight that its Conv1D only transposes.
    """
    by_child: dict[str, list[KnownView]] = {}
    for entry in KNOWN_VIEWS:
        by_child.setdefault(entry.parameter.partition(".")[0], []).append(entry)
    by_param: dict[Tensor, list[RegistryMatch]] = {}
    for owner in modules:
        decided: set[str] = set()
        for child in first_names(owner):
            for entry in by_child.get(child, ()):
                param = stored(owner, entry.parameter)
                if param is None or entry.parameter in decided or not entry.recognises(owner):
                    continue
                one = _found(entry, owner, param)
                if one is not None:
                    decided.add(entry.parameter)
                    by_param.setdefault(param, []).append(one)
    for param, several in by_param.items():
        longest = max(_depth(one) for one in several)
        by_param[param] = [one for one in several if _depth(one) == longest]
    return by_param


def _depth(match: RegistryMatch) -> int:
    return match.entry.parameter.count(".")


def _found(entry: KnownView, owner: nn.Module, param: Tensor) -> RegistryMatch | None:
    try:
        view = entry.view_of(owner, param)
        if view is not None:
            view.shapes(param.shape)
    except UnknownLayoutError:
        return None
    except Exception as error:  # also from a property of the model that cannot be read
        return RegistryMatch(entry, None, str(error) or type(error).__name__)
    return RegistryMatch(entry, view)
