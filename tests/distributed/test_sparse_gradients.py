"""`comms="sharded_sparse"` and gradients that are not contiguous: what a step makes of them, and how often."""

import weakref
from unittest import mock

import pytest
import torch
from harness import DEVICE, run
from torch import nn

import quintic
from quintic.optim.plan import row_sharding
from quintic.optim.step import operands, sparse_rows
from quintic.optim.step.operands import dense_gradient

SHAPE = (500, 32)


class Copies:
    """Collects gradients that were made dense."""

    def __init__(self):
        self.made = []

    def __call__(self, param, gradient, name):
        dense = dense_gradient(param, gradient, name)
        if dense is not gradient:
            self.made.append(weakref.ref(dense))
        return dense


def gradient(step, rank, turned):
    """A gradient of few rows, in another layout in memory than the table's if `turned`."""
    values = torch.zeros(SHAPE, device=DEVICE)
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = torch.randint(SHAPE[0], (7,), generator=generator)
    values[rows] = torch.randn(7, SHAPE[1], generator=generator).to(DEVICE)
    return values.T.contiguous().T if turned else values


def steps(rank, turned, announces):
    """Return the table after some steps, and the copies made in each."""
    table = nn.Parameter(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1], device=DEVICE).view(SHAPE))
    group = {"params": [("table", table)], "algorithm": "adamw", "comms": "sharded_sparse"}
    with mock.patch.object(row_sharding, "_LEAST_BYTES", 0):
        optimizer = quintic.Muon([group], adamw_lr=0.1)
        counts = []
        for step in range(4):
            if step < 3:
                table.grad = gradient(step, rank, turned)
            else:
                # In place: what was made of the gradient in the step before is not this one.
                table.grad.mul_(2.0)
                if rank == 0:
                    table.grad = None
            if step == 2:
                quintic.clip_grad_norm_(optimizer, 1.0)
            if announces and table.grad is not None:
                optimizer.announce_rows("table", table.grad.any(dim=1).nonzero())
            with (
                mock.patch.object(operands, "dense_gradient", Copies()) as copies,
                mock.patch.object(sparse_rows, "dense_gradient", copies),
            ):
                optimizer.step()
            counts.append(len(copies.made))
            assert all(made() is None for made in copies.made)
    assert "adamw, sparse" in str(optimizer.plan())
    return table.detach(), counts


def check_copies(rank, world_size, announces):
    expected, none = steps(rank, False, announces)
    found, counts = steps(rank, True, announces)
    assert none == [0, 0, 0, 0]
    assert counts == [1, 1, 1, int(rank > 0)]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("announces", [False, True])
def test_a_gradient_is_made_dense_once_per_step(announces):
    run(check_copies, 2, announces)
