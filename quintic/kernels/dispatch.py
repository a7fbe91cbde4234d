"""The choice of an operation's implementation: Triton on CUDA devices, plain PyTorch everywhere else.

`choose_kernels` answers for a parameter and the passes of the optimizer. An operation with conditions of its own says
them as an obstacle, a sentence or None, and asks `decide`.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "MAX_SUM",
    "Kernels",
    "KernelsOption",
    "choose_kernels",
    "cpu_multiplies_bfloat16",
    "decide",
    "fits_copy_engine",
    "is_dense",
    "obstacle_to_kernels",
    "obstacle_to_triton",
    "triton_is_installed",
]

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


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Return whether this machine's processor has instructions for bfloat16 products.

    Without them such products run, but slower than float32's. Known of Linux on x86 alone: elsewhere False. Where
    `ONEDNN_MAX_CPU_ISA` keeps PyTorch's products from using them, they count as absent.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not any(name in limit for name in ("ALL", "DEFAULT", "BF16", "FP16", "AMX")):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_kernels(option: KernelsOption, param: Tensor) -> Kernels:
    """Return the implementation for one parameter.

    Args:
        option: `"auto"` takes Triton where it can; `"triton"` insists; `"torch"` is the plain twin.
        param: the parameter.

    Raises:
        ValueError: `"triton"` cannot be honoured, or the option is unknown.
    """
    return decide(option, param.device, lambda: obstacle_to_kernels(param))[0]


def decide(
    option: KernelsOption, device: torch.device, obstacle: Callable[[], str | None]
) -> tuple[Kernels, str | None]:
    """Return the implementation of an operation, and why it is not Triton where `"auto"` would have taken that.

    Args:
        option: as for `choose_kernels`.
        device: of the operation's tensors.
        obstacle: returns the reason why Triton cannot compute this, as a part of a sentence, or None; called where
            Triton comes into question. Begin it with `obstacle_to_triton`.

    Raises:
        ValueError: `"triton"` cannot be honoured, or the option is unknown.
    """
    if option not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels={option!r}: choose 'auto', 'torch' or 'triton'")
    if option == "torch" or (option == "auto" and device.type != "cuda"):
        return "torch", None
    reason = obstacle()
    if reason is None:
        return "triton", None
    if option == "triton":
        raise ValueError(f"kernels='triton': {reason}; use kernels='auto'")
    return "torch", reason


def obstacle_to_triton(device: torch.device, what: str = "the tensor") -> str | None:
    """Return why Triton cannot run on the device of `what`, or None."""
    if device.type != "cuda" and not (device.type == "cpu" and triton_is_interpreted()):
        return f"{what} is on {device.type!r}, Triton needs a CUDA device"
    if not triton_is_installed():
        return "Triton is not installed"
    return None


def obstacle_to_kernels(param: Tensor) -> str | None:
    """Return why Triton cannot update a parameter, or None."""
    obstacle = obstacle_to_triton(param.device, "the parameter")
    if obstacle is not None:
        return obstacle
    if param.dtype not in _TRITON_DTYPES:
        return f"{param.dtype} has no kernel"
    # A DTensor is none of these: callers have its local tensor, and what that wraps counts.
    is_wrapper: bool = is_traceable_wrapper_subclass(param)
    if is_wrapper and not hasattr(param, "_local_tensor"):
        return f"a {type(param).__name__} keeps its memory in tensors of its own"
    if not is_dense(param):
        return f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps in memory"
    return None


def is_dense(param: Tensor) -> bool:
    """Return whether the entries fill their memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


# Below this side a product on a Hopper GPU is bound by launching it, and cuBLAS has smaller tiles.
_HOPPER_MIN_SIDE = 256


MAX_SUM = 2048
"""Terms of the sums in a 16-bit product up to which cuBLAS computes a matrix in the same way in every batch.

It splits longer sums among blocks where there are few matrices (seen from 4,096 terms on an H200)."""


def fits_copy_engine(m: int, n: int, dtype: torch.dtype) -> bool:
    """Return whether Hopper's kernels take products with contiguous (m, n) matrices, and pay for them.

    The copy engine wants rows that start at multiples of 16 bytes; less than two tiles are left to other kernels.
    """
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return is_16_bit and min(m, n) >= _HOPPER_MIN_SIDE and m % 8 == 0 and n % 8 == 0
