"""What a search launches the tunable kernels with: large inputs to time, small and ragged ones to compare bits on.

Import this module only where Triton is installed (see `dispatch.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.adamw import adamw_programs, adamw_tensors_
from quintic.kernels.configurations import (
    ADAMW,
    MOMENTUM,
    RELU2_LARGE,
    RELU2_POINTERS,
    RELU2_SMALL,
    SYMMETRIC,
    WEIGHTS,
    Tunable,
)
from quintic.kernels.fp8_quantize import obstacle_to_fp8
from quintic.kernels.matrix_update import MatrixLayout, apply_updates_, momentum_directions_
from quintic.kernels.relu2 import device_limits, product_relu2
from quintic.kernels.symmetric import symmetric_multiply

__all__ = ["Problem", "Run", "Subject", "subjects"]

Run = Callable[[], Sequence[Tensor]]
"""Launches a kernel once and returns what it wrote: new tensors, or its own again where it works in place."""

Problem = Callable[[torch.device], Run]
"""Makes the same inputs whenever it is called."""


class Subject(NamedTuple):
    """What a search does with one kernel on one device."""

    tunable: Tunable[Any]
    timed: Sequence[Problem]
    compared: Sequence[Problem]
    """Every way through the kernel that a configuration might change, with sizes that are no multiples of blocks."""
    obstacle: str | None = None
    """Why the kernel cannot be launched there, or None."""


def subjects(device: torch.device) -> list[Subject]:
    """Return all kernels that can be tuned, for a device or, with compared problems alone, for Triton's interpreter."""
    # The interpreter has no reliable bfloat16.
    low, other = (torch.float16, torch.float16) if device.type == "cpu" else (torch.bfloat16, torch.float16)
    programs, has_descriptors = device_limits(device)
    no_descriptors = None if has_descriptors else "only devices of compute capability 9.x and 10.x launch it"
    # As many rows of tiles as it takes to have a tile of `relu2_large` for every multiprocessor.
    many_rows = 128 * math.ceil(programs / 2) - 28
    # Rows of an odd length have no descriptors.
    inner = 769 if has_descriptors else 768

    def relu2(tunable: Tunable[Any], obstacle: str | None, timed: list[Problem], m: int, n: int, k: int) -> Subject:
        compared = [_relu2(m, n, k, low), _relu2(m, n, k, other, backward=True)]
        if device.type == "cuda" and obstacle_to_fp8(device) is None:
            compared.append(_relu2(m, n, k, torch.float8_e4m3fn))
        return Subject(tunable, timed, compared, obstacle)

    return [
        Subject(
            MOMENTUM,
            [_momentum(32, 1024, 1024, low)],
            [
                _momentum(3, 67, 101, torch.float32, gap=3),
                _momentum(2, 64, 96, low),
                _momentum(2, 67, 101, other, guarded=True),
            ],
        ),
        Subject(
            WEIGHTS,
            [_weights(32, 1024, 1024, low, None), _weights(32, 1024, 1024, torch.bfloat16, torch.uint16)],
            [
                _weights(3, 67, 101, torch.float32, None, gap=3, per_row=True, cautious=True),
                _weights(2, 64, 96, torch.bfloat16, torch.uint16),
                _weights(2, 67, 101, other, torch.float32, per_row=True),
            ],
        ),
        Subject(
            ADAMW,
            [_adamw([2**25], low, None), _adamw([2**16 + 24] * 256, low, None)],
            [
                _adamw([6767, 5, 1024], torch.float32, None, cautious=True),
                _adamw([6767, 4096], torch.bfloat16, torch.uint16),
                _adamw([1000, 2001], other, torch.float32),
            ],
        ),
        Subject(
            SYMMETRIC,
            [_symmetric(24, 768, 768, low), _symmetric(2, 2048, 2048, low), _symmetric(4, 1024, 4096, low)],
            [
                _symmetric(2, 256, 192, low),
                _symmetric(2, 300, 500, low, add=True, turned=True),
                _symmetric(1, 300, 130, other, turned=True),
                _symmetric(1, 384, 256, other, add=True),
            ],
        ),
        relu2(
            RELU2_LARGE,
            no_descriptors,
            [_relu2(16384, 3072, 768, low), _relu2(16384, 3072, 768, low, backward=True)],
            *(many_rows, 400, 272),
        ),
        relu2(RELU2_SMALL, no_descriptors, [_relu2(1024, 2048, 4096, low)], 100, 144, 272),
        relu2(RELU2_POINTERS, None, [_relu2(8192, 3072, inner, low)], 140, 133, 263),
    ]


class _Draw:
    """Random tensors, the same for every new instance."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint16:
            bits = torch.empty(shape, dtype=torch.int16, device=self._device)
            return bits.random_(-(2**15), 2**15, generator=self._generator).view(torch.uint16)
        values = torch.empty(shape, dtype=torch.float32, device=self._device)
        if self._device.type == "cpu":
            # Sums of these are exact: the interpreter adds the terms of a block in an order of its own.
            return (values.random_(-2, 3, generator=self._generator) / 4).to(dtype)
        return values.normal_(generator=self._generator).to(dtype)


def _symmetric(
    count: int, side: int, inner: int, dtype: torch.dtype, *, add: bool = False, turned: bool = False
) -> Problem:
    def make(device: torch.device) -> Run:
        draw = _Draw(device)
        a = draw(count, side, inner, dtype=dtype)
        b = a.mT.contiguous() if turned else a.mT
        c = draw(count, side, side, dtype=dtype) if add else None
        return lambda: [symmetric_multiply(a, b, alpha=0.5, c=c, beta=0.25, diagonal=1.5)]

    return make


def _relu2(m: int, n: int, k: int, dtype: torch.dtype, *, backward: bool = False) -> Problem:
    def make(device: torch.device) -> Run:
        draw = _Draw(device)
        a = draw(m, k, dtype=dtype)
        b = draw(k, n, dtype=dtype) if backward else draw(n, k, dtype=dtype)
        is_fp8 = dtype.itemsize == 1
        out_dtype = torch.bfloat16 if is_fp8 else dtype
        activation = draw(m, n, dtype=out_dtype).relu().square() if backward else None
        one = torch.ones((), device=device)
        scales = (one, one) if is_fp8 else None
        return lambda: [product_relu2(a, b, dtype=out_dtype, transposed=backward, activation=activation, scales=scales)]

    return make


# Learning rate, weight decay, momentum, beta1, beta2, eps.
_HYPERPARAMETERS = (0.01, 0.1, 0.95, 0.9, 0.95, 1e-8)


def _hyperparameters(device: torch.device) -> Tensor:
    return torch.tensor(_HYPERPARAMETERS, dtype=torch.float64, device=device)


def _addresses(*rows: Sequence[Tensor] | Tensor) -> tuple[Tensor, bool]:
    """Return a kernel's table of the addresses of tensors, and whether all are multiples of 16."""
    table = torch.tensor([[tensor.data_ptr() for tensor in row] for row in rows])
    return table.to(rows[0][0].device), not bool((table % 16).any())


def _momentum(
    count: int, rows: int, columns: int, dtype: torch.dtype, *, gap: int = 0, guarded: bool = False
) -> Problem:
    """`gap`: entries of other matrices between the rows."""

    def make(device: torch.device) -> Run:
        draw = _Draw(device)
        layout = MatrixLayout(1, rows, columns, 0, columns + gap, 1)
        gradients = draw(count, rows, columns + gap, dtype=dtype)
        momenta = draw(count, rows, columns + gap, dtype=torch.float32)
        directions = torch.empty((count, rows, columns), dtype=dtype, device=device)
        addresses, aligned = _addresses(gradients, momenta)
        hyperparameters = _hyperparameters(device)
        go = torch.ones((), dtype=torch.int32, device=device) if guarded else None

        def run() -> Sequence[Tensor]:
            momentum_directions_(
                addresses,
                directions,
                hyperparameters,
                layout,
                gradient_dtype=dtype,
                mu_index=2,
                nesterov=True,
                go=go,
                aligned=aligned,
            )
            return [gradients, momenta, directions]

        return run

    return make


def _weights(
    count: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    *,
    gap: int = 0,
    per_row: bool = False,
    cautious: bool = False,
) -> Problem:
    def make(device: torch.device) -> Run:
        draw = _Draw(device)
        layout = MatrixLayout(1, rows, columns, 0, columns + gap, 1)
        weights = draw(count, rows, columns + gap, dtype=dtype)
        masters = _masters(draw, weights, master_dtype)
        updates = draw(count, rows, columns, dtype=dtype)
        factors = draw(count, rows if per_row else 1, 1, dtype=torch.float32)
        addresses, aligned = _addresses(weights, masters)
        hyperparameters = _hyperparameters(device)

        def run() -> Sequence[Tensor]:
            apply_updates_(
                addresses,
                updates,
                factors,
                hyperparameters,
                layout,
                weight_dtype=dtype,
                master_dtype=master_dtype,
                lr_index=0,
                weight_decay_index=1,
                cautious=cautious,
                squared_lr_decay=False,
                go=None,
                aligned=aligned,
            )
            return [weights, masters, updates]

        return run

    return make


def _masters(draw: _Draw, weights: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype == torch.uint16:
        return draw(*weights.shape, dtype=dtype)
    return weights if dtype is None else weights.to(dtype)


def _adamw(
    numels: list[int], dtype: torch.dtype, master_dtype: torch.dtype | None, *, cautious: bool = False
) -> Problem:
    def make(device: torch.device) -> Run:
        draw = _Draw(device)
        gradients = [draw(numel, dtype=dtype) for numel in numels]
        exp_avgs = [draw(numel, dtype=torch.float32) for numel in numels]
        # Not zero, which would be a huge step.
        exp_avg_sqs = [draw(numel, dtype=torch.float32).square() + 0.1 for numel in numels]
        weights = [draw(numel, dtype=dtype) for numel in numels]
        masters = [_masters(draw, weight, master_dtype) for weight in weights]
        addresses, aligned = _addresses(gradients, exp_avgs, exp_avg_sqs, weights, masters)
        steps = torch.full((len(numels),), 10.0, device=device)
        step_addresses = _addresses(list(steps))[0][0]
        programs = adamw_programs(numels)
        programs = replace(
            programs,
            tensor_of_program=programs.tensor_of_program.to(device),
            tile_of_program=programs.tile_of_program.to(device),
        )
        on_device = torch.tensor(numels, device=device)
        hyperparameters = _hyperparameters(device)

        def run() -> Sequence[Tensor]:
            adamw_tensors_(
                addresses,
                step_addresses,
                on_device,
                programs,
                hyperparameters,
                weight_dtype=dtype,
                gradient_dtype=dtype,
                master_dtype=master_dtype,
                indices=(0, 1, 3, 4, 5),
                cautious=cautious,
                squared_lr_decay=False,
                go=None,
                aligned=aligned,
            )
            return [*gradients, *exp_avgs, *exp_avg_sqs, *weights, *masters, steps]

        return run

    return make
