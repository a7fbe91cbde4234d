"""When averages that were made ahead of a step are valid; `tests/distributed/test_clip_averages.py` has the steps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quintic.optim.comms.communicators import Communicators
from quintic.optim.layout.layouts import replicated_layout
from quintic.optim.step.reduction import Reduction


def set_in_place(param):
    param.grad.mul_(2)


def set_anew(param):
    param.grad = param.grad.clone()


def remove(param):
    param.grad = None


@pytest.fixture
def params():
    """A parameter of each of two groups, with gradients."""
    made = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param in made:
        param.grad = torch.ones(3)
    return made


@pytest.fixture
def reduction(params):
    """It has averages of both groups; those of the second group's gradient are flat, with fewer entries."""
    made = Reduction(Communicators())
    made.keep({0: {params[0]: params[0].grad}, 1: {params[1]: torch.zeros(2)}})
    return made


def test_averages_are_valid_as_long_as_gradients_stay(reduction, params):
    valid = reduction.valid()
    assert list(valid) == [0, 1]
    assert valid[0][params[0]] is params[0].grad
    assert valid[1][params[1]].tolist() == [0, 0]
    assert reduction.valid() == valid


@pytest.mark.parametrize("touch", [set_in_place, set_anew, remove])
@pytest.mark.parametrize("number", [0, 1])
def test_averages_of_all_groups_are_dropped_when_one_gradient_is_touched(reduction, params, touch, number):
    touch(params[number])
    assert not reduction.valid()
    assert not reduction.cached


def test_a_gradient_that_was_missing_counts_as_touched(reduction, params):
    params[1].grad = None
    reduction.accept_gradients()
    assert reduction.valid()
    params[1].grad = torch.ones(3)
    assert not reduction.valid()


def test_averages_belong_to_gradients_that_were_scaled_with_them(reduction, params):
    params[0].grad.mul_(0.5)
    reduction.accept_gradients()
    assert list(reduction.valid()) == [0, 1]


def test_averages_of_other_groups_outlive_a_step(reduction, params):
    reduction.forget([0])
    params[0].grad = None
    assert list(reduction.valid()) == [1]


@pytest.mark.parametrize(("numbers", "left"), [([1], []), ([0, 1], []), ([2], [0, 1]), ([], [0, 1])])
def test_averages_are_dropped_when_all_ranks_reset_gradients_of_a_group(reduction, numbers, left):
    reduction.invalidate(numbers)
    assert list(reduction.cached) == left


def test_averages_outlive_a_plan(reduction):
    reduction.use_plan((), (), ())
    assert list(reduction.valid()) == [0, 1]


def test_averages_are_dropped_when_a_plan_gives_them_other_owners(reduction):
    groups = [SimpleNamespace(comms=comms) for comms in ("sharded", "none")]
    reduction.use_plan(groups, [[replicated_layout((3,), (0, 1))], [None]], ())
    assert not reduction.cached
