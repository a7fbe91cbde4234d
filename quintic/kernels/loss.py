"""Soft-capped cross entropy from hidden states, without keeping the logits of the whole batch.

The logits of a batch are by far its largest tensor. The training form below goes over the tokens in chunks and
computes each chunk's gradient together with its loss, so that only one chunk of logits exists at a time.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["softcap_cross_entropy"]

# Chunk of logits kept at a time on the CPU: small enough to stay in its caches. Measured: docs/LOG.md, 2026-11-20.
_CHUNK_BYTES = 4 * 2**20


def softcap_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Return the cross entropy of `softcap * tanh(x @ weight.T / softcap)` against `targets`, in nats.

    Args:
        x: (..., d) hidden states; the product is computed in their dtype, everything after it in float32.
        weight: (vocab, d) output head.
        targets: (...) int64 in [0, vocab).
        softcap: bound of the logits, > 0.
        reduction: `"mean"` for a scalar, `"none"` for one loss per token.

    Returns:
        float32 scalar, or (...) losses. Differentiable in `x` and `weight`.
    """
    flat_x, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if reduction == "mean" and x.device.type == "cpu" and torch.is_grad_enabled():
        loss: Tensor = _ChunkedMean.apply(flat_x, weight, flat_targets, softcap)  # type: ignore[no-untyped-call]
        return loss
    if x.device.type == "cpu":
        chunk = _chunk_tokens(weight)
        losses = torch.cat(
            [
                _losses(chunk_x, weight, chunk_targets, softcap)
                for chunk_x, chunk_targets in zip(flat_x.split(chunk), flat_targets.split(chunk), strict=True)
            ]
        )
    else:
        losses = _losses(flat_x, weight, flat_targets, softcap)
    return losses.mean() if reduction == "mean" else losses.view(targets.shape)


def _chunk_tokens(weight: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * weight.shape[0]))


def _losses(x: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    logits = F.linear(x, weight.to(x.dtype)).float()
    return F.cross_entropy(softcap * torch.tanh(logits / softcap), targets, reduction="none")


class _ChunkedMean(torch.autograd.Function):
    """Mean loss whose backward has been computed by its forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
        num_tokens = x.shape[0]
        low_weight = weight.to(x.dtype)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = x.new_zeros((), dtype=torch.float32)
        chunk = _chunk_tokens(weight)
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            squashed = F.linear(x[rows], low_weight).float().div_(softcap).tanh_()
            log_probs = F.log_softmax(squashed * softcap, dim=-1)
            target_column = targets[rows, None]
            total -= log_probs.gather(1, target_column).sum()
            # d loss / d logits = (softmax - one_hot)(1 - tanh^2) / num_tokens
            grad = log_probs.exp_()
            grad.scatter_add_(1, target_column, grad.new_full(target_column.shape, -1.0))
            grad.mul_(squashed.square_().neg_().add_(1)).div_(num_tokens)
            low_grad = grad.to(x.dtype)
            grad_x[rows] = low_grad @ low_weight
            grad_weight += low_grad.mT @ x[rows]
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return (
            grad_x * grad_outputs[0].to(grad_x.dtype),
            grad_weight * grad_outputs[0].to(grad_weight.dtype),
            None,
            None,
        )
