"""The reference step of one matrix, and the effect of rounding on it.

    gradient (1, m, n) -> direction -> stages and polar factor -> weight and state

It calls the same stages and pure functions as the real step, in plain PyTorch, on one matrix at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.plan.kinds import direction_dtype, form_of
from quintic.optim.polar.forms import Form
from quintic.optim.polar.orthogonalize import apply_form, apply_function
from quintic.optim.rules.elementwise import drift_, keep_and_step_, stage_direction_, wide_weight
from quintic.optim.rules.rule import MOMENTUM
from quintic.optim.rules.stages import WEIGHT
from quintic.optim.rules.update import decay_and_step_, momentum_
from quintic.optim.state.parameters import Parameter
from quintic.optim.state.state import master_of

__all__ = ["Rounding", "largest", "perturbed", "step_matrix"]

# The assumed rounding error of a user's orthogonalizer, relative to its result, since its arithmetic is unknown.
_FUNCTION_ROUNDING = 2.0**-8

# The number of perturbed directions from which the effect of rounding is measured.
_PATTERNS = 2


class Rounding(NamedTuple):
    """The measured effect of rounding on one matrix: how far results move in a wider dtype or from a near direction."""

    update: float
    """The largest distance of a weight's change."""
    second_moment: float
    """The largest distance of an entry of the state that follows from updates; 0 without such state."""


def step_matrix(matrix: Mapping[str, Tensor], number: int, parameter: Parameter, *, measure: bool) -> Rounding | None:
    """Step one matrix (1, m, n) of a parameter; return the effect of rounding on it if `measure` is set.

    Args:
        matrix: its weight, gradient, master and state by name, (1, m, n), or (1, m or 1, n or 1) for vectors; weight,
            master and state are changed in place.
        number: of the matrix in its parameter.
        parameter: the parameter.
        measure: whether to measure the effect of rounding.
    """
    group, rule = parameter.group, parameter.group.rule
    weight, master = matrix["weight"], master_of(matrix)
    m, n = weight.shape[1:]
    form = form_of(group, m, n, weight.dtype, weight.device)
    direction = _direction(matrix, group)
    # Rounded to the dtype in which the real step orthogonalises.
    direction = direction.to(direction_dtype(form, weight.dtype)).contiguous()
    # The stages on whole matrices, whose state is updated.
    state = {spec.name: matrix[spec.name] for stage in rule.stages for spec in stage.state}
    before = {name: value.clone() for name, value in state.items()}
    weights = {WEIGHT: wide_weight(weight, master)} if rule.reads_weights else {}
    # Scale of the update, (1, 1, 1), in the dtype of the real step, so that on CPUs not even the last bit differs.
    arithmetic = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.full((1, 1, 1), rule.lr_factor(group.adjust_lr, m, n), dtype=arithmetic, device=weight.device)
    if group.lr_multipliers is not None:
        scale = scale * torch.tensor(group.lr_multipliers[number], dtype=scale.dtype, device=scale.device)
    update, keep, rate = _update(direction, form, state | weights, scale, parameter)
    old = wide_weight(weight, master).clone()
    if keep is None:
        decay_and_step_(
            [weight],
            [master],
            [update],
            [rate],
            lr=float(group.lr),
            weight_decay=float(group.weight_decay),
            decay_coupling=group.decay_coupling,
            decay_factors=[scale] if group.scale_decay else None,
            cautious=group.cautious,
        )
    else:
        keep_and_step_([weight], [master], [update], [keep], [rate], [None])
    if rule.drift is not None:
        drift_(rule.drift, weight, master, old, matrix, group.stage_options)
    if not measure:
        return None
    # The effect of rounding: repeat polar factor and stages in a wider dtype, and on GPUs from nearby directions.
    change = _change(update, keep, rate, old, group)
    if form is None:
        moved_state = max((largest(value) for value in state.values()), default=0.0)
        return Rounding(_FUNCTION_ROUNDING * largest(change), _FUNCTION_ROUNDING * moved_state)
    wide = replace(form, compute_dtype=torch.float32 if form.compute_dtype.itemsize == 2 else torch.float64)
    forms = [(direction, wide)]
    if direction.is_cuda:
        # Kernels may round the momentum's sum, and so the direction, to another neighbour than the reference does.
        terms = matrix["gradient"].abs().to(arithmetic) + sum(matrix[spec.name].abs() for spec in rule.direction.state)
        moved = [perturbed(direction, terms, pattern) for pattern in range(_PATTERNS)]
        # In the form's own dtype, too: for a small matrix a single product may be nearly exact by chance.
        forms += [(nearby, precision) for nearby in moved for precision in (wide, form)]
    changes: list[Tensor] = []
    states: dict[str, list[Tensor]] = {name: [] for name in state}
    weights = {WEIGHT: old} if rule.reads_weights else {}
    for nearby, precision in forms:
        own = {name: value.clone() for name, value in before.items()}
        changes.append(_change(*_update(nearby, precision, own | weights, scale, parameter), old, group))
        for name, value in own.items():
            states[name].append(value)
    spreads = [_spread([*others, state[name]]) for name, others in states.items()]
    of_updates = _spread([*changes, change])
    # What drifts follows from the change of weights.
    return Rounding(of_updates, max([*spreads, 0.0 if rule.drift is None else of_updates], default=0.0))


def _direction(matrix: Mapping[str, Tensor], group: Group) -> Tensor:
    """Return the direction of a matrix' gradient, and advance the state of the rule's first stage."""
    if group.rule.gradient_stage is not None:
        return stage_direction_(group.rule.gradient_stage, matrix["gradient"], matrix, group.stage_options)
    momentum, mu = matrix[MOMENTUM], float(group.momentum)
    (direction,) = momentum_([momentum], [matrix["gradient"]], mu=mu, nesterov=group.nesterov)
    return direction


def _update(
    direction: Tensor, form: Form | None, state: Mapping[str, Tensor], scale: Tensor, parameter: Parameter
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the update (1, m, n), the factors of the weight if the rule constrains it, and of the update."""
    rule, options = parameter.group.rule, parameter.group.stage_options
    prepared = rule.prepare(direction, state, options)
    if rule.polar is None:
        polar = _polar(prepared, form, parameter)
    else:
        polar = rule.polar.apply(prepared, lambda x: _polar(x, form, parameter))
    update, factors = rule.finish(polar, torch.ones_like(scale) if rule.constrain else scale, state, options)
    if rule.constrain is None:
        return update, None, factors
    if rule.factors is not None:
        update = (update * factors).to(update.dtype)
    keep, rate = rule.constrained(update, scale, state, options)
    return update, keep, rate


def _change(update: Tensor, keep: Tensor | None, rate: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return the change of a weight, without decay."""
    return rate * update * float(group.lr) if keep is None else weight - keep * weight + rate * update


def _polar(direction: Tensor, form: Form | None, parameter: Parameter) -> Tensor:
    """Return the polar factor of a direction (1, m, n), without a form by the group's function."""
    if form is not None:
        return apply_form(direction, form, "torch")
    orthogonalizer = parameter.group.orthogonalizer
    assert callable(orthogonalizer)
    return apply_function(direction, orthogonalizer, parameter.name)


def perturbed(direction: Tensor, terms: Tensor, pattern: int = 0) -> Tensor:
    """Return `direction` perturbed as another order of rounding might perturb it.

    One in 31 of 16-bit entries becomes the neighbouring number; wider entries all move by a rounding error of the terms
    that were added, which is more than one of the sum if the terms cancel.

    Args:
        direction: of any shape.
        terms: in its shape, the sums of the absolute values that were added.
        pattern: number of the perturbation, of many.
    """
    eps = torch.finfo(direction.dtype).eps
    numbers = torch.arange(direction.numel(), device=direction.device).view(direction.shape)
    # Signs that look random: if all entries of a matrix moved by one factor, the polar factor would not change.
    signs = 1 - 2 * (((numbers + 1000003 * pattern) * 2654435761 >> 13) & 1)
    if direction.itemsize == 2:
        neighbours = (direction.double() * (1 + eps * signs)).to(direction.dtype)
        return torch.where(numbers % 31 == pattern, neighbours, direction)
    return (direction.double() + eps * signs * terms.double()).to(direction.dtype)


def _spread(tensors: Sequence[Tensor]) -> float:
    """Return the largest distance of an entry between the first tensor and the others; 0 for an empty list."""
    return max((largest(tensor - tensors[0]) for tensor in tensors[1:]), default=0.0)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of the finite entries; 0 if no entry is finite."""
    return float(tensor.abs().nan_to_num(0.0, 0.0).max())
