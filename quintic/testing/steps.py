"""Steps of an optimizer with a rule on one device, which are also the reference of other layouts.

The model has a weight for every kind of view, a weight of zeros, and one of a single row. Its gradients follow from
names and step numbers. In step 1 some weights have no gradient; in step 2 one gradient has a NaN.
"""

import copy
import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from quintic.optim.captured_step import CapturedStep
from quintic.optim.layout.views import Experts, Heads, Matrix, View
from quintic.optim.muon import Muon
from quintic.optim.rules.rule import UpdateRule
from quintic.testing.stages import described

__all__ = [
    "CASES",
    "STEPS",
    "Snapshot",
    "Trained",
    "as_param",
    "check_graphs",
    "check_one_device",
    "comparable",
    "saved_state",
    "wrong_matrix",
]

# Name -> shape and view.
_WEIGHTS: Mapping[str, tuple[tuple[int, ...], View]] = {
    "tall": ((16, 6), Matrix()),
    "twin": ((16, 6), Matrix()),
    "wide": ((6, 20), Matrix()),
    "square": ((8, 8), Matrix()),
    "zeros": ((8, 6), Matrix()),
    "odd": ((5, 7), Matrix()),
    "row": ((1, 8), Matrix()),
    "heads": ((12, 8), Heads(3)),
    "experts": ((4, 6, 4), Experts(transposed=True)),
    "transposed": ((10, 6), Matrix(transposed=True)),
}

STEPS = range(4)
# The step and weights without gradients, and the step and weight with a NaN.
_GAP_STEP, _GAPS = 1, ("twin", "heads", "experts")
_NAN_STEP, _NAN = 2, "square"


class Case(NamedTuple):
    """The dtype of weights, and options of the optimizer."""

    dtype: torch.dtype
    options: Mapping[str, Any]


CASES = {
    "float32": Case(torch.float32, {"compute_dtype": torch.float32}),
    "bfloat16 with mantissas": Case(torch.bfloat16, {"master": "mantissa", "state_dtype": "bf16"}),
    "float64": Case(torch.float64, {}),
}

Snapshot = dict[str, dict[str, Tensor]]
"""Name of a weight -> "weight" and names of its state -> copies of the tensors."""


class Trained:
    """A model and its optimizer, before the first step."""

    def __init__(
        self,
        rule: UpdateRule,
        case: str,
        options: Mapping[str, Any],
        names: Iterable[str] = _WEIGHTS,
        *,
        wrap: Callable[[nn.Module], None] = lambda model: None,
        device: str = "cpu",
        comms: str = "none",
    ) -> None:
        dtype, own = CASES[case]
        self.model = nn.Module()
        for name in names:
            weight = _random(f"weight {name}", _WEIGHTS[name][0]).to(dtype) * (0.0 if name == "zeros" else 0.3)
            self.model.register_parameter(name, nn.Parameter(weight.to(device)))
        wrap(self.model)
        views: dict[View, list[tuple[str, Tensor]]] = {}
        for name, param in self.model.named_parameters():
            views.setdefault(_WEIGHTS[name][1], []).append((name, param))
        groups = [{"params": params, "algorithm": "muon", "view": view} for view, params in views.items()]
        given = {"lr": 0.02, "weight_decay": 0.1, "on_nonfinite": "skip", **own, **options}
        self.optimizer = Muon(groups, update_rule=rule, comms=comms, **given)  # type: ignore[arg-type]

    def step(self, number: int, *, has_gaps: bool = True, take: Callable[[], object] | None = None) -> None:
        """Give gradients, and step; without gaps this rank has gradients that others may lack."""
        for name, param in self.model.named_parameters():
            param.grad = None
            if not (number == _GAP_STEP and name in _GAPS and has_gaps):
                gradient = _random(f"gradient {name} {number}", param.shape).to(param.dtype)
                if number == _NAN_STEP and name == _NAN:
                    gradient[0, 0] = torch.nan
                param.grad = as_param(gradient.to(param.device), param)
        (take or self.optimizer.step)()

    def snapshot(self) -> Snapshot:
        """Return copies of all weights and state, of a model of plain tensors on one device."""
        state = self.optimizer.state
        return {
            name: {"weight": param.detach().clone(), **{key: value.clone() for key, value in state[param].items()}}
            for name, param in self.model.named_parameters()
        }


def _random(label: str, shape: Sequence[int]) -> Tensor:
    """Return float32 normal numbers that follow from the label alone."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(label.encode())))


def as_param(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has whole in the layout of another, without a message."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def comparable(tensor: Tensor) -> Tensor:
    """Return the piece of a tensor that this rank has, without uint16, for which PyTorch has few operations."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.to(torch.int32) if local.dtype == torch.uint16 else local


def saved_state(optimizer: Muon) -> dict[str, dict[str, Tensor]]:
    """Return all state by name of the weight, as a state dict has it; all ranks must call it."""
    saved = optimizer.state_dict()
    pairs = [
        pair for group in saved["param_groups"] for pair in zip(group["param_names"], group["params"], strict=True)
    ]
    return {name: saved["state"][index] for name, index in pairs}


def wrong_matrix(name: str, found: Tensor, expected: Tensor) -> str:
    """Return which matrix of a weight differs first, in its weight, its state, or the vectors of its state."""
    # The positions of this rank's entries in the whole tensor.
    numbers = torch.arange(expected.numel()).view(expected.shape)
    local, value = comparable(as_param(numbers, found)), comparable(found)
    wanted = comparable(expected).flatten()[local.flatten()].view(value.shape)
    wrong = (value != wanted) | (value.isnan() != wanted.isnan())
    first = int(local[wrong].min())
    batch = _WEIGHTS[name][1].batches(numbers if numbers.ndim > 1 else torch.empty(_WEIGHTS[name][0]))[0]
    if numbers.ndim > 1:
        index = int((batch == first).flatten(1).any(1).nonzero()[0])
    else:
        index = first // max(1, expected.numel() // len(batch))
    largest = float((value[wrong].double() - wanted[wrong].double()).abs().max())
    return f"matrix {index} of {len(batch)}, {int(wrong.sum())} entries differ, by up to {largest:.3g}"


def _differences(what: str, found: Snapshot, expected: Snapshot) -> list[str]:
    """Return a line for the first tensor of each weight that has other values."""
    lines = []
    for name in found:
        for key, value in found[name].items():
            if not torch.equal(value, expected[name][key]):
                lines.append(f"{what}: {name}, {key}: {wrong_matrix(name, value, expected[name][key])}")
                break
    return lines


def check_one_device(rule: UpdateRule, case: str, options: Mapping[str, Any]) -> tuple[Snapshot, list[str]]:
    """Return weights and state after all steps, and the mistakes on one device, a line each."""
    start = partial(Trained, rule, case, options)
    try:
        trained = start()
        findings = _wrong_start(trained, rule, f"{case}: state")
        # To compare weights and state before and after each step.
        snapshots = [trained.snapshot()]
        for number in STEPS:
            trained.step(number)
            snapshots.append(trained.snapshot())
        last = snapshots[-1]
        findings += _wrong_steps(snapshots, case)
        if findings:
            return last, findings
        again = start()
        for number in STEPS:
            again.step(number)
        what = "repetition: new steps from the same weights end elsewhere, something is remembered outside of the state"
        findings += _differences(f"{case}: {what}", again.snapshot(), last)
        # The steps of a weight do not depend on others, and leave no trace where they are skipped.
        backwards = start(reversed(list(_WEIGHTS)))
        # These say the same for every dtype, and take longer.
        alone = {name: start([name]) for name in (_WEIGHTS if case == "float32" else ())}
        for number in STEPS:
            backwards.step(number)
            for name, one in alone.items():
                if number != _NAN_STEP and not (number == _GAP_STEP and name in _GAPS):
                    one.step(number)
        findings += _differences(f"{case}: batch: with the weights in another order", backwards.snapshot(), last)
        for one in alone.values():
            what = "batch: a weight alone, without the steps that it skips"
            findings += _differences(f"{case}: {what}", one.snapshot(), last)
        findings += _differences(f"{case}: save and reload", _reloaded(start).snapshot(), last)
    except Exception as error:
        return {}, [f"{case}: one device: {described(error)}"]
    return last, findings


def _wrong_start(trained: Trained, rule: UpdateRule, what: str) -> list[str]:
    """Return a line for state that does not begin as the rule declares it."""
    lines = []
    masters = {"master", "mantissa"}
    for name, param in trained.model.named_parameters():
        state = trained.optimizer.state[param]
        declared = {spec.name: spec for spec in rule.state}
        if state.keys() - masters != declared.keys():
            lines.append(f"{what}: {name} has {sorted(state)}, declared are {sorted(declared)}")
        for key, spec in declared.items():
            if key in state and (bool(state[key].any()) or (spec.shape == "param" and state[key].shape != param.shape)):
                lines.append(f"{what}: {name}, {key}: does not begin as zeros of the declared shape")
    return lines


def _wrong_steps(snapshots: Sequence[Snapshot], case: str) -> list[str]:
    """Return a line for each weight or state that is not finite, or changed in a step that it must skip."""
    lines = []
    for name, tensors in snapshots[-1].items():
        wrong = next((key for key, value in tensors.items() if not bool(value.isfinite().all())), None)
        if wrong is not None:
            lines.append(f"{case}: finite: {name}, {wrong}: not finite after {len(STEPS)} steps")
        elif torch.equal(tensors["weight"], snapshots[0][name]["weight"]):
            lines.append(f"{case}: finite: {name}: no step has changed the weight")
    gap, nan = (snapshots[number : number + 2] for number in (_GAP_STEP, _NAN_STEP))
    without = {name: gap[1][name] for name in _GAPS}
    lines += _differences(f"{case}: missing gradients: a step without a gradient changed", without, gap[0])
    lines += _differences(f"{case}: on_nonfinite='skip': a step with a NaN changed", nan[1], nan[0])
    return lines


def _reloaded(start: Callable[[], Trained]) -> Trained:
    """Return a model after all steps, that went through a file in the middle."""
    first, second = start(), start()
    for number in STEPS[:2]:
        first.step(number)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for number in STEPS[2:]:
        second.step(number)
    return second


def check_graphs(rule: UpdateRule, options: Mapping[str, Any]) -> list[str]:
    """Return a line for each weight or state that differs between steps on a GPU with and without a CUDA graph.

    In float32 also for weights that differ between kernels and plain PyTorch by more than rounding. float64 is left
    out: plain PyTorch computes it, which no `CapturedStep` takes.
    """
    findings = []
    for case in ("float32", "bfloat16 with mantissas"):
        plain, captured = (Trained(rule, case, options, device="cuda") for _ in range(2))
        without = Trained(rule, case, {**options, "kernels": "torch"}, device="cuda")
        try:
            with CapturedStep(captured.optimizer) as take:
                # Two steps as usual, one that is captured, two that are replayed; with a schedule and a NaN.
                for number in (0, 3, 4, _NAN_STEP, 5):
                    for trained in (plain, captured, without):
                        for group in trained.optimizer.param_groups:
                            group["lr"] *= 0.9
                        trained.step(number, take=take if trained is captured else None)
        except Exception as error:
            findings.append(f"{case}: CUDA graphs: {described(error)}")
            continue
        found = [
            {name: {key: value.cpu() for key, value in tensors.items()} for name, tensors in one.snapshot().items()}
            for one in (captured, plain, without)
        ]
        findings += _differences(f"{case}: CUDA graphs: a captured step differs", found[0], found[1])
        for name, tensors in found[2].items() if case == "float32" else ():
            one, other = found[1][name]["weight"], tensors["weight"]
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-4):
                findings.append(f"{case}: kernels: {name}, weight: {wrong_matrix(name, one, other)} from plain PyTorch")
    return findings
