"""Model families of `transformers`, small and full size, and what every one of their parameters should be.

The expectations are written from the models' papers and code, pattern by pattern; `test_registry.py` checks the fused
ones against the rows that the forward passes really use.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from quintic import Experts, Matrix, Split

MUON = ("muon", Matrix())
ADAMW = ("adamw", Matrix())


def muon(view):
    return ("muon", view)


class Family(NamedTuple):
    model: str
    """Class names in `transformers`."""
    config: str
    small: dict[str, Any]
    full: dict[str, Any]
    expect: Callable[[Any], dict[str, tuple]]
    """From the configuration to {pattern: treatment}; the first matching pattern counts."""


def transformers_class(name):
    """A class of `transformers`; skips the test, and says why, where the installed version lacks it."""
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip(f"parameter names are those of transformers 5, this is {transformers.__version__}")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def make_config(name, options):
    cls = transformers_class(name)
    parts = {key: make_config(*value) if isinstance(value, tuple) else value for key, value in options.items()}
    return cls(**parts)


@functools.cache
def build(family, size):
    """The (configuration, model) of a family on the meta device; not to be changed."""
    member = FAMILIES[family]
    config = make_config(member.config, getattr(member, size))
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # some configurations announce deprecations of their own
        return config, transformers_class(member.model)(config)


def llama_like(_config):
    return {
        "model.embed_tokens.weight": ADAMW,
        "lm_head.weight": ADAMW,
        "*.self_attn.[qkvo]_proj.weight": MUON,
        "*.mlp.*_proj.weight": MUON,
        "*norm.weight": ADAMW,
        "*.bias": ADAMW,
    }


def stacked_experts(features):
    return {
        "*.mlp.experts.gate_up_proj": muon(Split((features, features))),
        "*.mlp.experts.down_proj": muon(Experts()),
        "*.mlp.gate.weight": ADAMW,
    }


def qwen3_moe(config):
    return stacked_experts(config.moe_intermediate_size) | llama_like(config)


def mixtral(config):
    return stacked_experts(config.intermediate_size) | llama_like(config)


def deepseek(config):
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    return {
        "*.self_attn.kv_a_proj_with_mqa.weight": muon(Split((config.kv_lora_rank, rope))),
        "*.self_attn.kv_b_proj.weight": muon(Split((nope, config.v_head_dim), groups=config.num_attention_heads)),
        "*.self_attn.q_[ab]_proj.weight": MUON,
        "*.mlp.shared_experts.*_proj.weight": MUON,
        **qwen3_moe(config),
    }


def deepseek_without_query_rank(config):
    return {k: v for k, v in deepseek(config).items() if "q_[ab]_proj" not in k}


def gpt_oss(config):
    return {
        "*.mlp.experts.gate_up_proj": muon(Split((1, 1), transposed=True, groups=config.intermediate_size)),
        "*.mlp.experts.down_proj": muon(Experts(transposed=True)),
        "*.mlp.experts.*_bias": ADAMW,
        "*.mlp.router.*": ADAMW,
        "*.self_attn.sinks": ADAMW,
        **{k: v for k, v in llama_like(config).items() if ".mlp." not in k},
    }


def llama4(config):
    features = config.intermediate_size
    return {
        "*.feed_forward.experts.gate_up_proj": muon(Split((features, features), transposed=True)),
        "*.feed_forward.experts.down_proj": muon(Experts(transposed=True)),
        "*.feed_forward.router.weight": ADAMW,
        "*.feed_forward.*_proj.weight": MUON,
        **{k: v for k, v in llama_like(config).items() if ".mlp." not in k and "bias" not in k},
    }


def qwen3_next(config):
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * (values // keys)
    return {
        "*.self_attn.q_proj.weight": muon(Split((config.head_dim, config.head_dim), groups=config.num_attention_heads)),
        "*.linear_attn.in_proj_qkvz.weight": muon(Split((key, key, value, value), groups=keys)),
        "*.linear_attn.in_proj_ba.weight": ADAMW,
        "*.linear_attn.conv1d.weight": ADAMW,
        "*.linear_attn.A_log": ADAMW,
        "*.linear_attn.dt_bias": ADAMW,
        "*.linear_attn.out_proj.weight": MUON,
        "*.mlp.shared_expert_gate.weight": ADAMW,
        **stacked_experts(config.moe_intermediate_size),
        **{k: v for k, v in llama_like(config).items() if "bias" not in k},
    }


def gpt2(config):
    d = config.n_embd
    return {
        "transformer.wte.weight": ADAMW,
        "transformer.wpe.weight": ADAMW,
        "*.attn.c_attn.weight": muon(Split((d, d, d), transposed=True)),
        "*.c_proj.weight": muon(Matrix(transposed=True)),
        "*.c_fc.weight": muon(Matrix(transposed=True)),
        "*.ln_*": ADAMW,
        "*.bias": ADAMW,
    }


def gpt2_with_cross_attention(config):
    d = config.n_embd
    return {
        "*.crossattention.c_attn.weight": muon(Split((d, d), transposed=True)),
        "*.crossattention.q_attn.weight": muon(Matrix(transposed=True)),
        **gpt2(config),
    }


def per_head(config, heads, embeddings):
    d = config.hidden_size // heads
    return {
        **dict.fromkeys(embeddings, ADAMW),
        "*.query_key_value.weight": muon(Split((d, d, d), groups=heads)),
        "*.dense*.weight": MUON,
        "*norm*": ADAMW,
        "*.ln_*": ADAMW,
        "*.bias": ADAMW,
    }


def gpt_neox(config):
    expected = per_head(config, config.num_attention_heads, ["gpt_neox.embed_in.weight", "lm_head.weight"])
    return {k: v for k, v in expected.items() if k != "*.ln_*"}


def bloom(config):
    expected = per_head(config, config.n_head, ["transformer.word_embeddings.weight", "*word_embeddings_layernorm*"])
    return {k: v for k, v in expected.items() if k != "*.ln_*"} | {"transformer.ln_f.*": ADAMW}


def falcon(config):
    d = config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        shared = config.num_attention_heads // config.num_kv_heads
        view = Split((shared * d, d, d), groups=config.num_kv_heads)
    elif config.multi_query:
        view = Split((config.hidden_size, d, d))
    else:
        view = Split((d, d, d), groups=config.num_attention_heads)
    return {
        "transformer.word_embeddings.weight": ADAMW,
        "*.query_key_value.weight": muon(view),
        "*.dense*.weight": MUON,
        "*.ln_*": ADAMW,
        "*norm*": ADAMW,
    }


def phi3(config):
    d = config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * d
    return {
        "model.embed_tokens.weight": ADAMW,
        "lm_head.weight": ADAMW,
        "*.self_attn.qkv_proj.weight": muon(Split((config.hidden_size, keys, keys))),
        "*.self_attn.o_proj.weight": MUON,
        "*.mlp.gate_up_proj.weight": muon(Split((config.intermediate_size,) * 2)),
        "*.mlp.down_proj.weight": MUON,
        "*norm.weight": ADAMW,
    }


def vit(_config):
    return {
        "vit.embeddings.*": ADAMW,
        "vit.layers.*.attention.?_proj.weight": MUON,
        "vit.layers.*.mlp.fc?.weight": MUON,
        "*layernorm*": ADAMW,
        "classifier.*": ADAMW,
        "*.bias": ADAMW,
    }


def whisper(_config):
    return {
        "model.*coder.embed_*.weight": ADAMW,
        "model.encoder.conv?.weight": ADAMW,
        "*_attn.?_proj.weight": MUON,
        "*_attn.out_proj.weight": MUON,
        "*.fc?.weight": MUON,
        "*layer_norm*": ADAMW,
        "*.bias": ADAMW,
    }


def gemma3(config):
    vision = "model.vision_tower."
    width = config.vision_config.hidden_size
    return {
        vision + "embeddings.*": ADAMW,
        vision + "encoder.layers.*.self_attn.*_proj.weight": MUON,
        vision + "encoder.layers.*.mlp.fc?.weight": MUON,
        vision + "head.probe": ADAMW,
        vision + "head.attention.in_proj_weight": muon(Split((width,) * 3)),
        vision + "head.attention.out_proj.weight": MUON,
        vision + "head.mlp.fc?.weight": MUON,
        vision + "*bias": ADAMW,
        vision + "*norm*.weight": ADAMW,
        "model.multi_modal_projector.mm_input_projection_weight": muon(Matrix(transposed=True)),
        "model.language_model.embed_tokens.weight": ADAMW,
        **{k: v for k, v in llama_like(config).items() if k.startswith("*") and k != "*.bias"},
    }


def t5(_config):
    return {
        "shared.weight": ADAMW,
        "*.relative_attention_bias.weight": ADAMW,
        "*Attention.[qkvo].weight": MUON,
        "*.DenseReluDense.w?.weight": MUON,
        "*norm.weight": ADAMW,
    }


def bert(_config):
    return {
        "bert.embeddings.*": ADAMW,
        "bert.encoder.layer.*.attention.self.*.weight": MUON,
        "bert.encoder.layer.*.dense.weight": MUON,
        "cls.predictions.transform.dense.weight": MUON,
        "*LayerNorm*": ADAMW,
        "*bias": ADAMW,
    }


def opt(_config):
    return {
        "model.decoder.embed_*.weight": ADAMW,
        "*.self_attn.*_proj.weight": MUON,
        "*.fc?.weight": MUON,
        "*layer_norm*": ADAMW,
        "*.bias": ADAMW,
    }


def without(expect, *patterns):
    return lambda config: {k: v for k, v in expect(config).items() if k not in patterns}


TINY = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_MOE = {**TINY, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
TINY_MLA = {
    **{key: value for key, value in TINY.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
TINY_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_235B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GEMMA3_27B = {
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
}
FALCON_40B = {
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
TINY_FALCON = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
TINY_GPT2 = {"vocab_size": 80, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
NEXT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}

no_head = without(llama_like, "lm_head.weight", "*.bias")
untied = without(llama_like, "*.bias")

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", TINY, LLAMA_70B, untied),
    "llama, tied": Family(
        "LlamaForCausalLM", "LlamaConfig", {**TINY, "tie_word_embeddings": True}, {"tie_word_embeddings": True}, no_head
    ),
    "llama, one layer as wide as the vocabulary": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TINY, "num_hidden_layers": 1, "vocab_size": 48},
        {**LLAMA_70B, "num_hidden_layers": 1, "vocab_size": 28672},
        untied,
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", TINY, QWEN3_32B, untied),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        TINY_MOE,
        QWEN3_235B,
        without(qwen3_moe, "*.mlp.*_proj.weight", "*.bias"),
    ),
    "deepseek v3": Family(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", TINY_MLA, {}, without(deepseek, "*.bias", "*.[qkvo]_proj.weight")
    ),
    "deepseek v3 without query compression": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TINY_MLA, "q_lora_rank": None},
        {"q_lora_rank": None, "num_hidden_layers": 4},
        without(deepseek_without_query_rank, "*.bias"),
    ),
    "gemma3 text": Family("Gemma3ForCausalLM", "Gemma3TextConfig", TINY, GEMMA3_27B, no_head),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": ("Gemma3TextConfig", TINY),
            "vision_config": ("SiglipVisionConfig", TINY_VISION),
            "mm_tokens_per_image": 4,
        },
        {
            "text_config": ("Gemma3TextConfig", GEMMA3_27B),
            "vision_config": (
                "SiglipVisionConfig",
                {
                    "hidden_size": 1152,
                    "intermediate_size": 4304,
                    "num_hidden_layers": 27,
                    "num_attention_heads": 16,
                    "image_size": 896,
                    "patch_size": 14,
                },
            ),
        },
        gemma3,
    ),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", TINY_GPT2, GPT2_XL, gpt2),
    "gpt2 with cross-attention": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**TINY_GPT2, "add_cross_attention": True},
        {**GPT2_XL, "add_cross_attention": True},
        gpt2_with_cross_attention,
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", TINY, {}, untied),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TINY, "num_local_experts": 4},
        {},
        without(mixtral, "*.mlp.*_proj.weight", "*.bias"),
    ),
    "gpt neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")},
        {},
        gpt_neox,
    ),
    "phi3": Family(
        "Phi3ForCausalLM", "Phi3Config", {k: v for k, v in TINY.items() if k != "head_dim"}, {"pad_token_id": 0}, phi3
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        TINY_VISION,
        {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16},
        vit,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 80,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
        whisper,
    ),
    "gpt oss": Family("GptOssForCausalLM", "GptOssConfig", {**TINY, "num_local_experts": 4}, {}, gpt_oss),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**TINY, "num_local_experts": 4, "intermediate_size_mlp": 40},
        {"num_hidden_layers": 8},
        llama4,
    ),
    "qwen3 next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**TINY_MOE, **NEXT, "num_hidden_layers": 4, "shared_expert_intermediate_size": 24},
        {},
        without(qwen3_next, "*.bias"),
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 80, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        {"vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112},
        bloom,
    ),
    "falcon 7b": Family("FalconForCausalLM", "FalconConfig", TINY_FALCON, {}, without(falcon, "*.ln_attn*")),
    "falcon 40b": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**TINY_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
        FALCON_40B,
        without(falcon, "*norm*"),
    ),
    "falcon 1b": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**TINY_FALCON, "multi_query": False},
        {"hidden_size": 2048, "num_attention_heads": 32, "multi_query": False, "num_hidden_layers": 24},
        falcon,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 80, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        {},
        t5,
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")},
        {},
        bert,
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 80,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,  # as many rows as the layers have outputs
        },
        {},
        opt,
    ),
}
