"""Ranks that share no parameter decide together where the user binds them: stages, and weights tied across stages."""

import math
from types import SimpleNamespace

import pytest
import torch
from harness import DEVICE, run
from models import gradient
from shared_parameters import Model
from torch import distributed as dist
from torch import nn

import quintic


def bind_stages(rank, world_size, on_nonfinite):
    """Stages of a pipeline share nothing; with a process group they decide together nevertheless."""
    shared = {"first": (0, 1), "second": (2, 3)}
    names = ("first", "second")
    own = {name: {"process_group": dist.group.WORLD} for name in names}
    for bad, where in (("first", 1), ("second", 2)):
        model = Model(rank, shared, "cut", own=own, on_nonfinite=on_nonfinite)
        model.give([bad] if rank == where else [])
        if on_nonfinite == "raise":
            with pytest.raises(FloatingPointError):
                model.optimizer.step()
        else:
            assert quintic.verify(model, model.optimizer).ok
            model.optimizer.step()
        assert model.moved() == set()
        model.give()
        norm = quintic.clip_grad_norm_(model.optimizer, math.inf, scope="all").item()
        assert norm == pytest.approx(math.sqrt(2 * 24))
        model.optimizer.step()
        assert model.moved() == model.held()


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_process_group_binds_ranks_that_share_nothing(on_nonfinite):
    run(bind_stages, 4, on_nonfinite, timeout=60)


class Stage(nn.Module):
    """A part of a model: an embedding at the beginning, the head tied to it at the end."""

    def __init__(self, number, last):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(10, 4)
        self.config = SimpleNamespace(vocab_size=10)
        if number == 0:
            self.tokens = nn.Embedding(10, 4)
            self.tokens.weight = nn.Parameter(weight)
        self.middle = nn.Linear(4, 4, bias=False)
        if number == last:
            self.project = nn.Linear(4, 10, bias=False)
            self.project.weight = nn.Parameter(weight)
        self.to(DEVICE)


def step_tied_stages(rank, world_size, comms):
    """Two tensors that are one for the optimizer: equal after every step, and one in the norm."""
    model = Stage(rank, world_size - 1)
    ends = dist.new_group([0, world_size - 1])
    tied = {0: "tokens.weight", world_size - 1: "project.weight"}.get(rank)
    rules = [quintic.Rule(tied, "adamw", options={"comms": comms, "process_group": ends})] if tied else []
    groups = quintic.param_groups(model, rules=rules)
    for group in groups:
        group["param_names"] = ["tied" if name == tied else f"{rank}.{name}" for name in group["param_names"]]
    optimizer = quintic.Muon(groups, lr=0.1, adamw_lr=0.1, on_nonfinite="skip")
    params = dict(model.named_parameters())
    for step in range(4):
        for name, param in params.items():
            # The user adds up both ends' gradients, or the optimizer averages.
            title, own = ("tied", rank * (comms != "averaged")) if name == tied else (name, 0)
            param.grad = gradient(title, param.shape, param.dtype, step, own)
        is_bad = step == 1
        if is_bad and rank == 0:
            model.middle.weight.grad[0, 0] = math.nan
        norm = quintic.clip_grad_norm_(optimizer, 0.5).item()
        if tied and comms == "averaged":
            whole = gradient("tied", (10, 4), torch.float32, step, 0)
            assert norm == pytest.approx(float(whole.double().norm()), rel=1e-6)
        before = {name: param.detach().clone() for name, param in params.items()}
        optimizer.step()
        is_stopped = is_bad and tied is not None
        assert optimizer.last_step().skipped == is_stopped
        assert {torch.equal(param, before[name]) for name, param in params.items()} == {is_stopped}
    return params[tied].detach() if tied else None


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_weights_tied_across_stages_stay_equal(comms):
    first, between, last = run(step_tied_stages, 3, comms, timeout=60)
    assert between is None
    assert torch.equal(first, last)
