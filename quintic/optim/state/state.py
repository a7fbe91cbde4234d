"""Optimizer state: values of it, read and copied. Names, shapes and dtypes are declared by the rules (`rules/rule.py`).

| rule      | name                     | shape                             | dtype                          |
|-----------|--------------------------|-----------------------------------|--------------------------------|
| any Muon  | `momentum_buffer`        | of the parameter                  | float32, or `state_dtype`      |
| NorMuon   | `second_momentum_buffer` | (rows or columns of all matrices) | float32                        |
| AdaMuon   | `element_second_moment`  | of the parameter                  | float32, or `state_dtype`      |
| AdamW     | `exp_avg`, `exp_avg_sq`  | of the parameter                  | float32, or `state_dtype`      |
| AdamW     | `step`                   | ()                                | float32                        |
| any       | `master`                 | of the parameter                  | float32, `master="fp32"`       |
| any       | `mantissa`               | of the parameter                  | uint16, `master="mantissa"`    |

Masters belong to parameters of less than float32 only, see `precision.py`; float64 parameters keep float64 state.
As soon as one parameter's state is needed all have theirs, so that every checkpoint has the same keys (`sync.py`).
State of a parameter's shape is a `DTensor` in the parameter's layout where the parameter is one; everything else is
whole on every rank (`placement.py`). `checkpoint/` saves and loads it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.layout.layouts import intersection, layout_of, local_tensor, numel_of, relative
from quintic.optim.layout.views import View
from quintic.optim.rules.rule import MASTER_SPECS
from quintic.optim.rules.update import second_moment_shape

__all__ = [
    "CODE_KEYS",
    "MASTER_KEYS",
    "as_tensor",
    "copy_",
    "master_key",
    "master_of",
    "piece_of",
    "saved_tensor",
    "second_moments",
]

CODE_KEYS = ("orthogonalizer", "adjust_lr", "compute_dtype", "kernels", "qk_clip", "process_group")
"""Options that may be functions, or are no plain values: saved as text for people, and not restored."""

MASTER_KEYS = tuple(spec.name for spec in MASTER_SPECS.values())
"""Names of the two forms of a low-precision parameter's extra precision; it has one of them, or none."""


def master_key(state: Mapping[str, Tensor]) -> str | None:
    """Return the state key of a parameter's extra precision: `master`, `mantissa`, or None."""
    return next((key for key in MASTER_KEYS if key in state), None)


def master_of(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return the float32 master or the mantissa of a parameter, or None."""
    key = master_key(state)
    return None if key is None else state[key]


def second_moments(buffer: Tensor, shape: Sequence[int], view: View) -> list[Tensor]:
    """Return NorMuon's second moments of a whole parameter as one (b, m, 1) or (b, 1, n) per batch, sharing memory."""
    shapes = [(b, second_moment_shape(m, n)) for b, m, n in view.shapes(shape)]
    pieces = buffer.split([b * m * n for b, (m, n) in shapes])
    return [piece.view(b, m, n) for piece, (b, (m, n)) in zip(pieces, shapes, strict=True)]


def piece_of(what: str, target: Tensor, source: Tensor) -> Tensor | None:
    """Return the part of a saved tensor that this rank holds of a state of the same shape; None if it holds nothing.

    Raises:
        ValueError: the saved tensor is a `DTensor` of which some rank does not hold what it needs.
    """
    layout, saved_layout = layout_of(what, target), layout_of(what, source)
    whole = tuple((0, size) for size in target.shape)
    rank = this_rank()
    if saved_layout is not None and saved_layout != layout:
        # The same answer on all ranks, so that none of them loads what another one refuses.
        for other in (*saved_layout.ranks, rank) if layout is None else layout.ranks:
            needed = whole if layout is None else layout.box_of(other)
            held = saved_layout.box_of(other) if other in saved_layout.ranks else None
            if numel_of(needed) and (held is None or intersection(needed, held) != needed):
                raise ValueError(
                    f"{what} is a DTensor of which rank {other} does not hold the part that it needs; save with "
                    f"torch.distributed.checkpoint.save and load into the state dict of this optimizer, or save with "
                    f"full_state_dict=True"
                )
    if layout is not None and rank not in layout.ranks:
        return None
    box = whole if layout is None else layout.box_of(rank)
    if not numel_of(box):
        return None
    return local_tensor(source)[relative(box, whole if saved_layout is None else saved_layout.box_of(rank))]


def as_tensor(value: Any) -> Tensor:
    """Return a value of state: a tensor as it is, a number as one on the CPU, whatever the default device is."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def saved_tensor(value: Any, what: str) -> Tensor:
    """Return a value of saved state as a tensor.

    Raises:
        ValueError: it cannot be copied to state, which holds dense real numbers; the message begins with `what`.
    """
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(value).__name__}, and must be a tensor") from None
    for is_so, kind in (
        (tensor.is_meta, "on the meta device, without values"),
        (tensor.layout is not torch.strided, f"sparse ({tensor.layout})"),
        (tensor.is_complex(), str(tensor.dtype)),
    ):
        if is_so:
            raise ValueError(f"{what} is {kind}, and must be a dense tensor of real numbers")
    return tensor


def copy_(target: Tensor, source: Tensor) -> None:
    """Copy state in place, from whatever device and dtype; mantissas come as any integers."""
    if target.dtype == torch.uint16 and source.dtype != torch.uint16:
        target = target.view(torch.int16)  # the cast keeps the low 16 bits
    target.copy_(source)
