"""Attention of each position over the table rows of its own token: the read of a large lookup layer.

Two tables, of keys and of values, have rows of width d; token t owns rows offsets[t] to offsets[t + 1], any number of
them. With K_t and V_t these rows of keys and values, position i with token t and hidden state x_i gets

    out_i = V_t^T p_i,   p_i = softmax(K_t x_i)

and, with g_i the gradient of out_i, the backward pass is

    ds_i = p_i * (V_t g_i - g_i . out_i)   dx_i = K_t^T ds_i   dK_t = sum_i ds_i x_i^T   dV_t = sum_i p_i g_i^T

Positions are sorted by token, once for all layers (`plan_lookup`). A tile of sorted positions then reads few contiguous
ranges of rows, and the positions that read a tile of rows are one contiguous range. So gradients of the tables are
summed in a fixed order without atomics, nothing waits for the device, and no list of rows is padded to the longest.

Source: Tseng and De Sa, L3: Large Lookup Layers (2026), https://arxiv.org/abs/2601.21461. Read next: segments.py.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quintic.kernels.dispatch import KernelsOption, decide, obstacle_to_triton
from quintic.kernels.lookup.segments import launch_lookup, launch_lookup_backward

__all__ = ["LookupPlan", "lookup", "obstacle_to_lookup", "plan_lookup"]

# Positions that the twin takes at a time: it reads all rows between its first and its last token. Up to _FEW_POSITIONS
# positions it takes one at a time, because their tokens lie far apart.
_TWIN_POSITIONS, _FEW_POSITIONS = 64, 16


class LookupPlan(NamedTuple):
    """The N positions of a batch sorted by token."""

    order: Tensor
    """(N,) int64: indices of the positions, sorted by token and then by index."""
    tokens: Tensor
    """(N,) int32: the token of each position in `order`."""
    starts: Tensor
    """(vocabulary + 1,) int32: index in `order` of each token's first position; the last entry is N."""
    owners: Tensor
    """(rows,) int32: the token to which each row of the tables belongs."""


def plan_lookup(tokens: Tensor, offsets: Tensor, num_rows: int) -> LookupPlan:
    """Return the positions sorted by token, for `lookup` in all layers.

    Args:
        tokens: int64 of any shape, in [0, vocabulary).
        offsets: (vocabulary + 1,) int32, strictly increasing from 0 to `num_rows`.
        num_rows: number of rows of a table.
    """
    # Stable, so that sums over positions have one order.
    in_order, order = tokens.flatten().sort(stable=True)
    vocabulary = torch.arange(len(offsets), dtype=in_order.dtype, device=tokens.device)
    starts = torch.searchsorted(in_order, vocabulary, out_int32=True)
    rows = torch.arange(num_rows, dtype=offsets.dtype, device=tokens.device)
    owners = torch.searchsorted(offsets, rows, right=True, out_int32=True) - 1
    return LookupPlan(order, in_order.int(), starts, owners)


def lookup(
    x: Tensor,
    keys: Tensor,
    values: Tensor | None,
    offsets: Tensor,
    plan: LookupPlan,
    *,
    kernels: KernelsOption = "auto",
) -> Tensor:
    """Return for each position the value rows of its token, weighted by softmax(keys x) and summed.

    Rows are rounded to the dtype of `x` when they are read, and multiplied in it; sums and the softmax are float32
    (float64 for float64). Gradients of the tables are dense, and have the same bits in every run.

    Args:
        x: (..., d) float32, bfloat16 or float16 (float64 without kernels); its positions are those of `plan`.
        keys: (rows, d), any float dtype.
        values: (rows, d), any float dtype; None for tied tables, whose values are the keys.
        offsets: as for `plan_lookup`.
        plan: from `plan_lookup`.
        kernels: `"auto"` takes Triton on CUDA devices; `"torch"` is plain PyTorch, which synchronises with the device.

    Returns:
        (..., d) in the dtype of `x`, differentiable in `x`, `keys` and `values`; gradients have their dtypes.

    Raises:
        ValueError: shapes do not fit, or `kernels="triton"` cannot be honoured.
    """
    positions, shapes = math.prod(x.shape[:-1]), {keys.shape, keys.shape if values is None else values.shape}
    if shapes != {(len(plan.owners), x.shape[-1])} or positions != len(plan.order):
        raise ValueError(
            f"x {tuple(x.shape)} and tables {[tuple(shape) for shape in shapes]}: the plan is for "
            f"{len(plan.order)} positions and tables of ({len(plan.owners)}, {x.shape[-1]})"
        )
    out: Tensor = torch.ops.quintic.lookup(x.reshape(-1, x.shape[-1]), keys, values, offsets, *plan, kernels)[0]
    return out.view(x.shape)


def obstacle_to_lookup(*tensors: Tensor) -> str | None:
    """Return why Triton cannot compute a lookup in these tensors, or None."""
    wrong = [tensor.dtype for tensor in tensors if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return obstacle_to_triton(tensors[0].device, "x") or (f"{wrong[0]} has no kernel" if wrong else None)


# --------------------------------------------------------------------------------------------------------------- twin


def _position_tiles(plan: LookupPlan, offsets: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Yield (positions, range of rows, mask) for tiles of positions.

    The range holds the rows of all their tokens; the mask (positions, rows) is true for rows of the position's token.
    """
    count = len(plan.order)
    size = _TWIN_POSITIONS if count > _FEW_POSITIONS else 1
    starts = range(0, count, size)
    lasts = [min(start + size, count) - 1 for start in starts]
    begins = offsets[plan.tokens[list(starts)]].tolist()
    ends = offsets[plan.tokens[lasts] + 1].tolist()
    for start, last, begin, end in zip(starts, lasts, begins, ends, strict=True):
        places, rows = slice(start, last + 1), slice(begin, end)
        yield plan.order[places], rows, plan.tokens[places, None] == plan.owners[rows]


def _wide(tensor: Tensor, x: Tensor) -> Tensor:
    """Round a tensor to the dtype of `x` and widen it again, for products with float32 sums."""
    return tensor.to(x.dtype).to(torch.promote_types(x.dtype, torch.float32))


def _lookup_twin(x: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, plan: LookupPlan) -> tuple[Tensor, Tensor]:
    # x (N, d), keys and values (rows, d) -> outputs (N, d) and the log-sum-exp of each softmax (N,)
    out, lse = _empty(x)
    for i, rows, together in _position_tiles(plan, offsets):
        scores = (_wide(x[i], x) @ _wide(keys[rows], x).mT).masked_fill_(~together, -math.inf)
        lse[i] = scores.logsumexp(1)
        out[i] = (_wide((scores - lse[i, None]).exp_(), x) @ _wide(values[rows], x)).to(x.dtype)
    return out, lse


def _backward_twin(
    grad: Tensor, x: Tensor, keys: Tensor, values: Tensor, lse: Tensor, delta: Tensor, offsets: Tensor, plan: LookupPlan
) -> tuple[Tensor, Tensor, Tensor]:
    # grad and x (N, d), keys and values (rows, d), lse and delta (N,) -> gradients of x, keys and values
    grad_x, grad_keys = torch.empty_like(x), torch.zeros_like(keys, dtype=lse.dtype)
    grad_values = grad_keys if values is keys else torch.zeros_like(grad_keys)
    for i, rows, together in _position_tiles(plan, offsets):
        low_x, low_grad, low_keys = _wide(x[i], x), _wide(grad[i], x), _wide(keys[rows], x)
        weights = (low_x @ low_keys.mT - lse[i, None]).masked_fill_(~together, -math.inf).exp_()
        scores = _wide(weights * (low_grad @ _wide(values[rows], x).mT - delta[i, None]), x)
        grad_x[i] = (scores @ low_keys).to(x.dtype)
        grad_keys[rows] += scores.mT @ low_x
        grad_values[rows] += _wide(weights, x).mT @ low_grad
    return grad_x, grad_keys.to(keys.dtype), grad_values.to(keys.dtype)


# ---------------------------------------------------------------------------------------------------------- operators

_TABLES = "Tensor keys, Tensor? values, Tensor offsets, Tensor order, Tensor tokens, Tensor starts, Tensor owners"


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


def _takes_triton(kernels: str, x: Tensor, keys: Tensor) -> bool:
    return decide(cast(KernelsOption, kernels), x.device, lambda: obstacle_to_lookup(x, keys))[0] == "triton"


@torch.library.custom_op(
    "quintic::lookup", mutates_args=(), schema=f"(Tensor x, {_TABLES}, str kernels) -> (Tensor, Tensor)"
)
def _lookup(x: Tensor, keys: Tensor, values: Tensor | None, offsets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, d), and for the backward pass the log-sum-exp of each softmax (N,)."""
    x, keys = x.contiguous(), keys.contiguous()
    compute = launch_lookup if _takes_triton(others[-1], x, keys) else _lookup_twin
    return compute(x, keys, keys if values is None else values.contiguous(), offsets, LookupPlan(*others[:-1]))


_lookup.register_fake(lambda x, *others: _empty(x))


@torch.library.custom_op(
    "quintic::lookup_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor out, Tensor lse, {_TABLES}, str kernels) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor, x: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, keys and values; for tied tables the second is the sum of both, the third is empty."""
    offsets, *plan, kernels = others
    grad, x, keys = grad.contiguous(), x.contiguous(), keys.contiguous()
    # g_i . out_i, (N,).
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(1)
    compute = launch_lookup_backward if _takes_triton(kernels, x, keys) else _backward_twin
    full = keys if values is None else values.contiguous()
    grad_x, grad_keys, grad_values = compute(grad, x, keys, full, lse, delta, offsets, LookupPlan(*plan))
    return grad_x, grad_keys, keys.new_empty(0) if values is None else grad_values


@_backward.register_fake
def _backward_fake(
    grad: Tensor, x: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), keys.new_empty(keys.shape), keys.new_empty((0,) if values is None else keys.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *tables, ctx.kernels = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, *output, *tables)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_x, grad_keys, grad_values = torch.ops.quintic.lookup_backward(grad, *ctx.saved_tensors, ctx.kernels)
    return grad_x, grad_keys, grad_values if ctx.needs_input_grad[2] else None, *(None,) * 6


_lookup.register_autograd(_differentiate, setup_context=_setup)
