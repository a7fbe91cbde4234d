"""QK-clip of fused weights: the order of their parts is the model's own, told by what its scores depend on."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import quintic
from quintic import QKClip, Split

HEADS = 4


@contextlib.contextmanager
def recorded_scores():
    """What goes into each softmax: (batch, heads, queries, keys), or (batch x heads, queries, keys)."""
    scores, softmax = [], functional.softmax

    def recording(x, *args, **kwargs):
        if x.ndim > 2:  # routers have softmaxes of (tokens, experts)
            scores.append(x)
        return softmax(x, *args, **kwargs)

    functional.softmax = torch.nn.functional.softmax = recording
    try:
        yield scores
    finally:
        functional.softmax = torch.nn.functional.softmax = softmax


def logits_of(model, name, tokens):
    """(heads, entries): the part of one attention's scores that its weight makes, without masks and position biases."""

    def scores(changed):
        with recorded_scores() as found:
            torch.func.functional_call(model, changed, (tokens,))
        (one,) = found
        return one.double().reshape(-1, HEADS, *one.shape[-2:])

    params = dict(model.named_parameters())
    without = {key: torch.zeros_like(p) for key, p in params.items() if key in (name, bias_of(name))}
    whole, masks = scores({}), scores(without)
    visible = masks > torch.finfo(torch.float32).min / 4
    return torch.where(visible, whole - masks, 0).transpose(0, 1).flatten(1)


def bias_of(name):
    return name.removesuffix("weight") + "bias"


def check_clipped(model, name, layer, tokens):
    """Clip to half of the largest logit: every head ends there, and rows that no score depends on keep their bits."""
    weight = model.get_parameter(name)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if not any(word in key for word in ("norm", "ln_", "bias")):
                param.normal_(std=0.4)
    logits = logits_of(model, name, tokens)
    probe = torch.randn(logits.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((logits * probe).sum(), weight)
    outputs = 1 if weight.shape[0] < weight.shape[1] and "Conv1D" in str(model) else 0
    matters = gradient.abs().amax(1 - outputs) > 1e-9
    assert matters.any()
    assert not matters.all()
    before, largest = weight.detach().clone(), logits.detach().amax(1)
    threshold = 0.5 * float(largest.min())
    clip = QKClip(threshold=threshold)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.0, adamw_lr=0.0, qk_clip=clip)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(qk_logits={layer: largest})
    after = logits_of(model, name, tokens).detach().amax(1)
    torch.testing.assert_close(after, torch.full_like(after, threshold), rtol=1e-4, atol=0)
    is_same = (weight == before).all(1 - outputs)
    assert torch.equal(is_same, ~matters)


COMMON = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
PLAIN = COMMON | {"num_attention_heads": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": HEADS, "n_positions": 16}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
CODEGEN = GPT2 | {"n_ctx": 16, "rotary_dim": 4, "n_inner": 48}
MPT = {"vocab_size": 32, "d_model": 32, "n_layers": 1, "n_heads": HEADS, "max_seq_len": 16}
DBRX = {"vocab_size": 32, "d_model": 32, "n_layers": 1, "n_heads": HEADS, "max_seq_len": 16}
DBRX |= {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1e9, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
}

MODELS = {
    "codegen": ("codegen", CODEGEN, "qkv_proj"),
    "gpt_neox": ("gpt_neox", PLAIN, "query_key_value"),
    "bloom": ("bloom", {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": HEADS}, "query_key_value"),
    "falcon": ("falcon", PLAIN | {"multi_query": False, "alibi": False}, "query_key_value"),
    "falcon, one key head": ("falcon", PLAIN | {"multi_query": True, "alibi": False}, "query_key_value"),
    "falcon, grouped": (
        "falcon",
        PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        "query_key_value",
    ),
    "persimmon": ("persimmon", PLAIN | {"qk_layernorm": False}, "query_key_value"),
    "mpt": ("mpt", MPT, "Wqkv"),
    "phi3": ("phi3", PLAIN | {"num_key_value_heads": 2, "pad_token_id": 0}, "qkv_proj"),
    "gpt2": ("gpt2", GPT2, "c_attn"),
    "gpt_bigcode": ("gpt_bigcode", GPT2 | {"multi_query": False}, "c_attn"),
    "gpt_bigcode, one key head": ("gpt_bigcode", GPT2 | {"multi_query": True}, "c_attn"),
    "dbrx": ("dbrx", DBRX, "Wqkv"),
    "modernbert": ("modernbert", COMMON | {"num_attention_heads": HEADS, "pad_token_id": 0}, "Wqkv"),
}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", MODELS)
def test_fused_weights_of_transformers_are_clipped_in_their_own_order(name):
    transformers = pytest.importorskip("transformers")
    kind, options, projection = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).double().eval()
    (owner,) = [key for key, module in model.named_modules() if key.endswith(projection)]
    check_clipped(
        Outer(model), f"model.{owner}.weight", "model." + owner.rpartition(".")[0], torch.randint(1, 32, (2, 9))
    )


class Outer(nn.Module):
    """Calls a model of transformers without a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, **({} if "Bert" in type(self.model).__name__ else {"use_cache": False}))


class CodeGenAttention(nn.Module):
    """As in transformers: in each of four groups of heads query, value, key."""

    def __init__(self, heads=8, width=32):
        super().__init__()
        self.heads, self.qkv_proj = heads, nn.Linear(width, 3 * width, bias=False)

    def parts(self, x):
        parts = (x @ self.qkv_proj.weight.T).view(len(x), 4, -1).chunk(3, dim=-1)
        return [part.reshape(len(x), self.heads, -1) for part in parts]


def codegen_step(rules=(), **options):
    """The largest logits before and after a step, the values before and after, and the threshold."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": CodeGenAttention()})
    x = torch.randn(10, 32)

    def state():
        query, value, key = model["attn"].parts(x)
        return torch.einsum("ihd,jhd->hij", query, key).amax((1, 2)).detach(), value.detach().clone()

    (before, values), threshold = state(), 0.5
    clip = QKClip(threshold=threshold, **options)
    optimizer = quintic.Muon(quintic.param_groups(model, rules=rules), lr=0.0, qk_clip=clip)
    model["attn"].qkv_proj.weight.grad = torch.ones(96, 32)
    optimizer.step(qk_logits={"attn": before})
    after, values_after = state()
    return before, after, torch.equal(values, values_after), threshold


SAME = quintic.Split((8, 8, 8), groups=4)
PER_HEAD = quintic.Split((8, 8, 8), groups=4, heads=(8, 8, 4))


@pytest.mark.parametrize(
    "rule",
    [
        None,
        ("muon", None),
        ("muon", SAME),
        ("muon", PER_HEAD),
        ("muon", Split((8,) * 3, groups=4, names=("q", "v", "k"))),
    ],
)
@pytest.mark.parametrize("parts", [None, (0, 2)])
def test_the_order_of_the_registry_holds_under_rules_too(rule, parts):
    """A rule that divides a weight as the registry does keeps what its parts are called."""
    rules = [quintic.Rule("attn.qkv_proj.weight", *rule)] if rule else []
    if rule and rule[1] is not None and rule[1].names is not None:
        with pytest.raises(ValueError, match=r"qkv_proj.weight holds q, v, k, and QK-clip looks for query and key"):
            codegen_step(rules, parts=parts)
        return
    before, after, are_values_kept, threshold = codegen_step(rules, parts=parts)
    assert float(before.min()) > threshold
    torch.testing.assert_close(after, torch.full_like(after, threshold), rtol=1e-5, atol=0)
    assert are_values_kept


def test_an_order_given_by_name_needs_no_registry():
    shapes = {"attn.qkv.weight": torch.Size((96, 32))}
    named = Split((8, 8, 8), groups=4, names=("query", "value", "key"))
    plain = Split((8, 8, 8), groups=4)
    by_name = QKClip().resolve("attn", shapes, 8, {"attn.qkv.weight": named})
    by_layout = QKClip(layouts={"*": named}).resolve("attn", shapes, 8, {"attn.qkv.weight": plain})
    by_number = QKClip(parts=(0, 2)).resolve("attn", shapes, 8, {"attn.qkv.weight": plain})
    assert by_name == by_layout == by_number
    assert by_name.parameters[0].rows.segments == (("query", 8), ("none", 8), ("key", 8))


def test_parts_that_contradict_the_known_order_are_refused():
    with pytest.raises(ValueError, match=r"qk_logits\['attn'\].*qkv_proj.weight holds query, value, key in this order"):
        codegen_step(parts=(0, 1))


@pytest.mark.parametrize("view", [quintic.Matrix(), quintic.Heads(12), Split((24,) * 4)])
def test_a_view_that_does_not_say_the_order_is_refused(view):
    with pytest.raises(
        ValueError, match=r"qk_logits\['attn'\]: attn.qkv_proj.weight.*quintic.QKClip\((parts|layouts)="
    ):
        codegen_step([quintic.Rule("attn.qkv_proj.weight", "muon", view)])


@pytest.mark.parametrize("names", [("query", "key"), ("query", "query", "value"), "qkvo"])
def test_names_of_parts_are_checked(names):
    with pytest.raises(ValueError, match="one name for each part, with at most one 'query' and 'key'"):
        Split((8, 8, 8), names=names)


def test_names_are_no_difference_between_views_but_between_groups():
    first, second = Split((8, 8), names=("query", "key")), Split((8, 8), names=("key", "query"))
    assert first == second == Split((8, 8))
    assert len({first, second}) == 1
    assert str(first) == "Split(sizes=(8, 8), transposed=False, groups=1, heads=None)"  # as older states have it
    model = nn.ModuleDict({"a": nn.Linear(4, 16, bias=False), "b": nn.Linear(4, 16, bias=False)})
    groups = quintic.param_groups(
        model, rules=[quintic.Rule("a.weight", "muon", first), quintic.Rule("b.weight", "muon", second)]
    )
    assert [group["view"].names for group in groups] == [("query", "key"), ("key", "query")]


def test_attention_of_torch_is_clipped_in_its_own_order():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(32, HEADS, batch_first=True)
            self.embed = nn.Embedding(32, 32)

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.attn(x, x, x, need_weights=True)

    check_clipped(Model().double(), "attn.in_proj_weight", "attn", torch.randint(32, (2, 9)))


def test_gated_queries_are_known_by_name():
    """Qwen3-Next's queries alternate with output gates, head by head."""
    shapes = {"attn.q_proj.weight": torch.Size((32, 16)), "attn.k_proj.weight": torch.Size((8, 16))}
    views = {"attn.q_proj.weight": Split((4, 4), groups=4, names=("query", "gate"))}
    clip = QKClip().resolve("attn", shapes, 4, views)
    assert clip.num_kv_heads == 2
    assert clip.parameters[0].rows.segments == (("query", 4), ("none", 4))


def test_the_order_survives_copies_of_the_optimizer():
    model = nn.ModuleDict({"attn": CodeGenAttention()})
    for optimizer in (made := quintic.Muon(quintic.param_groups(model)), copy.deepcopy(made)):
        assert optimizer.param_groups[0]["view"].names == ("query", "value", "key")
    saved = made.state_dict()
    made.load_state_dict(saved)
    assert made.param_groups[0]["view"].names == ("query", "value", "key")
