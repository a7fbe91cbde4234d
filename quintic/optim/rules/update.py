"""The update rules: pure functions on tensors, free of devices, names and ranks.

Read top to bottom as the algorithm. Symbols: gradient g, momentum m, update u, weight w, learning rate lr,
momentum coefficient mu. Muon's step for one batch of matrices is

    m <- m + (1 - mu)(g - m)                          momentum_
    u  = (1 - mu) g + mu m      (or m)                momentum_
    u <- polar factor of u                            orthogonalize.py
    f  = adjust_lr(m, n)                              adjust_lr_factor
    f <- f / neuron-wise root mean square of u        neuron_factors_   (NorMuon only)
    w <- w - lr wd w [u w >= 0] - lr f u              decay_and_step_

and an element-wise tensor has `adamw_` instead. Weights of any floating dtype are changed in place, as are masters
(`precision.py`; None for weights without one), momenta and moments, which are float32, float64 or bfloat16. Arithmetic
is float32, or float64 for float64 weights, and results are rounded once to the nearest when they are stored; updates
are computed from unrounded values. Gradients and updates have any floating dtype and are not modified. On CUDA devices
kernels compute the same in one pass over the memory (`kernels/update/matrix_update.py`, `kernels/update/adamw.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import torch
from torch import Tensor

from quintic.optim.numeric.int8_state import is_packed, read_packed, store_packed_
from quintic.optim.numeric.precision import full_precision, store_
from quintic.optim.numeric.sums import norms, sums

__all__ = [
    "CPU_PIECE",
    "AdjustLr",
    "Cautious",
    "DecayCoupling",
    "adamw_",
    "adjust_lr_factor",
    "decay_and_step_",
    "in_pieces",
    "momentum_",
    "neuron_factors_",
    "second_moment_shape",
]

AdjustLr = Literal["spectral", "match_rms_adamw", "unit_rms"] | Callable[[int, int], float] | None
DecayCoupling = Literal["lr", "lr_squared"]
Cautious = bool | Literal["strict"]

# Hints for dion's values of `adjust_lr` and PyTorch's of `adjust_lr_fn` that have other names here.
_OTHER_SCALES = {
    "spectral_norm": "; dion's 'spectral_norm' is 'unit_rms' here",
    "rms_norm": "; dion's 'rms_norm' is 'match_rms_adamw' here",
    "original": "; PyTorch's 'original' is 'spectral' here",
}

CPU_PIECE = 2**17
"""On CPUs, large tensors go through all operations of a pass in pieces of at most this many entries, so that
intermediate results stay in the caches, and in memory that was used before."""

# Keeps 1 / sqrt(second moment) finite for neurons that never received a gradient.
_NEURON_EPS = 1e-10


def momentum_(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    mu: float,
    nesterov: bool,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Advance exponential moving averages of gradients and return the update directions.

    m <- m + (1 - mu)(g - m); u = (1 - mu) g + mu m with Nesterov's look-ahead, else u = m. Directions go to `out`,
    rounded to its dtype, or to new float32 tensors; they are never aliases of the momenta.
    """
    # Tensors at the same position have one shape; they are computed one after the other.
    if out is None:
        out = [torch.empty_like(m, dtype=torch.promote_types(m.dtype, torch.float32)) for m in momenta]
    entries = CPU_PIECE if momenta and momenta[0].device.type == "cpu" else None
    for momentum, gradient, direction in in_pieces(momenta, gradients, out, entries=entries):
        # bfloat16 momenta are averaged in a float32 copy, which the direction is computed from, too.
        average = momentum if momentum.itemsize >= 4 else momentum.float()
        wide = gradient.to(average.dtype)
        average.lerp_(wide, 1 - mu)
        direction.copy_(torch.lerp(wide, average, mu) if nesterov else average)
        if average is not momentum:
            momentum.copy_(average)
    return out


def in_pieces(*rows: Sequence[Any], entries: int | None) -> Iterator[tuple[Any, ...]]:
    """Yield the items at the same position of each sequence; large tensors in pieces of at most `entries` entries.

    The first sequence has tensors; items at the same position of the others are tensors that broadcast to them,
    numbers, or None. With `entries` None nothing is divided.
    """
    items = zip(*rows, strict=True)
    if entries is None or max(map(Tensor.numel, rows[0]), default=0) <= entries:
        return items
    return chain.from_iterable(_pieces_of(of_each, entries) for of_each in items)


def _pieces_of(items: tuple[Any, ...], entries: int) -> Iterator[tuple[Any, ...]]:
    like = items[0]
    if like.numel() <= entries:
        yield items
        return
    # Split along the first dimension, into as many slices as fit, or single slices that are split further.
    length = entries // (like.numel() // like.shape[0])
    split = [i.expand(like.shape).split(max(1, length)) if isinstance(i, Tensor) else repeat(i) for i in items]
    for piece in zip(*split, strict=False):
        if length:
            yield piece
        else:
            yield from _pieces_of(tuple(i[0] if isinstance(i, Tensor) else i for i in piece), entries)


def adjust_lr_factor(scale: AdjustLr, m: int, n: int) -> float:
    """Return the factor on the learning rate of an (m outputs, n inputs) matrix.

    Args:
        scale: `"spectral"` sqrt(max(1, m / n)) (Muon post); `"match_rms_adamw"` 0.2 sqrt(max(m, n)), so that
            learning rate and weight decay tuned for AdamW carry over (Moonlight, arXiv 2502.16982, eq. 4);
            `"unit_rms"` sqrt(m / n) (spectral norm condition, arXiv 2310.17813); None for 1; or a function of (m, n).
        m: output features. The factor is 1 if m or n is 0.
        n: input features.

    Raises:
        ValueError: unknown name.
    """
    if scale is None or not (m and n):
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
        f"adjust_lr={scale!r}: choose 'spectral', 'match_rms_adamw', 'unit_rms', None or a function of (m, n)"
        f"{_OTHER_SCALES.get(str(scale), '')}"
    )


def second_moment_shape(m: int, n: int) -> tuple[int, int]:
    """Return the shape of NorMuon's second moment of one (m, n) matrix: (m, 1), per row; if m < n (1, n), per column.

    The paper takes rows for every shape; the modded-nanogpt speedrun, to which its authors contributed NorMuon, chooses
    by shape.
    """
    # All rows of a wide matrix's polar factor have norm one; only along the longer side do sizes differ.
    return (m, 1) if m >= n else (1, n)


def neuron_factors_(update: Tensor, second_moment: Tensor, *, beta: float) -> Tensor:
    """Return the factors that normalise the neurons of an orthogonalised update and keep each matrix's Frobenius norm.

    v <- v + (1 - beta)(mean(u^2) - v), with means along the dimension of size 1 in `second_moment`. The factors are
    1 / sqrt(max(v, 1e-10)), rescaled so that factors times update has the Frobenius norm of the update.

    Args:
        update: (b, m, n).
        second_moment: (b, m, 1) or (b, 1, n) float32, changed in place; the factors have its shape and dtype.
        beta: averaging coefficient in [0, 1).

    Source: NorMuon, arXiv 2510.05491, algorithm 1, except that wide matrices have a second moment per column, see
    `second_moment_shape`; the norm-preserving rescale follows the modded-nanogpt speedrun.
    """
    # Mean squares of neurons, (b, m, 1) or (b, 1, n), and their moving average.
    reduced_dim = -1 if second_moment.shape[-1] == 1 else -2
    wide = torch.promote_types(update.dtype, second_moment.dtype)
    norm = norms(update, reduced_dim, wide).to(second_moment.dtype)
    mean_square = norm.square() / update.shape[reduced_dim]
    second_moment.lerp_(mean_square, 1 - beta)
    inverse_root = second_moment.clamp_min(_NEURON_EPS).rsqrt()
    # ||u||^2 and ||u inverse_root||^2, (b, 1, 1), follow from the mean squares, without another pass over the matrix.
    kept_dim = -3 - reduced_dim
    norm_before = sums(mean_square, kept_dim).sqrt()
    norm_after = sums(mean_square * inverse_root.square(), kept_dim).sqrt()
    factors: Tensor = inverse_root * (norm_before / norm_after.clamp_min(_NEURON_EPS))
    return factors


def decay_and_step_(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor | None],
    updates: Sequence[Tensor],
    factors: Sequence[Tensor | float],
    *,
    lr: float,
    weight_decay: float,
    decay_coupling: DecayCoupling = "lr",
    decay_factors: Sequence[Tensor | float] | None = None,
    cautious: Cautious,
) -> None:
    """Decay the weights and step against the updates: w <- w - lr wd w - lr f u.

    Args:
        weights: tensors.
        masters: one for each weight, or None.
        updates: tensors of the same shapes.
        factors: for each update a number or broadcastable tensor f: the learning-rate scale times the matrix's own
            multiplier times the neurons' factors.
        lr: learning rate; the decay is coupled to it and not to `factors`.
        weight_decay: decoupled decay, in units of 1 / lr per step (as in torch.optim.AdamW), or with
            `decay_coupling="lr_squared"` of 1 / lr^2: w <- w - lr^2 wd w (the modded-nanogpt speedrun's schedule-tied
            decay, which falls faster than a falling learning rate).
        decay_coupling: `"lr"` or `"lr_squared"`.
        decay_factors: further factors on the decay of each weight, for `scale_decay` as in the speedrun; None for 1.
        cautious: decay only entries where update and weight agree in sign (or one is zero), so that decay never
            works against the update (arXiv 2510.12402). `"strict"` does not decay entries whose update is zero, either.
    """
    decay_rate = weight_decay * lr if decay_coupling == "lr_squared" else weight_decay
    entries = CPU_PIECE if weights and weights[0].device.type == "cpu" else None
    scales = [1.0] * len(weights) if decay_factors is None else decay_factors
    for weight, master, update, factor, scale in in_pieces(weights, masters, updates, factors, scales, entries=entries):
        # From the value behind the weight: w - lr (f u + wd w), with one rounding at the end.
        current = weight if master is None else full_precision(weight, master)
        wide = torch.promote_types(torch.float32, weight.dtype)
        step = update * factor if update.dtype == wide else update.to(wide).mul_(factor)
        # Add the decay to the step: masked, with a factor of its own, or plain.
        if decay_rate != 0.0 and cautious:
            agreement = update.to(wide) * current
            mask = agreement > 0 if cautious == "strict" else agreement >= 0
            del agreement
            step += current.to(wide) * (decay_rate * scale) * mask
        elif decay_rate != 0.0 and decay_factors is not None:
            step += current.to(wide) * (decay_rate * scale)
        elif decay_rate != 0.0:
            step.add_(current, alpha=decay_rate)
        if master is None:
            weight.add_(step, alpha=-lr)
        else:
            store_(weight, master, current.add(step, alpha=-lr))


def adamw_(
    weight: Tensor,
    master: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_coupling: DecayCoupling = "lr",
    cautious: Cautious,
) -> None:
    """Update one AdamW parameter, with bias correction.

    The plain twin of PyTorch's fused kernel, for cases that this does not support: low-precision weights with float32
    state, cautious decay, decay coupled to lr squared. `step`, 0-D float32, counts updates and is increased by one;
    `eps` is added to the root of the second moment; other arguments are as for `decay_and_step_`.

    Source: Loshchilov & Hutter, arXiv 1711.05101, algorithm 2.
    """
    beta1, beta2 = betas
    # Averages: float32 copies if the state is bfloat16 (`bf16_state.py`) or of 8 bits (`int8_state.py`).
    mean, mean_square = (
        one if one.itemsize >= 4 else read_packed(one) if is_packed(one) else one.float()
        for one in (exp_avg, exp_avg_sq)
    )
    g = gradient.to(mean.dtype)
    step += 1
    mean.lerp_(g, 1 - beta1)
    mean_square.lerp_(g.square(), 1 - beta2)
    # Bias correction in float64, as 1 - beta^step loses digits, and with tensors, so that a count on a GPU needs no
    # host synchronisation. Rounded here, because a parameter without dimensions would otherwise become float64.
    correction1 = (1 - beta1 ** step.double()).to(mean.dtype)
    correction2 = (1 - beta2 ** step.double()).to(mean.dtype)
    update = (mean / correction1) / ((mean_square / correction2).sqrt() + eps)
    if mean is not exp_avg:
        for kept, average in ((exp_avg, mean), (exp_avg_sq, mean_square)):
            if is_packed(kept):
                store_packed_(kept, average, step)
            else:
                kept.copy_(average)
    decay_and_step_(
        [weight],
        [master],
        [update],
        [1.0],
        lr=lr,
        weight_decay=weight_decay,
        decay_coupling=decay_coupling,
        cautious=cautious,
    )
