"""Assignments for parameter groups that do not name an algorithm, which `Muon` asks for: the functions of `Classifier`.

The model is the best evidence, if `param_groups` was called for it. Else names tell: the parameters are put into a tree
of modules whose classes follow from their names, and the tree is classified like any model.
"""

import re
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from quintic.grouping.assign import Rule, assign
from quintic.grouping.classify import Convolutions
from quintic.grouping.forward.roles import Roles
from quintic.grouping.layer_types import layer_with
from quintic.optim.groups.assignment import Assignment

__all__ = ["Request", "from_models", "from_names", "remember"]

# Names of layers that look rows up, and of norms.
_LOOKUP = re.compile(
    r"(^|_)(emb|embeds?|embeddings?|tokens?|embed_tokens|wte|wpe)(_|$)|position|pos_embed", re.IGNORECASE
)
_NORM = re.compile(r"norm|(^|_)(ln|bn)(_|\d|$)", re.IGNORECASE)

# Reasons for AdamW that rest on the shape of a matrix, which is too little where its module is unknown.
_BY_SHAPE = re.compile(r"1-D, stored|one output or one input")


class Request(NamedTuple):
    """The arguments of a call of `param_groups`."""

    rules: Sequence[Rule]
    convolutions: Convolutions
    options: Mapping[str, Mapping[str, Any]]
    """By algorithm."""
    roles: Roles | None = None


_requests: list[tuple[weakref.ref[nn.Module], Request]] = []
"""The models that groups were made for and that still exist, the latest last."""


def remember(model: nn.Module, request: Request) -> None:
    """Keep the arguments with which groups were made for a model, as long as the model exists."""
    others = [(ref, other) for ref, other in _requests if ref() is not None and ref() is not model]
    _requests[:] = [*others, (weakref.ref(model), request)]


def from_models(params: Collection[Tensor]) -> dict[Tensor, Assignment]:
    """Assign parameters of models that `param_groups` has made groups for, frozen ones included.

    The model is read as it is now. Rules and options of that call count; the options come with the assignment.
    Parameters of other models, and parameters that no rule covers, are left out.
    """
    assignments: dict[Tensor, Assignment] = {}
    for ref, request in reversed(_requests):
        model = ref()
        wanted = {param for param in params if param not in assignments}
        if model is None or not any(param in wanted for param in model.parameters()):
            continue
        for param, one in assign(
            model, request.rules, request.convolutions, wanted=wanted, roles=request.roles
        ).items():
            assignments[param] = one._replace(options={**request.options[one.algorithm], **one.options})
    return assignments


def from_names(params: Mapping[str, Tensor]) -> dict[Tensor, Assignment]:
    """Assign parameters by their names; parameters whose names tell nothing are left out."""
    if not params:
        return {}
    assignments = assign(_tree_from_names(params), wanted=set(params.values()))
    return {param: one for param, one in assignments.items() if not (param.ndim == 2 and _BY_SHAPE.match(one.why))}


def _tree_from_names(params: Mapping[str, Tensor]) -> nn.Module:
    """Return a tree of modules with these parameters, of the classes that names and numbers of dimensions suggest."""
    root = nn.Module()
    for name, param in params.items():
        *path, attribute = name.split(".")
        module = root
        for depth, part in enumerate(path):
            child = module._modules.get(part)
            if child is None:
                is_owner = depth == len(path) - 1 and attribute == "weight"
                child = module._modules[part] = _layer(part, param) if is_owner else nn.Module()
            module = child
        module._parameters[attribute] = param  # type: ignore[assignment]
    return root


def _layer(name: str, weight: Tensor) -> nn.Module:
    if weight.ndim != 2 or _NORM.search(name):
        return nn.Module()
    return layer_with(nn.Embedding if _LOOKUP.search(name) else nn.Linear, weight=weight)
