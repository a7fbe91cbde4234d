"""Lookup layers in the model: their formula, their counts, the allocation as a part of the model, cached decoding."""

import dataclasses

import pytest
import torch

from quintic.model.gpt import GPT, GPTConfig
from quintic.model.lookup import LookupLayer
from quintic.train.recipe import build_model

VOCAB, BOS = 40, 0


def config(**changes):
    base = GPTConfig.from_depth(3, vocab_size=VOCAB, seq_len=32, bos_id=BOS, head_dim=16)
    return dataclasses.replace(base, **{"l3_layers": (0, 2), "l3_embeddings": 100, "l3_k_max": 7, **changes})


def shares(total=100, most=7):
    rows = torch.ones(VOCAB, dtype=torch.int64)
    while int(rows.sum()) < total:
        free = (rows < most).nonzero().flatten()
        rows[free[torch.randint(len(free), ())]] += 1
    return rows


def model(noise=0.1, seed=0, **changes):
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    built = build_model(config(**changes), device=cpu, dtype=torch.float32, attention="sdpa", seed=seed)
    if built.lookups:
        built.allocate_lookups(shares(), mean_rows=4.5)
    with torch.no_grad():  # lookup layers begin as the identity
        for param in built.parameters():
            param.add_(noise * torch.randn_like(param))
    return built


def tokens(rows=2, length=32):
    inputs = torch.randint(1, VOCAB, (rows, length))
    inputs[:, 0] = BOS
    return inputs


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_computes_the_papers_formula(tied):
    from quintic.kernels.lookup.lookup import plan_lookup

    torch.manual_seed(0)
    layer = LookupLayer(6, 12, 10, tied=tied)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn_like(param))
    offsets = torch.tensor([0, 3, 4, 9, 12], dtype=torch.int32)
    ids, x = torch.randint(4, (2, 5)), torch.randn(2, 5, 6)
    out = layer.double()(x.double(), offsets, plan_lookup(ids, offsets, 12))
    keys = layer.keys
    values = keys if tied else layer.values
    for row in range(2):
        for place in range(5):
            state = x[row, place].double()
            token = int(ids[row, place])
            own = slice(int(offsets[token]), int(offsets[token + 1]))
            read = state / (state.square().mean() + torch.finfo(torch.float64).eps).sqrt()
            attention = torch.softmax(keys[own] @ read, 0)
            raised = layer.up.weight @ (values[own].mT @ attention)
            raised = raised / (raised.square().mean() + torch.finfo(torch.float64).eps).sqrt()
            expected = layer.mix.weight @ torch.cat([raised, read]) + state
            torch.testing.assert_close(out[row, place], expected, rtol=1e-9, atol=1e-9)


def test_at_first_a_lookup_layer_changes_nothing():
    plain, with_lookups = (
        build_model(sizes, device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=3)
        for sizes in (config(l3_layers=()), config())
    )
    shared = plain.state_dict()
    with_lookups.load_state_dict(shared, strict=False)
    inputs = tokens()
    assert torch.equal(plain(inputs), with_lookups(inputs))
    assert [name for name, _ in plain.named_buffers()] == []


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied):
    built, inputs = model(l3_tied=tied), tokens(8)
    built(inputs, inputs.roll(-1, 1)).backward()
    for name, param in built.named_parameters():
        assert param.grad is not None, name
        assert float(param.grad.abs().max()) > 0, name


def test_each_layer_stands_behind_its_block():
    first, last = model(l3_layers=(0,)), model(l3_layers=(2,))
    inputs = tokens()
    found = []
    for built in (first, last):
        order = []
        for name, module in built.named_modules():
            if name.count(".") == 1 and name.startswith(("blocks.", "lookups.")):
                module.register_forward_hook(lambda *_, name=name, order=order: order.append(name))
        built(inputs)
        found.append(order)
    assert found[0] == ["blocks.0", "lookups.0", "blocks.1", "blocks.2"]
    assert found[1] == ["blocks.0", "blocks.1", "blocks.2", "lookups.2"]


def test_parameters_and_operations_are_counted():
    built, plain = model(l3_d_up=50), model(l3_layers=())
    width = built.config.width
    counts, without = built.num_parameters(), plain.num_parameters()
    assert sum(counts.values()) == sum(param.numel() for param in built.parameters())
    matrices = 2 * (50 * width + (50 + width) * width)
    assert counts == {**without, "blocks": without["blocks"] + matrices, "lookup_tables": 2 * 100 * width}
    untied = model(l3_d_up=50, l3_tied=False).num_parameters()
    assert untied == {**counts, "lookup_tables": 2 * counts["lookup_tables"]}
    # Two layers: a key and a value of 4.5 rows, each entry a multiplication and an addition, three times.
    assert built.flops_per_token() == plain.flops_per_token() + 6 * matrices + round(2 * 4.5 * 2 * 6 * width)
    with torch.device("meta"):
        planned = GPT(config(l3_d_up=50))
    assert planned.flops_per_token() == plain.flops_per_token() + 6 * matrices + round(2 * 100 / VOCAB * 2 * 6 * width)
    assert model().lookups["0"].up.weight.shape == (4 * width, width)


def test_the_allocation_is_saved_with_the_weights():
    first, second = model(), model(seed=1)
    inputs = tokens()
    assert not torch.equal(first.lookup_offsets, second.lookup_offsets)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.lookup_offsets, second.lookup_offsets)
    assert float(second.lookup_mean_rows) == 4.5
    assert torch.equal(first(inputs), second(inputs))


def test_before_it_is_allocated_tokens_have_even_shares():
    built = build_model(config(), device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=0)
    shares = built.lookup_offsets.diff()
    assert int(built.lookup_offsets[0]) == 0
    assert sorted(shares.unique().tolist()) == [2, 3]
    assert int(shares.sum()) == 100
    assert float(built.lookup_mean_rows) == 2.5


@pytest.mark.parametrize("tied", [True, False])
def test_cached_logits_equal_those_of_the_whole_row(tied):
    built, inputs = model(l3_tied=tied), tokens(1)
    with torch.no_grad():
        expected = built(inputs)
        cache = built.new_cache(32)
        pieces = [built(inputs[:, :5], cache=cache)]
        pieces += [built(inputs[:, i : i + 1], cache=cache) for i in range(5, 32)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_it_is_one_graph():
    built, inputs = model(), tokens()
    targets = inputs.roll(-1, 1)
    compiled = torch.compile(built, backend="aot_eager", fullgraph=True)
    expected = built(inputs, targets)
    found = compiled(inputs, targets)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, list(built.parameters()))
    for ours, theirs in zip(torch.autograd.grad(found, list(built.parameters())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l3_layers": (0, 3)}, "l3_layers=0,3: must be layers from 0 to 2"),
        ({"l3_layers": (1, 0)}, "l3_layers=1,0: .* in ascending order"),
        ({"l3_layers": (1, 1)}, "l3_layers=1,1"),
        ({"l3_embeddings": VOCAB - 1}, "l3_embeddings=39: need at least one for each of 40 tokens"),
        ({"l3_embeddings": 281}, r"l3_embeddings=281: .* at most 7 \(l3_k_max=7\)"),
        ({"l3_d_up": -1}, "l3_d_up=-1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
