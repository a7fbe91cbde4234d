"""Copies a model's tree so that every layer has a class of `torch.nn`, which is what classification asks for.

Three kinds of layers have another class:

- modules of TorchScript, which keep the name of the class they were compiled from;
- modules made by `torch.export` and `torch.distributed.pipelining.pipeline`, and others with a graph of `torch.fx`:
  they may keep a name, and their graph has the operation of each parameter;
- linear layers of other libraries, which have the sizes and the weight (out_features, in_features) of `nn.Linear`.

`with_layer_types` replaces each by a stand-in: a module of the fitting class with the same parameters, which is never
called. All other modules stay as they are.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from quintic.grouping.uses import attribute_of

__all__ = ["Operation", "layer_with", "operation_on", "with_layer_types"]

# Names of the input and output sizes of linear layers.
_SIZES = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "output_size"),
    ("input_dim", "output_dim"),
    ("in_dim", "out_dim"),
)

# In the class name of a linear layer. Sizes alone are enough only for `in_channels`.
_LINEAR_CLASS = re.compile(r"linear|dense|proj", re.IGNORECASE)

# Added by TorchScript to the qualified name of a class.
_SCRIPT_NAME = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")

# Operations that return their first argument, in another dtype, layout or orientation.
_PASSING = frozenset({"to", "_to_copy", "detach", "alias", "contiguous", "clone", "float", "bfloat16", "half"})
_TRANSPOSING = frozenset({"t", "transpose", "permute", "mT", "T"})

_LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
_NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm"})

# Operations that multiply with a matrix: the matrix's position among the arguments, and whether it is (in, out) there.
_PRODUCTS = {"linear": (1, False), "addmm": (2, True), "mm": (1, True), "matmul": (1, True)}

# Dimensions of the weight, and whether the convolution is a transposed one.
_CONVOLUTIONS = {
    nn.Conv1d: (3, False),
    nn.Conv2d: (4, False),
    nn.Conv3d: (5, False),
    nn.ConvTranspose1d: (3, True),
    nn.ConvTranspose2d: (4, True),
    nn.ConvTranspose3d: (5, True),
}

# Gates of a recurrent layer, whose weights are (gates * hidden_size, inputs).
_GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.GRU: 3, nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1}


class Operation(NamedTuple):
    """The operation in which a traced graph uses a parameter."""

    kind: str
    """`linear`, `linear (in, out)`, `embedding`, `norm`, `convolution`, `nothing`."""
    groups: int = 1
    """Groups of channels of a convolution."""
    transposed: bool = False
    """Whether the convolution is a transposed one."""


class _StandIn(nn.Module):
    """Replaces a module of an unknown class; takes missing attributes from that module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)


def with_layer_types(model: nn.Module) -> nn.Module:
    """Return the model, or a copy of its tree with stand-ins for layers whose class hides their kind.

    The copy shares all parameters, and modules that have no such layer below them.
    """
    return _Copier(model).copy(model)


def operation_on(module: nn.Module, attribute: str) -> Operation | None:
    """Return the operation in which a graph uses a parameter; None without a graph, and for several operations."""
    operations: Mapping[str, Operation] = module.__dict__.get("traced_operations", {})
    return operations.get(attribute)


def layer_with(kind: type[nn.Module], **params: Tensor) -> nn.Module:
    """Return a layer of a class of `torch.nn` that has these parameters, and is never called."""
    attributes = {"_parameters": params, "_modules": {}, "_buffers": {}, "training": False}
    return _bare(kind, {**attributes, **(_sizes_of(kind, params, None) or {})})


class _Copier:
    """Copies a tree of modules, each once."""

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[int, nn.Module] = {}
        self._operations: dict[Tensor, Operation | None] = {}
        self._class_names: dict[int, str] = {}
        """Class names by `id` of the module, from graphs of modules above it."""
        for module in model.modules():
            graph = _graph_of(module)
            if graph is not None:
                self._read(module, graph)

    def copy(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module, or the module itself if neither it nor a module below needs a stand-in."""
        known = self._copies.get(id(module))
        if known is not None:
            return known
        items = list(module._modules.items())
        children = {name: None if child is None else self.copy(child) for name, child in items}
        copy = self._stand_in(module)
        if copy is None and any(children[name] is not child for name, child in items):
            copy = _bare(type(module), module.__dict__)
        if copy is not None:
            copy.__dict__["_modules"] = children
        self._copies[id(module)] = module if copy is None else copy
        return self._copies[id(module)]

    def _stand_in(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, torch.jit.ScriptModule):
            self._note_groups(module)
            name = _SCRIPT_NAME.sub("", str(module._c._type().qualified_name()))
            return self._made(module, name)
        if type(module) is nn.Module or _graph_of(module) is not None:
            name = self._class_names.get(id(module)) or attribute_of(module, "_ty")
            is_known = isinstance(name, str) or any(p in self._operations for p in module._parameters.values())
            return self._made(module, name if isinstance(name, str) else "") if is_known else None
        return _as_linear(module)

    def _made(self, module: nn.Module, class_name: str) -> nn.Module:
        """Return a stand-in of the class of this qualified name, a `torch.nn` class if the parameters fit it."""
        params = dict(module._parameters.items())
        operations = {key: op for key, p in params.items() if p is not None and (op := self._operations.get(p))}
        path, _, name = class_name.rpartition(".")
        weight = params.get("weight")
        layer = getattr(sys.modules.get(path), name, None) if path.startswith("torch.nn.modules.") else None
        if layer is None and weight is not None and "weight" in operations:
            layer = _layer_for(operations["weight"], weight)
        sizes = None if layer is None else _sizes_of(layer, params, operations.get("weight"))
        base: type[nn.Module] = _StandIn if layer is None or sizes is None else layer
        if name and base.__name__ != name:
            base = type(name, (base,), {"__module__": path})
        attributes = {"stands_for": module, "traced_operations": operations, **(sizes or {})}
        return _bare(base, {**attributes, "_parameters": params, "_buffers": {}, "training": False})

    def _note_groups(self, module: torch.jit.ScriptModule) -> None:
        """Note the groups of channels of a scripted or traced convolution; other modules are skipped."""
        weight = dict(module._parameters.items()).get("weight")
        if weight is None or weight.ndim < 3:
            return
        groups = attribute_of(module, "groups")
        graph = attribute_of(module, "graph") if groups is None else None  # a traced module has no attributes
        for node in graph.nodes() if graph is not None else ():
            if node.kind() == "aten::_convolution":
                groups = list(node.inputs())[8].toIValue()
        if isinstance(groups, int):
            self._operations[weight] = Operation("convolution", groups)

    def _read(self, owner: nn.Module, graph: fx.Graph) -> None:
        """Record operations on parameters, and class names of modules, from the graph of their owner."""
        modules = dict(owner.named_modules(remove_duplicate=False))
        for node in graph.nodes:
            for entry in node.meta.get("nn_module_stack", {}).values():
                path, kind = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", "")
                if path in modules and path:
                    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
                    self._class_names.setdefault(id(modules[path]), name)
            if node.op != "get_attr":
                continue
            holder, _, key = str(node.target).rpartition(".")
            param = modules[holder]._parameters.get(key) if holder in modules else None
            if param is None:
                continue
            known = {self._operations[param]} if param in self._operations else set()
            self._operations[param] = _together(known.union(_operations(node)))
        for name, param in owner.named_parameters():
            if type(modules[name.rpartition(".")[0]]) is nn.Module:
                self._operations.setdefault(param, Operation("nothing"))


def _together(found: set[Operation | None]) -> Operation | None:
    """Return the operation if all uses have the same one; a table with a lookup is an embedding in any case."""
    if Operation("embedding") in found:
        return Operation("embedding")
    found = found - {Operation("nothing")} or {Operation("nothing")}
    return found.pop() if len(found) == 1 else None


def _operations(node: fx.Node, *, transposed: bool = False) -> Iterator[Operation | None]:
    """Yield the operation of each user of a parameter's node; None for an unknown one."""
    if not node.users:
        yield Operation("nothing")
    for user in node.users:
        name = _operation_name(user)
        position = next((place for place, argument in enumerate(user.args) if argument is node), None)
        if name in _PASSING | _TRANSPOSING and position == 0:
            yield from _operations(user, transposed=transposed != (name in _TRANSPOSING))
        elif name in _LOOKUPS:
            yield Operation("embedding")
        elif name in _NORMS:
            yield Operation("norm")
        elif name.startswith("conv") and (position == 1 or user.kwargs.get("weight") is node):
            yield _convolution_operation(name, user)
        elif name == "linear" and user.kwargs.get("weight") is node:
            yield Operation("linear (in, out)" if transposed else "linear")
        elif name in _PRODUCTS and position == _PRODUCTS[name][0]:
            yield Operation("linear (in, out)" if transposed != _PRODUCTS[name][1] else "linear")
        else:
            yield None


def _operation_name(node: fx.Node) -> str:
    """Return the name of the function a node calls: `linear` for `F.linear` and for `torch.ops.aten.linear.default`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", node.target)).removeprefix("aten.").partition(".")[0]


def _convolution_operation(name: str, node: fx.Node) -> Operation:
    is_general = name == "convolution"
    place = 8 if is_general else 6
    groups = node.args[place] if len(node.args) > place else node.kwargs.get("groups", 1)
    transposed = bool(node.args[6]) if is_general and len(node.args) > 6 else name.startswith("conv_transpose")
    return Operation("convolution", groups if isinstance(groups, int) else 1, transposed)


def _layer_for(operation: Operation, weight: Tensor) -> type[nn.Module] | None:
    """Return the class of `torch.nn` whose weight takes part in this operation; None if there is no such class."""
    if operation.kind == "convolution":
        wanted = (weight.ndim, operation.transposed)
        return next((layer for layer, kind in _CONVOLUTIONS.items() if kind == wanted), None)
    return {"linear": nn.Linear, "embedding": nn.Embedding, "norm": nn.LayerNorm}.get(operation.kind)


def _sizes_of(
    layer: type[nn.Module], params: Mapping[str, Tensor | None], operation: Operation | None
) -> dict[str, Any] | None:
    """Return the attributes that classification reads, derived from a layer's parameters; None if these do not fit."""
    weight = params.get("weight")
    shape = () if weight is None else tuple(weight.shape)
    if issubclass(layer, nn.Linear):
        return {"out_features": shape[0], "in_features": shape[1]} if len(shape) == 2 else None
    if issubclass(layer, nn.Embedding | nn.EmbeddingBag):
        return {"num_embeddings": shape[0], "embedding_dim": shape[1]} if len(shape) == 2 else None
    if layer in _CONVOLUTIONS:
        ndim, transposed = _CONVOLUTIONS[layer]
        if len(shape) != ndim or operation is None or operation.kind != "convolution":
            return None
        # A plain convolution stores (out, in / groups, ...), a transposed one (in, out / groups, ...).
        first, second = shape[0], shape[1] * operation.groups
        outputs, inputs = (second, first) if transposed else (first, second)
        return {"out_channels": outputs, "in_channels": inputs, "groups": operation.groups, "transposed": transposed}
    if issubclass(layer, nn.MultiheadAttention):
        widths = {p.shape[-1] for key in ("in_proj_weight", "q_proj_weight") if (p := params.get(key)) is not None}
        return {"embed_dim": widths.pop()} if len(widths) == 1 else None
    if layer in _GATES:
        recurrent = next((p for key, p in params.items() if key.startswith("weight_hh") and p is not None), None)
        return None if recurrent is None else {"hidden_size": recurrent.shape[0] // _GATES[layer]}
    return {}  # norms and modules without weights of their own


def _as_linear(module: nn.Module) -> nn.Module | None:
    """Return a stand-in for a linear layer of another library, whose sizes match a weight (out, in); else None."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(module, nn.Linear) or is_lazy(weight) or weight.ndim != 2:
        return None
    names = [base.__name__ for base in type(module).__mro__]
    for inputs, outputs in _SIZES:
        sizes = attribute_of(module, outputs), attribute_of(module, inputs)
        if sizes != tuple(weight.shape):
            continue
        if inputs != "in_channels" and not any(_LINEAR_CLASS.search(name) for name in names):
            continue
        kind = type(type(module).__name__, (type(module), nn.Linear), {"__module__": type(module).__module__})
        return _bare(kind, {**module.__dict__, "out_features": sizes[0], "in_features": sizes[1]})
    return None


def _bare(kind: type[nn.Module], attributes: Mapping[str, Any]) -> nn.Module:
    """Return a module with these attributes whose constructor was not called."""
    module = object.__new__(kind)
    module.__dict__.update(attributes)
    return module


def _graph_of(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a module runs, if it has one; never reads a property of a user's module."""
    graph = module.__dict__.get("graph") or (module.graph if isinstance(module, fx.GraphModule) else None)
    return graph if isinstance(graph, fx.Graph) else None
