"""Differences between versions of PyTorch and Triton. No other file checks versions or whether a name exists.

The optimizer runs with PyTorch 2.8 and Triton 3.4 or newer, the training harness with PyTorch 2.11 or newer. Functions
import PyTorch only if they need it, so that the command line can check its version without importing it.
"""

import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Protocol

__all__ = [
    "GLUON_NEEDS",
    "HARNESS_NEEDS",
    "OPTIMIZER_NEEDS",
    "STRIDED_NEEDS",
    "Float32Products",
    "OneSetting",
    "all_gather_single",
    "can_forbid_splits",
    "flex_returns_maxima",
    "float32_products",
    "gluon_is_known",
    "gluon_names",
    "moves_strided_shards",
    "release",
    "torch_version",
    "varlen_takes_groups",
]

OPTIMIZER_NEEDS, HARNESS_NEEDS = "2.8", "2.11"
"""The oldest PyTorch for the optimizer and for all else; pyproject.toml has the same versions."""


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 13) for "2.13.0+cpu"; (0, 0) if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_version() -> str | None:
    """Return the version of PyTorch without importing it; None if it is not installed."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------- products


class Float32Products(Protocol):
    """PyTorch's setting for products of float32 matrices: "ieee" is full precision, "none" inherits a wider setting."""

    fp32_precision: str


class OneSetting:
    """The setting of PyTorch before 2.9, one for all devices, with the interface of `Float32Products`."""

    @property
    def fp32_precision(self) -> str:
        """Return "ieee" for full precision, else PyTorch's name of the precision."""
        import torch

        name = torch.get_float32_matmul_precision()
        return "ieee" if name == "highest" else name

    @fp32_precision.setter
    def fp32_precision(self, name: str) -> None:
        import torch

        torch.set_float32_matmul_precision("highest" if name in ("ieee", "none") else name)


def float32_products(device_type: str) -> Float32Products:
    """Return the setting for float32 products on "cpu" or "cuda"."""
    from torch import backends

    if not hasattr(backends.mkldnn, "matmul"):  # before 2.9
        return OneSetting()
    switches: Float32Products = backends.cuda.matmul if device_type == "cuda" else backends.mkldnn.matmul
    return switches


def can_forbid_splits() -> bool:
    """Return whether `torch.backends.cuda.matmul` can forbid cuBLAS to split the sums of a product (split-K)."""
    from torch import backends

    return hasattr(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k")


# ---------- attention


def flex_returns_maxima() -> bool:
    """Return whether FlexAttention can return the largest score of each row (2.9 or newer)."""
    from torch.nn.attention import flex_attention

    return hasattr(flex_attention, "AuxRequest")


def varlen_takes_groups() -> bool:
    """Return whether PyTorch's variable-length attention accepts fewer key than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# ---------- ranks


def all_gather_single() -> Callable[..., Any]:
    """Return the collective that gathers tensors of equal size into one tensor; it was renamed in 2.13."""
    import torch.distributed as dist

    renamed: Callable[..., Any] | None = getattr(dist, "all_gather_single", None)
    return renamed or dist.all_gather_into_tensor


STRIDED_NEEDS = "2.11"
"""The first tested PyTorch that redistributes DTensors correctly to and from `_StridedShard`, the placement of FSDP2
combined with tensor parallelism."""


def moves_strided_shards() -> bool:
    """Return whether `DTensor.redistribute` is correct with `_StridedShard`; in 2.9 it misplaces rows."""
    return release(torch_version() or "") >= release(STRIDED_NEEDS)


# ---------- Triton


GLUON_NEEDS = ("3.6", "3.9")
"""The first and the last Triton that the Gluon kernels were tested with; Gluon's names still change."""


@functools.cache
def gluon_is_known() -> bool:
    """Return whether the installed Triton can run the Gluon kernels."""
    first, last = GLUON_NEEDS
    return release(first) <= release(importlib.import_module("triton").__version__) <= release(last)


def gluon_names() -> tuple[Any, Any, Any, Any]:
    """Return four functions of Gluon, under their names in any version: TMA load, TMA store, reinterpret, barrier."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    tma = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper").tma
    return (
        getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,
        getattr(tma, "async_store", None) or tma.async_copy_shared_to_global,
        getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret,
        getattr(gl, "barrier", None) or gl.thread_barrier,
    )
