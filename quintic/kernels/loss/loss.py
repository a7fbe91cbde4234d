"""Soft-capped cross entropy of hidden states, without the logits of the whole batch in memory.

The logits are by far the largest tensor of a batch. If gradients are needed, the forward pass goes through the tokens
in chunks and computes each chunk's gradients together with its losses, so that only one chunk of logits exists at a
time; the backward pass multiplies these gradients by the upstream gradient, one number. With `reduction="none"` the
upstream gradient differs from token to token, and the weight's gradient is a sum over tokens: then the backward pass
computes all chunks again.

Read next: chunks.py, where a chunk is computed.
"""

import contextlib
import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, decide, obstacle_to_triton
from quintic.kernels.linear.fp8 import check_multiples
from quintic.kernels.linear.fp8_quantize import check_float, check_scalar, obstacle_to_fp8
from quintic.kernels.loss.chunks import empty_gradients, loss_dtype, loss_on_device, loss_twin
from quintic.kernels.loss.problem import Fp8Scales, Problem, SigmoidCap, Wanted

__all__ = ["Fp8Scales", "SigmoidCap", "obstacle_to_loss", "softcap_cross_entropy"]

# Bytes of a chunk of logits on the CPU: small enough for its caches. Measured 2026-11-20 (docs/development/LOG.md).
_CHUNK_BYTES = 4 * 2**20
# Bytes of a chunk of logits for plain PyTorch on other devices.
_DEVICE_CHUNK_BYTES = 256 * 2**20


def softcap_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | SigmoidCap | None,
    target_weights: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    transposed: bool = False,
    fp8: Fp8Scales | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    kernels: KernelsOption = "auto",
) -> Tensor:
    """Return the cross entropy of `softcap * tanh(x @ weight.T / softcap)` against `targets`, in nats.

    With several targets per token, as for the prediction of several tokens at once, the loss of a token is
    sum_k w_k CE_k: one softmax, K targets. An ignored target contributes nothing.

    Gradients are computed by the forward pass where x or weight requires them (see this module's docstring). There are
    no second derivatives. A surrounding autocast changes nothing: products have the dtype of `x`.

    Args:
        x: (..., d) float32, bfloat16, float16 or float64 hidden states, any strides; the products are computed in their
            dtype, everything after them in float32 (float64 for float64).
        weight: (vocabulary, d) output head, any float dtype and strides; computed in the dtype of `x`.
        targets: (...) int64, or (..., K) for K targets per token; in [0, vocab_size) or `ignore_index`. Any other value
            raises an error on a CPU; with Triton's kernels the token's loss becomes NaN instead.
        softcap: bound of the logits, > 0; a `SigmoidCap` for that form of a cap, None for no cap.
        target_weights: (K,) or (..., K) float weights w_k of the targets, where these are (..., K); None for ones. No
            gradient flows through them.
        ignore_index: value of targets that do not count.
        vocab_size: size of the vocabulary where `weight` is padded: later rows take no part in the softmax and get zero
            gradients; their values must be finite. None for all rows.
        transposed: `weight` is stored as (d, vocabulary).
        fp8: scales for products in 8 bits, see `Fp8Scales`; both sizes of `weight` must be multiples of 16. On CUDA
            devices of compute capability 8.9 or more they run on tensor cores; on other devices they are emulated.
        reduction: `"mean"` divides the sum by the number of tokens with a target that is not ignored, of any weight;
            for one target per token this is `torch.nn.functional.cross_entropy`. Without such a token, loss and
            gradients are 0 (PyTorch returns NaN), so that a rank or microbatch of padding does no harm. `"sum"` adds
            the losses; `"none"` returns one loss per token, 0 for a token whose targets are all ignored.
        kernels: `"auto"` takes Triton on CUDA devices (up to 32 bits), `"torch"` is plain PyTorch with smaller chunks
            of logits; `"triton"` raises an error if Triton cannot compute this.

    Returns:
        A scalar, or (...) losses; float32 (float64 for float64). Differentiable in `x` and `weight`, with gradients in
        their dtypes.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, devices or values do not fit, or `kernels="triton"` cannot be honoured.
    """
    stored = _check(x, weight, targets, target_weights, transposed=transposed)
    vocab_size = stored if vocab_size is None else vocab_size
    _check_options(softcap, vocab_size, stored, reduction)
    if fp8 is not None:
        check_float("x", x)
        check_float("weight", weight)
        check_multiples("weight", weight.shape)
        for name, scale in zip(fp8._fields, fp8, strict=True):
            check_scalar(f"fp8.{name}", scale, x)
    shape = x.shape[:-1]
    num_tokens = math.prod(shape)
    num_targets = 1 if targets.ndim < x.ndim else targets.shape[-1]
    # Flattened to (tokens, d) and (tokens, K); operators take tensors, numbers and strings only.
    arguments = (
        x.reshape(num_tokens, x.shape[-1]),
        weight,
        targets.reshape(num_tokens, num_targets),
        None
        if target_weights is None
        else target_weights.detach().expand(targets.shape).reshape(num_tokens, num_targets),
        *(fp8 if fp8 is not None else (None, None, None)),
        softcap if softcap is None else [float(number) for number in _numbers(softcap)],
        ignore_index,
        vocab_size,
        transposed,
        kernels,
    )
    losses: Tensor
    if reduction == "none":
        losses = torch.ops.quintic.softcap_cross_entropy(*arguments)
        return losses.view(shape)
    # Factor of each token's loss: 1, or 1 / tokens that count.
    scale = torch.ones((), dtype=loss_dtype(x), device=x.device)
    if reduction == "mean":
        counted = (arguments[2] != ignore_index).any(1).sum()
        scale = scale / counted.clamp(min=1)
    for_x, for_weight = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
    if not (for_x or for_weight):
        losses = torch.ops.quintic.softcap_cross_entropy(*arguments)
        return losses.sum() * scale
    total: Tensor
    total, _, _ = torch.ops.quintic.softcap_cross_entropy_with_gradients(*arguments, scale, for_x, for_weight)
    return total


def _check(x: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor | None, *, transposed: bool) -> int:
    """Check dtypes, shapes and devices of the tensors, and return the stored size of the vocabulary."""
    for name, tensor in (("x", x), ("weight", weight)):
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise TypeError(f"{name} is {tensor.dtype}; need float32, bfloat16, float16 or float64")
    form = "(d, vocabulary) for transposed=True" if transposed else "(vocabulary, d)"
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[0 if transposed else 1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: need (..., d) and {form}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets are {targets.dtype}; need int64: targets.long()")
    if targets.shape[: x.ndim - 1] != x.shape[:-1] or targets.ndim > x.ndim:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; x {tuple(x.shape)} needs {tuple(x.shape[:-1])}, "
            f"or one dimension more for several targets per token"
        )
    if targets.ndim == x.ndim and targets.shape[-1] == 0:
        raise ValueError(f"targets have shape {tuple(targets.shape)}: no target per token; need at least one")
    if target_weights is not None:
        if targets.ndim != x.ndim:
            raise ValueError("target_weights are for targets of shape (..., K); use targets.unsqueeze(-1)")
        if target_weights.shape != targets.shape[-1:] and target_weights.shape != targets.shape:
            raise ValueError(
                f"target_weights have shape {tuple(target_weights.shape)}; "
                f"need {tuple(targets.shape[-1:])} or {tuple(targets.shape)}"
            )
        if not target_weights.is_floating_point():
            raise TypeError(f"target_weights are {target_weights.dtype}; need a float dtype")
    for name, other in (("weight", weight), ("targets", targets), ("target_weights", target_weights)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {str(x.device)!r} and {name} on {str(other.device)!r}; move one of them")
    return weight.shape[1 if transposed else 0]


def _numbers(softcap: float | SigmoidCap) -> tuple[float, ...]:
    return tuple(softcap) if isinstance(softcap, SigmoidCap) else (softcap,)


def _check_options(softcap: float | SigmoidCap | None, vocab_size: int, stored: int, reduction: str) -> None:
    if isinstance(softcap, SigmoidCap):
        if not (0 < softcap.height < math.inf and 0 < softcap.width < math.inf and math.isfinite(softcap.shift)):
            raise ValueError(f"softcap={softcap}: need height and width > 0, and numbers that are finite")
    elif softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}: need a number > 0, or None for no cap")
    if not 1 <= vocab_size <= stored:
        raise ValueError(f"vocab_size={vocab_size}: weight has {stored} rows of the vocabulary; need 1 to {stored}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: choose 'mean', 'sum' or 'none'")


def obstacle_to_loss(x: Tensor, *, fp8: bool = False) -> str | None:
    """Return why Triton cannot compute the loss of these hidden states, or None."""
    obstacle = obstacle_to_fp8(x.device) if fp8 else obstacle_to_triton(x.device, "x")
    if obstacle is None and x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{x.dtype} has no kernel"
    return obstacle


# ---------------------------------------------------------------------------------------------------------- operators


# Both operators begin with these 12 arguments: 7 tensors, then options, `kernels` last.
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor targets, Tensor? target_weights, Tensor? x_scale, Tensor? weight_scale, "
    "Tensor? grad_scale, float[]? softcap, SymInt ignore_index, SymInt vocab_size, bool transposed, str kernels"
)
_NUM_TENSORS = 7
_NUM_ARGUMENTS = 12


def _problem(arguments: tuple[Any, ...]) -> Problem:
    x, weight, targets, target_weights, *scales = arguments[:_NUM_TENSORS]
    fp8 = None if scales[0] is None else Fp8Scales(*scales)
    softcap, *options = arguments[_NUM_TENSORS : _NUM_ARGUMENTS - 1]
    softcap = None if softcap is None else tuple(softcap)
    return Problem(x, weight, targets.contiguous(), target_weights, fp8, softcap, *options)


def _compute(problem: Problem, wanted: Wanted | None, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
    x, is_fp8 = problem.x, problem.fp8 is not None
    chosen, _ = decide(cast(KernelsOption, kernels), x.device, lambda: obstacle_to_loss(x, fp8=is_fp8))
    with _without_autocast(x.device.type):
        if chosen == "triton":
            return loss_on_device(problem, wanted)
        on_cpu = x.device.type == "cpu"
        if on_cpu:
            _check_targets(problem)
        chunk_bytes = _CHUNK_BYTES if on_cpu else _DEVICE_CHUNK_BYTES
        return loss_twin(problem, wanted, max(1, chunk_bytes // (4 * problem.vocab_size)))


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _check_targets(problem: Problem) -> None:
    targets, vocab_size = problem.targets, problem.vocab_size
    wrong = targets[(targets != problem.ignore_index) & ((targets < 0) | (targets >= vocab_size))]
    if len(wrong):
        raise ValueError(
            f"targets: {int(wrong[0])} is not a token of a vocabulary of {vocab_size}, nor ignore_index="
            f"{problem.ignore_index}"
        )


@torch.library.custom_op("quintic::softcap_cross_entropy", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _losses(*arguments: Any) -> Tensor:
    """Return one loss per token, (tokens,); the backward pass computes all chunks again."""
    return _compute(_problem(arguments), None, arguments[-1])[0]


@_losses.register_fake
def _losses_fake(*arguments: Any) -> Tensor:
    x = arguments[0]
    out: Tensor = x.new_empty(x.shape[0], dtype=loss_dtype(x))
    return out


def _setup_losses(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]


def _backward_losses(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_weight = ctx.needs_input_grad[:2]
    x, weight, *others = ctx.saved_tensors
    # The upstream gradient is the factor of each token's loss.
    _, grad_x, grad_weight = torch.ops.quintic.softcap_cross_entropy_with_gradients(
        x, weight, *others, *ctx.options, grad.contiguous(), for_x, for_weight
    )
    return (
        grad_x.to(x.dtype) if for_x else None,
        grad_weight.to(weight.dtype) if for_weight else None,
        *(None,) * (_NUM_ARGUMENTS - 2),
    )


_losses.register_autograd(_backward_losses, setup_context=_setup_losses)


@torch.library.custom_op(
    "quintic::softcap_cross_entropy_with_gradients",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor scale, bool for_x, bool for_weight) -> (Tensor, Tensor, Tensor)",
)
def _with_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum_t scale_t loss_t, with scale () or (tokens,), and its gradients before they are rounded."""
    wanted = Wanted(*arguments[_NUM_ARGUMENTS:])
    losses, grad_x, grad_weight = _compute(_problem(arguments), wanted, arguments[_NUM_ARGUMENTS - 1])
    total = losses.sum() * wanted.scale if wanted.scale.ndim == 0 else losses @ wanted.scale
    return total, grad_x, grad_weight


@_with_gradients.register_fake
def _with_gradients_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = arguments[:2]
    return x.new_empty((), dtype=loss_dtype(x)), *empty_gradients(x, weight, Wanted(*arguments[_NUM_ARGUMENTS:]))


def _setup_with_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, *_ = inputs
    # Otherwise autograd would allocate zeros of the gradients' size for the two outputs that nothing uses.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = x.dtype, weight.dtype
    ctx.wanted = inputs[-2:]


def _backward_with_gradients(
    ctx: Any, grad: Tensor | None, grad_of_grad_x: Tensor | None, grad_of_grad_weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_of_grad_x is not None or grad_of_grad_weight is not None:
        raise RuntimeError("softcap_cross_entropy has no second derivatives; do not use create_graph with it")
    grads: list[Tensor | None] = [None] * (_NUM_ARGUMENTS + 3)
    if grad is not None:
        for place, saved in enumerate(ctx.saved_tensors):
            if ctx.wanted[place] and ctx.needs_input_grad[place]:
                grads[place] = _times(saved, grad, ctx.dtypes[place])
    return tuple(grads)


def _times(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return saved * factor in `dtype`, in one pass; `saved` stays intact for another backward pass."""
    # With create_graph=True gradients are enabled here, and `out` does not allow differentiation.
    if torch.is_grad_enabled():
        return (saved * factor).to(dtype)
    return torch.mul(saved, factor, out=torch.empty_like(saved, dtype=dtype))


_with_gradients.register_autograd(_backward_with_gradients, setup_context=_setup_with_gradients)
