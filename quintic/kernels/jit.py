"""`jit`, `tl` and `triton`, importable also without Triton: a kernel and its plain twin can then be in one file.

    from quintic.kernels.jit import jit, tl, triton

Without Triton the kernels are defined but cannot be launched, and `dispatch.py` never chooses them.
"""

import importlib
from typing import Any

from quintic.kernels.dispatch import triton_is_installed

__all__ = ["jit", "tl", "triton"]


class _Missing:
    """Stand-in for Triton's modules; its attributes, such as `tl.constexpr`, may appear in annotations."""

    def __getattr__(self, name: str) -> Any:
        # Python and its tools look for special methods and expect AttributeError if there is none.
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
