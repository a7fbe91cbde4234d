"""`torch.amp.GradScaler` where the step averages gradients: the bits of unscaled ones, and overflows that all skip."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn

import quintic

OPTIONS = [{"comms": "replicated"}, {"comms": "sharded"}, {"comms": "sharded", "on_nonfinite": "raise"}]


def made(**options):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in ((5, 3), (4, 6), (7,))]
    params = [nn.Parameter(value) for value in values]
    groups = [
        {"params": [("first", params[0]), ("second", params[1])]},
        {"params": [("bias", params[2])], "algorithm": "adamw"},
    ]
    return params, quintic.Muon(groups, lr=0.1, adamw_lr=0.1, **options)


def loss_of(params, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return sum((p * torch.randn(p.shape, generator=generator).to(DEVICE)).sum() for p in params)


def train(rank, world_size, options, unscales):
    """Overflow in step 1 on rank 1 alone, which lowers its scale; return what tells whether ranks agree."""
    params, optimizer = made(**options)
    expected, alone = made(**{**options, "on_nonfinite": "skip"})
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        overflows = step == 1 and rank == 1
        scale = float("inf") if overflows else 1.0
        scaler.scale(loss_of(params, step, rank) * scale).backward()
        if unscales:
            scaler.unscale_(optimizer)
            norm = quintic.clip_grad_norm_(optimizer, 0.5, scope="all")
            assert bool(norm.isfinite()) == (step != 1)
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True)) == (step == 1), step
        assert optimizer.last_step().skipped == (step == 1)
        if step != 1:
            loss_of(expected, step, rank).backward()
            if unscales:
                quintic.clip_grad_norm_(alone, 0.5, scope="all")
            alone.step()
            alone.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True)), step
    return [p.detach().cpu() for p in params], scaler.get_scale()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_overflow_on_one_rank_is_skipped_on_all(options, unscales):
    (weights, scale), (others, lower) = run(train, 2, options, unscales)
    assert all(torch.equal(p, q) for p, q in zip(weights, others, strict=True))
    assert lower < scale


def train_float16(rank, world_size):
    param = nn.Parameter(torch.ones(4, 3, dtype=torch.float16, device=DEVICE))
    optimizer = quintic.Muon([("weight", param)], lr=0.1, comms="sharded")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    loss = scaler.scale(param.sum())
    if rank == 0:
        loss.backward()
    with pytest.raises(ValueError, match="weight: GradScaler cannot unscale float16 gradients"):
        scaler.step(optimizer)


def test_float16_gradients_are_refused_on_all_ranks():
    run(train_float16, 2)
