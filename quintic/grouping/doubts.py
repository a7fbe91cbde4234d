"""Finds weights whose treatment is a guess as long as no forward pass has followed their outputs.

The features that a hidden layer makes are features that another layer takes. A layer that none takes is an output head,
a router, a gate, or several matrices in one weight, or its outputs are reshaped on their way.
"""

import re
from collections.abc import Container, Mapping, Sequence

from torch import Tensor, nn

from quintic.grouping.uses import ParameterUse, is_tuner

__all__ = [
    "BY_PASS",
    "EXCHANGED",
    "NOTES",
    "PERHAPS_FUSED",
    "UNTAKEN",
    "WARNINGS",
    "are_exchanged",
    "is_untaken",
    "taken_features",
]

PERHAPS_FUSED = "perhaps several matrices, taken as one"
"""The doubt about a parameter like `qkv_proj.weight` whose owner is not in the registry."""

UNTAKEN = "no layer takes as many features as it gives"
"""The doubt about a linear layer that is perhaps a head, a router, or several matrices."""

EXCHANGED = "perhaps stored as (experts, in, out)"
"""The doubt about stacked experts beside a router."""

WARNINGS = {
    PERHAPS_FUSED: "perhaps several matrices each, orthogonalized as one: {}; say which with "
    "quintic.Rule({}, 'muon', quintic.Split(sizes, groups=...)), or quintic.Matrix() for one",
    UNTAKEN: "perhaps output heads, routers or several matrices each, orthogonalized as one matrix: no layer takes as "
    "many features as these give: {}; say what they are with quintic.Rule({}, 'adamw') for a head or a router, or "
    "'muon' with quintic.Matrix() or quintic.Split(sizes, groups=...)",
    EXCHANGED: "perhaps stored as (experts, in, out), taken as (experts, out, in): {}; say which with "
    "quintic.Rule({}, 'muon', quintic.Experts(transposed=True)), or quintic.Experts()",
}
"""The text of `param_groups` for each doubt, with places for a list of names and for the first of them."""

BY_PASS = "; or let a forward pass find out: quintic.param_groups(model, example=...)"
"""The end of every warning, and of the error for parameters that nothing decides."""

NOTES = {
    PERHAPS_FUSED: "several matrices",
    UNTAKEN: "output heads or routers, for no layer takes as many features as they give",
    EXCHANGED: "stored as (experts, in, out)",
}
"""The text of `explain` for each doubt: parameters may be ..."""

_LAST_OF_EXPERT = re.compile(r"down|(^|_)out|w2|fc2|c_proj", re.IGNORECASE)


def taken_features(uses: Mapping[Tensor, Sequence[ParameterUse]]) -> set[int] | None:
    """Return the numbers of input features of a model's layers, and of features that are normalised or scaled.

    None if no linear layer takes the outputs of another one: then numbers of features prove nothing.
    """
    taken: set[int] = set()
    linears: set[tuple[int, int]] = set()
    for param, several in uses.items():
        for use in several:
            module = use.module
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if isinstance(module, nn.Linear):
                taken.add(module.in_features)
                linears.add((module.out_features, module.in_features))
            elif isinstance(module, nn.modules.conv._ConvNd):
                taken.add(module.in_channels)
            # Other vectors, also those stored with more dimensions, are added to the features that they are as long as.
            elif use.attribute == "weight" or param.numel() != max(param.shape, default=1):
                taken.update(param.shape)
    is_chain = any(one[0] == other[1] for one in linears for other in linears - {one})
    return taken if is_chain else None


def is_untaken(use: ParameterUse, taken: Container[int] | None) -> bool:
    """Return whether no layer takes as many features as a linear layer gives, though a hidden layer's are taken."""
    layer = use.module
    if taken is None or not isinstance(layer, nn.Linear) or layer.out_features in taken:
        return False
    if any(map(is_tuner, use.above[:2])):
        return False
    # Keys and values of grouped queries: two layers alike, whose heads are repeated for a layer that takes a multiple.
    beside = [sibling for sibling in use.siblings() if isinstance(sibling, nn.Linear)]
    has_twin = any(other.weight.shape == layer.weight.shape for other in beside)
    return not (has_twin and any(other.in_features % layer.out_features == 0 for other in beside))


def are_exchanged(use: ParameterUse, num_experts: int) -> bool:
    """Return whether stacked experts lie beside a router whose inputs are their second dimension, not their third.

    The first projection takes the router's inputs, so that it is (experts, hidden, inputs).
    """
    params = [(name, p) for name, p in use.module._parameters.items() if p is not None and p.ndim == 3]
    first = next((p for name, p in params if not _LAST_OF_EXPERT.search(name)), None)
    around = [*use.module.children(), *use.siblings()]
    widths = {one.in_features for one in around if isinstance(one, nn.Linear) and one.out_features == num_experts}
    return first is not None and first.shape[1] in widths and first.shape[2] not in widths
