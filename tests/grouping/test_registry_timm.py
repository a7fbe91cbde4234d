"""Views of timm's fused weights against its own forward passes; see `test_registry_imitations.py` without timm."""

import importlib

import pytest
import torch
from consumed_rows import assert_parts_are_gate_and_up, assert_parts_of_weight_are_consumed, rows_of, view_of
from optional_libraries import load
from torch import nn

import quintic
from quintic import Split
from quintic.grouping.assign import assign


def module(path, name, *args, **options):
    load("timm")
    cls = getattr(importlib.import_module(f"timm.{path}"), name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        owner = cls(*args, **options)
        owner.eval()  # some return nothing
        return owner
    finally:
        torch.set_default_dtype(before)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def tokens(owner):
    return owner(ones(1, 16, 32))


def tokens_on_a_grid(owner):
    return owner(ones(1, 16, 32), (4, 4))


def images(owner):
    return owner(ones(1, 4, 4, 32))


def run_tiny_vit(owner):
    owner.norm = nn.Identity()  # ones would not be ones behind it
    return owner(ones(1, 16, 32))


def run_coat(owner):
    owner.crpe = lambda q, v, size: torch.zeros_like(q)
    return owner(ones(1, 16, 32), (4, 4))


QKV = [
    ("layers.attention", "Attention", {"dim": 32, "num_heads": 4}, tokens),
    ("layers.attention", "AttentionRope", {"dim": 32, "num_heads": 4}, tokens),
    ("layers.diff_attention", "DiffAttention", {"dim": 32, "num_heads": 4}, tokens),
    ("models.beit", "Attention", {"dim": 32, "num_heads": 4}, tokens),
    ("models.eva", "EvaAttention", {"dim": 32, "num_heads": 4, "scale_norm": False}, tokens),
    ("models.convit", "MHSA", {"dim": 32, "num_heads": 4}, tokens),
    ("models.swin_transformer", "WindowAttention", {"dim": 32, "num_heads": 4, "window_size": 4}, tokens),
    ("models.swin_transformer_v2", "WindowAttention", {"dim": 32, "num_heads": 4, "window_size": (4, 4)}, tokens),
    ("models.twins", "LocallyGroupedAttn", {"dim": 32, "num_heads": 4, "ws": 2}, tokens_on_a_grid),
    ("models.vision_transformer_sam", "Attention", {"dim": 32, "num_heads": 4}, images),
    ("models.coat", "FactorAttnConvRelPosEnc", {"dim": 32, "num_heads": 4, "shared_crpe": None}, run_coat),
    ("models.hiera", "MaskUnitAttention", {"dim": 32, "dim_out": 16, "heads": 4}, tokens),
    ("models.maxxvit", "AttentionCl", {"dim": 32, "dim_head": 8, "head_first": True}, tokens),
    ("models.maxxvit", "AttentionCl", {"dim": 32, "dim_head": 8, "head_first": False}, tokens),
    ("models.efficientformer", "Attention", {"dim": 32, "key_dim": 4, "num_heads": 4, "resolution": 4}, tokens),
    ("models.tiny_vit", "Attention", {"dim": 32, "key_dim": 4, "num_heads": 4, "resolution": (4, 4)}, run_tiny_vit),
    ("models.gcvit", "WindowAttentionGlobal", {"dim": 32, "num_heads": 4, "window_size": (4, 4), "use_global": False},
     tokens),
    ("models.gcvit", "WindowAttentionGlobal", {"dim": 32, "num_heads": 4, "window_size": (4, 4), "use_global": True},
     lambda owner: owner(ones(1, 16, 32), torch.zeros(1, 16, 32, dtype=torch.float64))),
    ("models.nest", "Attention", {"dim": 32, "num_heads": 4}, lambda owner: owner(ones(1, 2, 8, 32))),
    ("models.fastvit", "Attention", {"dim": 32, "head_dim": 8}, lambda owner: owner(ones(1, 32, 4, 4))),
    ("models.cait", "TalkingHeadAttn", {"dim": 32, "num_heads": 4}, tokens),
    ("models.davit", "ChannelAttention", {"dim": 32, "num_heads": 4}, tokens),
    ("models.davit", "WindowAttention", {"dim": 32, "num_heads": 4, "window_size": (4, 4)}, tokens),
    ("models.hieradet_sam2", "MultiScaleAttention", {"dim": 32, "dim_out": 16, "num_heads": 4}, images),
    ("models.mvitv2", "MultiScaleAttention",
     {"dim": 32, "dim_out": 16, "num_heads": 4, "feat_size": (4, 4), "has_cls_token": False, "rel_pos_type": "",
      "mode": "avg"}, tokens_on_a_grid),
    ("models.vision_transformer_relpos", "RelPosAttention", {"dim": 32, "num_heads": 4}, tokens),
    ("models.xcit", "XCA", {"dim": 32, "num_heads": 4}, tokens),
    ("models.edgenext", "CrossCovarianceAttn", {"dim": 32, "num_heads": 4}, tokens),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "options", "call"), QKV, ids=[f"{case[0]}-{case[1]}" for case in QKV])
def test_rows_of_attention(path, name, options, call):
    owner = module(path, name, **options)
    assert_parts_of_weight_are_consumed(owner, "qkv", call)


KV = [
    ("layers.attention_pool", "AttentionPoolLatent", {"in_features": 32, "num_heads": 4}, tokens),
    ("models.twins", "GlobalSubSampleAttn", {"dim": 32, "num_heads": 4}, tokens_on_a_grid),
    ("models.volo", "ClassAttention", {"dim": 32, "num_heads": 4}, tokens),
    ("models.pvt_v2", "Attention", {"dim": 32, "num_heads": 4}, tokens_on_a_grid),
]


@pytest.mark.parametrize(("path", "name", "options", "call"), KV, ids=[f"{case[0]}-{case[1]}" for case in KV])
def test_rows_of_keys_and_values(path, name, options, call):
    assert_parts_of_weight_are_consumed(module(path, name, **options), "kv", call)


def test_rows_of_queries_and_keys():
    assert_parts_of_weight_are_consumed(module("models.convit", "GPSA", dim=32, num_heads=4), "qk", tokens)


@pytest.mark.parametrize(
    ("name", "path", "widths"),
    [("Attention", "qkv", {"dim": 32}), ("AttentionDownsample", "kv", {"in_dim": 32, "out_dim": 16})],
)
def test_rows_of_levit(name, path, widths):
    owner = module("models.levit", name, key_dim=4, num_heads=4, resolution=4, **widths)
    assert_parts_of_weight_are_consumed(owner, f"{path}.linear", tokens)


@pytest.mark.parametrize("name", ["ParallelScalingBlock", "DiffParallelScalingBlock"])
def test_rows_of_parallel_blocks(name):
    owner = module("models.vision_transformer", name, dim=32, num_heads=4)
    view = view_of(owner, "in_proj.weight")
    sizes = [len(part) for part in rows_of(view, owner.in_proj.out_features)]
    assert sizes == [128, 32, 32, 32]
    owner.in_norm = nn.Identity()
    assert_parts_of_weight_are_consumed(owner, "in_proj", tokens)


@pytest.mark.parametrize("gate_last", [False, True])
def test_rows_of_a_gated_mlp(gate_last):
    owner = module("layers.mlp", "GluMlp", 12, 10, act_layer=nn.SiLU, gate_last=gate_last)
    assert_parts_are_gate_and_up(owner, "fc1", "fc2")


def test_rows_of_a_gated_convolution_block():
    owner = module("models.mambaout", "GatedConvBlock", 32)
    view = view_of(owner, "fc1.weight")
    gate, kept, convolved = owner.split_indices
    assert view == Split((gate, kept + convolved))


HEADS = {
    "vit_tiny_patch16_224": ["head.weight"],
    "deit_tiny_distilled_patch16_224": ["head.weight", "head_dist.weight"],
    "resnet18": ["fc.weight"],
    "convnext_atto": ["head.fc.weight"],
    "efficientnet_b0": ["classifier.weight"],
    "levit_128s": ["head.linear.weight", "head_dist.linear.weight"],
    "crossvit_9_240": ["head.0.weight", "head.1.weight"],
    "inception_resnet_v2": ["classif.weight"],
    "mobilenetv3_small_050": ["classifier.weight"],
    "hrnet_w18_small": ["classifier.weight"],
    "swin_tiny_patch4_window7_224": ["head.fc.weight"],
    "eva02_tiny_patch14_336": ["head.weight"],
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name):
    timm = load("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    assignments = assign(model, convolutions="muon")
    heads = [one.name for one in assignments.values() if one.why.startswith("output head")]
    assert heads == HEADS[name]
    declared = model.get_classifier()
    declared = [*declared] if isinstance(declared, tuple | nn.ModuleList) else [declared]
    assert {p for layer in declared for p in layer.parameters() if p.ndim > 1} == {
        param for param, one in assignments.items() if one.name in heads
    }


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"])
def test_a_vision_transformer_has_no_perhaps(name):
    timm = load("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
    groups = quintic.param_groups(model)  # a warning would be an error here
    split = [n for g in groups if isinstance(g["view"], Split) for n in g["param_names"]]
    assert all("qkv" in n or "fc1" in n for n in split)
    assert len(split) >= 12
