"""Known views of the models of timm, torchtitan and diffusers, and of the original code of Flux, DiT and DINOv2."""

from torch import Tensor, nn

from quintic.grouping.known.view import (
    KnownView,
    UnknownLayoutError,
    always,
    equal_parts,
    parts,
    same_view_for,
    size_of,
)
from quintic.grouping.uses import attribute_of
from quintic.optim.layout.views import Experts, Split, View

__all__ = ["LIBRARIES"]


def _timm_queries_keys_values(owner: nn.Module, param: Tensor) -> View | None:
    if attribute_of(owner, "use_global", False):  # GCViT: the queries have a layer of their own
        return equal_parts(2)(owner, param)
    return equal_parts(3, per_head=attribute_of(owner, "head_first", False))(owner, param)


def _queries_per_key_head(owner: nn.Module, param: Tensor) -> View:
    head_dim = size_of(owner, "head_dim")
    sizes = size_of(owner, "heads_per_kv") * head_dim, head_dim, head_dim
    return Split(sizes, groups=param.shape[0] // sum(sizes))


def _parallel_block(owner: nn.Module, _param: Tensor) -> View:
    sizes: list[int] = owner.__dict__["in_split"]
    return Split(tuple(sizes))


def _attention_and_gated_mlp(owner: nn.Module, param: Tensor) -> View:
    inner = size_of(owner, "inner_dim")
    parts = size_of(owner, "mlp_mult_factor")
    return Split((inner,) * 3 + ((param.shape[0] - 3 * inner) // parts,) * parts)


def _modulation(owner: nn.Module, param: Tensor) -> View | None:
    """Return a `Split` into shifts, scales and gates, each as wide as the norms beside the modulation."""
    shapes = [attribute_of(child, "normalized_shape") for child in owner.children()]
    widths = {shape[-1] for shape in shapes if isinstance(shape, tuple) and shape}
    if len(widths) != 1 or param.shape[0] % (width := widths.pop()):
        raise UnknownLayoutError
    return equal_parts(param.shape[0] // width)(owner, param)


def _alternating(_owner: nn.Module, param: Tensor) -> View:
    return Split((1, 1), groups=param.shape[1] // 2)


_FUSED = "fused queries, keys, values"
_KEY_VALUE = "fused keys, values"
_QKV = ("query", "key", "value")
_KV = ("key", "value")
_GATED = "fused gate and up"
_MODULATION = "modulation: shifts, scales, gates"

_KEY_AND_VALUE_DIM = ("key_dim", "val_dim")

_TIMM = ("timm",)
_DIFFUSERS = ("diffusers",)
_FLUX = ("flux", "torchtitan")

# Number of vectors that the modulation inside a norm makes -> classes of norms.
_ADAPTIVE_NORMS = {
    2: ("AdaLayerNorm", "AdaLayerNormContinuous", "AdaGroupNorm"),
    3: ("AdaLayerNormZeroSingle",),
    4: ("LuminaRMSNormZero",),
    6: ("AdaLayerNormZero", "AdaLayerNormSingle"),
    9: ("SD35AdaLayerNormZeroX",),
    12: ("CogView3PlusAdaLayerNormZeroTextImage",),
}


LIBRARIES: tuple[KnownView, ...] = (
    # timm: attention stores queries, then keys, then values; head by head where keys and values differ in width.
    *same_view_for(
        "qkv.weight qkv.linear.weight",
        parts("key_dim", "key_dim", "val_dim", per_head=True),
        "fused query, key, value, one group per head",
        attributes=_KEY_AND_VALUE_DIM,
        holds=_QKV,
        libraries=_TIMM,
    ),
    KnownView(
        "kv.linear.weight",
        parts("key_dim", "val_dim", per_head=True),
        "fused key, value, one group per head",
        attributes=_KEY_AND_VALUE_DIM,
        holds=_KV,
        libraries=_TIMM,
    ),
    KnownView("qkv.weight", _timm_queries_keys_values, _FUSED, libraries=_TIMM, holds=_QKV),
    KnownView("kv.weight", equal_parts(2), _KEY_VALUE, libraries=_TIMM, holds=_KV),
    KnownView("qk.weight", equal_parts(2), "fused queries, keys", ("GPSA",), libraries=_TIMM, holds=("query", "key")),
    KnownView(
        "in_proj.weight",
        _parallel_block,
        "fused MLP, queries, keys, values",
        attributes=("in_split",),
        holds=("mlp", *_QKV),
        libraries=_TIMM,
    ),
    KnownView("fc1.weight", equal_parts(2), _GATED, ("GluMlp", "GatedConvBlock"), libraries=_TIMM),
    # DINOv2, EVA and others: w12 holds the layers w1 and w2.
    KnownView("w12.weight", equal_parts(2), _GATED, attributes=("w3",)),
    # torchtitan
    KnownView(
        "wqkv.weight",
        _queries_per_key_head,
        "fused queries, key, value, one group per key head",
        attributes=("heads_per_kv", "head_dim"),
        holds=_QKV,
    ),
    KnownView(
        "mlp1_weight_EGD",
        _alternating,
        "stacked experts, gate and up alternating",
        attributes=("mlp2_weight_EDF",),
    ),
    KnownView("mlp2_weight_EDF", always(Experts()), "stacked experts", attributes=("mlp1_weight_EGD",)),
    # Flux
    KnownView("qkv.weight", equal_parts(3), _FUSED, ("SelfAttention",), ("norm", "proj"), _FLUX, _QKV),
    KnownView(
        "linear1.weight",
        parts("hidden_size", "hidden_size", "hidden_size", "mlp_hidden_dim"),
        "fused queries, keys, values, MLP",
        attributes=("linear2", "hidden_size", "mlp_hidden_dim"),
        holds=(*_QKV, "mlp"),
    ),
    KnownView("lin.weight", equal_parts("multiplier"), _MODULATION, attributes=("multiplier", "is_double")),
    # DiT and its descendants. The blocks' norms have no weights, but their shape is the width of a shift.
    KnownView("adaLN_modulation.1.weight", _modulation, _MODULATION),
    # diffusers
    KnownView("proj.weight", equal_parts(2), _GATED, ("GEGLU", "SwiGLU"), libraries=_DIFFUSERS),
    KnownView("linear_in.weight", equal_parts(2), _GATED, ("Flux2FeedForward",), libraries=_DIFFUSERS),
    *(
        KnownView("linear.weight", equal_parts(count), _MODULATION, classes, libraries=_DIFFUSERS)
        for count, classes in _ADAPTIVE_NORMS.items()
    ),
    KnownView(
        "linear.weight",
        equal_parts("mod_param_sets", times=3),
        _MODULATION,
        attributes=("mod_param_sets",),
        libraries=_DIFFUSERS,
    ),
    KnownView("proj_out_1.weight", equal_parts(2), _MODULATION, attributes=("proj_out_2",), libraries=_DIFFUSERS),
    *same_view_for("to_qkv.weight to_added_qkv.weight", equal_parts(3), _FUSED, libraries=_DIFFUSERS, holds=_QKV),
    *same_view_for("to_kv.weight to_added_kv.weight", equal_parts(2), _KEY_VALUE, libraries=_DIFFUSERS, holds=_KV),
    KnownView(
        "to_qkv_mlp_proj.weight",
        _attention_and_gated_mlp,
        "fused queries, keys, values, gate and up",
        attributes=("inner_dim", "mlp_mult_factor"),
        libraries=_DIFFUSERS,
    ),
)
