"""Ranks that run out of batches before others do: what docs/how-to/layouts/ddp.md says of PyTorch's `Join`."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import quintic

COUNTS = [2, 4]
"""Batches of each rank."""


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).to(DEVICE)


def optimizer_of(model, **options):
    return quintic.Muon(quintic.param_groups(model), lr=0.05, compute_dtype=torch.float32, **options)


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=generator).to(DEVICE) for _ in range(COUNTS[rank])]


def weights_of(model):
    return [param.detach().cpu() for param in model.parameters()]


def expected_weights(num_steps):
    """The weights of one device with the mean of the ranks' gradients, in which those of missing batches are zeros."""
    model = model_of()
    optimizer, data = optimizer_of(model), [batches(rank) for rank in range(len(COUNTS))]
    for step in range(num_steps):
        optimizer.zero_grad()
        losses = [model(own[step]).square().mean() for own in data if step < len(own)]
        (sum(losses) / len(COUNTS)).backward()
        optimizer.step()
    return weights_of(model)


def train_joined(rank, world_size, comms, throws):
    """The weights, and the number of steps made, of a rank under `Join`."""
    model, steps = model_of(), 0
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped, comms=comms)
    try:
        with Join([wrapped], throw_on_early_termination=throws):
            for batch in batches(rank):
                optimizer.zero_grad()
                wrapped(batch).square().mean().backward()
                optimizer.step()
                steps += 1
    except RuntimeError as error:
        if not throws or "exhausted" not in str(error):
            raise
    return weights_of(model), steps


def train_to_the_end(rank, world_size, comms):
    """The weights of a rank that steps without gradients when it has run out of batches."""
    model, own = model_of(), batches(rank)
    optimizer = optimizer_of(model, comms=comms)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        if step < len(own):
            model(own[step]).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def test_all_batches_are_used_where_the_optimizer_sends_nothing():
    results = run(train_joined, 2, "none", False, timeout=40)
    assert [steps for _, steps in results] == COUNTS
    for weights, _ in results:
        torch.testing.assert_close(weights, expected_weights(4), rtol=1e-5, atol=1e-6)


def test_ranks_end_together_where_they_divide_the_work():
    results = run(train_joined, 2, "averaged", True, timeout=40)
    assert [steps for _, steps in results] == [2, 2]
    for weights, _ in results:
        torch.testing.assert_close(weights, expected_weights(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_steps_without_gradients_stand_for_missing_batches(comms):
    for weights in run(train_to_the_end, 2, comms, timeout=40):
        torch.testing.assert_close(weights, expected_weights(4), rtol=1e-5, atol=1e-6)
