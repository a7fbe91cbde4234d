"""Views of parameters that module types alone do not tell: fused, transposed, interleaved and stacked matrices.

`nn.Linear(512, 1536)` may be one matrix, or a query, a key and a value; only the code that slices its output knows.
`KNOWN_VIEWS` is that knowledge for the models of the `transformers` library, as frozen data: which class, which of its
parameters, which view. A class is recognised by its name, or by the names of its base classes, or by its attributes:
`transformers` is never imported, and a subclass (also one made by FSDP2) is recognised like its base.

Each entry states how the model's own forward pass slices the tensor, and `tests/optim/test_registry.py` checks it by
running that forward pass. A view that does not add up to the tensor's shape decides nothing: the parameter is then
reported as undecided, since a guess would be a silent change of the update rule. Your own models need no entry here:
a `quintic.Rule` with a view says the same by parameter name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from quintic.optim.views import Experts, Matrix, Rows, Split, View

__all__ = ["KNOWN_VIEWS", "Found", "KnownView", "known_views"]


@dataclass(frozen=True)
class KnownView:
    """How one parameter of one kind of module is made of matrices.

    Args:
        parameter: name of the parameter within its owner, e.g. `"query_key_value.weight"`.
        view: from the owner and the parameter to the view; None means AdamW. It reads sizes from the owner and its
            configuration, and may raise `AttributeError` or `ValueError` when they do not fit.
        why: shown to the user by `quintic.explain`.
        classes: class names of the owner, or of a base class of it; empty for "any class with these `attributes`".
        attributes: what the owner must have.
    """

    parameter: str
    view: Callable[[nn.Module, Tensor], View | None]
    why: str
    classes: frozenset[str] = frozenset()
    attributes: tuple[str, ...] = ()

    def recognises(self, owner: nn.Module) -> bool:
        """Return whether this entry speaks of `owner`."""
        if self.classes and not any(base.__name__ in self.classes for base in type(owner).__mro__):
            return False
        return all(hasattr(owner, attribute) for attribute in self.attributes)


@dataclass(frozen=True)
class Found:
    """What the registry says about a parameter of a model."""

    entry: KnownView
    view: View | None
    """None for AdamW, or if there is a `problem`."""
    problem: str | None = None
    """Why the entry, though its owner is recognised, does not fit the parameter."""


def known_views(modules: Iterable[nn.Module]) -> dict[Tensor, list[Found]]:
    """Return what the registry says about the parameters of `modules`, one `Found` per owner that is recognised.

    An owner that stands further out knows more (GPT-2's attention splits what its Conv1D only transposes): for every
    parameter, only the entries with the longest path to it are returned.
    """
    by_child: dict[str, list[KnownView]] = {}
    for entry in KNOWN_VIEWS:
        by_child.setdefault(entry.parameter.partition(".")[0], []).append(entry)
    found: dict[Tensor, list[Found]] = {}
    for owner in modules:
        decided: set[str] = set()
        for child in (*owner._parameters, *owner._modules):
            for entry in by_child.get(child, ()):
                param = _lookup(owner, entry.parameter)
                if param is not None and entry.parameter not in decided and entry.recognises(owner):
                    decided.add(entry.parameter)
                    found.setdefault(param, []).append(_found(entry, owner, param))
    for param, several in found.items():
        longest = max(_depth(one) for one in several)
        found[param] = [one for one in several if _depth(one) == longest]
    return found


def _depth(found: Found) -> int:
    return found.entry.parameter.count(".")


def _found(entry: KnownView, owner: nn.Module, param: Tensor) -> Found:
    try:
        view = entry.view(owner, param)
        if view is not None:
            view.shapes(param.shape)
    except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        return Found(entry, None, str(error))
    return Found(entry, view)


def _lookup(owner: nn.Module, path: str) -> Tensor | None:
    """Return the parameter at `path`, through registered names only: attributes of wrappers are not parameters."""
    child, _, rest = path.partition(".")
    if not rest:
        return owner._parameters.get(child)
    module = owner._modules.get(child)
    return None if module is None else module._parameters.get(rest)


def _size(owner: nn.Module, *names: str) -> int:
    """Return the first of `names` that the owner, or else its configuration, has."""
    for source in (owner, getattr(owner, "config", None)):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int):
                return value
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def _heads(owner: nn.Module) -> int:
    return _size(owner, "num_attention_heads", "num_heads", "n_heads", "n_head")


def _key_value_heads(owner: nn.Module) -> int:
    return _size(owner, "num_key_value_heads", "num_kv_heads")


def _split(*sizes: int, groups: int = 1, transposed: bool = False) -> View:
    """Return a `Split` without its empty parts; one part alone is a `Matrix`."""
    present = tuple(size for size in sizes if size)
    if len(present) == 1:
        return Matrix(transposed)
    return Split(present, transposed, groups)


def _equal_parts(count: int) -> Callable[[nn.Module, Tensor], View]:
    def view(_owner: nn.Module, param: Tensor) -> View:
        return Split((param.shape[0] // count,) * count)

    return view


def _query_key_value_per_head(owner: nn.Module, param: Tensor) -> View:
    heads = _heads(owner)
    return Split((param.shape[0] // (3 * heads),) * 3, groups=heads)


def _all_queries_keys_values(owner: nn.Module, _param: Tensor) -> View:
    head_dim = _size(owner, "head_dim")
    keys = _key_value_heads(owner) * head_dim
    return Split((_heads(owner) * head_dim, keys, keys))


def _falcon(owner: nn.Module, param: Tensor) -> View:
    heads, head_dim = _heads(owner), _size(owner, "head_dim")
    if owner.new_decoder_architecture:  # each key/value head comes after the queries that share it
        groups = _key_value_heads(owner)
        return Split((heads // groups * head_dim, head_dim, head_dim), groups=groups)
    if owner.multi_query:
        return Split((heads * head_dim, head_dim, head_dim))
    return _query_key_value_per_head(owner, param)


def _starcoder(owner: nn.Module, param: Tensor) -> View:
    if owner.multi_query:
        head_dim = _size(owner, "head_dim")
        return Split((_heads(owner) * head_dim, head_dim, head_dim))
    return _query_key_value_per_head(owner, param)


def _codegen(owner: nn.Module, param: Tensor) -> View:
    # Query, value and key of a quarter of the heads at a time, however many devices there are. The order of the parts
    # within a group does not matter to a view whose parts are equal.
    return Split((param.shape[0] // 12,) * 3, groups=4)


def _query_and_gate(owner: nn.Module, param: Tensor) -> View:
    head_dim, heads = _size(owner, "head_dim"), _heads(owner)
    return Split((head_dim, head_dim), groups=heads)


def _linear_attention_by_key_head(owner: nn.Module, _param: Tensor) -> View:
    keys, values = _size(owner, "num_k_heads"), _size(owner, "num_v_heads")
    key_dim, value_dim = _size(owner, "head_k_dim"), _size(owner, "head_v_dim") * (values // keys)
    return Split((key_dim, key_dim, value_dim, value_dim), groups=keys)


def _linear_attention(owner: nn.Module, _param: Tensor) -> View:
    key_dim = _size(owner, "key_dim")
    return Split((key_dim, key_dim, _size(owner, "value_dim")))


def _adamw(_owner: nn.Module, _param: Tensor) -> None:
    return None


def _conv1d(owner: nn.Module, param: Tensor) -> View:
    if param.shape[-1] != owner.nf:
        raise ValueError(f"{type(owner).__name__} has nf={owner.nf} outputs, its weight {tuple(param.shape)}")
    return Matrix(transposed=True)


def _transposed(_owner: nn.Module, _param: Tensor) -> View:
    return Matrix(transposed=True)


def _conv1d_attention(owner: nn.Module, param: Tensor) -> View:
    # Cross-attention keeps its query elsewhere, so that there are two parts, else three.
    part = _size(owner, "split_size")
    return _split(*[part] * (param.shape[1] // part), transposed=True)


def _latent_and_shared_key(owner: nn.Module, _param: Tensor) -> View:
    return _split(_size(owner, "kv_lora_rank"), _size(owner, "qk_rope_head_dim"))


def _key_and_value_per_head(owner: nn.Module, param: Tensor) -> View:
    key, value = _size(owner, "qk_nope_head_dim"), _size(owner, "v_head_dim")
    return _split(key, value, groups=param.shape[0] // (key + value))


def _latent_queries(owner: nn.Module, param: Tensor) -> View:
    rows = _heads(owner) * (_size(owner, "qk_nope_head_dim") + _size(owner, "qk_rope_head_dim"))
    if param.shape[0] != rows:
        raise ValueError(f"expected {rows} rows of queries, the weight has {param.shape[0]}")
    return Matrix()


def _stored_in_by_out(owner: nn.Module) -> bool:
    """Return how the experts are stored: as (experts, in, out) or as (experts, out, in).

    The shapes tell, whatever the class: the output of the first projection feeds the second, whose output has the
    size of the first one's input. With a fused gate, (experts, 2 f, d) and (experts, d, f) cannot be confused with
    (experts, d, 2 f) and (experts, f, d); without one only d = f could be, and then the class has to say.
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


def _expert_gate_and_up(owner: nn.Module, param: Tensor) -> View:
    return _expert_halves(owner, param) if owner.is_concatenated else _expert_alternating(owner, param)


def _expert_halves(owner: nn.Module, param: Tensor) -> View:
    transposed = _stored_in_by_out(owner)
    features = param.shape[2 if transposed else 1] // 2
    return Split((features, features), transposed)


def _expert_alternating(owner: nn.Module, param: Tensor) -> View:
    transposed = _stored_in_by_out(owner)
    features = param.shape[2 if transposed else 1] // 2
    return Split((1, 1), transposed, groups=features)


def _expert(owner: nn.Module, _param: Tensor) -> View:
    return Experts(_stored_in_by_out(owner))


def _bank_of_experts(owner: nn.Module, _param: Tensor) -> View:
    return Rows(_size(owner, "ffn_hidden_size"))


def _bank_of_transposed_experts(owner: nn.Module, _param: Tensor) -> View:
    return Rows(_size(owner, "ffn_hidden_size"), transposed=True)


def _of(name: str) -> frozenset[str]:
    return frozenset({name})


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("down_proj", "is_transposed", "is_concatenated", "has_gate")
_FUSED = "fused queries, keys, values"
_FUSED_PER_HEAD = "fused query, key, value, one group per head"

_PER_HEAD = frozenset({"GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"})
_PHI = frozenset({"Phi3Attention", "Phi4MultimodalAttention"})
_VISION = frozenset(
    {
        *("VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention"),
        *("Qwen3OmniMoeVisionAttention", "Qwen3_5VisionAttention", "Qwen3_5MoeVisionAttention"),
        *("Glm4vVisionAttention", "Glm4vMoeVisionAttention", "GlmOcrVisionAttention"),
        *("BlipAttention", "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention"),
    }
)
_GATED_MLP = frozenset(
    {
        *("Phi3MLP", "Phi4MultimodalMLP", "DiaMLP", "MiniMaxM3VLDenseMLP"),
        *("GlmMLP", "Glm4MLP", "Glm4vTextMLP", "GlmOcrTextMLP", "GlmImageTextMLP"),
    }
)
_UNMARKED = frozenset({"Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts"})
_GPT2 = frozenset({"GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention"})
_GATED_ATTENTION = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})
_DELTA_NET = frozenset({"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
_DBRX = frozenset({"DbrxExpertGLU"})
_GEMMA = frozenset({"Gemma3MultiModalProjector", "T5Gemma2MultiModalProjector"})


KNOWN_VIEWS: tuple[KnownView, ...] = (
    # Conv1D computes x @ weight + bias. Its number of outputs is checked too: other classes have that name.
    KnownView("weight", _conv1d, "GPT-2: Conv1D stores (in, out)", _of("Conv1D"), ("nf",)),
    KnownView("c_attn.weight", _conv1d_attention, "GPT-2: fused query, key, value; Conv1D stores (in, out)", _GPT2),
    KnownView("query_key_value.weight", _query_key_value_per_head, _FUSED_PER_HEAD, _PER_HEAD),
    KnownView("query_key_value.weight", _falcon, "Falcon: fused queries, key, value", _of("FalconAttention")),
    KnownView("c_attn.weight", _starcoder, "StarCoder: fused queries, key, value", _of("GPTBigCodeAttention")),
    KnownView("qkv_proj.weight", _codegen, "CodeGen: fused, in four groups of heads", _of("CodeGenAttention")),
    KnownView("qkv_proj.weight", _query_key_value_per_head, _FUSED_PER_HEAD, _of("MiniMaxLightningAttention")),
    KnownView("qkv_proj.weight", _all_queries_keys_values, _FUSED, _PHI),
    KnownView("Wqkv.weight", _equal_parts(3), _FUSED, frozenset({"MptAttention", "ModernBertAttention"})),
    KnownView("qkv.weight", _equal_parts(3), _FUSED, _VISION),
    KnownView("gate_up_proj.weight", _equal_parts(2), "fused gate and up", _GATED_MLP),
    KnownView("Wi.weight", _equal_parts(2), "fused up and gate", frozenset({"ModernBertMLP", "ModernBertDecoderMLP"})),
    KnownView("q_proj.weight", _query_and_gate, "query and output gate, one group per head", _GATED_ATTENTION),
    KnownView(
        "in_proj_qkvz.weight",
        _linear_attention_by_key_head,
        "linear attention: query, key, values, output gates, one group per key head",
        _of("Qwen3NextGatedDeltaNet"),
    ),
    KnownView("in_proj_ba.weight", _adamw, "gates: two numbers per head", _of("Qwen3NextGatedDeltaNet")),
    KnownView("in_proj_qkv.weight", _linear_attention, "linear attention: " + _FUSED, _DELTA_NET),
    KnownView("in_proj_a.weight", _adamw, "gate: one number per head", _DELTA_NET),
    KnownView("in_proj_b.weight", _adamw, "gate: one number per head", _DELTA_NET),
    # Multi-head latent attention. Rows that go different ways are different matrices: the compressed rows are normed
    # and expanded, the rotary key is used as it is; expanded keys meet queries, expanded values do not.
    KnownView(
        "kv_a_proj_with_mqa.weight",
        _latent_and_shared_key,
        "latent attention: compressed keys and values, shared rotary key",
        attributes=_LATENT,
    ),
    KnownView(
        "kv_b_proj.weight",
        _key_and_value_per_head,
        "latent attention: key and value, one group per head",
        attributes=_LATENT,
    ),
    # The plain and the rotary rows of a head's query stay together: they are one vector that meets one key in one
    # product, rotation keeps lengths, and partly rotated queries of other models (GPT-NeoX) are not split either.
    *(
        KnownView(
            parameter,
            _latent_queries,
            "latent attention: queries, plain and rotary rows together",
            attributes=("kv_a_proj_with_mqa", *_LATENT),
        )
        for parameter in ("q_proj.weight", "q_b_proj.weight")
    ),
    # transformers marks its stacked experts with attributes since version 5; before that the class has to tell.
    KnownView("gate_up_proj", _expert_gate_and_up, "stacked experts, fused gate and up", attributes=_EXPERTS),
    KnownView("gate_up_proj", _expert_halves, "stacked experts, fused gate and up", _UNMARKED),
    KnownView("gate_up_proj", _expert_alternating, "stacked experts, gate and up alternating", _of("GptOssExperts")),
    KnownView("up_proj", _expert, "stacked experts", attributes=_EXPERTS),
    KnownView("down_proj", _expert, "stacked experts", attributes=_EXPERTS),
    KnownView("down_proj", _expert, "stacked experts", _UNMARKED | _of("GptOssExperts")),
    KnownView("w1", _bank_of_experts, "DBRX: experts one below the other", _DBRX),
    KnownView("v1", _bank_of_experts, "DBRX: experts one below the other", _DBRX),
    KnownView("w2", _bank_of_transposed_experts, "DBRX: experts one below the other, stored (in, out)", _DBRX),
    KnownView("mm_input_projection_weight", _transposed, "image to text features, stored (in, out)", _GEMMA),
)
"""What is known about the models of `transformers`; the first entry for a parameter that recognises its owner counts.
"""
