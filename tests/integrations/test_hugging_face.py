"""`MuonFactory` and what it shares with other integrations, called as the libraries call them."""

import dataclasses
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

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


@dataclasses.dataclass
class Arguments:
    """Those of TrainingArguments that count for an optimizer, with its defaults."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclasses.dataclass
class OthersDefaults(Arguments):
    """As TRL's SFTConfig, whose users have not set the rate."""

    learning_rate: float = 2e-5


class Trained:
    """Makes the optimizer as Trainer does."""

    def __init__(self, args):
        self.args = args

    def create_optimizer(self, options):
        return MuonFactory()(model(), **options)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"learning_rate": 1e-3}, {"lr": 0.01}, [r"learning_rate=0.001 \(give 'adamw_lr'\)"]),
        ({"weight_decay": 0.1}, {"lr": 0.01}, [r"weight_decay=0.1 \(give 'weight_decay'\)"]),
        (
            {"adam_beta2": 0.9, "adam_epsilon": 1e-6, "learning_rate": 1e-3},
            {"adamw_lr": 1e-3},
            [r"adam_beta2=0.9 \(give 'betas'\), adam_epsilon=1e-06 \(give 'eps'\)$"],
        ),
        ({"max_grad_norm": 0.5}, {}, ["max_grad_norm=0.5 clips all gradients by one norm.*set max_grad_norm=0"]),
    ],
)
def test_arguments_without_effect_are_named_once(given, options, words):
    arguments = Arguments(**{"max_grad_norm": 0, **given})
    with pytest.warns(UserWarning, match="^TrainingArguments: ") as seen:
        Trained(arguments).create_optimizer(options)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    for word in words:
        assert re.search(word, str(seen[0].message))
    assert "learning_rate" not in str(seen[0].message) or "adamw_lr" not in options


@pytest.mark.parametrize("off", [0, None])
def test_nothing_is_said_of_defaults_nor_of_what_a_keyword_replaces(off):
    options = {"adamw_lr_ratio": 0.1, "adamw_weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-9}
    set_by_user = Arguments(learning_rate=1e-3, weight_decay=0.1, adam_beta1=0.8, adam_epsilon=1e-6, max_grad_norm=off)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (Arguments(max_grad_norm=off), OthersDefaults(max_grad_norm=off), None, "no dataclass"):
            Trained(arguments).create_optimizer({"lr": 0.01})
        Trained(set_by_user).create_optimizer(options)


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
