"""Classifies one parameter by the modules that use it: the rules of `docs/how-to/parameter-groups.md`, one by one.

Muon takes matrices that map features to features. AdamW takes tensors whose rows or columns are not features. All uses
of a tensor count at once, so that the order of modules makes no difference.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from quintic.grouping.doubts import EXCHANGED, PERHAPS_FUSED, UNTAKEN, are_exchanged, is_untaken
from quintic.grouping.layer_types import operation_on
from quintic.grouping.registry import RegistryMatch
from quintic.grouping.uses import ParameterUse, is_tuner, stored
from quintic.optim.groups.assignment import Assignment
from quintic.optim.layout.views import Experts, Flatten, Matrix, Split

__all__ = ["Convolutions", "classify"]

Convolutions = Literal["adamw", "muon"]

_QKV = ("query", "key", "value")

_FUSED_NAME = re.compile(
    r"qkv|query_key_value|gate_up|up_gate|^(c_attn|att_proj|in_proj|(to_)?(kv|qk)(_proj)?|w_?(kv|12|13))$|"
    r"(^|_)mod(ulation)?$",
    re.IGNORECASE,
)

# Modules whose one layer makes gate and up, or shifts and scales, by their class name.
_FUSED_CLASS = re.compile(r"GLU$|Ada\w*Norm|NormZero|AdaLN|AdaptiveNorm", re.IGNORECASE)

# Names of layers that add nothing to the name of the module around them.
_NO_NAMES = frozenset({"linear", "lin", "base_layer", "lora_B", "default"})

# Modules that choose experts, by the end of their class name.
_ROUTER_CLASS = re.compile(r"(Router|TopKGate|TopKGating|MoE\w*Gate)$", re.IGNORECASE)

_GATE_NAME = re.compile(r"(^|_)gate$")

# Parameters that no known module owns, by the name of the attribute.
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|$)")
_LOOKUP_NAME = re.compile(
    r"(^|_)(tokens?|emb|embeds?|embeddings?|codevectors|codebook)(_table)?$|position|(^|_)(rel_)?pos(_|$)"
)

# Rates and factors that entries are multiplied by, each by its own: Mamba's A_log, layer scales.
_SCALE_NAME = re.compile(r"_log$|(^|_)(alpha|beta|gamma|scales?|gains?)$")


def _adamw(why: str) -> Assignment:
    return Assignment("adamw", Matrix(), why)


def classify(
    name: str,
    param: Tensor,
    uses: Sequence[ParameterUse],
    known: Mapping[Tensor, Sequence[RegistryMatch]],
    heads: Mapping[nn.Module, str],
    convolutions: Convolutions,
    taken: Container[int] | None,
) -> Assignment | str:
    """Return the assignment of a parameter, or a remark for the error about one that cannot be classified.

    Args:
        name: of the parameter.
        param: any shape; may be on the meta device.
        uses: the places where modules compute with it.
        known: the registry's matches for parameters of this model.
        heads: the output heads, each with the reason for taking it for one.
        convolutions: as for `param_groups`.
        taken: the numbers of features that layers of the model take, if that is known.
    """
    if param.ndim < 2:
        return _adamw(f"{param.ndim}-D")
    for use in uses:
        certain = _by_type(use, param, heads, convolutions)
        if certain is not None:
            return certain
    entries = known.get(param, ())
    if entries:
        problem = next((k.problem for k in entries if k.problem is not None), None)
        if problem is not None:
            return f" ({entries[0].entry.why}; but {problem})"
        if any(k.view != entries[0].view for k in entries):
            return f" (its uses disagree: {entries[0].entry.why}, {entries[-1].entry.why})"
        view, why = entries[0].view, entries[0].entry.why
        return _adamw(why) if view is None else Assignment("muon", view, why)
    for use in uses:
        adapted = _as_adapted(use, known)
        if adapted is not None:
            return adapted
    by_module = [one for use in uses if (one := _by_module(use, param, heads, taken)) is not None]
    if by_module:
        # One AdamW use gives the tensor to AdamW: a head stays a head where another module uses it as a linear layer.
        # The minimum does not depend on the order of the uses.
        return min(by_module, key=lambda one: (one.algorithm, str(one.view), one.why))
    for use in uses:
        by_name = _by_attribute(use, param) or _by_graph(use)
        if by_name is not None:
            return by_name
    if param.ndim == 3 and "experts" in name:
        fused = _perhaps_fused(_sounds_fused(name.rpartition(".")[2]))
        is_exchanged = any(are_exchanged(use, len(param)) for use in uses)
        doubt = EXCHANGED if is_exchanged else fused
        return Assignment("muon", Experts(), "stacked experts, taken as (experts, out, in)", doubt=doubt)
    return ""


def _perhaps_fused(by: str | None) -> str:
    return "" if by is None else f"by its {by} {PERHAPS_FUSED}"


def _sounds_fused(name: str) -> str | None:
    return "name" if _FUSED_NAME.search(name) else None


def _by_type(
    use: ParameterUse, param: Tensor, heads: Mapping[nn.Module, str], convolutions: Convolutions
) -> Assignment | None:
    """Return the assignment that a module's type settles, also for a tensor with other uses; else None."""
    module = use.module
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _adamw("embedding")
    if isinstance(module, nn.modules.conv._ConvNd):
        return _convolution(use, module, param, heads.get(module), convolutions)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm"):
        return _adamw("norm")
    if isinstance(module, ParametrizationList):
        is_vector = param.numel() == max(param.shape)
        return _adamw(_stored_vector(param) if is_vector else "parametrization: the weight is computed from it")
    return None


def _convolution(
    use: ParameterUse, conv: nn.modules.conv._ConvNd, param: Tensor, head: str | None, convolutions: Convolutions
) -> Assignment:
    if convolutions == "adamw" or use.attribute != "weight":
        return _adamw("convolution")
    if head is not None:
        return _adamw(head)
    if conv.groups > 1 and conv.in_channels == conv.groups:
        return _adamw("depthwise convolution: each channel by itself")
    # (out, in / groups, *kernel) becomes (groups, out / groups, in / groups * kernel).
    view = Flatten(conv.transposed, conv.groups)
    ((_, m, n),) = view.shapes(param.shape)
    if 1 in (m, n):
        return _adamw("one output or one input")
    why = "transposed convolution" if conv.transposed else "convolution"
    if conv.groups > 1:
        why += ", one matrix per group of channels"
    return Assignment("muon", view, why, doubt=_perhaps_fused(_sounds_fused(use.last)))


def _by_module(
    use: ParameterUse, param: Tensor, heads: Mapping[nn.Module, str], taken: Container[int] | None
) -> Assignment | None:
    """Return the assignment that the kind of a module suggests; None for a module that is not known."""
    module = use.module
    if isinstance(module, nn.Linear):
        return _linear(use, module, param, heads, taken)
    if isinstance(module, nn.MultiheadAttention):
        if use.attribute == "in_proj_weight":  # (3 * embed_dim, embed_dim)
            return Assignment("muon", Split((module.embed_dim,) * 3, names=_QKV), "fused queries, keys, values")
        if use.attribute.endswith("_proj_weight"):
            return Assignment("muon", Matrix(), "linear layer")
        return _adamw("bias")  # bias_k and bias_v, (1, 1, embed_dim)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(module, param)
    return None


def _linear(
    use: ParameterUse, linear: nn.Linear, param: Tensor, heads: Mapping[nn.Module, str], taken: Container[int] | None
) -> Assignment | None:
    if use.attribute != "weight":
        return _adamw(_stored_vector(param)) if param.numel() == max(param.shape) else None
    reason = heads.get(linear) or _of_adapted(use, heads) or _gate(use, linear)
    if reason is not None:
        return _adamw(reason)
    doubt = _perhaps_fused(_looks_fused(use, linear)) or (UNTAKEN if is_untaken(use, taken) else "")
    return Assignment("muon", Matrix(), "linear layer", doubt=doubt)


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, param: Tensor) -> Assignment:
    """Return the assignment of a weight of a recurrent layer, (gates * hidden_size, inputs)."""
    rows, columns = param.shape
    if 1 in (module.hidden_size, rows, columns):
        return _adamw("one output or one input")
    # A projection of the state (weight_hr) has as many columns as the state has features, and fewer rows.
    gates = max(1, rows // module.hidden_size)
    if gates == 1:
        return Assignment("muon", Matrix(), "recurrent layer")
    return Assignment("muon", Split((module.hidden_size,) * gates), "recurrent layer, one matrix per gate")


def _looks_fused(use: ParameterUse, linear: nn.Linear) -> str | None:
    """Return the evidence for several matrices in one weight, `"name"`, `"class"` or `"shape"`; None without any."""
    beside = [sibling for sibling in use.siblings() if isinstance(sibling, nn.Linear)]
    inputs = [sibling.in_features for sibling in use.siblings(later=True) if isinstance(sibling, nn.Linear)]
    if linear.out_features in inputs:  # a later layer takes all outputs as they are
        return None
    names = use.module_name.split(".")
    while len(names) > 1 and (names[-1].isdigit() or names[-1] in _NO_NAMES):
        names.pop()
    if _FUSED_NAME.search(names[-1]):
        return "name"
    is_only_taken = all(sibling.in_features != linear.out_features for sibling in beside)
    if is_only_taken and use.above and _FUSED_CLASS.search(type(use.above[0]).__name__):
        return "class"
    if len(beside) != 1 or len(inputs) != 1:
        return None
    # Gate and up of a gated MLP: the only other layer comes later and takes half of the outputs. If the outputs were
    # also twice the inputs, an ordinary layer could look like this.
    if 2 * inputs[0] == linear.out_features != 2 * linear.in_features:
        return "shape"
    # Queries, keys and values: three outputs for each input, and the only other layer is square and takes a third.
    is_attention = linear.out_features == 3 * linear.in_features and beside[0].in_features == beside[0].out_features
    return "shape" if is_attention and inputs[0] == linear.in_features else None


def _gate(use: ParameterUse, linear: nn.Linear) -> str | None:
    """Return why a linear layer is a gate or a router, whose singular values mean nothing; else None."""
    owners = [linear, *use.above[:1]]
    is_router = any(_ROUTER_CLASS.search(base.__name__) for owner in owners for base in type(owner).__mro__)
    if is_router or "router" in use.module_name.split("."):
        return "router"
    if use.above and linear.out_features in set(_numbers_of_experts(use.above[0])):
        return "router (as many outputs as there are experts)"
    if 1 in (linear.out_features, linear.in_features):
        return "one output or one input"
    if not _GATE_NAME.search(use.last):
        return None
    # A gate that chooses or weighs has few outputs, and no layer takes them for features. The gate of a gated MLP or of
    # attention is as wide as the features it multiplies, and a layer beside it takes these.
    beside = [sibling for sibling in use.siblings() if isinstance(sibling, nn.Linear)]
    is_taken = any(other.in_features == linear.out_features for other in beside)
    shape = linear.out_features, linear.in_features
    has_twin = any((other.out_features, other.in_features) == shape for other in beside)
    if is_taken or (has_twin and linear.out_features >= linear.in_features):
        return None
    return "gate or router (by its name)"


def _numbers_of_experts(module: nn.Module) -> Iterator[int]:
    """Yield the lengths of lists of experts, and of stacks of expert weights, directly below a module."""
    for name, child in module._modules.items():
        if child is not None and "expert" in name:
            if isinstance(child, nn.ModuleList):
                yield len(child)
            yield from (len(param) for param in child._parameters.values() if param is not None and param.ndim == 3)


def _adapted_layer(use: ParameterUse) -> nn.Module | None:
    """Return the layer that the adapter of a part of it adapts; None for other modules, also for this layer."""
    tuner = next((module for module in use.above[:2] if is_tuner(module)), None)
    base = tuner._modules.get("base_layer") if tuner is not None else None
    return None if base is use.module else base


def _as_adapted(use: ParameterUse, known: Mapping[Tensor, Sequence[RegistryMatch]]) -> Assignment | None:
    """Return the assignment of LoRA's B, (out, rank), if the registry splits the outputs of the weight it adapts."""
    base = _adapted_layer(use)
    weight = stored(base, "weight") if base is not None and "lora_B" in use.module_name.split(".") else None
    entries = known.get(weight, ()) if weight is not None else ()
    view = entries[0].view if entries else None
    if not isinstance(view, Split):
        return None
    # LoRA stores its factor as (out, rank) also where the weight is (in, out).
    return Assignment("muon", replace(view, transposed=False), f"adapter: {entries[0].entry.why}")


def _of_adapted(use: ParameterUse, heads: Mapping[nn.Module, str]) -> str | None:
    """Return why AdamW takes the factor of an adapter: it adapts an embedding or an output head; else None."""
    base = _adapted_layer(use)
    if isinstance(base, nn.Embedding):
        return "adapter of an embedding"
    return f"adapter of an {heads[base]}" if base is not None and base in heads else None


def _by_attribute(use: ParameterUse, param: Tensor) -> Assignment | None:
    """Return the assignment that names suggest for a parameter that no known module owns; else None."""
    reason = None
    if any(_ROUTER_CLASS.search(base.__name__) for base in type(use.module).__mro__) or use.last in ("router", "gate"):
        reason = "router"
    elif param.numel() == max(param.shape):
        reason = _stored_vector(param)
    elif _BIAS_NAME.search(use.attribute):
        reason = "bias"
    elif _LOOKUP_NAME.search(use.attribute) or _LOOKUP_NAME.search(use.last):
        reason = "embedding (by its name)"
    elif _SCALE_NAME.search(use.attribute):
        reason = "factors, entry by entry"
    elif any(map(is_tuner, use.above[:2])):
        # AdaLoRA has LoRA's factors; other adapters multiply entry by entry, rotate, or look up.
        if param.ndim == 2 and use.last in ("lora_A", "lora_B"):
            return Assignment("muon", Matrix(), "factor of an adapter")
        reason = "adapter"
    return None if reason is None else _adamw(reason)


def _by_graph(use: ParameterUse) -> Assignment | None:
    """Return the assignment of a parameter without a layer of its own that a traced graph uses in one way."""
    operation = operation_on(use.module, use.attribute)
    if operation is None:
        return None
    if operation.kind.startswith("linear"):
        return Assignment("muon", Matrix(operation.kind != "linear"), "multiplied with, as the traced graph says")
    if operation.kind == "nothing":
        return _adamw("used by nothing in the traced graph")
    return _adamw(f"{operation.kind}, as the traced graph says")


def _stored_vector(param: Tensor) -> str:
    return f"1-D, stored with {param.ndim} dimensions"
