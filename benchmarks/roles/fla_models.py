"""The language models of flash-linear-attention, whose Triton kernels no CPU runs: the pass takes launches for what they are."""

import contextlib
import functools
import importlib
import inspect
from typing import Any

import torch
from torch import nn

from benchmarks.roles.compare import Attempt
from benchmarks.roles.transformers_models import smaller, without_values

DIVISOR = 8


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
        Attempt(what, functools.partial(_build, kind, divisor), _tokens, _run, after)
        for what, divisor, after in (("narrow", DIVISOR, ""), ("default widths", 1, "."))
    ]


def _build(kind: Any, divisor: int) -> nn.Module:
    with without_values():
        model: nn.Module = kind(smaller(kind.config_class, divisor))
    return model.eval()


def _tokens(model: nn.Module) -> dict[str, Any]:
    # Some have another kernel for fewer than 64 tokens.
    return {"input_ids": torch.ones(2, 128, dtype=torch.long), "use_cache": False}


def _run(model: nn.Module, example: dict[str, Any]) -> Any:
    with _no_launches():
        return model(**example)


@contextlib.contextmanager
def _no_launches() -> Any:
    """Skip the launches of Triton's kernels."""
    jit, autotuner = (importlib.import_module(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    kinds = [jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics]
    kept = [kind.run for kind in kinds]
    try:
        for kind in kinds:
            kind.run = lambda *args, **kwargs: None
        yield
    finally:
        for kind, run in zip(kinds, kept, strict=True):
            kind.run = run
