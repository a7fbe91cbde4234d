"""Messages in one order on all ranks, whatever else some of them have to do, and in the order that a user gives."""

import copy
from unittest import mock

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trajectories import fused_adamw_tolerance

import quintic
from quintic.optim.plan import sharded
from quintic.optim.state import shards
from quintic.optim.step import reduce_scatter

# Matrices of different shapes are different buckets.
ON_ALL_RANKS = {"first": (6, 4), "third": (6, 10), "fifth": (6, 6)}
ON_SOME_RANKS = {"second": (6, 5), "fourth": (4, 4)}


def gradient(name, shape, step, rank=0):
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)) + 77 * rank)
    return torch.randn(shape, generator=generator)


def check_partial_membership(rank, world_size):
    # Others than the last rank have two models, and buckets of both in turn.
    everybody = DeviceMesh(DEVICE, torch.arange(world_size))
    some = DeviceMesh(DEVICE, torch.arange(world_size - 1))
    shapes = ON_ALL_RANKS | ON_SOME_RANKS
    params, plain = {}, {}
    for name in ("first", "second", "third", "fourth", "fifth"):
        shape = shapes[name]
        mesh = everybody if name in ON_ALL_RANKS else some
        if rank < world_size - 1 or mesh is everybody:
            weight = gradient(name, shape, 99).to(DEVICE)
            plain[name] = nn.Parameter(weight.clone())
            params[name] = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
    options = {"lr": 0.1, "compute_dtype": torch.float32, "normalize": "neuron"}
    optimizer, alone = quintic.Muon(params.items(), **options), quintic.Muon(plain.items(), **options)
    assert sum(bucket.needs_comm for bucket in optimizer.plan()) == len(params)
    for step in range(3):
        for name, param in params.items():
            plain[name].grad = gradient(name, param.shape, step).to(DEVICE)
            param.grad = distribute_tensor(plain[name].grad, param.device_mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
        alone.step()
    for name, param in params.items():
        mesh = param.device_mesh
        expected = distribute_tensor(plain[name].detach(), mesh, [Shard(0)], src_data_rank=None)
        assert isinstance(param, DTensor)
        assert torch.equal(param.detach().to_local(), expected.to_local()), name


def test_ranks_with_other_meshes_besides_do_not_wait_for_each_other():
    run(check_partial_membership, 3, timeout=60)


# Two tables that divide evenly and not, a bank for each rank, small ones that travel together.
SHAPES = {
    "even": (64, 64),
    "uneven": (67, 64),
    "bank": (8, 5, 4),
    "odd bank": (9, 5, 4),
    "wide": (6, 11),
    "tall": (9, 4),
    "bias": (7,),
}
ADAMW = ("even", "uneven", "bias")


def steps(comms, rank, world_size, *, dtype=torch.float32, least_alone=2**20, missing=None, **options):
    """Return the weights after some steps with gradients that differ among ranks, and the optimizer."""
    params = {name: nn.Parameter(gradient(name, shape, 99).to(DEVICE, dtype)) for name, shape in SHAPES.items()}
    groups = [
        {"params": [(name, params[name]) for name in names], **rest}
        for names, rest in (
            (ADAMW, {"algorithm": "adamw"}),
            (("bank", "odd bank"), {"view": quintic.Experts()}),
            (("wide", "tall"), {}),
        )
    ]
    with (
        mock.patch.object(sharded, "_LEAST_DIRECT", least_alone),
        mock.patch.object(shards, "_LEAST_ENTRIES", 16),
        mock.patch.object(reduce_scatter, "_LEAST_DIRECT", least_alone),
    ):
        optimizer = quintic.Muon(groups, lr=0.1, adamw_lr=0.1, compute_dtype=torch.float32, comms=comms, **options)
        for step in range(4):
            for name, param in params.items():
                gradients = [gradient(name, param.shape, step, other).to(dtype) for other in range(world_size)]
                if missing == name and step == 2:
                    gradients[1] = None
                if comms == "none":
                    found = [torch.zeros(param.shape) if one is None else one for one in gradients]
                    total = found[0].float()
                    for other in found[1:]:
                        total = total + other
                    param.grad = (total / world_size).to(dtype).to(DEVICE)
                else:
                    param.grad = None if gradients[rank] is None else gradients[rank].to(DEVICE)
            optimizer.step()
    return {name: param.detach() for name, param in params.items()}, optimizer


def check_whole_parameters(rank, world_size, comms, dtype, missing):
    expected, _ = steps("none", rank, world_size, dtype=dtype, missing=missing)
    found, optimizer = steps(comms, rank, world_size, dtype=dtype, missing=missing, least_alone=100)
    if comms == "sharded":
        direct = {bucket.names[0] for bucket in optimizer.plan() if bucket.is_direct}
        assert direct >= {"even", "uneven", "bank", "odd bank"}  # also where its matrices do not divide evenly
    for name, value in expected.items():
        is_fused = name in ADAMW and dtype == torch.float32
        rtol, atol = fused_adamw_tolerance(4, lr=0.1) if is_fused else (0.0, 0.0)
        assert torch.allclose(found[name], value, rtol=rtol, atol=atol), name


@pytest.mark.parametrize(
    ("world_size", "comms", "dtype", "missing"),
    [
        (2, "sharded", torch.float32, None),
        (2, "replicated", torch.bfloat16, "even"),
        (3, "sharded", torch.bfloat16, "even"),
        (4, "sharded", torch.bfloat16, "bank"),
        (3, "replicated", torch.bfloat16, None),
        (4, "replicated", torch.float32, "even"),
    ],
    ids=str,
)
def test_large_parameters_travel_from_where_they_are(world_size, comms, dtype, missing):
    run(check_whole_parameters, world_size, comms, dtype, missing, timeout=60)


def check_orders(rank, world_size):
    expected, usual = steps("sharded", rank, world_size)
    names = ["tall", "odd bank", "bias"]
    found, optimizer = steps("sharded", rank, world_size, comm_order=names[::-1], compute_order=names)
    # deepcopy keeps the orders.
    for plan in (optimizer.plan(), copy.deepcopy(optimizer).plan()):
        buckets = [bucket for bucket in plan if bucket.needs_comm]
        assert [bucket.names[0] for bucket in buckets] != [bucket.names[0] for bucket in usual.plan()]
        worked = [next((name for name in names if name in bucket.names), None) for bucket in buckets]
        assert worked[:3] == names
        assert [worked[number] for number in dict.fromkeys(plan.schedule) if number is not None][:3] == names[::-1]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def check_different_orders(rank, world_size):
    steps("sharded", rank, world_size, compute_order=["tall", "bias"] if rank else ["bias", "tall"])


def test_messages_in_the_order_that_is_asked_for():
    run(check_orders, 2, timeout=60)


def test_different_orders_are_an_error():
    with pytest.raises(Exception, match=r"ranks 0 and 1 were given different .*compute=\('bias', 'tall'\)"):
        run(check_different_orders, 2, timeout=60)


def check_averaging_memory(rank, world_size, bound):
    _, optimizer = steps("replicated", rank, world_size, least_alone=100, max_workspace_bytes=bound)
    plan = optimizer.plan()
    largest = max(torch.Size(shape).numel() for shape in SHAPES.values())
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert 4 * largest <= plan.averaging_bytes <= (max(bound, 5 * 4 * largest) if bound else 2 * 4 * total)
    assert plan.peak_workspace_bytes >= plan.averaging_bytes


@pytest.mark.parametrize("bound", [None, 4000, 40_000])
def test_the_memory_of_averaging_is_in_the_plan(bound):
    run(check_averaging_memory, 2, bound, timeout=60)
