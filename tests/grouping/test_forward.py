"""What one forward pass on tensors without data says of weights, and that it leaves nothing behind."""

import copy
import random
import sys
import threading
import types

import numpy
import pytest
import torch
from newer import needs_torch
from torch import nn

import quintic

IDS = torch.zeros(2, 5, dtype=torch.long)
X = torch.zeros(2, 5, 32)


class Fn(nn.Module):
    """A model of the given layers, with a function of (model, x) for its forward pass."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def rows(model, example=X, **kwargs):
    return {row.name: row for row in quintic.explain(model, example=example, **kwargs).rows}


def attend(q, k, v):
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)


def by_parts(m, x):
    q, k, v = (part.view(2, 5, 4, 8).transpose(1, 2) for part in m.a(x).split(32, -1))
    return m.fc(m.b(attend(q, k, v)))


def by_head(m, x):
    q, k, v = m.a(x).view(2, 5, 4, 24).transpose(1, 2).chunk(3, -1)
    return m.fc(m.b(attend(q, k, v)))


def by_feature(m, x):
    q, k, v = m.a(x).view(2, 5, 4, 8, 3).transpose(1, 2).unbind(-1)
    return m.fc(m.b(attend(q, k, v)))


@pytest.mark.parametrize(
    ("run", "view"),
    [
        (by_parts, quintic.Split((32, 32, 32))),
        (by_head, quintic.Split((8, 8, 8), groups=4)),
        (by_feature, quintic.Split((1, 1, 1), groups=32)),
    ],
)
def test_interleaved_queries_keys_and_values_are_told_apart(run, view):
    found = rows(Fn(run, a=nn.Linear(32, 96), b=nn.Linear(32, 32), fc=nn.Linear(32, 7)))
    assert (found["a.weight"].view, found["b.weight"].view) == (view, quintic.Matrix())
    assert found["fc.weight"].algorithm == "adamw"


def halves(m, x):
    one, two = m.a(x).chunk(2, -1)
    return m.fc(m.b(one.sigmoid() * two))


def alternating(m, x):
    y = m.a(x)
    return m.fc(m.b(y[..., ::2].sigmoid() * y[..., 1::2]))


def whole(m, x):
    y = m.a(x)[..., :64]
    return m.fc(m.b(y.sigmoid() * y))


@pytest.mark.parametrize(
    ("run", "wide", "view"),
    [
        (halves, 128, quintic.Split((64, 64))),
        (alternating, 128, quintic.Split((1, 1), groups=64)),
        (whole, 64, quintic.Matrix()),
    ],
)
def test_gated_units_are_two_matrices_and_gelu_is_one(run, wide, view):
    model = Fn(run, a=nn.Linear(32, wide), b=nn.Linear(64, 32), fc=nn.Linear(32, 7))
    assert rows(model)["a.weight"].view == view


def test_heads_under_unknown_names():
    def run(m, x):
        y = m.a(x).relu()
        return {"classes": m.scores(y), "boxes": m.places(m.b(y).relu())}

    layers = {"a": nn.Linear(32, 32), "scores": nn.Linear(32, 9), "b": nn.Linear(32, 24), "places": nn.Linear(24, 4)}
    found = rows(Fn(run, **layers))
    muon = {name for name, row in found.items() if row.algorithm == "muon"}
    assert muon == {"a.weight", "b.weight"}
    assert "types and names: muon" in found["scores.weight"].reason


def test_clusters_of_an_adaptive_softmax_are_heads():
    loss = nn.AdaptiveLogSoftmaxWithLoss(32, 100, [10, 50])
    model = Fn(lambda m, x: m.loss.log_prob(m.a(x).flatten(0, 1)), a=nn.Linear(32, 32), loss=loss)
    found = rows(model)
    assert {found[f"loss.{name}.weight"].algorithm for name in ("head", "tail.0.1", "tail.1.1")} == {"adamw"}
    assert found["loss.tail.0.0.weight"].algorithm == "muon"


def test_routers_and_gates_under_unknown_names():
    def run(m, x):
        weights, _ = m.wg(x).softmax(-1).topk(2)
        y = m.a(x).view(2, 5, 4, 8) * m.open(x).sigmoid()[..., None]
        return m.fc(m.b(y.flatten(2)) * weights.sum(-1, keepdim=True))

    sizes = {"wg": 8, "a": 32, "open": 4, "b": 32, "fc": 7}
    found = rows(Fn(run, **{name: nn.Linear(32, size) for name, size in sizes.items()}))
    assert [name[0] for name, row in found.items() if row.algorithm == "muon"] == ["a", "b"]
    assert "chosen" in found["wg.weight"].why


def test_experts_stored_as_inputs_by_outputs():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.zeros(2, 32, 128)), nn.Parameter(torch.zeros(2, 64, 32))

    def run(m, x):
        one, two = torch.bmm(x, m.experts.up).chunk(2, -1)
        return m.fc(torch.bmm(one.relu() * two, m.experts.down))

    found = rows(Fn(run, experts=Experts(), fc=nn.Linear(32, 7)))
    assert found["experts.up"].view == quintic.Split((64, 64), transposed=True)
    assert found["experts.down"].view == quintic.Experts(transposed=True)


def test_a_hidden_layer_as_wide_as_a_table_is_no_head():
    model = Fn(lambda m, x: m.out(m.down(m.up(m.table(x)).relu())), table=nn.Embedding(64, 32))
    model.down, model.up, model.out = nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(32, 64)
    before = {row.name: row.algorithm for row in quintic.explain(model).rows}
    assert before["up.weight"] == "adamw"  # no later layer takes its outputs
    found = rows(model, IDS)
    assert [found[f"{name}.weight"].algorithm for name in ("up", "down", "out")] == ["muon", "muon", "adamw"]


def test_a_table_by_type_is_never_a_matrix():
    table = nn.Embedding(64, 32)
    found = rows(
        Fn(lambda m, x: m.fc(m.a(x) @ m.table.weight.T), table=table, a=nn.Linear(32, 32), fc=nn.Linear(64, 7))
    )
    assert found["table.weight"].algorithm == "adamw"


def test_a_tied_head_is_a_table():
    model = Fn(lambda m, x: m.out(m.a(m.table(x))), table=nn.Embedding(64, 32), a=nn.Linear(32, 32))
    model.out = nn.Linear(32, 64, bias=False)
    model.out.weight = model.table.weight
    found = rows(model, IDS)
    assert [found[name].algorithm for name in ("table.weight", "a.weight")] == ["adamw", "muon"]


def test_recurrent_and_unused_layers_are_decided_as_without_a_pass():
    model = Fn(lambda m, x: m.fc(m.lstm(x)[0]), lstm=nn.LSTM(32, 16), fc=nn.Linear(16, 7), spare=nn.Linear(32, 16))
    found = rows(model)
    assert found["lstm.weight_ih_l0"].view == quintic.Split((16,) * 4)
    assert found["spare.weight"].why.endswith("not seen in the forward pass")


def test_factors_of_an_adapter_follow_the_weight():
    def run(m, x):
        one, two = (m.base(x) + m.up(m.down(x))).chunk(2, -1)
        return m.fc(one.relu() * two)

    layers = {"base": nn.Linear(32, 64), "down": nn.Linear(32, 4, bias=False), "up": nn.Linear(4, 64, bias=False)}
    found = rows(Fn(run, **layers, fc=nn.Linear(32, 7)))
    assert found["up.weight"].view == found["base.weight"].view == quintic.Split((32, 32))
    assert found["down.weight"].view == quintic.Matrix()


def test_rules_come_before_the_pass():
    model = Fn(halves, a=nn.Linear(32, 128), b=nn.Linear(64, 32), fc=nn.Linear(32, 7))
    found = rows(model, rules=[quintic.Rule("a.weight", "muon", quintic.Matrix()), quintic.Rule("fc.weight", "muon")])
    assert (found["a.weight"].view, found["fc.weight"].algorithm) == (quintic.Matrix(), "muon")


def test_nothing_of_the_model_or_of_random_states_changes():
    calls = []

    def run(m, x):
        m.steps += 1
        m.seen.append(random.random() + numpy.random.rand())
        return m.fc(m.norm(m.a(x).transpose(1, 2) + torch.rand(1)).transpose(1, 2))

    model = Fn(run, a=nn.Linear(32, 32), norm=nn.BatchNorm1d(32), fc=nn.Linear(32, 7))
    model.steps, model.seen = 0, []
    model.a.register_forward_hook(lambda *_: calls.append(1))
    model.a.weight.grad = torch.ones(32, 32)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    quintic.param_groups(model, example=X)
    assert (calls, model.steps, model.seen, model.training) == ([], 0, [], True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.a.weight.grad, torch.ones(32, 32))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()


def gated():
    return Fn(halves, a=nn.Linear(32, 128), b=nn.Linear(64, 32), fc=nn.Linear(32, 7))


def test_a_meta_model_and_any_form_of_example():
    expected = dict(quintic.trace(gated(), X))
    with torch.device("meta"):
        model = gated()
    for example in (X, (X,), {"x": X}, X.to("meta")):
        assert dict(quintic.trace(model, example)) == expected
    assert dict(quintic.trace(model, 32, call=lambda m, width: m(torch.zeros(2, 5, width)))) == expected


def test_roles_are_data_for_a_model_that_was_wrapped(tmp_path):
    model = gated()
    roles = quintic.trace(model, X)
    roles.save(tmp_path / "roles.json")
    loaded = quintic.Roles.load(tmp_path / "roles.json")
    assert loaded == roles
    compiled = torch.compile(model)
    assert dict(quintic.trace(compiled, X)) == dict(roles)
    groups = quintic.param_groups(nn.DataParallel(compiled), roles=loaded)
    assert {name: g["view"] for g in groups for name in g["param_names"]}["a.weight"] == quintic.Split((64, 64))


def test_mistakes_are_named(tmp_path):
    model = gated()
    with pytest.raises(ValueError, match=r"forward pass of Fn .* failed, RuntimeError.*example, or call="):
        quintic.trace(model, torch.zeros(2, 5, 31))
    with pytest.raises(ValueError, match="give one of them"):
        quintic.param_groups(model, example=X, roles=quintic.trace(model, X))
    with pytest.raises(TypeError, match=r"result of quintic\.trace"):
        quintic.param_groups(model, roles={"a.weight": "muon"})
    with pytest.raises(ValueError, match="name no parameter"):
        quintic.param_groups(nn.Linear(3, 4), roles=quintic.trace(model, X))
    other = Fn(halves, a=nn.Linear(16, 128), b=nn.Linear(64, 32), fc=nn.Linear(32, 7))
    with pytest.raises(ValueError, match=r"a.weight has shape \(128, 16\)"):
        quintic.param_groups(other, roles=quintic.trace(model, X))
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no file of quintic.Roles.save"):
        quintic.Roles.load(tmp_path / "no.json")


def test_a_model_that_reads_integers():
    """Numbers of tokens, places of images and lengths of sequences decide what a model computes."""

    def run(m, ids):
        lengths = (ids != 0).sum(-1).tolist()
        ends = torch.arange(0, 3).cumsum(0).tolist()
        y = m.a(m.table(ids))
        return m.fc(torch.cat([y[0, : lengths[0]], y[1, : ends[-1]]]))

    model = Fn(run, table=nn.Embedding(9, 32), a=nn.Linear(32, 32), fc=nn.Linear(32, 7))
    found = rows(model, torch.tensor([[1, 2, 0], [3, 0, 0]]))
    assert [row.algorithm for row in found.values() if len(row.shape) > 1] == ["adamw", "muon", "adamw"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_experts(dtype):
    def run(m, x):
        x = x.flatten(0, 1)
        ends = torch.tensor([4, 10], dtype=torch.int32)
        up = torch._grouped_mm(x, m.up.transpose(-2, -1), offs=ends)
        one, two = up.chunk(2, -1)
        return m.fc(torch._grouped_mm(one.sigmoid() * two, m.down.transpose(-2, -1), offs=ends))

    model = Fn(run, fc=nn.Linear(32, 7))
    model.up, model.down = nn.Parameter(torch.zeros(2, 64, 32)), nn.Parameter(torch.zeros(2, 32, 32))
    found = rows(model.to(dtype), X.to(dtype), rules=[])
    assert found["up"].view == quintic.Split((32, 32))
    assert found["down"].view == quintic.Experts()


def test_a_model_without_a_head_has_none():
    """The square last layer of a model without a head, such as BERT's pooler."""
    found = rows(Fn(lambda m, x: m.pool(m.a(x).relu()).tanh(), a=nn.Linear(32, 32), pool=nn.Linear(32, 32)))
    assert [row.algorithm for row in found.values()] == ["muon", "adamw"] * 2


def test_a_kernel_passes_on_what_it_reads(monkeypatch):
    """Launches of Triton are followed as operations that read some tensors and fill the others."""
    launched = []

    class JITFunction:
        def run(self, *args, **kwargs):
            launched.append(args)

    kernel = JITFunction()
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))

    def run(m, x):
        out = torch.empty(2, 5, 32)
        kernel.run(m.a(x), out, 32, grid=(1,))
        return m.fc(out)

    found = rows(Fn(run, a=nn.Linear(32, 32), fc=nn.Linear(32, 7)))
    assert [row.algorithm for row in found.values() if len(row.shape) > 1] == ["muon", "adamw"]
    assert launched == []


def test_rotary_positions_by_complex_numbers_make_no_pieces():
    def run(m, x):
        plain, rotary = m.a(x).view(2, 5, 4, 8).split([4, 4], -1)
        angles = torch.polar(torch.ones(5, 2), torch.zeros(5, 2))[None, :, None]
        turned = torch.view_as_real(torch.view_as_complex(rotary.reshape(2, 5, 4, 2, 2)) * angles).flatten(3)
        return m.fc(m.b(torch.cat([plain, turned], -1).flatten(2)))

    found = rows(Fn(run, a=nn.Linear(32, 32), b=nn.Linear(32, 32), fc=nn.Linear(32, 7)))
    assert found["a.weight"].view == quintic.Matrix()


COS = torch.ones(5, 4)


def turned_by_halves(t):
    one, two = t.chunk(2, -1)
    return t * COS.repeat(1, 2) + torch.cat([-two, one], -1) * COS.repeat(1, 2)


def turned_by_pairs(t):
    pairs = t.unflatten(-1, (-1, 1, 2))
    return (COS[..., None] * pairs[..., 0] + COS[..., None] * pairs[..., 1]).flatten(-2)


def turned_by_complex_numbers(t):
    angles = torch.polar(COS, torch.zeros_like(COS))
    return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * angles).flatten(-2)


@pytest.mark.parametrize("turned", [turned_by_halves, turned_by_pairs, turned_by_complex_numbers])
def test_rotary_positions_keep_the_features_of_a_head_together(turned):
    def run(m, x):
        q, k, v = m.qkv(x).view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v)
        return m.fc(out.transpose(1, 2).flatten(2))

    found = rows(Fn(run, qkv=nn.Linear(32, 96), fc=nn.Linear(32, 7)))
    assert found["qkv.weight"].view == quintic.Split((32, 32, 32))


@pytest.mark.parametrize("fused", [False, True])
def test_learned_queries_are_no_matrices(fused):
    def run(m, x):
        keys = m.a(x)
        if fused:
            query = m.query.expand(2, 3, 32)
            return m.fc(nn.functional.scaled_dot_product_attention(query, keys, keys))
        weights = (m.query @ keys.transpose(-1, -2)).softmax(-1)
        return m.fc(weights @ keys)

    model = Fn(run, a=nn.Linear(32, 32), fc=nn.Linear(32, 7))
    model.query = nn.Parameter(torch.zeros(3, 32))
    found = rows(model)
    assert [found[name].algorithm for name in ("query", "a.weight", "fc.weight")] == ["adamw", "muon", "adamw"]


def test_a_number_for_all_features_scales_them():
    def run(m, x):
        one, two = (m.a(x) * m.size(x).square().mean(-1, keepdim=True)).chunk(2, -1)
        return m.fc(m.b(one.sigmoid() * two))

    layers = {"a": nn.Linear(32, 128), "size": nn.Linear(32, 16), "b": nn.Linear(64, 32), "fc": nn.Linear(32, 7)}
    assert rows(Fn(run, **layers))["a.weight"].view == quintic.Split((64, 64))


def test_scales_of_channels_are_no_gates():
    """Adaptive norms of images multiply a factor for each channel onto all places."""

    def run(m, x):
        image = m.a(x).transpose(1, 2).reshape(2, 8, 1, 5).expand(2, 8, 4, 5)
        image = image * m.scale(x.mean(1))[:, :, None, None]
        return m.fc(m.b(image.flatten(2).transpose(1, 2)))

    layers = {"a": nn.Linear(32, 8), "scale": nn.Linear(32, 8), "b": nn.Linear(8, 16), "fc": nn.Linear(16, 7)}
    found = rows(Fn(run, **layers))
    assert found["scale.weight"].algorithm == "muon"


def test_masks_with_values_choose():
    model = Fn(lambda m, ids: m.fc(m.a(m.table(ids))[ids == 3]), table=nn.Embedding(9, 32), a=nn.Linear(32, 32))
    model.fc = nn.Linear(32, 7)
    found = rows(model, torch.tensor([[1, 3, 3], [3, 0, 3]]))
    assert [found[f"{name}.weight"].algorithm for name in ("table", "a", "fc")] == ["adamw", "muon", "adamw"]


def test_coordinates_that_are_used_and_returned_stay_a_head():
    def run(m, x):
        places = m.head(m.a(x))
        return places, m.fc(m.b(places))

    layers = {"a": nn.Linear(32, 32), "head": nn.Linear(32, 2), "b": nn.Linear(2, 32), "fc": nn.Linear(32, 7)}
    assert rows(Fn(run, **layers))["head.weight"].algorithm == "adamw"


def test_features_along_three_dimensions_are_no_stack():
    """Attention with weights (width, heads, size), as in XLNet: no view describes them, and the user is asked."""

    def run(m, x):
        heads = torch.einsum("ibh,hnd->ibnd", x, m.up)
        return m.fc(torch.einsum("ibnd,hnd->ibh", heads, m.down))

    model = Fn(run, fc=nn.Linear(32, 7))
    model.up, model.down = nn.Parameter(torch.zeros(32, 4, 8)), nn.Parameter(torch.zeros(32, 4, 8))
    roles = quintic.trace(model, X)
    assert [roles[name].kind for name in ("up", "down", "fc.weight")] == ["unknown", "unknown", "head"]
    with pytest.raises(ValueError, match="no rule covers these 2 parameters: up") as error:
        quintic.param_groups(model, roles=roles)
    assert "example=" not in str(error.value)  # the pass has been made


def test_outputs_that_are_joined_and_compared_are_no_heads():
    def run(m, x):
        both = torch.stack([m.one(m.a(x)[:, 0]), m.two(m.a(x)[:, 1])], 1)
        return both @ m.image(x).transpose(-1, -2)

    sizes = {"a": 32, "one": 16, "two": 16, "image": 16}
    found = rows(Fn(run, **{name: nn.Linear(32, size) for name, size in sizes.items()}))
    assert {row.algorithm for name, row in found.items() if "weight" in name} == {"muon"}


def test_pieces_that_come_back_together_are_one_matrix(monkeypatch):
    class JITFunction:
        def run(self, *args, **kwargs):
            raise AssertionError

    kernel = JITFunction()
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.SimpleNamespace(JITFunction=JITFunction))

    def run(m, x):
        plain, rotary = m.a(x).split([16, 16], -1)
        out = torch.empty(2, 5, 16)
        kernel.run(rotary, out)
        return m.fc(m.b(torch.cat([plain, out], -1)))

    found = rows(Fn(run, a=nn.Linear(32, 32), b=nn.Linear(32, 32), fc=nn.Linear(32, 7)))
    assert found["a.weight"].view == quintic.Matrix()


@needs_torch("2.9", "a mode that follows flex_attention")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flexible_attention():
    attention = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    def run(m, x):
        q, k, v = (part.view(2, 5, 2, 16).transpose(1, 2) for part in m.a(x).split(32, -1))
        return m.fc(m.b(attention(q, k, v).transpose(1, 2).flatten(2)))

    found = rows(Fn(run, a=nn.Linear(32, 96), b=nn.Linear(32, 32), fc=nn.Linear(32, 7)))
    assert found["a.weight"].view == quintic.Split((32, 32, 32))


def muon_of(model, example=X):
    return [name for name, row in rows(model, example).items() if row.algorithm == "muon"]


def masked(m, x):
    return m.fc(nn.functional.linear(x, m.a.weight * m.mask))


def test_a_weight_that_is_masked_or_normalised_is_still_the_weight():
    model = Fn(masked, a=nn.Linear(32, 32), fc=nn.Linear(32, 7))
    model.register_buffer("mask", torch.ones(32, 32))
    assert muon_of(model) == ["a.weight"]
    for change in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm):
        layer = change(nn.Linear(32, 32))
        found = muon_of(Fn(lambda m, x: m.fc(m.a(x)), a=layer, fc=nn.Linear(32, 7)))
        assert len(found) == 1
        assert found[0].startswith("a.")


@pytest.mark.parametrize(
    "scale",
    [lambda y: y / y.abs().max(), lambda y: y / y.abs().max(-1, keepdim=True).values, lambda y: y - y.argmax()],
)
def test_the_largest_feature_as_a_scale_makes_no_router(scale):
    assert muon_of(Fn(lambda m, x: m.fc(scale(m.a(x))), a=nn.Linear(32, 16), fc=nn.Linear(16, 7))) == ["a.weight"]


def test_experts_that_are_chosen_by_index_stay_matrices():
    def run(m, x):
        places = m.router(x[:, 0]).topk(1).indices[:, 0]
        return m.fc(torch.einsum("boi,bti->bto", m.experts[places], x))

    model = Fn(run, router=nn.Linear(32, 4), fc=nn.Linear(48, 7))
    model.experts = nn.Parameter(torch.zeros(4, 48, 32))
    assert rows(model)["experts"].view == quintic.Experts()


def test_a_row_of_a_weight_and_a_weight_that_is_used_from_both_sides():
    def run(m, x):
        y = nn.functional.linear(x, m.w)
        return m.fc(m.b(y) @ m.w), x @ m.row[0]

    model = Fn(run, b=nn.Linear(16, 16), fc=nn.Linear(32, 7))
    model.w, model.row = nn.Parameter(torch.zeros(16, 32)), nn.Parameter(torch.zeros(1, 32))
    roles = quintic.trace(model, X)
    assert (roles["w"].kind, roles["b.weight"].kind, roles["fc.weight"].kind) == ("matrix", "matrix", "head")
    assert quintic.trace(Fn(lambda m, x: m.a(x).sum(dim=()), a=nn.Linear(32, 8)), X)["a.weight"].pieces == ()


def test_images_of_bytes_are_inputs():
    model = Fn(lambda m, x: m.fc(m.a(x.float() / 255)), a=nn.Linear(32, 32), fc=nn.Linear(32, 7))
    model.a = nn.Module()
    model.a.w = nn.Parameter(torch.zeros(32, 32))
    model.run = lambda m, x: m.fc(x.float() / 255 @ m.a.w)
    assert quintic.trace(model, X.to(torch.uint8))["a.w"].kind == "matrix"


class Config:
    def __init__(self):
        self.width, self.lock = 32, threading.Lock()


def test_objects_that_cannot_be_copied_are_shared_and_modules_beside_them_are_not():
    def run(m, x):
        m.kept["last"] = x
        return m.fc(m.kept["norm"](m.a(x).transpose(1, 2)).transpose(1, 2)[..., : m.config.width])

    model = Fn(run, a=nn.Linear(32, 32), norm=nn.BatchNorm1d(32), fc=nn.Linear(32, 7))
    model.config = model.a.config = Config()
    model.kept = {"lock": threading.Lock(), "norm": model.norm}
    assert muon_of(model) == ["a.weight"]
    assert model.kept.keys() == {"lock", "norm"}
    assert int(model.norm.num_batches_tracked) == 0


def test_lazy_layers_are_named():
    with pytest.raises(ValueError, match=r"a\.weight has no shape yet"):
        quintic.trace(Fn(lambda m, x: m.a(x), a=nn.LazyLinear(7)), X)
