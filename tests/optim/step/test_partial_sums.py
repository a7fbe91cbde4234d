"""Sums of `Partial` gradients within one process; `tests/distributed/test_partial_gradients.py` has ranks."""

from types import SimpleNamespace

import torch
from torch.distributed.tensor import Partial, Replicate

from quintic.optim.step import partial_gradients
from quintic.optim.step.partial_gradients import PartialGradients


class FakeParam:
    """What is asked of a `DTensor` parameter; hashable."""

    placements = (Replicate(),)
    device_mesh = SimpleNamespace(shape=(2,))
    grad = None


def test_a_sum_made_for_clipping_counts_until_the_step_is_over(monkeypatch):
    monkeypatch.setattr(partial_gradients, "all_gather_values", lambda value, group: [value])
    total = SimpleNamespace(placements=FakeParam.placements)
    addend = SimpleNamespace(placements=(Partial(),), dtype=torch.float32, redistribute=lambda *_: total)
    param, partial = FakeParam(), PartialGradients()
    param.grad = addend
    assert partial.exchange({param: "weight"}, None) is None
    partial.replace([param])
    assert param.grad is total
    assert not partial.is_reduced(param)  # the gradient that the sum replaced was an addend
    with partial.reduced([param]):
        assert param.grad is total
    assert partial.is_reduced(param)  # as if a user had summed it
