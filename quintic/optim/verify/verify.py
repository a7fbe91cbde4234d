"""`verify`: is one step on this mesh, with these kernels, the step that the reference makes?

keep      weights, state and counts, in host memory
step      the optimizer's own, with the gradients that are there; its results go to host memory too
restore
reference one parameter at a time, see `reference.py`; measures how much rounding each matrix suffers
compare   matrix by matrix, and AdamW's parameters piece by piece
restore   bit for bit
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintic.optim.comms.collectives import ProcessGroup, all_gather_values, this_rank
from quintic.optim.comms.sharing import AVERAGING
from quintic.optim.groups.names import model_parameters
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import gradient_dtype, local_tensor
from quintic.optim.muon import Muon, muon_in
from quintic.optim.rules.opaque import without_hooks
from quintic.optim.rules.precision import full_precision
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, STEP
from quintic.optim.rules.table import NEURON_MOMENT
from quintic.optim.state.parameters import Parameter
from quintic.optim.state.state import master_key, second_moments
from quintic.optim.verify.keep import Kept, Values, local_values, named_parameters, snapshot
from quintic.optim.verify.reference import Rounding, Roundings, largest, run_reference
from quintic.optim.verify.report import Answer, Difference, Verification, badness, merged

__all__ = ["verify"]

# Two computations of one matrix may each be this far from exact, in units of the rounding that was measured, and one of
# them may have been luckier when it was.
_ROUNDINGS = 4.0

# What element-wise arithmetic in another order may change: of the largest change of a matrix, of values in units of
# their dtype's eps, and AdamW's update in units of its learning rate.
_CHANGE = 2.0**-18
_EPS = 8
_ADAMW = 1e-4

# Differences that a rank reports to the others.
_MOST_REPORTED = 1000

# Integers of the size of each kind of weights; so many at once are added up.
_ENTRIES_AT_ONCE = 2**24
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Keys of a group that are no options, or may differ from rank to rank.
_NO_OPTIONS = ("params", "param_names", "process_group")


def verify(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, process_group: ProcessGroup | None = None
) -> Verification:
    """Make one step on this mesh, compare it with `reference_step`, and undo both.

    Call it where `optimizer.step()` would be called, after `backward()`; training then goes on as if nothing had
    happened: weights, state, counts, telemetry and random number generators are bit for bit what they were. Hooks of
    the optimizer do not run, QK-clip takes no part, and groups with `step_every` step whatever their place in it.
    Without any gradient on any rank, random ones stand in, which are removed again.

    A difference counts as wrong where rounding does not explain it. How much that is, is measured for each matrix: what
    changes when the reference multiplies in a wider dtype. Weights and all state are compared.

    Weights of which several ranks hold copies, by `comms` or as `DTensor`s, must be equal before the step. With
    `comms="none"` a plain tensor is this rank's own: whether others have equal ones is not known, and not looked at.

    Every rank orthogonalises every matrix it holds a part of twice, without kernels, once in the wider dtype. Host
    memory: twice the weights and state that this rank holds. Device memory: one whole Muon parameter at a time with its
    gradient and state, several times; random gradients, if there are to be any.

    All ranks must call it.

    Args:
        model: its parameters; those the optimizer has must be among them.
        optimizer: `quintic.Muon` made for the model, also as Accelerate or Lightning have wrapped it.
        process_group: the ranks that call, and that get the report; None for all.

    Returns:
        The same report on all of them; `report.ok` says it in one word, `print(report)` in a few. Nothing is raised for
        a step that is wrong.

    Raises:
        TypeError: the optimizer is not a `quintic.Muon`.
        ValueError, FloatingPointError: as `optimizer.step()`, and `reference_step`; everything is restored before.
    """
    optimizer = muon_in(optimizer, "verify")
    names: dict[Tensor, str] = {param: name for name, param in model_parameters(model)}
    problems = _foreign_problem([name for name, param in named_parameters(optimizer) if param not in names])
    kept = Kept(optimizer)
    given: list[Tensor] = []
    roundings: Roundings = {}
    try:
        given = _give_gradients(optimizer, process_group)
        kept.keep_gradients()
        kept.make_due()
        # Without PyTorch's layer that calls hooks, and without what a scheduler wraps around the method.
        without_hooks(type(optimizer).step)(optimizer)
        taken = snapshot(optimizer)
        kept.restore()
        kept.make_due()
        run_reference(optimizer, roundings)
        differences, stepped = _compare(optimizer, kept.values, taken, roundings)
    finally:
        kept.restore()
        for param in given:
            param.grad = None
    renamed = {name: names.get(param, name) for name, param in named_parameters(optimizer)}
    differences = [replace(difference, name=renamed[difference.name]) for difference in differences]
    stepped = {renamed[name]: count for name, count in stepped.items()}
    answer = Answer(differences, stepped, problems, _options(optimizer, names), _copies(optimizer, names))
    return merged(all_gather_values(answer, process_group))


def _foreign_problem(foreign: Sequence[str]) -> list[str]:
    """Return a line about parameters that the model does not have; none if there are none."""
    if not foreign:
        return []
    more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
    return [
        f"{foreign[0]}: this parameter of the optimizer is none of the model's{more}; make the optimizer after the "
        f"model is moved, wrapped (fully_shard, parallelize_module) or compiled"
    ]


def _options(optimizer: Muon, names: Mapping[Tensor, str]) -> dict[tuple[str, tuple[int, ...]], dict[str, str]]:
    """Return the options, as text, of each parameter that several ranks share."""
    of_groups = [
        {key: _text(value) for key, value in group.items() if key not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]
    return {
        (names.get(parameter.param, parameter.name), parameter.ranks): of_groups[parameter.group.number]
        for parameter in optimizer.current.parameters()
        if parameter.layout is not None
    }


@torch.no_grad()
def _copies(optimizer: Muon, names: Mapping[Tensor, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return checksums of the weights that this rank holds of parameters that several ranks share, see `Answer`."""
    copies = {}
    for parameter in optimizer.current.parameters():
        layout = parameter.layout
        if layout is not None and this_rank() in layout.ranks:
            name = names.get(parameter.param, parameter.name)
            place = f"{layout.box_of(this_rank())} of ranks {sorted(layout.ranks)}"
            copies[name, place] = this_rank(), _checksum(local_tensor(parameter.param.detach()))
    return copies


def _checksum(values: Tensor) -> int:
    """Return a number that is hardly ever the same for other bits, in whatever order they lie in memory."""
    bits, total = values.reshape(-1).view(_INTEGERS[values.itemsize]), 0
    for start in range(0, len(bits), _ENTRIES_AT_ONCE):  # which become integers of 64 bits
        some = bits[start : start + _ENTRIES_AT_ONCE].long()
        places = torch.arange(start, start + len(some), device=bits.device)
        # Modulo 2^64; each entry times an odd number of its own.
        total += int(((some + 1) * (places * 2654435761 * 2 + 1)).sum())
    return total % 2**64


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    # Where a function is in memory differs from rank to rank.
    return str(getattr(value, "__qualname__", "a function")) if callable(value) else repr(value)


@torch.no_grad()
def _give_gradients(optimizer: Muon, process_group: ProcessGroup | None) -> list[Tensor]:
    """Set random gradients if no rank has any, equal wherever ranks hold the same piece; return what got one."""
    has_gradients = any(param.grad is not None for _, param in named_parameters(optimizer))
    if any(all_gather_values(has_gradients, process_group)):
        return []
    given = []
    for number, parameter in enumerate(optimizer.current.parameters()):
        box = None if parameter.layout is None else parameter.layout.box_of(this_rank())
        # Of its own, so that the user's generators do not notice.
        of_rank = this_rank() if parameter.group.comms in AVERAGING else None
        generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {box} {of_rank}".encode()))
        parameter.param.grad = torch.zeros_like(parameter.param, dtype=gradient_dtype(parameter.param))
        local = local_tensor(parameter.param.grad)
        local.copy_(torch.randn(local.shape, generator=generator, device="cpu"))
        given.append(parameter.param)
    return given


# -------------------------------------------------------------------------------------------------------------- compare


@torch.no_grad()
def _compare(
    optimizer: Muon, before: Values, taken: Values, roundings: Roundings
) -> tuple[list[Difference], dict[str, int]]:
    """Return this rank's differences, all that are wrong and the worst, and how many matrices each parameter has."""
    differences: list[Difference] = []
    stepped: dict[str, int] = {}
    states = optimizer.state
    for parameter in optimizer.current.parameters():
        # State may be in host memory.
        expected, first, second = (
            {key: value.to(parameter.param.device) for key, value in values.items()}
            for values in (local_values(states, parameter.param), before[parameter.param], taken[parameter.param])
        )
        if expected.keys() == {"weight"}:
            continue  # a frozen parameter, without state
        if parameter.group.rule.orthogonalizes:
            differences += _compare_matrices(parameter, expected, second, first, roundings)
        elif parameter.param.grad is not None or parameter.divided is not None:
            differences += _compare_adamw(parameter, expected, second, first)
        if parameter.param.grad is not None:
            shapes = parameter.group.view.shapes(parameter.param.shape) if parameter.group.rule.orthogonalizes else ()
            stepped[parameter.name] = sum(count for count, _, _ in shapes)
    return sorted(differences, key=badness)[:_MOST_REPORTED], stepped


def _compare_adamw(
    parameter: Parameter, expected: Mapping[str, Tensor], taken: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """Yield the differences of what this rank holds. All ranks that share the parameter must call it."""
    for key in ("weight", EXP_AVG, EXP_AVG_SQ, STEP):
        old, right, mine = (_value(parameter, values, key) for values in (before, expected, taken))
        if right.numel() == 0:
            continue
        scale = largest(right - old if key == "weight" else right)
        if key == "weight":
            allowed = _allowed_change(parameter.group, old, right, _ADAMW * parameter.group.learning_rate)
        else:
            allowed = torch.zeros_like(right) if key == STEP else _allowed_state(right, old)
        yield _difference(parameter, key, right, mine, allowed, scale)


def _compare_matrices(
    parameter: Parameter,
    expected: Mapping[str, Tensor],
    taken: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    roundings: Roundings,
) -> Iterator[Difference]:
    """Yield the differences of every matrix, whole, and of this rank's second moments.

    All ranks that share the parameter must call it.
    """
    view, shape = parameter.group.view, parameter.param.shape
    numbers = [(block, index) for block, (count, _, _) in enumerate(view.shapes(shape)) for index in range(count)]
    holders = parameter.holders() if parameter.divided is not None else {}
    for key in ("weight", *(spec.name for spec in parameter.group.rule.state if spec.shape == "param")):
        gather = parameter.whole if key == "weight" else partial(parameter.whole_of, key)
        wholes = [gather(_value(parameter, values, key)) for values in (before, expected, taken)]
        batches = [view.batches(whole) for whole in wholes]
        for number, (block, index) in enumerate(numbers):
            old, right, mine = (batch[block][index] for batch in batches)
            is_elsewhere = key != "weight" and this_rank() not in holders.get((block, index), parameter.ranks)
            if right.numel() == 0 or is_elsewhere:
                continue
            if key == "weight":
                scale = largest(right - old)
                # A parameter that was not stepped has not changed.
                rounding = roundings.get((parameter.param, number), Rounding(0.0, 0.0))
                slack = _ROUNDINGS * rounding.update + _CHANGE * scale
                decay_factor = _decay_factor(parameter.group, number, *right.shape)
                allowed = _allowed_change(parameter.group, old, right, slack, decay_factor)
            else:
                scale, allowed = largest(right), _allowed_state(right, old)
            one = _difference(parameter, key, right, mine, allowed, scale, matrix=number, num_matrices=len(numbers))
            wrong = (right - mine).abs() > allowed if one.ratio > 1 else None
            yield replace(one, ranks=_ranks(parameter, wholes[1], block, index, wrong))
    key, holders = NEURON_MOMENT, parameter.holders()
    if key not in expected:
        return
    all_right, all_mine = (second_moments(values[key], shape, view) for values in (expected, taken))
    for number, (block, index) in enumerate(numbers):
        right, mine = all_right[block][index], all_mine[block][index]
        # Of matrices that another rank alone holds this one has none.
        if right.numel() == 0 or this_rank() not in holders.get((block, index), parameter.ranks):
            continue
        rounding = roundings.get((parameter.param, number), Rounding(0.0, 0.0))
        allowed = _allowed_state(right, right) + _ROUNDINGS * rounding.second_moment
        yield _difference(
            parameter, key, right, mine, allowed, largest(right), matrix=number, num_matrices=len(numbers)
        )


def _decay_factor(group: Group, number: int, m: int, n: int) -> float:
    if not group.scale_decay:
        return 1.0
    multiplier = group.lr_multipliers[number] if group.lr_multipliers else 1.0
    return abs(group.rule.lr_factor(group.adjust_lr, m, n) * multiplier)


def _ranks(parameter: Parameter, whole: Tensor, block: int, index: int, wrong: Tensor | None) -> tuple[int, ...]:
    """Return the ranks that hold wrong entries of a matrix; None for any entries."""
    if len(parameter.own_copy) == 1:
        return parameter.own_copy
    marks = torch.zeros_like(whole, dtype=torch.bool)
    batches = [batch.clone() for batch in parameter.group.view.batches(marks)]
    batches[block][index] = True if wrong is None else wrong
    parameter.group.view.write_(marks, batches)
    return tuple(rank for rank in parameter.own_copy if bool(parameter.piece(marks, rank).any()))


def _value(parameter: Parameter, values: Mapping[str, Tensor], key: str) -> Tensor:
    """Return a state, or the value behind a weight: what this rank has. All ranks that share it must call it."""
    if key != "weight":
        return values[key]
    of_master = master_key(values)
    if of_master is None or parameter.divided is None:
        return full_precision(values[key], None if of_master is None else values[of_master])
    # Of this rank's weight, whose master others have.
    return full_precision(values[key], parameter.whole_of(of_master, values[of_master]))


def _allowed_change(group: Group, old: Tensor, right: Tensor, slack: float, scale: float = 1.0) -> Tensor:
    """Return for each weight the difference that rounding explains, given that of updates and the factor on decay."""
    relative = _EPS * torch.finfo(torch.float64 if right.dtype == torch.float64 else torch.float32).eps
    if right.itemsize < 4:  # both are rounded to one of few numbers
        relative += torch.finfo(right.dtype).eps
    wide = torch.promote_types(right.dtype, torch.float32)
    old, right = old.to(wide), right.to(wide)
    allowed = right.abs().mul(relative).add(slack)
    lr = group.learning_rate
    rate = lr * float(group.weight_decay) * scale
    if group.cautious and rate:
        # Where the update is so small that its sign may go either way, decay may come or not.
        decay = old.abs() * (rate * lr if group.decay_coupling == "lr_squared" else rate)
        allowed += decay * ((right - old).abs() <= decay + allowed)
    return allowed


def _allowed_state(right: Tensor, old: Tensor) -> Tensor:
    """Return for each entry of a state the difference that rounding explains."""
    wide = torch.promote_types(right.dtype, torch.float32)
    allowed = right.abs().to(wide) * (torch.finfo(right.dtype).eps if right.itemsize < 4 else 0.0)
    return allowed + _EPS * torch.finfo(wide).eps * (largest(right) + largest(old))


def _difference(
    parameter: Parameter,
    key: str,
    right: Tensor,
    mine: Tensor,
    allowed: Tensor,
    scale: float,
    *,
    matrix: int | None = None,
    num_matrices: int = 0,
) -> Difference:
    """Return the distance of a tensor of this rank from the reference; NaN agrees with NaN."""
    wide = torch.promote_types(right.dtype, torch.float32)
    same = (right == mine) | (right.isnan() & mine.isnan())
    apart = (right.to(wide) - mine.to(wide)).abs().nan_to_num(math.inf).masked_fill(same, 0.0)
    absolute = float(apart.max())
    return Difference(
        name=parameter.name,
        tensor=key,
        matrix=matrix,
        num_matrices=num_matrices,
        ranks=(this_rank(),),
        absolute=absolute,
        relative=absolute / scale if scale else (math.inf if absolute else 0.0),
        ratio=float((apart / allowed).nan_to_num(math.inf).masked_fill(same, 0.0).max()),
    )
