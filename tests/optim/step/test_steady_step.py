"""The walk of a steady step on one device, see tests/steady_steps.py.

Limits, not measurements: what a step does in Python is what small models wait for, and what a reader has to follow.
They are what was counted with Python 3.11, which counts comprehensions as calls.
"""

import torch
from steady_steps import model_of, steady_walk
from torch import nn

import quintic


def test_a_step_on_one_device_is_a_short_walk():
    model = model_of()
    walk = steady_walk(quintic.Muon(quintic.param_groups(model)), list(model.parameters()))
    num_calls, num_files, num_changes = walk.counts
    assert num_calls <= 91, walk
    assert num_files <= 12, walk
    assert num_changes <= 36, walk


def test_calls_grow_with_buckets_and_not_with_parameters():
    """Forty times the matrices in the same bucket: what is done for each is PyTorch's."""
    walks = []
    for number in (2, 80):
        params = [nn.Parameter(torch.randn(8, 4)) for _ in range(number)]
        walks.append(steady_walk(quintic.Muon(params), params))
    assert len(walks[1].calls) <= len(walks[0].calls) + 4, walks[1]
