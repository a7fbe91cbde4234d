"""FlashAttention over documents that lie one after the other, from three packages behind one call.

- `"varlen"`: `torch.nn.attention.varlen`, FlashAttention-2, comes with PyTorch.
- `"fa3"`: FlashAttention-3, for Hopper; its module is `flash_attn_interface`.
- `"fa4"`: FlashAttention-4, written in CuTe for Hopper and later; its module is `flash_attn.cute`. It compiles its
  kernels at their first call. `torch.compile` cannot look into it: each call is a break of the graph.

The packages are imported where they are first asked for. Shape suffixes: N positions of all rows, H query heads, G
key/value heads, D head dimension.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

__all__ = ["FlashName", "attend", "obstacle_to_flash"]

FlashName = Literal["varlen", "fa3", "fa4"]


@dataclass(frozen=True, slots=True)
class _Package:
    """The package of an implementation, and its requirements."""

    module: str
    function: str
    install: str
    generations: tuple[int, ...]
    """Major compute capabilities with kernels for both passes."""


_ARGUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "window_size", "deterministic"}

_PACKAGES: dict[FlashName, _Package] = {
    "varlen": _Package("torch.nn.attention.varlen", "varlen_attn", "a newer PyTorch", (8, 9, 10, 11, 12)),
    "fa3": _Package(
        "flash_attn_interface",
        "flash_attn_varlen_func",
        "flash_attn_3, from the folder hopper of https://github.com/Dao-AILab/flash-attention",
        (9,),
    ),
    "fa4": _Package(
        "flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4 (pip install flash-attn-4)", (9, 10, 11, 12)
    ),
}


def obstacle_to_flash(name: FlashName, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why an implementation cannot run, as the end of a sentence that begins with its name, or None."""
    package = _PACKAGES[name]
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        found = f"{device.type} and {str(dtype).removeprefix('torch.')}"
        return f"needs a CUDA device and bfloat16 or float16; this run has {found}"
    obstacle = _obstacle_to_import(package)
    if obstacle is not None or name == "varlen":
        return obstacle
    major, minor = torch.cuda.get_device_capability(device)
    if major not in package.generations:
        wanted = " or ".join(f"{generation}.x" for generation in package.generations)
        return f"needs a device of compute capability {wanted}; this one has {major}.{minor}"
    return None


def _obstacle_to_import(package: _Package) -> str | None:
    try:
        if importlib.util.find_spec(package.module) is None:
            return f"needs a package that is not installed: {package.install}"
        function = getattr(importlib.import_module(package.module), package.function)
    except ModuleNotFoundError as error:
        # The package that holds the module, or one that it needs.
        missing = error.name or package.module
        if package.module == missing or package.module.startswith(f"{missing}."):
            return f"needs a package that is not installed: {package.install}"
        return f"needs {package.install}: importing it failed with {type(error).__name__}: {error}"
    except Exception as error:  # whatever a build for another version of PyTorch or CUDA raises
        return f"needs {package.install}: importing it failed with {type(error).__name__}: {error}"
    if package.function == "varlen_attn":
        return None
    lacking = sorted(_ARGUMENTS - inspect.signature(function).parameters.keys())
    if lacking:
        return f"needs a newer {package.install}: {package.function} takes no {lacking[0]}"
    return None


def attend(
    name: FlashName, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, *, longest: int, window: int
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, causal, within documents and window.

    Args:
        name: an implementation to which `obstacle_to_flash` finds none.
        q_NHD: (N, H, D) bfloat16 or float16 queries.
        k_NGD: (N, G, D) keys, H a multiple of G.
        v_NGD: (N, G, D) values.
        starts: (num_documents + 1,) int32 cumulative offsets; documents may be empty.
        longest: at least the positions of the longest document.
        window: positions a query sees, itself included; at least `longest` for all of them.

    Returns:
        (N, H, D) in the dtype of the queries.
    """
    before = None if window >= longest else window - 1  # positions before its own that a query sees
    return _ATTEND[name](q_NHD, k_NGD, v_NGD, starts, longest, before)


def _attend_varlen(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    groups = q_NHD.shape[1] // k_NGD.shape[1]
    if groups > 1 and _varlen_takes_groups():
        options["enable_gqa"] = True
    elif groups > 1:
        k_NGD, v_NGD = (kv.repeat_interleave(groups, dim=1) for kv in (k_NGD, v_NGD))
    window = (-1 if before is None else before, 0)
    out = varlen_attn(q_NHD, k_NGD, v_NGD, starts, starts, longest, longest, window_size=window, **options)
    return cast(Tensor, out)


def _attend_fa3(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    window = (-1 if before is None else before, 0)
    return _call(flash_attn_varlen_func, q_NHD, k_NGD, v_NGD, starts, longest, window)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_fa4(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    return _call(flash_attn_varlen_func, q_NHD, k_NGD, v_NGD, starts, longest, (before, 0))


def _call(
    function: Callable[..., Any],
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    starts: Tensor,
    longest: int,
    window: tuple[int | None, int],
) -> Tensor:
    # By name: the two packages, and versions of one, order these differently.
    out = function(
        q_NHD,
        k_NGD,
        v_NGD,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        window_size=window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    # FlashAttention-4, and early builds of 3, return the logarithms of the sums of exponentials, too.
    attended: Tensor = out[0] if isinstance(out, tuple) else out
    return attended


_ATTEND: dict[FlashName, Callable[..., Tensor]] = {
    "varlen": _attend_varlen,
    "fa3": _attend_fa3,
    "fa4": _attend_fa4,
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _varlen_takes_groups() -> bool:
    """Return whether this PyTorch's kernel takes fewer key than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
