"""Records that describe one computation of the loss: inputs, cap, 8-bit scales, and the gradients to compute."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Fp8Scales", "Problem", "SigmoidCap", "Wanted"]


class Fp8Scales(NamedTuple):
    """Scales of the 8-bit products, () float32 > 0 on the device of `x`: value = quantised * scale.

    `x` and `weight` are quantised as e4m3. `grad` is the scale of the gradient of the logits before the cap, as e5m2:

    - For reductions "sum" and "mean" it is the gradient of the *sum* of the losses; a mean is divided afterwards. No
      entry exceeds the token's sum of absolute target weights, which is 1 for a single target, so that 1 / 57344 of
      that sum never saturates.
    - For "none" it includes the upstream gradient of each token.

    A `SigmoidCap` multiplies these gradients by at most height / (4 width).
    """

    x: Tensor
    weight: Tensor
    grad: Tensor


class SigmoidCap(NamedTuple):
    """A cap of logits, height * sigmoid((logit + shift) / width): capped logits lie between 0 and `height`.

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
    """(cap,) for cap tanh(logit / cap), the three numbers of a `SigmoidCap`, or None for no cap."""
    ignore_index: int
    vocab_size: int
    transposed: bool


class Wanted(NamedTuple):
    """Which gradients to compute, and their scale."""

    scale: Tensor
    """Factor of each token's loss: () for one factor, or (tokens,)."""
    for_x: bool
    for_weight: bool
