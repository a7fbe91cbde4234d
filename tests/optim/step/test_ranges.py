"""Ranges that PyTorch's profiler shows while a step runs."""

import re

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import quintic
from quintic.optim.step import ranges


def model_with_gradients():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 12))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def ranges_in(step):
    """The names of ranges, in the order in which they begin, each with the operators within."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    own = [event for event in profiled.events() if event.name.startswith("quintic.")]
    return {event.name: {child.name for child in event.cpu_children} for event in own}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # PyTorch 2.11, at any profile
def test_each_stage_of_each_bucket_has_a_range():
    model = model_with_gradients()
    optimizer = quintic.Muon(quintic.param_groups(model), normalize="neuron")
    found = ranges_in(optimizer.step)
    stages = ("momentum", "orthogonalize", "normalize neurons", "update weights")
    muon = [
        f"quintic.step/bucket {n} muon {matrices}/{s}"
        for n, matrices in enumerate(["2x12x6", "1x6x12"])
        for s in stages
    ]
    assert list(found) == [*muon, "quintic.step/bucket 2 adamw 4 parameters/update"]
    # The work is within: products of matrices in one, and nothing of it in the others.
    for name, operators in found.items():
        assert operators, name
        assert any(re.search("mm$|bmm|baddbmm", operator) for operator in operators) == name.endswith("orthogonalize")


def test_a_function_that_orthogonalises_is_within_its_range():
    model = model_with_gradients()
    optimizer = quintic.Muon([model[1].weight], orthogonalizer=torch.sign)
    found = ranges_in(optimizer.step)
    assert "aten::sign" in found["quintic.step/bucket 0 muon 1x12x6/orthogonalize"]


def test_without_a_profiler_no_range_is_made(monkeypatch):
    model = model_with_gradients()
    optimizer = quintic.Muon(quintic.param_groups(model))
    made = []
    monkeypatch.setattr(ranges, "record_function", lambda name: made.append(name) or record_function(name))
    optimizer.step()
    assert not made
    ranges_in(optimizer.step)
    assert made
    made.clear()
    optimizer.step()  # after the profiler has gone
    assert not made


def test_a_compiled_loop_is_profiled_without_being_traced_again():
    model = model_with_gradients()
    optimizer = quintic.Muon(quintic.param_groups(model))
    compiled = torch.compile(optimizer.step, backend="eager")
    compiled()
    assert any(name.endswith("/orthogonalize") for name in ranges_in(compiled))
    compiled()
