"""Steps of an optimizer on a laid-out model, compared with the same steps on one device.

The reference is the same optimizer on the unwrapped model, computed by every rank for itself, so that both run with the
same number of threads. Gradients are random and differ from step to step; no forward pass is needed.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import wrappings
from harness import DEVICE, ON_GPUS
from models import (
    Awkward,
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

__all__ = ["CASES", "NUM_STEPS", "Case", "Gaps", "Layout", "check_layout", "disagreements", "fused_adamw_tolerance"]

NUM_STEPS = 5

_ADAMW_LR = 0.01


def fused_adamw_tolerance(num_steps: int, lr: float) -> tuple[float, float]:
    """Return how far float32 weights that AdamW updates in pieces may be from those it updates whole: rtol, atol.

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
    "narrow": Case({**_FLOAT32, "state_dtype": "bf16", "normalize": "neuron", "adamw_weight_decay": 0.1}),
    "narrow_mantissa": Case({"state_dtype": "bf16", "master": "mantissa", "weight_decay": 0.1}, torch.bfloat16),
    # So little that one matrix at a time is computed, and AdamW in pieces.
    "workspace": Case({**_FLOAT32, "normalize": "neuron", "max_workspace_bytes": 512}),
}


@dataclass(frozen=True)
class Gaps:
    """Which ranks lack which gradients; none do, unless told to.

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


NO_GAPS = Gaps()


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
    cases: tuple[str, ...] = ("plain", "cautious", "mantissa")
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

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a model to lay out; what FSDP2 cannot shard is in those of plain tensors only."""
        return Awkward(extras=self.wrap is wrappings.plain, dtype=dtype)

    def lay_out(self, model: nn.Module) -> None:
        """Lay a model out over the mesh, in place; all ranks must call it."""
        if self.wrap is not wrappings.plain:
            self.wrap(model, self.device_mesh())


def check_layout(rank: int, world_size: int, layout: Layout, gaps: Gaps = NO_GAPS) -> None:
    """Run all cases of a layout on this rank.

    Raises:
        AssertionError: says which entries of which parameters are not what they are on one device.
    """
    model, wrap, ranks = layout.model, layout.lay_out, range(world_size)
    wrong = []
    for title in layout.cases:
        lines = disagreements(model, wrap, CASES[title], ranks, rank=rank, gaps=gaps, comms=layout.comms)
        wrong += [f"{title}: {line}" for line in lines]
    assert not wrong, "\n".join(["other numbers than on one device:", *wrong])


def disagreements(
    make: Callable[..., nn.Module],
    wrap: Callable[[nn.Module], None],
    case: Case,
    ranks: Sequence[int],
    *,
    rank: int,
    comms: str = "none",
    gaps: Gaps = NO_GAPS,
    **options: Any,
) -> list[str]:
    """Take all steps on this rank and return a line for every parameter that ends elsewhere than on one device.

    All ranks of the world must call it, also those with other models.

    Args:
        make: returns the model in a dtype, float32 if there is none.
        wrap: lays it out, in place.
        case: options of the optimizer.
        ranks: those that this model is laid out over.
        rank: this one.
        comms: for plain tensors; the gradients of `"replicated"` and `"sharded"` differ from rank to rank.
        gaps: missing gradients.
        options: further options of the optimizer, which one device does not have.
    """
    averages = comms in ("replicated", "sharded")

    def is_skipped(name: str, step: int) -> bool:
        # Where ranks average, a missing gradient counts as zeros, unless all of them miss it.
        missing = gaps.without(name, step, ranks)
        return len(missing) == len(ranks) if averages else len(missing) > 0

    def whole(name: str, param: Tensor, step: int) -> Tensor | None:
        if is_skipped(name, step):
            return None
        if averages:
            return mean_gradient(name, param.shape, param.dtype, step, ranks, gaps.without(name, step, ranks))
        return gradient(name, param.shape, param.dtype, step)

    def own(name: str, param: Tensor, step: int) -> Tensor | None:
        if rank in gaps.without(name, step, ranks):
            return None
        return gradient(name, param.shape, param.dtype, step, rank if averages else None)

    expected_model = make(case.dtype)
    expected_optimizer = _optimizer(expected_model, case)
    held = held_by(make, wrap)
    model = make(case.dtype)
    wrap(model)
    optimizer = _optimizer(model, case, comms=comms, **options)
    params = dict(model.named_parameters())
    lines = _other_state(expected_model, expected_optimizer, model, optimizer)
    for step in range(NUM_STEPS):
        give_gradients(expected_model, {n: whole(n, p, step) for n, p in expected_model.named_parameters()})
        expected_optimizer.step()
        give_gradients(model, {name: own(name, param, step) for name, param in params.items()}, held)
        kept = {n: _snapshot({"gradient": p.grad}) for n, p in params.items() if p.grad is not None and not averages}
        skipped = {n: _snapshot(_tensors(p, optimizer)) for n, p in params.items() if is_skipped(n, step)}
        # What the first steps make and keep must not go where the user wants new tensors.
        default_device = torch.device("meta") if step < 2 else nullcontext()
        no_full_tensor = mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("inside step"))
        with default_device, no_full_tensor:
            optimizer.step()
        for name, before in kept.items():
            lines += _changes(f"{name}: step {step}", before, {"gradient": params[name].grad})
        for name, before in skipped.items():
            lines += _changes(f"{name}: step {step}, without gradient", before, _tensors(params[name], optimizer))
    found = gathered(model, held, ranks)
    fused = _fused_adamw_names(expected_optimizer, case)
    for name, param in expected_model.named_parameters():
        is_cut = held[name].numel() < param.numel()
        rtol, atol = fused_adamw_tolerance(NUM_STEPS, _ADAMW_LR) if is_cut and name in fused else (0.0, 0.0)
        if not torch.allclose(found[name], param.detach(), rtol=rtol, atol=atol):
            lines.append(_difference(name, found[name], param.detach()))
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


def _other_state(
    expected_model: nn.Module, expected_optimizer: quintic.Muon, model: nn.Module, optimizer: quintic.Muon
) -> list[str]:
    """Return a line for every parameter whose state has other names than on one device."""
    expected = {name: sorted(expected_optimizer.state[param]) for name, param in expected_model.named_parameters()}
    found = {name: sorted(optimizer.state[param]) for name, param in model.named_parameters()}
    return [f"{name}: state {found[name]} instead of {keys}" for name, keys in expected.items() if found[name] != keys]


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
