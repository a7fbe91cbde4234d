"""Triton where it is installed, so that a kernel and its plain twin can stand in one file that imports everywhere.

    from quintic.kernels.jit import jit, tl, triton

Without Triton the kernels are defined, but cannot be called; `dispatch.py` never chooses them then.
"""

import importlib
from typing import Any

from quintic.kernels.dispatch import triton_is_installed

__all__ = ["jit", "tl", "triton"]


class _Missing:
    """Stands for Triton's modules in annotations and decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError("this kernel needs Triton: pip install triton")


def _unchanged(function: Any) -> Any:
    return function


_INSTALLED = triton_is_installed()

triton: Any = importlib.import_module("triton") if _INSTALLED else _Missing()
tl: Any = importlib.import_module("triton.language") if _INSTALLED else _Missing()
jit: Any = triton.jit if _INSTALLED else _unchanged
