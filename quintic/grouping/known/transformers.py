"""Known views of the models of `transformers`."""

from torch import Tensor, nn

from quintic.grouping.known.view import (
    KnownView,
    UnknownLayoutError,
    ViewOf,
    always,
    equal_parts,
    num_heads_of,
    num_key_value_heads_of,
    parts,
    same_view_for,
    size_of,
    split_of,
)
from quintic.grouping.uses import attribute_of, has_attribute
from quintic.optim.layout.views import Experts, Matrix, Rows, Split, View

__all__ = ["TRANSFORMERS"]


_query_key_value_per_head = equal_parts(3, per_head=True)


def _all_queries_keys_values(owner: nn.Module, _param: Tensor) -> View:
    head_dim = size_of(owner, "head_dim")
    keys = num_key_value_heads_of(owner) * head_dim
    return Split((num_heads_of(owner) * head_dim, keys, keys))


def _falcon(owner: nn.Module, param: Tensor) -> View | None:
    heads, head_dim = num_heads_of(owner), size_of(owner, "head_dim")
    if owner.new_decoder_architecture:  # a key and a value follow each group of queries
        groups = num_key_value_heads_of(owner)
        return Split((heads // groups * head_dim, head_dim, head_dim), groups=groups)
    return _starcoder(owner, param)


def _starcoder(owner: nn.Module, param: Tensor) -> View | None:
    if owner.multi_query:
        head_dim = size_of(owner, "head_dim")
        return Split((num_heads_of(owner) * head_dim, head_dim, head_dim))
    return _query_key_value_per_head(owner, param)


def _codegen(owner: nn.Module, param: Tensor) -> View:
    # Query, value and key of a quarter of the heads, four times, on any number of devices.
    return Split((param.shape[0] // 12,) * 3, groups=4)


def _linear_attention_by_key_head(owner: nn.Module, _param: Tensor) -> View:
    keys, values = size_of(owner, "num_k_heads"), size_of(owner, "num_v_heads")
    key_dim, value_dim = size_of(owner, "head_k_dim"), size_of(owner, "head_v_dim") * (values // keys)
    return Split((key_dim, key_dim, value_dim, value_dim), groups=keys)


def _conv1d(owner: nn.Module, param: Tensor) -> View:
    if param.shape[-1] != owner.nf:
        raise ValueError(f"{type(owner).__name__} has nf={owner.nf} outputs, its weight {tuple(param.shape)}")
    return Matrix(transposed=True)


def _conv1d_attention(owner: nn.Module, param: Tensor) -> View:
    # (in, width * n): keys and values for cross-attention, whose queries have a layer of their own, else all three.
    # A traced module has lost its sizes; each matrix is as wide as the input.
    width = size_of(owner, "split_size") if has_attribute(owner, "split_size") else param.shape[0]
    return split_of(*[width] * (param.shape[1] // width), transposed=True)


def _key_and_value_per_head(owner: nn.Module, param: Tensor) -> View:
    key, value = size_of(owner, "qk_nope_head_dim"), size_of(owner, "v_head_dim")
    return split_of(key, value, groups=param.shape[0] // (key + value))


def _stored_in_by_out(owner: nn.Module) -> bool:
    """Return whether experts are stored as (experts, in, out), from the shapes of the first and the last projection.

    With a fused gate these are (experts, 2 f, d) and (experts, d, f), or (experts, d, 2 f) and (experts, f, d), which
    always differ. Without a gate they are equal if d = f, and then the class decides.
    """
    down = owner._parameters["down_proj"]
    first = owner._parameters.get("gate_up_proj")
    parts = 2 if first is not None else 1
    first = first if first is not None else owner._parameters["up_proj"]
    assert first is not None
    assert down is not None
    _, rows, columns = first.shape
    normal = (columns, rows) == (down.shape[1], parts * down.shape[2])
    swapped = (rows, columns) == (down.shape[2], parts * down.shape[1])
    if normal and swapped:
        return bool(owner.is_transposed)
    if normal or swapped:
        return swapped
    raise ValueError(f"first projection of shape {tuple(first.shape)} does not feed down_proj {tuple(down.shape)}")


def _gate_and_up(is_concatenated: bool | None = None) -> ViewOf:
    """Return the function for a gate followed by an up projection, or alternating with it; None asks the owner."""

    def view(owner: nn.Module, param: Tensor) -> View:
        transposed = _stored_in_by_out(owner)
        features = param.shape[2 if transposed else 1] // 2
        if owner.is_concatenated if is_concatenated is None else is_concatenated:
            return Split((features, features), transposed)
        return Split((1, 1), transposed, groups=features)

    return view


def _expert(owner: nn.Module, _param: Tensor) -> View:
    return Experts(_stored_in_by_out(owner))


def _gate_per_head(owner: nn.Module, param: Tensor) -> View | None:
    names = ("num_heads", "num_v_heads", "num_attention_heads", "n_heads", "index_n_heads")
    if param.shape[0] not in {attribute_of(owner, name) for name in names}:
        raise UnknownLayoutError  # as wide as the values, and a matrix
    return None


def _focal(owner: nn.Module, param: Tensor) -> View:
    width = param.shape[1]
    return Split((width, width, size_of(owner, "focal_level") + 1))


def _bank_of_experts(transposed: bool = False) -> ViewOf:
    return lambda owner, _param: Rows(size_of(owner, "ffn_hidden_size"), transposed)


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("down_proj", "is_transposed", "is_concatenated", "has_gate")
_FUSED = "fused queries, keys, values"
_FUSED_PER_HEAD = "fused query, key, value, one group per head"
_QKV = ("query", "key", "value")

_PER_HEAD = ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention")
_PHI = ("Phi3Attention", "Phi4MultimodalAttention")
_VISION = (
    *("VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention"),
    *("Qwen3OmniMoeVisionAttention", "Qwen3_5VisionAttention", "Qwen3_5MoeVisionAttention"),
    *("Glm4vVisionAttention", "Glm4vMoeVisionAttention", "GlmOcrVisionAttention"),
    *("BlipAttention", "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention"),
)
_GATED_MLP = (
    *("Phi3MLP", "Phi4MultimodalMLP", "DiaMLP", "MiniMaxM3VLDenseMLP"),
    *("GlmMLP", "Glm4MLP", "Glm4vTextMLP", "GlmOcrTextMLP", "GlmImageTextMLP"),
)
_GRANITE = ("GraniteMoeSharedMLP", "GraniteMoeHybridMLP", "GraniteMoeSWAMLP")
_UNMARKED = ("Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts")
_GPT2 = ("GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention")
_GATED_ATTENTION = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
_DELTA_NET = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_MAMBA = ("time_step_rank", "ssm_state_size", "x_proj", "dt_proj")
_DBRX = ("DbrxExpertGLU",)
_GEMMA = ("Gemma3MultiModalProjector", "T5Gemma2MultiModalProjector")


TRANSFORMERS: tuple[KnownView, ...] = (
    # Conv1D computes x @ weight + bias. Its number of outputs is checked, because other classes have that name, too.
    KnownView("weight", _conv1d, "GPT-2: Conv1D stores (in, out)", ("Conv1D",), ("nf",)),
    KnownView(
        "c_attn.weight",
        _conv1d_attention,
        "GPT-2: fused query, key, value; Conv1D stores (in, out)",
        _GPT2,
        holds=_QKV,
    ),
    KnownView(
        "c_attn.weight",
        _conv1d_attention,
        "GPT: fused query, key, value; Conv1D stores (in, out)",
        ("Attention",),
        attributes=("split_size", "n_head"),
        libraries=("transformers",),
        holds=_QKV,
    ),
    KnownView("query_key_value.weight", _query_key_value_per_head, _FUSED_PER_HEAD, _PER_HEAD, holds=_QKV),
    KnownView("query_key_value.weight", _falcon, "Falcon: fused queries, key, value", ("FalconAttention",), holds=_QKV),
    KnownView(
        "c_attn.weight", _starcoder, "StarCoder: fused queries, key, value", ("GPTBigCodeAttention",), holds=_QKV
    ),
    KnownView(
        "qkv_proj.weight",
        _codegen,
        "CodeGen: fused, in four groups of heads",
        ("CodeGenAttention",),
        holds=("query", "value", "key"),
    ),
    KnownView(
        "qkv_proj.weight", _query_key_value_per_head, _FUSED_PER_HEAD, ("MiniMaxLightningAttention",), holds=_QKV
    ),
    KnownView("qkv_proj.weight", _all_queries_keys_values, _FUSED, _PHI, holds=_QKV),
    KnownView("Wqkv.weight", equal_parts(3), _FUSED, ("MptAttention", "ModernBertAttention"), holds=_QKV),
    KnownView(
        "Wqkv.weight",
        _all_queries_keys_values,
        _FUSED,
        attributes=("clip_qkv", "num_key_value_heads", "head_dim"),  # DBRX
        holds=_QKV,
    ),
    KnownView("qkv.weight", equal_parts(3), _FUSED, _VISION, holds=_QKV),
    KnownView("gate_up_proj.weight", equal_parts(2), "fused gate and up", _GATED_MLP),
    KnownView("input_linear.weight", equal_parts(2), "fused gate and up", _GRANITE),
    KnownView("Wi.weight", equal_parts(2), "fused up and gate", ("ModernBertMLP", "ModernBertDecoderMLP")),
    KnownView(
        "q_proj.weight",
        parts("head_dim", "head_dim", per_head=True),
        "query and output gate, one group per head",
        _GATED_ATTENTION,
        holds=("query", "gate"),
    ),
    KnownView(
        "in_proj_qkvz.weight",
        _linear_attention_by_key_head,
        "linear attention: query, key, values, output gates, one group per key head",
        ("Qwen3NextGatedDeltaNet",),
    ),
    KnownView("in_proj_ba.weight", always(None), "gates: two numbers per head", ("Qwen3NextGatedDeltaNet",)),
    KnownView(
        "in_proj_qkv.weight", parts("key_dim", "key_dim", "value_dim"), "linear attention: " + _FUSED, _DELTA_NET
    ),
    *same_view_for("in_proj_a.weight in_proj_b.weight", always(None), "gate: one number per head", classes=_DELTA_NET),
    KnownView("in_proj.weight", equal_parts(2), "Mamba: input, output gate", attributes=_MAMBA),
    KnownView(
        "x_proj.weight",
        parts("time_step_rank", "ssm_state_size", "ssm_state_size"),
        "Mamba: time step, B, C",
        attributes=_MAMBA,
    ),
    KnownView("projection_in.weight", _focal, "queries, context, gates", attributes=("focal_level",)),
    # Linear attention and indexers, often in kernels that a forward pass cannot look into.
    *same_view_for(
        "g_proj.weight a_proj.weight b_proj.weight bt_proj.weight f_proj.weight weights_proj.weight",
        _gate_per_head,
        "gate: one number per head",
        libraries=("transformers", "fla"),
    ),
    # Multi-head latent attention. Rows that go different ways are different matrices: the compressed rows are normed
    # and expanded, the rotary key is used as it is; expanded keys meet queries, expanded values do not.
    # Each parameter has two names: transformers' name, and the name in DeepSeek's own code and torchtitan.
    *same_view_for(
        "kv_a_proj_with_mqa.weight wkv_a.weight",
        parts("kv_lora_rank", "qk_rope_head_dim"),
        "latent attention: compressed keys and values, shared rotary key",
        attributes=_LATENT,
    ),
    *same_view_for(
        "kv_b_proj.weight wkv_b.weight",
        _key_and_value_per_head,
        "latent attention: key and value, one group per head",
        attributes=_LATENT,
    ),
    # The plain and the rotary rows of a head's query stay together: they are one vector that meets one key in one
    # product, rotation keeps lengths, and partly rotated queries of other models (GPT-NeoX) are not split either.
    *same_view_for(
        "q_proj.weight q_b_proj.weight wq.weight wq_b.weight",
        always(Matrix()),
        "latent attention: queries, plain and rotary rows together",
        attributes=_LATENT,
    ),
    # transformers marks its stacked experts with attributes since version 5; before that the class has to tell.
    KnownView("gate_up_proj", _gate_and_up(), "stacked experts, fused gate and up", attributes=_EXPERTS),
    KnownView("gate_up_proj", _gate_and_up(True), "stacked experts, fused gate and up", _UNMARKED),
    KnownView("gate_up_proj", _gate_and_up(False), "stacked experts, gate and up alternating", ("GptOssExperts",)),
    *same_view_for("up_proj down_proj", _expert, "stacked experts", attributes=_EXPERTS),
    KnownView("down_proj", _expert, "stacked experts", (*_UNMARKED, "GptOssExperts")),
    *same_view_for("w1 v1", _bank_of_experts(), "DBRX: experts one below the other", classes=_DBRX),
    KnownView("w2", _bank_of_experts(True), "DBRX: experts one below the other, stored (in, out)", _DBRX),
    KnownView("mm_input_projection_weight", always(Matrix(True)), "image to text features, stored (in, out)", _GEMMA),
)
