"""The inputs of a loss, and which gradients are wanted."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Fp8Scales", "Problem", "Wanted"]


class Fp8Scales(NamedTuple):
    """Scales of the products in 8 bits: () float32 > 0 on the device of `x`, value = quantised * scale.

    `x` and `weight` are quantised as e4m3. `grad` is for the gradient with respect to the logits before the cap, e5m2:
    of the *sum* of the losses for reductions "sum" and "mean" (a mean is divided afterwards), so that its entries lie
    within a token's sum of absolute weights, 1 for a single target, and 1 / 57344 of that never saturates; with the
    upstream gradient of each token included for "none".
    """

    x: Tensor
    weight: Tensor
    grad: Tensor


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
    softcap: float | None
    ignore_index: int
    vocab_size: int
    transposed: bool


class Wanted(NamedTuple):
    """Which gradients, and times what."""

    scale: Tensor
    """() for all tokens or (tokens,): factor of each token's loss."""
    for_x: bool
    for_weight: bool
