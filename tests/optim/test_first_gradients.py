"""A first step without any gradient: a warning where the model has other parameters than the optimizer, else none."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import quintic
from quintic.optim.first_gradients import FirstGradients

MATCH = (
    r"no parameter had a gradient in the first step, including 0\.weight and 3 others .*"
    r"make it after that; quintic\.verify"
)


def model_of(device="cpu"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def optimizer_of(model):
    return quintic.Muon(quintic.param_groups(model))


def train(model, optimizer):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_was_materialised_with_new_parameters():
    model = model_of("meta")
    optimizer = optimizer_of(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with pytest.warns(UserWarning, match=MATCH):
        train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)  # once is enough


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_gradients_on_the_meta_device_are_an_error(algorithm):
    """Muon made a step of nothing, AdamW an error of PyTorch's that named no parameter."""
    model = nn.Linear(4, 6, bias=False, device="meta")
    optimizer = quintic.Muon([{"params": model.named_parameters(), "algorithm": algorithm}])
    model(torch.ones(2, 4, device="meta")).sum().backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weight is on the meta device.*then make the optimizer"):
            optimizer.step()


def test_what_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # One gradient is enough.
        model = model_of()
        optimizer = optimizer_of(model)
        model[1].bias.grad = torch.ones(4)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        # Nothing requires one.
        model = model_of()
        optimizer = optimizer_of(model)
        model.requires_grad_(False)
        optimizer.step()
        # Checkpoints before the first step.
        model = model_of()
        optimizer = optimizer_of(model)
        get_optimizer_state_dict(model, optimizer)
        train(model, optimizer)
        # A batch that was skipped.
        model = model_of()
        optimizer = optimizer_of(model)
        optimizer.step(lambda: None)
        train(model, optimizer)


def test_a_skipped_batch_is_no_first_step():
    optimizer = optimizer_of(model_of())
    optimizer.step(lambda: None)
    with pytest.warns(UserWarning, match=MATCH):
        optimizer.step()


def test_verify_is_no_first_step():
    model = model_of()
    optimizer = optimizer_of(model)
    assert quintic.verify(model, optimizer).ok
    with pytest.warns(UserWarning, match=MATCH):
        optimizer.step()


def test_a_copy_looks_at_its_own_first_step():
    model = model_of()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    with pytest.warns(UserWarning, match=MATCH):
        copy.deepcopy(optimizer).step()


class LateAnswer:
    """A number on its way to the host."""

    def __init__(self, value):
        self.value, self.is_there = value, False

    def read(self):
        assert self.is_there, "the host waited"
        return self.value


@pytest.mark.parametrize("present", [True, False])
def test_the_host_does_not_wait_for_other_ranks(present, monkeypatch):
    made = []
    monkeypatch.setattr(
        "quintic.optim.first_gradients.HostCopy", lambda value: made.append(LateAnswer(value)) or made[-1]
    )
    groups, found = optimizer_of(model_of())._plans.current_groups(), FirstGradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.check(groups, allow_missing=False)
        found.start_rank_check([False, present])
        found.check(groups, allow_missing=False)
        for answer in made:
            answer.is_there = True
        if present:
            found.check(groups, allow_missing=False)
            found.start_rank_check([])
            return
    with pytest.warns(UserWarning, match=MATCH):
        found.check(groups, allow_missing=False)
