"""Reads and copies values of optimizer state. The rules (`rules/rule.py`) declare names, shapes and dtypes.

| name                     | shape                             | dtype                               |
|--------------------------|-----------------------------------|-------------------------------------|
| `momentum_buffer`        | of the parameter                  | float32, or `state_dtype`           |
| `second_momentum_buffer` | (rows or columns of all matrices) | float32                             |
| `exp_avg`, `exp_avg_sq`  | of the parameter                  | float32, or `state_dtype`           |
| `step`                   | ()                                | float32                             |
| `master`                 | of the parameter                  | float32, `master="fp32"`            |
| `mantissa`               | of the parameter                  | uint16, `master="mantissa"`         |
| `mantissa_byte`          | of the parameter                  | uint8, `master="8bit"`              |

This is the state of Muon, NorMuon, AdamW and of masters; `docs/reference/rules.md` has that of all rules. With
`state_dtype="int8"` momentum and `exp_avg` are int8 and `exp_avg_sq` is uint8, see `int8_state.py`.

Only parameters below float32 have masters, see `precision.py`; float64 parameters keep float64 state. When the state of
one parameter is first needed, it is made for all, so that every checkpoint has the same keys (`sync.py`). State of a
parameter's shape is a `DTensor` if the parameter is one; everything else is whole on every rank (`placement.py`).
`checkpoint/` saves and loads it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.layout.layouts import intersection, is_dtensor, layout_of, local_tensor, numel_of, relative
from quintic.optim.layout.views import View
from quintic.optim.numeric.int8_state import is_packed, read_packed, store_packed_
from quintic.optim.rules.rule import MASTER_SPECS
from quintic.optim.rules.stages import StateSpec
from quintic.optim.state.placement import cuts_groups

__all__ = [
    "MASTER_KEYS",
    "as_numbers",
    "as_tensor",
    "copy_",
    "master_key",
    "master_of",
    "piece_of",
    "saved_tensor",
    "separate_sources",
    "vectors_of",
]

MASTER_KEYS = tuple(spec.name for spec in MASTER_SPECS.values())
"""Names of the three forms of a 16-bit parameter's extra precision; it has at most one of them."""


def master_key(state: Mapping[str, Tensor]) -> str | None:
    """Return the state key of a parameter's extra precision, one of `MASTER_KEYS`, or None."""
    return next((key for key in MASTER_KEYS if key in state), None)


def master_of(state: Mapping[str, Tensor]) -> Tensor | None:
    """Return the float32 master or the mantissa of a parameter, or None."""
    key = master_key(state)
    return None if key is None else state[key]


def vectors_of(spec: StateSpec, buffer: Tensor, shape: Sequence[int], view: View) -> list[Tensor]:
    """Return vector state of a whole parameter as views, (b, m or 1, n or 1) for each kind of matrix.

    `buffer` is (numbers of all matrices,), `shape` the whole parameter's.
    """
    shapes = [(b, spec.vector_shape(m, n)) for b, m, n in view.shapes(shape)]
    # One vector for all kinds of matrices, one kind after the other.
    pieces = buffer.split([b * m * n for b, (m, n) in shapes])
    return [piece.view(b, m, n) for piece, (b, (m, n)) in zip(pieces, shapes, strict=True)]


def piece_of(what: str, target: Tensor, source: Tensor) -> Tensor | None:
    """Return this rank's piece of a saved tensor, for a state of the same whole shape; None if the rank holds nothing.

    Args:
        what: the name of the saved tensor, for errors.
        target: the state, or its parameter, a plain tensor or `DTensor`.
        source: the saved tensor, whole or a `DTensor`.

    Raises:
        ValueError: the saved tensor is a `DTensor` that does not have, on some rank, the piece which that rank needs.
    """
    # None for plain tensors, which are whole.
    layout, saved_layout = layout_of(what, target), layout_of(what, source)
    whole = tuple((0, size) for size in target.shape)
    rank = this_rank()
    if saved_layout is not None and saved_layout != layout:
        # Check the pieces of all ranks, so that all of them load or all raise.
        for other in (*saved_layout.ranks, rank) if layout is None else layout.ranks:
            needed = whole if layout is None else layout.box_of(other)
            held = saved_layout.box_of(other) if other in saved_layout.ranks else None
            if numel_of(needed) and (held is None or intersection(needed, held) != needed):
                raise ValueError(
                    f"{what} is a DTensor, and rank {other} does not hold the piece of it that it needs; save with "
                    f"torch.distributed.checkpoint.save and load into the state dict of this optimizer, or save with "
                    f"full_state_dict=True"
                )
    if layout is not None and rank not in layout.ranks:
        return None
    # The box that this rank needs, in coordinates of the box that the saved tensor has here.
    box = whole if layout is None else layout.box_of(rank)
    if not numel_of(box):
        return None
    return local_tensor(source)[relative(box, whole if saved_layout is None else saved_layout.box_of(rank))]


def as_tensor(value: Any) -> Tensor:
    """Return a value of state as a tensor; a number becomes one on the CPU, also if another default device is set."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def saved_tensor(value: Any, what: str) -> Tensor:
    """Return a value of saved state as a tensor.

    Raises:
        ValueError: it is not a dense tensor of real numbers; the message begins with `what`.
    """
    # A number, or a nested list of them, becomes a tensor.
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(value).__name__}, and must be a tensor") from None
    # Kinds of tensors that `copy_` would fail on, or copy wrongly.
    for is_so, kind in (
        (tensor.is_meta, "on the meta device, without values"),
        (tensor.layout is not torch.strided, f"sparse ({tensor.layout})"),
        (tensor.is_complex(), str(tensor.dtype)),
    ):
        if is_so:
            raise ValueError(f"{what} is {kind}, and must be a dense tensor of real numbers")
    return tensor


def as_numbers(state: Tensor) -> Tensor:
    """Return averages of 8 bits in float32, a plain tensor or `DTensor` as they are, and other state itself.

    All ranks of a `DTensor` must call it.
    """
    if not is_packed(state):
        return state
    if is_dtensor(state) and cuts_groups(layout_of("", state)):
        from torch.distributed.tensor import distribute_tensor

        whole = read_packed(state.full_tensor())
        return distribute_tensor(whole, state.device_mesh, state.placements, src_data_rank=None)
    wide = torch.empty_like(state, dtype=torch.float32)
    local_tensor(wide).copy_(read_packed(local_tensor(state)))
    return wide


def copy_(target: Tensor, source: Tensor) -> None:
    """Copy state in place, from any device and dtype, to or from 8 bits; a mantissa may be any integer dtype."""
    if target.dtype != source.dtype:
        # Averages of 8 bits stand for the numbers that they are read as.
        if is_packed(source) and target.dtype.is_floating_point:
            source = read_packed(source)
        elif is_packed(target) and source.dtype.is_floating_point:
            # A `DTensor` may have the layout of another one.
            wide = torch.empty_like(target, dtype=torch.float32).copy_(source)
            return store_packed_(local_tensor(target), local_tensor(wide))
    if target.dtype == torch.uint16 and source.dtype != torch.uint16:
        target = target.view(torch.int16)  # the cast keeps the low 16 bits
    target.copy_(source)


def separate_sources(copies: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return copies (target, source) that may be made one after the other: no target is the memory of a later source.

    Saved tensors may be this optimizer's own, such as after `torch.distributed.checkpoint.load` into its state dict,
    and belong to other parameters than their memory does.
    """
    memory = [[local_tensor(one).untyped_storage().data_ptr() for one in pair] for pair in copies]
    targets = {target for target, _ in memory}
    return [
        (target, source.clone() if place != own and place in targets else source)
        for (target, source), (own, place) in zip(copies, memory, strict=True)
    ]
