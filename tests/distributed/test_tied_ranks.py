"""Tied head and embedding whose gradients, and state, ranks share: one weight, as on one device."""

import numpy as np
import oracle
import pytest
import torch
from harness import DEVICE, run
from models import mean_gradient
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintic

SHAPE = (40, 96)
OPTIONS = {"betas": (0.8, 0.95), "eps": 1e-8, "lr": 0.05, "weight_decay": 0.3, "decay_coupling": "lr_squared"}

CASES = {
    "sharded": {"comms": "sharded"},
    "pieces": {"comms": "sharded", "max_workspace_bytes": 9000},
    "clipped": {"comms": "sharded"},
    "replicated": {"comms": "replicated"},
    "replicated and clipped": {"comms": "replicated"},
    "averaged": {"comms": "averaged"},
    "alone": {"comms": "none"},
    "every second": {"comms": "sharded", "step_every": 2},
}


def models(rank, **options):
    """Head, embedding and a bank, alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    head, embedding, bank = (
        nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in (SHAPE, SHAPE[::-1], (32, 16))
    )
    groups = [
        {"params": [("head", head)], "algorithm": "adamw", **OPTIONS},
        {"params": [("embed", embedding)], "algorithm": "adamw", **OPTIONS},
        {"params": [("bank", bank)], "view": quintic.Rows(8), "step_every": 1},
    ]
    return {"head": head, "embed": embedding, "bank": bank}, quintic.Muon(groups, **options)


def given(name, shape, step, rank, averages):
    """This rank's gradient, and what counts for all; twins of these in float64 are added up."""
    own = mean_gradient(name, shape, torch.float32, step, [rank if averages else 0])
    return own


def wrong_steps(rank, world_size):
    wrong = []
    for case, options in CASES.items():
        averages, step_every = options["comms"] in ("sharded", "replicated"), options.get("step_every", 1)
        params, optimizer = models(rank, **options)
        optimizer.tie("head", "embed", transposed=True)
        twin = oracle.AdamWTensor(params["head"].detach().cpu().numpy())
        other, totals = None, [0.0, 0.0]
        for step in range(1, 9):
            if step == 5:
                optimizer.untie("embed")
                other = oracle.AdamWTensor(twin.w)
                other.m, other.v, other.t = twin.m.copy(), twin.v.copy(), twin.t
            everybody = range(world_size) if averages else [0]
            for name, param in params.items():
                drawn = [mean_gradient(name, param.shape, torch.float32, step, [one]) for one in everybody]
                param.grad = drawn[rank if averages else 0] + (0 if param.grad is None else param.grad)
                if name != "bank":
                    mean = torch.stack(drawn).double().mean(0).cpu().numpy()
                    totals[name == "embed"] = totals[name == "embed"] + mean
            scale = 1.0
            if "clipped" in case:
                both = totals[0] + totals[1].T
                norm = np.linalg.norm(both) if step < 5 else np.hypot(*map(np.linalg.norm, totals))
                scale = 0.5 / norm
                found = quintic.clip_grad_norm_(optimizer, max_norm=0.5)
                np.testing.assert_allclose(float(found), norm, rtol=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            if step % step_every == 0:
                options_of_step = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-8, "wd": 0.3 * 0.05}
                twin.step(scale * (totals[0] + (totals[1].T if other is None else 0.0)), **options_of_step)
                if other is not None:
                    other.step(scale * totals[1].T, **options_of_step)
                totals = [0.0, 0.0]
            pairs = [(params["head"], twin.w), (params["embed"].T, twin.w if other is None else other.w)]
            for number, (weight, exact) in enumerate(pairs):
                if not np.allclose(weight.detach().cpu().numpy(), exact, rtol=1e-4, atol=2e-5):
                    wrong.append((case, step, number))
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_every_rank_has_one_weight_until_it_is_untied(world_size):
    assert run(wrong_steps, world_size, timeout=100) == [[]] * world_size


def refusals(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    cut = [nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])) for shape in (SHAPE, SHAPE[::-1])]
    optimizer = quintic.Muon([{"params": [(str(n), p)], "algorithm": "adamw"} for n, p in enumerate(cut)])
    with pytest.raises(ValueError, match="1 cannot be tied to 0: a DTensor has its pieces"):
        optimizer.tie("0", "1", transposed=True)
    params, optimizer = models(rank, comms="sharded")
    if rank == 0:
        optimizer.tie("head", "embed", transposed=True)
    for param in params.values():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"different parameters or options.*tied_to=\('head', True\)"):
        optimizer.step()


def test_what_cannot_be_shared_is_refused():
    run(refusals, 2, timeout=30)


def order(rank, world_size):
    """The buckets that were under way when the copy was written."""
    params, optimizer = models(rank, comms="sharded")
    optimizer.tie("head", "embed", transposed=True)
    seen = []
    tie, [*steps] = optimizer._plans.planned().ties[0], optimizer._plans.planned()._steps
    write = tie.write
    tie.write = lambda: (seen.append("copy"), write())
    for step in steps:

        def followed(apply_mask, step=step, own=step.run):
            yield from own(apply_mask)
            seen.append(step.bucket.name)

        step.run = followed
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return seen


def test_the_copy_is_written_while_other_weights_travel():
    for seen in run(order, 2, timeout=30):
        assert seen == ["copy", "head", "bank"] or seen == ["bank", "copy", "head"], seen
