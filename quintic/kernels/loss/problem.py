"""The inputs of a loss, its caps, and the gradients wanted of it."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Fp8Scales", "Problem", "SigmoidCap", "Wanted"]


class Fp8Scales(NamedTuple):
    """Scales of the products in 8 bits: () float32 > 0 on the device of `x`, value = quantised * scale.

    `x` and `weight` are quantised as e4m3. `grad` is for the gradient with respect to the logits before the cap, e5m2:
    of the *sum* of the losses for reductions "sum" and "mean" (a mean is divided afterwards), so that its entries lie
    within a token's sum of absolute weights, 1 for a single target, and 1 / 57344 of that never saturates; with the
    upstream gradient of each token included for "none". A `SigmoidCap` multiplies them by height / (4 width) at most.
    """

    x: Tensor
    weight: Tensor
    grad: Tensor


class SigmoidCap(NamedTuple):
    """The cap height * sigmoid((logit + shift) / width) of logits, which come to lie between 0 and `height`.

    `height` and `width` are > 0. Source: the modded-nanogpt speedrun, with 23 sigmoid((logit + 5) / 7.5).
    """

    height: float
    shift: float
    width: float


class Problem(NamedTuple):
    """The inputs of a loss, checked and flattened."""

    x: Tensor
    """(tokens, d), any strides."""
    weight: Tensor
    """(stored vocabulary, d), or (d, stored vocabulary) if `transposed`; any strides, any float dtype."""
    targets: Tensor
    """(tokens, K) int64."""
    target_weights: Tensor | None
    """(tokens, K), any strides."""
    fp8: Fp8Scales | None
    softcap: tuple[float, ...] | None
    """One number for tanh, the three of a `SigmoidCap`, or None for no cap."""
    ignore_index: int
    vocab_size: int
    transposed: bool


class Wanted(NamedTuple):
    """The gradients to compute, and their scale."""

    scale: Tensor
    """() for all tokens or (tokens,): factor of each token's loss."""
    for_x: bool
    for_weight: bool
