"""The kinds of matrices in a bucket, and the dtypes that they are computed in.

Directions are rounded to `direction_dtype` before they are orthogonalised, and updates travel in `update_dtype`. Both
follow from the form and the dtype of the weights, never from the layout: every layout orthogonalises the same bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quintic.optim.groups.group import Group
from quintic.optim.layout.views import View
from quintic.optim.polar.forms import Form, resolve
from quintic.optim.state.owners import shape_cost

__all__ = [
    "ADAMW_BYTES",
    "Kind",
    "adamw_entries",
    "direction_dtype",
    "form_of",
    "kind_of",
    "kinds_of",
    "update_dtype",
]

# Temporary bytes per entry of the plain AdamW update, which keeps up to seven float64 tensors at a time.
ADAMW_BYTES = 7 * 8


class Kind(NamedTuple):
    """Matrices of one shape, and how they are orthogonalised."""

    shape: tuple[int, int]  # (m, n)
    form: Form | None  # None if the orthogonalizer is a user's function
    num_rounds: int = 1  # how often the rule orthogonalises

    @property
    def flops(self) -> int:
        """Return the floating-point operations of one of them; 0 for a user's function."""
        return 0 if self.form is None else self.num_rounds * self.form.flops(*self.shape)

    @property
    def cost(self) -> int:
        """Return the floating-point operations of one of them, estimated for a user's function."""
        return self.num_rounds * shape_cost(*self.shape) if self.form is None else self.flops


def kinds_of(
    view: View, shape: Sequence[int], group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[Kind, ...]:
    """Return the matrices of a unit of `shape`, with their forms for a dtype and device."""
    # Views give (b, m, n) for each block, which is b matrices.
    shapes = [(m, n) for b, m, n in view.shapes(shape) for _ in range(b)]
    return tuple(kind_of(group, m, n, dtype, device) for m, n in shapes)


def kind_of(group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Kind:
    """Return a group's (m, n) matrices of a dtype, on a device."""
    stage = group.rule.polar
    return Kind((m, n), form_of(group, m, n, dtype, device), 1 if stage is None else stage.rounds_of(m, n))


def form_of(group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Form | None:
    """Return the form for a group's (m, n) matrices of a dtype; None if the orthogonalizer is a user's function."""
    if callable(group.orthogonalizer):
        return None
    return resolve(
        group.orthogonalizer,
        m,
        n,
        steps=group.orthogonalizer_steps,
        coefficients=group.coefficients,
        compute_dtype=group.compute_dtype,
        device_type=device.type,
        dtype=dtype,
    )


def adamw_entries(max_workspace_bytes: int | None) -> int | None:
    """Return the number of entries that the plain AdamW update may work on at a time; None for no limit."""
    return None if max_workspace_bytes is None else max(1, max_workspace_bytes // ADAMW_BYTES)


def direction_dtype(form: Form | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that update directions are rounded to before they are orthogonalised, in every layout."""
    # bfloat16 also for float16 products: its range holds directions of any size, which are normalised only afterwards.
    if form is not None and form.compute_dtype in (torch.bfloat16, torch.float16):
        return torch.bfloat16
    return torch.float64 if dtype == torch.float64 else torch.float32


def update_dtype(form: Form | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which updates are sent: the products' dtype, or for a user's function that of directions."""
    return direction_dtype(form, dtype) if form is None else form.compute_dtype
