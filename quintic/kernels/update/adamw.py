"""AdamW on many tensors in one launch, in Triton; every byte is read and written once.

The plain twin is `adamw_` in optim/rules/update.py. PyTorch's fused kernel lacks what is needed here: low-precision
weights with float32 moments, masters, cautious decay, hyperparameters in device memory, and flags in device memory that
forbid a step.

    _count_kernel    count of steps -> count + 1, bias corrections      one entry per tensor
    _adamw_kernel    gradient, moments, weight, master -> moments, weight, master

Kernels find their tensors through tables of addresses, as in `matrix_update.py`.

Import this module only where Triton is installed (see `dispatch.py`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintic.kernels.launch import launch
from quintic.kernels.programs import TRITON_DTYPE, TilePrograms, divide_tiles, pointers_at, tile_of
from quintic.kernels.update.packed import load_average, store_average
from quintic.kernels.update.weights import (
    MASTER,
    flags_of,
    load_full_precision,
    stepped_weight,
    store_weight,
)

__all__ = ["adamw_programs", "adamw_tensors_"]

# Tensors per program of `_count_kernel`.
_COUNT_BLOCK = 128

# Entries per program of `_adamw_kernel`. H200, 2026-11: 3.2 TB/s with 1024, 2.3 with 2048 (docs/development/LOG.md).
_BLOCK = 1024
_NUM_WARPS = 8


def adamw_programs(numels: Sequence[int]) -> TilePrograms:
    """Return the programs of `adamw_tensors_` for tensors with these numbers of entries; the tables are on the CPU."""
    return divide_tiles(numels, _BLOCK)


@triton.jit
def _count_kernel(
    # (t,) int64: address of each tensor's float32 count of steps.
    steps,
    # (2, t) float32, written: 1 - beta1^step, then 1 - beta2^step.
    corrections,
    # (k,) float64; BETA1 and BETA2 are indices into it.
    hyperparameters,
    # int32, one flag or one per tensor (stride 0 or not): with HAS_MASK, a flag of 0 leaves the count as it is.
    apply_mask,
    mask_stride,
    num_tensors,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tensor < num_tensors
    place = tl.load(steps + tensor, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(place, mask=inside, other=0.0)
    if HAS_MASK:
        step += tl.load(apply_mask + tensor * mask_stride, mask=inside, other=0).to(tl.float32)
    else:
        step += 1.0
    tl.store(place, step, mask=inside)
    # In float64, because 1 - beta^step cancels digits where beta^step is near 1.
    count = step.to(tl.float64)
    # beta^step is computed as 2^(step log2 beta). log2(0) does not exist; a beta of 1e-30 has the same correction, 1.
    beta1 = tl.maximum(tl.load(hyperparameters + BETA1), 1e-30)
    beta2 = tl.maximum(tl.load(hyperparameters + BETA2), 1e-30)
    correction1 = 1.0 - tl.exp2(count * tl.log2(beta1))
    correction2 = 1.0 - tl.exp2(count * tl.log2(beta2))
    tl.store(corrections + tensor, correction1.to(tl.float32), mask=inside)
    tl.store(corrections + num_tensors + tensor, correction2.to(tl.float32), mask=inside)


@triton.jit
def _adamw_kernel(
    # (5, t) int64: addresses of gradients, first moments, second moments, weights, masters.
    addresses,
    # (t,) int64: number of entries of each tensor.
    numels,
    # (p,) int32 each: tensor and tile of each program (see programs.py); not read with ONE_TENSOR.
    tensor_of_program,
    tile_of_program,
    # (t,) int64: address of each tensor's float32 count of steps.
    steps,
    # (2, t) float32, from `_count_kernel`.
    corrections,
    # (k,) float64; LR, WEIGHT_DECAY, BETA1, BETA2 and EPS are indices into it.
    hyperparameters,
    # int32, one flag or one per tensor (stride 0 or not): with HAS_MASK, a flag of 0 leaves the tensor as it is.
    apply_mask,
    mask_stride,
    num_tensors,
    # With ONE_TENSOR: the tensor that all programs work on.
    only_tensor,
    ONE_TENSOR: tl.constexpr,
    LR: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    # Dtypes, and MASTER as in weights.py.
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    MASTER: tl.constexpr,
    # See `stepped_weight`.
    CAUTIOUS: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, tile = tile_of(tensor_of_program, tile_of_program, only_tensor, ONE_TENSOR)
    numel = tl.load(numels + tensor)
    element = tile * BLOCK + tl.arange(0, BLOCK)
    inside = element < numel
    gradients = pointers_at(tl.load(addresses + tensor), element, GRADIENT, ALIGNED)
    exp_avgs = pointers_at(tl.load(addresses + num_tensors + tensor), element, MOMENTS, ALIGNED)
    squares: tl.constexpr = tl.uint8 if tl.int8 == MOMENTS else MOMENTS
    exp_avg_sqs = pointers_at(tl.load(addresses + 2 * num_tensors + tensor), element, squares, ALIGNED)
    weights = pointers_at(tl.load(addresses + 3 * num_tensors + tensor), element, WEIGHT, ALIGNED)
    master_dtype: tl.constexpr = tl.uint16 if MASTER == 2 else (tl.uint8 if MASTER == 3 else tl.float32)
    # Without masters their pointers are never dereferenced, but must have a type.
    masters = weights
    if MASTER != 0:
        masters = pointers_at(tl.load(addresses + 4 * num_tensors + tensor), element, master_dtype, ALIGNED)
    # Subtracted in float64, as in the twin, and rounded once.
    rest1 = (1.0 - tl.load(hyperparameters + BETA1)).to(tl.float32)
    rest2 = (1.0 - tl.load(hyperparameters + BETA2)).to(tl.float32)
    eps = tl.load(hyperparameters + EPS).to(tl.float32)
    correction1 = tl.load(corrections + tensor)
    correction2 = tl.load(corrections + num_tensors + tensor)
    # All arithmetic is in float32. Updates use the moments before they are rounded to MOMENTS.
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    exp_avg = load_average(exp_avgs, inside, BLOCK)
    exp_avg_sq = load_average(exp_avg_sqs, inside, BLOCK)
    exp_avg += (gradient - exp_avg) * rest1
    exp_avg_sq += (gradient * gradient - exp_avg_sq) * rest2
    update = (exp_avg / correction1) / (tl.sqrt_rn(exp_avg_sq / correction2) + eps)
    lr = tl.load(hyperparameters + LR)
    weight_decay = tl.load(hyperparameters + WEIGHT_DECAY)
    keep = inside
    if HAS_MASK:
        # A flag of 0 makes the bound 0: nothing is stored.
        keep = element < numel * tl.load(apply_mask + tensor * mask_stride)
    value = load_full_precision(tl.load(weights, mask=inside, other=0.0), masters, inside, MASTER)
    value = stepped_weight(value, update, 1.0, 1.0, lr, weight_decay, CAUTIOUS, SQUARED)
    # Counted by `_count_kernel`.
    step = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32)))
    store_average(exp_avgs, exp_avg, keep, step, BLOCK)
    store_average(exp_avg_sqs, exp_avg_sq, keep, step, BLOCK)
    store_weight(weights, masters, value, keep, MASTER)


def adamw_tensors_(
    addresses: Tensor,
    steps: Tensor,
    numels: Tensor,
    programs: TilePrograms,
    hyperparameters: Tensor,
    *,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    moment_dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype | None,
    indices: tuple[int, int, int, int, int],
    cautious: bool | str,
    squared_lr_decay: bool,
    apply_mask: Tensor | None,
    aligned: bool,
) -> None:
    """Advance the moments, weights and step counts of AdamW for many tensors.

    Args:
        addresses: (5, t) int64 on the device: addresses of each tensor's gradient, first moment, second moment, weight
            and master (ignored without masters). All but the gradients are changed. The five tensors of a column have
            one memory order.
        steps: (t,) int64 on the device: address of each tensor's float32 count of earlier steps; the counts are
            changed.
        numels: (t,) int64 on the device: number of entries of each tensor.
        programs: from `adamw_programs`, on the device.
        hyperparameters: (k,) float64 on the device.
        weight_dtype: dtype of the weights.
        gradient_dtype: dtype of the gradients.
        moment_dtype: float32, bfloat16, or int8 with uint8 for the second; both are rounded when they are stored.
        master_dtype: as in `matrix_update.apply_updates_`.
        indices: indices of learning rate, weight decay, beta1, beta2 and eps in `hyperparameters`.
        cautious: as in `matrix_update.apply_updates_`.
        squared_lr_decay: as in `matrix_update.apply_updates_`.
        apply_mask: () or (t,) int32, as in `matrix_update.apply_updates_`.
        aligned: as in `matrix_update.apply_updates_`.
    """
    lr, weight_decay, beta1, beta2, eps = indices
    num_tensors = addresses.shape[1]
    flags = flags_of(apply_mask, hyperparameters)
    # Computed once per tensor, so that the programs of the second kernel only read them.
    corrections = torch.empty((2, num_tensors), dtype=torch.float32, device=addresses.device)
    launch(
        _count_kernel,
        (triton.cdiv(num_tensors, _COUNT_BLOCK),),
        steps,
        corrections,
        hyperparameters,
        *flags,
        num_tensors,
        BETA1=beta1,
        BETA2=beta2,
        HAS_MASK=apply_mask is not None,
        BLOCK=_COUNT_BLOCK,
        num_warps=4,
    )
    for tensor, count in programs.launches():
        launch(
            _adamw_kernel,
            (count,),
            addresses,
            numels,
            programs.tensor_of_program,
            programs.tile_of_program,
            steps,
            corrections,
            hyperparameters,
            *flags,
            num_tensors,
            tensor,
            ONE_TENSOR=tensor >= 0,
            LR=lr,
            WEIGHT_DECAY=weight_decay,
            BETA1=beta1,
            BETA2=beta2,
            EPS=eps,
            WEIGHT=TRITON_DTYPE[weight_dtype],
            GRADIENT=TRITON_DTYPE[gradient_dtype],
            MOMENTS=TRITON_DTYPE[moment_dtype],
            MASTER=MASTER[master_dtype],
            CAUTIOUS=cautious,
            SQUARED=squared_lr_decay,
            HAS_MASK=apply_mask is not None,
            ALIGNED=aligned,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
