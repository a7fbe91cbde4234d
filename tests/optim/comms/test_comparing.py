"""What ranks compare before the first step; `tests/distributed/test_faults.py` has ranks that disagree."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.comms import comparing, sharing
from quintic.optim.layout.layouts import replicated_layout


def group_of(param):
    """A parameter group as `Muon` completes it."""
    [group] = quintic.Muon([("w", param)])._plans.current_groups()
    return group


@pytest.mark.parametrize("texts", [(["a", "b"], ["a"]), (["a"], ["a", "b"])])
def test_a_rank_with_fewer_parameters_is_named(texts, monkeypatch):
    digests, everything = ["1", "2"], list(texts)
    answers = iter([digests, everything])
    monkeypatch.setattr(comparing, "all_gather_values", lambda value, group: next(answers))
    message = comparing.difference(texts[0], (3, 5), None)
    assert "ranks 3 and 5 were given different parameters or options" in message
    assert "has nothing" in message


def test_ranks_compare_the_order_of_memory():
    layout = replicated_layout((4, 4), (0, 1))
    plain, turned = (
        comparing.described([group_of(nn.Parameter(weight))], [[layout]])
        for weight in (torch.ones(4, 4), torch.ones(4, 4).T)
    )
    assert plain.keys() == turned.keys() == {(0, 1)}
    assert plain != turned


def test_a_dtensor_in_a_group_of_plain_tensors_is_named(monkeypatch):
    monkeypatch.setattr(sharing, "layout_of", lambda name, param: replicated_layout((2, 2), (0, 1)))
    group = SimpleNamespace(param_names=["w"], params=[torch.ones(2, 2)], comms="sharded", number=3)
    with pytest.raises(
        ValueError, match=r"w: a DTensor carries its own layout; leave comms='none' \(parameter group 3"
    ):
        sharing.layouts_of(group)
