"""Frozen parameters on several ranks: no state, nothing sent, the same keys on all ranks, and state once they train.

The reference is one device on which the same parameters are frozen and unfrozen between the same steps.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wrappings
from harness import DEVICE, run
from models import Awkward, gathered, give_gradients, gradient, held_by, rules
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from trajectories import Layout, fused_adamw_tolerance

import quintic

# `mlp.3.weight` has one row, of which most ranks hold nothing.
FROZEN = (
    "embedding.weight",
    "mlp.0.weight",
    "mlp.3.weight",
    "mlp.3.bias",
    "experts.up",
    "stack.1.weight",
    "bank.weight",
)

# Steps with frozen parameters before saving, after loading, and without.
BEFORE, AFTER, UNFROZEN = 2, 1, 2

ONE = Layout((1,))
LAYOUTS = {
    # Sums of two equal gradients are divided exactly, of three they are not.
    "averaged": Layout((3,), comms="averaged"),
    "replicated": Layout((2,), comms="replicated"),
    "sharded": Layout((2,), comms="sharded"),
    "sparse": Layout((2,), comms="sharded_sparse"),
    "fsdp2": Layout((3,), wrappings.data_parallel),
    "hsdp": Layout((2, 2), wrappings.data_parallel),
    "tp": Layout((2,), wrappings.tensor_parallel),
}


def start(layout, normalize="neuron"):
    model = Awkward()
    layout.lay_out(model)
    groups = quintic.param_groups(model, rules=rules(model))
    for group in groups:
        if layout.comms == "sharded_sparse" and group["algorithm"] == "muon":
            group["comms"] = "sharded"  # the other is for tables
    options = {"normalize": normalize, "compute_dtype": torch.float32, "weight_decay": 0.1, "adamw_weight_decay": 0.1}
    optimizer = quintic.Muon([{"comms": layout.comms, **group} for group in groups], lr=0.05, adamw_lr=0.01, **options)
    return model, optimizer, held_by(Awkward, layout.lay_out)


def freeze(model, frozen):
    for name, param in model.named_parameters():
        if name in FROZEN:
            param.requires_grad_(not frozen)


def step(model, optimizer, held, first, last):
    for number in range(first, last):
        give_gradients(
            model,
            {
                name: gradient(name, param.shape, param.dtype, number) if param.requires_grad else None
                for name, param in model.named_parameters()
            },
            held,
        )
        optimizer.step()


def check_keys(model, optimizer, has_state=()):
    """Nothing of frozen parameters is there, all of the others is, and ranks agree."""
    stateful = {name for name, param in model.named_parameters() if optimizer.state.get(param)}
    names = {name for name, _ in model.named_parameters()}
    assert stateful == (names - set(FROZEN)) | set(has_state)
    saved = get_optimizer_state_dict(model, optimizer)["state"]
    assert saved.keys() == stateful
    keys = [None] * dist.get_world_size()
    dist.all_gather_object(keys, {name: sorted(tensors) for name, tensors in saved.items()})
    assert all(other == keys[0] for other in keys)


def save(rank, world_size, layout, ignores, folder):
    model, optimizer, held = start(layout)
    before = gathered(model, held, range(world_size))
    freeze(model, True)
    step(model, optimizer, held, 0, BEFORE)
    check_keys(model, optimizer)
    assert not {name for bucket in optimizer.plan() for name in bucket.names} & set(FROZEN)
    after = gathered(model, held, range(world_size))
    assert [name for name in before if torch.equal(before[name], after[name])] == [
        name for name in before if name in FROZEN or not before[name].numel()
    ]
    options = StateDictOptions(ignore_frozen_params=ignores)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=folder / "saved")


def load(rank, world_size, layout, ignores, folder):
    model, optimizer, held = start(layout)
    freeze(model, True)
    options = StateDictOptions(ignore_frozen_params=ignores)
    both = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(both, checkpoint_id=folder / "saved")
    set_model_state_dict(model, both["model"])
    set_optimizer_state_dict(model, optimizer, both["optimizer"], options=options)
    check_keys(model, optimizer)
    step(model, optimizer, held, BEFORE, BEFORE + AFTER)
    check_keys(model, optimizer)
    freeze(model, False)
    step(model, optimizer, held, BEFORE + AFTER, BEFORE + AFTER + UNFROZEN)
    check_keys(model, optimizer, FROZEN)
    found = gathered(model, held, range(world_size))
    if rank > 0:
        return
    model, optimizer, held = start(ONE)
    freeze(model, True)
    step(model, optimizer, held, 0, BEFORE + AFTER)
    freeze(model, False)
    step(model, optimizer, held, BEFORE + AFTER, BEFORE + AFTER + UNFROZEN)
    adamw = {name for g in optimizer.param_groups if g["algorithm"] == "adamw" for name in g["param_names"]}
    for name, weight in model.named_parameters():
        rtol, atol = fused_adamw_tolerance(BEFORE + AFTER + UNFROZEN, lr=0.01) if name in adamw else (0.0, 0.0)
        assert torch.allclose(found[name], weight.detach(), rtol=rtol, atol=atol), name


@pytest.mark.parametrize(
    ("saving", "loading", "ignores"),
    [
        ("sharded", "fsdp2", True),
        pytest.param("averaged", "sharded", False, marks=pytest.mark.slow),
        pytest.param("fsdp2", "hsdp", False, marks=pytest.mark.slow),
        pytest.param("hsdp", "replicated", True, marks=pytest.mark.slow),
        pytest.param("replicated", "tp", False, marks=pytest.mark.slow),
        pytest.param("tp", "sparse", True, marks=pytest.mark.slow),
        pytest.param("sparse", "averaged", True, marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_have_no_state_in_any_layout(saving, loading, ignores, tmp_path):
    saving, loading = LAYOUTS[saving], LAYOUTS[loading]
    run(save, saving.world_size, saving, ignores, tmp_path, timeout=60)
    run(load, loading.world_size, loading, ignores, tmp_path, timeout=60)


def frozen_after_steps(rank, world_size, layout):
    """State of steps before is kept, until a state without it is loaded; then it begins anew on all ranks."""
    model, optimizer, held = start(layout)
    step(model, optimizer, held, 0, 1)
    freeze(model, True)
    check_keys(model, optimizer, FROZEN)
    step(model, optimizer, held, 1, 2)
    check_keys(model, optimizer, FROZEN)
    options = StateDictOptions(ignore_frozen_params=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    check_keys(model, optimizer)
    step(model, optimizer, held, 2, 3)
    check_keys(model, optimizer)
    freeze(model, False)
    step(model, optimizer, held, 3, 4)
    check_keys(model, optimizer, FROZEN)
    counts = {name: optimizer.state[p].get("step") for name, p in model.named_parameters()}
    assert counts["embedding.weight"] == counts["mlp.3.bias"] == 1
    assert counts["mlp.0.bias"] == 4


@pytest.mark.parametrize("name", ["averaged", "sharded", "fsdp2"])
def test_state_of_parameters_that_are_frozen_later_is_kept(name):
    run(frozen_after_steps, LAYOUTS[name].world_size, LAYOUTS[name], timeout=60)


def loaded_when_frozen(rank, world_size, layout):
    """Loaded state of frozen parameters stays on all ranks, also where a rank's piece is empty, and goes on later.

    Momentum alone: second moments of neurons are whole on every rank.
    """
    model, optimizer, held = start(layout, None)
    step(model, optimizer, held, 0, 2)
    twin_model, twin, _ = start(layout, None)
    freeze(twin_model, True)
    set_model_state_dict(twin_model, get_model_state_dict(model))
    twin.load_state_dict(optimizer.state_dict())
    check_keys(twin_model, twin, FROZEN)
    for its_model, its_optimizer in ((model, optimizer), (twin_model, twin)):
        freeze(its_model, True)
        step(its_model, its_optimizer, held, 2, 3)
        check_keys(its_model, its_optimizer, FROZEN)
        freeze(its_model, False)
        step(its_model, its_optimizer, held, 3, 4)
    found, expected = (gathered(each, held, range(world_size)) for each in (twin_model, model))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["averaged", "sharded", "fsdp2"])
def test_state_that_frozen_parameters_load_is_kept(name):
    run(loaded_when_frozen, LAYOUTS[name].world_size, LAYOUTS[name], timeout=60)


def disagreeing(rank, world_size, comms):
    params = {name: nn.Parameter(torch.ones(4, 4, device=DEVICE)) for name in ("first", "second")}
    params["second"].requires_grad_(rank != 1)
    optimizer = quintic.Muon(params.items(), comms=comms)
    params["first"].grad = torch.ones_like(params["first"])
    with pytest.raises(RuntimeError, match=r"second of shape .*rank 1 has second .* frozen \(requires_grad=False\)"):
        optimizer.step()
    assert torch.equal(params["first"], torch.ones_like(params["first"]))


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_parameters_that_only_some_ranks_freeze_are_named(comms):
    run(disagreeing, 2, comms, timeout=30)


def given_gradients(rank, world_size, comms):
    """Gradients that were made without autograd, as evolution strategies do: nothing requires any."""
    params = {name: nn.Parameter(torch.ones(4, 4, device=DEVICE), requires_grad=False) for name in ("first", "second")}
    optimizer = quintic.Muon(params.items(), comms=comms, lr=0.1)
    optimizer.step()
    assert not optimizer.state
    params["first"].grad = torch.eye(4, device=DEVICE) * (1 + rank)
    optimizer.step()
    return {name: param.cpu() for name, param in params.items()}, len(optimizer.state)


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_frozen_parameter_with_a_gradient_is_stepped(comms):
    """Update I with the learning rate: the polar factor of the mean, 1.5 times the identity, is the identity."""
    for params, number in run(given_gradients, 2, comms, timeout=30):
        torch.testing.assert_close(params["first"], torch.ones(4, 4) - 0.1 * torch.eye(4), rtol=0, atol=0.02)
        assert torch.equal(params["second"], torch.ones(4, 4))
        assert number == 1


def clipped(rank, world_size, layout):
    """The norm before clipping, by step: first with frozen parameters, then without."""
    model, optimizer, held = start(layout)
    norms = []
    for number, frozen in enumerate((True, True, False)):
        freeze(model, frozen)
        give_gradients(
            model,
            {
                name: gradient(name, param.shape, param.dtype, number) if param.requires_grad else None
                for name, param in model.named_parameters()
            },
            held,
        )
        norms.append(float(quintic.clip_grad_norm_(optimizer, 0.5, scope="all")))
        optimizer.step()
    return norms


@pytest.mark.parametrize("name", ["averaged", "replicated", "sharded", "sparse", "fsdp2"])
def test_frozen_parameters_do_not_count_in_the_norm(name):
    expected = run(clipped, 1, ONE, timeout=30)[0]
    for norms in run(clipped, LAYOUTS[name].world_size, LAYOUTS[name], timeout=60):
        assert norms == pytest.approx(expected, rel=1e-5)
    assert expected[2] > expected[1] + 1
