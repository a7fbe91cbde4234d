"""Are the weights the same to the last bit in every layout? Gradients of some steps, and comparing bits.

Every rank has random gradients of its own. Layouts in which the optimizer averages get these; the others, and the
single device that all are compared with, get their mean: the sum in the order of the ranks, in float32, divided and
rounded once, as it would be after a backward pass that averages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.optimizer_step.contestants import Weights

# Large enough that most bf16 weights change in each step: equality of weights that stay would say nothing.
COMPARED_LR, COMPARED_ADAMW_LR = 0.02, 0.003

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def set_gradients(weights: Weights, number: int, num_ranks: int, rank: int | None) -> None:
    """Give the weights the normal gradients of a step, the same in all layouts.

    Args:
        weights: all on one device.
        number: of the step.
        num_ranks: how many ranks there are.
        rank: whose own gradients these are; None for the mean of all ranks'.
    """
    device = weights.all[0].device
    of_ranks = range(num_ranks) if rank is None else [rank]
    generators = [torch.Generator(device).manual_seed(1 + 1000 * number + one) for one in of_ranks]
    for param in weights.all:
        parts = [
            torch.empty(param.shape, device=device, dtype=param.dtype).normal_(0, 0.001, generator=generator)
            for generator in generators
        ]
        gradient = parts[0] if rank is not None else mean(parts)
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            gradient = gradient.clone()  # of the part alone: the whole is given back
        param.grad = gradient


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of some tensors: the sum in their order in float32 or wider, divided and rounded once."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.div_(len(parts)).to(parts[0].dtype)


def whole(param: Tensor) -> Tensor:
    """Return all of a parameter. All ranks must call it."""
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def differing(params: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[int, int]:
    """Return the numbers of entries with other bits than expected, and of parameters with such entries."""
    pairs = zip(params, expected, strict=True)
    counts = [int((whole(x).view(INTEGERS[y.itemsize]) != y.view(INTEGERS[y.itemsize])).sum()) for x, y in pairs]
    return sum(counts), sum(count > 0 for count in counts)
