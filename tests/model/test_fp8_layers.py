"""8-bit linear layers with dynamic scaling: what is rounded, gradients, which layers take part, and when."""

import math

import pytest
import torch
import torch.nn.functional as F

from quintic.model import layers
from quintic.model.fp8 import (
    FP8_BOTH,
    FP8_FORWARD,
    dynamic_fp8_linear,
    fp8_lines,
    head_scales,
    obstacle_to_fp8_layer,
)
from quintic.model.gpt import GPT, GPTConfig
from quintic.model.layers import Linear
from quintic.train.recipe import build_model

RECIPES = ["tensorwise", "rowwise"]


def rounded(x, largest, mantissa, exponent, dim):
    """x as 8-bit floats with scales by the definition, in float64: nearest, ties to even; `dim` None for one scale."""
    x = x.double()
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (amax.float() / largest).double().clamp_min(2.0**-100)
    value = (x.float() / scale.float()).double().clamp(-largest, largest)
    power = torch.floor(torch.log2(value.abs().clamp_min(2.0**exponent))).clamp_min(exponent)
    unit = 2.0 ** (power - mantissa)
    return torch.round(value / unit) * unit * scale


def e4m3(x, dim=None):
    return rounded(x, 448.0, 3, -6, dim)


def e5m2(x, dim=None):
    return rounded(x, 57344.0, 2, -14, dim)


def products(x, weight, grad, recipe):
    """Output and gradients by the definition, in float64."""
    if recipe == "tensorwise":
        low_x, low_weight, low_grad = e4m3(x), e4m3(weight), e5m2(grad)
        return low_x @ low_weight.mT, low_grad @ low_weight, low_grad.mT @ low_x
    return e4m3(x, 1) @ e4m3(weight, 1).mT, e4m3(grad, 1) @ e4m3(weight, 0), e4m3(grad, 0).mT @ e4m3(x, 0)


def run(x, weight, grad, recipe, **options):
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = dynamic_fp8_linear(*leaves, recipe, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 3e6])
def test_products_are_those_of_the_rounded_operands(recipe, tokens, scale):
    x, weight, grad = torch.randn(tokens, 32) * scale, torch.randn(48, 32), torch.randn(tokens, 48) / scale
    x[0, :5] *= 100
    for found, exact in zip(run(x, weight, grad, recipe), products(x, weight, grad, recipe), strict=True):
        assert found.dtype == torch.float32
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-6


def test_gradients_have_the_whole_range_of_their_dtype():
    grad = torch.zeros(16, 16)
    grad[0, 0], grad[1, 1] = 1.0, 2.0**-28  # normal numbers of e5m2, if 1 becomes the largest
    _, grad_x, _ = run(torch.ones(16, 16), torch.eye(16), grad, "tensorwise")
    assert float(grad_x[1, 1]) == pytest.approx(2.0**-28, rel=0.15)


def test_an_outlier_costs_other_rows_nothing_rowwise():
    x, weight = torch.randn(64, 128), torch.randn(128, 128)
    x[3, 7] = 1e6
    exact = F.linear(x.double(), weight.double())[10:]
    errors = {
        recipe: float((dynamic_fp8_linear(x, weight, recipe)[10:].double() - exact).norm() / exact.norm())
        for recipe in RECIPES
    }
    assert errors["rowwise"] < 0.05 < 0.8 < errors["tensorwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_dtypes_and_what_is_not_a_number(recipe):
    x, weight = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    out = dynamic_fp8_linear(x, weight, recipe)
    out.float().square().sum().backward()
    assert (out.shape, out.dtype) == ((2, 3, 16), torch.bfloat16)
    assert (x.grad.dtype, weight.grad.dtype, weight.grad.stride()) == (torch.bfloat16, torch.float32, (32, 1))
    assert not dynamic_fp8_linear(torch.zeros(4, 32), weight, recipe).any()
    broken = torch.randn(4, 32)
    broken[1, 2] = math.nan
    assert dynamic_fp8_linear(broken, weight, recipe)[1].isnan().all()


# PyTorch's own compiler makes an instance of a function's class, of which PyTorch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_is_one_graph_with_the_same_values(recipe):
    x, weight, grad = torch.randn(20, 32), torch.randn(48, 32), torch.randn(20, 48)

    def compiled(*args):
        return torch.compile(dynamic_fp8_linear, backend="aot_eager", fullgraph=True)(*args)

    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = compiled(*leaves, recipe)
    expected = run(x.detach(), weight.detach(), grad, recipe)
    for found, wanted in zip([out, *torch.autograd.grad(out, leaves, grad)], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# -- the model ---------------------------------------------------------------------------------------------------------


def model(vocab_size=320, depth=2, seed=0):
    sizes = GPTConfig.from_depth(depth, vocab_size=vocab_size, seq_len=32, bos_id=0, head_dim=32)
    built = build_model(sizes, device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", seed=seed)
    with torch.no_grad():
        for param in built.parameters():
            param.add_(0.02 * torch.randn_like(param))
    return built


def batch(vocab_size=320):
    inputs = torch.randint(1, vocab_size, (2, 32))
    inputs[:, 0] = 0
    return inputs, inputs.roll(-1, 1)


def test_sizes_that_suit_8_bits():
    sizes = [(128, 128), (128, 3072), (112, 128), (128, 136), (12, 128)]
    obstacles = ["", "", "a size is below 128", "a size is not a multiple of 16", "a size is not a multiple of 16"]
    assert [obstacle_to_fp8_layer(torch.empty(size)) for size in sizes] == obstacles


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_the_blocks_take_part_and_gates_do_not(recipe):
    built = model()
    uses = built.use_fp8(recipe)
    assert list(uses.values()).count(FP8_BOTH) == 13
    assert {name for name, use in uses.items() if use == FP8_BOTH} == {
        name for name, module in built.named_modules() if isinstance(module, Linear) and module.fp8 == recipe
    }
    taking = {name for name, module in built.named_modules() if isinstance(module, Linear) and module.fp8 == recipe}
    parts = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.up", "mlp.down")
    assert taking == {"head"} | {f"blocks.{layer}.{part}" for layer in range(2) for part in parts}
    assert FP8_BOTH not in model(depth=1).use_fp8(recipe).values()  # width 64


def test_auto_takes_the_head_and_what_becomes_faster():
    sizes = [(1024, 1024), (4096, 1024), (1008, 4096), (1024, 1032)]
    assert [obstacle_to_fp8_layer(torch.empty(size), needs_gain=True) for size in sizes] == [
        "",
        "",
        "a size is below 1,024: 8 bits would be slower",
        "a size is not a multiple of 16",
    ]
    for width, expected in ((128, {"head"}), (1024, {"head", "blocks.0.attention.query", "blocks.0.mlp.down"})):
        built = GPT(GPTConfig(vocab_size=320, depth=1, width=width, head_dim=32, num_kv_heads=2, seq_len=32, bos_id=0))
        uses = built.use_fp8("auto")
        count = list(uses.values()).count(FP8_BOTH)
        assert (uses["blocks.0.mlp.up"] == uses["blocks.0.mlp.down"] == FP8_FORWARD) == (width == 128)
        taking = {name for name, one in built.named_modules() if isinstance(one, Linear) and one.fp8 == "tensorwise"}
        assert expected <= taking
        assert len(taking) == count == (1 if width == 128 else 5)  # keys and values are of 64 channels
        assert built.blocks[0].mlp.fp8_forward == (width == 128)


def test_people_are_told_which_layers_are_in_8_bits_and_why_others_are_not():
    built = model()
    count = sum(isinstance(module, Linear) for module in built.modules())
    small = "attention.query, blocks.*.attention.key, blocks.*.attention.value, blocks.*.attention.out"
    rest = count - 1 - 12
    assert fp8_lines(built.use_fp8("auto"))[:3] == [
        f"8-bit products: forward alone in 4 of {count} linear layers (blocks.*.mlp.up, blocks.*.mlp.down)",
        f"8-bit products: forward and backward in 1 of {count} linear layers (head)",
        f"8-bit products: none, because a size is below 1,024: 8 bits would be slower, in 8 of {count} linear layers "
        f"(blocks.*.{small})",
    ]
    [gates] = fp8_lines(built.use_fp8("auto"))[3:]
    assert f"none, because a size is not a multiple of 16, in {rest} of {count} linear layers (" in gates

    lines = fp8_lines(model(depth=1).use_fp8("auto"))
    assert all(line.startswith("--fp8 changes nothing in this model: none, because a size is ") for line in lines)
    assert any("a size is below 128" in line for line in lines)
    assert fp8_lines({}) == []


def test_an_mlp_whose_layers_are_not_in_8_bits_is_so_forward(monkeypatch):
    mlp, x = model().blocks[0].mlp, layers.rms_norm(torch.randn(2, 32, 128)).requires_grad_()
    monkeypatch.setattr(layers, "_fuses", lambda *tensors: True)
    exact, expected = mlp(x), layers.mlp_relu2(x, mlp.up.weight, mlp.down.weight, fp8=True)
    mlp.fp8_forward = True
    assert torch.equal(mlp(x), expected)
    assert not torch.equal(expected, exact)
    with torch.no_grad():
        assert torch.equal(mlp(x), exact)
    mlp.eval()
    assert torch.equal(mlp(x), exact)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_in_8_bits_and_evaluation_is_not(recipe):
    built, exact, (inputs, targets) = model(), model(), batch()
    exact.load_state_dict(built.state_dict())
    built.use_fp8(recipe)
    with torch.no_grad():
        assert torch.equal(built(inputs, targets), exact(inputs, targets))
        assert torch.equal(built(inputs), exact(inputs))
    assert torch.equal(built.eval()(inputs, targets), exact(inputs, targets))
    loss, expected = built.train()(inputs, targets), exact(inputs, targets)
    assert float(loss.detach()) != float(expected.detach())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.03)
    wanted = torch.autograd.grad(expected, list(exact.parameters()))
    found = torch.autograd.grad(loss, list(built.parameters()))
    for (name, _), ours, theirs in zip(built.named_parameters(), found, wanted, strict=True):
        if ours.ndim == 2 and not obstacle_to_fp8_layer(ours):
            cosine = float(F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0))
            assert cosine > 0.95, (name, cosine)


def test_the_head_is_in_8_bits_where_the_vocabulary_allows_it(monkeypatch):
    from quintic.model import gpt

    asked = []
    original = gpt.softcap_cross_entropy
    monkeypatch.setattr(
        gpt,
        "softcap_cross_entropy",
        lambda *args, **options: asked.append(options["fp8"]) or original(*args, **options),
    )
    for vocab_size in (320, 330):
        built = model(vocab_size)
        built.use_fp8("tensorwise")
        built(*batch(vocab_size))
    assert asked[0] is not None
    assert asked[1] is None
    x, weight = torch.randn(5, 16), torch.randn(32, 16)
    scales = head_scales(x, weight)
    assert float(scales.x) == pytest.approx(float(x.abs().max()) / 448)
    assert float(scales.weight) == pytest.approx(float(weight.abs().max()) / 448)
    assert float(scales.grad) == pytest.approx(1 / 57344)


@pytest.mark.parametrize("recipe", RECIPES)
def test_queries_keys_and_values_as_one_product_are_in_8_bits_too(recipe, monkeypatch):
    attention, x = model().blocks[0].attention, torch.randn(2, 32, 128)
    alone = attention._project(x)
    monkeypatch.setattr(layers, "_fuses", lambda *tensors: True)
    exact = attention._project(x)
    for linear in (attention.query, attention.key, attention.value):
        linear.fp8 = recipe
    weight = torch.cat([linear.weight for linear in (attention.query, attention.key, attention.value)])
    assert torch.equal(torch.cat(attention._project(x), -1), dynamic_fp8_linear(x, weight, recipe))
    with torch.no_grad():
        assert all(map(torch.equal, attention._project(x), exact))
    attention.key.fp8 = None
    for found, expected in zip(attention._project(x), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.3)
    assert torch.equal(attention._project(x)[1], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tensor_cores_agree_with_the_emulation(recipe, dtype):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    x, grad = (torch.randn(size, device="cuda").to(dtype) for size in ((1000, 256), (1000, 384)))
    weight = torch.randn(384, 256, device="cuda")
    pairs = zip(run(x, weight, grad, recipe), run(x, weight, grad, recipe, kernels="torch"), strict=True)
    for found, expected in pairs:
        assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 1e-2
