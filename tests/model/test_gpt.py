import dataclasses
import functools
import math

import pytest
import torch

from quintic.model.functions import rms_norm, rotary_tables, rotate
from quintic.model.gpt import GPT, GPTConfig
from quintic.train.recipe import build_model

BOS = 0


def sizes(**changes):
    lookups = {name: changes.pop(name) for name in list(changes) if name.startswith("l3_")}
    options = {"vocab_size": 64, "seq_len": 32, "bos_id": BOS, "head_dim": 16, "depth": 2, **changes}
    return dataclasses.replace(GPTConfig.from_depth(**options), **lookups)


def model(seed=0, **changes):
    torch.manual_seed(seed)
    built = build_model(sizes(**changes), device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=seed)
    with torch.no_grad():  # leave the special initial state, in which blocks and smear do nothing
        for param in built.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return built


def tokens(rows=2, length=32):
    inputs = torch.randint(1, 64, (rows, length))
    inputs[:, 0] = BOS
    return inputs


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "head_dim", "width"), [(4, 64, 256), (12, 128, 768), (3, 128, 256), (1, 48, 96)])
def test_width_is_64_per_layer_rounded_up_to_heads(depth, head_dim, width):
    config = GPTConfig.from_depth(depth, vocab_size=100, seq_len=64, bos_id=0, head_dim=head_dim)
    assert (config.width, config.num_heads, config.depth) == (width, width // head_dim, depth)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "head_dim=7: rotary"),
        ({"kv_ratio": 3}, "kv_ratio=3 does not divide the 8 query heads"),
        ({"window_pattern": "SX"}, "window_pattern='SX'"),
        ({"window_pattern": ""}, "window_pattern=''"),
        ({"bos_id": 64}, "bos_id=64"),
        ({"seq_len": 0}, "seq_len=0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sizes(**changes)


def test_windows_repeat_and_the_last_layer_sees_all():
    assert sizes(depth=4, seq_len=256, window_pattern="SSSL").windows == (64, 64, 64, 256)
    assert sizes(depth=6, seq_len=256, window_pattern="SSL").windows == (64, 64, 256, 64, 64, 256)
    assert sizes(depth=3, seq_len=10, window_pattern="S").windows == (3, 3, 10)


def test_value_embeddings_alternate_and_include_the_last_layer():
    config = sizes(depth=5)
    assert [config.has_value_embedding(layer) for layer in range(5)] == [True, False, True, False, True]
    assert list(model(depth=3).value_embeddings) == ["0", "2"]


def test_parameters_are_counted_once():
    built = model(depth=3)
    counts = built.num_parameters()
    assert sum(counts.values()) == sum(p.numel() for p in built.parameters())
    width = built.config.width
    assert counts["embedding"] == counts["head"] == 64 * width
    gates = sum(built.config.num_kv_heads * 12 for layer in range(3) if built.config.has_value_embedding(layer))
    assert counts["blocks"] == 3 * 12 * width**2 + gates


def test_flops_count_products_and_attention():
    built = model()
    linear = sum(m.weight.numel() for m in built.modules() if isinstance(m, torch.nn.Linear))
    assert built.flops_per_token() == 6 * linear + 12 * built.config.width * (8 + 32)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_rotary_products_depend_on_the_distance_only():
    cos, sin = rotary_tables(20, 8, base=100.0, device=torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    rotated_q = rotate(q.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
    rotated_k = rotate(k.expand(1, 20, 1, 8), cos, sin)[0, :, 0]
    products = rotated_q @ rotated_k.mT
    for distance in range(-10, 10):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(20))


def test_rms_norm_is_its_formula():
    x = torch.randn(3, 50)
    torch.testing.assert_close(rms_norm(x).square().mean(dim=-1), torch.ones(3), rtol=1e-4, atol=1e-4)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_initial_loss_is_that_of_a_guess():
    built = build_model(sizes(), device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=0)
    inputs = tokens(4)
    assert float(built(inputs, inputs.roll(-1, 1)).detach()) == pytest.approx(math.log(64), abs=0.02)


def test_initialisation_depends_on_the_seed_alone():
    first, second, other = (
        build_model(sizes(), device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=seed)
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert all(torch.isfinite(p).all() for p in first.parameters())


@pytest.mark.parametrize("kv_ratio", [1, 2])
def test_every_parameter_gets_a_gradient(kv_ratio):
    built = model(kv_ratio=kv_ratio)
    inputs = tokens()
    built(inputs, inputs.roll(-1, 1)).backward()
    for name, param in built.named_parameters():
        assert param.grad is not None, name
        assert float(param.grad.abs().max()) > 0, name


def test_the_future_is_invisible():
    built, inputs = model(), tokens()
    changed = inputs.clone()
    changed[:, 20:] = torch.randint(1, 64, (2, 12))
    torch.testing.assert_close(built(inputs)[:, :20], built(changed)[:, :20])


def test_other_documents_are_invisible():
    """Attention and smear both: the second document's logits do not change with the first document."""
    built, inputs = model(), tokens()
    inputs[:, 11] = BOS
    changed = inputs.clone()
    changed[:, 1:11] = torch.randint(1, 64, (2, 10))
    torch.testing.assert_close(built(inputs)[:, 11:], built(changed)[:, 11:])


def test_a_document_scores_the_same_wherever_it_stands():
    built = model()
    document = torch.cat([torch.tensor([BOS]), torch.randint(1, 64, (9,))])
    row = torch.cat([torch.tensor([BOS, 5, 6, 7]), document, torch.tensor([BOS, 8])])
    torch.testing.assert_close(built(row[None])[0, 4:14], built(document[None])[0], rtol=1e-4, atol=1e-4)


def test_losses_agree_with_the_logits():
    built, inputs = model(), tokens()
    targets = inputs.roll(-1, 1)
    losses = built(inputs, targets, reduction="none")
    expected = torch.nn.functional.cross_entropy(built(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    torch.testing.assert_close(built(inputs, targets), expected.mean())


def test_logits_are_capped():
    built = model()
    with torch.no_grad():
        built.head.weight.mul_(1e4)
    assert float(built(tokens()).detach().abs().max()) <= 15.0


@pytest.mark.parametrize(("pattern", "kv_ratio"), [("L", 1), ("SSSL", 1), ("SL", 2)])
@pytest.mark.parametrize("prompt", [1, 5, 20])
def test_cached_logits_equal_those_of_the_whole_row(pattern, kv_ratio, prompt):
    built = model(window_pattern=pattern, kv_ratio=kv_ratio, depth=3)
    inputs = tokens(rows=1)
    with torch.no_grad():
        expected = built(inputs)
        cache = built.new_cache(32)
        pieces = [built(inputs[:, :prompt], cache=cache)]
        pieces += [built(inputs[:, i : i + 1], cache=cache) for i in range(prompt, 32)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert cache.length == 32


def test_logits_of_some_positions_are_those_of_all():
    built = model()
    inputs = tokens(rows=3)
    with torch.no_grad():
        whole = built(inputs)
        positions = torch.tensor([0, 95, 31, 31])
        torch.testing.assert_close(built(inputs, positions=positions), whole.flatten(0, 1)[positions])


def test_low_precision_activations_stay_near():
    exact = model()
    with torch.device("meta"):
        low = GPT(exact.config, compute_dtype=torch.bfloat16)
    low.to_empty(device="cpu")
    low.load_state_dict(exact.state_dict())
    inputs = tokens()
    targets = inputs.roll(-1, 1)
    assert float(low(inputs, targets).detach()) == pytest.approx(float(exact(inputs, targets).detach()), rel=0.02)
    assert low.head.weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_compiled_parts_compute_what_the_model_computes(monkeypatch):
    # What is traced is in question here, not the code that is made of it, which takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, compiled = model(depth=3), model(depth=3)
    compiled.compile_parts()
    inputs = tokens(2, 16)
    targets = tokens(2, 16)
    losses = [module(inputs, targets) for module in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for (name, expected), found in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)
