"""Steps of an optimizer on a laid-out model, compared with the same steps on one device.

The reference is the same optimizer on the unwrapped model, in a process of its own, so that both run with the same
number of threads. Layouts share it. Gradients are random and differ from step to step; no forward pass is needed.
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import wrappings
from harness import DEVICE, ON_GPUS, run
from models import (
    Awkward,
    Narrow,
    gathered,
    give_gradients,
    gradient,
    held_by,
    local_of,
    mean_gradient,
    rules,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import quintic

__all__ = [
    "CASES",
    "EIGHTS",
    "NO_GAPS",
    "TAKES_ALL",
    "Case",
    "Gaps",
    "Layout",
    "Reference",
    "disagreements",
    "fused_adamw_tolerance",
    "reference",
    "run_layout",
]

# With QUINTIC_TEST_RULES=all every layout has all rules and state of 8 bits, and checkpoints go between more layouts.
TAKES_ALL = os.environ.get("QUINTIC_TEST_RULES") == "all"

MODELS: dict[str, Callable[..., nn.Module]] = {
    "awkward": functools.partial(Awkward, False),
    "awkward with extras": functools.partial(Awkward, True),
    "awkward of eights": functools.partial(Awkward, False, unit=32),
    "narrow": Narrow,
}
"""Functions that return a model in a dtype, float32 if there is none."""

_ADAMW_LR = 0.01


def fused_adamw_tolerance(num_steps: int, lr: float) -> tuple[float, float]:
    """Return the tolerances (rtol, atol) of float32 weights that AdamW updates in pieces, against those updated whole.

    PyTorch's fused AdamW for CPUs rounds the entries behind the last full vector of a tensor otherwise than those
    before them, and a shard ends elsewhere than the whole: a last bit of the weight, and of the second moment, at every
    step. On GPUs they must be the same bits.
    """
    return (0.0, 0.0) if ON_GPUS else (num_steps * 2.0**-23, num_steps * 1e-6 * lr)


@dataclass(frozen=True)
class Case:
    """Options of the optimizer, the dtype of the weights, and whether the bank's matrices have multipliers."""

    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    multipliers: bool = False


_FLOAT32 = {"orthogonalizer": "polar_express", "compute_dtype": torch.float32}

# As the modded-nanogpt speedrun decays.
_RACE = {"weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": "strict", "scale_decay": True}

CASES = {
    "plain": Case(_FLOAT32),
    "neuron": Case({**_FLOAT32, "normalize": "neuron", "normalize_beta": 0.7}),
    "cautious": Case({**_FLOAT32, "weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": True}),
    "multipliers": Case(
        {**_FLOAT32, "nesterov": False, "weight_decay": 0.1, "adamw_weight_decay": 0.1}, multipliers=True
    ),
    "bf16": Case({"weight_decay": 0.1, "adamw_weight_decay": 0.1}, torch.bfloat16),
    "fp32": Case({**_FLOAT32, "master": "fp32"}, torch.bfloat16),
    "mantissa": Case({"master": "mantissa", "normalize": "neuron", **_RACE}, torch.bfloat16, multipliers=True),
    "8bit": Case({"master": "8bit", "normalize": "neuron", **_RACE}, torch.bfloat16, multipliers=True),
    "narrow": Case({**_FLOAT32, "state_dtype": "bf16", "normalize": "neuron", "adamw_weight_decay": 0.1}),
    "narrow_mantissa": Case({"state_dtype": "bf16", "master": "mantissa", "weight_decay": 0.1}, torch.bfloat16),
    "element": Case({**_FLOAT32, "normalize": "element", "normalize_beta": 0.7, "weight_decay": 0.1}, multipliers=True),
    "narrow_element": Case(
        {"state_dtype": "bf16", "master": "8bit", "normalize": "element", **_RACE, "max_workspace_bytes": 2000},
        torch.bfloat16,
    ),
    # The rules that read weights, mix averages or drift, in the dtypes that make it hardest.
    "muoneq": Case({**_FLOAT32, "update_rule": "muoneq", "weight_decay": 0.1}, multipliers=True),
    "muon_plus": Case({**_FLOAT32, "update_rule": "muon_plus"}),
    "nanochat": Case({"update_rule": "nanochat", "master": "mantissa", **_RACE}, torch.bfloat16, multipliers=True),
    "muown": Case({**_FLOAT32, "update_rule": "muown", "weight_decay": 0.1}, multipliers=True),
    "narrow_muown": Case({"update_rule": "muown", "state_dtype": "bf16", "master": "mantissa"}, torch.bfloat16),
    "hyperball": Case({**_FLOAT32, "update_rule": "hyperball"}, multipliers=True),
    "bf16_hyperball": Case({"update_rule": "hyperball", "master": "fp32"}, torch.bfloat16),
    "radial_brake": Case({**_FLOAT32, "update_rule": "radial_brake", "weight_decay": 0.3}),
    "relative_update": Case({"update_rule": "relative_update", "weight_decay": 0.3}, torch.bfloat16),
    "two_rate": Case({**_FLOAT32, "update_rule": "two_rate", "nesterov": False}),
    "narrow_two_rate": Case({"update_rule": "two_rate", "state_dtype": "bf16", **_RACE}, torch.bfloat16),
    "ema_nesterov": Case({**_FLOAT32, "update_rule": "ema_nesterov", **_RACE}, multipliers=True),
    "mantissa_ema_nesterov": Case({"update_rule": "ema_nesterov", "master": "mantissa"}, torch.bfloat16),
    "aurora": Case({**_FLOAT32, "update_rule": "aurora"}),
    # State of 8 bits, which needs rows of eights.
    "int8": Case({"state_dtype": "int8", "adamw_weight_decay": 0.1}),
    "int8_8bit": Case({"state_dtype": "int8", "master": "8bit", "normalize": "neuron", **_RACE}, torch.bfloat16),
    # So little that one matrix at a time is computed, and AdamW in pieces.
    "workspace": Case({**_FLOAT32, "normalize": "neuron", "max_workspace_bytes": 512}),
}

EIGHTS = frozenset(case for case in CASES if CASES[case].options.get("state_dtype") == "int8")


@dataclass(frozen=True)
class Gaps:
    """The gradients that ranks lack; none by default.

    Args:
        names: parameters that nobody has a gradient of in step 1, and not the last rank in step 2.
        others: whether in step 0 nobody has any gradient at all, and in step 3 the first rank has none.
    """

    names: tuple[str, ...] = ()
    others: bool = False

    def without(self, name: str, step: int, ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks that have no gradient of a parameter."""
        if step in (0, 3) and self.others:
            return ranks if step == 0 else ranks[:1]
        if step in (1, 2) and name in self.names:
            return ranks if step == 1 else ranks[-1:]
        return ()

    def is_skipped(self, name: str, step: int, ranks: Sequence[int], *, averages: bool) -> bool:
        """Return whether a parameter stays unchanged: where ranks average, a missing gradient counts as zeros."""
        missing = self.without(name, step, ranks)
        return len(missing) == len(ranks) if averages else len(missing) > 0


NO_GAPS = Gaps()


def _num_steps(gaps: Gaps) -> int:
    """Return the number of steps: one after all gaps, or so many that state is made, used and used again."""
    return 3 if gaps == NO_GAPS else 5


@dataclass(frozen=True)
class Layout:
    """A way to lay a model out over some ranks.

    Args:
        mesh: its shape; the number of ranks is the product.
        wrap: lays a model out over the mesh, from `wrappings`.
        cases: names of `CASES`, run one after the other.
        comms: option of the optimizer, for plain tensors.
    """

    mesh: tuple[int, ...]
    wrap: Callable[[nn.Module, DeviceMesh], None] = wrappings.plain
    cases: tuple[str, ...] = ("plain", "cautious", "mantissa", "element")
    comms: str = "none"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return torch.Size(self.mesh).numel()

    @functools.cache  # noqa: B019  a rank has few layouts, and ends with its test
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh, with axes "outer" and "inner" or just "inner"; all ranks must call it the first time."""
        ranks = torch.arange(self.world_size).view(self.mesh)
        return DeviceMesh(DEVICE, ranks, mesh_dim_names=("outer", "inner")[-len(self.mesh) :])

    @property
    def model_name(self) -> str:
        """Models among `MODELS` to lay out; parts that FSDP2 cannot shard are in those of plain tensors only."""
        if set(self.cases) <= EIGHTS:
            return "awkward of eights"
        return "awkward with extras" if self.wrap is wrappings.plain else "awkward"

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a model to lay out."""
        return MODELS[self.model_name](dtype)

    def lay_out(self, model: nn.Module) -> None:
        """Lay a model out over the mesh, in place; all ranks must call it."""
        if self.wrap is not wrappings.plain:
            self.wrap(model, self.device_mesh())


class Reference(NamedTuple):
    """The result of one device, on the CPU.

    Attributes:
        weights: of each parameter after all steps.
        state: the names of each parameter's state before the first one.
        fused: parameters whose AdamW is PyTorch's fused kernel.
    """

    weights: dict[str, Tensor]
    state: dict[str, list[str]]
    fused: frozenset[str]


class _Key(NamedTuple):
    """The inputs of a reference; `ranks` are those whose gradients are averaged, or one."""

    model: str
    title: str
    averages: bool
    ranks: tuple[int, ...]
    gaps: Gaps


_references: dict[_Key, Reference] = {}


def reference(
    model: str, titles: Sequence[str], ranks: Sequence[int], comms: str = "none", gaps: Gaps = NO_GAPS
) -> dict[str, Reference]:
    """Return the references of `disagreements` by case; to be called by the process that tests.

    Args:
        model: name of one of `MODELS`.
        titles: names of `CASES`.
        ranks: those that the model will be laid out over.
        comms: as for `disagreements`.
        gaps: missing gradients.
    """
    averages = _averages(comms)
    # Where every rank gets the same gradient, how many there are does not matter.
    keys = {title: _Key(model, title, averages, tuple(ranks) if averages else (0,), gaps) for title in titles}
    if missing := [key for key in keys.values() if key not in _references]:
        _references.update(zip(missing, run(_references_of, 1, missing, timeout=100)[0], strict=True))
    return {title: _references[key] for title, key in keys.items()}


def _references_of(rank: int, world_size: int, keys: Sequence[_Key]) -> list[Reference]:
    return [_reference_of(key) for key in keys]


def _reference_of(key: _Key) -> Reference:
    case, gaps = CASES[key.title], key.gaps
    model = MODELS[key.model](case.dtype)
    optimizer = _optimizer(model, case)
    params = dict(model.named_parameters())
    state = {name: sorted(optimizer.state[param]) for name, param in params.items()}

    def whole(name: str, param: Tensor, step: int) -> Tensor | None:
        if gaps.is_skipped(name, step, key.ranks, averages=key.averages):
            return None
        what = name, param.shape, param.dtype, step
        return mean_gradient(*what, key.ranks, gaps.without(name, step, key.ranks)) if key.averages else gradient(*what)

    for step in range(_num_steps(gaps)):
        give_gradients(model, {name: whole(name, param, step) for name, param in params.items()})
        optimizer.step()
    weights = {name: param.detach().cpu() for name, param in params.items()}
    return Reference(weights, state, frozenset(_fused_adamw_names(optimizer, case)))


def run_layout(layout: Layout, gaps: Gaps = NO_GAPS) -> None:
    """Run all cases of a layout on as many ranks as it needs.

    Raises:
        AssertionError: says which entries of which parameters are not what they are on one device.
    """
    expected = reference(layout.model_name, layout.cases, range(layout.world_size), layout.comms, gaps)
    run(_check_layout, layout.world_size, layout, expected, gaps, timeout=100)


def _check_layout(rank: int, world_size: int, layout: Layout, expected: dict[str, Reference], gaps: Gaps) -> None:
    name, wrap, ranks = layout.model_name, layout.lay_out, range(world_size)
    wrong = []
    for title in layout.cases:
        lines = disagreements(name, wrap, title, ranks, expected[title], rank=rank, gaps=gaps, comms=layout.comms)
        wrong += [f"{title}: {line}" for line in lines]
    assert not wrong, "\n".join(["other numbers than on one device:", *wrong])


def _averages(comms: str) -> bool:
    """Return whether ranks have gradients of their own, which the optimizer averages."""
    return comms in ("replicated", "sharded")


def disagreements(
    name: str,
    wrap: Callable[[nn.Module], None],
    title: str,
    ranks: Sequence[int],
    expected: Reference,
    *,
    rank: int,
    comms: str = "none",
    gaps: Gaps = NO_GAPS,
    **options: Any,
) -> list[str]:
    """Take all steps on this rank and return a line for every parameter that ends elsewhere than on one device.

    All ranks of the world must call it, also those with other models.

    Args:
        name: of one of `MODELS`.
        wrap: lays it out, in place.
        title: name of one of `CASES`.
        ranks: those that this model is laid out over.
        expected: from `reference`.
        rank: this one.
        comms: for plain tensors; the gradients of `"replicated"` and `"sharded"` differ from rank to rank.
        gaps: missing gradients.
        options: further options of the optimizer, which one device does not have.
    """
    averages, make, case, num_steps = _averages(comms), MODELS[name], CASES[title], _num_steps(gaps)

    def own(name: str, param: Tensor, step: int) -> Tensor | None:
        if rank in gaps.without(name, step, ranks):
            return None
        return gradient(name, param.shape, param.dtype, step, rank if averages else None)

    held = held_by(make, wrap)
    model = make(case.dtype)
    wrap(model)
    optimizer = _optimizer(model, case, comms=comms, **options)
    params = dict(model.named_parameters())
    lines = _other_state(expected, model, optimizer)
    for step in range(num_steps):
        give_gradients(model, {name: own(name, param, step) for name, param in params.items()}, held)
        kept = {n: _snapshot({"gradient": p.grad}) for n, p in params.items() if p.grad is not None and not averages}
        without = [n for n in params if gaps.is_skipped(n, step, ranks, averages=averages)]
        skipped = {n: _snapshot(_tensors(params[n], optimizer)) for n in without}
        # What the first steps make and keep must not go where the user wants new tensors.
        default_device = torch.device("meta") if step < 2 else nullcontext()
        no_full_tensor = mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("inside step"))
        with default_device, no_full_tensor:
            optimizer.step()
        if options.get("release_gradients"):
            lines += [f"{n}: step {step} left its gradient" for n, param in params.items() if param.grad is not None]
            kept = {}
        for name, before in kept.items():
            lines += _changes(f"{name}: step {step}", before, {"gradient": params[name].grad})
        for name, before in skipped.items():
            lines += _changes(f"{name}: step {step}, without gradient", before, _tensors(params[name], optimizer))
    found = gathered(model, held, ranks)
    for name, weight in expected.weights.items():
        is_cut = held[name].numel() < weight.numel()
        is_near = is_cut and name in expected.fused
        rtol, atol = fused_adamw_tolerance(num_steps, _ADAMW_LR) if is_near else (0.0, 0.0)
        value = found[name].cpu()
        if not torch.allclose(value, weight, rtol=rtol, atol=atol):
            lines.append(_difference(name, value, weight))
    return lines


def _optimizer(model: nn.Module, case: Case, **options: Any) -> quintic.Muon:
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    return quintic.Muon(groups, lr=0.05, adamw_lr=_ADAMW_LR, **case.options, **options)


def _fused_adamw_names(optimizer: quintic.Muon, case: Case) -> set[str]:
    """Return the parameters whose AdamW is, on one device, PyTorch's fused kernel."""
    if case.dtype != torch.float32 or {"cautious", "state_dtype"} & case.options.keys():
        return set()
    groups = [group for group in optimizer.param_groups if group["algorithm"] == "adamw"]
    return {name for group in groups for name in group["param_names"]}


def _other_state(expected: Reference, model: nn.Module, optimizer: quintic.Muon) -> list[str]:
    """Return a line for every parameter whose state has other names than on one device."""
    found = {name: sorted(optimizer.state[param]) for name, param in model.named_parameters()}
    return [f"{name}: state {found[name]} not {keys}" for name, keys in expected.state.items() if found[name] != keys]


def _tensors(param: Tensor, optimizer: quintic.Muon) -> dict[str, Any]:
    return {"weight": param, **optimizer.state[param]}


def _snapshot(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies in host memory, where every dtype can be compared."""
    found = {key: value.detach() for key, value in tensors.items() if isinstance(value, Tensor)}
    return {key: local_of(value).to("cpu", copy=True) for key, value in found.items()}


def _changes(what: str, before: dict[str, Tensor], after: dict[str, Any]) -> list[str]:
    changed = [key for key, value in before.items() if not torch.equal(value, local_of(after[key].detach()).cpu())]
    return [f"{what} changed its {' and '.join(changed)}"] if changed else []


def _difference(name: str, found: Tensor, expected: Tensor) -> str:
    count = int((found != expected).sum())
    largest = float((found.double() - expected.double()).abs().max())
    return f"{name}: {count} of {expected.numel()} entries differ, by up to {largest:g}"
