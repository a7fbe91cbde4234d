"""Roles of compiled, checkpointed, scripted, exported, wrapped and adapted models are those of the plain model."""

import pytest
import torch
from optional_libraries import load
from torch import nn
from torch.utils.checkpoint import checkpoint

import quintic

X = torch.zeros(2, 5, 32)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Linear(64, 32)

    def forward(self, x):
        one, two = self.norm(self.a(x).transpose(1, 2)).transpose(1, 2).chunk(2, -1)
        return self.b(one.sigmoid() * two)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net(nn.Module):
    def __init__(self, run=lambda block, x: block(x), change=lambda block: block):
        super().__init__()
        self.run = run
        self.block, self.fc = change(Gated()), nn.Linear(32, 7)

    def forward(self, x):
        return self.fc(self.run(self.block, x))


def in_bfloat16(block, x):
    with torch.autocast("cpu", torch.bfloat16):
        return block(x)


def frozen(block):
    block.requires_grad_(False)
    block.b.requires_grad_(True)
    return block


class Plain(nn.Module):
    """`Net` without a function among its attributes, which compilers need."""

    def __init__(self):
        super().__init__()
        self.block, self.fc = Gated(), nn.Linear(32, 7)

    def forward(self, x):
        return self.fc(self.block(x))


MODELS = {
    "checkpointed": lambda: Net(lambda block, x: checkpoint(block, x, use_reentrant=False)),
    "checkpointed, reentrant": lambda: Net(lambda block, x: checkpoint(block, x, use_reentrant=True)),
    "autograd function": lambda: Net(lambda block, x: Doubled.apply(block(x))),
    "autocast": lambda: Net(in_bfloat16),
    "compiled part": lambda: Net(change=lambda block: torch.compile(block, backend="eager")),
    "compiled": lambda: torch.compile(Plain(), backend="eager"),
    "frozen part": lambda: Net(change=frozen),
    "scripted part": lambda: Net(change=torch.jit.script),
    "scripted": lambda: torch.jit.script(Plain()),
    "traced by TorchScript": lambda: torch.jit.trace(Plain().eval(), X),
    "fx": lambda: torch.fx.symbolic_trace(Plain()),
    "exported": lambda: torch.export.export(Plain().eval(), (X,)).module(),
    "DataParallel": lambda: nn.DataParallel(Plain()),
    "meta": lambda: Plain().to("meta"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # TorchScript's end
@pytest.mark.parametrize("kind", MODELS)
def test_roles_are_those_of_the_plain_model(kind):
    model = MODELS[kind]()
    training = [module.training for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    roles = quintic.trace(model, X)
    assert roles["block.a.weight"].view == quintic.Split((64, 64))
    assert roles["block.b.weight"].view == quintic.Matrix()
    assert roles["fc.weight"].kind == "head"
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items() if not value.is_meta)


def test_roles_of_a_model_before_peft_and_after():
    peft = load("peft")
    model = Plain()
    roles = quintic.trace(model, X)
    config = peft.LoraConfig(target_modules=["block.a", "block.b"], r=4)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        parameter.requires_grad_(True)
    for how in ({"roles": roles}, {"example": X}):
        rows = {row.name: row for row in quintic.explain(adapted, **how).rows}
        name = "base_model.model.block.a.base_layer.weight"
        assert rows[name].view == quintic.Split((64, 64))
        assert rows["base_model.model.fc.weight"].algorithm == "adamw"
    # B gives the outputs of the weight that it adapts.
    assert rows["base_model.model.block.a.lora_B.default.weight"].view == quintic.Split((64, 64))
