"""Recognition of output heads; heads that follow from the sizes of embeddings are in `test_param_groups.py`."""

import pytest
import torch
from optional_libraries import load, quietly
from torch import nn

import quintic
from quintic.grouping.assign import assign
from quintic.grouping.heads import heads_of


def tree(**children):
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def body():
    return nn.ModuleList(tree(fc=nn.Linear(8, 8), proj_out=nn.Linear(8, 16), output=nn.Linear(16, 8)) for _ in range(2))


def names(model):
    return [d.name for d in assign(model, convolutions="muon").values() if d.why.startswith("output head")]


class Timm(nn.Module):
    """Says which layer its classifier is, as timm's models do."""

    def __init__(self, classifier, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.ask = classifier

    def get_classifier(self):
        return self.ask(self)


class NormLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 5)


# ------------------------------------------------------------------------------------------------- the model says so


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Timm(lambda m: m.classif, blocks=body(), classif=nn.Linear(8, 5)), ["classif.weight"]),
        (Timm(lambda m: (m.a, m.b), blocks=body(), a=nn.Linear(8, 5), b=nn.Linear(8, 5)), ["a.weight", "b.weight"]),
        (Timm(lambda m: m.a, blocks=body(), a=NormLinear()), ["a.linear.weight"]),
        (
            Timm(lambda m: m.a, blocks=body(), a=nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 6)])),
            ["a.0.weight", "a.1.weight"],
        ),
        (
            Timm(lambda m: m.a, blocks=body(), a=nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))),
            ["a.2.weight"],
        ),
        (Timm(lambda m: m.a.b, blocks=body(), a=tree(first=nn.Linear(8, 9), b=nn.Linear(9, 5))), ["a.b.weight"]),
        (Timm(lambda m: m.a, blocks=body(), a=nn.Conv2d(8, 5, 1)), ["a.weight"]),
        (Timm(lambda m: None, blocks=body(), a=nn.Linear(8, 5)), []),
        (Timm(lambda m: nn.Identity(), blocks=body(), a=nn.Linear(8, 5)), []),
        (Timm(lambda m: m.nothing, blocks=body(), a=nn.Linear(8, 5)), []),
    ],
)  # fmt: skip
def test_get_classifier(model, heads):
    assert names(model) == heads


def test_a_declared_head_may_be_compiled():
    model = Timm(lambda m: m.classif, blocks=body(), classif=torch.compile(nn.Linear(8, 5), backend="eager"))
    assert names(model) == ["classif.weight"]


# --------------------------------------------------------------------------------------------------------- by its name


@pytest.mark.parametrize(
    ("children", "heads"),
    [
        ({"fc": nn.Linear(8, 5)}, ["fc.weight"]),
        ({"head": tree(norm=nn.LayerNorm(8), fc=nn.Linear(8, 5))}, ["head.fc.weight"]),
        ({"head": nn.Linear(8, 5), "head_dist": nn.Linear(8, 5)}, ["head.weight", "head_dist.weight"]),
        ({"proj_out": nn.Linear(8, 5)}, ["proj_out.weight"]),
        ({"final_layer": tree(norm=nn.LayerNorm(8), linear=nn.Linear(8, 5))}, ["final_layer.linear.weight"]),
        ({"final_layer": nn.Linear(8, 5)}, ["final_layer.weight"]),
        ({"logits": nn.Linear(8, 5)}, ["logits.weight"]),
        ({"to_logits": nn.Linear(8, 5)}, ["to_logits.weight"]),
        ({"value_head": nn.Linear(8, 5)}, ["value_head.weight"]),
        ({"value_head": nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))}, ["value_head.2.weight"]),
        ({"heads": nn.Sequential(nn.Dropout(), nn.Linear(8, 5))}, ["heads.1.weight"]),
        ({"heads": nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 6)])}, ["heads.0.weight", "heads.1.weight"]),
        ({"classifier": nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 5))}, ["classifier.2.weight"]),
        ({"conv_out": nn.Conv2d(8, 5, 3)}, ["conv_out.weight"]),
        ({"model": tree(proj_out=nn.Linear(8, 5))}, ["model.proj_out.weight"]),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, dict) else "",
)
def test_names_of_heads(children, heads):
    assert names(tree(blocks=body(), **children)) == heads


@pytest.mark.parametrize(
    "children",
    [
        {"fc": nn.Linear(8, 9), "out": nn.Linear(9, 5)},  # not the last layer
        {"proj_out": nn.Linear(8, 9), "act": nn.ReLU(), "vision": nn.Linear(9, 9)},
        {"input_ff_layer": tree(output_layer=nn.Linear(8, 9), residual_layer=nn.Linear(8, 9))},
        {"pre_classifier": nn.Linear(8, 9)},
        {"lm_head": tree(dense=nn.Linear(8, 8), norm=nn.LayerNorm(8))},  # before an output tied to the embedding
        {"sa_head": tree(key=nn.Linear(8, 4), query=nn.Linear(8, 4), value=nn.Linear(8, 4))},  # of attention
        {"head": tree(attention=nn.MultiheadAttention(8, 2), mlp=tree(fc1=nn.Linear(8, 9), fc2=nn.Linear(9, 8)))},
        {"conv_head": nn.Conv2d(8, 16, 1)},  # EfficientNet's last convolution before its classifier
        {"final_layer": nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16))},
    ],
    ids="-".join,
)
def test_layers_that_only_sound_like_heads(children):
    assert names(tree(blocks=body(), **children)) == []


def test_a_stack_of_layers_has_no_heads_by_their_ordinary_names():
    assert names(tree(blocks=body())) == []


# ------------------------------------------------------------------------------------------------------------- adapters


class ModulesToSaveWrapper(nn.Module):
    """PEFT keeps a copy of a module that is trained beside adapters."""

    def __init__(self, module, copy):
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy})


@pytest.mark.parametrize("name", ["score", "classifier", "fc", "lm_head"])
def test_heads_that_are_trained_beside_adapters(name):
    wrapper = ModulesToSaveWrapper(nn.Linear(8, 5), nn.Linear(8, 5))
    inner = tree(blocks=body().requires_grad_(False), **{name: wrapper})
    model = tree(base_model=tree(model=inner))
    adapter = model.base_model.model.blocks[0].lora_A = nn.Linear(8, 2)
    reasons = {d.name: d.why for d in assign(model).values()}
    assert reasons[f"base_model.model.{name}.modules_to_save.default.weight"].startswith("output head")
    assert adapter not in heads_of(model)


def test_a_declared_head_that_is_trained_beside_adapters():
    wrapper = ModulesToSaveWrapper(nn.Linear(8, 5), nn.Linear(8, 5))
    model = Timm(lambda m: m.decoder, blocks=body(), decoder=wrapper)
    assert names(model) == ["decoder.modules_to_save.default.weight"]


@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_heads_that_peft_saves(task):
    peft, transformers = load("peft"), load("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    kind = {"SEQ_CLS": "LlamaForSequenceClassification", "CAUSAL_LM": "LlamaForCausalLM"}[task]
    save = {"SEQ_CLS": ["score"], "CAUSAL_LM": ["lm_head", "embed_tokens"]}[task]
    model = getattr(transformers, kind)(config)
    lora = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"], modules_to_save=[*save])
    model = quietly(peft.get_peft_model, model, lora)
    treatment = {d.name: (d.algorithm, d.why) for d in assign(model).values()}
    saved = {name: found for name, found in treatment.items() if "modules_to_save" in name}
    assert len(saved) == len(save)
    assert all(
        algorithm == "adamw" and why.partition(" (")[0] in ("output head", "embedding")
        for algorithm, why in saved.values()
    )
    factors = [algorithm for name, (algorithm, _) in treatment.items() if "lora_" in name]
    assert factors == ["muon"] * 8


def test_buckets_of_relative_positions_are_no_vocabulary():
    """As in T5 with one layer, where a feed-forward layer is as wide as there are buckets."""
    layers = {"relative_attention_bias": nn.Embedding(32, 4), "wi": nn.Linear(32, 64), "wo": nn.Linear(64, 32)}
    groups = quintic.param_groups(nn.ModuleDict(layers))
    assert {"wi.weight", "wo.weight"} <= set(groups[0]["param_names"])
