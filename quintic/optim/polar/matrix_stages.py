"""The stages of a rule on whole matrices, before and after the polar step, for a batch.

    matrices (b, m, n) -> stage by stage -> matrices (b, m, n), and factors (b, m or 1, n or 1) that multiply updates
    weights, updates (b, m, n) -> the factors of both, (b, m or 1, n or 1), of a rule with a `WeightStage`

A stage with a kernel twin runs as that kernel if the bucket has kernels. The others run in plain PyTorch on copies of
state; the copies are then stored, except for matrices whose mask is zero.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from quintic.optim.rules.stages import WEIGHT, MatrixStage, StageOptions, StateSpec, WeightStage
from quintic.optim.rules.wide_state import store, widened

__all__ = ["NO_STATE", "MatrixState", "apply_stages", "constrained"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class MatrixState:
    """The state of a batch of matrices that stages on whole matrices advance."""

    batches: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the parameter's shape by name, (b, m, n), in its own dtype, advanced in place; under `WEIGHT` the
    weights, if the rule reads them."""
    vectors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Vector state by name: tensors (matrices, m or 1, n or 1) that together have all matrices of the batch, and share
    memory with the state."""
    addresses: Mapping[str, Tensor] = field(default_factory=dict)
    """By name the address of each matrix' vector for kernels, (b,) int64, where the bucket has kernels."""


NO_STATE = MatrixState()


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
            addresses = state.addresses.get(stage.state[0].name) if stage.has_kernel else None
            if addresses is not None:
                factors = stage.apply_kernel(matrices, addresses, factors, options, mask)
                continue
            matrices, own = _advance(_call(stage, matrices, options), stage.state, state, mask)
            if (own is None) != (stage.factors is None):
                returned = "no factors" if own is None else "factors"
                raise ValueError(f"{type(stage).__name__} returns {returned}, and declares factors={stage.factors!r}")
            factors = factors if own is None else factors * own
    return matrices.to(given.dtype), factors


def constrained(
    stage: WeightStage,
    updates: Tensor,
    scales: Tensor,
    state: MatrixState,
    options: StageOptions,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the factors of weights and of updates (b, m, n), each (b, m or 1, n or 1); state as in `apply_stages`."""
    weights = state.batches[WEIGHT]
    return _advance(lambda own: stage.apply(weights, updates, scales, own, options), stage.state, state, mask)


def _call(
    stage: MatrixStage, matrices: Tensor, options: StageOptions
) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]:
    return lambda own: stage.apply(matrices, own, options)


def _advance(
    apply: Callable[[Mapping[str, Tensor]], _Result],
    specs: Sequence[StateSpec],
    state: MatrixState,
    mask: Tensor | None,
) -> _Result:
    """Call a stage with copies of its state, and store the copies where the mask is not zero; return its result."""
    # Vectors of a batch may lie in several tensors: stages get them as one, (b, m or 1, n or 1).
    kept: dict[str, Tensor] = {}
    for spec in specs:
        kept[spec.name] = torch.cat(list(state.vectors[spec.name])) if spec.is_vector else state.batches[spec.name]
    wide = widened(kept, kept)
    weights = {WEIGHT: state.batches[WEIGHT]} if WEIGHT in state.batches else {}
    result = apply(wide | weights)
    store(kept, wide, None if mask is None else mask.view(-1, 1, 1))
    # State of the parameter's shape is stored; vectors go back to the tensors that they were taken from.
    for spec in specs:
        if spec.is_vector:
            targets = list(state.vectors[spec.name])
            torch._foreach_copy_(targets, list(kept[spec.name].split([one.shape[0] for one in targets])))
    return result
