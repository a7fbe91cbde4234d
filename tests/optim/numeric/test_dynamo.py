"""Training loops under torch.compile: what the optimizer does is one call, and nothing is compiled twice."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import quintic

# Of the compiler, which some version of PyTorch has about itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def loop_of(model, optimizer, compiles):
    def train_step(x, scale):
        y = x * scale
        quintic.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return y + 1

    return torch.compile(train_step, backend="eager") if compiles else train_step


@pytest.mark.parametrize("schedules", [False, True])
def test_a_compiled_loop_traces_nothing_of_the_optimizer(schedules):
    found = []
    for compiles in (False, True):
        model = model_of()
        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, normalize="neuron")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)) if schedules else None
        train_step = loop_of(model, optimizer, compiles)
        frames = []
        for step in range(20):
            model(batch(step)).square().mean().backward()
            train_step(batch(step), 2.0)
            if scheduler is not None:
                scheduler.step()
            if step == 10:
                optimizer.param_groups[0]["momentum"] = 0.9
            frames.append(counters["frames"]["total"])
        found.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # Before, between and after the three calls; none of them again.
    assert sum(counters["graph_break"].values()) == 3, dict(counters["graph_break"])
    assert frames[0] == frames[-1] == 4
    assert counters["stats"]["calls_captured"] == 2


def test_hooks_run_once_and_the_closure_may_be_compiled():
    model = model_of()
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02)
    compiled, seen = torch.compile(model, backend="eager"), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    twin = copy.deepcopy(model)
    expected = quintic.Muon(quintic.param_groups(twin), lr=0.02)

    def closure():
        loss = compiled(batch(0)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert seen == ["before", "after"]
    assert counters["stats"]["unique_graphs"] == 1
    twin(batch(0)).square().mean().backward()
    expected.step()
    assert loss > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_step_of_a_subclass_has_its_hooks():
    class Mine(quintic.Muon):
        def step(self, closure=None, *, qk_logits=None):
            return super().step(closure, qk_logits=qk_logits)

    model = model_of()
    optimizer = Mine(quintic.param_groups(model), lr=0.02)
    model(batch(0)).square().mean().backward()
    report = quintic.verify(model, optimizer)
    assert report.ok, str(report)


def test_importing_quintic_imports_no_compiler():
    code = (
        "import sys; from quintic import *; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout
