"""Ranks that disagree or die: an error that says so, never a hang."""

import math
import os
import time

import pytest
import torch
from harness import DEVICE, TIME_FACTOR, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintic
from quintic.optim.comms import comparing


def optimizer_of(rank, **options):
    torch.manual_seed(0)
    shapes = {"first": (6, 8), "second": (8, 6)}
    params = [(name, nn.Parameter(torch.randn(shape).to(DEVICE))) for name, shape in shapes.items()]
    optimizer = quintic.Muon([{"params": params}], comms="averaged", **options)
    for _, param in params:
        param.grad = torch.ones_like(param)
    return optimizer


def step_with_other_shapes(rank, world_size):
    optimizer = optimizer_of(rank)
    late = nn.Parameter(torch.randn(4 + rank, 5).to(DEVICE))
    late.grad = torch.ones_like(late)
    optimizer.add_param_group({"params": [("late", late)], "comms": "averaged"})
    with pytest.raises(RuntimeError, match=r"late of shape \(4, 5\).*late of shape \(5, 5\).*same order on all ranks"):
        optimizer.step()


def step_on_other_processors(rank, world_size):
    """There "auto" multiplies in another dtype, and updates would travel in messages of another size."""
    optimizer = optimizer_of(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "cpu_multiplies_bfloat16", lambda: rank == 0)
        with pytest.raises(RuntimeError, match=r"first of shape .*\(cpu\).*\(cpu without bfloat16 products\)"):
            optimizer.step()


def step_with_other_options(rank, world_size):
    optimizer = optimizer_of(rank, normalize="neuron" if rank else None)
    with pytest.raises(RuntimeError, match=r"first of shape .*normalize=None.*normalize=neuron"):
        optimizer.step()


def step_with_other_polynomials(rank, world_size):
    optimizer = optimizer_of(rank, orthogonalizer_steps=5 - rank)
    with pytest.raises(RuntimeError, match=r"first of shape .*orthogonalizer_steps=5.*orthogonalizer_steps=4"):
        optimizer.step()


def shrink(x):
    return x / x.norm()


def step_with_a_function(rank, world_size):
    optimizer_of(rank, orthogonalizer=shrink).step()
    optimizer_of(rank, orthogonalizer=lambda x: x).step()


def set_values_out_of_range(rank, world_size):
    """Ranks refuse before they send anything, and so have nothing under way when the values are mended."""
    for comms in ("averaged", "replicated", "sharded"):
        optimizer = optimizer_of(rank, normalize="neuron")
        (group,) = optimizer.param_groups
        group["comms"] = comms
        optimizer.step()
        before = [param.detach().clone() for param in group["params"]]
        for key, value in (("momentum", 1.5), ("lr", -1.0), ("normalize_beta", 1.0), ("betas", (0.9, 2.0))):
            good, group[key] = group[key], value
            with pytest.raises(ValueError, match=rf"^parameter group 0 \(first\): {key}=.* must be "):
                optimizer.step()
            group[key] = good
        assert all(map(torch.equal, group["params"], before))
        optimizer.step()
        assert not any(map(torch.equal, group["params"], before))


def test_values_out_of_range_are_refused_on_every_rank_that_sets_them():
    run(set_values_out_of_range, 2, timeout=30)


def die_in_a_step(rank, world_size):
    optimizer = optimizer_of(rank)
    optimizer.step()
    if rank == 1:
        os._exit(7)
    optimizer.step()


@pytest.mark.parametrize(
    "function",
    [step_with_other_shapes, step_with_other_options, step_with_other_polynomials, step_with_a_function],
)
def test_plans_are_compared(function):
    run(function, 2)


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs multiply in float16")
def test_processors_are_compared():
    run(step_on_other_processors, 2)


def test_a_rank_that_dies_is_an_error_on_the_others():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="exit code 7"):
        run(die_in_a_step, 3, timeout=40)
    assert time.monotonic() - start < 30 * TIME_FACTOR


def test_one_bad_gradient_stops_every_rank():
    run(skip_everywhere, 3)


def skip_everywhere(rank, world_size):
    optimizer = optimizer_of(rank, on_nonfinite="skip")
    params = optimizer.param_groups[0]["params"]
    before = [param.detach().clone() for param in params]
    if rank == 2:
        params[1].grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.last_step().skipped
    assert all(torch.equal(param, kept) for param, kept in zip(params, before, strict=True))
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert not any(torch.equal(param, kept) for param, kept in zip(params, before, strict=True))


def count_steps_without_entries(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    bias = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Shard(0)]))
    optimizer = quintic.Muon([{"params": [("bias", bias)], "algorithm": "adamw"}])
    for _ in range(2):
        bias.grad = torch.ones_like(bias)
        optimizer.step()
    return float(optimizer.state[bias]["step"])


def test_adamw_counts_steps_where_a_rank_holds_no_entry():
    assert run(count_steps_without_entries, 2) == [2.0, 2.0]


def step_what_one_rank_has(rank, world_size, on_nonfinite):
    """A matrix cut along columns of which there is one: the other ranks have nothing of it, and ask nonetheless."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(6, 1), mesh, [Shard(1)]))
    optimizer = quintic.Muon([{"params": [("weight", weight)]}], on_nonfinite=on_nonfinite)
    weight.grad = torch.full_like(weight, math.nan)
    if on_nonfinite == "skip":
        optimizer.step()
        assert optimizer.last_step().skipped
    else:
        with pytest.raises(FloatingPointError, match="^on rank 0: weight" if rank else "^weight"):
            optimizer.step()
    assert bool((weight == 1).to_local().all())
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not bool((weight == 1).to_local().any())


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_ranks_that_have_nothing_to_step_hear_of_bad_gradients(on_nonfinite):
    run(step_what_one_rank_has, 2, on_nonfinite, timeout=20)
