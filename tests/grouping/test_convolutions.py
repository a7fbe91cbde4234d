"""Convolutions as matrices: which are, as which, and that the order of memory changes not a bit."""

import pytest
import torch
from torch import nn

import quintic
from quintic import Flatten, Matrix, Muon, Rule
from quintic.grouping.assign import assign


class Block(nn.Module):
    def __init__(self, width, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.conv2(self.bn1(self.conv1(x)).relu())


class Patches(nn.Module):
    """What a vision transformer begins with, as a convolution and as a linear layer."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.patch_embedding = nn.Linear(48, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))


class Residual(nn.Module):
    """A small ResNet, named as torchvision's and timm's are."""

    def __init__(self, channels=3, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, stride=2)
        self.layer1 = nn.Sequential(Block(8, groups), Block(8, groups))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.layer1(self.conv1(x)).mean((2, 3)))


def treatments(model, convolutions="muon", **options):
    groups = quintic.param_groups(model, convolutions=convolutions, **options)
    return {name: (g["algorithm"], g["view"]) for g in groups for name in g["param_names"]}


def reason(layer, name="weight", **arguments):
    (why,) = [d.why for d in assign(nn.ModuleDict({"layer": layer}), **arguments).values() if d.name == f"layer.{name}"]
    return why


ADAMW = ("adamw", Matrix())


def test_one_switch_makes_the_convolutions_of_a_residual_network_matrices():
    found = treatments(Residual())
    muon = {name: view for name, (algorithm, view) in found.items() if algorithm == "muon"}
    blocks = {f"layer1.{i}.conv{j}.weight": Flatten() for i in range(2) for j in (1, 2)}
    assert muon == {"conv1.weight": Flatten(), **blocks}
    assert found["fc.weight"] == ADAMW
    row = next(row for row in quintic.explain(Residual(), convolutions="muon").rows if row.name == "conv1.weight")
    assert (row.matrices, row.why) == (((1, 8, 27),), "convolution")


def test_without_it_the_residual_network_has_no_matrix_and_is_told_of_it():
    with pytest.warns(UserWarning, match=r"Muon gets no matrix of this Residual: .*convolutions='muon'"):
        found = treatments(Residual(), "adamw")
    assert set(found.values()) == {ADAMW}


def test_a_rule_comes_first():
    found = treatments(Residual(), rules=[Rule("conv1.weight", "adamw"), Rule("*.conv2.weight", "muon", Flatten(True))])
    assert found["conv1.weight"] == ADAMW
    assert found["layer1.0.conv2.weight"] == ("muon", Flatten(True))


@pytest.mark.parametrize(
    ("layer", "view", "matrices"),
    [
        (nn.Conv1d(6, 8, 5), Flatten(), (1, 8, 30)),
        (nn.Conv3d(6, 8, 2), Flatten(), (1, 8, 48)),
        (nn.Conv2d(1, 8, 3), Flatten(), (1, 8, 9)),  # pixels of one channel, and no group
        (nn.Conv2d(6, 8, 3, groups=2), Flatten(groups=2), (2, 4, 27)),
        (nn.ConvTranspose2d(6, 8, 3), Flatten(True), (1, 72, 6)),
        (nn.ConvTranspose1d(6, 8, 4, groups=2), Flatten(True, 2), (2, 16, 3)),
    ],
    ids=str,
)
def test_how_a_convolution_is_made_of_matrices(layer, view, matrices):
    assert treatments(nn.ModuleDict({"layer": layer}))["layer.weight"] == ("muon", view)
    assert view.shapes(layer.weight.shape) == (matrices,)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(6, 6, 3, groups=6), "depthwise convolution: each channel by itself"),
        (nn.Conv2d(6, 12, 3, groups=6), "depthwise convolution: each channel by itself"),
        (nn.ConvTranspose2d(6, 6, 3, groups=6), "depthwise convolution: each channel by itself"),
        (nn.Conv2d(6, 1, 3), "one output or one input"),
        (nn.Conv2d(1, 6, 1), "one output or one input"),
        (nn.Conv2d(6, 3, 3, groups=3), "one output or one input"),
    ],
    ids=str,
)
def test_what_is_no_matrix_stays_with_adamw(layer, why):
    assert reason(layer, convolutions="muon") == why


@pytest.mark.parametrize("name", ["classifier", "conv_out", "head", "logits"])
def test_a_convolution_may_be_the_head(name):
    model = nn.ModuleDict({"body": nn.Conv2d(4, 4, 3), name: nn.Conv2d(4, 7, 1)})
    assert treatments(model)[f"{name}.weight"] == ADAMW


# -------------------------------------------------------------------------------------- the order of memory


OPTIONS = [
    {},
    {"normalize": "neuron", "weight_decay": 0.3, "cautious": True},
    {"on_nonfinite": "skip", "adjust_lr": "unit_rms", "nesterov": False},
    {"offload": True},
    {"compute_dtype": torch.float32, "orthogonalizer": "newton_schulz", "normalize": "neuron"},
]


class Layer:
    """A way to make a layer."""

    def __init__(self, kind, *arguments, **options):
        self.kind, self.arguments, self.options = kind, arguments, options

    def __str__(self):
        return f"{self.kind.__name__}{self.arguments}{self.options}"

    def twins(self, dtype):
        first, second = (self.kind(*self.arguments, **self.options).to(dtype) for _ in range(2))
        second.load_state_dict(first.state_dict())
        second.weight.data = second.weight.data.movedim(1, -1).contiguous().movedim(-1, 1)
        assert not second.weight.is_contiguous()
        return first, second


LAYERS = [
    Layer(nn.Conv2d, 4, 8, 3),
    Layer(nn.Conv2d, 3, 40, 3),  # more outputs than inputs
    Layer(nn.Conv2d, 6, 8, 3, groups=2),
    Layer(nn.ConvTranspose2d, 6, 8, 3),
    Layer(nn.ConvTranspose2d, 6, 8, 3, groups=2),
    Layer(nn.Conv3d, 3, 8, 2),
    Layer(nn.Conv1d, 3, 8, 4),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, None), (torch.bfloat16, "mantissa")])
def test_channels_last_gives_the_bits_of_contiguous_weights(layer, options, dtype, master):
    pair = layer.twins(dtype)
    optimizers = [Muon(quintic.param_groups(one, convolutions="muon"), master=master, **options) for one in pair]
    storages = [one.weight.data_ptr() for one in pair]
    strides = [one.weight.stride() for one in pair]
    for number in range(3):
        gradients = torch.randn(pair[0].weight.shape, dtype=dtype)
        for index, one in enumerate(pair):
            one.bias.grad = torch.zeros_like(one.bias)
            # Autograd may give either order.
            one.weight.grad = gradients.clone() if number == 1 else torch.empty_like(one.weight).copy_(gradients)
            optimizers[index].step()
    assert torch.equal(pair[0].weight, pair[1].weight)
    states = [optimizer.state[one.weight] for optimizer, one in zip(optimizers, pair, strict=True)]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])
        if value.shape == pair[0].weight.shape:
            assert states[1][key].stride() == strides[1]
    assert [one.weight.data_ptr() for one in pair] == storages
    assert [one.weight.stride() for one in pair] == strides
    loaded = Muon(quintic.param_groups(pair[0], convolutions="muon"), master=master, **options)
    loaded.load_state_dict(optimizers[1].state_dict())
    assert all(torch.equal(loaded.state[pair[0].weight][key], value) for key, value in states[1].items())


def test_a_network_in_channels_last_trains_as_the_contiguous_one():
    models = [Residual(groups=2), Residual(groups=2).to(memory_format=torch.channels_last)]
    models[1].load_state_dict(models[0].state_dict())
    batch = torch.randn(4, 3, 9, 9)
    for model in models:
        optimizer = Muon(quintic.param_groups(model, convolutions="muon"), lr=0.1)
        model(batch).square().mean().backward()
        optimizer.step()
        assert quintic.verify(model, optimizer).ok
    weights = [dict(model.named_parameters())["layer1.0.conv1.weight"] for model in models]
    assert weights[1].is_contiguous(memory_format=torch.channels_last)
    assert not weights[1].is_contiguous()
    # The products of the convolutions themselves are rounded in another order.
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=5e-3)


@pytest.mark.parametrize("convolutions", ["adamw", "muon"])
def test_patch_embeddings_are_the_layers_that_they_are(convolutions):
    """As docs/how-to/vision.md says."""
    found = treatments(Patches(), convolutions)
    assert found["patch_embed.weight"] == (convolutions, Flatten() if convolutions == "muon" else Matrix())
    assert found["patch_embedding.weight"] == ("muon", Matrix())
    assert found["pos_embed"][0] == found["cls_token"][0] == "adamw"
    ruled = treatments(Patches(), convolutions, rules=[Rule("*patch_embed*.weight", "adamw")])
    assert {algorithm for algorithm, _ in ruled.values()} == {"adamw"}
