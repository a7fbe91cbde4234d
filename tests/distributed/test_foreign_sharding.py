"""Wrappers that take matrices apart, for real: FullyShardedDataParallel (FSDP1) and ZeroRedundancyOptimizer."""

import warnings

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import quintic

WAY_OUT = r"fully_shard \(FSDP2\).*comms='sharded'"


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.LayerNorm(5)).to(DEVICE)


def wrapped(model, strategy, use_orig_params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated, and slow on a CPU
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            device_id=torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu"),
        )


def check_fsdp1(rank, world_size, use_orig_params, strategy):
    before = quintic.Muon(quintic.param_groups(model := model_of()))
    before.plan()
    fsdp = wrapped(model, strategy, use_orig_params)
    for ask in (quintic.param_groups, quintic.explain):
        with pytest.raises(ValueError, match=f"the model is wrapped in FullyShardedDataParallel.*{WAY_OUT}"):
            ask(fsdp)
    if use_orig_params:
        # The optimizer's own parameters are pieces now.
        with pytest.raises(ValueError, match=rf"0\.weight: this matrix is 1-D now.*{WAY_OUT}"):
            before.step()
        names = [name for name, param in fsdp.named_parameters() if param.numel()]
        with pytest.raises(ValueError, match=names[0]):
            quintic.Muon([(name, param) for name, param in fsdp.named_parameters() if param.numel()])
    else:
        for algorithm in ("muon", "adamw"):
            with pytest.raises(ValueError, match=rf"_flat_param is a vector of all parameters.*{WAY_OUT}"):
                quintic.Muon([{"params": fsdp.named_parameters(), "algorithm": algorithm}])


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=str)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_refused(use_orig_params, strategy):
    run(check_fsdp1, 2, use_orig_params, strategy, timeout=60)


def check_unsharded(rank, world_size):
    model, expected = wrapped(model_of(), ShardingStrategy.NO_SHARD, True), model_of()
    found = [quintic.Muon(quintic.param_groups(each), compute_dtype=torch.float32) for each in (model, expected)]
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(3):
        for each, optimizer in zip((model, expected), found, strict=True):
            each(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, twin in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), twin.detach())


def test_fsdp1_without_sharding_steps_as_one_device():
    run(check_unsharded, 2, timeout=60)


def check_zero(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model, expected = model_of(), model_of()
    with pytest.raises(ValueError, match=rf"parameter group 0 .* params but 2 param_names.*{WAY_OUT}"):
        ZeroRedundancyOptimizer(quintic.param_groups(model), optimizer_class=quintic.Muon, lr=0.1)
    # Without names whole parameters are divided among ranks, and nothing is wrong with that.
    matrices, twins = ([param for param in each.parameters() if param.ndim == 2] for each in (model, expected))
    options = {"lr": 0.1, "normalize": "neuron"}
    optimizer = ZeroRedundancyOptimizer(matrices, optimizer_class=quintic.Muon, **options)
    reference = quintic.Muon(twins, **options)
    for step in range(3):
        for param, twin in zip(matrices, twins, strict=True):
            gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            param.grad, twin.grad = gradient.to(DEVICE), gradient.to(DEVICE)
        optimizer.step()
        reference.step()
    assert all(torch.equal(param, twin) for param, twin in zip(matrices, twins, strict=True))


def test_zero_redundancy_optimizer_is_refused_with_groups_and_right_without():
    run(check_zero, 2, timeout=60)
