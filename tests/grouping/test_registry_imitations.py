"""Views of other libraries' fused weights, on small modules with their names, structure and forward pass.

These run everywhere. `test_registry_timm.py` and `test_registry_libraries.py` run the libraries' own modules where they
are installed.
"""

import pytest
import torch
from consumed_rows import assert_parts_are_what_is_consumed, gate_and_up, rows_of, view_of
from torch import nn

from quintic import Experts, Matrix, Split
from quintic.grouping.assign import assign
from quintic.grouping.classify import PERHAPS_FUSED


def from_library(library):
    """Say that a class comes from a library."""

    def with_module(cls):
        cls.__module__ = f"{library}.models.imitation"
        return cls

    return with_module


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def hidden(width=16, positions=3):
    return torch.randn(1, positions, width, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- attention


@from_library("timm")
class Attention(nn.Module):
    """Queries, keys, values one below the other; with `head_first` one group per head, as in MaxViT."""

    def __init__(self, head_first=False):
        super().__init__()
        self.num_heads, self.head_first = 4, head_first
        self.qkv, self.proj = linear(16, 48), linear(16, 16)

    def forward(self, x):
        if self.head_first:
            q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 12)).transpose(1, 2).tensor_split(3, dim=-1)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@from_library("timm")
class WindowAttentionGlobal(nn.Module):
    """Keys and values alone: queries come from elsewhere (GCViT)."""

    use_global, num_heads = True, 4

    def __init__(self):
        super().__init__()
        self.qkv = linear(16, 32)

    def forward(self, x):
        k, v = self.qkv(x).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(k, k, v)


@from_library("timm")
class LinearNorm(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = linear(inputs, outputs)


@from_library("timm")
class LevitAttention(nn.Module):
    """Keys and values have widths of their own: query, key, value of each head in turn (LeViT, TinyViT)."""

    def __init__(self, wrapped):
        super().__init__()
        self.key_dim, self.val_dim, self.num_heads = 2, 5, 4
        self.qkv = LinearNorm(16, 36) if wrapped else linear(16, 36)

    def forward(self, x):
        layer = self.qkv.linear if isinstance(self.qkv, LinearNorm) else self.qkv
        q, k, v = layer(x).unflatten(-1, (4, 9)).transpose(1, 2).split([2, 2, 5], dim=-1)
        return (q @ k.mT) @ v


@from_library("torchtitan")
class FusedQKVLinear(nn.Module):
    """Each key head comes after the queries that share it."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.heads_per_kv = 4, 2
        self.wqkv = linear(16, 32)

    def forward(self, x):
        q, k, v = self.wqkv(x).unflatten(-1, (2, 4, 4)).tensor_split([2, 3], dim=-2)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@from_library("flux")
class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.norm = 4, nn.Identity()
        self.qkv, self.proj = linear(16, 48), linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(self.norm(q), self.norm(k), v)


@from_library("diffusers")
class FusedAttention(nn.Module):
    """After `fuse_projections`."""

    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_kv = linear(16, 48), linear(16, 32)

    def forward(self, x):
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        other_k, other_v = self.to_kv(x).chunk(2, dim=-1)
        return q @ k.mT @ v + q @ other_k.mT @ other_v


class SingleStreamBlock(nn.Module):
    """Flux: queries, keys, values and the first layer of the MLP in one weight."""

    def __init__(self):
        super().__init__()
        self.hidden_size, self.mlp_hidden_dim = 16, 40
        self.linear1, self.linear2 = linear(16, 88), linear(56, 16)

    def forward(self, x):
        qkv, mlp = torch.split(self.linear1(x), [48, 40], dim=-1)
        q, k, v = qkv.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.linear2(torch.cat([attended, nn.functional.gelu(mlp)], dim=-1))


@from_library("timm")
class ParallelScalingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_split = [40, 16, 16, 16]
        self.in_proj = linear(16, 88)

    def forward(self, x):
        mlp, q, k, v = torch.split(self.in_proj(x), self.in_split, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v), mlp.sigmoid()


ATTENTIONS = [
    (Attention, (), "qkv"),
    (Attention, (True,), "qkv"),
    (WindowAttentionGlobal, (), "qkv"),
    (LevitAttention, (False,), "qkv"),
    (LevitAttention, (True,), "qkv.linear"),
    (FusedQKVLinear, (), "wqkv"),
    (SelfAttention, (), "qkv"),
    (FusedAttention, (), "to_qkv"),
    (FusedAttention, (), "to_kv"),
    (SingleStreamBlock, (), "linear1"),
    (ParallelScalingBlock, (), "in_proj"),
]


@pytest.mark.parametrize(("cls", "arguments", "fused"), ATTENTIONS, ids=[f"{c[0].__name__}-{c[2]}" for c in ATTENTIONS])
def test_rows_of_attention(cls, arguments, fused):
    assert_parts_are_what_is_consumed(cls(*arguments), fused, lambda owner: owner(hidden()))


def test_a_namesake_of_another_library_is_one_matrix_and_says_so():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv = 4, linear(16, 48)

    (decision, _) = assign(Attention()).values()
    assert (decision.view, decision.why) == (Matrix(), f"linear layer; by its name {PERHAPS_FUSED}")


class MLA(nn.Module):
    """Latent attention with the names of DeepSeek's own code and torchtitan."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 4, 10, 3, 2, 5
        self.wq, self.wkv_a, self.wkv_b = linear(16, 20), linear(16, 12), linear(10, 32)
        self.kv_norm = nn.Identity()

    def forward(self, x):
        q = self.wq(x).unflatten(-1, (4, 5)).transpose(1, 2)
        latent, rotary = self.wkv_a(x).split([10, 2], dim=-1)
        k, v = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (4, 8)).transpose(1, 2).split([3, 5], dim=-1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, 4, -1, -1)], dim=-1)
        return q @ k.mT @ v


def test_rows_of_latent_attention():
    owner = MLA()
    assert_parts_are_what_is_consumed(owner, "wkv_a", lambda o: o(hidden()), silence=["wkv_b"], watch=["kv_norm"])
    assert_parts_are_what_is_consumed(owner, "wkv_b", lambda o: o(hidden()), silence=["wkv_a"])
    assert view_of(owner, "wq.weight") == Matrix()


# ---------------------------------------------------------------------------------------------------------- gates


@from_library("timm")
class GluMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = linear(12, 10), linear(5, 12)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(gate) * up)


class SwiGLUFFN(nn.Module):
    """DINOv2."""

    def __init__(self):
        super().__init__()
        self.w12, self.w3 = linear(12, 10), linear(5, 12)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(nn.functional.silu(gate) * up)


@from_library("diffusers")
class GEGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = linear(12, 10)

    def forward(self, x):
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * nn.functional.silu(gate)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([GEGLU(), nn.Identity(), linear(5, 12)])

    def forward(self, x):
        for layer in self.net:
            x = layer(x)
        return x


class GraniteMoeSharedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_linear, self.output_linear = linear(12, 10), linear(5, 12)

    def forward(self, x):
        gate, up = self.input_linear(x).chunk(2, dim=-1)
        return self.output_linear(nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("cls", "fused", "out"),
    [
        (GluMlp, "fc1", "fc2"),
        (SwiGLUFFN, "w12", "w3"),
        (FeedForward, "net.0.proj", "net.2"),
        (GraniteMoeSharedMLP, "input_linear", "output_linear"),
    ],
)
def test_rows_of_gated_mlps(cls, fused, out):
    owner = cls()
    caught = []
    owner.get_submodule(out).register_forward_pre_hook(lambda m, a: caught.append(a[0]))

    def gated(values):
        hook = owner.get_submodule(fused).register_forward_hook(lambda m, a, o: values)
        owner(torch.zeros(10, 12, dtype=torch.float64))
        hook.remove()
        return caught.pop().detach()

    parts = [sorted(int(row) - 101 for row in part) for part in rows_of(view_of(owner, f"{fused}.weight"), 10)]
    assert sorted(parts) == sorted(gate_and_up(gated, 10))


class GptOssGroupedExperts(nn.Module):
    """torchtitan: gate and up of stacked experts alternate."""

    def __init__(self):
        super().__init__()
        self.mlp1_weight_EGD = nn.Parameter(torch.zeros(1, 10, 12, dtype=torch.float64))
        self.mlp2_weight_EDF = nn.Parameter(torch.zeros(1, 12, 5, dtype=torch.float64))

    def forward(self, rows):
        gate, up = rows[..., ::2], rows[..., 1::2]
        return nn.functional.silu(gate) * up


def test_rows_of_stacked_experts():
    owner = GptOssGroupedExperts()
    view = view_of(owner, "mlp1_weight_EGD")
    numbered = torch.arange(10)[None, :, None].expand(1, 10, 12)
    parts = [sorted(batch[0].unique().tolist()) for batch in view.batches(numbered)]
    assert parts == list(gate_and_up(owner, 10))
    assert view.shapes(owner.mlp1_weight_EGD.shape) == ((1, 5, 12), (1, 5, 12))
    assert view_of(owner, "mlp2_weight_EDF") == Experts()


# ------------------------------------------------------------------------------------------------------- modulation


class DiTBlock(nn.Module):
    def __init__(self, width=8, conditions=8):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = linear(width, width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(conditions, 6 * width))

    def forward(self, c):
        return self.adaLN_modulation(c).chunk(6, dim=1)


class FinalLayer(nn.Module):
    def __init__(self, width=8, conditions=8):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False)
        self.linear = linear(width, 12)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(conditions, 2 * width))

    def forward(self, c):
        return self.adaLN_modulation(c).chunk(2, dim=1)


class Modulation(nn.Module):
    """Flux."""

    def __init__(self, double):
        super().__init__()
        self.is_double, self.multiplier = double, 6 if double else 3
        self.lin = linear(8, 8 * self.multiplier)

    def forward(self, c):
        return self.lin(nn.functional.silu(c)).chunk(self.multiplier, dim=-1)


def adaptive_norm(name, count):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear(8, 8 * count)

        def forward(self, c):
            return self.linear(nn.functional.silu(c)).chunk(count, dim=1)

    Norm.__name__ = name
    return from_library("diffusers")(Norm)()


MODULATIONS = [
    (DiTBlock(), "adaLN_modulation.1"),
    (DiTBlock(conditions=2), "adaLN_modulation.1"),  # as wide as a divisor of the rows
    (FinalLayer(), "adaLN_modulation.1"),
    (Modulation(True), "lin"),
    (Modulation(False), "lin"),
    (adaptive_norm("AdaLayerNorm", 2), "linear"),
    (adaptive_norm("AdaLayerNormContinuous", 2), "linear"),
    (adaptive_norm("AdaGroupNorm", 2), "linear"),
    (adaptive_norm("AdaLayerNormZeroSingle", 3), "linear"),
    (adaptive_norm("LuminaRMSNormZero", 4), "linear"),
    (adaptive_norm("AdaLayerNormZero", 6), "linear"),
    (adaptive_norm("AdaLayerNormSingle", 6), "linear"),
    (adaptive_norm("SD35AdaLayerNormZeroX", 9), "linear"),
    (adaptive_norm("CogView3PlusAdaLayerNormZeroTextImage", 12), "linear"),
]


@pytest.mark.parametrize(("owner", "fused"), MODULATIONS, ids=[type(case[0]).__name__ for case in MODULATIONS])
def test_rows_of_modulations(owner, fused):
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
    model = nn.Module()
    model.blocks = nn.ModuleList([DiTBlock()])
    model.final_layer = FinalLayer()
    reasons = {d.name: (d.algorithm, d.why) for d in assign(model).values()}
    assert reasons["final_layer.linear.weight"] == ("adamw", "output head (the last layer of final_layer)")
    assert reasons["final_layer.adaLN_modulation.1.weight"][0] == "muon"
    assert {d.view for d in assign(model).values() if "adaLN" in d.name and d.algorithm == "muon"} == {
        Split((8,) * 6),
        Split((8, 8)),
    }
