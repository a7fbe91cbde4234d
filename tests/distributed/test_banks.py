"""Banks that do not divide evenly among ranks: sent from where they are, with the bits of one device."""

from unittest import mock

import pytest
import torch
from harness import DEVICE, run
from torch import nn

import quintic
from quintic.optim.layout.packing import Packing

UNITS, ROWS, COLUMNS = 5, 256, 1024  # more entries than make a parameter travel alone
OPTIONS = {"view": quintic.Rows(ROWS), "normalize": "neuron", "master": "mantissa", "lr": 0.1, "weight_decay": 0.1}


def drawn(seed, rank=None):
    generator = torch.Generator().manual_seed(100 * seed + (0 if rank is None else rank + 1))
    return torch.randn(UNITS * ROWS, COLUMNS, generator=generator).bfloat16().to(DEVICE)


def mean_of(seed, world_size):
    total = sum(drawn(seed, rank).float() for rank in range(world_size))
    return (total / torch.full((), world_size, dtype=torch.float32, device=DEVICE)).bfloat16()


def trained(comms, gradient_of):
    bank = nn.Parameter(drawn(0))
    optimizer = quintic.Muon([{"params": [("bank", bank)], "comms": comms, **OPTIONS}])
    for step in (1, 2, 3):
        bank.grad = gradient_of(step)
        optimizer.step()
    return optimizer, bank


def state_of(optimizer):
    return optimizer.state_dict()["state"][0]


def sharded(rank, world_size):
    """The number of entries copied into messages and out of them, and this rank's matrices."""
    copied = []

    def counting(original):
        def count(self, *args):
            copied.append(sum(self._sizes))
            return original(self, *args)

        return count

    with (
        mock.patch.object(Packing, "pack", counting(Packing.pack)),
        mock.patch.object(Packing, "unpack", counting(Packing.unpack)),
    ):
        optimizer, bank = trained("sharded", lambda step: drawn(step, rank))
    alone, expected = trained("none", lambda step: mean_of(step, world_size))
    again = quintic.Muon([{"params": [("bank", nn.Parameter(drawn(0)))], "comms": "sharded", **OPTIONS}])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(bank, expected)
    for one in (optimizer, again):
        state = state_of(one)
        assert all(torch.equal(state[key], value) for key, value in state_of(alone).items())
    return sum(copied), optimizer.plan().buckets[0].num_matrices


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_nothing_is_packed_and_every_bit_is_that_of_one_device(world_size):
    found = run(sharded, world_size, timeout=120)
    assert [copied for copied, _ in found] == [0] * world_size
    matrices = [count for _, count in found]
    assert sum(matrices) == UNITS
    assert max(matrices) - min(matrices) == 1
