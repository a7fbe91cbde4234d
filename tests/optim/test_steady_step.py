"""The calls into the library of a step whose plan is there and whose gradients are where they were.

Limits, not measurements: what a step does in Python is what small models wait for. They are a little above what was
counted with Python 3.11, which counts comprehensions as calls.
"""

import torch
from steady_steps import model_of, steady_calls
from torch import nn

import quintic


def test_a_step_on_one_device_goes_through_few_files():
    model = model_of()
    found = steady_calls(quintic.Muon(quintic.param_groups(model)), list(model.parameters()))
    assert len(found) <= 12, sorted(found)
    assert found.total() <= 122, found.most_common()


def test_calls_grow_with_buckets_and_not_with_parameters():
    """Forty times the matrices in the same bucket: what is done for each is PyTorch's."""
    counts = []
    for number in (2, 80):
        params = [nn.Parameter(torch.randn(8, 4)) for _ in range(number)]
        counts.append(steady_calls(quintic.Muon(params), params).total())
    assert counts[1] <= counts[0] + 4, counts
