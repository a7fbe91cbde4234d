"""Finding queries and keys: by name, by number, in real models, and what is said when they cannot be found."""

import pytest
import torch
from attention_shapes import DIM, WIDTH, separate_qk
from torch import nn
from whole_clip import clip_

from quintic.kernels.attention.max_logits import MaxLogits
from quintic.optim.layout.views import Heads, Matrix, Split
from quintic.optim.qk_clip.clip import QKClip


def shapes(**parameters):
    """`a__b=(3, 4)` is a parameter "a.b" of that shape; "weight" is added to a name without a dot of its own."""
    return {name.replace("__", "."): torch.Size(shape) for name, shape in parameters.items()}


def latent(prefix="attn", query="q_b_proj", up="kv_b_proj", down="kv_a_proj_with_mqa", **changes):
    found = {
        f"{prefix}.{query}.weight": (2 * (6 + 4), 9),
        f"{prefix}.{down}.weight": (8 + 4, WIDTH),
        f"{prefix}.{up}.weight": (2 * (6 + 5), 8),
        **changes,
    }
    return {name: torch.Size(shape) for name, shape in found.items()}


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("q_proj", "k_proj"),
        ("query", "key"),
        ("wq", "wk"),
        ("to_q", "to_k"),
        ("q", "k"),
        ("Wq", "Wk"),
        ("c_q", "c_k"),
        ("q_lin", "k_lin"),
        ("linear_q", "linear_k"),
        ("query_proj", "key_proj"),
    ],
)
def test_common_names(query, key):
    clip = QKClip().resolve("attn", separate_qk(query=query, key=key), 4)
    assert clip.names == (f"attn.{query}.weight", f"attn.{key}.weight")
    assert (clip.num_heads, clip.num_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("query", "up", "down"),
    [
        ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
        ("q_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
        ("wq_b", "wkv_b", "wkv_a"),
        ("wq", "wkv_b", "wkv_a"),
        ("linear_q_up_proj", "linear_kv_up_proj", "linear_kv_down_proj"),
    ],
)
def test_common_names_of_multi_latent_attention(query, up, down):
    clip = QKClip().resolve("attn", latent(query=query, up=up, down=down), 2)
    assert clip.names == (f"attn.{query}.weight", f"attn.{up}.weight")


def test_own_names():
    parameters = separate_qk(query="theta", key="phi")
    clip = QKClip(names={"theta": "q_proj", "phi": "k_proj"}).resolve("attn", parameters, 4)
    assert clip.names == ("attn.theta.weight", "attn.phi.weight")


@pytest.mark.parametrize("layer", ["model.layers.1.self_attn", "model.layers.1", 1])
@pytest.mark.parametrize("wrap", ["{}", "module.{}", "_orig_mod.{}", "model._fsdp_wrapped_module.{}"])
def test_a_layer_is_named_or_numbered_with_or_without_wrappers(layer, wrap):
    parameters = {}
    for i in (0, 1, 11):
        parameters |= separate_qk(f"model.layers.{i}.self_attn")
    stored = {
        wrap.format(name.removeprefix("model.") if "model." in wrap else name): s for name, s in parameters.items()
    }
    clip = QKClip().resolve(layer, stored, 4)
    assert [name.partition("layers.")[2] for name in clip.names] == [
        "1.self_attn.q_proj.weight",
        "1.self_attn.k_proj.weight",
    ]


def test_the_model_itself_may_be_the_attention():
    parameters = {name.removeprefix("attn."): shape for name, shape in separate_qk().items()}
    assert QKClip().resolve("", parameters, 4).names == ("q_proj.weight", "k_proj.weight")


def test_a_fused_weight_may_be_named_itself():
    parameters = {"attn.qkv.weight": torch.Size((24, WIDTH)), "attn.qkv.bias": torch.Size((24,))}
    clip = QKClip().resolve("attn.qkv", parameters, 2, {"attn.qkv.weight": Split((8, 8, 8))})
    assert clip.names == ("attn.qkv.weight", "attn.qkv.bias")


def test_bare_parameters():
    parameters = shapes(attn__wq=(16, WIDTH), attn__wk=(8, WIDTH))
    assert QKClip().resolve("attn", parameters, 4).names == ("attn.wq", "attn.wk")


def test_an_attention_inside_the_attention_is_not_meant():
    """DeepSeek-V3.2's indexer has its own projections and norms below self_attn."""
    parameters = latent() | {
        "attn.indexer.wq_b.weight": torch.Size((8, 9)),
        "attn.indexer.wk.weight": torch.Size((4, WIDTH)),
        "attn.indexer.k_norm.weight": torch.Size((4,)),
    }
    assert QKClip().resolve("attn", parameters, 2).names == ("attn.q_b_proj.weight", "attn.kv_b_proj.weight")


# -- layouts -----------------------------------------------------------------------------------------------------------


def factors(clip, largest):
    return {name: found.factor.tolist() for name, found in clip.factors(torch.tensor(largest)).items()}


def test_the_view_of_a_single_projection_only_says_how_it_is_stored():
    parameters = {"attn.q_proj.weight": torch.Size((WIDTH, 8)), "attn.k_proj.weight": torch.Size((8, WIDTH))}
    views = {"attn.q_proj.weight": Matrix(transposed=True), "attn.k_proj.weight": Split((4, 4))}
    found = QKClip().resolve("attn", parameters, 2, views).factors(torch.tensor([400.0, 1.0]))
    assert [found[name].dim for name in parameters] == [1, 0]
    assert all(f.factor.tolist() == [0.5] * 4 + [1.0] * 4 for f in found.values())
    views["attn.q_proj.weight"] = Heads(2, transposed=True)
    assert QKClip().resolve("attn", parameters, 2, views).factors(torch.ones(2))["attn.q_proj.weight"].dim == 1


def test_heads_of_a_split_do_not_matter():
    parameters = {"attn.qkv.weight": torch.Size((24, WIDTH))}
    plain, per_head = (
        QKClip().resolve("attn", parameters, 2, {"attn.qkv.weight": view})
        for view in (Split((8, 8, 8)), Split((8, 8, 8), heads=(2, 2, 1)))
    )
    assert plain == per_head


def test_layouts_come_before_views_and_are_not_seen_by_muon():
    parameters = {"blocks.0.attn.qkv.weight": torch.Size((24, WIDTH))}
    clip = QKClip(layouts={"blocks.*.qkv.weight": Split((4, 4, 4), groups=2)})
    found = clip.resolve(0, parameters, 2, {"blocks.0.attn.qkv.weight": Matrix()})
    assert factors(found, [400.0, 1.0]) == {"blocks.0.attn.qkv.weight": [0.5] * 8 + [1.0] * 16}


def test_a_gate_in_a_fused_weight():
    parameters = {"attn.qkv.weight": torch.Size((2 * (8 + 8 + 4 + 4), WIDTH))}
    views = {"attn.qkv.weight": Split((8, 8, 4, 4), groups=2)}
    found = QKClip(parts=(0, 2)).resolve("attn", parameters, 4, views)
    rows = [0.5] * 4 + [2.0] * 4 + [1.0] * 8 + [0.5] * 4 + [1.0] * 4
    assert factors(found, [400.0, 1.0, 1.0, 1.0])["attn.qkv.weight"] == rows + [1.0] * 24
    with pytest.raises(ValueError, match=r"4 parts; say with quintic.QKClip\(parts=\(i, j\)\)"):
        QKClip().resolve("attn", parameters, 4, views)


def test_a_gate_in_the_query_projection():
    """Per head, queries then gate, as in Qwen3-Next."""
    parameters = {"attn.q_proj.weight": torch.Size((4 * 8, WIDTH)), "attn.k_proj.weight": torch.Size((8, WIDTH))}
    clip = QKClip(layouts={"*.q_proj.weight": Split((4, 4), groups=4)}).resolve("attn", parameters, 4)
    found = factors(clip, [400.0, 1.0, 1.0, 1.0])
    assert found["attn.q_proj.weight"] == [0.5] * 4 + [1.0] * 4 + [2.0] * 4 + [1.0] * 20
    assert found["attn.k_proj.weight"] == [0.5] * 4 + [1.0] * 4


def test_fused_keys_and_values():
    parameters = {"attn.to_q.weight": torch.Size((8, WIDTH)), "attn.to_kv.weight": torch.Size((16, WIDTH))}
    clip = QKClip().resolve("attn", parameters, 2, {"attn.to_kv.weight": Split((4, 4), groups=2)})
    found = factors(clip, [400.0, 1.0])
    assert found["attn.to_q.weight"] == [0.5] * 4 + [1.0] * 4
    assert found["attn.to_kv.weight"] == [0.5] * 4 + [1.0] * 12


def test_rotary_channels_can_be_given():
    parameters = latent()
    del parameters["attn.kv_a_proj_with_mqa.weight"]
    with pytest.raises(ValueError, match=r"attn.kv_b_proj.weight makes keys from a latent.*rope_dim=\.\.\."):
        QKClip().resolve("attn", parameters, 2)
    assert QKClip(rope_dim=4).resolve("attn", parameters, 2) == QKClip().resolve("attn", latent(), 2)


def test_latent_attention_without_rotary_channels_is_multi_head():
    parameters = latent(**{"attn.kv_a_proj_with_mqa.weight": (8, WIDTH)})
    found = factors(QKClip().resolve("attn", parameters, 2), [400.0, 1.0])
    assert found["attn.q_b_proj.weight"] == [0.5] * 10 + [1.0] * 10
    assert found["attn.kv_b_proj.weight"] == [0.5] * 10 + [1.0] * 12


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "parameters", "num_heads", "message"),
    [
        (
            "layers.7",
            separate_qk("layers.0.attn"),
            4,
            r"qk_logits\['layers.7'\]: no parameter.*close.*'layers.0.attn'",
        ),
        (
            7,
            separate_qk("layers.0.attn"),
            4,
            r"qk_logits\[7\]: 0 attention modules have this number.*'layers.0.attn'",
        ),
        (
            0,
            separate_qk("a.0.attn") | separate_qk("b.0.attn"),
            4,
            "2 attention modules.*'a.0.attn', 'b.0.attn'",
        ),
        (
            "x",
            separate_qk("x.self") | separate_qk("x.cross"),
            4,
            "it has 'x.self.q_proj.weight', 'x.cross.q_proj.weight'",
        ),
        (1.5, separate_qk(), 4, "a layer is the name"),
        (True, separate_qk(), 4, "a layer is the name"),
        ("mlp", {"mlp.up.weight": torch.Size((4, 4))}, 4, "needed below it, found none.*names="),
        ("attn", {"attn.q_proj.weight": torch.Size((8, 4))}, 2, "found 'attn.q_proj.weight'"),
        ("attn", separate_qk(), 3, "16 features of attn.q_proj.weight do not divide into 3 heads"),
        ("attn", separate_qk(), 0, "do not divide into 0 heads"),
        ("attn", separate_qk(kv_heads=3), 4, "attn.k_proj.weight has 12 key features.*layouts"),
        ("attn", separate_qk(heads=2, kv_heads=4), 2, "attn.k_proj.weight has 16 key features"),
        ("attn", shapes(attn__q_proj__weight=(8, 4, 4), attn__k_proj__weight=(8, 4)), 2, r"shape \(8, 4, 4\)"),
        ("attn", {"attn.qkv.weight": torch.Size((24, 8))}, 2, r"Matrix\(transposed=False\) does not say.*Split\(sizes"),
        ("attn", latent(), 4, "22 features of attn.kv_b_proj.weight do not divide into 4 heads"),
        ("attn", latent(**{"attn.kv_a_proj_with_mqa.weight": (18, 4)}), 2, "10 features per head, 10 of them rotary"),
    ],
)
def test_what_cannot_be_found_is_named(layer, parameters, num_heads, message):
    with pytest.raises(ValueError, match=message):
        QKClip().resolve(layer, parameters, num_heads)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (Split((8, 8)), "does not add up to its 24 output features"),
        (Split((24,)), "has 1 parts"),
        (Split((4,) * 6), "has 6 parts; say with"),
        (Split((2, 2, 2), groups=4), "groups of its Split do not divide the 2 query heads"),
        (Split((8, 6, 10)), "attn.qkv.weight has 6 key features"),
    ],
)
def test_a_split_that_does_not_fit_is_named(view, message):
    parameters = {"attn.qkv.weight": torch.Size((24, WIDTH))}
    with pytest.raises(ValueError, match=message):
        QKClip().resolve("attn", parameters, 2, {"attn.qkv.weight": view})


@pytest.mark.parametrize(
    "norm",
    [
        "q_norm",
        "k_norm",
        "q_layernorm",
        "k_layernorm",
        "query_norm",
        "key_norm",
        "query_layernorm",
        "q_layer_norm",
        "norm_q",
        "qk_norm",
        "norm.query_norm",
        "q_norm.0",
        "ln_q",
        "q_ln",
    ],
)
def test_norms_after_the_projections_are_refused(norm):
    for parameters in (separate_qk(), latent()):
        heads = 4 if "attn.q_proj.weight" in parameters else 2
        parameters[f"attn.{norm}.weight"] = torch.Size((DIM,))
        with pytest.raises(ValueError, match=rf"attn\.{norm}\.weight normalises.*leave this layer out of qk_logits"):
            QKClip().resolve("attn", parameters, heads)


@pytest.mark.parametrize("norm", ["q_a_layernorm", "kv_a_layernorm", "kv_norm", "q_norm", "attn_norm", "v_norm"])
def test_norms_before_the_up_projections_are_not_in_the_way(norm):
    size = 8 if norm.startswith("kv") else 9  # q_norm is what DeepSeek's own code calls the norm of compressed queries
    parameters = latent() | {f"attn.{norm}.weight": torch.Size((size,))}
    assert QKClip().resolve("attn", parameters, 2).names == ("attn.q_b_proj.weight", "attn.kv_b_proj.weight")


# -- real modules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("kdim", [None, 6])
def test_torch_multihead_attention(add_bias_kv, kdim):
    module = nn.MultiheadAttention(8, 2, add_bias_kv=add_bias_kv, kdim=kdim, dtype=torch.float64)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    x = torch.randn(5, 8, dtype=torch.float64)
    memory = x if kdim is None else torch.randn(5, kdim, dtype=torch.float64)

    def logits():
        if kdim is None:
            w_q, w_k, _ = module.in_proj_weight.chunk(3)
        else:
            w_q, w_k = module.q_proj_weight, module.k_proj_weight
        b_q, b_k, _ = module.in_proj_bias.chunk(3)
        q, k = x @ w_q.T + b_q, memory @ w_k.T + b_k
        if add_bias_kv:
            k = torch.cat([k, module.bias_k[0]])
        return torch.stack([a @ b.T / 2 for a, b in zip(q.split(4, 1), k.split(4, 1), strict=True)]).detach()

    params = dict(module.named_parameters())
    views = {"in_proj_weight": Split((8, 8, 8))}
    clip = QKClip(threshold=0.5).resolve("", {name: p.shape for name, p in params.items()}, 2, views)
    before = logits()
    largest = before.amax(dim=(1, 2))
    assert float(largest.min()) > 0.5
    clip_(clip, params, largest)
    torch.testing.assert_close(logits(), before * (0.5 / largest)[:, None, None], rtol=1e-6, atol=1e-9)


def transformers_models():
    common = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    latent = {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
    moe = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_attention_heads": 6, "num_key_value_heads": 6}
    llama = common | heads | {"head_dim": 4}
    gpt2 = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "n_embd": 24, "n_layer": 1, "n_head": 6}
    return {
        "llama": (llama, None),
        "qwen2": (common | heads, None),  # biases of queries and keys
        "gpt_neox": (common | {"num_attention_heads": 6}, Split((4, 4, 4), groups=6)),
        "gpt2": (gpt2, Split((24, 24, 24), transposed=True)),
        "phi3": (common | heads | {"pad_token_id": 0}, Split((24, 8, 8))),
        "gpt_bigcode": (gpt2 | {"multi_query": True}, Split((24, 4, 4))),
        "deepseek_v3": (common | moe | latent, None),
        "deepseek_v2": (common | moe | latent | {"q_lora_rank": None}, None),
    }


@pytest.fixture
def recorded_attention():
    """A transformers attention that records queries and keys instead of attending."""
    transformers = pytest.importorskip("transformers")
    recorder = MaxLogits()

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        recorder.record("layer", query.transpose(1, 2), key.transpose(1, 2), scale=scaling)
        return torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype).transpose(1, 2), None

    transformers.AttentionInterface.register("recorded", attend)
    return recorder


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", transformers_models())
def test_models_of_transformers(name, recorded_attention):
    """The first layer of a real model: its largest logits, clipped by number, are the threshold afterwards."""
    import transformers

    options, view = transformers_models()[name]
    config = transformers.AutoConfig.for_model(name, **options)
    config._attn_implementation = "recorded"
    model = transformers.AutoModel.from_config(config).double().eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for key, param in params.items():
            if not any(word in key for word in ("norm", "ln_")):
                param.normal_()
    tokens = torch.randint(32, (2, 9))

    def largest():
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        return recorded_attention.take()["layer"]

    views = dict.fromkeys(params, view) if view else {}
    before = largest()
    assert before.shape == (6,)
    threshold = float(before.median())
    clip = QKClip(threshold=threshold).resolve(0, {key: p.shape for key, p in params.items()}, 6, views)
    clip_(clip, params, before)
    torch.testing.assert_close(largest(), before.clamp(max=threshold), rtol=1e-5, atol=0)
    assert any(key.endswith("bias") for key in clip.names) == (name in ("qwen2", "gpt_neox", "gpt2", "gpt_bigcode"))


def test_models_of_transformers_with_norms_are_refused():
    transformers = pytest.importorskip("transformers")
    for name in ("qwen3", "olmo2"):
        config = transformers.AutoConfig.for_model(
            name, vocab_size=32, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2
        )
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
        parameters = {key: param.shape for key, param in model.named_parameters()}
        with pytest.raises(ValueError, match=r"layers.0.self_attn.q_norm.weight normalises"):
            QKClip().resolve(0, parameters, 6)


def test_two_fused_parts_are_not_guessed():
    """The key and value of cross-attention would be taken for query and key."""
    shapes = {"cross.c_attn.weight": torch.Size((16, 32))}
    views = {"cross.c_attn.weight": Split((16, 16), transposed=True)}
    with pytest.raises(ValueError, match="has 2 parts"):
        QKClip().resolve("cross", shapes, 4, views)
    clip = QKClip(layouts={"cross.*": Split((16, 16), transposed=True)}).resolve("cross", shapes, 4)
    assert clip.names == ("cross.c_attn.weight",)
