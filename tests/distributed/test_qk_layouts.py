"""QK-clip on every layout: each rank saw other tokens, and the weights are those of one device that saw them all."""

import math
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import attentions
import pytest
import torch
import torch.distributed as dist
from attentions import THRESHOLD, Attentions, largest, of_own_heads, seen
from harness import DEVICE, run
from models import gathered, give_gradients, gradient, held_by, local_of, mean_gradient
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import quintic
from quintic import QKClip

NUM_STEPS = 4

# Cautious decay, so that AdamW is not PyTorch's fused one, which rounds the ends of tensors otherwise.
_OPTIONS = {"weight_decay": 0.1, "adamw_weight_decay": 0.1, "cautious": True}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    every: int = 1  # AdamW's step_every


CASES = {
    "float32": Case(options={"compute_dtype": torch.float32}),
    "neuron": Case(options={"compute_dtype": torch.float32, "normalize": "neuron"}),
    "bfloat16": Case(torch.bfloat16),
    "fp32": Case(torch.bfloat16, {"master": "fp32"}),
    "mantissa": Case(torch.bfloat16, {"master": "mantissa", "normalize": "neuron"}),
    "float16": Case(torch.float16, {"master": "fp32"}),
    "float64": Case(torch.float64),
    # Biases wait every other step, and are scaled nevertheless.
    "waiting": Case(torch.bfloat16, {"master": "mantissa"}, every=2),
    # Weights that are sent again go one after the other.
    "workspace": Case(torch.bfloat16, {"master": "fp32", "max_workspace_bytes": 512}),
}


@dataclass(frozen=True)
class Layout:
    mesh: tuple[int, ...]
    wrap: object = attentions.plain
    cases: tuple[str, ...] = ("neuron", "mantissa")
    comms: str = "none"
    options: dict = field(default_factory=dict)

    @property
    def world_size(self):
        return math.prod(self.mesh)

    @property
    def is_tensor_parallel(self):
        return self.wrap in (attentions.tensor_parallel, attentions.tensor_parallel_rows)


ALL = tuple(CASES)

LAYOUTS = {
    "averaged-1": Layout((1,), comms="averaged"),
    "averaged-2": Layout((2,), comms="averaged", cases=ALL),
    "averaged-3": Layout((3,), comms="averaged"),
    "replicated-3": Layout((3,), comms="replicated", cases=("neuron", "mantissa", "waiting")),
    "sharded-2": Layout((2,), comms="sharded", cases=ALL),
    "sharded-3": Layout((3,), comms="sharded", cases=("neuron", "fp32", "mantissa", "waiting")),
    "sharded-4": Layout((4,), comms="sharded", cases=("bfloat16", "mantissa")),
    "fsdp2-2": Layout((2,), attentions.rows, cases=ALL),
    "fsdp2-4": Layout((4,), attentions.rows),
    "fsdp2-8": Layout((8,), attentions.rows, cases=("mantissa",)),
    "fsdp2_last_dimension-2": Layout((2,), attentions.columns),
    "hsdp-2x2": Layout((2, 2), attentions.rows),
    "tp-2": Layout((2,), attentions.tensor_parallel, cases=("float32", "mantissa", "waiting")),
    "tp-4": Layout((4,), attentions.tensor_parallel),
    "tp_fsdp2-2x2": Layout((2, 2), attentions.tensor_parallel_rows, cases=("neuron", "fp32", "mantissa")),
    "tp_hsdp-2x2x2": Layout((2, 2, 2), attentions.tensor_parallel_rows, cases=("mantissa",)),
}


def mesh_of(layout):
    names = ("replica", "data", "tensor")[-len(layout.mesh) :]
    return DeviceMesh(DEVICE, torch.arange(layout.world_size).view(layout.mesh), mesh_dim_names=names)


def optimizer_of(model, case, clip=None, **options):
    groups = quintic.param_groups(model, rules=attentions.rules(), adamw={"step_every": case.every})
    clip = clip or QKClip(threshold=THRESHOLD)
    return quintic.Muon(groups, lr=0.05, adamw_lr=0.01, qk_clip=clip, **_OPTIONS, **case.options, **options)


def given_by(step, rank, world_size):
    """Logits from the tokens of a rank: all, some or no layers; NaN and infinities; heads without tokens."""
    found = seen(step, rank)
    if step == 1:
        # The last rank gives nothing, the first one lacks a layer, one layer nobody has.
        found.pop("uneven")
        if rank == 0:
            found.pop("fused", None)
        if rank == world_size - 1:
            found = {}
    if step == 2:
        found = {}
    if step == 3:
        # On one rank; what the others have would count if that did not.
        found["grouped"][1] = found["uneven"][0] = 4 * THRESHOLD
        if rank == world_size - 1:
            found["grouped"][1] = math.nan
            found["uneven"][0] = math.inf
            found["latent"][2:] = -math.inf
        if rank == 0:
            found["fused"][:] = -math.inf
    return found


def states_of(optimizer, model, held):
    """This rank's entries of every state, and their places; of sharded state all entries."""
    if any(group["comms"] == "sharded" for group in optimizer.param_groups):
        saved = optimizer.state_dict()
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        by_param = {param: saved["state"][key] for key, param in zip(keys, params, strict=True)}
        return {name: (by_param[param], slice(None)) for name, param in model.named_parameters()}
    return {name: (optimizer.state[param], held[name]) for name, param in model.named_parameters()}


def check_state(where, optimizer, model, held, expected):
    lines = []
    for name, (state, places) in states_of(optimizer, model, held).items():
        for key in ("master", "mantissa", "momentum_buffer"):
            if key in state:
                right = expected[name][key].flatten().to(torch.float64)[places]
                if not torch.equal(local_of(state[key]).to(torch.float64).flatten(), right.flatten()):
                    lines.append(f"{where}: {key} of {name}")
    return lines


def check_layout(rank, world_size, layout):
    mesh = mesh_of(layout)
    wrap = partial(layout.wrap, mesh=mesh)
    wrong = []
    for title in layout.cases:
        lines = disagreements(rank, range(world_size), CASES[title], layout, wrap, mesh)
        wrong += [f"{title}: {line}" for line in lines]
    assert not wrong, "\n".join(["other numbers than on one device:", *wrong])


def disagreements(rank, ranks, case, layout, wrap, mesh, **options):
    averages = layout.comms in ("replicated", "sharded")
    own = list(ranks).index(rank)
    expected_model = Attentions(case.dtype)
    alone = dist.new_group([rank], use_local_synchronization=True)
    expected_optimizer = optimizer_of(expected_model, case, QKClip(threshold=THRESHOLD, process_group=alone))
    model = Attentions(case.dtype)
    wrap(model)
    held = held_by(Attentions, wrap)
    optimizer = optimizer_of(model, case, comms=layout.comms, **layout.options, **options)
    lines = []
    for step in range(NUM_STEPS):
        named = list(expected_model.named_parameters())
        if averages:
            wholes = {name: mean_gradient(name, p.shape, p.dtype, step, ranks) for name, p in named}
            mine = {name: gradient(name, p.shape, p.dtype, step, rank) for name, p in named}
        else:
            wholes = mine = {name: gradient(name, p.shape, p.dtype, step) for name, p in named}
        give_gradients(expected_model, {name: whole.clone() for name, whole in wholes.items()})
        # Ranks of one tensor-parallel group see the same tokens, each with heads of its own.
        alike = mesh.size(mesh.ndim - 1) if layout.is_tensor_parallel else 1
        everyone = [given_by(step, number, len(ranks) // alike) for number in range(len(ranks) // alike)]
        expected_optimizer.step(qk_logits=largest(everyone))
        give_gradients(model, mine, held)
        logits = everyone[own // alike]
        if layout.is_tensor_parallel:
            logits = of_own_heads(logits, mesh)
        with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor inside step")):
            optimizer.step(qk_logits=logits or None)
        found = gathered(model, held, ranks)
        for name, param in expected_model.named_parameters():
            if not torch.equal(found[name], param.detach()):
                lines.append(f"step {step}: {name}")
        expected = {name: expected_optimizer.state[param] for name, param in expected_model.named_parameters()}
        lines += check_state(f"step {step}", optimizer, model, held, expected)
    return lines


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_of_one_device_that_saw_all_tokens(name):
    run(check_layout, LAYOUTS[name].world_size, LAYOUTS[name], timeout=100)
