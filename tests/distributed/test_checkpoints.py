"""State saved in one layout goes on in any other: the same numbers as without an interruption.

The reference is one device that never stopped. What is whole or in pieces is judged by the positions that PyTorch gave
each rank (`models.positions`), not by what Quintic or DTensor think.
"""

import copy
import functools
import itertools
import warnings
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wrappings
from harness import run
from models import Awkward, gathered, give_gradients, gradient, held_by, local_of, rules
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from trajectories import CASES, EIGHTS, TAKES_ALL, Layout, fused_adamw_tolerance

import quintic

# Both have NorMuon's second moments; the others' state is a part of theirs, except for "fp32".
RULES = ("neuron", "mantissa")
ALL = ("neuron", "fp32", "mantissa")
# State for each row and each matrix, two averages in two dtypes, an average of steps.
OF_THE_FIELD = ("muown", "bf16_hyperball", "narrow_two_rate", "ema_nesterov")
BEFORE, AFTER = 2, 2

FULL = StateDictOptions(full_state_dict=True)

ONE = Layout((1,))

LAYOUTS = {
    "one": ONE,
    "averaged-3": Layout((3,), comms="averaged"),
    "sharded-2": Layout((2,), comms="sharded"),
    "fsdp2-3": Layout((3,), wrappings.data_parallel),
    "hsdp-2x2": Layout((2, 2), wrappings.data_parallel),
    "tp-2": Layout((2,), wrappings.tensor_parallel),
    "tp-3": Layout((3,), wrappings.tensor_parallel),
    "tp_fsdp2-2x2": Layout((2, 2), wrappings.tensor_and_data_parallel),
    "ep_fsdp2-4": Layout((4,), wrappings.expert_and_data_parallel),
    "ep_fsdp2-2x2": Layout((2, 2), wrappings.expert_and_data_parallel),
}


class Trained(NamedTuple):
    """A laid-out model, its optimizer, and which entries of the parameters this rank holds."""

    model: torch.nn.Module
    optimizer: quintic.Muon
    held: dict


class Named:
    """Tensors by name, for `gathered`."""

    def __init__(self, tensors):
        self.tensors = tensors

    def named_parameters(self):
        return self.tensors.items()


def start(layout, case):
    """A model before its first step, on this rank."""
    # State of 8 bits needs rows of eights, and pieces of them.
    make = functools.partial(Awkward, unit=32 if case.options.get("state_dtype") == "int8" else 1)
    model = make(dtype=case.dtype)
    layout.lay_out(model)
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    optimizer = quintic.Muon(groups, lr=0.05, adamw_lr=0.01, comms=layout.comms, **case.options)
    return Trained(model, optimizer, held_by(make, layout.lay_out))


def step(trained, steps):
    for number in steps:
        params = trained.model.named_parameters()
        whole = {name: gradient(name, param.shape, param.dtype, number) for name, param in params}
        give_gradients(trained.model, whole, trained.held)
        trained.optimizer.step()


def wide(tensor):
    """uint16, which gloo and NCCL do not know, as int32."""
    return tensor.to(torch.int32) if tensor.dtype == torch.uint16 else tensor


def on_host(tensors):
    return {key: wide(tensor).to("cpu", copy=True) for key, tensor in tensors.items()}


def zeroed(state_dict):
    result = copy.deepcopy(state_dict)
    for tensors in result["state"].values():
        for tensor in tensors.values():
            tensor.zero_()
    return result


def whole_state(trained, world_size):
    """{name: {key: whole tensor}} on the CPU, put together from the pieces; all ranks must call it."""
    params = dict(trained.model.named_parameters())
    saved = get_optimizer_state_dict(trained.model, trained.optimizer)["state"]
    result = {name: {} for name in params}
    for key in sorted({key for tensors in saved.values() for key in tensors}):
        tensors = {name: of_name[key] for name, of_name in saved.items() if key in of_name}
        found = {name: wide(tensor) for name, tensor in tensors.items()}
        cut = {name: tensor for name, tensor in found.items() if tensor.shape == params[name].shape}
        for name, tensor in gathered(Named(cut), trained.held, range(world_size)).items():
            result[name][key] = tensor.cpu()
        whole = on_host({name: tensor for name, tensor in tensors.items() if name not in cut})
        everyone = [{}] * world_size
        dist.all_gather_object(everyone, whole)
        for name, tensor in whole.items():
            assert all(torch.equal(tensor, other[name]) for other in everyone), f"{name}: ranks differ in {key}"
            result[name][key] = tensor
    return result


def wrong_state(found, expected, what):
    """A line for every state that is not bitwise the same."""
    lines = []
    for name, tensors in expected.items():
        if set(found[name]) != set(tensors):
            lines.append(f"{what}: {name} has {sorted(found[name])} instead of {sorted(tensors)}")
            continue
        for key, tensor in tensors.items():
            value = wide(found[name][key])
            if isinstance(value, DTensor) or not torch.equal(value.cpu(), tensor):
                lines.append(f"{what}: {name} has another {key}")
    return lines


def weights_of(trained, world_size):
    return gathered(trained.model, trained.held, range(world_size))


def wrong_weights(found, optimizer, case, expected, what):
    """A line for every weight that differs, with the tolerance that `trajectories` states for AdamW in pieces."""
    adamw = {name for g in optimizer.param_groups if g["algorithm"] == "adamw" for name in g["param_names"]}
    lines = []
    for name, weight in expected.named_parameters():
        is_fused = name in adamw and case.dtype == torch.float32
        rtol, atol = fused_adamw_tolerance(BEFORE + AFTER, lr=0.01) if is_fused else (0.0, 0.0)
        if not torch.allclose(found[name], weight.detach(), rtol=rtol, atol=atol):
            lines.append(f"{what}: {name} ends elsewhere than on one device")
    return lines


def save(rank, world_size, layout, titles, folder):
    """Some steps, then checkpoints for `load`; what is saved whole is what the ranks hold."""
    wrong = []
    for title in titles:
        trained = start(layout, CASES[title])
        model, optimizer, _ = trained
        step(trained, range(BEFORE))
        state = whole_state(trained, world_size)
        whole = get_optimizer_state_dict(model, optimizer, options=FULL)
        wrong += wrong_state(whole["state"], state, f"{title}, full_state_dict")
        weights = {name: weight.cpu() for name, weight in weights_of(trained, world_size).items()}
        if rank == 0:
            torch.save((state, weights), folder / f"{title}.pt")
        both = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(both, checkpoint_id=folder / title)
    assert not wrong, "\n".join(wrong)


def load(rank, world_size, layout, titles, folder):
    """The checkpoint of `save`, loaded into a new model in another layout, and more steps."""
    wrong = []
    for title in titles:
        case = CASES[title]
        trained = start(layout, case)
        model, optimizer, _ = trained
        both = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(both, checkpoint_id=folder / title)
        set_model_state_dict(model, both["model"])
        set_optimizer_state_dict(model, optimizer, both["optimizer"])
        state, weights = torch.load(folder / f"{title}.pt")
        wrong += wrong_state(whole_state(trained, world_size), state, f"{title}, loaded")
        found = weights_of(trained, world_size)
        other = [name for name, weight in weights.items() if not torch.equal(found[name].cpu(), weight)]
        wrong += [f"{title}: {name} is another weight" for name in other]
        step(trained, range(BEFORE, BEFORE + AFTER))
        found = weights_of(trained, world_size)
        if rank == 0:
            one = start(ONE, case)
            step(one, range(BEFORE + AFTER))
            wrong += wrong_weights(found, one.optimizer, case, one.model, title)
    assert not wrong, "\n".join(wrong)


def goes_on(saving, loading, titles, folder):
    run(save, saving.world_size, saving, titles, folder, timeout=60)
    run(load, loading.world_size, loading, titles, folder, timeout=60)


# Otherwise each layout saves or loads once.
PAIRS = list(itertools.pairwise([*LAYOUTS, "one"]))[:: 1 if TAKES_ALL else 2]


@pytest.mark.parametrize(("saving", "loading"), PAIRS)
def test_a_run_goes_on_in_another_layout(saving, loading, tmp_path):
    titles = ALL if "fsdp2-3" in (saving, loading) else RULES
    goes_on(LAYOUTS[saving], LAYOUTS[loading], titles, tmp_path)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ("sharded-2", "tp-2"),
        ("fsdp2-3", "ep_fsdp2-2x2"),
        *([("tp-2", "one"), ("ep_fsdp2-2x2", "averaged-3")] if TAKES_ALL else []),
    ],
)
def test_rules_of_the_field_go_on_in_another_layout(saving, loading, tmp_path):
    goes_on(LAYOUTS[saving], LAYOUTS[loading], OF_THE_FIELD, tmp_path)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ("sharded-2", "tp-3"),
        *([("one", "fsdp2-3"), ("fsdp2-3", "tp_fsdp2-2x2"), ("tp-3", "one"), ("tp-3", "tp-2")] if TAKES_ALL else []),
    ],
)
def test_state_of_8_bits_goes_on_in_another_layout(saving, loading, tmp_path):
    goes_on(LAYOUTS[saving], LAYOUTS[loading], tuple(sorted(EIGHTS)), tmp_path)


def test_fsdp2_on_four_ranks_goes_on_on_two_and_on_one(tmp_path):
    four, two = (Layout((size,), wrappings.data_parallel) for size in (4, 2))
    goes_on(four, two, RULES, tmp_path)
    # No process group at all, in this process.
    for title in RULES:
        trained = start(ONE, CASES[title])
        params = dict(trained.model.named_parameters())
        both = {"model": trained.model.state_dict(), "optimizer": get_optimizer_state_dict(*trained[:2])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch tells that there is one process
            dcp.load(both, checkpoint_id=tmp_path / title)
        trained.model.load_state_dict(both["model"])
        set_optimizer_state_dict(*trained[:2], both["optimizer"])
        state, weights = torch.load(tmp_path / f"{title}.pt")
        assert all(torch.equal(params[name].cpu(), weight) for name, weight in weights.items())
        found = {name: trained.optimizer.state[param] for name, param in params.items()}
        assert not wrong_state(found, state, title)


def in_memory(rank, world_size, layout, titles):
    """State dicts of one device and of a layout, into one another."""
    wrong = []

    def check(trained, what):
        nonlocal wrong
        wrong += wrong_state(whole_state(trained, world_size), state, f"{title}, {what}")

    for title in titles:
        case = CASES[title]
        one = start(ONE, case)
        step(one, range(BEFORE))
        saved = copy.deepcopy(one.optimizer.state_dict())
        params = dict(one.model.named_parameters())
        state = {name: on_host(one.optimizer.state[param]) for name, param in params.items()}
        cut = start(layout, case)
        cut.optimizer.load_state_dict(saved)
        check(cut, "one device's state")
        full = get_optimizer_state_dict(cut.model, cut.optimizer, options=FULL)
        wrong += wrong_state(full["state"], state, f"{title}, full_state_dict")
        one.optimizer.load_state_dict(zeroed(one.optimizer.state_dict()))
        one.optimizer.load_state_dict(full)
        wrong += wrong_state(
            {name: one.optimizer.state[p] for name, p in params.items()}, state, f"{title}, full state"
        )
        again = start(layout, case)
        again.optimizer.load_state_dict(cut.optimizer.state_dict())
        check(again, "state of the same layout")
        again = start(layout, case)
        again.optimizer.load_state_dict(full)
        check(again, "full state")
        again = start(layout, case)
        set_optimizer_state_dict(again.model, again.optimizer, full, options=FULL)
        check(again, "set_optimizer_state_dict with full_state_dict")
        again = start(layout, case)
        named = get_optimizer_state_dict(one.model, one.optimizer)
        set_optimizer_state_dict(again.model, again.optimizer, named)
        check(again, "set_optimizer_state_dict with one device's state")
        again = start(layout, case)
        only_first = full if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(again.model, again.optimizer, only_first, options=options)
        check(again, "set_optimizer_state_dict with broadcast_from_rank0")
        again = start(layout, case)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        pieces = get_optimizer_state_dict(cut.model, cut.optimizer, options=flat)
        set_optimizer_state_dict(again.model, again.optimizer, pieces, options=flat)
        check(again, "flatten_optimizer_state_dict")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["averaged-3", "sharded-2", "fsdp2-3", "hsdp-2x2", "tp-2", "ep_fsdp2-2x2"])
def test_state_dicts_of_one_device_and_of_a_layout_load_into_each_other(name):
    # The state of "neuron" is a part of that of "mantissa".
    titles = ALL if name == "fsdp2-3" else ("fp32", "mantissa")
    run(in_memory, LAYOUTS[name].world_size, LAYOUTS[name], titles, timeout=60)


@pytest.mark.parametrize(("name", "titles"), [("tp-2", OF_THE_FIELD if TAKES_ALL else OF_THE_FIELD[:2])])
def test_states_of_rules_of_the_field_load_into_each_other(name, titles):
    run(in_memory, LAYOUTS[name].world_size, LAYOUTS[name], titles, timeout=60)


def other_masters(rank, world_size, layout):
    """State of one device, of a layout and of a whole state dict, into an optimizer with another master."""
    wrong = []
    for first, second in (("mantissa", "8bit"), ("8bit", "fp32"), ("fp32", "mantissa")):
        saved, wanted = (
            replace(CASES["mantissa"], options={**CASES["mantissa"].options, "master": master})
            for master in (first, second)
        )
        one, cut = start(ONE, saved), start(layout, saved)
        for trained in (one, cut):
            step(trained, range(BEFORE))
        states = {
            "one device's": copy.deepcopy(one.optimizer.state_dict()),
            "the layout's": copy.deepcopy(cut.optimizer.state_dict()),
            "whole": get_optimizer_state_dict(cut.model, cut.optimizer, options=FULL),
        }
        # As if the option had been changed after loading.
        for group in one.optimizer.param_groups:
            group["master"] = second
        expected = {name: on_host(one.optimizer.state[param]) for name, param in one.model.named_parameters()}
        for title, state in states.items():
            again = start(layout, wanted)
            again.optimizer.load_state_dict(state)
            again.model.load_state_dict(cut.model.state_dict())
            wrong += wrong_state(whole_state(again, world_size), expected, f"{first} to {second}, {title}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded-2", "tp-2", "fsdp2-3"])
def test_masters_are_converted_on_every_rank(name):
    run(other_masters, LAYOUTS[name].world_size, LAYOUTS[name], timeout=100)


def broadcast_another_master(rank, world_size, layout):
    """Only rank 0 sees the master that was saved; the others have their own, and must not go on with it."""
    named, of_form = CASES["mantissa"], {}
    for master in (None, "mantissa", "8bit"):
        of_form[master] = start(layout, replace(named, options={**named.options, "master": master}))
        step(of_form[master], range(BEFORE))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole = {
        master: get_optimizer_state_dict(trained.model, trained.optimizer, options=FULL)
        for master, trained in of_form.items()
    }
    twin = of_form["8bit"]
    with pytest.raises(ValueError, match=r"the state was saved with master='mantissa', and .*'mantissa_byte' of this"):
        set_optimizer_state_dict(twin.model, twin.optimizer, whole["mantissa"] if rank == 0 else {}, options=options)
    set_optimizer_state_dict(twin.model, twin.optimizer, whole[None] if rank == 0 else {}, options=options)
    for name, param in twin.model.named_parameters():
        assert not local_of(twin.optimizer.state[param]["mantissa_byte"]).any(), name


def test_a_master_of_another_form_is_refused_on_every_rank():
    run(broadcast_another_master, 2, Layout((2,), wrappings.data_parallel))


def before_the_first_step(rank, world_size, layout, folder):
    """All ranks have the same keys from the start, though some never see a gradient; then these are saved."""
    trained = start(layout, CASES["neuron"])
    keys = [None] * world_size
    state = get_optimizer_state_dict(trained.model, trained.optimizer)
    dist.all_gather_object(keys, {name: sorted(tensors) for name, tensors in state["state"].items()})
    assert all(other == keys[0] for other in keys)
    assert keys[0].keys() == dict(trained.model.named_parameters()).keys()
    dcp.save({"optimizer": state}, checkpoint_id=folder / "first")
    step(trained, range(1))
    if rank == 1:
        trained.model.experts.up.grad = None
    trained.optimizer.step()
    after = get_optimizer_state_dict(trained.model, trained.optimizer)
    assert {name: sorted(tensors) for name, tensors in after["state"].items()} == keys[0]
    dcp.load({"optimizer": after}, checkpoint_id=folder / "first")
    set_optimizer_state_dict(trained.model, trained.optimizer, after)
    for tensors in whole_state(trained, world_size).values():
        assert not any(tensor.any() for tensor in tensors.values())


def test_keys_are_the_same_on_all_ranks_from_construction_on(tmp_path):
    run(before_the_first_step, 3, LAYOUTS["fsdp2-3"], tmp_path)


def misfits(rank, world_size):
    """State that is not whole, and not in the pieces that this layout needs."""
    case = CASES["fp32"]
    cut, copies = start(LAYOUTS["fsdp2-3"], case), start(ONE, case)
    step(cut, range(1))
    before = whole_state(cut, world_size)
    saved = copy.deepcopy(cut.optimizer.state_dict())
    pieces = copy.copy(saved)
    pieces["state"] = {
        number: {key: local_of(value) for key, value in tensors.items()} for number, tensors in saved["state"].items()
    }
    with pytest.raises(ValueError, match=r"mlp\.0\.weight: saved momentum_buffer.*the piece of one rank.*save whole"):
        cut.optimizer.load_state_dict(pieces)
    with pytest.raises(ValueError, match=r"mlp\.0\.weight: saved momentum_buffer.*the piece of one rank.*save whole"):
        copies.optimizer.load_state_dict(pieces)
    # One device cannot take its state from pieces, and columns are no rows.
    with pytest.raises(ValueError, match=r"mlp\.0\.weight: saved momentum_buffer is a DTensor, and rank \d"):
        copies.optimizer.load_state_dict(saved)
    columns = copy.copy(saved)
    columns["state"] = {
        number: {key: in_columns(value) for key, value in tensors.items()} for number, tensors in saved["state"].items()
    }
    with pytest.raises(ValueError, match=r"mlp\.0\.weight: saved momentum_buffer is a DTensor, and rank 0 does"):
        cut.optimizer.load_state_dict(columns)
    assert not wrong_state(whole_state(cut, world_size), before, "after all errors")
    assert not any(
        t.any() for p in copies.model.parameters() for t in [copies.optimizer.state[p].get("exp_avg")] if t is not None
    )
    # Copies on every rank hold what any layout needs.
    everywhere = copy.copy(saved)
    everywhere["state"] = {
        number: {key: replicated(value) for key, value in tensors.items()} for number, tensors in saved["state"].items()
    }
    for trained in (copies, cut):
        trained.optimizer.load_state_dict(zeroed(trained.optimizer.state_dict()))
        trained.optimizer.load_state_dict(everywhere)
    assert not wrong_state(whole_state(cut, world_size), before, "copies")
    found = {name: copies.optimizer.state[param] for name, param in copies.model.named_parameters()}
    assert not wrong_state(found, before, "copies")


def in_columns(tensor):
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return tensor
    return tensor.redistribute(placements=[Shard(1)])


def replicated(tensor):
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def test_pieces_that_do_not_fit_are_an_error_and_change_nothing():
    run(misfits, 3)


def unevenly_cut_twice(rank, world_size, folder):
    """PyTorch saves a dimension that tensor parallelism and FSDP2 cut unevenly at wrong places, and notices itself."""
    layout = Layout((3, 2), wrappings.tensor_and_data_parallel)
    trained = start(layout, CASES["mantissa"])
    step(trained, range(BEFORE))
    state = whole_state(trained, world_size)
    sharded = get_optimizer_state_dict(trained.model, trained.optimizer)
    with pytest.raises(dcp.CheckpointException):
        dcp.save(sharded, checkpoint_id=folder)
    full = get_optimizer_state_dict(trained.model, trained.optimizer, options=FULL)
    assert not wrong_state(full["state"], state, "full_state_dict")
    again = start(layout, CASES["mantissa"])
    set_optimizer_state_dict(again.model, again.optimizer, full)
    assert not wrong_state(whole_state(again, world_size), state, "loaded")


def test_whole_state_goes_where_pieces_cannot_be_saved(tmp_path):
    run(unevenly_cut_twice, 6, tmp_path)
