"""The step against the reference on every layout, and what `verify` says of a step that was broken on purpose."""

from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import wrappings
from harness import run
from models import Awkward, give_gradients, gradient, local_of, numbered, positions, rules
from test_invariance import LAYOUTS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from trajectories import CASES

import quintic
from quintic.optim import travel_step
from quintic.optim.exchange import Exchange

# Second moments everywhere; where it is hardest also masters that are two tensors, and directions in 16 bits.
MANTISSA = ("averaged-3", "fsdp2-3", "tp_fsdp2-2x2")

BY_SIZE = defaultdict(list)
for title, layout in LAYOUTS.items():
    if layout.comms != "sharded":  # its state is divided among the ranks, and the reference says that it cannot
        BY_SIZE[layout.world_size].append(title)


def laid_out(layout, case, **options):
    """Return a wrapped model, which entries this rank holds, and its optimizer."""
    world_size = dist.get_world_size()
    names = ("outer", "inner")[-len(layout.mesh) :]
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(layout.mesh), mesh_dim_names=names)
    extras = layout.wrap is wrappings.plain
    twin, model = numbered(Awkward(extras)), Awkward(extras, case.dtype)
    layout.wrap(twin, mesh)
    layout.wrap(model, mesh)
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    optimizer = quintic.Muon(groups, lr=0.05, adamw_lr=0.01, comms=layout.comms, **case.options, **options)
    return model, positions(twin), optimizer


def give(model, held, step, rank, without=(), own=False):
    named = model.named_parameters()
    found = {n: gradient(n, p.shape, p.dtype, step, rank if own else None) for n, p in named}
    give_gradients(model, {name: None if name in without else value for name, value in found.items()}, held)


def everything(optimizer):
    """Return copies of all that a step may change on this rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = [local_of(t.detach()).clone() for p in params for t in (p, *optimizer.state[p].values())]
    gradients = [None if p.grad is None else local_of(p.grad).clone() for p in params]
    counts = [group["pending_steps"] for group in optimizer.param_groups], optimizer._num_steps
    return tensors, gradients, counts, str(optimizer.last_step())


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
        for name in ("neuron", "mantissa") if title in MANTISSA else ("neuron",):
            model, held, optimizer = laid_out(layout, CASES[name])
            for step in range(2):
                where = f"{title}, {name}, step {step}: "
                without = gaps if step == 1 and rank == world_size - 1 else ()
                give(model, held, step, rank, without, own=layout.comms == "replicated")
                before = everything(optimizer)
                with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor")):
                    report = quintic.verify(model, optimizer)
                assert report.ok, f"{where}{report}"
                assert report.num_parameters == len(held) - len(gaps) * (step == 1 and world_size == 1)
                assert report.worst.tensor.startswith("exp_avg") or report.is_bitwise, f"{where}{report}"
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
    owned = {unit.name for bucket in optimizer.plan() if bucket.travel for unit in bucket.travel.owned}
    of_rank_1 = [owned]
    dist.broadcast_object_list(of_rank_1, src=1)
    assert {wrong.name for wrong in report.wrong} <= of_rank_1[0]
    assert report.worst.tensor == "weight"
    assert report.worst.relative > 0.1
    assert is_same(before, everything(optimizer))
    assert quintic.verify(model, optimizer).ok

    # Rank 2 computes another learning-rate scale.
    optimizer._forget_plan()
    scale = mock.patch.object(travel_step, "lr_scale_factor", return_value=1.5) if rank == 2 else mock.MagicMock()
    with scale:
        report = quintic.verify(model, optimizer)
    said_by_all(report)
    assert {difference.ranks for difference in report.wrong} == {(2,)}
    optimizer._forget_plan()
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
    for title in ("averaged-3", "fsdp2-3"):
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
    mesh = DeviceMesh("cpu", torch.arange(world_size))
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    optimizer = quintic.Muon(quintic.param_groups(model))
    wrappings.data_parallel(model, mesh)
    report = quintic.verify(model, optimizer)
    assert not report.ok
    assert "0.weight: this parameter of the optimizer is none of the model's" in said_by_all(report)


def test_an_optimizer_made_before_the_model_was_sharded_is_found():
    run(check_stale, 2, timeout=60)


def check_sharded(rank, world_size):
    model, held, optimizer = laid_out(LAYOUTS["sharded-2"], CASES["plain"])
    give(model, held, 0, rank)
    before = everything(optimizer)
    with pytest.raises(ValueError, match="comms='sharded'"):
        quintic.verify(model, optimizer)
    assert is_same(before, everything(optimizer))


def test_divided_state_has_no_reference_and_says_so():
    run(check_sharded, 2, timeout=60)
