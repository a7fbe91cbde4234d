"""Views of other libraries' fused weights, on small modules with their names, structure and forward pass.

These run everywhere. `test_registry_timm.py` and `test_registry_libraries.py` run the libraries' own modules where they
are installed.
"""

import pytest
import torch
from consumed_rows import (
    assert_parts_are_gate_and_up,
    assert_parts_are_what_is_consumed,
    gate_and_up,
    rows_of,
    view_of,
)
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from quintic import Experts, Matrix, Split
from quintic.grouping.assign import assign
from quintic.grouping.doubts import PERHAPS_FUSED


def imitation(name, forward=None, library="original", **members):
    """Make a module of a library's class: layers, and attributes that tell how they are used."""
    namespace = {"__module__": f"{library}.models.imitation"} | ({"forward": forward} if forward else {})
    module = type(name, (nn.Module,), namespace)()
    for member, value in members.items():
        setattr(module, member, value)
    return module


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def hidden(width=16, positions=3):
    return torch.randn(1, positions, width, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- attention


def queries_keys_values(owner, x):
    """Queries, keys, values one below the other."""
    return scaled_dot_product_attention(*owner.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4))


def head_by_head(owner, x):
    """One group per head, as in MaxViT."""
    return scaled_dot_product_attention(*owner.qkv(x).unflatten(-1, (4, 12)).transpose(1, 2).tensor_split(3, dim=-1))


def keys_and_values(owner, x):
    """Keys and values alone: queries come from elsewhere (GCViT)."""
    k, v = owner.qkv(x).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(k, k, v)


def wider_values(owner, x):
    """Keys and values have widths of their own: query, key, value of each head in turn (LeViT, TinyViT)."""
    layer = getattr(owner.qkv, "linear", owner.qkv)
    q, k, v = layer(x).unflatten(-1, (4, 9)).transpose(1, 2).split([2, 2, 5], dim=-1)
    return (q @ k.mT) @ v


def shared_keys(owner, x):
    """Each key head comes after the queries that share it."""
    q, k, v = owner.wqkv(x).unflatten(-1, (2, 4, 4)).tensor_split([2, 3], dim=-2)
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def fused_projections(owner, x):
    """After `fuse_projections`."""
    q, k, v = owner.to_qkv(x).chunk(3, dim=-1)
    other_k, other_v = owner.to_kv(x).chunk(2, dim=-1)
    return q @ k.mT @ v + q @ other_k.mT @ other_v


def attention_then_mlp(owner, x):
    """Flux: queries, keys, values and the first layer of the MLP in one weight."""
    qkv, mlp = torch.split(owner.linear1(x), [48, 40], dim=-1)
    q, k, v = qkv.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return owner.linear2(torch.cat([attended, gelu(mlp)], dim=-1))


def mlp_then_attention(owner, x):
    mlp, q, k, v = torch.split(owner.in_proj(x), owner.in_split, dim=-1)
    return scaled_dot_product_attention(q, k, v), mlp.sigmoid()


def attentions():
    """Each attention, made anew, with its fused layer."""
    levit = {"key_dim": 2, "val_dim": 5, "num_heads": 4}
    flux = {"num_heads": 4, "norm": nn.Identity(), "proj": linear(16, 16)}
    fused = {"to_qkv": linear(16, 48), "to_kv": linear(16, 32)}
    wrapped = imitation("LinearNorm", library="timm", linear=linear(16, 36))
    block = {"hidden_size": 16, "mlp_hidden_dim": 40, "linear1": linear(16, 88), "linear2": linear(56, 16)}
    return [
        (imitation("Attention", queries_keys_values, "timm", num_heads=4, qkv=linear(16, 48)), "qkv"),
        (imitation("AttentionCl", head_by_head, "timm", num_heads=4, head_first=True, qkv=linear(16, 48)), "qkv"),
        (imitation("WindowAttentionGlobal", keys_and_values, "timm", use_global=True, qkv=linear(16, 32)), "qkv"),
        (imitation("LevitAttention", wider_values, "timm", qkv=linear(16, 36), **levit), "qkv"),
        (imitation("LevitAttention", wider_values, "timm", qkv=wrapped, **levit), "qkv.linear"),
        (imitation("FusedQKVLinear", shared_keys, "torchtitan", head_dim=4, heads_per_kv=2,
                   wqkv=linear(16, 32)), "wqkv"),
        (imitation("SelfAttention", queries_keys_values, "flux", qkv=linear(16, 48), **flux), "qkv"),
        (imitation("FusedAttention", fused_projections, "diffusers", **fused), "to_qkv"),
        (imitation("FusedAttention", fused_projections, "diffusers", **fused), "to_kv"),
        (imitation("SingleStreamBlock", attention_then_mlp, **block), "linear1"),
        (imitation("ParallelScalingBlock", mlp_then_attention, "timm", in_split=[40, 16, 16, 16],
                   in_proj=linear(16, 88)), "in_proj"),
    ]  # fmt: skip


def named(cases):
    return [pytest.param(*case, id=f"{type(case[0]).__name__}-{case[1]}") for case in cases]


@pytest.mark.parametrize(("owner", "fused"), named(attentions()))
def test_parts_of_attention_are_what_is_consumed(owner, fused):
    assert_parts_are_what_is_consumed(owner, fused, lambda owner: owner(hidden()))


def test_a_namesake_of_another_library_is_one_matrix_and_says_so():
    (decision, _) = assign(imitation("Attention", num_heads=4, qkv=linear(16, 48))).values()
    assert (decision.view, decision.why) == (Matrix(), f"linear layer; by its name {PERHAPS_FUSED}")


def latent_attention(owner, x):
    q = owner.wq(x).unflatten(-1, (4, 5)).transpose(1, 2)
    latent, rotary = owner.wkv_a(x).split([10, 2], dim=-1)
    k, v = owner.wkv_b(owner.kv_norm(latent)).unflatten(-1, (4, 8)).transpose(1, 2).split([3, 5], dim=-1)
    k = torch.cat([k, rotary.unsqueeze(1).expand(-1, 4, -1, -1)], dim=-1)
    return q @ k.mT @ v


def test_parts_of_latent_attention_are_what_is_consumed():
    owner = imitation(  # the names of DeepSeek's own code and torchtitan
        "MLA", latent_attention, n_heads=4, kv_lora_rank=10, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5,
        wq=linear(16, 20), wkv_a=linear(16, 12), wkv_b=linear(10, 32), kv_norm=nn.Identity(),
    )  # fmt: skip
    assert_parts_are_what_is_consumed(owner, "wkv_a", lambda o: o(hidden()), silence=["wkv_b"], watch=["kv_norm"])
    assert_parts_are_what_is_consumed(owner, "wkv_b", lambda o: o(hidden()), silence=["wkv_a"])
    assert view_of(owner, "wq.weight") == Matrix()


# ---------------------------------------------------------------------------------------------------------- gates


def gated_mlp(fused, out, gate_first=True):
    def forward(owner, x):
        halves = owner.get_submodule(fused)(x).chunk(2, dim=-1)
        gate, up = halves if gate_first else reversed(halves)
        gated = silu(gate) * up
        return owner.get_submodule(out)(gated) if out else gated

    return forward


def in_sequence(owner, x):
    for layer in owner.net:
        x = layer(x)
    return x


def gated_mlps():
    """Each gated MLP, made anew, with its first and last layer."""
    geglu = imitation("GEGLU", gated_mlp("proj", None, gate_first=False), "diffusers", proj=linear(12, 10))
    net = nn.ModuleList([geglu, nn.Identity(), linear(5, 12)])
    plain = [
        ("GluMlp", "timm", "fc1", "fc2"),
        ("SwiGLUFFN", "original", "w12", "w3"),  # DINOv2
        ("GraniteMoeSharedMLP", "original", "input_linear", "output_linear"),
    ]
    return [(imitation("FeedForward", in_sequence, net=net), "net.0.proj", "net.2")] + [
        (imitation(name, gated_mlp(fused, out), library, **{fused: linear(12, 10), out: linear(5, 12)}), fused, out)
        for name, library, fused, out in plain
    ]


@pytest.mark.parametrize(("owner", "fused", "out"), named(gated_mlps()))
def test_parts_of_a_gated_mlp_are_gate_and_up(owner, fused, out):
    assert_parts_are_gate_and_up(owner, fused, out)


def test_gate_and_up_of_stacked_experts_alternate():
    owner = imitation(  # torchtitan
        "GptOssGroupedExperts",
        lambda owner, rows: silu(rows[..., ::2]) * rows[..., 1::2],
        mlp1_weight_EGD=nn.Parameter(torch.zeros(1, 10, 12, dtype=torch.float64)),
        mlp2_weight_EDF=nn.Parameter(torch.zeros(1, 12, 5, dtype=torch.float64)),
    )
    view = view_of(owner, "mlp1_weight_EGD")
    numbered = torch.arange(10)[None, :, None].expand(1, 10, 12)
    parts = [sorted(batch[0].unique().tolist()) for batch in view.batches(numbered)]
    assert parts == list(gate_and_up(owner, 10))
    assert view.shapes(owner.mlp1_weight_EGD.shape) == ((1, 5, 12), (1, 5, 12))
    assert view_of(owner, "mlp2_weight_EDF") == Experts()


# ------------------------------------------------------------------------------------------------------- modulation


def chunks_of(fused, count):
    return lambda owner, c: owner.get_submodule(fused)(c).chunk(count, dim=1)


def modulated(name, count, conditions=8, **members):
    """Make a block of DiT: its modulation puts out `count` vectors, each as wide as its norm."""
    modulation = nn.Sequential(nn.SiLU(), linear(conditions, 8 * count))
    norm = nn.LayerNorm(8, elementwise_affine=False)
    return imitation(name, chunks_of("adaLN_modulation", count), norm=norm, **members, adaLN_modulation=modulation)


def final_layer():
    return modulated("FinalLayer", 2, linear=linear(8, 12))


def modulation_of_flux(count):
    return imitation(
        "Modulation", chunks_of("lin", count), is_double=count == 6, multiplier=count, lin=linear(8, 8 * count)
    )


def modulations():
    """Each modulation, made anew, with its layer."""
    norms = {
        "AdaLayerNorm": 2, "AdaLayerNormContinuous": 2, "AdaGroupNorm": 2, "AdaLayerNormZeroSingle": 3,
        "LuminaRMSNormZero": 4, "AdaLayerNormZero": 6, "AdaLayerNormSingle": 6, "SD35AdaLayerNormZeroX": 9,
        "CogView3PlusAdaLayerNormZeroTextImage": 12,
    }  # fmt: skip
    return [
        (modulated("DiTBlock", 6, attn=linear(8, 8)), "adaLN_modulation.1"),
        (modulated("DiTBlock", 6, conditions=2), "adaLN_modulation.1"),  # as wide as a divisor of the rows
        (final_layer(), "adaLN_modulation.1"),
        (modulation_of_flux(6), "lin"),
        (modulation_of_flux(3), "lin"),
        *((imitation(name, chunks_of("linear", count), "diffusers", linear=linear(8, 8 * count)), "linear")
          for name, count in norms.items()),
    ]  # fmt: skip


@pytest.mark.parametrize(("owner", "fused"), named(modulations()))
def test_parts_of_a_modulation_are_its_chunks(owner, fused):
    layer = owner.get_submodule(fused)
    rows = torch.arange(layer.out_features, dtype=torch.float64)
    layer.register_forward_hook(lambda m, a, out: rows.expand(out.shape))
    chunks = owner(torch.zeros(1, layer.in_features, dtype=torch.float64))
    parts = [part - 101 for part in rows_of(view_of(owner, f"{fused}.weight"), layer.out_features)]
    assert [part.tolist() for part in parts] == [chunk[0].tolist() for chunk in chunks]


def test_a_modulation_without_a_norm_beside_it_is_one_matrix_and_says_so():
    block = nn.Module()
    block.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(8, 48))
    (decision, _) = assign(block).values()
    assert (decision.view, decision.why) == (Matrix(), f"linear layer; by its name {PERHAPS_FUSED}")


def test_the_last_layer_of_a_diffusion_transformer_is_its_head():
    model = imitation(
        "DiT", blocks=nn.ModuleList([modulated("DiTBlock", 6, attn=linear(8, 8))]), final_layer=final_layer()
    )
    reasons = {d.name: (d.algorithm, d.why) for d in assign(model).values()}
    assert reasons["final_layer.linear.weight"] == ("adamw", "output head (the last layer of final_layer)")
    assert reasons["final_layer.adaLN_modulation.1.weight"][0] == "muon"
    assert {d.view for d in assign(model).values() if "adaLN" in d.name and d.algorithm == "muon"} == {
        Split((8,) * 6),
        Split((8, 8)),
    }


class DeltaNet(nn.Module):
    """Linear attention with a number for each head and step, as in flash-linear-attention."""

    def __init__(self, heads):
        super().__init__()
        self.num_heads = heads
        self.a_proj, self.b_proj, self.g_proj = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 16)


@pytest.mark.parametrize(("package", "heads", "gates"), [("fla.layers", 4, 2), ("fla.layers", 8, 0), ("mine", 4, 0)])
def test_gates_with_a_number_for_each_head(monkeypatch, package, heads, gates):
    monkeypatch.setattr(DeltaNet, "__module__", package)
    found = [one for one in assign(DeltaNet(heads)).values() if one.why == "gate: one number per head"]
    assert [one.algorithm for one in found] == ["adamw"] * gates
