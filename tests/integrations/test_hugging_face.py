"""`MuonFactory` and what it shares with other integrations, called as the libraries call them."""

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import quintic
from quintic.integrations import muon_for
from quintic.integrations.hugging_face import MuonFactory


def model() -> nn.Module:
    return nn.ModuleDict({"embedding": nn.Embedding(5, 4), "up": nn.Linear(4, 8), "lm_head": nn.Linear(8, 5)})


def test_the_factory_makes_the_optimizer_as_two_lines_would():
    # Trainer of transformers 5: optimizer_cls()(model, **optimizer_kwargs).
    network = model()
    made = MuonFactory()(network, lr=0.01, adamw_lr=0.002, weight_decay=0.1, normalize="neuron")
    options = {"lr": 0.01, "adamw_lr": 0.002, "weight_decay": 0.1, "normalize": "neuron"}
    by_hand = quintic.Muon(quintic.param_groups(network), **options)
    assert type(made) is quintic.Muon
    assert str(made.state_dict()["param_groups"]) == str(by_hand.state_dict()["param_groups"])
    assert [id(p) for g in made.param_groups for p in g["params"]] == [
        id(p) for g in by_hand.param_groups for p in g["params"]
    ]


def test_options_of_param_groups_reach_it():
    rules = [quintic.Rule("up.weight", "adamw", options={"lr": 0.5})]
    made = muon_for(model(), lr=0.01, rules=rules, adamw={"betas": (0.8, 0.9)})
    groups = {name: group for group in made.param_groups for name in group["param_names"]}
    assert (groups["up.weight"]["algorithm"], groups["up.weight"]["lr"]) == ("adamw", 0.5)
    assert groups["embedding.weight"]["betas"] == (0.8, 0.9)


def test_options_are_not_used_up():
    # Trainer gives the same dictionary again, with model_init to every trial.
    options = {"lr": 0.01, "rules": [quintic.Rule("up.weight", "adamw")]}
    for _ in range(2):
        MuonFactory()(model(), **options)
    assert options.keys() == {"lr", "rules"}


def test_an_older_trainer_is_told_another_way():
    # Trainer of transformers 4: optimizer_cls(grouped_parameters, **optimizer_kwargs).
    groups = [{"params": list(model().parameters()), "weight_decay": 0.0}]
    with pytest.raises(TypeError, match=r"transformers 5 or newer.*optimizers=\(quintic.Muon\(quintic.param_groups"):
        MuonFactory(groups, lr=0.01)


def test_groups_that_wait_are_refused():
    # Trainer calls model.zero_grad(), which takes what a waiting group has added up.
    with pytest.raises(ValueError, match="param group 1 has step_every=2: Trainer resets"):
        MuonFactory()(model(), adamw={"step_every": 2})


class Classes(nn.Module):
    """A model whose head has an unknown name, with the input that transformers keeps for its models."""

    dummy_inputs: ClassVar = {"ids": torch.zeros(2, 5, dtype=torch.long)}

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.scores = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.up(self.tokens(ids)).relu())


@pytest.mark.parametrize("example", ["dummy_inputs", Classes.dummy_inputs, torch.zeros(3, 4, dtype=torch.long)])
def test_an_example_reaches_the_groups(example):
    made = MuonFactory()(Classes(), lr=0.01, example=example)
    assert [group["param_names"] for group in made.param_groups if group["algorithm"] == "muon"] == [["up.weight"]]


def test_a_model_without_dummy_inputs():
    with pytest.raises(ValueError, match="ModuleDict has no dummy_inputs: give a batch"):
        MuonFactory()(model(), example="dummy_inputs")


class Wrapped:
    """As Accelerate's wrapper, which Trainer gives to callbacks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def of_page(page, name):
    """A callback as a page of the manual has it, made without transformers."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / page).read_text("utf-8")
    code = re.search(rf"^class {name}\(.*?(?=\n\n\n|\n```)", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    names = {"quintic": quintic, "transformers": types.SimpleNamespace(TrainerCallback=object)}
    exec(code[0], names)
    return names[name]()


def with_gradients():
    network = model()
    for number, param in enumerate(network.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    return network, MuonFactory()(network, lr=0.01)


def test_a_callback_of_the_manual_clips_the_groups_of_adamw():
    network, optimizer = with_gradients()
    before = {name: param.grad.clone() for name, param in network.named_parameters()}
    adamw = [n for group in optimizer.param_groups if group["algorithm"] == "adamw" for n in group["param_names"]]
    norm = torch.stack([before[name].norm() for name in adamw]).norm()
    of_page("clip-gradients.md", "ClipAdamW").on_pre_optimizer_step(
        None, None, None, model=network, optimizer=Wrapped(optimizer), lr_scheduler=None
    )
    for name, param in network.named_parameters():
        expected = before[name] / norm if name in adamw else before[name]
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=0, msg=name)


def test_a_callback_of_the_manual_verifies_one_step(capsys):
    network, optimizer = with_gradients()
    callback = of_page("check-a-run.md", "VerifyOnce")
    for step in range(5):
        state = types.SimpleNamespace(global_step=step)
        callback.on_pre_optimizer_step(None, state, None, model=network, optimizer=Wrapped(optimizer), tokenizer=None)
    assert capsys.readouterr().out.count("the step is right: ") == 1


def test_the_class_in_place_of_the_factory_is_told_of_the_factory():
    # Trainer gives an optimizer's class groups without names, and not the model.
    parameters = list(model().parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    with pytest.warns(UserWarning, match="give MuonFactory of quintic.integrations.hugging_face in place of"):
        quintic.Muon(groups, lr=0.01)


@pytest.mark.slow
def test_transformers_takes_it_for_a_factory():
    module = pytest.importorskip(
        "transformers.trainer_optimizer", reason="transformers is not installed, or before 5.0"
    )
    assert module.is_optimizer_factory(MuonFactory)


@pytest.mark.slow
def test_import_quintic_imports_no_integration():
    code = (
        "import sys, quintic; print('quintic.integrations' in sys.modules); import quintic.integrations.hugging_face;"
    )
    code += "print(any(name in sys.modules for name in ('transformers', 'accelerate', 'torchtitan')))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


def test_the_model_may_be_on_the_meta_device():
    with torch.device("meta"):
        network = model()
    assert len(muon_for(network, lr=0.01).param_groups) == 2
