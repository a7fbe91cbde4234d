"""Classification of parameters that neither rules nor the registry cover."""

import pytest
import torch
from optional_libraries import load, quietly
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import quintic
from quintic import Flatten, Matrix, Muon, Rule, Split
from quintic.grouping.assign import assign
from quintic.grouping.doubts import PERHAPS_FUSED


def tree(**children):
    """A module with these children."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def classified(model, **options):
    return {d.name: (d.algorithm, d.view, d.why) for d in assign(model, **options).values()}


def whys(model, **options):
    return {name: why for name, (_, _, why) in classified(model, **options).items()}


MATRIX = ("muon", Matrix(), "linear layer")

# ---------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [
        ("gate", "up", "down"),
        ("w_gate", "w_up", "w_down"),
        ("c_gate", "c_fc", "c_proj"),
        ("proj_up_gate", "proj_up", "proj_down"),
        ("fc_gate", "fc1", "fc2"),
    ],
)
@pytest.mark.parametrize("hidden", [24, 4])
def test_the_gate_of_a_gated_mlp_is_a_matrix(gate, up, down, hidden):
    layers = {gate: nn.Linear(8, hidden), up: nn.Linear(8, hidden), down: nn.Linear(hidden, 8)}
    assert {name: what for name, what in classified(tree(**layers)).items() if name.endswith("weight")} == {
        f"{name}.weight": MATRIX for name in layers
    }


def test_a_gate_as_wide_as_what_it_multiplies_is_a_matrix():
    attention = tree(q_proj=nn.Linear(8, 16), o_gate=nn.Linear(8, 16), o_proj=nn.Linear(16, 8))
    assert classified(attention)["o_gate.weight"] == MATRIX
    # The consumer may be elsewhere: a twin is enough where it is wide.
    assert classified(tree(proj=nn.Linear(8, 16), gate=nn.Linear(8, 16)))["gate.weight"] == MATRIX


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [
        (tree(gate=nn.Linear(8, 4), experts=nn.ModuleList([nn.Linear(8, 8)])), "gate", "gate or router (by its name)"),
        (tree(w_gate=nn.Linear(8, 4), w_noise=nn.Linear(8, 4)), "w_gate", "gate or router (by its name)"),
        (tree(q_proj=nn.Linear(8, 8), head_gate=nn.Linear(8, 2), o_proj=nn.Linear(8, 8)), "head_gate",
         "gate or router (by its name)"),
        (tree(shared_gate=nn.Linear(8, 1), up=nn.Linear(8, 1)), "shared_gate", "one output or one input"),
        (tree(router=tree(proj=nn.Linear(8, 4))), "router.proj", "router"),
    ],
)  # fmt: skip
def test_what_chooses_or_weighs_is_no_matrix(model, name, why):
    assert classified(model)[f"{name}.weight"] == ("adamw", Matrix(), why)


# ----------------------------------------------------------------------------------------------------- recurrent layers


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_gates_of_recurrent_layers_are_matrices_of_their_own(kind, gates):
    options = {"proj_size": 3} if kind is nn.LSTM else {}
    model = tree(rnn=kind(8, 6, num_layers=2, bidirectional=True, **options), fc=nn.Linear(12, 5))
    view = Split((6,) * gates) if gates > 1 else Matrix()
    treatment = {name: what for name, what in classified(model).items() if what[0] == "muon"}
    weights = [name for name, p in model.named_parameters() if name.startswith("rnn") and p.ndim == 2]
    assert list(treatment) == weights
    for name, (_, chosen, why) in treatment.items():
        is_projection = "weight_hr" in name
        assert chosen == (Matrix() if is_projection else view)
        assert why == ("recurrent layer" if is_projection or gates == 1 else "recurrent layer, one matrix per gate")


def test_the_gates_are_those_of_the_forward_pass():
    lstm, x = nn.LSTMCell(8, 6, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    h, c = torch.randn(2, 3, 6, dtype=torch.float64)
    views = {d.name: d.view for d in assign(tree(cell=lstm)).values()}
    inputs, states = (views[f"cell.weight_{kind}"].batches(getattr(lstm, f"weight_{kind}")) for kind in ("ih", "hh"))
    bias = (lstm.bias_ih + lstm.bias_hh).chunk(4)
    i, f, g, o = (x @ a[0].T + h @ b[0].T + d for a, b, d in zip(inputs, states, bias, strict=True))
    after = f.sigmoid() * c + i.sigmoid() * g.tanh()
    torch.testing.assert_close(lstm(x, (h, c)), (o.sigmoid() * after.tanh(), after))
    gru = nn.GRUCell(8, 6, dtype=torch.float64)
    views = {d.name: d.view for d in assign(tree(cell=gru)).values()}
    inputs, states = (views[f"cell.weight_{kind}"].batches(getattr(gru, f"weight_{kind}")) for kind in ("ih", "hh"))
    mine = [x @ a[0].T + d for a, d in zip(inputs, gru.bias_ih.chunk(3), strict=True)]
    past = [h @ a[0].T + d for a, d in zip(states, gru.bias_hh.chunk(3), strict=True)]
    reset, update = (mine[0] + past[0]).sigmoid(), (mine[1] + past[1]).sigmoid()
    new = (mine[2] + reset * past[2]).tanh()
    torch.testing.assert_close(gru(x, h), (1 - update) * new + update * h)


def test_a_recurrent_layer_of_one_number_is_no_matrix():
    reasons = whys(tree(rnn=nn.LSTM(1, 6)))
    assert reasons["rnn.weight_ih_l0"] == "one output or one input"
    assert reasons["rnn.weight_hh_l0"] == "recurrent layer, one matrix per gate"


# ----------------------------------------------------------------------------------------------------- parametrizations


def weight_normed(layer, **options):
    return parametrizations.weight_norm(layer, **options)


def old_weight_normed(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    ("normed", "stored", "beside"),
    [
        (weight_normed, "parametrizations.weight.original1", "parametrizations.weight.original0"),
        (parametrizations.spectral_norm, "parametrizations.weight.original", None),
        (old_weight_normed, "weight_v", "weight_g"),
        (nn.utils.spectral_norm, "weight_orig", None),
    ],
)
def test_a_weight_that_is_only_scaled_is_treated_as_the_weight(normed, stored, beside):
    attention = type("MptAttention", (nn.Module,), {})()
    attention.Wqkv = normed(nn.Linear(8, 24, bias=False))
    model = tree(
        up=normed(nn.Linear(8, 16)), attention=attention, gate=normed(nn.Linear(8, 4)), lm_head=normed(nn.Linear(8, 9)),
        conv=normed(nn.Conv2d(8, 8, 3)), table=nn.Embedding(7, 8), norm=nn.LayerNorm(8),
    )  # fmt: skip
    treatment = classified(model, convolutions="muon")
    assert treatment[f"up.{stored}"] == MATRIX
    assert treatment[f"attention.Wqkv.{stored}"] == ("muon", Split((8, 8, 8)), "fused queries, keys, values")
    assert treatment[f"gate.{stored}"][2] == "gate or router (by its name)"
    assert treatment[f"lm_head.{stored}"][2] == "output head (by its name)"
    assert treatment[f"conv.{stored}"] == ("muon", Flatten(), "convolution")
    if beside is not None:
        assert treatment[f"up.{beside}"] == ("adamw", Matrix(), "1-D, stored with 2 dimensions")
        assert treatment[f"conv.{beside}"][0] == "adamw"


def test_other_parametrizations_store_no_weight():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    model = tree(a=parametrizations.orthogonal(nn.Linear(8, 8)), b=nn.Linear(8, 8))
    register_parametrization(model.b, "weight", Symmetric())
    treatment = classified(model)
    assert {what[:2] for name, what in treatment.items() if "original" in name} == {("adamw", Matrix())}
    assert treatment["b.parametrizations.weight.original"][2].startswith("parametrization")
    # A rule decides otherwise.
    rules = [Rule("b.*original", "muon")]
    assert classified(model, rules=rules)["b.parametrizations.weight.original"][0] == "muon"


def test_weight_normed_layers_train():
    model = nn.Sequential(weight_normed(nn.Linear(8, 16)), nn.ReLU(), weight_normed(nn.Linear(16, 8)))
    optimizer = Muon(quintic.param_groups(model), lr=0.05)
    x = torch.randn(32, 8)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# ------------------------------------------------------------------------------- parameters that no layer computes with


class Holder(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("owner", "why"),
    [
        (Holder(A_log=(16, 4)), "factors, entry by entry"),
        (Holder(A_log=(2, 16, 4)), "factors, entry by entry"),
        (Holder(alpha=(4, 8)), "factors, entry by entry"),
        (Holder(codevectors=(1, 20, 8)), "embedding (by its name)"),
        (tree(pos_embed=Holder(height_rel=(7, 4))), "embedding (by its name)"),
    ],
    ids=["A_log", "A_log of several", "alpha", "codevectors", "in a module of positions"],
)
def test_parameters_that_need_no_decision(owner, why):
    assert list(whys(tree(owner=owner)).values()) == [why]


@pytest.mark.parametrize(
    ("model", "config"),
    [("MambaForCausalLM", "MambaConfig"), ("FalconMambaForCausalLM", "FalconMambaConfig")],
)
def test_mamba_needs_no_decision(model, config):
    from model_families import transformers_class

    config = transformers_class(config)(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)
    treatment = classified(transformers_class(model)(config))
    assert {what[0] for name, what in treatment.items() if name.endswith("A_log")} == {"adamw"}


def test_wav2vec2_needs_no_decision():
    from model_families import transformers_class

    config = transformers_class("Wav2Vec2Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(2, 2), conv_kernel=(3, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_codevectors_per_group=6, codevector_dim=8, proj_codevector_dim=8,
    )  # fmt: skip
    treatment = classified(transformers_class("Wav2Vec2ForPreTraining")(config), convolutions="muon")
    assert treatment["quantizer.codevectors"][0] == "adamw"
    assert treatment["wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1"][1] == Flatten(groups=2)


# ------------------------------------------------------------------------------------------------------------- adapters


class BaseTunerLayer:
    """PEFT's name for a layer with adapters."""


class Adapted(nn.Module, BaseTunerLayer):
    def __init__(self, base, **factors):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        for name, factor in factors.items():
            is_layer = isinstance(factor, nn.Module)
            setattr(self, name, (nn.ModuleDict if is_layer else nn.ParameterDict)({"default": factor}))


def matrix(*shape):
    return nn.Parameter(torch.zeros(shape))


def test_factors_of_adapters():
    model = tree(
        lora=Adapted(nn.Linear(8, 8), lora_A=nn.Linear(8, 2, bias=False), lora_B=nn.Linear(2, 8, bias=False)),
        adalora=Adapted(nn.Linear(8, 8), lora_A=matrix(2, 8), lora_B=matrix(8, 2), lora_E=matrix(2, 1)),
        loha=Adapted(nn.Linear(8, 8), hada_w1_a=matrix(8, 2), hada_w1_b=matrix(2, 8)),
        lokr=Adapted(nn.Linear(8, 8), lokr_w1=matrix(4, 4), lokr_w2=matrix(2, 2)),
        tokens=Adapted(nn.Embedding(9, 8), lora_embedding_A=matrix(2, 9), lora_embedding_B=matrix(8, 2)),
        lm_head=Adapted(nn.Linear(8, 9), lora_A=nn.Linear(8, 2, bias=False), lora_B=nn.Linear(2, 9, bias=False)),
        qkv=Adapted(nn.Linear(8, 24), lora_A=nn.Linear(8, 2, bias=False), lora_B=nn.Linear(2, 24, bias=False)),
    )
    assert classified(model) == {
        "lora.lora_A.default.weight": MATRIX,
        "lora.lora_B.default.weight": MATRIX,
        "adalora.lora_A.default": ("muon", Matrix(), "factor of an adapter"),
        "adalora.lora_B.default": ("muon", Matrix(), "factor of an adapter"),
        "adalora.lora_E.default": ("adamw", Matrix(), "1-D, stored with 2 dimensions"),
        **{f"loha.hada_w1_{x}.default": ("adamw", Matrix(), "adapter") for x in "ab"},
        **{f"lokr.lokr_w{i}.default": ("adamw", Matrix(), "adapter") for i in (1, 2)},
        **{f"tokens.lora_embedding_{x}.default": ("adamw", Matrix(), "adapter") for x in "AB"},
        **{
            f"lm_head.lora_{x}.default.weight": ("adamw", Matrix(), "adapter of an output head (by its name)")
            for x in "AB"
        },
        "qkv.lora_A.default.weight": MATRIX,
        "qkv.lora_B.default.weight": ("muon", Matrix(), f"linear layer; by its name {PERHAPS_FUSED}"),
    }


def test_the_outputs_of_an_adapter_are_divided_as_those_of_its_layer():
    attention = type("MptAttention", (nn.Module,), {})()
    attention.Wqkv = Adapted(nn.Linear(8, 24), lora_A=nn.Linear(8, 2, bias=False), lora_B=nn.Linear(2, 24, bias=False))
    assert {name: what[1] for name, what in classified(tree(attn=attention)).items()} == {
        "attn.Wqkv.lora_A.default.weight": Matrix(),
        "attn.Wqkv.lora_B.default.weight": Split((8, 8, 8)),
    }


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "LoKrConfig", "AdaLoraConfig", "IA3Config", "OFTConfig"])
def test_adapters_of_peft_need_no_decision(kind):
    peft, transformers = load("peft"), load("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    options = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]} if kind == "LoraConfig" else {
        "target_modules": ["q_proj", "up_proj"]
    }  # fmt: skip
    options |= {"feedforward_modules": ["up_proj"]} if kind == "IA3Config" else {}
    options |= {"total_step": 10} if kind == "AdaLoraConfig" else {}
    options |= {"oft_block_size": 4, "r": 0} if kind == "OFTConfig" else {}
    model = quietly(peft.get_peft_model, transformers.LlamaForCausalLM(config), getattr(peft, kind)(**options))
    treatment = classified(model)
    muon = {name for name, what in treatment.items() if what[0] == "muon"}
    expected = {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ("lora_A" in name or "lora_B" in name) and "lm_head" not in name
    }
    assert muon == expected
    assert all("embedding" not in name for name in muon)


# ------------------------------------------------------------------------------------------------------------- warnings


def test_several_matrices_in_one_are_warned_of_once():
    layers = nn.ModuleList(
        tree(qkv=nn.Linear(8, 24), mlp=tree(fc1=nn.Linear(8, 20), fc2=nn.Linear(10, 8))) for _ in range(3)
    )
    model = tree(layers=layers)
    with pytest.warns(
        UserWarning, match=r"layers\.\*\.qkv\.weight, layers\.\*\.mlp\.fc1\.weight; .*Rule\('layers\.\*"
    ) as caught:
        quintic.param_groups(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert whys(model)["layers.0.mlp.fc1.weight"] == f"linear layer; by its shape {PERHAPS_FUSED}"
    rules = [Rule("*.qkv.weight", "muon", Split((8, 8, 8))), Rule("*.fc1.weight", "muon")]
    quintic.param_groups(model, rules=rules)  # no warning
    assert "6 parameters may be several matrices" in str(quintic.explain(model))


@pytest.mark.parametrize("name", ["kv_proj", "to_kv", "Wkv", "gate_up_proj", "w12", "w13"])
def test_two_matrices_of_a_square_each_are_recognised_by_their_name_only(name):
    """Twice as many outputs as inputs, of which the next layer takes half: an MLP may look like that, too."""
    known = nn.ModuleDict({name: nn.Linear(8, 16), "back": nn.Linear(8, 8)})
    assert whys(known)[f"{name}.weight"] == f"linear layer; by its name {PERHAPS_FUSED}"
    assert PERHAPS_FUSED not in whys(tree(wide=nn.Linear(8, 16), back=nn.Linear(8, 8)))["wide.weight"]


def test_attention_is_recognised_by_its_shape_whatever_its_layers_are_called():
    perhaps = f"linear layer; by its shape {PERHAPS_FUSED}"
    with pytest.warns(UserWarning, match=r"perhaps several matrices each.*: mix\.fused\.weight; "):
        quintic.param_groups(tree(mix=tree(fused=nn.Linear(8, 24), back=nn.Linear(8, 8))))
    assert whys(tree(fused=nn.Linear(8, 24), back=nn.Linear(8, 8)))["fused.weight"] == perhaps
    for plain in (
        tree(wide=nn.Linear(8, 24), narrow=nn.Linear(24, 8)),  # an MLP
        tree(back=nn.Linear(8, 8), last=nn.Linear(8, 24)),  # nothing takes the outputs apart
        tree(wide=nn.Linear(8, 24), other=nn.Linear(8, 6)),  # the other is not square
        tree(wide=nn.Linear(8, 24), other=nn.Linear(16, 16)),
        tree(wide=nn.Linear(8, 32), other=nn.Linear(8, 8)),
        tree(wide=nn.Linear(8, 24), other=nn.Linear(8, 8), third=nn.Linear(8, 8)),
    ):
        assert not any(PERHAPS_FUSED in why for why in whys(plain).values())


@pytest.mark.parametrize(
    "model",
    [
        tree(qkv_proj=nn.Linear(8, 16), next=nn.Linear(16, 8)),  # taken whole
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)),
        tree(out=nn.Linear(10, 8), fc1=nn.Linear(8, 20)),  # what takes half of it comes before
        tree(wide=nn.Linear(8, 16), same=nn.Linear(8, 8)),
        tree(k_proj=nn.Linear(8, 4), v_proj=nn.Linear(8, 12), o_proj=nn.Linear(6, 8)),
    ],
)
def test_layers_that_look_like_one_matrix_are_not_taken_for_several(model):
    assert not any(PERHAPS_FUSED in why for why in whys(model).values())


def test_a_model_whose_weights_are_1d_pieces_is_warned_of():
    model = tree(up=nn.Linear(8, 16), down=nn.Linear(16, 8), norm=nn.LayerNorm(8))
    for layer in (model.up, model.down):
        layer.weight = nn.Parameter(layer.weight.detach().flatten())
    with pytest.warns(UserWarning, match=r"Muon gets no matrix of this Module: .*1-D pieces, as FSDP1.*fully_shard"):
        quintic.param_groups(model)


def test_a_model_of_which_only_heads_are_trained_is_warned_of():
    model = tree(layers=nn.ModuleList([nn.Linear(8, 8)]).requires_grad_(False), score=nn.Linear(8, 4))
    with pytest.warns(UserWarning, match=r"no matrix .*: score\.weight \(output head \(by its name\)\); quintic\.Rule"):
        quintic.param_groups(model)


def test_a_model_of_which_no_layer_is_trained_is_warned_of():
    model = tree(up=nn.Linear(8, 8).requires_grad_(False), norm=nn.LayerNorm(8))
    with pytest.warns(UserWarning, match="none of its linear layers is trained; make the groups after"):
        quintic.param_groups(model)


def test_nothing_is_warned_of_where_nothing_else_was_to_be_expected():
    quintic.param_groups(tree(norm=nn.LayerNorm(8), table=nn.Embedding(5, 8)))
    model = tree(up=nn.Linear(8, 8))
    quintic.param_groups(model, rules=[Rule("*", "adamw")])
    quintic.param_groups(model, rules=[Rule("up.weight", "adamw")])


def test_experts_stored_as_inputs_by_outputs_are_warned_of():
    """The router says how many inputs there are; up to then the weights could lie either way."""
    experts = tree(gate_up_proj=nn.Parameter(torch.zeros(4, 8, 32)), down_proj=nn.Parameter(torch.zeros(4, 16, 8)))
    model = tree(router=nn.Linear(8, 4), experts=experts)
    with pytest.warns(UserWarning, match=r"perhaps stored as \(experts, in, out\).*experts\.gate_up_proj"):
        quintic.param_groups(model)
