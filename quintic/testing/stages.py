"""Checks of each stage of a rule by itself: the promises of `optim/rules/stages.py`.

A stage is called twice in a row from zero state, on batches and on single matrices or entries, and on the meta device,
whose tensors have no values. A finding names the stage, the batch and the first tensor that is wrong.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quintic.optim.polar.orthogonalize import orthogonalize
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import (
    WEIGHT,
    DriftStage,
    GradientStage,
    MatrixStage,
    PolarStage,
    StageOptions,
    StateSpec,
    WeightStage,
    vector_shape,
)

__all__ = ["check_stages", "described"]

_SHAPES = ((6, 6), (9, 5), (5, 9), (1, 4))
_BATCH = 5
# The number of the matrix of zeros in a batch: a gradient may be zero.
_ZEROS = 2
# An entry far above the others: a stage may clip by the size of all, and ordinary entries may never reach its limit.
_OUTLIER = 1000.0
# The shape for element-wise stages: the outlier is 30 times the root mean square of all entries.
_ROWS, _COLUMNS = 20, 50

_OPTIONS = StageOptions(lr=0.02, weight_decay=0.1)

# What PyTorch says where the meta device lacks a value that is asked for.
_OF_VALUES = ("item()", "no data", "to numpy", "data-independent", "aten::equal", "local_scalar_dense")

# Tensors by name -> results by name, with the state as it is afterwards.
_Call = Callable[[dict[str, Tensor], dict[str, Tensor], StageOptions], dict[str, Tensor]]


def check_stages(rule: UpdateRule) -> list[str]:
    """Return the mistakes of the stages of a rule, a line each."""
    findings: list[str] = []
    elementwise = [stage for stage in (rule.direction, rule.drift) if isinstance(stage, GradientStage | DriftStage)]
    for one in elementwise:
        findings += _guarded(one, partial(_check_elementwise, one))
    if rule.polar is not None:
        findings += _guarded(rule.polar, partial(_check_matrices, rule.polar, ()))
    for place, stage in enumerate(rule.stages):
        # The values that an earlier stage leaves in state that both declare.
        earlier = [before for before in rule.stages[:place] if set(before.state) & set(stage.state)]
        findings += _guarded(stage, partial(_check_matrices, stage, earlier))
    return findings


def _guarded(stage: object, check: Callable[[], list[str]]) -> list[str]:
    """Return the first thing that a check finds, or the error that the stage raises, with its name."""
    name = type(stage).__name__
    try:
        found = check()
    except KeyError as error:
        found = [f"asks for state {error} that it does not declare: add a StateSpec to its `state`"]
    except Exception as error:
        found = [f"raises {described(error)}"]
        # Without a text it comes from the stage's base class.
        if isinstance(error, NotImplementedError) and not str(error):
            found = [f"has no method {traceback.extract_tb(error.__traceback__)[-1].name}"]
    return [f"stages: {name}: {line}" for line in found[:1]]


def described(error: Exception) -> str:
    """Return an error's type and text, or, if it has none, the line that raised it."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else f"{name} without a message, {_place(error)}"


def _place(error: Exception) -> str:
    """Return the last line outside of PyTorch that an error went through."""
    library = Path(torch.__file__).parent
    frames = [one for one in traceback.extract_tb(error.__traceback__) if library not in Path(one.filename).parents]
    last = frames[-1]
    return f"in line {last.lineno} of {Path(last.filename).name}" + (f": {last.line}" if last.line else "")


# ------------------------------------------------------------------------------------------------------ whole matrices


_WholeStage = MatrixStage | WeightStage


def _check_matrices(stage: _WholeStage | PolarStage, earlier: Sequence[_WholeStage]) -> list[str]:
    specs: list[StateSpec] = []
    if not isinstance(stage, PolarStage):
        specs = list(dict.fromkeys(spec for one in (*earlier, stage) for spec in one.state))
    for m, n in _SHAPES:
        call, inputs = _call_of(stage, earlier), _inputs_of((*earlier, stage), m, n)
        what = f"batch of {_BATCH} matrices ({m}, {n})"
        whole, wrong = _twice(call, inputs, specs, what)
        wrong = wrong or _wrong_shapes(stage, whole, m, n) or _wrong_values(whole, what)
        if isinstance(stage, PolarStage):
            wrong = wrong or _wrong_rounds(stage, inputs["matrices"])
        # A decision on the host would show as a difference between batches, too, with less to say about the cause.
        if wrong := wrong or _waits(call, inputs, specs):
            return wrong
        # Each matrix by itself, and all in another order, with the bits that it has in the batch.
        parts = [[index] for index in range(_BATCH)] + [[4, 3, 2, 1, 0], [0, 3]]
        for part in parts:
            found, _ = _twice(call, {name: value[part] for name, value in inputs.items()}, specs, what)
            for name, value in found.items():
                for place, index in enumerate(part):
                    if not _same(value[place], whole[name][index]):
                        return [
                            f"depends on the batch: {name} of matrix {index} of a {what} has other bits in a batch of "
                            f"matrices {part}; add up with quintic.update_rules.sums and norms"
                        ]
    return []


def _inputs_of(stages: Sequence[object], m: int, n: int) -> dict[str, Tensor]:
    """Return the tensors that a stage gets beside its state, (b, m, n) each, and scales (b, 1, 1)."""
    generator = torch.Generator().manual_seed(m * 31 + n)
    matrices = torch.randn(_BATCH, m, n, generator=generator)
    matrices[_ZEROS] = 0.0
    matrices[-1, 0, 0] = _OUTLIER
    inputs = {"matrices": matrices}
    if any(isinstance(one, WeightStage) or getattr(one, "reads_weights", False) for one in stages):
        inputs[WEIGHT] = torch.randn(_BATCH, m, n, generator=generator) * 0.3
        inputs[WEIGHT][0] = 0.0
    if any(isinstance(one, WeightStage) for one in stages):
        inputs["scales"] = torch.rand(_BATCH, 1, 1, generator=generator) + 0.5
    return inputs


def _call_of(stage: _WholeStage | PolarStage, earlier: Sequence[_WholeStage]) -> _Call:
    def call(inputs: dict[str, Tensor], state: dict[str, Tensor], options: StageOptions) -> dict[str, Tensor]:
        for one in earlier:
            _apply(one, inputs, state, options)
        if isinstance(stage, PolarStage):
            return {"matrices": stage.apply(inputs["matrices"], _polar)}
        return _apply(stage, inputs, state, options)

    return call


def _apply(
    stage: _WholeStage, inputs: Mapping[str, Tensor], state: dict[str, Tensor], options: StageOptions
) -> dict[str, Tensor]:
    own = {spec.name: state[spec.name] for spec in stage.state}
    if isinstance(stage, WeightStage):
        keep, rate = stage.apply(inputs[WEIGHT], inputs["matrices"], inputs["scales"], own, options)
        result = {"keep": keep, "rate": rate}
    else:
        if stage.reads_weights:
            own[WEIGHT] = inputs[WEIGHT]
        matrices, factors = stage.apply(inputs["matrices"], own, options)
        result = {"matrices": matrices} | ({} if factors is None else {"factors": factors})
    # Tensors that a stage has put in place of its state are noticed by the caller.
    state.update((spec.name, own[spec.name]) for spec in stage.state)
    return result


def _wrong_rounds(stage: PolarStage, matrices: Tensor) -> list[str]:
    rounds = 0

    def counted(given: Tensor) -> Tensor:
        nonlocal rounds
        rounds += 1
        return _polar(given)

    stage.apply(matrices, counted)
    m, n = matrices.shape[1:]
    promised = stage.rounds_of(m, n)
    return [f"orthogonalises {rounds} times, and rounds_of({m}, {n}) is {promised}"] * (rounds != promised)


def _polar(matrices: Tensor) -> Tensor:
    if matrices.is_meta:
        return torch.empty_like(matrices)
    return orthogonalize(matrices, "polar_express", compute_dtype=torch.float32)


def _wrong_shapes(stage: object, result: Mapping[str, Tensor], m: int, n: int) -> list[str]:
    """Return a line for a result that does not have the shape that the stage declares."""
    shapes = {"matrices": (_BATCH, m, n)}
    if isinstance(stage, MatrixStage) and stage.factors is not None:
        shapes["factors"] = (_BATCH, *vector_shape(stage.factors, m, n))
    elif isinstance(stage, MatrixStage) and "factors" in result:
        return ["returns factors that it does not declare: set `factors` to their shape"]
    if isinstance(stage, WeightStage):
        shape = (_BATCH, *vector_shape(stage.numbers, m, n))
        shapes = {"keep": shape, "rate": shape}
    for name, shape in shapes.items():
        if name not in result or result[name].shape != shape:
            found = tuple(result[name].shape) if name in result else None
            return [f"returns {name} of the shape {found} for matrices ({m}, {n}), and declares {shape}"]
    return []


# -------------------------------------------------------------------------------------------------------- element-wise


def _check_elementwise(stage: GradientStage | DriftStage) -> list[str]:
    name = "gradient" if isinstance(stage, GradientStage) else "step"
    entries = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0))
    entries[3], entries[1, 2] = 0.0, _OUTLIER

    def call(inputs: dict[str, Tensor], state: dict[str, Tensor], options: StageOptions) -> dict[str, Tensor]:
        return {"result": stage.apply(inputs[name], state, options)}

    what = f"tensor ({_ROWS}, {_COLUMNS})"
    whole, wrong = _twice(call, {name: entries}, stage.state, what)
    if not wrong and whole["result"].shape != entries.shape:
        wrong = [f"returns the shape {tuple(whole['result'].shape)} for a {name} ({_ROWS}, {_COLUMNS})"]
    if wrong := wrong or _wrong_values(whole, what) or _waits(call, {name: entries}, stage.state):
        return wrong
    pieces: dict[str, Callable[[Tensor], Tensor]] = {
        "rows 0 to 2": lambda x: x[:3],
        "columns 4 and later": lambda x: x[:, 4:],
        "entries 10 to 40, in a row": lambda x: x.flatten()[10:41],
        "row 5": lambda x: x[5],
    }
    for title, piece in pieces.items():
        found, _ = _twice(call, {name: piece(entries).clone()}, stage.state, what)
        for key, value in found.items():
            if not _same(value, piece(whole[key])):
                return [
                    f"is not element-wise: {key} of {title} has other bits than as part of a {what}; what needs whole "
                    f"matrices belongs into a MatrixStage"
                ]
    return []


# ----------------------------------------------------------------------------------------------------------- any stage


def _twice(
    call: _Call, inputs: Mapping[str, Tensor], specs: Sequence[StateSpec], what: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return results and state after two calls from zero state, and mistakes in its use of them."""
    results = []
    # All of it twice: nothing but the arguments may decide.
    for _ in range(2):
        state = {spec.name: _zeros(spec, next(iter(inputs.values()))) for spec in specs}
        kept, drawn = dict(state), torch.get_rng_state()
        for factor in (1.0, 0.5):
            given = {
                name: value * (factor if name in ("matrices", "gradient") else 1) for name, value in inputs.items()
            }
            copies = {name: value.clone() for name, value in given.items()}
            result = call(given, state, _OPTIONS)
            for name, value in copies.items():
                if not _same(value, given[name]):
                    return result, [f"changes its input: {name} of a {what}; return a new tensor"]
        for name, value in kept.items():
            if state.get(name) is not value:
                return result, [f"replaces the state {name!r}: change the tensor in place, such as with copy_"]
            memory = value.untyped_storage().data_ptr()
            if any(memory == one.untyped_storage().data_ptr() for one in result.values()):
                return result, [f"returns the memory of its state {name!r}: return a copy"]
        if not torch.equal(drawn, torch.get_rng_state()):
            return result, ["draws random numbers: ranks and replays of a step would draw others"]
        results.append(result | {f"state {name!r}": value for name, value in state.items()})
    for name, value in results[0].items():
        if not _same(value, results[1][name]):
            return results[0], [
                f"remembers something outside of its state: {name} of a {what} has other bits when the same two calls "
                f"are made again; declare all that it keeps as StateSpecs"
            ]
    return results[0], []


def _zeros(spec: StateSpec, like: Tensor) -> Tensor:
    if not spec.is_vector:
        return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    return torch.zeros(len(like), *spec.vector_shape(*like.shape[1:]), device=like.device)


def _wrong_values(result: Mapping[str, Tensor], what: str) -> list[str]:
    for name, value in result.items():
        if not bool(value.isfinite().all()):
            index = int((~value.isfinite()).flatten(1).any(1).nonzero()[0])
            part = f"matrix {index}" if value.ndim == 3 else f"row {index}"
            kind = " (it is zero)" if value.ndim == 3 and index == _ZEROS else ""
            return [f"is not finite: {name} of {part}{kind} of a {what}; state begins as zeros, and inputs may be zero"]
    return []


def _waits(call: _Call, inputs: Mapping[str, Tensor], specs: Sequence[StateSpec]) -> list[str]:
    """Return a line if a stage asks for values: of tensors, or of options that are tensors on the device."""
    number = torch.zeros((), dtype=torch.float64, device="meta")
    options = replace(_OPTIONS, lr=number, weight_decay=number, momentum=number)
    given = {name: value.to("meta") for name, value in inputs.items()}
    state = {spec.name: _zeros(spec, next(iter(given.values()))) for spec in specs}
    try:
        call(given, state, options)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if any(words in str(error) for words in _OF_VALUES):
            return [
                f"asks for a value, {_place(error)}; float(), item(), if, and alpha= or value= with an option wait for "
                f"the device, and layouts decide differently: use torch.where, lerp_ and arithmetic, which take tensors"
            ]
        return [
            f"fails on tensors without values (the meta device, with lr, weight_decay and momentum as tensors), "
            f"{_place(error)}: {str(error).splitlines()[0]}"
        ]
    return []


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN is the same as NaN."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
