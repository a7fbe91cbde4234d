"""What differs between versions of PyTorch and Triton; no other file asks which one is installed, or what it has.

The optimizer runs with PyTorch 2.8 and Triton 3.4 or newer, the training harness with PyTorch 2.11 or newer. PyTorch is
imported when an answer needs it: the command line learns its version without waiting for it.
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
"""The oldest PyTorch of the optimizer and of everything else; pyproject.toml tells pip the same."""


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: "2.13.0+cpu" is (2, 13); (0, 0) where there are none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_version() -> str | None:
    """Return the version of the PyTorch that is, or would be, imported; None where there is none."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------- products


class Float32Products(Protocol):
    """The setting of how float32 matrices are multiplied: "ieee" in full precision, "none" as another setting says."""

    fp32_precision: str


class OneSetting:
    """The one setting for all devices of PyTorch before 2.9: under other names, and with none that it inherits from."""

    @property
    def fp32_precision(self) -> str:
        """Return "ieee", or what PyTorch calls its other precisions."""
        import torch

        name = torch.get_float32_matmul_precision()
        return "ieee" if name == "highest" else name

    @fp32_precision.setter
    def fp32_precision(self, name: str) -> None:
        import torch

        torch.set_float32_matmul_precision("highest" if name in ("ieee", "none") else name)


def float32_products(device_type: str) -> Float32Products:
    """Return the setting of float32 products on "cpu" or "cuda"."""
    from torch import backends

    if not hasattr(backends.mkldnn, "matmul"):  # before 2.9
        return OneSetting()
    switches: Float32Products = backends.cuda.matmul if device_type == "cuda" else backends.mkldnn.matmul
    return switches


def can_forbid_splits() -> bool:
    """Return whether `torch.backends.cuda.matmul` has settings that forbid cuBLAS to split the sum of a product."""
    from torch import backends

    return hasattr(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k")


# ---------- attention


def flex_returns_maxima() -> bool:
    """Return whether FlexAttention can return the largest scores of its rows: from 2.9."""
    from torch.nn.attention import flex_attention

    return hasattr(flex_attention, "AuxRequest")


def varlen_takes_groups() -> bool:
    """Return whether PyTorch's attention within documents takes fewer key than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# ---------- ranks


def all_gather_single() -> Callable[..., Any]:
    """Return the collective that gathers equal pieces into one tensor: renamed in 2.13."""
    import torch.distributed as dist

    renamed: Callable[..., Any] | None = getattr(dist, "all_gather_single", None)
    return renamed or dist.all_gather_into_tensor


STRIDED_NEEDS = "2.11"
"""The first PyTorch of those tried that moves DTensors correctly to and from `_StridedShard`, which FSDP2 makes beside
tensor parallelism."""


def moves_strided_shards() -> bool:
    """Return whether `DTensor.redistribute` is correct with `_StridedShard`: that of 2.9 misplaces rows."""
    return release(torch_version() or "") >= release(STRIDED_NEEDS)


# ---------- Triton


GLUON_NEEDS = ("3.6", "3.9")
"""The first and the last Triton that the kernels in Gluon were tried with: Gluon is young and its names move."""


@functools.cache
def gluon_is_known() -> bool:
    """Return whether the Triton that is installed is one for the kernels in Gluon."""
    first, last = GLUON_NEEDS
    return release(first) <= release(importlib.import_module("triton").__version__) <= release(last)


def gluon_names() -> tuple[Any, Any, Any, Any]:
    """Return four functions of Gluon by their newest names: load and store a block, view it otherwise, wait for all."""
    gl = importlib.import_module("triton.experimental.gluon.language")
    tma = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper").tma
    return (
        getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,
        getattr(tma, "async_store", None) or tma.async_copy_shared_to_global,
        getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret,
        getattr(gl, "barrier", None) or gl.thread_barrier,
    )
