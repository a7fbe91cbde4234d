"""Views of parameters that module types alone do not tell: fused, transposed, interleaved and stacked matrices.

`nn.Linear(512, 1536)` may be one matrix, or a query, a key and a value; only the code that slices its output knows.
`KNOWN_VIEWS` is that knowledge for the models of `transformers` (`known_transformers.py`), timm, torchtitan and
diffusers (`known_libraries.py`), as frozen data: which class, which of its parameters, which view. A class is
recognised by its name and package, or by those of its base classes, or by its attributes: no library is ever imported,
and a subclass (also one made by FSDP2) is recognised like its base.

Each entry states how the model's own forward pass slices the tensor, and the tests check it by running that forward
pass (`test_registry.py`, `test_registry_libraries.py`). A view that does not add up to the tensor's shape decides
nothing: the parameter is then reported as undecided, since a guess would be a silent change of the update rule. Your
own models need no entry here: a `quintic.Rule` with a view says the same by parameter name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from quintic.grouping.known_libraries import LIBRARIES
from quintic.grouping.known_transformers import TRANSFORMERS
from quintic.grouping.known_view import KnownView, UnknownLayoutError
from quintic.grouping.uses import first_names, stored
from quintic.optim.layout.views import View

__all__ = ["KNOWN_VIEWS", "RegistryMatch", "registry_matches"]

KNOWN_VIEWS: tuple[KnownView, ...] = (*TRANSFORMERS, *LIBRARIES)
"""Known models of some libraries; the first entry for a parameter that recognises its owner counts."""


@dataclass(frozen=True)
class RegistryMatch:
    """The registry's entry for a parameter of a model, and the view that it gives."""

    entry: KnownView
    view: View | None
    """None for AdamW, or if there is a `problem`."""
    problem: str | None = None
    """Why the entry, though its owner is recognised, does not fit the parameter."""


def registry_matches(modules: Iterable[nn.Module]) -> dict[Tensor, list[RegistryMatch]]:
    """Return the registry's entries for the parameters of `modules`, one `RegistryMatch` per owner that is recognised.

    An owner that stands further out knows more (GPT-2's attention splits what its Conv1D only transposes), and wins.
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
