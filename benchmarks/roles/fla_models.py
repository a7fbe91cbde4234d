"""The language models of flash-linear-attention, in bfloat16, which its kernels ask for."""

import functools
import importlib
import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.roles.compare import Attempt
from benchmarks.roles.transformers_models import WithoutValues, smaller

DIVISOR = 8
LENGTH = 72


def families() -> dict[str, str]:
    """Return {class: model}."""
    models = importlib.import_module("fla.models")
    found = {}
    for name in sorted(dir(models)):
        kind = getattr(models, name)
        if inspect.isclass(kind) and name.endswith(("ForCausalLM", "Model")) and issubclass(kind, nn.Module):
            found[name] = kind.__module__.split(".")[-2]
    return found


def attempts(name: str) -> list[Attempt]:
    """Return ways to build and call a class: small, or with default widths."""
    kind = getattr(importlib.import_module("fla.models"), name)
    return [
        Attempt(what, functools.partial(_build, kind, divisor), _tokens, after=after)
        for what, divisor, after in (("narrow", DIVISOR, ""), ("default widths", 1, "."))
    ]


def _build(kind: Any, divisor: int) -> nn.Module:
    for module in list(sys.modules.values()):
        if module.__name__.startswith("fla.layers") and getattr(module, "flash_attn_func", _attend) is None:
            module.flash_attn_func = _attend
    with WithoutValues():
        model: nn.Module = kind(smaller(kind.config_class, divisor))
    return model.eval().bfloat16()


def _tokens(model: nn.Module) -> dict[str, Any]:
    # Some have another kernel for few tokens.
    return {"input_ids": torch.ones(2, LENGTH, dtype=torch.long), "use_cache": False}


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Stand for FlashAttention, which needs a GPU to be built for: tensors of (batch, length, heads, size)."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
