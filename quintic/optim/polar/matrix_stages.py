"""The stages of a rule on whole matrices, before and after the polar step, for a batch.

    matrices (b, m, n) -> stage by stage -> matrices (b, m, n), and factors (b, m or 1, n or 1) that multiply updates

A stage with a kernel twin runs as that kernel if the bucket has kernels. The others run in plain PyTorch on copies of
state; the copies are then stored, except for matrices whose mask is zero.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.rules.rule import MatrixStage, StageOptions

__all__ = ["NO_STATE", "MatrixState", "apply_stages"]


@dataclass(frozen=True, slots=True)
class MatrixState:
    """The state of a batch of matrices that stages on whole matrices advance."""

    batches: Mapping[str, Tensor]
    """State of the parameter's shape by name, (b, m, n), in its own dtype; advanced in place."""
    neurons: Sequence[Tensor] = ()
    """State with one entry per neuron: tensors (matrices, m, 1) or (matrices, 1, n) that together have all matrices of
    the batch, and share memory with the state."""
    addresses: Tensor | None = None
    """The address of each matrix' neurons for kernels, (b,) int64; None where the bucket has none."""


NO_STATE = MatrixState({})


def apply_stages(
    stages: Sequence[MatrixStage],
    given: Tensor,
    scales: Tensor,
    state: MatrixState,
    options: StageOptions,
    mask: Tensor | None,
    ranges: Mapping[str, AbstractContextManager[object]],
) -> tuple[Tensor, Tensor]:
    """Return matrices (b, m, n) after some stages, in the dtype that they had, and factors times scales (b, 1, 1).

    State is advanced in place, except where `mask`, () or (b,) int32 on the device, is zero; None advances all.
    """
    matrices, factors = given, scales
    for stage in stages:
        with ranges[stage.label]:
            if stage.has_kernel and state.addresses is not None:
                factors = stage.apply_kernel(matrices, state.addresses, factors, options, mask)
                continue
            matrices, own = _apply_plain(stage, matrices, state, options, mask)
            factors = factors if own is None else factors * own
    return matrices.to(given.dtype), factors


def _apply_plain(
    stage: MatrixStage, matrices: Tensor, state: MatrixState, options: StageOptions, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run a stage on matrices (b, m, n) and copies of its state; store the copies where the mask is not zero."""
    before: dict[str, Tensor] = {}
    for spec in stage.state:
        before[spec.name] = torch.cat(list(state.neurons)) if spec.shape == "neurons" else state.batches[spec.name]
    # bfloat16 state is advanced in float32 and rounded once, when it is stored.
    after = {name: (old.clone() if old.itemsize >= 4 else old.float()) for name, old in before.items()}
    result, factors = stage.apply(matrices, after, options)
    for spec in stage.state:
        new, old = after[spec.name], before[spec.name]
        if mask is not None:
            new = torch.where(mask.view(-1, 1, 1) != 0, new, old)
        if spec.shape == "neurons":
            torch._foreach_copy_(list(state.neurons), list(new.split([one.shape[0] for one in state.neurons])))
        else:
            old.copy_(new)
    return result, factors
