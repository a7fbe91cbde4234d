"""The update rules: pure functions on tensors, free of devices, names and ranks.

Read top to bottom as the algorithm. Symbols: gradient g, momentum m, update u, weight w, learning rate lr,
momentum coefficient mu. Muon's step for one batch of matrices is

    m <- m + (1 - mu)(g - m)                          momentum_
    u  = (1 - mu) g + mu m      (or m)                momentum_
    u <- polar factor of u                            orthogonalize.py
    u <- u / neuron-wise root mean square             normalize_neurons_   (NorMuon only)
    w <- w - lr wd w [u w >= 0]                       apply_
    w <- w - lr scale(m, n) u                         apply_

Functions that end in `_` change the tensors they document as changed; no function changes a gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["LrScale", "adamw_", "apply_", "lr_scale_factor", "momentum_", "normalize_neurons_", "second_moment_shape"]

LrScale = Literal["spectral", "match_rms_adamw", "unit_rms"] | Callable[[int, int], float] | None

# Keeps 1 / sqrt(second moment) finite for neurons that never received a gradient.
_NEURON_EPS = 1e-10


def momentum_(momenta: Sequence[Tensor], gradients: Sequence[Tensor], *, mu: float, nesterov: bool) -> list[Tensor]:
    """Advance exponential moving averages of gradients and return the update directions.

    m <- m + (1 - mu)(g - m); u = (1 - mu) g + mu m with Nesterov's look-ahead, else u = m.

    Args:
        momenta: float32 tensors, changed in place.
        gradients: tensors of the same shapes, any floating dtype; not modified.
        mu: averaging coefficient in [0, 1).
        nesterov: whether the direction looks one gradient ahead.

    Returns:
        New float32 tensors; never aliases of `momenta`, so that they may be normalised in place.
    """
    grads32 = [g.to(m.dtype) for g, m in zip(gradients, momenta, strict=True)]
    torch._foreach_lerp_(list(momenta), grads32, 1 - mu)
    if nesterov:
        return [torch.lerp(g, m, mu) for g, m in zip(grads32, momenta, strict=True)]
    return [m.clone() for m in momenta]


def lr_scale_factor(scale: LrScale, m: int, n: int) -> float:
    """Return the factor on the learning rate of an (m outputs, n inputs) matrix.

    Args:
        scale: `"spectral"` sqrt(max(1, m / n)) (Muon post); `"match_rms_adamw"` 0.2 sqrt(max(m, n)), so that
            learning rate and weight decay tuned for AdamW carry over (Moonlight, arXiv 2502.16982, eq. 4);
            `"unit_rms"` sqrt(m / n) (spectral norm condition, arXiv 2310.17813); None for 1; or a function of (m, n).
        m: output features, >= 1.
        n: input features, >= 1.

    Raises:
        ValueError: unknown name.
    """
    if scale is None:
        return 1.0
    if callable(scale):
        return float(scale(m, n))
    if scale == "spectral":
        return math.sqrt(max(1.0, m / n))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if scale == "unit_rms":
        return math.sqrt(m / n)
    raise ValueError(
        f"lr_scale={scale!r}: choose 'spectral', 'match_rms_adamw', 'unit_rms', None or a function of (m, n)"
    )


def second_moment_shape(m: int, n: int) -> tuple[int, int]:
    """Return the shape of NorMuon's second moment of one (m, n) matrix: one value per row, per column if it is wide."""
    return (m, 1) if m >= n else (1, n)


def normalize_neurons_(update: Tensor, second_moment: Tensor, *, beta: float) -> Tensor:
    """Even out the size of the neurons of an orthogonalised update, keeping each matrix' Frobenius norm.

    v <- v + (1 - beta)(mean(u^2) - v) over the dimension `second_moment` lacks; u <- u / sqrt(v), rescaled so that the
    Frobenius norm of the matrix stays what it was.

    Args:
        update: (b, m, n) floating point; not modified.
        second_moment: (b, m, 1) or (b, 1, n) float32, changed in place.
        beta: averaging coefficient in [0, 1).

    Returns:
        (b, m, n) float32.

    Source: NorMuon, arXiv 2510.05491, algorithm 1; the norm-preserving rescale follows the modded-nanogpt speedrun.
    """
    u = update.float()
    reduced_dim = -1 if second_moment.shape[-1] == 1 else -2
    mean_square = u.square().mean(dim=reduced_dim, keepdim=True)
    second_moment.lerp_(mean_square, 1 - beta)
    inverse_root = second_moment.clamp_min(_NEURON_EPS).rsqrt()
    # ||u||^2 and ||u inverse_root||^2 both follow from the reduced means: no second pass over the matrix.
    norm_before = mean_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    norm_after = (mean_square * inverse_root.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return u * (inverse_root * (norm_before / norm_after.clamp_min(_NEURON_EPS)))


def apply_(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float,
    lr_scale: float,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Decay the weights, then step against the updates: w <- w - lr wd w - lr lr_scale u.

    Args:
        weights: floating-point tensors, changed in place; arithmetic in float32 or wider, rounded once to their dtype.
        updates: float32 tensors of the same shapes; not modified.
        lr: learning rate; the decay is coupled to it and not to `lr_scale`.
        lr_scale: shape-dependent factor on the step, see `lr_scale_factor`.
        weight_decay: decoupled decay in units of 1 / lr per step (as in torch.optim.AdamW).
        cautious: decay only entries where update and weight agree in sign (or one is zero), so that decay never
            works against the update. Source: cautious weight decay, arXiv 2510.12402.
    """
    for weight, update in zip(weights, updates, strict=True):
        step = update.mul(lr_scale)
        if weight_decay != 0.0:
            decay = weight.to(step.dtype) * weight_decay
            if cautious:
                decay *= update * weight >= 0
            step += decay
        weight.add_(step, alpha=-lr)


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Advance one AdamW parameter with bias correction; state and arithmetic in the dtype of `exp_avg`.

    The plain twin of PyTorch's fused kernel, for what that kernel cannot do: low-precision weights with float32 state
    and cautious decay.

    Args:
        weight: floating point, changed in place.
        gradient: same shape; not modified.
        exp_avg: first moment, changed in place.
        exp_avg_sq: second moment, changed in place.
        step: 0-D float32, changed in place: number of updates made, this one included after the call.
        lr: learning rate.
        betas: averaging coefficients of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, w <- w - lr weight_decay w.
        cautious: as in `apply_`.

    Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2.
    """
    beta1, beta2 = betas
    g = gradient.to(exp_avg.dtype)
    step += 1
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.lerp_(g.square(), 1 - beta2)
    # Tensor arithmetic on `step`, so that a step count on a GPU needs no host synchronisation.
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + eps)
    apply_([weight], [update], lr=lr, lr_scale=1.0, weight_decay=weight_decay, cautious=cautious)
