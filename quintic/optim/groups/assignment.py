"""The algorithm and view assigned to a parameter, and who is asked where a parameter group does not name them.

`quintic/grouping` derives assignments from modules and names. This file only has the questions that the optimizer asks.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quintic.optim.layout.views import View
from quintic.optim.rules.rule import Algorithm

__all__ = ["Algorithm", "Assignment", "Classifier"]


class Assignment(NamedTuple):
    """The algorithm and view of one parameter, with the reason."""

    algorithm: Algorithm
    view: View
    """`Matrix()` for AdamW, which has no use for a view."""
    why: str
    name: str = ""
    """The parameter's name; empty while only a use of the parameter is classified."""
    options: Mapping[str, Any] = {}
    """Hyperparameters from the `Rule` that matched, or from the call of `param_groups`."""
    by_rule: bool = False
    doubt: str = ""
    """Why it may be something else; part of the reason, too."""
    otherwise: str = ""
    """What types and names say where a forward pass decided against them."""


class Classifier(Protocol):
    """Assigns parameters of groups that do not name an algorithm; parameters without an answer are left out."""

    def from_models(self, params: Collection[Tensor]) -> Mapping[Tensor, Assignment]:
        """Assign by the models for which `param_groups` was called, as they are now."""
        ...

    def from_names(self, params: Mapping[str, Tensor]) -> Mapping[Tensor, Assignment]:
        """Assign by names, as names of layers and embeddings suggest."""
        ...
