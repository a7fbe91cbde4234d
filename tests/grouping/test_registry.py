"""Every view of the registry against the code that slices the tensor.

Restating a view proves nothing. Here the fused layer's output is replaced by the numbers of its rows, the model's own
forward pass runs, and what reaches each consumer (a matrix product, a norm, a gate) tells which rows belong together.
"""

import fnmatch
import importlib
import inspect
import itertools
from pathlib import Path

import model_families
import pytest
import torch
from consumed_rows import (
    OFFSET,
    Arguments,
    assert_parts_are_what_is_consumed,
    gate_and_up,
    numbers,
    rows_of,
    rows_reach,
    view_of,
)
from model_families import FAMILIES, TINY, TINY_MLA, TINY_MOE, make_config, transformers_class
from torch import nn

from quintic import Matrix, Rows, Split
from quintic.grouping.assign import assign
from quintic.grouping.doubts import PERHAPS_FUSED
from quintic.grouping.registry import KNOWN_VIEWS

# ------------------------------------------------------------------------------------ every family, every parameter


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family(family, size):
    config, model = model_families.build(family, size)
    expected = FAMILIES[family].expect(config)
    used = set()
    for decision in assign(model).values():
        pattern = next((p for p in expected if fnmatch.fnmatchcase(decision.name, p)), None)
        assert pattern is not None, f"unexpected: {decision.name}"
        assert (decision.algorithm, decision.view) == expected[pattern], f"{decision.name}: {decision.why}"
        used.add(pattern)
    assert used == set(expected)


@pytest.mark.parametrize(
    "family", ["llama, tied", "gemma3 text", "gemma3", "gpt2", "bloom", "falcon 7b", "whisper", "t5", "bert", "opt"]
)
def test_a_tied_head_is_one_parameter_that_says_so(family):
    _, model = model_families.build(family, "small")
    reasons = {decision.name: decision.why for decision in assign(model).values()}
    tied = [why for why in reasons.values() if "tied to" in why and not why.startswith("1-D")]
    assert len(tied) == 1
    assert tied[0].startswith("embedding; tied to ")
    assert not any(why.startswith("output head") for why in reasons.values())


# ------------------------------------------------------------------------------------------- rows by the real slicing


def module(path, name, *args, **options):
    """An instance of a class of the modelling files, in float64 with random weights, no dropout."""
    transformers_class("LlamaConfig")  # skips without transformers 5
    cls = getattr(importlib.import_module(f"transformers.models.{path}"), name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return cls(*args, **options).eval()
    finally:
        torch.set_default_dtype(before)


def config_of(name, **options):
    config = make_config(name, options)
    config._attn_implementation = "eager"
    return config


def no_rotation(head_dim, positions=3):
    """Cosines and sines that leave queries and keys as they are."""
    return torch.ones(1, positions, head_dim, dtype=torch.float64), torch.zeros(
        1, positions, head_dim, dtype=torch.float64
    )


def hidden(width, positions=3):
    return torch.randn(1, positions, width, dtype=torch.float64)


SMALL = {key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")}
PHI = {key: value for key, value in TINY.items() if key != "head_dim"}


def test_rows_of_gpt_neox():
    config = config_of("GPTNeoXConfig", **SMALL)
    owner = module("gpt_neox.modeling_gpt_neox", "GPTNeoXAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(
        owner, "query_key_value", lambda o: o(hidden(32), None, position_embeddings=no_rotation(o.rotary_ndims))
    )


def test_rows_of_gpt_neox_japanese():
    config = config_of("GPTNeoXJapaneseConfig", vocab_size=80, hidden_size=32, num_attention_heads=4)
    owner = module("gpt_neox_japanese.modeling_gpt_neox_japanese", "GPTNeoXJapaneseAttention", config, layer_idx=0)
    owner.rotary_ndims = 8
    assert_parts_are_what_is_consumed(
        owner,
        "query_key_value",
        lambda o: o(hidden(32), None, position_ids=None, position_embeddings=no_rotation(8)),
    )


def test_rows_of_lightning_attention():
    config = config_of("MiniMaxConfig", **TINY)
    owner = module("minimax.modeling_minimax", "MiniMaxLightningAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(owner, "qkv_proj", lambda o: o(hidden(32), no_rotation(8), None))


def test_rows_of_bloom():
    owner = module(
        "bloom.modeling_bloom", "BloomAttention", config_of("BloomConfig", hidden_size=32, n_head=4), layer_idx=0
    )
    alibi = torch.zeros(4, 1, 3, dtype=torch.float64)
    assert_parts_are_what_is_consumed(owner, "query_key_value", lambda o: o(hidden(32), hidden(32), alibi, None))


def test_rows_of_persimmon():
    config = config_of("PersimmonConfig", **SMALL, qk_layernorm=False)
    owner = module("persimmon.modeling_persimmon", "PersimmonAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(
        owner, "query_key_value", lambda o: o(hidden(32), None, position_embeddings=no_rotation(o.rotary_ndims))
    )


@pytest.mark.parametrize(
    "options",
    [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": True}, {"multi_query": False}],
    ids=["40b", "7b", "1b"],
)
def test_rows_of_falcon(options):
    config = config_of("FalconConfig", hidden_size=32, num_attention_heads=4, **options)
    owner = module("falcon.modeling_falcon", "FalconAttention", config, layer_idx=0)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    assert_parts_are_what_is_consumed(
        owner, "query_key_value", lambda o: o(hidden(32), None, mask, position_embeddings=no_rotation(8))
    )


@pytest.mark.parametrize("multi_query", [True, False])
def test_rows_of_starcoder(multi_query):
    config = config_of("GPTBigCodeConfig", n_embd=32, n_head=4, multi_query=multi_query)
    owner = module("gpt_bigcode.modeling_gpt_bigcode", "GPTBigCodeAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(owner, "c_attn", lambda o: o(hidden(32)))


def test_rows_of_codegen():
    config = config_of("CodeGenConfig", n_embd=64, n_head=8, rotary_dim=4, n_positions=8)
    owner = module("codegen.modeling_codegen", "CodeGenAttention", config, layer_idx=0)
    sines, cosines = torch.zeros(1, 3, 2).double(), torch.ones(1, 3, 2).double()
    # From transformers 5.24 on the layer is given them.
    positions = {"position_embeddings": (sines, cosines)}
    if "position_ids" in inspect.signature(owner.forward).parameters:
        owner.embed_positions = torch.cat([sines, cosines], dim=-1)[0]
        positions = {"position_ids": torch.arange(3)[None]}
    assert_parts_are_what_is_consumed(owner, "qkv_proj", lambda o: o(hidden(64), **positions), watch=())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_of_phi3_attention(kv_heads):
    config = config_of("Phi3Config", **{**PHI, "num_key_value_heads": kv_heads})
    owner = module("phi3.modeling_phi3", "Phi3Attention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(owner, "qkv_proj", lambda o: o(hidden(32), no_rotation(8), None))


def test_rows_of_phi4_multimodal_attention():
    config = config_of("Phi4MultimodalConfig", **PHI)
    owner = module("phi4_multimodal.modeling_phi4_multimodal", "Phi4MultimodalAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(owner, "qkv_proj", lambda o: o(hidden(32), no_rotation(8), None))


def test_rows_of_mpt():
    owner = module("mpt.modeling_mpt", "MptAttention", config_of("MptConfig", d_model=32, n_heads=4), 0)
    bias, mask = torch.zeros(4, 1, 3, dtype=torch.float64), torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    assert_parts_are_what_is_consumed(owner, "Wqkv", lambda o: o(hidden(32), position_bias=bias, attention_mask=mask))


def test_rows_of_modernbert():
    config = config_of("ModernBertConfig", **{**SMALL, "cls_token_id": 1, "sep_token_id": 2})
    owner = module("modernbert.modeling_modernbert", "ModernBertAttention", config, layer_idx=0)
    assert_parts_are_what_is_consumed(owner, "Wqkv", lambda o: o(hidden(32), no_rotation(8), None))


VISION = [
    ("qwen2_vl.modeling_qwen2_vl", "VisionAttention", "Qwen2VLVisionConfig", {"embed_dim": 32, "num_heads": 4}),
    (
        "qwen2_5_vl.modeling_qwen2_5_vl",
        "Qwen2_5_VLVisionAttention",
        "Qwen2_5_VLVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "qwen3_vl.modeling_qwen3_vl",
        "Qwen3VLVisionAttention",
        "Qwen3VLVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "qwen3_vl_moe.modeling_qwen3_vl_moe",
        "Qwen3VLMoeVisionAttention",
        "Qwen3VLMoeVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "qwen3_omni_moe.modeling_qwen3_omni_moe",
        "Qwen3OmniMoeVisionAttention",
        "Qwen3OmniMoeVisionEncoderConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "qwen3_5.modeling_qwen3_5",
        "Qwen3_5VisionAttention",
        "Qwen3_5VisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "qwen3_5_moe.modeling_qwen3_5_moe",
        "Qwen3_5MoeVisionAttention",
        "Qwen3_5MoeVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "glm4v_moe.modeling_glm4v_moe",
        "Glm4vMoeVisionAttention",
        "Glm4vMoeVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    (
        "glm_ocr.modeling_glm_ocr",
        "GlmOcrVisionAttention",
        "GlmOcrVisionConfig",
        {"hidden_size": 32, "num_heads": 4},
    ),
    ("glm4v.modeling_glm4v", "Glm4vVisionAttention", "Glm4vVisionConfig", {"hidden_size": 32, "num_heads": 4}),
]


@pytest.mark.parametrize(("path", "name", "config", "options"), VISION, ids=[case[1] for case in VISION])
def test_rows_of_packed_vision_attention(path, name, config, options):
    pytest.importorskip("transformers")
    config = getattr(
        importlib.import_module(f"transformers.models.{path.replace('modeling', 'configuration')}"), config
    )(**options)
    config._attn_implementation = "eager"
    owner = module(path, name, config)
    owner.q_norm = owner.k_norm = nn.Identity()  # where there are any
    cos, sin = (table[0] for table in no_rotation(8))
    ends = torch.tensor([0, 3], dtype=torch.int32)
    assert_parts_are_what_is_consumed(
        owner, "qkv", lambda o: o(hidden(32)[0], cu_seqlens=ends, position_embeddings=(cos, sin))
    )


BLIP = [
    ("blip.modeling_blip", "BlipAttention", "BlipVisionConfig"),
    ("blip_2.modeling_blip_2", "Blip2Attention", "Blip2VisionConfig"),
    ("instructblip.modeling_instructblip", "InstructBlipAttention", "InstructBlipVisionConfig"),
    (
        "instructblipvideo.modeling_instructblipvideo",
        "InstructBlipVideoAttention",
        "InstructBlipVideoVisionConfig",
    ),
]


@pytest.mark.parametrize(("path", "name", "config"), BLIP, ids=[case[1] for case in BLIP])
def test_rows_of_blip(path, name, config):
    owner = module(path, name, config_of(config, hidden_size=32, num_attention_heads=4))
    assert_parts_are_what_is_consumed(owner, "qkv", lambda o: o(hidden(32)))


QWEN_GATED = [
    ("qwen3_next.modeling_qwen3_next", "Qwen3NextAttention", "Qwen3NextConfig"),
    ("qwen3_5.modeling_qwen3_5", "Qwen3_5Attention", "Qwen3_5TextConfig"),
    ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeAttention", "Qwen3_5MoeTextConfig"),
]


@pytest.mark.parametrize(("path", "name", "config"), QWEN_GATED, ids=[case[1] for case in QWEN_GATED])
def test_rows_of_gated_attention(path, name, config):
    owner = module(path, name, config_of(config, **{**TINY_MOE, "num_hidden_layers": 4}), layer_idx=3)
    owner.q_norm = nn.Identity()
    assert_parts_are_what_is_consumed(owner, "q_proj", lambda o: o(hidden(32), no_rotation(8), None))


def test_rows_of_linear_attention_by_key_head():
    config = config_of("Qwen3NextConfig", **TINY_MOE, **model_families.NEXT)
    owner = module("qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet", config, 0)
    rows = torch.arange(owner.in_proj_qkvz.out_features).double()
    ba = torch.arange(owner.in_proj_ba.out_features).double()
    *pieces, strength, decay = owner.fix_query_key_value_ordering(rows[None, None], ba[None, None])
    parts = [batch.flatten() - OFFSET for batch in rows_of(view_of(owner, "in_proj_qkvz.weight"), len(rows))]
    assert [sorted(p.flatten().tolist()) for p in pieces] == [sorted(p.tolist()) for p in parts]
    assert strength.numel() == decay.numel() == owner.num_v_heads  # numbers per head, not features


@pytest.mark.parametrize(
    ("path", "name", "config"),
    [
        ("qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig"),
        ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextConfig"),
    ],
)
def test_rows_of_linear_attention(path, name, config):
    owner = module(path, name, config_of(config, **TINY_MOE, **model_families.NEXT), 0)
    nn.init.zeros_(owner.conv1d.weight)
    owner.conv1d.weight.data[..., -1] = 1  # only the present position: the convolution is the identity
    assert_parts_are_what_is_consumed(owner, "in_proj_qkv", lambda o: o(hidden(32)))
    treatments = {d.name: d.algorithm for d in assign(owner).values()}
    assert treatments["in_proj_a.weight"] == treatments["in_proj_b.weight"] == "adamw"
    assert owner.in_proj_a.out_features == owner.in_proj_b.out_features == owner.num_v_heads


LATENT = [
    ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3Attention", "DeepseekV3Config"),
    ("deepseek_v2.modeling_deepseek_v2", "DeepseekV2Attention", "DeepseekV2Config"),
    ("minicpm3.modeling_minicpm3", "MiniCPM3Attention", "MiniCPM3Config"),
    ("glm4_moe_lite.modeling_glm4_moe_lite", "Glm4MoeLiteAttention", "Glm4MoeLiteConfig"),
    ("longcat_flash.modeling_longcat_flash", "LongcatFlashMLA", "LongcatFlashConfig"),
    ("youtu.modeling_youtu", "YoutuAttention", "YoutuConfig"),
    ("axk1.modeling_axk1", "AXK1Attention", "AXK1Config"),
]


def run_latent(owner):
    rope = owner.qk_rope_head_dim
    cos, sin = no_rotation(rope)
    if type(owner).__name__ == "DeepseekV2Attention":  # complex rotation
        return owner(hidden(32), position_embeddings=torch.ones(1, 3, rope // 2, dtype=torch.complex128))
    return owner(hidden(32), position_embeddings=(cos, sin), attention_mask=None)


# Some always compress their queries, the others do so or not.
ALWAYS_COMPRESSED = ("LongcatFlashMLA", "AXK1Attention")
LATENT_CASES = [(*case, 20) for case in LATENT] + [(*case, None) for case in LATENT if case[1] not in ALWAYS_COMPRESSED]


@pytest.mark.parametrize(
    ("path", "name", "config", "q_lora_rank"), LATENT_CASES, ids=[f"{case[1]}-{case[3]}" for case in LATENT_CASES]
)
def test_rows_of_latent_attention(path, name, config, q_lora_rank):
    config = config_of(config, **{**TINY_MLA, "q_lora_rank": q_lora_rank})
    owner = module(path, name, config, layer_idx=0)
    # The compressed rows go to the norm, the rotary rows to the keys.
    assert_parts_are_what_is_consumed(
        owner, "kv_a_proj_with_mqa", run_latent, silence=["kv_b_proj"], watch=["kv_a_layernorm"]
    )
    assert_parts_are_what_is_consumed(owner, "kv_b_proj", run_latent, silence=["kv_a_proj_with_mqa"])
    # All rows of the query reach one product with the keys, together.
    query = "q_proj" if q_lora_rank is None else "q_b_proj"
    assert view_of(owner, f"{query}.weight") == Matrix()
    rows = getattr(owner, query).out_features
    assert rows == 4 * (10 + 4)
    assert any(len(got) == rows for got in rows_reach(owner, query, run_latent))


# ---------------------------------------------------------------------------------------------------- gated products


GATED = [
    ("phi3.modeling_phi3", "Phi3MLP", "gate_up_proj", "down_proj"),
    ("phi4_multimodal.modeling_phi4_multimodal", "Phi4MultimodalMLP", "gate_up_proj", "down_proj"),
    ("glm.modeling_glm", "GlmMLP", "gate_up_proj", "down_proj"),
    ("glm4.modeling_glm4", "Glm4MLP", "gate_up_proj", "down_proj"),
    ("glm4v.modeling_glm4v", "Glm4vTextMLP", "gate_up_proj", "down_proj"),
    ("glm_ocr.modeling_glm_ocr", "GlmOcrTextMLP", "gate_up_proj", "down_proj"),
    ("glm_image.modeling_glm_image", "GlmImageTextMLP", "gate_up_proj", "down_proj"),
    ("minimax_m3_vl.modeling_minimax_m3_vl", "MiniMaxM3VLDenseMLP", "gate_up_proj", "down_proj"),
    ("dia.modeling_dia", "DiaMLP", "gate_up_proj", "down_proj"),
    ("granitemoeshared.modeling_granitemoeshared", "GraniteMoeSharedMLP", "input_linear", "output_linear"),
    ("granitemoehybrid.modeling_granitemoehybrid", "GraniteMoeHybridMLP", "input_linear", "output_linear"),
    ("granitemoe_swa.modeling_granitemoe_swa", "GraniteMoeSWAMLP", "input_linear", "output_linear"),
    ("modernbert.modeling_modernbert", "ModernBertMLP", "Wi", "Wo"),
    ("modernbert_decoder.modeling_modernbert_decoder", "ModernBertDecoderMLP", "Wi", "Wo"),
]


class AnyConfig:
    """Answers every question a layer asks its configuration."""

    hidden_act = hidden_activation = "silu"
    pretraining_tp = 1
    zero_expert_num = 0
    swiglu_alpha = 1.7
    swiglu_limit = limit = 50.0
    mlp_dropout = dropout = 0.0
    mlp_bias = use_bias = bias = False
    _experts_implementation = "eager"

    def __init__(self, hidden_size=12):
        self.hidden_size = self.moe_latent_size = hidden_size

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "intermediate" in name or "ffn" in name:
            return 5
        if "expert" in name:
            return 1
        raise AttributeError(name)


@pytest.mark.parametrize(("path", "name", "fused", "out"), GATED, ids=[case[1] for case in GATED])
def test_rows_of_gated_mlps(path, name, fused, out):
    owner = module(path, name, AnyConfig())
    width = getattr(owner, fused).out_features
    caught = []

    def gated(values):
        hooks = [
            getattr(owner, fused).register_forward_hook(lambda m, a, o: values),
            getattr(owner, out).register_forward_pre_hook(lambda m, a: caught.append(a[0])),
        ]
        owner(torch.zeros(width, 12, dtype=torch.float64))
        for hook in hooks:
            hook.remove()
        return caught.pop().detach()

    parts = [sorted(int(r) - OFFSET for r in part) for part in rows_of(view_of(owner, f"{fused}.weight"), width)]
    assert parts == list(gate_and_up(gated, width))


EXPERTS = [
    ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"),
    ("qwen2_moe.modeling_qwen2_moe", "Qwen2MoeExperts"),
    ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3Experts"),
    ("mixtral.modeling_mixtral", "MixtralExperts"),
    ("gpt_oss.modeling_gpt_oss", "GptOssExperts"),
    ("openai_privacy_filter.modeling_openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    ("llama4.modeling_llama4", "Llama4TextExperts"),
    ("longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"),
    ("step3p7.modeling_step3p7", "Step3p7Experts"),
    ("aria.modeling_aria", "AriaExperts"),
    ("phimoe.modeling_phimoe", "PhimoeExperts"),
    ("olmoe.modeling_olmoe", "OlmoeExperts"),
    ("glm4_moe.modeling_glm4_moe", "Glm4MoeExperts"),
    ("granitemoe.modeling_granitemoe", "GraniteMoeExperts"),
]


def run_experts(owner, x):
    if type(owner).__name__ == "Llama4TextExperts":
        return owner(x)
    # The only expert twice, the second time with weight zero: Longcat's loop needs more than one choice per token.
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(len(x), 2)
    return owner(x, torch.zeros(len(x), 2, dtype=torch.long), weights)


def numbered_features(view, param):
    """For each kind of matrix, the output features of a stacked parameter that the view gives it."""
    rows, columns = param.shape[1:]
    numbers = torch.arange(columns if view.transposed else rows)
    numbers = numbers[None, None, :] if view.transposed else numbers[None, :, None]
    return [sorted(batch[0].unique().tolist()) for batch in view.batches(numbers.expand(param.shape))]


@pytest.mark.parametrize(("path", "name"), EXPERTS, ids=[case[1] for case in EXPERTS])
def test_stacked_experts(path, name):
    # 10 inputs for 2 x 5 hidden features: the first projection can be the identity, however it is stored.
    square = module(path, name, AnyConfig(hidden_size=10))
    with torch.no_grad():
        for param in square.parameters():
            param.zero_()
        square.gate_up_proj[0] = torch.eye(10)
        square.down_proj[0] = torch.eye(*square.down_proj.shape[1:])

        def gated(x):
            return run_experts(square, x).detach()[:, :5]

        parts = numbered_features(view_of(square, "gate_up_proj"), square.gate_up_proj)
        assert parts == list(gate_and_up(gated, 10))
    # With 12 inputs the two axes cannot be confused: outputs are rows of the matrices, inputs are columns.
    owner = module(path, name, AnyConfig(hidden_size=12))
    assert view_of(owner, "gate_up_proj").shapes(owner.gate_up_proj.shape) == ((1, 5, 12), (1, 5, 12))
    assert view_of(owner, "down_proj").shapes(owner.down_proj.shape) == ((1, 12, 5),)


def test_experts_without_marks_are_known_by_their_class():
    owner = module("gpt_oss.modeling_gpt_oss", "GptOssExperts", AnyConfig())
    marked = view_of(owner, "gate_up_proj"), view_of(owner, "down_proj")
    for mark in ("is_transposed", "is_concatenated", "has_gate"):  # as before transformers 5
        delattr(owner, mark)
    assert (view_of(owner, "gate_up_proj"), view_of(owner, "down_proj")) == marked


def test_experts_without_a_gate():
    owner = module("nemotron_h.modeling_nemotron_h", "NemotronHExperts", AnyNemotron())
    up, down = view_of(owner, "up_proj"), view_of(owner, "down_proj")
    assert up.shapes(owner.up_proj.shape) == ((1, 5, 12),)
    assert down.shapes(owner.down_proj.shape) == ((1, 12, 5),)
    assert run_experts(owner, torch.zeros(2, 12, dtype=torch.float64)).shape == (2, 12)


class AnyNemotron(AnyConfig):
    mlp_hidden_act = "relu"


def test_banks_of_experts():
    class Glu(AnyConfig):
        hidden_size, ffn_hidden_size, moe_num_experts, ffn_act_fn = 12, 5, 3, {"name": "silu"}

    owner = module("dbrx.modeling_dbrx", "DbrxExpertGLU", Glu())
    for param in owner.parameters():
        nn.init.normal_(param)
    assert view_of(owner, "w1") == view_of(owner, "v1") == Rows(5)
    assert view_of(owner, "w2") == Rows(5, transposed=True)
    up, gate, down = (view_of(owner, name).batches(getattr(owner, name))[0] for name in ("v1", "w1", "w2"))
    x = torch.randn(4, 12, dtype=torch.float64)
    stored = [getattr(owner, name).view(3, 5, 12) for name in ("w1", "v1", "w2")]
    for expert in range(3):
        mixed = nn.functional.silu(x @ gate[expert].T) * (x @ up[expert].T)
        torch.testing.assert_close(owner(x, *(bank[expert] for bank in stored)), mixed @ down[expert].T)


# ------------------------------------------------------------------------------------------------ (in, out) storage


def test_conv1d_is_stored_in_by_out():
    conv = module("gpt2.modeling_gpt2", "Conv1D", 6, 4)
    nn.init.normal_(conv.weight)
    x = torch.randn(3, 4, dtype=torch.float64)
    (matrix,) = view_of(conv, "weight").batches(conv.weight)
    torch.testing.assert_close(conv(x), x @ matrix[0].T + conv.bias)


GPT2 = [
    ("gpt2.modeling_gpt2", "GPT2Attention", "GPT2Config"),
    (
        "decision_transformer.modeling_decision_transformer",
        "DecisionTransformerGPT2Attention",
        "DecisionTransformerConfig",
    ),
    ("imagegpt.modeling_imagegpt", "ImageGPTAttention", "ImageGPTConfig"),
]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("path", "name", "config"), GPT2, ids=[case[1] for case in GPT2])
def test_rows_of_gpt2(path, name, config, cross):
    width = {"hidden_size": 32} if config == "DecisionTransformerConfig" else {"n_embd": 32}
    config = config_of(config, **width, n_head=4)
    owner = module(path, name, config, is_cross_attention=cross, layer_idx=0)
    width = owner.c_attn.nf
    rows = torch.arange(width, dtype=torch.float64) + OFFSET
    owner.c_attn.register_forward_hook(lambda m, a, out: rows.expand(out.shape).clone())
    mode = Arguments()
    with mode, torch.no_grad():
        owner(hidden(32), encoder_hidden_states=hidden(32) if cross else None)
    reached = [numbers(tensor).tolist() for tensor in mode.tensors]
    numbered = rows[None].expand(owner.c_attn.weight.shape)
    parts = [batch[0].unique().tolist() for batch in view_of(owner, "c_attn.weight").batches(numbered)]
    assert len(parts) == (2 if cross else 3)
    assert all(part in reached for part in parts)
    assert all(batch.shape == (1, 32, 32) for batch in view_of(owner, "c_attn.weight").batches(numbered))


@pytest.mark.parametrize(
    ("path", "name", "config"),
    [
        ("gemma3.modeling_gemma3", "Gemma3MultiModalProjector", "Gemma3Config"),
        ("t5gemma2.modeling_t5gemma2", "T5Gemma2MultiModalProjector", "T5Gemma2EncoderConfig"),
    ],
)
def test_image_projection(path, name, config):
    parts = {"text_config": {"hidden_size": 16}, "vision_config": {"hidden_size": 24, "image_size": 8, "patch_size": 4}}
    transformers_class("LlamaConfig")
    configurations = importlib.import_module(f"transformers.models.{path.replace('modeling', 'configuration')}")
    config = getattr(configurations, config)(**parts, mm_tokens_per_image=4)
    projector = module(path, name, config)
    param = projector.mm_input_projection_weight
    (shape,) = view_of(projector, "mm_input_projection_weight").shapes(param.shape)
    assert shape == (1, 16, 24)
    assert projector(torch.zeros(1, 4, 24, dtype=torch.float64)).shape == (1, 4, 16)


# -------------------------------------------------------------------------------------------------- what it must not


def test_experts_as_a_list_of_linear_layers_need_no_entry():
    block = nn.ModuleDict(
        {
            "gate": nn.Linear(8, 4, bias=False),
            "experts": nn.ModuleList(
                nn.ModuleDict({"gate_proj": nn.Linear(8, 6), "up_proj": nn.Linear(8, 6), "down_proj": nn.Linear(6, 8)})
                for _ in range(4)
            ),
        }
    )
    found = {d.name: (d.algorithm, d.view) for param, d in assign(block).items() if param.ndim > 1}
    assert found.pop("gate.weight")[0] == "adamw"
    assert set(found.values()) == {("muon", Matrix())}
    assert len(found) == 12


class FalconAttention(nn.Module):
    """Only the name is Falcon's."""

    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(8, 24)


def test_a_namesake_with_another_layout_is_undecided():
    with pytest.raises(ValueError, match=r"query_key_value\.weight of shape \(24, 8\) \(Falcon.*has none of"):
        assign(FalconAttention())


class BloomAttention(nn.Module):
    num_heads = 5

    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(8, 24)


def test_a_view_that_does_not_add_up_is_undecided():
    with pytest.raises(ValueError, match=r"query_key_value.*add up, over all groups, to the 24 .*quintic\.Rule\("):
        assign(BloomAttention())


class Subclass(BloomAttention):
    num_heads = 4


def test_subclasses_are_recognised():
    assert view_of(Subclass(), "query_key_value.weight") == Split((2, 2, 2), groups=4)


def test_a_fused_name_with_an_unknown_owner_is_one_matrix_and_says_so():
    (decision, _) = assign(nn.ModuleDict({"qkv_proj": nn.Linear(8, 24)})).values()
    assert (decision.algorithm, decision.view) == ("muon", Matrix())
    assert decision.why == f"linear layer; by its name {PERHAPS_FUSED}"


class Conv1D(nn.Module):
    """The transformers class by name and attributes, shared by two owners that disagree."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))


class GPT2Attention(nn.Module):
    def __init__(self, c_attn, split_size):
        super().__init__()
        self.c_attn, self.split_size = c_attn, split_size


@pytest.mark.parametrize("order", list(itertools.permutations([4, 6])))
def test_owners_that_disagree_leave_a_parameter_undecided(order):
    shared = Conv1D(5, 12)
    with pytest.raises(ValueError, match="its uses disagree"):
        assign(nn.ModuleList(GPT2Attention(shared, size) for size in order))


def test_the_registry_is_immutable_and_every_entry_is_exercised_here():
    assert isinstance(KNOWN_VIEWS, tuple)
    hash(KNOWN_VIEWS)
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_registry*.py"))
    missing = [name for entry in KNOWN_VIEWS for name in entry.classes if f'"{name}"' not in tests]
    assert missing == []
