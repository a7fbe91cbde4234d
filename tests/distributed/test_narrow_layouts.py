"""`state_dtype="bf16"` on several ranks: not only the weights, the state too has the bits of one device."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import wrappings
from harness import run
from models import give_gradients, gradient, held_by, mean_gradient, rules
from torch.distributed.tensor import DTensor
from trajectories import CASES, Layout

import quintic

LAYOUTS = {
    "averaged-2": Layout((2,), comms="averaged"),
    "replicated-2": Layout((2,), comms="replicated"),
    "sharded-2": Layout((2,), comms="sharded"),
    "sharded-3": Layout((3,), comms="sharded"),
    "fsdp2-2": Layout((2,), wrappings.data_parallel),
    "fsdp2-3": Layout((3,), wrappings.data_parallel),
    "tp-2": Layout((2,), wrappings.tensor_parallel),
    "hsdp-2x2": Layout((2, 2), wrappings.data_parallel),
}


def optimizer_of(model, case, **options):
    groups = quintic.param_groups(model, rules=rules(model))
    return quintic.Muon(groups, lr=0.05, adamw_lr=0.01, **{**case.options, **options})


def take_steps(model, optimizer, layout, steps, rank=None, held=None):
    """Step with the gradients of a rank, or, for None, with what all ranks' come to."""
    averages = layout.comms in ("replicated", "sharded")
    for step in steps:
        found = {}
        for name, param in model.named_parameters():
            if averages and rank is None:
                found[name] = mean_gradient(name, param.shape, param.dtype, step, range(layout.world_size))
            else:
                found[name] = gradient(name, param.shape, param.dtype, step, rank if averages else None)
        give_gradients(model, found, held)
        optimizer.step()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def saved_state(optimizer):
    """Return the state as it is saved, whole, by names; all ranks must call it."""
    saved = optimizer.state_dict()
    groups = saved["param_groups"]
    names = {key: n for g in groups for key, n in zip(g["params"], g["param_names"], strict=True)}
    return {(names[key], what): whole(v) for key, state in saved["state"].items() for what, v in state.items()}


def one_device(rank, world_size, layout, title):
    """Return the state that is saved on one device after all steps."""
    model = layout.model(CASES[title].dtype)
    optimizer = optimizer_of(model, CASES[title])
    take_steps(model, optimizer, layout, range(4))
    return saved_state(optimizer)


def check_state(rank, world_size, layout, title, offload, expected):
    case = CASES[title]
    held = held_by(lambda: layout.model(case.dtype), layout.lay_out)
    model = layout.model(case.dtype)
    layout.lay_out(model)
    optimizer = optimizer_of(model, case, comms=layout.comms, offload=offload)
    take_steps(model, optimizer, layout, range(2), rank, held)
    # What a checkpoint makes of it is the same, too.
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = optimizer_of(model, case, comms=layout.comms, offload=offload)
    optimizer.load_state_dict(saved)
    take_steps(model, optimizer, layout, range(2, 4), rank, held)
    found = saved_state(optimizer)
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        assert value.dtype == found[place].dtype or place[1] == "mantissa", place
        assert torch.equal(found[place].to(value), value), place
    dtypes = {found[place].dtype for place in found if place[1] in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "title",
    ["narrow_mantissa", *(pytest.param(title, marks=pytest.mark.slow) for title in ("narrow", "narrow_element"))],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_state_has_the_bits_of_one_device(name, title, offload):
    layout = LAYOUTS[name]
    [expected] = run(one_device, 1, layout, title)
    run(check_state, layout.world_size, layout, title, offload, expected, timeout=100)


def check_bytes(rank, world_size, layout):
    """Return the bytes that this rank has of momentum and moments, without and with the option."""
    sizes = []
    for state_dtype in (None, "bf16"):
        model = layout.model()
        layout.lay_out(model)
        optimizer = quintic.Muon(
            quintic.param_groups(model, rules=rules(model)), comms=layout.comms, state_dtype=state_dtype
        )
        states = optimizer.state.values()
        found = [value for state in states for key, value in state.items() if key not in ("step", "master")]
        sizes.append(sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in found))
    return sizes


@pytest.mark.parametrize("name", ["sharded-3", "fsdp2-2", "tp-2"])
def test_every_rank_has_half_the_bytes(name):
    for wide, narrow in run(check_bytes, LAYOUTS[name].world_size, LAYOUTS[name]):
        assert narrow * 2 == wide > 0


def check_loaded_otherwise(rank, world_size, folder, name, before, after):
    """Save state of one dtype with torch.distributed.checkpoint, and load it where the option is another."""
    layout = LAYOUTS[name]
    found = []
    for state_dtype in (before, after):
        model = layout.model()
        layout.lay_out(model)
        optimizer = quintic.Muon(
            quintic.param_groups(model, rules=rules(model)), comms=layout.comms, state_dtype=state_dtype
        )
        held = held_by(layout.model, layout.lay_out)
        saved = optimizer.state_dict()
        if state_dtype == before and not found:
            take_steps(model, optimizer, layout, range(2), rank, held)
            dcp.save(optimizer.state_dict(), checkpoint_id=folder)
        else:
            dcp.load(saved, checkpoint_id=folder)
            optimizer.load_state_dict(saved)
        found.append(saved_state(optimizer))
    first, second = found
    for place, value in first.items():
        assert torch.equal(second[place], value.to(second[place].dtype)), place
    dtypes = {second[place].dtype for place in second if place[1] in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    assert dtypes == {torch.bfloat16 if after else torch.float32}


@pytest.mark.parametrize(
    ("before", "after"), [(None, "bf16"), pytest.param("bf16", None, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", ["sharded-2", pytest.param("fsdp2-2", marks=pytest.mark.slow)])
def test_checkpoints_go_from_one_dtype_to_the_other(name, before, after, tmp_path):
    run(check_loaded_otherwise, 2, str(tmp_path), name, before, after, timeout=100)
