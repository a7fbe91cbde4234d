"""`verify`: is one step on this mesh, with these kernels, the step that the reference makes?

keep      weights, state and counts, in host memory
step      the optimizer's own, with the present gradients, or random ones; its results are copied to host memory
restore
reference one parameter at a time, see `reference.py`; measures the effect of rounding on each matrix
compare   matrix by matrix, and AdamW's parameters piece by piece
restore   bit for bit
report    gather the reports of all ranks and merge them
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
from quintic.optim.groups.group import Group
from quintic.optim.groups.names import model_parameters
from quintic.optim.layout.layouts import gradient_dtype, local_tensor
from quintic.optim.muon import Muon, muon_in
from quintic.optim.numeric.dynamo import unwrap_hooks
from quintic.optim.numeric.int8_state import is_packed, read_packed, rounding_of
from quintic.optim.numeric.precision import full_precision
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, STEP
from quintic.optim.state.parameters import Parameter
from quintic.optim.state.state import master_key, master_of, vectors_of
from quintic.optim.verify.allowed import allowed_change, allowed_state
from quintic.optim.verify.matrix_step import Rounding, largest
from quintic.optim.verify.reference import Roundings, run_reference
from quintic.optim.verify.report import Difference, RankReport, Verification, merge_reports, severity_key
from quintic.optim.verify.snapshot import StepSnapshot, Values, local_values, named_parameters, snapshot

__all__ = ["verify"]

# The allowed difference of a matrix in units of its measured effect of rounding: both computations are inexact, and the
# measurement may have been lower than usual by chance.
_ROUNDINGS = 4.0

# The allowed effect of another order of element-wise arithmetic: relative to the largest change of a matrix; of AdamW's
# update, in units of its learning rate. That on values is in `allowed.py`.
_CHANGE = 2.0**-18
_ADAMW = 1e-4

# The most differences that a rank reports to the others.
_MOST_REPORTED = 1000

# Checksums add up this many entries at once, as integers of the weights' item size.
_ENTRIES_AT_ONCE = 2**24
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Keys of a group that are not options, or may differ from rank to rank.
_NO_OPTIONS = ("params", "param_names", "process_group")


def verify(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, process_group: ProcessGroup | None = None
) -> Verification:
    """Make one step on this mesh, compare it with `reference_step`, and undo both.

    Call it where `optimizer.step()` would be called, after `backward()`; training then goes on as if nothing had
    happened: weights, state, counts, telemetry and random number generators keep their bits. Hooks of the optimizer do
    not run, QK-clip is not applied, and groups with `step_every` step even if they are not due. If no rank has any
    gradient, random ones are set and removed again.

    A difference counts as wrong if rounding does not explain it. The effect of rounding is measured for each matrix, by
    letting the reference multiply in a wider dtype. Weights and all state are compared.

    Copies of a weight on several ranks, by `comms` or as `DTensor`s, must be equal before the step. With `comms="none"`
    a plain tensor belongs to its rank, and is not compared with the tensors of others.

    Every rank that holds a piece of a matrix orthogonalises it twice without kernels, once in the wider dtype. Host
    memory: twice this rank's weights and state. Device memory: several times one whole Muon parameter with its gradient
    and state, and random gradients if they are needed.

    All ranks must call it.

    Args:
        model: the model; the optimizer's parameters must be among its parameters.
        optimizer: `quintic.Muon` made for the model, also as Accelerate or Lightning have wrapped it.
        process_group: the ranks that call it and get the report; None for all.

    Returns:
        A report, equal on all ranks: `report.ok` is the answer, `print(report)` shows the differences. A wrong step
        raises no error.

    Raises:
        TypeError: the optimizer is not a `quintic.Muon`.
        ValueError, FloatingPointError: as `optimizer.step()` and `reference_step`; everything is restored before.
    """
    optimizer = muon_in(optimizer, "verify")
    names: dict[Tensor, str] = {param: name for name, param in model_parameters(model)}
    problems = _foreign_problem([name for name, param in named_parameters(optimizer) if param not in names])
    kept = StepSnapshot(optimizer)
    given: list[Tensor] = []
    roundings: Roundings = {}
    try:
        given = _give_gradients(optimizer, process_group)
        kept.keep_gradients()
        # The optimizer's step, without the layers in which PyTorch calls hooks and schedulers count steps.
        kept.make_due()
        unwrap_hooks(type(optimizer).step)(optimizer)
        actual = snapshot(optimizer)
        # The reference's step, from the same weights, state and gradients.
        kept.restore()
        kept.make_due()
        run_reference(optimizer, roundings)
        differences, stepped = _compare(optimizer, kept.values, actual, roundings)
    finally:
        kept.restore()
        for param in given:
            param.grad = None
    # The report has the model's names of parameters, which the optimizer may not know.
    renamed = {name: names.get(param, name) for name, param in named_parameters(optimizer)}
    differences = [replace(difference, name=renamed[difference.name]) for difference in differences]
    stepped = {renamed[name]: count for name, count in stepped.items()}
    rank_report = RankReport(differences, stepped, problems, _options(optimizer, names), _copies(optimizer, names))
    return merge_reports(all_gather_values(rank_report, process_group))


def _foreign_problem(foreign: Sequence[str]) -> list[str]:
    """Return a line about parameters of the optimizer that the model does not have; an empty list if it has all."""
    if not foreign:
        return []
    more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
    return [
        f"{foreign[0]}: this parameter of the optimizer is none of the model's{more}; make the optimizer after the "
        f"model is moved, wrapped (fully_shard, parallelize_module) or compiled"
    ]


def _options(optimizer: Muon, names: Mapping[Tensor, str]) -> dict[tuple[str, tuple[int, ...]], dict[str, str]]:
    """Return the options, as text, of each parameter that several ranks share, see `RankReport`."""
    of_groups = [
        {key: _value_text(value) for key, value in group.items() if key not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]
    return {
        (names.get(parameter.param, parameter.name), parameter.ranks): of_groups[parameter.group.number]
        for parameter in optimizer._plans.parameters()
        if parameter.layout is not None
    }


@torch.no_grad()
def _copies(optimizer: Muon, names: Mapping[Tensor, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return checksums of this rank's pieces of the parameters that several ranks share, see `RankReport`."""
    copies = {}
    for parameter in optimizer._plans.parameters():
        layout = parameter.layout
        if layout is not None and this_rank() in layout.ranks:
            name = names.get(parameter.param, parameter.name)
            place = f"{layout.box_of(this_rank())} of ranks {sorted(layout.ranks)}"
            copies[name, place] = this_rank(), _checksum(local_tensor(parameter.param.detach()))
    return copies


def _checksum(values: Tensor) -> int:
    """Return a checksum of the bits of all entries, which does not depend on the tensor's memory order."""
    bits, total = values.reshape(-1).view(_INTEGERS[values.itemsize]), 0
    # A limited number at a time, because entries become integers of 64 bits.
    for start in range(0, len(bits), _ENTRIES_AT_ONCE):
        some = bits[start : start + _ENTRIES_AT_ONCE].long()
        places = torch.arange(start, start + len(some), device=bits.device)
        # The sum of each entry times an odd number that belongs to its place, modulo 2^64.
        total += int(((some + 1) * (places * 2654435761 * 2 + 1)).sum())
    return total % 2**64


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    # The text of a function would have its address in it, which differs from rank to rank.
    return str(getattr(value, "__qualname__", "a function")) if callable(value) else repr(value)


@torch.no_grad()
def _give_gradients(optimizer: Muon, process_group: ProcessGroup | None) -> list[Tensor]:
    """Set random gradients if no rank has any, and return the parameters that got one; all ranks must call it."""
    has_gradients = any(param.grad is not None for _, param in named_parameters(optimizer))
    if any(all_gather_values(has_gradients, process_group)):
        return []
    given = []
    for number, parameter in enumerate(optimizer._plans.parameters()):
        # The seed depends on parameter and box, so that copies get equal gradients; where the optimizer averages, also
        # on the rank. A generator of our own does not change the user's random numbers.
        box = None if parameter.layout is None else parameter.layout.box_of(this_rank())
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
    optimizer: Muon, before: Values, actual: Values, roundings: Roundings
) -> tuple[list[Difference], dict[str, int]]:
    """Return this rank's differences, worst first, and the number of matrices of each parameter that was stepped.

    The tensors now are the reference's; `before` and `taken` are those before the steps and after the optimizer's.
    """
    differences: list[Difference] = []
    stepped: dict[str, int] = {}
    states = optimizer.state
    for parameter in optimizer._plans.parameters():
        # To the parameter's device: the snapshots are in host memory, and so is state with `offload`.
        expected, first, second = (
            {key: value.to(parameter.param.device) for key, value in values.items()}
            for values in (local_values(states, parameter.param), before[parameter.param], actual[parameter.param])
        )
        if expected.keys() == {"weight"}:
            continue  # a frozen parameter, without state
        if parameter.group.rule.orthogonalizes:
            differences += _compare_matrices(parameter, expected, second, first, roundings)
        elif parameter.param.grad is not None or parameter.sharded is not None or parameter.is_cut:
            differences += _compare_adamw(parameter, expected, second, first)
        if parameter.param.grad is not None:
            shapes = parameter.group.view.shapes(parameter.param.shape) if parameter.group.rule.orthogonalizes else ()
            stepped[parameter.name] = sum(count for count, _, _ in shapes)
    return sorted(differences, key=severity_key)[:_MOST_REPORTED], stepped


def _compare_adamw(
    parameter: Parameter, expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """Yield the differences of this rank's piece, one per tensor. All ranks that share the parameter must call it."""
    for key in ("weight", EXP_AVG, EXP_AVG_SQ, STEP):
        old, right, mine = (_value(parameter, values, key) for values in (before, expected, actual))
        rounding = parameter.of_groups(rounding_of, expected[key]) if is_packed(expected[key]) else 0.0
        if right.numel() == 0:
            continue
        scale = largest(right - old if key == "weight" else right)
        if key == "weight":
            allowed = allowed_change(
                parameter.group, old, right, _ADAMW * parameter.group.effective_lr, master_of(expected)
            )
        else:
            allowed = (torch.zeros_like(right) if key == STEP else allowed_state(right, old)) + rounding
        yield _difference(parameter, key, right, mine, allowed, scale)


def _compare_matrices(
    parameter: Parameter,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    roundings: Roundings,
) -> Iterator[Difference]:
    """Yield the differences of all matrices, and of this rank's vector state. All ranks that share it must call it."""
    # Matrices are numbered through all blocks of the view; `holders` are the ranks that have state of a matrix.
    view, shape = parameter.group.view, parameter.param.shape
    numbers = [(block, index) for block, (count, _, _) in enumerate(view.shapes(shape)) for index in range(count)]
    holders = parameter.holders() if parameter.sharded is not None else {}
    # Weight and state of its shape: gathered, since a matrix may lie on several ranks, and compared as (b, m, n).
    of_updates = {spec.name for spec in parameter.group.rule.state_of_updates}  # and have the rounding of these
    for key in ("weight", *(spec.name for spec in parameter.group.rule.state if spec.shape == "param")):
        gather = parameter.whole if key == "weight" else partial(parameter.whole_of, key)
        wholes = [gather(_value(parameter, values, key)) for values in (before, expected, actual)]
        batches = [view.batches(whole) for whole in wholes]
        steps = view.batches(rounding_of(gather(expected[key]))) if is_packed(expected[key]) else None
        for number, (block, index) in enumerate(numbers):
            old, right, mine = (batch[block][index] for batch in batches)
            is_elsewhere = key != "weight" and this_rank() not in holders.get((block, index), parameter.ranks)
            if right.numel() == 0 or is_elsewhere:
                continue
            # A parameter that was not stepped has no entry, and must not have changed.
            rounding = roundings.get((parameter.param, number), Rounding(0.0, 0.0))
            if key == "weight":
                scale = largest(right - old)
                slack = _ROUNDINGS * rounding.update + _CHANGE * scale
                decay_factor = _decay_factor(parameter.group, number, *right.shape)
                allowed = allowed_change(parameter.group, old, right, slack, master_of(expected), decay_factor)
            else:
                scale, allowed = largest(right), allowed_state(right, old) + (steps[block][index] if steps else 0.0)
                if key in of_updates:
                    allowed = allowed + _ROUNDINGS * rounding.second_moment
            one = _difference(parameter, key, right, mine, allowed, scale, matrix=number, num_matrices=len(numbers))
            wrong = (right - mine).abs() > allowed if one.ratio > 1 else None
            yield replace(one, ranks=_wrong_ranks(parameter, wholes[1], block, index, wrong))
    holders = parameter.holders()  # of vector state, a few numbers for each matrix: a rank compares its own
    for spec in parameter.group.rule.vector_state:
        if spec.name not in expected:
            continue
        all_right, all_mine = (vectors_of(spec, values[spec.name], shape, view) for values in (expected, actual))
        for number, (block, index) in enumerate(numbers):
            right, mine = all_right[block][index], all_mine[block][index]
            # Matrices that only other ranks hold have no numbers here.
            if right.numel() == 0 or this_rank() not in holders.get((block, index), parameter.ranks):
                continue
            rounding = roundings.get((parameter.param, number), Rounding(0.0, 0.0))
            allowed = allowed_state(right, right) + _ROUNDINGS * rounding.second_moment
            yield _difference(
                parameter, spec.name, right, mine, allowed, largest(right), matrix=number, num_matrices=len(numbers)
            )


def _decay_factor(group: Group, number: int, m: int, n: int) -> float:
    """Return the factor on the weight decay of a matrix: that of its update with `scale_decay`, else 1."""
    if not group.scale_decay:
        return 1.0
    multiplier = group.lr_multipliers[number] if group.lr_multipliers else 1.0
    return abs(group.rule.lr_factor(group.adjust_lr, m, n) * multiplier)


def _wrong_ranks(parameter: Parameter, whole: Tensor, block: int, index: int, wrong: Tensor | None) -> tuple[int, ...]:
    """Return the ranks that hold wrong entries of a matrix; if `wrong` is None, all ranks that hold entries of it.

    `wrong` is an (m, n) mask, `whole` the whole parameter.
    """
    if len(parameter.own_copy) == 1:
        return parameter.own_copy
    # Mark the entries in the parameter's shape, and look which ranks' pieces have marks.
    marks = torch.zeros_like(whole, dtype=torch.bool)
    batches = [batch.clone() for batch in parameter.group.view.batches(marks)]
    batches[block][index] = True if wrong is None else wrong
    parameter.group.view.write_(marks, batches)
    return tuple(rank for rank in parameter.own_copy if bool(parameter.piece(marks, rank).any()))


def _value(parameter: Parameter, values: Mapping[str, Tensor], key: str) -> Tensor:
    """Return this rank's piece of a state, or of a weight in full precision. All ranks that share it must call it."""
    if key != "weight":
        return parameter.of_groups(read_packed, values[key]) if is_packed(values[key]) else values[key]
    of_master = master_key(values)
    if of_master is None or parameter.sharded is None:
        return full_precision(values[key], None if of_master is None else values[of_master])
    # The master is sharded over ranks: gather it for this rank's weight.
    return full_precision(values[key], parameter.whole_of(of_master, values[of_master]))


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
    """Return the difference between a tensor of this rank and the reference's; NaN agrees with NaN.

    `right`, `mine` and `allowed` have one shape; `scale` is the number that `Difference.relative` divides by.
    """
    # Equal entries, infinite ones too, are at distance 0; NaN is infinitely far from a number.
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
