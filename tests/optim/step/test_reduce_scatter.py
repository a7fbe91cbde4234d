"""Means of gradients within one process; `tests/distributed/test_gradient_averages.py` has ranks."""

from types import SimpleNamespace

import torch

from quintic.optim.step import reduce_scatter


def test_the_mean_of_a_tensor_that_is_not_packed_is_written_to_the_tensor(monkeypatch):
    received = torch.tensor([1.0, 2.0, 5.0, 6.0])
    pending = SimpleNamespace(wait=lambda: received)
    monkeypatch.setattr(reduce_scatter, "start_all_to_all", lambda *_: pending)
    monkeypatch.setattr(reduce_scatter, "start_all_gather", lambda *_: pending)
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    owned = [[(0, 0, 2)], [(0, 2, 4)]]
    messages = reduce_scatter.ReduceScatter(owned, 0, torch.float32, torch.device("cpu"), "torch", is_direct=True)
    assert list(messages.average([tensor], None)) == [None, None]
    assert tensor.tolist() == [3.0, 4.0, 3.0, 4.0]  # this rank's mean; the rest is another rank's
