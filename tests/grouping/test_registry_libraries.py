"""Views of the fused weights of torchtitan and diffusers against their own forward passes.

`test_registry_imitations.py` has small modules of the same structure, for where these libraries are not installed.
"""

import importlib

import pytest
import torch
from consumed_rows import (
    assert_consumed,
    assert_parts_are_gate_and_up,
    assert_parts_of_weight_are_consumed,
    gate_and_up,
    numbered_weight,
    numbers,
    rows_of,
    view_of,
)
from optional_libraries import load
from torch import nn

import quintic
from quintic import Experts, Matrix
from quintic.grouping.assign import assign


def in_float64(make):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def assert_chunks(owner, fused, call):
    """The parts of a modulation are what its forward pass puts out, one after the other."""
    layer = owner.get_submodule(fused)
    rows = torch.arange(layer.out_features, dtype=torch.float64) + 101
    parts = rows_of(view_of(owner, f"{fused}.weight"), layer.out_features)
    hook = layer.register_forward_hook(lambda m, a, out: rows.expand(out.shape))
    found = [numbers(chunk) for chunk in call(owner)]
    hook.remove()
    assert [part.tolist() for part in parts] == [chunk.tolist() for chunk in found]


class Passing(nn.Module):
    """In place of norms and rotations of queries and keys."""

    def forward(self, queries, keys, _):
        return queries, keys


# -------------------------------------------------------------------------------------------------------- torchtitan


class Titan:
    """Classes of torchtitan by their path, and its configurations of layers."""

    def __init__(self):
        load("torchtitan.models.flux")
        self.linear = self["common.linear", "Linear"]

    def __getitem__(self, place):
        path, name = place
        return getattr(importlib.import_module(f"torchtitan.models.{path}"), name)

    def linear_config(self, inputs, outputs):
        return self.linear.Config(in_features=inputs, out_features=outputs)

    def build(self, cls, **options):
        return in_float64(lambda: cls(cls.Config(**options)))


@pytest.fixture(scope="module")
def titan():
    return Titan()


def test_rows_of_fused_queries_keys_values(titan):
    cls = titan["common.attention", "FusedQKVLinear"]
    owner = titan.build(cls, head_dim=8, n_heads=4, n_kv_heads=2, wqkv=titan.linear_config(32, 64))
    numbered_weight(owner.wqkv)
    with torch.no_grad():
        queries, keys, values = owner(ones(1, 3, 32))
    assert_consumed(view_of(owner, "wqkv.weight"), 64, [numbers(queries), numbers(keys), numbers(values)])


def test_rows_of_latent_attention(titan):
    cls, rope = titan["deepseek_v3.model", "Attention"], titan["common.rope", "ComplexRoPE"]
    norm = titan["common.nn_modules", "RMSNorm"].Config
    attention = titan["common.attention", "ScaledDotProductAttention"].Config()
    owner = titan.build(
        cls, n_heads=4, dim=32, wq=titan.linear_config(32, 40), wkv_a=titan.linear_config(32, 20),
        wkv_b=titan.linear_config(16, 44), wo=titan.linear_config(20, 32), q_lora_rank=0, kv_lora_rank=16,
        q_norm=norm(normalized_shape=4), kv_norm=norm(normalized_shape=16), qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, rope=rope.Config(dim=4, max_seq_len=8), inner_attention=attention,
    )  # fmt: skip
    owner.rope = Passing()
    owner.kv_norm = nn.Identity()

    def run(o):
        return o(ones(1, 3, 32), None)

    assert_parts_of_weight_are_consumed(owner, "wkv_a", run)
    with torch.no_grad():
        owner.wkv_a.weight.fill_(1 / 32)  # ones for the second
    assert_parts_of_weight_are_consumed(owner, "wkv_b", run)
    assert view_of(owner, "wq.weight") == Matrix()


def test_rows_of_stacked_experts(titan):
    module = importlib.import_module("torchtitan.models.gpt_oss.moe")
    owner = titan.build(module.GptOssGroupedExperts, dim=12, hidden_dim=5, num_experts=1)
    view = view_of(owner, "mlp1_weight_EGD")
    numbered = torch.arange(10)[None, :, None].expand(1, 10, 12)
    parts = [sorted(batch[0].unique().tolist()) for batch in view.batches(numbered)]
    assert parts == list(gate_and_up(module.swiglu, 10))
    assert view_of(owner, "mlp2_weight_EDF") == Experts()


def flux(titan, name, **options):
    return titan.build(titan["flux.model.layers", name], **options)


def test_rows_of_flux(titan):
    norm = titan["common.nn_modules", "RMSNorm"].Config
    qk_norm = titan["flux.model.layers", "QKNorm"].Config(
        query_norm=norm(normalized_shape=8), key_norm=norm(normalized_shape=8)
    )
    modulation = titan["flux.model.layers", "Modulation"].Config
    linear = titan.linear_config
    attention = flux(titan, "SelfAttention", qkv=linear(32, 96), proj=linear(32, 32), norm=qk_norm, num_heads=4)
    attention.norm = Passing()
    positions = torch.zeros(1, 1, 3, 4, 2, 2, dtype=torch.float64)
    positions[..., 0, 0] = positions[..., 1, 1] = 1  # no rotation
    positions = positions.movedim(2, 1)
    assert_parts_of_weight_are_consumed(attention, "qkv", lambda o: o(ones(1, 3, 32), positions))
    block = flux(
        titan, "SingleStreamBlock", hidden_size=32, num_heads=4, linear1=linear(32, 224), linear2=linear(160, 32),
        modulation=modulation(double=False, lin=linear(32, 96)), norm=qk_norm,
    )  # fmt: skip
    block.norm, block.pre_norm = Passing(), nn.Identity()
    with torch.no_grad():
        block.modulation.lin.weight.zero_()
        block.modulation.lin.bias = None
    assert_parts_of_weight_are_consumed(block, "linear1", lambda o: o(ones(1, 3, 32), ones(1, 32), positions))
    assert_chunks(block.modulation, "lin", lambda o: vars(o(ones(1, 32))[0]).values())
    double = flux(titan, "Modulation", double=True, lin=linear(32, 192))
    assert_chunks(double, "lin", lambda o: [v for out in o(ones(1, 32)) for v in vars(out).values()])
    last = flux(
        titan, "LastLayer", linear=linear(32, 12), adaln_linear=linear(16, 64), hidden_size=32, patch_size=1,
        out_channels=12,
    )  # fmt: skip
    (view,) = [d.view for d in assign(last).values() if "adaLN" in d.name and d.algorithm == "muon"]
    assert [len(part) for part in rows_of(view, 64)] == [32, 32]


# --------------------------------------------------------------------------------------------------------- diffusers


def diffusers(path, name, *arguments, **options):
    load("diffusers.models")
    cls = getattr(importlib.import_module(f"diffusers.models.{path}"), name)
    return in_float64(lambda: cls(*arguments, **options)).eval()


@pytest.mark.parametrize("name", ["GEGLU", "SwiGLU"])
def test_rows_of_a_gated_mlp(name):
    owner = diffusers("attention", "FeedForward", 12, inner_dim=5, activation_fn=name.lower())
    assert type(owner.net[0]).__name__ == name
    assert_parts_are_gate_and_up(owner, "net.0.proj", "net.2")


def test_rows_of_the_mlp_of_flux2():
    owner = diffusers("transformers.transformer_flux2", "Flux2FeedForward", 12, inner_dim=5)
    assert type(owner).__name__ == "Flux2FeedForward"
    assert_parts_are_gate_and_up(owner, "linear_in", "linear_out", in_order=True)


@pytest.mark.parametrize(
    ("name", "arguments", "call"),
    [
        ("AdaLayerNormZero", (8,), lambda o: o(ones(1, 3, 8), emb=ones(1, 8))),
        ("AdaLayerNormZeroSingle", (8,), lambda o: o(ones(1, 3, 8), emb=ones(1, 8))),
        ("SD35AdaLayerNormZeroX", (8,), lambda o: o(ones(1, 3, 8), emb=ones(1, 8))),
        ("LuminaRMSNormZero", (8, 1e-6, True), lambda o: o(ones(1, 3, 8), emb=ones(1, 8))),
        ("AdaLayerNorm", (8, None, None, False, 1e-5, 1), lambda o: o(ones(1, 3, 8), temb=ones(1, 8))),
        ("AdaLayerNormContinuous", (8, 8), lambda o: o(ones(1, 3, 8), ones(1, 8))),
        ("AdaGroupNorm", (8, 8, 2), lambda o: o(ones(1, 8, 2, 2), ones(1, 8))),
        ("CogView3PlusAdaLayerNormZeroTextImage", (8, 8), lambda o: o(ones(1, 3, 8), ones(1, 3, 8), emb=ones(1, 8))),
    ],
)
def test_rows_of_adaptive_norms(name, arguments, call):
    owner = diffusers("normalization", name, *arguments)
    layer = owner.linear
    rows = torch.arange(layer.out_features, dtype=torch.float64) + 101
    layer.register_forward_hook(lambda m, a, out: rows.expand(out.shape))
    chunks = []

    class Chunks(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "chunk":
                chunks.extend(numbers(chunk).tolist() for chunk in result)
            return result

    with Chunks(), torch.no_grad():
        try:
            call(owner)
        except (TypeError, RuntimeError):
            assert chunks  # it needs more than the modulation, which was made
    parts = rows_of(view_of(owner, "linear.weight"), layer.out_features)
    assert [part.tolist() for part in parts] == chunks


def test_rows_of_the_modulation_of_pixart():
    owner = diffusers("normalization", "AdaLayerNormSingle", 24)
    view = view_of(owner, "linear.weight")
    # As PixArt's blocks use it: (scale_shift_table + timestep.reshape(batch, 6, -1)).chunk(6, dim=1)
    rows = (torch.arange(144, dtype=torch.float64) + 101).reshape(1, 6, -1).chunk(6, dim=1)
    assert [part.tolist() for part in rows_of(view, 144)] == [part.flatten().tolist() for part in rows]


@pytest.mark.parametrize("cross", [False, True])
def test_rows_of_fused_projections(cross):
    context = {"cross_attention_dim": 32} if cross else {}
    owner = diffusers("attention_processor", "Attention", 32, heads=4, dim_head=8, bias=True, **context)
    processor = importlib.import_module("diffusers.models.attention_processor").FusedAttnProcessor2_0
    owner.is_cross_attention = cross
    owner.fuse_projections(fuse=True)
    owner.set_processor(processor())
    fused = "to_kv" if cross else "to_qkv"
    others = {"encoder_hidden_states": ones(1, 3, 32)} if cross else {}
    assert_parts_of_weight_are_consumed(owner, fused, lambda o: o(ones(1, 3, 32), **others))


def test_rows_of_flux2():
    path = "transformers.transformer_flux2"
    owner = diffusers(path, "Flux2ParallelSelfAttention", 32, heads=4, dim_head=8, mlp_ratio=2.0)
    parts = rows_of(view_of(owner, "to_qkv_mlp_proj.weight"), 224)
    assert [len(part) for part in parts] == [32, 32, 32, 64, 64]
    reached = []
    owner.norm_q.register_forward_pre_hook(lambda m, a: reached.append(numbers(a[0])))
    owner.norm_k.register_forward_pre_hook(lambda m, a: reached.append(numbers(a[0])))
    owner.mlp_act_fn.gate_fn.register_forward_pre_hook(lambda m, a: reached.append(numbers(a[0])))
    rows = torch.arange(224, dtype=torch.float64) + 101
    owner.to_qkv_mlp_proj.register_forward_hook(lambda m, a, out: rows.expand(out.shape).clone())
    owner(ones(1, 3, 32))
    assert {tuple(part.tolist()) for part in (parts[0], parts[1], parts[3])} == {tuple(r.tolist()) for r in reached}
    modulation = diffusers(path, "Flux2Modulation", 8, mod_param_sets=2)
    layer_rows = torch.arange(48, dtype=torch.float64) + 101
    modulation.linear.register_forward_hook(lambda m, a, out: layer_rows.expand(out.shape))
    chunks = [chunk for chunks in modulation.split(modulation(ones(1, 8)), 2) for chunk in chunks]
    parts = rows_of(view_of(modulation, "linear.weight"), 48)
    assert [part.tolist() for part in parts] == [numbers(chunk).tolist() for chunk in chunks]


@pytest.mark.parametrize(
    ("path", "name", "options", "heads"),
    [
        (
            "transformers.transformer_flux",
            "FluxTransformer2DModel",
            {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
             "in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)},
            ["proj_out.weight"],
        ),
        (
            "transformers.dit_transformer_2d",
            "DiTTransformer2DModel",
            {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "sample_size": 8},
            ["proj_out_2.weight"],
        ),
    ],
)  # fmt: skip
def test_heads_of_diffusion_transformers(path, name, options, heads):
    model = diffusers(path, name, **options)
    reasons = {d.name: d.why for d in assign(model).values()}
    assert [name for name, why in reasons.items() if why.startswith("output head")] == heads
    quintic.param_groups(model)  # without a warning
    for name, why in reasons.items():
        if name.startswith("single_transformer_blocks.") and name.endswith("proj_out.weight"):
            assert why == "linear layer"
