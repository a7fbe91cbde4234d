"""Which implementation of the element-wise passes runs: Triton on CUDA devices, plain PyTorch everywhere else."""

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Kernels", "KernelsOption", "choose_kernels", "triton_is_installed"]

Kernels = Literal["torch", "triton"]
KernelsOption = Literal["auto", "torch", "triton"]

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def triton_is_installed() -> bool:
    """Return whether `import triton` would find something."""
    return importlib.util.find_spec("triton") is not None


def triton_is_interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_kernels(option: KernelsOption, param: Tensor) -> Kernels:
    """Return the implementation for one parameter.

    Args:
        option: `"auto"` takes Triton where it can; `"triton"` insists; `"torch"` is the plain twin.
        param: the parameter.

    Raises:
        ValueError: `"triton"` cannot be honoured, or the option is unknown.
    """
    if option not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels={option!r}: choose 'auto', 'torch' or 'triton'")
    if option == "torch" or (option == "auto" and param.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(param)
    if obstacle is None:
        return "triton"
    if option == "triton":
        raise ValueError(f"kernels='triton': {obstacle}; use kernels='auto'")
    return "torch"


def _obstacle(param: Tensor) -> str | None:
    """Return what keeps Triton from updating a parameter, or None."""
    if param.device.type != "cuda" and not (param.device.type == "cpu" and triton_is_interpreted()):
        return f"the parameter is on {param.device.type!r}, Triton needs a CUDA device"
    if not triton_is_installed():
        return "Triton is not installed"
    if param.dtype not in _TRITON_DTYPES:
        return f"{param.dtype} has no kernel"
    if not _is_dense(param):
        return f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps in memory"
    return None


def _is_dense(param: Tensor) -> bool:
    """Return whether the entries fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
