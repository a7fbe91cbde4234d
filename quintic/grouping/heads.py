"""Finds output heads: layers that score a vocabulary or classes, so that no other layer takes their rows for features.

The model may point to the layer (`get_output_embeddings` of `transformers`, `get_classifier` of timm). Else its name
tells, or a number of outputs equal to the rows of an embedding, or to `config.num_labels`.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import nn

from quintic.grouping.uses import attribute_of
from quintic.optim.groups.names import NUMBER, clean_names, mask_layer_indices, unwrap_module

__all__ = ["heads_of", "without_adapters"]

# The last name on a module's path, anywhere in a model.
_NAME = re.compile(r"lm_head|head|unembed|unembedding|embed_out|classifier|score|qa_outputs|(to_)?logits")

# Names that heads and hidden layers have. Outside a stack of layers, the last layer of its parent is a head.
_NAME_OF_LAST = re.compile(r"proj_out(_2)?|conv_out|(output|last|final)_(layer|linear)")

# Names of heads and hidden layers. The last layer of its parent is a head if no layer takes as many features.
_NAME_OF_UNTAKEN = "fc"

# Modules outside stacks whose last layer is a head.
_CONTAINER = re.compile(rf"{_NAME.pattern}|heads|(?!pre_)\w+_(head|classifier)|heads?_dist|(last|final)_layer")

# Inserted by PEFT into the name of a module that is trained beside its adapters.
_ADAPTED = re.compile(r"^base_model\.model\.|\.(modules_to_save\.[^.]+|original_module|base_layer)(?=\.|$)")

# Embeddings whose rows are not a vocabulary: no head scores positions or segments.
_POSITIONS = re.compile(r"pos|^wpe$|type|segment|bias", re.IGNORECASE)

_Layer = nn.Linear | nn.modules.conv._ConvNd


def heads_of(model: nn.Module) -> Mapping[nn.Module, str]:
    """Return {layer: why} for the linear layers and convolutions that are output heads."""
    clean = clean_names(model)
    modules = {clean[name]: module for name, module in model.named_modules(remove_duplicate=False)}
    layers = {name: module for name, module in modules.items() if isinstance(module, _Layer)}
    heads: dict[nn.Module, str] = {}
    declared = {layer for module in modules.values() for layer in _declared_heads(module)}
    taken = {_sizes(layer)[1] for layer in layers.values()}
    scored = _numbers_of_classes(modules.values()) - taken
    for name, layer in layers.items():
        why = _by_name(without_adapters(name), layer, modules, taken)
        if why is None and layer in declared:
            why = "output head (the model says so)"
        if why is None and _sizes(layer)[0] in scored and isinstance(layer, nn.Linear):
            why = "output head (config.num_labels outputs, which no layer takes)"
        if why is not None:
            heads[layer] = why
    return {**heads, **_by_size(layers, modules, {_sizes(layer)[0] for layer in layers.values() if layer in heads})}


def without_adapters(name: str) -> str:
    """Return the name that a module or parameter has without PEFT."""
    return _ADAPTED.sub("", name)


def _by_name(name: str, layer: _Layer, modules: Mapping[str, nn.Module], taken: Container[int]) -> str | None:
    parent_name, _, last = name.rpartition(".")
    parent = modules.get(parent_name)
    is_stacked = NUMBER.search(name) is not None
    # Attention, too, calls its last layer "output".
    is_head = _NAME.fullmatch(last) is not None or (not is_stacked and last == "output")
    if not is_stacked and parent is not None and _NAME_OF_LAST.fullmatch(last):
        is_head = is_head or _layers_of(parent)[-1:] == [layer]
    if not is_stacked and isinstance(layer, nn.Linear):
        is_head = is_head or _CONTAINER.fullmatch(last) is not None
    if is_head:
        return "output head (by its name)"
    if parent is None:
        return None
    is_untaken = not is_stacked and _sizes(layer)[0] not in taken
    if last == _NAME_OF_UNTAKEN and is_untaken and _layers_of(parent)[-1:] == [layer]:
        return "output head (the last layer, fc)"
    if last == "out_proj" and type(parent).__name__.endswith("ClassificationHead"):
        return "output head (of a classifier)"
    container = parent_name.rpartition(".")[2]
    # Convolutions named so are often hidden layers before a classifier.
    names = _CONTAINER if isinstance(layer, nn.Linear) else _NAME
    if NUMBER.search(parent_name) or not names.fullmatch(container) or layer not in _last_of(parent):
        return None
    # A square layer before a tied output maps features to themselves once more.
    if isinstance(layer, nn.Linear) and layer.in_features == layer.out_features:
        return None
    return f"output head (the last layer of {container})"


def _last_of(container: nn.Module) -> list[_Layer]:
    """Return the output layer among a module's own; all of a list or dictionary, whose entries are parallel."""
    own = [child for child in map(unwrap_module, container.children()) if isinstance(child, _Layer)]
    if isinstance(container, nn.ModuleList | nn.ModuleDict):
        return own
    # An attention head ends with several layers of one size: queries, keys and values.
    if any(_sizes(layer) == _sizes(own[-1]) for layer in own[:-1]):
        return []
    # The last one may also be one whose outputs another of them takes, such as the modulation of the output layer.
    untaken = [layer for layer in own if _sizes(layer)[0] not in {_sizes(other)[1] for other in own}]
    return untaken[-1:] if len(untaken) == 1 else own[-1:]


def _declared_heads(module: nn.Module) -> Iterator[_Layer]:
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        yield module.head
        for cluster in module.tail.children():
            yield from _layers_of(cluster)[-1:]
    for method in ("get_output_embeddings", "get_classifier"):
        ask = attribute_of(module, method)
        try:
            answer = ask() if callable(ask) else None
        except Exception:  # a model may raise anything where it has no head; then nothing is declared
            continue
        for head in answer if isinstance(answer, tuple | list) else [answer]:
            if isinstance(head, nn.Module):
                yield from _last_layers(head)


def _numbers_of_classes(modules: Iterable[nn.Module]) -> set[int]:
    """Return the numbers of classes that configurations of modules name, each also with a class for nothing."""
    counts = {attribute_of(attribute_of(module, "config"), "num_labels") for module in modules}
    return {count + extra for count in counts if isinstance(count, int) and count > 1 for extra in (0, 1)}


def _last_layers(head: nn.Module) -> Iterator[_Layer]:
    """Yield the last layer of the module that a model calls its head; of several parallel heads, each last layer."""
    copies = head._modules.get("modules_to_save", head)  # of PEFT
    if isinstance(copies, nn.ModuleList | nn.ModuleDict):
        for copy in copies.children():
            yield from _last_layers(copy)
    else:
        yield from _layers_of(head)[-1:]


def _layers_of(module: nn.Module) -> list[_Layer]:
    return [inner for inner in module.modules() if isinstance(inner, _Layer)]


def _by_size(layers: Mapping[str, _Layer], modules: dict[str, nn.Module], sizes: set[int]) -> dict[nn.Module, str]:
    """Return {layer: why} for linear layers with as many outputs as an embedding has rows, if not one of `sizes`.

    A hidden layer may be as wide as the vocabulary. So layers that recur under other numbers are left out, and those
    before a layer that takes as many features. Of the rest, the layers without a number in their name are heads, else
    the layer with the highest numbers.
    """
    linears = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    places = {name: place for place, name in enumerate(layers)}
    last_taken = {_sizes(layer)[1]: place for place, layer in enumerate(layers.values())}
    vocabularies = {
        module.num_embeddings: name
        for name, module in reversed(modules.items())
        if isinstance(module, nn.Embedding)
        and module.num_embeddings not in sizes
        and not _POSITIONS.search(name.rpartition(".")[2])
    }
    recurring = Counter(mask_layer_indices(name) for name in linears)
    sized = [
        name
        for name, linear in linears.items()
        if linear.out_features in vocabularies
        and (recurring[mask_layer_indices(name)] == 1 or "." not in name)
        and last_taken.get(linear.out_features, -1) <= places[name]
    ]
    plain = [name for name in sized if not NUMBER.search(name)]
    heads: dict[nn.Module, str] = {}
    for name in plain or sorted(sized, key=_natural_order)[-1:]:
        rows = linears[name].out_features
        heads[linears[name]] = f"output head (as many outputs as {vocabularies[rows] or 'the embedding'} has rows)"
    return heads


def _sizes(layer: _Layer) -> tuple[int, int]:
    """Return (outputs, inputs) of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
