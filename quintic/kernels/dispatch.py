"""Chooses the implementation of an operation: Triton on CUDA devices, its twin in plain PyTorch everywhere else.

Every operation with a kernel has a function `obstacle_to_...`: it returns None if Triton can compute the operation, or
the reason why not, worded as a clause of a longer sentence. `decide` combines it with the user's option `kernels`.
`choose_kernels` does so for the optimizer's element-wise passes over a parameter.
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
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def triton_is_interpreted() -> bool:
    """Return whether Triton's interpreter is on, which runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Return whether this machine's processor has instructions for bfloat16 products.

    Without them bfloat16 products run, but slower than float32 products. The answer is False on all systems except
    Linux on x86, and if the environment variable `ONEDNN_MAX_CPU_ISA` keeps PyTorch from using the instructions.
    """
    # oneDNN computes PyTorch's bfloat16 products. Only the values of this variable with one of these names let it use
    # bfloat16 instructions.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not any(name in limit for name in ("ALL", "DEFAULT", "BF16", "FP16", "AMX")):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_kernels(option: KernelsOption, param: Tensor) -> Kernels:
    """Return the implementation of the optimizer's element-wise passes over a parameter.

    Args:
        option: `"auto"` takes Triton if it can compute the passes; `"triton"` raises if it cannot; `"torch"` takes
            plain PyTorch.
        param: the parameter.

    Raises:
        ValueError: `"triton"` cannot be honoured, or the option is unknown.
    """
    return decide(option, param.device, lambda: obstacle_to_kernels(param))[0]


def decide(
    option: KernelsOption, device: torch.device, obstacle: Callable[[], str | None]
) -> tuple[Kernels, str | None]:
    """Return the implementation of an operation, and the reason if `"auto"` on a CUDA device did not take Triton.

    Args:
        option: as for `choose_kernels`.
        device: of the operation's tensors.
        obstacle: returns None if Triton can compute the operation, else the reason as a clause. Called only if Triton
            is a candidate. It should ask `obstacle_to_triton` first.

    Raises:
        ValueError: `"triton"` cannot be honoured, or the option is unknown.
    """
    # On a CPU "auto" never takes Triton, not even its interpreter, which only tests use.
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
    """Return why Triton cannot run on a device, or None; `what` names the tensor in the message."""
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
    # Wrapper subclasses keep their data in inner tensors, which a kernel given the outer one cannot reach. DTensor is
    # exempt: callers pass its local tensor on to the kernels.
    is_wrapper: bool = is_traceable_wrapper_subclass(param)
    if is_wrapper and not hasattr(param, "_local_tensor"):
        return f"a {type(param).__name__} keeps its memory in tensors of its own"
    if not is_dense(param):
        return f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps in memory"
    return None


def is_dense(param: Tensor) -> bool:
    """Return whether the entries fill one stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(param.stride(), param.shape, strict=True)):
        # The stride of a dimension of size 1 is arbitrary: it is never used.
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


# Two tiles of 128. For smaller matrices a product on a Hopper GPU takes less time than its launch, and cuBLAS has
# smaller tiles.
_HOPPER_MIN_SIDE = 256


MAX_SUM = 2048
"""Longest sum in a 16-bit product for which cuBLAS gives a matrix the same bits in every batch.

For few matrices cuBLAS splits longer sums among thread blocks (observed from 4,096 terms on an H200)."""


def fits_copy_engine(m: int, n: int, dtype: torch.dtype) -> bool:
    """Return whether Hopper's kernels can multiply contiguous (m, n) matrices faster than other kernels.

    The copy engine needs rows that start at multiples of 16 bytes. Sides of less than two tiles are not worth it.
    """
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    # 8 entries of 16 bits are 16 bytes. Both sides count: products read the matrix and its transpose.
    return is_16_bit and min(m, n) >= _HOPPER_MIN_SIDE and m % 8 == 0 and n % 8 == 0
