"""What the registry says of models of transformers is what their own forward passes show."""

import warnings

import pytest
import torch
from model_families import FAMILIES, build, transformers_class

import quintic
from quintic.optim.layout.views import Split

IDS = torch.ones(2, 6, dtype=torch.long)

# Models whose owners have the class "Attention" or are recognised by attributes; and an entry for each.
MODELS = {
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40}),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 3},
    ),
    "FalconMambaForCausalLM": (
        "FalconMambaConfig",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 3},
    ),
    "FocalNetForImageClassification": (
        "FocalNetConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": (1, 1), "num_labels": 7},
    ),
}


def assert_the_pass_agrees(model, example):
    without = {row.name: row for row in quintic.explain(model).rows}
    for row in quintic.explain(model, example=example).rows:
        assert row.otherwise == "", f"{row.name}: {row.reason}"
        assert (row.algorithm, row.view) == (without[row.name].algorithm, without[row.name].view)


@pytest.mark.parametrize("name", MODELS)
def test_models_by_the_names_of_classes_and_attributes(name):
    config, options = MODELS[name]
    cls = transformers_class(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(transformers_class(config)(**options))
        example = {"pixel_values": torch.zeros(2, 3, 32, 32)} if "Image" in name else {"input_ids": IDS}
        assert_the_pass_agrees(model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = quintic.explain(model).rows
    fused = [row for row in rows if isinstance(row.view, Split)]
    assert fused


def example_for(family, config):
    if family == "vit":
        return {"pixel_values": torch.zeros(2, config.num_channels, config.image_size, config.image_size)}
    if family == "whisper":
        sounds = torch.zeros(2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sounds, "decoder_input_ids": IDS}
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if family == "t5" else {})}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_model_families(family):
    config, model = build(family, "small")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        roles = quintic.trace(model, example_for(family, config))
        differing = [f"{row.name}: {row.reason}" for row in quintic.explain(model, roles=roles).rows if row.otherwise]
    assert differing == []
