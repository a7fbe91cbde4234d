"""Element-wise stages of rules on some entries of weights: what `step/torch_backend.py` and the reference both run.

Tensors at the same position of two lists belong together. State is advanced as `wide_state.py` says. Where
a mask, broadcast to the tensors, is zero, weights and state keep their bits; None is for nowhere.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quintic.optim.numeric.precision import full_precision, store_
from quintic.optim.rules.stages import DriftStage, GradientStage, StageOptions
from quintic.optim.rules.wide_state import store, widened

__all__ = ["drift_", "keep_and_step_", "stage_direction_", "wide_weight"]


def wide_weight(weight: Tensor, master: Tensor | None) -> Tensor:
    """Return a weight in float32, or float64 if it is so; with the bits of its master. It may be the weight itself."""
    current = weight if master is None else full_precision(weight, master)
    return current.to(torch.promote_types(weight.dtype, torch.float32))


def stage_direction_(
    stage: GradientStage,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    options: StageOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the direction of a gradient stage, in the dtype of its arithmetic, and advance its state in place."""
    # All have the shape of the gradient, which may be a piece of a parameter's.
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    new = widened(state, [spec.name for spec in stage.state])
    direction = stage.apply(wide, new, options)
    store(state, new, mask)
    return direction


def keep_and_step_(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor | None],
    updates: Sequence[Tensor],
    keep: Sequence[Tensor],
    rate: Sequence[Tensor],
    masks: Sequence[Tensor | None],
) -> None:
    """Replace weights by keep w - rate u; factors are broadcast to weights."""
    # weight, update (..., m, n); factors (..., m or 1, n or 1)
    for weight, master, update, kept, rated, mask in zip(weights, masters, updates, keep, rate, masks, strict=True):
        current = wide_weight(weight, master)
        _put(weight, master, current * kept - update.to(current.dtype) * rated, current, mask)


def drift_(
    stage: DriftStage,
    weight: Tensor,
    master: Tensor | None,
    before: Tensor,
    state: Mapping[str, Tensor],
    options: StageOptions,
    mask: Tensor | None = None,
) -> None:
    """Add a stage's drift to a weight, given the weight before its step, in float32 or float64."""
    current = wide_weight(weight, master)
    new = widened(state, [spec.name for spec in stage.state])
    addition = stage.apply(current - before, new, options)
    store(state, new, mask)
    _put(weight, master, current + addition, current, mask)


def _put(weight: Tensor, master: Tensor | None, value: Tensor, current: Tensor, mask: Tensor | None) -> None:
    """Store a value in a weight and its master where the mask is not zero."""
    if mask is not None:
        value = torch.where(mask != 0, value, current)
    if master is None:
        weight.copy_(value)
    else:
        store_(weight, master, value)
