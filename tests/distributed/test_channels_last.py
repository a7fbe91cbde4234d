"""Convolutions in channels_last on several ranks: the bits of contiguous ones on one device."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn

import quintic
from quintic import Muon

OPTIONS = [{}, {"normalize": "neuron", "weight_decay": 0.1, "on_nonfinite": "skip", "master": "mantissa"}]


def convolutions(*, channels_last):
    torch.manual_seed(3)
    model = nn.ModuleList(
        [nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3, groups=2), nn.ConvTranspose2d(8, 3, 2), nn.Conv3d(3, 7, 2)]
    ).bfloat16()
    if channels_last:
        for layer in model:
            layer.weight.data = layer.weight.data.movedim(1, -1).contiguous().movedim(-1, 1)
    return model.to(DEVICE)


def gradients(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(param.shape, generator=generator).to(param.dtype) for param in model.parameters()]


def trained(model, comms, gradients_of, options):
    optimizer = Muon(quintic.param_groups(model, convolutions="muon"), lr=0.1, adamw_lr=0.1, comms=comms, **options)
    for step in range(2):
        for param, gradient in zip(model.parameters(), gradients_of(step), strict=True):
            param.grad = torch.empty_like(param).copy_(gradient)
        optimizer.step()
    return [param.detach().cpu().contiguous() for param in model.parameters()]


def on_ranks(rank, world_size, comms, options):
    model = convolutions(channels_last=True)
    assert not any(layer.weight.is_contiguous() for layer in model)
    strides = [param.stride() for param in model.parameters()]
    # Under "averaged" all ranks have the same gradients.
    seed = 0 if comms == "averaged" else rank
    found = trained(model, comms, lambda step: gradients(model, step, seed), options)
    assert [param.stride() for param in model.parameters()] == strides
    return found


@pytest.mark.parametrize(
    ("comms", "options"),
    [
        ("averaged", OPTIONS[0]),
        ("replicated", OPTIONS[1]),
        ("sharded", OPTIONS[1]),
        pytest.param("averaged", OPTIONS[1], marks=pytest.mark.slow),
        pytest.param("replicated", OPTIONS[0], marks=pytest.mark.slow),
        pytest.param("sharded", OPTIONS[0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_channels_last_on_several_ranks(comms, options):
    ranks = 3

    def mean(step):
        if comms == "averaged":
            return gradients(model, step, 0)
        per_rank = zip(*(gradients(model, step, rank) for rank in range(ranks)), strict=True)
        # Sums in the order of the ranks, rounded once.
        return [torch.stack(each).float().sum(0).div(ranks).to(each[0].dtype) for each in per_rank]

    model = convolutions(channels_last=False)
    expected = trained(model, "none", mean, options)
    for found in run(on_ranks, ranks, comms, options):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
