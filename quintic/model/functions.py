"""Functions without weights that the models share: normalisation, rotary positions.

The file needs only torch, because exports have a copy of it. Shape suffixes as in layers.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rms_norm", "rotary_tables", "rotate"]


def rms_norm(x: Tensor) -> Tensor:
    """Return `x` divided by its root mean square along the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def rotary_tables(length: int, head_dim: int, *, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines for `rotate`: two (length, head_dim) float32 tensors.

    Channel i and channel i + head_dim / 2 rotate by the angle position x base^(-2 i / head_dim) (RoFormer, arXiv
    2104.09864, eq. 15); the sines of the first half are negated.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)  # (D / 2,)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)  # (length, D / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor, *, parts: int = 1) -> Tensor:
    """Rotate queries or keys: the first half of the channels against the second, by the position's angle.

    Args:
        x_BTHD: (B, T, H, D) queries or keys.
        cos: (T, D) from `rotary_tables`, or (B, T, D) if positions differ between rows.
        sin: of the same shape.
        parts: split the channels into this many equal ranges, and rotate the halves of each range.

    Returns:
        (B, T, H, D).
    """
    cos, sin = cos.unsqueeze(-2).to(x_BTHD.dtype), sin.unsqueeze(-2).to(x_BTHD.dtype)  # (..., T, 1, D)
    half = x_BTHD.shape[-1] // (2 * parts)
    # Whole-tensor products compile to one kernel. Computing each half and concatenating them takes one for each.
    partners_BTHD: Tensor = x_BTHD.unflatten(-1, (parts, -1)).roll(half, dims=-1).flatten(-2)
    return x_BTHD * cos + partners_BTHD * sin
