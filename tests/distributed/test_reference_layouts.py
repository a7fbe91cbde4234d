"""The step against the reference on every layout, and what `verify` says of a step that was broken on purpose."""

from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import wrappings
from harness import DEVICE, ON_GPUS, run
from models import give_gradients, gradient, held_by, local_of, rules
from test_invariance import LAYOUTS
from torch import nn
from torch.distributed.tensor import DTensor
from trajectories import CASES, Layout

import quintic
from quintic.optim.plan.bucket import Gathered
from quintic.optim.plan.exchange import Exchange
from quintic.optim.step import operands
from quintic.optim.step.runner import Runner

# Second moments everywhere; where it is hardest also masters that are two tensors, and directions in 16 bits.
MANTISSA = ("sharded-3", "fsdp2-3", "tp_fsdp2-2x2")

# The same pieces as on two ranks and on three, only smaller ones.
SMALLER = {"averaged-4", "sharded-4", "fsdp2-4", "fsdp2_last_dimension-4"}

BY_SIZE = defaultdict(list)
for title, layout in LAYOUTS.items():
    if title not in SMALLER:
        BY_SIZE[layout.world_size].append(title)


def laid_out(layout, case, **options):
    """Return a wrapped model, which entries this rank holds, and its optimizer."""
    model = layout.model(case.dtype)
    layout.lay_out(model)
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    optimizer = quintic.Muon(groups, lr=0.05, adamw_lr=0.01, comms=layout.comms, **case.options, **options)
    return model, held_by(layout.model, layout.lay_out), optimizer


def give(model, held, step, rank, without=(), own=False):
    named = model.named_parameters()
    found = {n: gradient(n, p.shape, p.dtype, step, rank if own else None) for n, p in named}
    give_gradients(model, {name: None if name in without else value for name, value in found.items()}, held)


def everything(optimizer):
    """Return copies of all that a step may change on this rank, in host memory, where every dtype can be compared."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = [on_host(t.detach()) for p in params for t in (p, *optimizer.state[p].values())]
    gradients = [None if p.grad is None else on_host(p.grad) for p in params]
    counts = [group["pending_steps"] for group in optimizer.param_groups], optimizer._step_history.num_steps
    return tensors, gradients, counts, str(optimizer.last_step())


def on_host(tensor):
    return local_of(tensor).to("cpu", copy=True)


def is_same(before, after):
    pairs = [*zip(before[0], after[0], strict=True), *zip(before[1], after[1], strict=True)]
    equal = [a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs]
    return all(equal) and before[2:] == after[2:]


def said_by_all(report):
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(report))
    assert len(set(said)) == 1
    return said[0]


def check_layouts(rank, world_size, titles):
    for title in titles:
        layout = LAYOUTS[title]
        # Not on the whole mesh under tensor and expert parallelism: there, some ranks could not know.
        gaps = () if title.startswith(("tp", "ep")) else ("stack.2.weight", "embedding.weight", "experts.up")
        for name in ("neuron", "element", "mantissa") if title in MANTISSA else ("neuron", "element"):
            model, held, optimizer = laid_out(layout, CASES[name])
            for step in range(2):
                where = f"{title}, {name}, step {step}: "
                without = gaps if step == 1 and rank == world_size - 1 else ()
                give(model, held, step, rank, without, own=layout.comms in ("replicated", "sharded"))
                if step == 0 and title not in MANTISSA:
                    optimizer.step()
                    continue
                before = everything(optimizer)
                with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor")):
                    report = quintic.verify(model, optimizer)
                assert report.ok, f"{where}{report}"
                assert report.num_parameters == len(held) - len(gaps) * (step == 1 and world_size == 1)
                # The reference has no kernels.
                is_exact = ON_GPUS or report.worst.tensor.startswith("exp_avg") or report.is_bitwise
                assert is_exact, f"{where}{report}"
                assert is_same(before, everything(optimizer)), f"{where}not restored"
                said_by_all(report)
                optimizer.step()


@pytest.mark.parametrize("world_size", sorted(BY_SIZE))
def test_step_and_reference_agree_on_every_layout(world_size):
    run(check_layouts, world_size, BY_SIZE[world_size], timeout=110)


def swap_rows(assemble):
    def swapped(self, received):
        units = assemble(self, received)
        if units.ndim == 3 and units.shape[1] > 1:
            units[:, [0, 1]] = units[:, [1, 0]]
        return units

    return swapped


def check_broken(rank, world_size):
    plain = CASES["plain"]
    model, held, optimizer = laid_out(LAYOUTS["fsdp2-3"], plain)
    give(model, held, 0, rank)
    before = everything(optimizer)

    # Rows of what rank 1 owns arrive in the wrong order.
    if rank == 1:
        with mock.patch.object(Exchange, "assemble", swap_rows(Exchange.assemble)):
            report = quintic.verify(model, optimizer)
    else:
        report = quintic.verify(model, optimizer)
    text = said_by_all(report)
    assert not report.ok
    assert text.startswith("THE STEP IS WRONG")
    owned = {unit.name for bucket in optimizer.plan() if isinstance(bucket, Gathered) for unit in bucket.units.local}
    of_rank_1 = [owned]
    dist.broadcast_object_list(of_rank_1, src=1)
    assert {wrong.name for wrong in report.wrong} <= of_rank_1[0]
    assert report.worst.tensor == "weight"
    assert report.worst.relative > 0.1
    assert is_same(before, everything(optimizer))
    assert quintic.verify(model, optimizer).ok

    # Rank 2 computes another learning-rate scale.
    optimizer._plans.drop_plan()
    right = operands.BucketCache.scales
    scaled = (lambda *arguments: 1.5 * right(*arguments)) if rank == 2 else right
    with mock.patch.object(operands.BucketCache, "scales", scaled):
        report = quintic.verify(model, optimizer)
    said_by_all(report)
    assert {difference.ranks for difference in report.wrong} == {(2,)}
    optimizer._plans.drop_plan()
    assert quintic.verify(model, optimizer).ok

    # Rank 0 was given another option, and so step and reference agree.
    if rank == 0:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    report = quintic.verify(model, optimizer)
    assert not report.ok
    assert not report.wrong
    assert "weight_decay=0.5" in said_by_all(report)


def test_a_broken_step_is_found_and_undone():
    run(check_broken, 3, timeout=100)


def check_random_gradients(rank, world_size):
    for title in ("averaged-3", "replicated-3", "sharded-3", "fsdp2-3"):
        model, _, optimizer = laid_out(LAYOUTS[title], CASES["neuron"])
        generator = torch.get_rng_state()
        report = quintic.verify(model, optimizer)
        assert report.ok, f"{title}: {report}"
        assert report.num_parameters == len(list(model.parameters()))
        assert report.worst is not None
        assert all(param.grad is None for param in model.parameters())
        assert torch.equal(generator, torch.get_rng_state())


def test_random_gradients_stand_in_where_there_are_none():
    run(check_random_gradients, 3, timeout=60)


def check_stale(rank, world_size):
    mesh = Layout((world_size,)).device_mesh()
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)).to(DEVICE)
    optimizer = quintic.Muon(quintic.param_groups(model))
    wrappings.data_parallel(model, mesh)
    report = quintic.verify(model, optimizer)
    assert not report.ok
    assert "0.weight: this parameter of the optimizer is none of the model's" in said_by_all(report)


def test_an_optimizer_made_before_the_model_was_sharded_is_found():
    run(check_stale, 2, timeout=60)


def check_replicas(rank, world_size, comms):
    """The step of each rank was right for its own weights, and nobody noticed that these were not the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)).to(DEVICE)
    optimizer = quintic.Muon(quintic.param_groups(model), comms=comms)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert quintic.verify(model, optimizer).ok
    with torch.no_grad():
        if rank == 1:
            model[0].weight[0, [0, 1]] = model[0].weight[0, [1, 0]].clone()
    report = quintic.verify(model, optimizer)
    assert any("0.weight: the copies of its weights on ranks 0, 2 and rank 1 differ" in p for p in report.problems)
    assert len(report.problems) == 1
    assert not report.ok
    said_by_all(report)


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_replicas_that_are_not_equal_are_found(comms):
    run(check_replicas, 3, comms, timeout=40)


def spoil(change):
    """Return `Runner.step` that changes something behind the step's back."""
    original = Runner.step

    def spoilt(self, *args, **options):
        done = original(self, *args, **options)
        with torch.no_grad():
            change()
        return done

    return mock.patch.object(Runner, "step", spoilt)


def check_spoilt(rank, world_size, comms, master):
    """What a rank holds alone is wrong there, and what everybody holds is wrong where it is."""
    model, held, optimizer = laid_out(LAYOUTS[f"{comms}-3"], CASES["fp32" if master else "neuron"])
    give(model, held, 0, rank, own=True)
    optimizer.step()
    give(model, held, 1, rank, own=True)
    before = everything(optimizer)
    weight, bias = model.stack[3].weight, model.norm.bias

    def owned(param, key):
        """Entries of a state, where this rank has any."""
        return optimizer.state[param][key].view(-1)[:3]

    def shift(values, by):
        values.copy_(values + by)

    spoils = {
        ("stack.3.weight", "weight"): lambda: shift(weight, 0.25) if rank == 2 else None,
        ("stack.3.weight", "momentum_buffer"): lambda: shift(owned(weight, "momentum_buffer"), 0.25),
        ("norm.bias", "weight"): lambda: shift(bias, 0.25) if rank == 1 else None,
        ("norm.bias", "exp_avg_sq"): lambda: shift(owned(bias, "exp_avg_sq"), 0.25),
        ("stack.3.weight", "second_momentum_buffer"): lambda: shift(owned(weight, "second_momentum_buffer"), 0.25),
    }
    if master:
        # The low bits alone: the weight itself is what it should be.
        low = {("stack.3.weight", "weight"): weight, ("norm.bias", "weight"): bias}
        spoils = {
            what: lambda param=param: owned(param, "master").view(torch.int32).bitwise_xor_(2**15)
            for what, param in low.items()
        }
    for (name, tensor), change in spoils.items():
        with spoil(change):
            report = quintic.verify(model, optimizer)
        text = said_by_all(report)
        assert {(wrong.name, wrong.tensor) for wrong in report.wrong} == {(name, tensor)}, text
        alone = {("stack.3.weight", "weight"): (2,), ("norm.bias", "weight"): (1,)}
        is_sharded = comms == "sharded" and tensor != "weight"
        if not master and (name, tensor) in alone:
            assert report.worst.ranks == alone[name, tensor], text
        else:
            assert len(report.worst.ranks) == (1 if is_sharded else world_size), text
        assert is_same(before, everything(optimizer))
    assert quintic.verify(model, optimizer).ok


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_wrong_numbers_are_found_where_they_are(comms, master):
    run(check_spoilt, 3, comms, master, timeout=60)


def check_reference_trajectory(rank, world_size, comms):
    """The reference alone, step after step, against steps."""
    # On GPUs the products of a step are rounded otherwise than the reference's, which bfloat16 would show.
    titles, rtol, atol = (("neuron", "multipliers"), 1e-4, 1e-5) if ON_GPUS else (("neuron", "mantissa"), 1e-5, 1e-6)
    for name in titles:
        models = [laid_out(LAYOUTS[f"{comms}-3"], CASES[name]) for _ in range(2)]
        for step in range(3):
            for number, (model, held, optimizer) in enumerate(models):
                without = ("stack.2.weight", "embedding.weight") if step == 1 and rank == world_size - 1 else ()
                give(model, held, step, rank, without, own=True)
                quintic.reference_step(optimizer) if number else optimizer.step()
        (_, _, first), (_, _, second) = models
        for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
        states = [optimizer.state_dict()["state"] for optimizer in (first, second)]
        torch.testing.assert_close(states[0], states[1], rtol=rtol, atol=atol)


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_the_reference_takes_the_same_steps(comms):
    run(check_reference_trajectory, 3, comms, timeout=60)
