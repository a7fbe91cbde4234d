"""Models that are sharded, moved and converted after the optimizer was made: the numbers of one device, all the same.

The reference is an optimizer of a whole model on this rank, to which nothing happens.
"""

import copy

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import quintic

# PyTorch's fused AdamW, which has no cautious decay, rounds pieces otherwise.
OPTIONS = {
    "lr": 0.05,
    "adamw_lr": 0.05,
    "normalize": "neuron",
    "compute_dtype": torch.float32,
    "weight_decay": 0.1,
    "cautious": True,
}


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 10), nn.Linear(10, 7, bias=False), nn.LayerNorm(7), nn.Embedding(9, 7)]
    return nn.ModuleList(layers).to(DEVICE, dtype)


def optimizer_of(model, **options):
    return quintic.Muon(quintic.param_groups(model), **{**OPTIONS, **options})


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator).to(DEVICE, param.dtype)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        optimizer.step()


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same(model, optimizer, expected, reference, *, state=True):
    twins = dict(expected.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), twins[name]), name
        for key, value in reference.state[twins[name]].items() if state else ():
            assert torch.equal(whole(optimizer.state[param][key]), value), (name, key)


def shard(model, optimizer, mesh):
    """Shard a model as training libraries do that were given an optimizer of the whole one.

    They bring its state to the device, put placeholders into its groups, which know the address of their parameter, and
    look the sharded parameters up by it.
    """
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = torch.empty(1, dtype=param.dtype, device=param.device)
            group["params"][index].data_ptr = param.data_ptr()
    for module in model:
        fully_shard(module, mesh=mesh)
    sharded = {addresses[name]: param for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [sharded[param.data_ptr] for param in group["params"]]


def check_sharded_later(rank, world_size, before, dtype, options):
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    expected = model_of(dtype)
    reference = optimizer_of(expected, **{key: value for key, value in options.items() if key != "offload"})
    model = model_of(dtype)
    optimizer = optimizer_of(model, **options)
    if before is not None:
        optimizer.plan()
        take_steps(model, optimizer, 0, before)
    take_steps(expected, reference, 0, before or 0)
    shard(model, optimizer, mesh)
    # Of what no step has used nothing is left that was whole.
    assert before or not optimizer.__dict__["state"]
    last = (before or 0) + 3
    for each, its in ((model, optimizer), (expected, reference)):
        take_steps(each, its, before or 0, last)
    assert_same(model, optimizer, expected, reference, state="master" not in options)
    for param, twin in zip(model.parameters(), expected.parameters(), strict=True):
        assert optimizer.state[param].keys() == reference.state[twin].keys()
        for key, value in optimizer.state[param].items():
            if key not in ("step", "second_momentum_buffer"):
                assert value.to_local().shape == param.to_local().shape


@pytest.mark.parametrize("before", [None, 0, 2])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        pytest.param(torch.bfloat16, {"master": "mantissa"}, marks=pytest.mark.slow),
        (torch.bfloat16, {"master": "fp32", "offload": True}),
    ],
    ids=str,
)
def test_a_model_sharded_after_the_optimizer_was_made(before, dtype, options):
    run(check_sharded_later, 2, before, dtype, options, timeout=90)


def check_moved(rank, world_size, comms, way):
    model, expected = model_of(), model_of()
    optimizer, reference = optimizer_of(model, comms=comms), optimizer_of(expected)
    if way == "dtype":
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["master"] = "fp32"
    for step in range(4):
        if step == 2 and way == "dtype":
            for each in (model, expected):
                for param in each.parameters():
                    param.grad = None
                each.bfloat16()
        if way == "memory":
            for param in model.parameters():
                param.data = param.data.clone()
        if way == "objects" and step == 2:
            for number, module in enumerate(model):
                model[number] = copy.deepcopy(module)
            named = dict(model.named_parameters())
            for group in optimizer.param_groups:
                group["params"] = [named[name] for name in group["param_names"]]
        for each, its in ((model, optimizer), (expected, reference)):
            take_steps(each, its, step, step + 1)
    assert_same(model, optimizer, expected, reference, state=False)
    saved, other = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for key, state in saved.items():
        for name, value in state.items():
            assert torch.equal(value, other[key][name]), (key, name)


@pytest.mark.parametrize("way", ["memory", "dtype", "objects"])
@pytest.mark.parametrize("comms", ["averaged", "sharded", pytest.param("replicated", marks=pytest.mark.slow)])
def test_plain_parameters_that_ranks_share(comms, way):
    run(check_moved, 2, comms, way, timeout=90)


def check_local_tensors(rank, world_size):
    """FSDP2 gives its parameters other local tensors after `model.to` and after loading."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    model, expected = model_of(), model_of()
    for module in model:
        fully_shard(module, mesh=mesh)
    optimizer, reference = optimizer_of(model), optimizer_of(expected)
    for step in range(3):
        for param in model.parameters():
            param._local_tensor = param._local_tensor.clone()
        for each, its in ((model, optimizer), (expected, reference)):
            take_steps(each, its, step, step + 1)
    assert_same(model, optimizer, expected, reference)


def test_local_tensors_that_are_replaced():
    run(check_local_tensors, 2, timeout=60)


def check_layouts(rank, world_size):
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))

    def laid_out(value, *placements):
        return nn.Parameter(distribute_tensor(value.clone(), mesh, list(placements), src_data_rank=None))

    value = model_of()[0].weight.detach()
    copies = laid_out(value, Replicate())
    optimizer = quintic.Muon([("w", copies)], compute_dtype=torch.float32)
    expected = nn.Parameter(value.clone())
    reference = quintic.Muon([("w", expected)], compute_dtype=torch.float32)
    steps = iter(range(9))

    def both(param):
        optimizer.param_groups[0]["params"] = [param]
        generator = torch.Generator().manual_seed(next(steps))
        expected.grad = torch.randn(value.shape, generator=generator).to(DEVICE)
        param.grad = (
            distribute_tensor(expected.grad, mesh, param.placements, src_data_rank=None)
            if isinstance(param, DTensor)
            else expected.grad.clone()
        )
        optimizer.step()
        reference.step()
        assert torch.equal(whole(param), expected)

    both(copies)
    rows = laid_out(expected.detach(), Shard(0))
    both(rows)
    problems = []
    for param in (laid_out(expected.detach(), Shard(1)), nn.Parameter(expected.detach().clone())):
        optimizer.param_groups[0]["params"] = [param]
        for ask in (optimizer.step, optimizer.state_dict):
            with pytest.raises(ValueError, match="w: its momentum_buffer is a DTensor, and rank ") as caught:
                ask()
            problems.append(str(caught.value))
    both(rows)
    return problems


def test_state_moves_between_layouts_where_nothing_must_be_communicated():
    first, second = run(check_layouts, 2, timeout=60)
    assert first == second


def check_replaced_state(rank, world_size, layout):
    """Somebody reads state after a step, and puts other tensors there; the plan stays."""
    model, expected = model_of(), model_of()
    if layout == "fsdp2":
        for module in model:
            fully_shard(module, mesh=DeviceMesh(DEVICE, torch.arange(world_size)))
    optimizer = optimizer_of(model, comms="none" if layout == "fsdp2" else layout)
    reference = optimizer_of(expected)
    for step in range(3):
        for each, its in ((model, optimizer), (expected, reference)):
            take_steps(each, its, step, step + 1)
            for param in each.parameters():
                its.state[param] = {
                    key: value.clone() * (1 if key == "step" else 0.5) for key, value in its.state[param].items()
                }
    assert_same(model, optimizer, expected, reference, state=False)


@pytest.mark.parametrize("layout", ["averaged", "sharded", "fsdp2"])
def test_state_that_somebody_replaces(layout):
    run(check_replaced_state, 2, layout, timeout=60)
