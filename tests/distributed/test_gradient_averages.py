"""`comms="replicated"`: several dtypes in one group, missing gradients, and what a step that fails leaves behind."""

from unittest import mock

import pytest
import torch
from collectives import logged
from harness import DEVICE, run
from newer import needs_torch
from torch import nn

import quintic
from quintic.optim.layout.packing import Packing

DTYPES = {"first": torch.float32, "second": torch.bfloat16, "third": torch.float32, "fourth": torch.bfloat16}


def made():
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(5, 3, generator=generator).to(dtype) for name, dtype in DTYPES.items()}
    return {name: nn.Parameter(value.to(DEVICE)) for name, value in values.items()}


def gradient(name, step, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + len(name))
    return torch.randn(5, 3, generator=generator).to(DEVICE, DTYPES[name])


def optimizer_of(params, **options):
    group = {"params": list(params.items()), "algorithm": "adamw"}
    return quintic.Muon([group], lr=0.1, adamw_lr=0.1, **options)


def step_mixed(rank, world_size, bound):
    params, expected = made(), made()
    optimizer = optimizer_of(params, comms="replicated", max_workspace_bytes=bound)
    alone = optimizer_of(expected, max_workspace_bytes=bound)
    for step in range(3):
        for name, param in params.items():
            if not (name == "third" and rank == step == 1):
                param.grad = gradient(name, step, rank)
            own = [gradient(name, step, other).float() for other in range(world_size)]
            if name == "third" and step == 1:
                own[1].zero_()
            total = sum(own[1:], own[0])
            expected[name].grad = (total / torch.full((), world_size, device=DEVICE)).to(param.dtype)
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        for name, param in params.items():
            assert torch.equal(param, expected[name]), (step, name)


@pytest.mark.parametrize("bound", [2**31, 64])
def test_dtypes_of_one_group_are_averaged_each_for_itself(bound):
    run(step_mixed, 3, bound)


def fail(rank, world_size):
    """Return the parameters that have a gradient after a step that could not be made."""
    params = made()
    optimizer = optimizer_of(params, comms="replicated")
    for name, param in params.items():
        if name != "second" or rank:
            param.grad = gradient(name, 0, rank)
    params["fourth"].grad = params["fourth"].grad.to_sparse()
    with pytest.raises(ValueError, match="fourth: sparse gradients are not supported"):
        optimizer.step()
    return [name for name, param in params.items() if param.grad is not None]


def test_gradients_that_a_step_lent_are_gone_after_an_error():
    first, second = run(fail, 2)
    assert first == ["first", "third", "fourth"]
    assert second == list(DTYPES)


def step_stacks(rank, world_size):
    """Stacks of one bucket, some without a gradient: the others' matrices are stepped, and no others."""
    shape, missing = (3, 4, 2), (0, 3)
    stacks, expected = ([nn.Parameter(torch.ones(shape, device=DEVICE)) for _ in range(5)] for _ in range(2))
    groups = [[{"params": params, "view": quintic.Experts()}] for params in (stacks, expected)]
    optimizer = quintic.Muon(groups[0], compute_dtype=torch.float32, comms="replicated")
    alone = quintic.Muon(groups[1], compute_dtype=torch.float32)
    for number in set(range(5)) - {*missing}:
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(shape, generator=generator).to(DEVICE)
        stacks[number].grad, expected[number].grad = whole, whole.clone()
    optimizer.step()
    alone.step()
    for number, (one, other) in enumerate(zip(stacks, expected, strict=True)):
        assert torch.equal(one, other), number
        assert torch.equal(one, torch.ones_like(one)) == (number in missing)


def test_stacks_without_a_gradient_stay_and_the_others_are_stepped():
    run(step_stacks, 2)


def step_little(rank, world_size, comms):
    """So few entries that some ranks own none of them."""
    weights = {"bias": torch.arange(7.0), "matrix": torch.arange(6.0).view(2, 3)}
    found = {}
    for name, weight in weights.items():
        param = nn.Parameter(weight.to(DEVICE))
        group = {"params": [(name, param)], "algorithm": "muon" if param.ndim == 2 else "adamw"}
        optimizer = quintic.Muon(
            [group], lr=0.1, adamw_lr=0.1, compute_dtype=torch.float64, kernels="torch", comms=comms
        )
        for step in range(2):
            param.grad = torch.full_like(param, step + rank).cumsum(0)
            optimizer.step()
        assert name in str(optimizer.plan())
        alone = nn.Parameter(weight.to(DEVICE))
        group = {**group, "params": [(name, alone)]}
        optimizer = quintic.Muon([group], lr=0.1, adamw_lr=0.1, compute_dtype=torch.float64, kernels="torch")
        for step in range(2):
            alone.grad = torch.full_like(alone, step + (world_size - 1) / 2).cumsum(0)
            optimizer.step()
        found[name] = torch.allclose(param, alone, rtol=1e-6, atol=1e-7)
    return found


@pytest.mark.parametrize("comms", ["sharded", "replicated"])
def test_ranks_that_own_nothing(comms):
    assert run(step_little, 3, comms, timeout=60) == [{"bias": True, "matrix": True}] * 3


def count_copies(rank, world_size, numel):
    """Return (entries packed, entries unpacked) in a step, and the parameter's gradient after it."""
    param = nn.Parameter(torch.zeros(numel, device=DEVICE))
    optimizer = optimizer_of({"vector": param}, comms="replicated")
    param.grad = (torch.arange(numel) + 2.0 * rank).to(DEVICE)
    counts = {"pack": 0, "unpack": 0}
    pack, unpack = Packing.pack, Packing.unpack

    def counting(name, original):
        def copy(packing, *args):
            counts[name] += sum(packing._sizes)
            return original(packing, *args)

        return copy

    with (
        mock.patch.object(Packing, "pack", counting("pack", pack)),
        mock.patch.object(Packing, "unpack", counting("unpack", unpack)),
    ):
        optimizer.step()
    return counts, param.grad.tolist()


@pytest.mark.parametrize("numel", [256, 200, 50])
def test_entries_are_packed_once_for_their_owner_and_put_back_once(numel):
    """Whether ranks own equally many entries, the last one fewer than the first, or none."""
    for counts, gradient in run(count_copies, 2, numel):
        assert counts == {"pack": numel, "unpack": numel}
        assert gradient == [place + 1.0 for place in range(numel)]


def step_wide_gradients(rank, world_size, comms, clips):
    """bfloat16 parameters with float32 gradients, which one rank lacks: the masters of one device."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in ((7, 5), (9,))]
    params, expected = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = [
        quintic.Muon(
            [{"params": [("matrix", one[0])]}, {"params": [("vector", one[1])], "algorithm": "adamw"}],
            lr=0.1,
            adamw_lr=0.1,
            master="fp32",
            comms=kind,
        )
        for one, kind in ((params, comms), (expected, "none"))
    ]
    for param in (*params, *expected):
        param.grad_dtype = torch.float32
    for _ in range(2):
        for param, alone in zip(params, expected, strict=True):
            own = [torch.randn(param.shape, generator=generator).to(DEVICE) for _ in range(world_size)]
            own[1].zero_()
            param.grad = None if rank == 1 else own[rank]
            alone.grad = sum(own[1:], own[0]) / torch.full((), world_size, device=DEVICE)
        for optimizer in optimizers:
            if clips:
                quintic.clip_grad_norm_(optimizer, 0.5, scope="all")
            optimizer.step()
    for param, alone in zip(params, expected, strict=True):
        assert torch.equal(param, alone), tuple(param.shape)


@needs_torch("2.10", "a gradient of another dtype")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("comms", ["replicated"])
def test_gradients_wider_than_their_parameters_may_be_missing(comms, clips):
    """Zeros of the parameter's dtype stood for a missing gradient: ranks sent messages of different lengths."""
    run(step_wide_gradients, 2, comms, clips, timeout=30)


def count_messages(rank, world_size, clips):
    """Four groups, one of them with less memory and one that waits; return the kinds of messages of each step."""
    params = {name: nn.Parameter(torch.ones(6, 4, device=DEVICE)) for name in "abcd"}
    more = {"c": {"max_workspace_bytes": 600}, "d": {"step_every": 2}}
    groups = [{"params": [(name, param)], **more.get(name, {})} for name, param in params.items()]
    optimizer = quintic.Muon(groups, lr=0.1, comms="replicated")
    found = []
    for step in range(3):
        for number, (name, param) in enumerate(params.items()):
            if not (name == "b" and rank == step == 1):
                param.grad = torch.full_like(param, 1.0 + rank + number)
        calls = []
        with logged(calls.append):
            if clips:
                quintic.clip_grad_norm_(optimizer, 1e9, scope="all")
            optimizer.step()
        for number, (name, param) in enumerate(params.items()):
            if name == "d" and step != 1:
                continue
            sums = world_size * (world_size + 1) / 2 + world_size * number
            missing = 2.0 + number if name == "b" and step == 1 else 0.0
            if param.grad is not None:
                torch.testing.assert_close(param.grad, torch.full_like(param, (sums - missing) / world_size))
            assert (param.grad is None) == (name == "b" and rank == step == 1)
        kinds = [call.kind for call in calls]
        found.append((kinds.count("all_to_all_single"), kinds.count("all_gather")))
        optimizer.zero_grad()
    return found[1:]


@pytest.mark.parametrize("clips", [False, True])
def test_groups_of_the_same_ranks_travel_together(clips):
    for found in run(count_messages, 3, clips):
        # What may not be joined: the group whose memory is bounded.
        assert found == [(2, 2), (2, 2)]
