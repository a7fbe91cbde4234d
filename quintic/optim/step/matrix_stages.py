"""The stages of a rule on whole matrices: before the polar step, the polar step itself, and after it.

    directions (b, m, n) -> stages before -> polar factors -> stages after -> updates (b, m, n), factors

A stage with a kernel twin runs as the kernel where the bucket has kernels; the others run in plain PyTorch, which has
copies of the state that they advance: what a mask leaves as it is gets its old value back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.groups.options import Group
from quintic.optim.plan.bucket import Bucket
from quintic.optim.polar.forms import Form
from quintic.optim.polar.orthogonalize import apply_form, apply_function
from quintic.optim.rules.rule import MatrixStage
from quintic.optim.step.ranges import Ranges

__all__ = ["MatrixState", "apply_after", "orthogonalized"]


@dataclass(frozen=True, slots=True)
class MatrixState:
    """The state of a batch of matrices that stages on whole matrices advance."""

    batches: Mapping[str, Tensor]
    """State of the parameter's shape by name, (b, m, n), in its own dtype; advanced in place."""
    neurons: Sequence[Tensor] = ()
    """Tensors (matrices, m, 1) or (matrices, 1, n) that are together those of the batch and share memory with state."""
    addresses: Callable[[], Tensor | None] = lambda: None
    """Returns the address of each matrix' neurons for kernels, (b,) int64; None where the bucket has none."""


def orthogonalized(
    directions: Tensor, state: MatrixState, form: Form | None, bucket: Bucket, group: Group, ranges: Ranges
) -> Tensor:
    """Return the polar factors (b, m, n) of directions after the stages before it: a new tensor in `update_dtype`."""
    rule = group.rule
    if rule.before:
        with ranges[rule.before[0].label]:
            directions = rule.prepare(directions, state.batches, group)
    with ranges["orthogonalize"]:
        if form is not None:
            return apply_form(directions, form, bucket.kernels)
        assert callable(group.orthogonalizer)
        return apply_function(directions, group.orthogonalizer, bucket.name)


def apply_after(
    update: Tensor, scales: Tensor, state: MatrixState, group: Group, mask: Tensor | None, ranges: Ranges
) -> tuple[Tensor, Tensor]:
    """Return updates (b, m, n) after the last stages, in their dtype, and their factors times scales (b, 1, 1).

    State is advanced in place; where `mask`, () or (b,) int32 on the device, is zero it stays. None for nowhere.
    """
    matrices, factors = update, scales
    for stage in group.rule.after:
        with ranges[stage.label]:
            addresses = state.addresses() if stage.has_kernel else None
            if addresses is not None:
                factors = stage.apply_kernel(matrices, addresses, factors, group, mask)
                continue
            matrices, own = _apply_plain(stage, matrices, state, group, mask)
            factors = factors if own is None else factors * own
    return matrices.to(update.dtype), factors


def _apply_plain(
    stage: MatrixStage, matrices: Tensor, state: MatrixState, group: Group, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run a stage on copies of its state, and store these where the mask does not say otherwise."""
    before: dict[str, Tensor] = {}
    for spec in stage.state:
        before[spec.name] = torch.cat(list(state.neurons)) if spec.shape == "neurons" else state.batches[spec.name]
    # bfloat16 state is advanced in float32 and rounded once, when it is stored.
    after = {name: (old.clone() if old.itemsize >= 4 else old.float()) for name, old in before.items()}
    result, factors = stage.apply(matrices, after, group)
    for spec in stage.state:
        new, old = after[spec.name], before[spec.name]
        if mask is not None:
            new = torch.where(mask.view(-1, 1, 1) != 0, new, old)
        if spec.shape == "neurons":
            torch._foreach_copy_(list(state.neurons), list(new.split([one.shape[0] for one in state.neurons])))
        else:
            old.copy_(new)
    return result, factors
