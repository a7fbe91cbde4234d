"""State as stages advance it: copies in float32 or wider, rounded once when they are stored."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["store", "widened"]


def widened(kept: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of the named state for a stage to advance: float32 of bfloat16 state, else in its own dtype."""
    return {name: kept[name].clone() if kept[name].itemsize >= 4 else kept[name].float() for name in names}


def store(kept: Mapping[str, Tensor], wide: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
    """Round advanced copies into the state they were made of.

    Args:
        kept: state by name, changed in place.
        wide: what `widened` returned.
        mask: broadcast to the tensors; where it is zero, state keeps its bits. None stores everything.
    """
    for name, value in wide.items():
        old = kept[name]
        # Rounded before the choice, which would be made in float32 else: NaN would come back with other bits.
        old.copy_(value if mask is None else torch.where(mask != 0, value.to(old.dtype), old))
