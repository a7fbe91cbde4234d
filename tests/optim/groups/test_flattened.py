"""Parameters that other libraries have flattened or divided are refused, with the way out."""

import pytest
import torch
from torch import nn

import quintic
from quintic import Muon

WAY_OUT = r"fully_shard \(FSDP2\).*comms='sharded'"


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


class FullyShardedDataParallel(nn.Module):
    """The visible part of PyTorch's module; `tests/distributed/test_foreign_sharding.py` has the real one."""

    class Strategy:
        def __init__(self, name):
            self.name = name

    def __init__(self, module, strategy):
        super().__init__()
        self._fsdp_wrapped_module = module
        self.sharding_strategy = self.Strategy(strategy)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_a_model_in_fsdp1_is_refused(strategy):
    wrapped = nn.ModuleDict({"inner": FullyShardedDataParallel(model_of(), strategy)})
    for ask in (quintic.param_groups, quintic.explain):
        with pytest.raises(ValueError, match=rf"^inner is wrapped in FullyShardedDataParallel.*{WAY_OUT}"):
            ask(wrapped)
    with pytest.raises(ValueError, match=rf"^the model is wrapped in FullyShardedDataParallel.*{WAY_OUT}"):
        quintic.param_groups(FullyShardedDataParallel(model_of(), strategy))


def test_fsdp1_without_sharding_is_data_parallelism():
    groups = quintic.param_groups(FullyShardedDataParallel(model_of(), "NO_SHARD"))
    assert [len(group["params"]) for group in groups] == [2, 2]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("attribute", "value", "library"),
    [("_is_flat_param", True, "FullyShardedDataParallel"), ("ds_id", 0, "DeepSpeed ZeRO-3")],
)
def test_parameters_of_other_libraries_are_refused(attribute, value, library, algorithm):
    model = nn.Linear(2, 2, bias=False)
    setattr(model.weight, attribute, value)
    with pytest.raises(ValueError, match=rf"^weight is .*{library}.*{WAY_OUT}"):
        quintic.param_groups(model)
    with pytest.raises(ValueError, match=rf"^weight is .*{library}.*{WAY_OUT}"):
        Muon([{"params": [("weight", model.weight)], "algorithm": algorithm}])


def flat(params):
    return torch.cat([param.detach().float().flatten() for param in params]).requires_grad_()


@pytest.mark.parametrize("steps", [0, 1])
def test_flat_partitions_in_place_of_parameters(steps):
    """DeepSpeed's ZeRO-1 and 2 put one vector of a rank's entries into every group, and step with it at once."""
    model = model_of()
    optimizer = Muon(quintic.param_groups(model))
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    for group in optimizer.param_groups:
        group["params"] = [flat(group["params"])]
        group["params"][0].grad = torch.zeros_like(group["params"][0])
    with pytest.raises(ValueError, match=rf"^parameter group 0 \(0\.weight, \.\.\.\) has 1 params but 2.*{WAY_OUT}"):
        optimizer.step()


def test_a_flat_partition_of_a_group_of_one():
    model = nn.Linear(4, 4)
    optimizer = Muon(quintic.param_groups(model))
    optimizer.plan()
    group = optimizer.param_groups[0]
    group["params"] = [flat(group["params"])]
    with pytest.raises(ValueError, match=rf"^weight: this matrix is 1-D now, of shape \(16,\).*flattened.*{WAY_OUT}"):
        optimizer.plan()


def test_groups_that_are_filled_and_emptied_around_each_step():
    """DeepSpeed's ZeRO-3 steps one vector after the other, with empty groups beside it."""
    model = model_of()
    optimizer = Muon(quintic.param_groups(model))
    first, *others = optimizer.param_groups
    vector = flat(first["params"])
    vector.ds_id = "0_1"
    vector.grad = torch.zeros_like(vector)
    for group in others:
        group["params"] = []
    first["params"] = [vector]
    with pytest.raises(ValueError, match=rf"^parameter group 0 .* has 1 params but 2 param_names.*{WAY_OUT}"):
        optimizer.step()


@pytest.mark.parametrize("names", [["weight"], []])
def test_too_few_names_are_no_other_library_s_doing(names):
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    message = rf"has 2 params but {len(names)} param_names; give one name for each, in the same order, or params as .*$"
    with pytest.raises(ValueError, match=message) as caught:
        Muon([{"params": params, "param_names": names}])
    assert "ZeRO" not in str(caught.value)


@pytest.mark.parametrize("names", [None, "weight"])
def test_names_are_a_list(names):
    with pytest.raises(TypeError, match=rf"parameter group 0: param_names={names!r} must be a list .* each of the 1"):
        Muon([{"params": [nn.Parameter(torch.ones(4, 3))], "param_names": names}])


def test_groups_with_some_of_their_parameters():
    """ZeroRedundancyOptimizer gives each rank some parameters of a group, and all of its names."""
    groups = quintic.param_groups(model_of())
    groups[0]["params"] = groups[0]["params"][:1]
    message = rf"^parameter group 0 \(0\.weight, \.\.\.\) has 1 params but 2.*give one name.*{WAY_OUT}"
    with pytest.raises(ValueError, match=message):
        Muon(groups)
