"""Models to plan for: parameters on the meta device, with shapes and the names of `transformers`, without weights.

Some well-known models are described here by their sizes, so that planning them needs no network and no other package.
All other models are made by `transformers` from their configuration.
"""

import difflib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quintic.errors import ConfigError

__all__ = ["KNOWN_MODELS", "Decoder", "Sizes", "is_on_hub", "planned_model"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder with Llama's architecture.

    Args:
        layers: number of layers.
        width: channels of the residual stream.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: channels of a head.
        hidden: hidden channels of the MLP, or of one expert.
        vocab_size: rows of the embedding.
        tied: head and embedding are one parameter.
        qk_norm: queries and keys have norms with weights.
        experts: number of experts in every layer; 0 for a plain MLP.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    hidden: int
    vocab_size: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0


def _llama_3(layers: int, width: int, heads: int, hidden: int) -> Sizes:
    return Sizes(layers=layers, width=width, heads=heads, kv_heads=8, hidden=hidden, vocab_size=128256)


KNOWN_MODELS: dict[str, Sizes | None] = {
    "gpt2": None,
    "llama-3-8b": _llama_3(32, 4096, 32, 14336),
    "llama-3-70b": _llama_3(80, 8192, 64, 28672),
    "qwen3-1.7b": Sizes(
        layers=28, width=2048, heads=16, kv_heads=8, hidden=6144, vocab_size=151936, tied=True, qk_norm=True
    ),
    "qwen3-30b-a3b": Sizes(
        layers=48, width=2048, heads=32, kv_heads=4, hidden=768, vocab_size=151936, qk_norm=True, experts=128
    ),
}
"""Name -> sizes; None for GPT-2, which has another architecture."""


def is_on_hub(name: str) -> bool:
    """Return whether a name means a model on the Hugging Face Hub: `owner/name`, and not a known model or a path."""
    return name not in KNOWN_MODELS and "/" in name and not name.endswith(".json") and not Path(name).exists()


def planned_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model on the meta device.

    Args:
        name: one of `KNOWN_MODELS`; the path of a `config.json` or of its folder; or `owner/name` of a model on the
            Hugging Face Hub, from which only the configuration is downloaded.
        dtype: dtype of the parameters.

    Raises:
        ConfigError: there is no such model, or `transformers` is needed and missing. The message begins with `model=`.
    """
    with torch.device("meta"):
        if name in KNOWN_MODELS:
            sizes = KNOWN_MODELS[name]
            model: nn.Module = _gpt2() if sizes is None else Decoder(sizes)
        else:
            model = _from_configuration(name)
    return model.to(dtype)


def _from_configuration(name: str) -> nn.Module:
    path = Path(name)
    if path.exists():
        _check_file(name, path if path.is_file() else path / "config.json")
    elif not is_on_hub(name):
        nearest = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"model={name}: unknown; {hint}choose {', '.join(KNOWN_MODELS)}, the path of a config.json, or owner/name "
            f"of a model on the Hugging Face Hub"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ConfigError(
            f"model={name}: models other than {', '.join(KNOWN_MODELS)} are read by the package transformers: "
            f"pip install transformers"
        ) from None
    try:
        # Without trust_remote_code, it would ask at the terminal whether to run code that comes with the model.
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model={name}: needs code that comes with the model, which is not run; choose a model that is part of "
                "transformers, or plan the run of a `quintic export`: quintic plan --config runs/NAME/config.json"
            ) from error
        raise ConfigError(f"model={name}: transformers cannot read its configuration: {_first_line(error)}") from error
    # Models that generate no text have no causal head; they can still be planned for.
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError:
        try:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        except ValueError as error:
            raise ConfigError(f"model={name}: transformers cannot build it: {_first_line(error)}") from error
    return model


def _check_file(name: str, path: Path) -> None:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model={name}: {path} cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"model={name}: {path} has no model_type; give the config.json of a transformers model")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _module(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Decoder(nn.Module):
    """The parameters of a decoder, with the names of `transformers`; it has no `forward`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.model = _module(
            embed_tokens=embedding,
            layers=nn.ModuleList(_layer(sizes) for _ in range(sizes.layers)),
            norm=nn.RMSNorm(sizes.width),
        )
        self.lm_head = _linear(sizes.width, sizes.vocab_size)
        if sizes.tied:
            self.lm_head.weight = embedding.weight


def _layer(sizes: Sizes) -> nn.Module:
    width, hidden = sizes.width, sizes.hidden
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = _module(
        q_proj=_linear(width, queries),
        k_proj=_linear(width, keys),
        v_proj=_linear(width, keys),
        o_proj=_linear(queries, width),
    )
    if sizes.qk_norm:
        attention.q_norm, attention.k_norm = nn.RMSNorm(sizes.head_dim), nn.RMSNorm(sizes.head_dim)
    if sizes.experts:
        mlp = _module(gate=_Router(sizes), experts=_Experts(sizes))
    else:
        mlp = _module(
            gate_proj=_linear(width, hidden), up_proj=_linear(width, hidden), down_proj=_linear(hidden, width)
        )
    norms = {name: nn.RMSNorm(width) for name in ("input_layernorm", "post_attention_layernorm")}
    return _module(self_attn=attention, mlp=mlp, **norms)


class _Router(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.width))


class _Experts(nn.Module):
    # Attributes that transformers sets on its stacks of experts, which `param_groups` reads.
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.hidden, sizes.width))
        self.down_proj = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.hidden))


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out); `param_groups` recognises it by the name of its class."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))


class GPT2Attention(nn.Module):
    """Attention with fused queries, keys and values; `param_groups` recognises it by the name of its class."""

    split_size = 768

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * 768, 768), Conv1D(768, 768)


def _gpt2() -> nn.Module:
    blocks = [
        _module(
            ln_1=nn.LayerNorm(768),
            attn=GPT2Attention(),
            ln_2=nn.LayerNorm(768),
            mlp=_module(c_fc=Conv1D(4 * 768, 768), c_proj=Conv1D(768, 4 * 768)),
        )
        for _ in range(12)
    ]
    embeddings = {"wte": nn.Embedding(50257, 768), "wpe": nn.Embedding(1024, 768)}
    transformer = _module(**embeddings, h=nn.ModuleList(blocks), ln_f=nn.LayerNorm(768))
    lm_head = _linear(768, 50257)
    lm_head.weight = embeddings["wte"].weight
    return _module(transformer=transformer, lm_head=lm_head)
