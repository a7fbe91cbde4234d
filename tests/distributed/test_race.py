"""Parameters like those of the modded-nanogpt speedrun, with all that its optimizer is asked to do at a time.

Banks of matrices with views and rates of their own, a transposed head with an embedding that is tied to it and goes its
own way, a table of which few rows are touched, scalars; AdamW in every second step, decay by rate, mantissas, orders of
sending and working; steps as usual, and as CUDA graphs or what stands for them.
"""

import contextlib

import numpy as np
import oracle
import pytest
import torch
from harness import DEVICE, run
from host_graphs import capture_on_hosts
from torch import nn

import quintic
from quintic.optim.plan import row_sharding

WIDTH, VOCABULARY, NUM_LAYERS = 32, 144, 3
LR, ADAMW_LR, EPS, DECAY = 0.023, 0.008, 1e-10, 1.2
NUM_STEPS, UNTIED = 16, 9

SHAPES = {
    "qk": (NUM_LAYERS * 2 * WIDTH, WIDTH),
    "vo": (NUM_LAYERS * 2 * WIDTH, WIDTH),
    "mlp": (NUM_LAYERS * 2, 4 * WIDTH, WIDTH),
    "scalars": (7,),
    "gates": (NUM_LAYERS, 4, 3),
    "head": (WIDTH, VOCABULARY),
    "bigram": (600, WIDTH),
    "values": (5 * VOCABULARY, WIDTH),
    "embed": (VOCABULARY, WIDTH),
}

# Heads of queries and keys; a bank whose every second matrix has twice the rate.
MATRICES = {
    "qk": {"view": quintic.Heads(NUM_LAYERS * 2)},
    "vo": {"view": quintic.Rows(WIDTH)},
    "mlp": {"view": quintic.Experts(), "lr_multipliers": (1.0, 2.0) * NUM_LAYERS},
}
# Factor on the rate, decay, betas, comms.
VECTORS = {
    "scalars": (5.0, 0.0, (0.9, 0.95), "replicated"),
    "gates": (1.0, 0.5, (0.9, 0.99), "replicated"),
    "head": (1.0, 15.0, (0.5, 0.95), "sharded"),
    "bigram": (7.0, 2.0, (0.75, 0.95), "sharded_sparse"),
    "values": (7.0, 2.0, (0.75, 0.95), "sharded"),
    "embed": (1.0, 15.0, (0.5, 0.95), "sharded"),
}
ORDER = ["scalars", "gates", "values", "bigram", "head", "embed", "qk", "vo", "mlp"]


def schedule(step):
    """Factor on all rates."""
    return 1.0 - 0.05 * step


def touched(step, rank):
    """Rows of the table, a fifth of them."""
    return torch.randperm(SHAPES["bigram"][0], generator=torch.Generator().manual_seed(100 * step + rank))[:120]


def gradient(name, step, rank):
    """Gradients of so few digits that no order of adding rounds: eighths."""
    label = 1000 * step + 100 * rank + list(SHAPES).index(name)
    drawn = torch.randint(-7, 8, SHAPES[name], generator=torch.Generator().manual_seed(label)) / 8
    if name == "bigram":
        untouched = torch.ones(SHAPES[name][0], dtype=torch.bool)
        untouched[touched(step, rank)] = False
        drawn[untouched] = 0.0
    return drawn


def race(dtype):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for name, shape in SHAPES.items()
    }
    if dtype == torch.bfloat16:
        params["scalars"] = nn.Parameter(params["scalars"].detach().float())
    groups = [
        {"params": [(name, params[name])], "comms": "sharded", "normalize": "neuron", "normalize_beta": 0.9, **options}
        for name, options in MATRICES.items()
    ]
    for name, (factor, decay, betas, comms) in VECTORS.items():
        options = {"lr": factor * ADAMW_LR, "weight_decay": decay, "betas": betas, "comms": comms, "cautious": "strict"}
        groups.append({"params": [(name, params[name])], "algorithm": "adamw", "step_every": 2, "eps": EPS, **options})
    optimizer = quintic.Muon(
        groups,
        lr=LR,
        weight_decay=DECAY,
        decay_coupling="lr_squared",
        scale_decay=True,
        cautious=True,
        master="mantissa" if dtype == torch.bfloat16 else None,
        compute_dtype=torch.float64 if dtype == torch.float64 else None,
        comm_order=[*MATRICES, *VECTORS],
        compute_order=ORDER,
    )
    return params, optimizer


def steps(rank, world_size, dtype, is_captured):
    """Weights and whole state after all steps. One rank gets the mean of the gradients of two."""
    params, optimizer = race(dtype)
    rates, num_graphs = [group["lr"] for group in optimizer.param_groups], []
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(row_sharding, "_LEAST_BYTES", 0)
        optimizer.tie("head", "embed", transposed=True)
        step_once = optimizer.step
        if is_captured:
            if DEVICE == "cpu":
                capture_on_hosts(patch, optimizer)
            step_once = stack.enter_context(quintic.CapturedStep(optimizer))
        for step in range(NUM_STEPS):
            if step == UNTIED:
                optimizer.untie("embed")
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * schedule(step)
            ranks = [rank] if world_size > 1 else [0, 1]
            for name, param in params.items():
                mean = sum(gradient(name, step, one) for one in ranks) / len(ranks)
                param.grad = (torch.zeros_like(param) if param.grad is None else param.grad).add_(mean.to(param))
            if world_size > 1:
                optimizer.announce_rows("bigram", touched(step, rank).to(DEVICE))
            step_once()
            optimizer.zero_grad(set_to_none=False)
            num_graphs.append(len(step_once._graphs) if is_captured else 0)
        assert len(optimizer._plans.rows.tables) == (world_size > 1)
        saved = optimizer.state_dict()
    assert num_graphs == ([0] * 4 + [1] + [2] * 4 + [0] * 4 + [1] + [2] * 2 if is_captured else [0] * NUM_STEPS)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    found = {name: param.detach().clone() for name, param in params.items()}
    for key, state in saved["state"].items():
        found |= {f"{names[key]}.{what}": value.clone() for what, value in state.items()}
    return {key: value.int() if value.dtype == torch.uint16 else value.cpu() for key, value in found.items()}


@pytest.mark.parametrize("is_captured", [False, True])
def test_two_ranks_have_the_bits_of_one(is_captured):
    [expected] = run(steps, 1, torch.bfloat16, False, timeout=100)
    assert "mlp.mantissa" in expected
    for found in run(steps, 2, torch.bfloat16, is_captured, timeout=100):
        assert found.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


def exact():
    """The same in float64, each matrix and each vector by itself."""
    start, _ = race(torch.float64)
    values = {name: param.detach().cpu().numpy() for name, param in start.items()}
    matrices = {
        name: [oracle.MuonMatrix(one, neuron=True) for one in values[name].reshape(NUM_LAYERS * 2, -1, WIDTH)]
        for name in MATRICES
    }
    vectors = {name: oracle.AdamWTensor(values[name]) for name in VECTORS}
    del vectors["embed"]
    totals = dict.fromkeys(SHAPES, 0.0)
    for step in range(NUM_STEPS):
        if step == UNTIED:
            head = vectors["head"]
            vectors["embed"] = other = oracle.AdamWTensor(head.w.T)
            other.m, other.v, other.t = head.m.T.copy(), head.v.T.copy(), head.t
        for name in SHAPES:
            totals[name] = totals[name] + (gradient(name, step, 0) + gradient(name, step, 1)).double().numpy() / 2
        lr = LR * schedule(step)
        for name, twins in matrices.items():
            gradients = totals[name].reshape(NUM_LAYERS * 2, -1, WIDTH)
            for number, (twin, one) in enumerate(zip(twins, gradients, strict=True)):
                own = (1 + number % 2) * 2.0 if name == "mlp" else 1.0
                rates = {"scale": own, "decay_scale": own, "lr": lr, "wd": DECAY * lr}
                twin.step(one, mu=0.95, beta=0.9, cautious=True, **rates)
            totals[name] = 0.0
        if step % 2:
            if step < UNTIED:
                totals["head"] = totals["head"] + totals["embed"].T
                totals["embed"] = 0.0
            for name, twin in vectors.items():
                factor, decay, betas, _ = VECTORS[name]
                lr = factor * ADAMW_LR * schedule(step)
                twin.step(totals[name], lr=lr, betas=betas, eps=EPS, wd=decay * lr, cautious="strict")
                totals[name] = 0.0
    found = {name: np.concatenate([twin.w.reshape(-1) for twin in twins]) for name, twins in matrices.items()}
    return {**found, **{name: twin.w for name, twin in vectors.items()}}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_weights_of_the_formulas(world_size):
    expected = exact()
    for found in run(steps, world_size, torch.float64, False, timeout=100):
        for name in SHAPES:
            np.testing.assert_allclose(
                found[name].numpy().reshape(-1), expected[name].reshape(-1), rtol=1e-8, atol=1e-10
            )
