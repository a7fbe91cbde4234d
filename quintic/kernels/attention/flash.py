"""FlashAttention over documents that lie one after the other: one function over three packages.

- `"varlen"`: `torch.nn.attention.varlen`, FlashAttention-2, comes with PyTorch.
- `"fa3"`: FlashAttention-3, for Hopper; its module is `flash_attn_interface`.
- `"fa4"`: FlashAttention-4, written in CuTe for Hopper and later; its module is `flash_attn.cute`. It compiles its
  kernels when they are first called, which `torch.compile` cannot trace, so both passes are custom operators here.

The packages are imported when they are first needed. Shape suffixes: N positions of all rows, H query heads, G
key/value heads, D head dimension.
"""

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor

from quintic.versions import varlen_takes_groups

__all__ = ["FlashName", "attend", "obstacle_to_flash"]

FlashName = Literal["varlen", "fa3", "fa4"]


# Arguments that are passed by name, since packages and versions order them differently.
_SHARED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "deterministic"}


@dataclass(frozen=True, slots=True)
class _Package:
    """The package of an implementation, and its requirements."""

    module: str
    functions: dict[str, set[str]]
    """Function of the module (or of a submodule) -> arguments that it must accept by name."""
    install: str
    """Name of the package in messages."""
    generations: tuple[int, ...]
    """Major compute capabilities for which the package has kernels of both passes."""


_PACKAGES: dict[FlashName, _Package] = {
    "varlen": _Package(
        "torch.nn.attention.varlen", {"varlen_attn": {"window_size"}}, "PyTorch, 2.11 or later", (8, 9, 10, 11, 12)
    ),
    "fa3": _Package(
        "flash_attn_interface",
        {"flash_attn_varlen_func": _SHARED | {"window_size"}},
        "flash_attn_3, from the folder hopper of https://github.com/Dao-AILab/flash-attention",
        (9,),
    ),
    "fa4": _Package(
        "flash_attn.cute",
        {
            "flash_attn_varlen_func": _SHARED | {"window_size", "return_lse"},
            "interface._flash_attn_bwd": _SHARED | {"window_size_left", "window_size_right"},
        },
        "flash-attn-4 (pip install flash-attn-4)",
        (9, 10, 11, 12),
    ),
}


def obstacle_to_flash(name: FlashName, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why an implementation cannot run, as a sentence without its subject, the name; None if it can."""
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
        module = importlib.import_module(package.module)
        functions = {name: attrgetter(name)(module) for name in package.functions}
    except ModuleNotFoundError as error:
        # The missing module may be the package itself, or one of its dependencies.
        missing = error.name or package.module
        if package.module == missing or package.module.startswith(f"{missing}."):
            return f"needs a package that is not installed: {package.install}"
        return f"needs {package.install}: importing it failed with {type(error).__name__}: {error}"
    # A package built for another version of PyTorch or CUDA may raise any exception.
    except Exception as error:
        return f"needs {package.install}: importing it failed with {type(error).__name__}: {error}"
    for name, function in functions.items():
        lacking = sorted(package.functions[name] - inspect.signature(function).parameters.keys())
        if lacking:
            return f"needs a newer {package.install}: {name} takes no {lacking[0]}"
    return None


def attend(
    name: FlashName, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, *, longest: int, window: int
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, causal, within documents and window.

    Args:
        name: an implementation for which `obstacle_to_flash` returned None.
        q_NHD: (N, H, D) bfloat16 or float16 queries.
        k_NGD: (N, G, D) keys, H a multiple of G.
        v_NGD: (N, G, D) values.
        starts: (num_documents + 1,) int32 cumulative offsets; documents may be empty.
        longest: upper bound of the longest document's length.
        window: number of positions that a query sees, its own included; `longest` or more for no limit.

    Returns:
        (N, H, D) in the dtype of the queries.
    """
    if name == "varlen":
        return _attend_varlen(q_NHD, k_NGD, v_NGD, starts, longest, window)
    # Number of earlier positions that a query sees; None for all.
    before = None if window >= longest else window - 1
    return (_attend_fa3 if name == "fa3" else _attend_fa4)(q_NHD, k_NGD, v_NGD, starts, longest, before)


def _attend_varlen(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    groups = q_NHD.shape[1] // k_NGD.shape[1]
    if groups > 1 and _varlen_takes_groups():
        options["enable_gqa"] = True
    elif groups > 1:
        k_NGD, v_NGD = (kv.repeat_interleave(groups, dim=1) for kv in (k_NGD, v_NGD))
    # Passed even if it hides nothing: under torch.compile with a symbolic window, a comparison with `longest` would
    # compile the code once more.
    sides = (window - 1, 0)
    out = varlen_attn(q_NHD, k_NGD, v_NGD, starts, starts, longest, longest, window_size=sides, **options)
    return cast(Tensor, out)


def _attend_fa3(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    window = (-1 if before is None else before, 0)
    out = flash_attn_varlen_func(q_NHD, k_NGD, v_NGD, **_varlen_arguments(starts, longest), window_size=window)
    # Early builds also return the log-sum-exps.
    attended: Tensor = out[0] if isinstance(out, tuple) else out
    return attended


def _attend_fa4(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> Tensor:
    out_NHD, _ = torch.ops.quintic.flash_attention_4(q_NHD, k_NGD, v_NGD, starts, longest, before)
    return cast(Tensor, out_NHD)


@torch.library.custom_op("quintic::flash_attention_4", mutates_args=())
def _fa4_forward(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output (N, H, D), and for the backward pass the log-sum-exps (H, N) float32."""
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    out: tuple[Tensor, Tensor] = flash_attn_varlen_func(
        q_NHD, k_NGD, v_NGD, **_varlen_arguments(starts, longest), window_size=(before, 0), return_lse=True
    )
    return out


@_fa4_forward.register_fake
def _(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, starts: Tensor, longest: int, before: int | None
) -> tuple[Tensor, Tensor]:
    return q_NHD.new_empty(q_NHD.shape), q_NHD.new_empty(q_NHD.shape[1::-1], dtype=torch.float32)


@torch.library.custom_op("quintic::flash_attention_4_backward", mutates_args=())
def _fa4_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    out_NHD: Tensor,
    sums_HN: Tensor,
    starts: Tensor,
    longest: int,
    before: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries (N, H, D), keys and values (N, G, D)."""
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found, unused-ignore]

    grads: tuple[Tensor, Tensor, Tensor] = _flash_attn_bwd(
        q_NHD,
        k_NGD,
        v_NGD,
        out_NHD,
        grad_NHD,
        sums_HN,
        **_varlen_arguments(starts, longest),
        window_size_left=before,
        window_size_right=0,
    )
    return grads


@_fa4_backward.register_fake
def _(grad_NHD: Tensor, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q_NHD.new_empty(q_NHD.shape), k_NGD.new_empty(k_NGD.shape), v_NGD.new_empty(v_NGD.shape)


def _setup_fa4(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_NHD, k_NGD, v_NGD, starts, ctx.longest, ctx.before = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_NHD, k_NGD, v_NGD, *output, starts)


def _backward_fa4(ctx: Any, grad_NHD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.quintic.flash_attention_4_backward(grad_NHD, *ctx.saved_tensors, ctx.longest, ctx.before)
    return *grads, None, None, None


_fa4_forward.register_autograd(_backward_fa4, setup_context=_setup_fa4)


def _varlen_arguments(starts: Tensor, longest: int) -> dict[str, Any]:
    """Return the arguments named in `_SHARED`."""
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _varlen_takes_groups() -> bool:
    """Return whether PyTorch's kernel accepts fewer key heads than query heads."""
    return varlen_takes_groups()
