"""Sharded state and what it was divided for: parameters, their order in memory, `comms`, ranks. All may change."""

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, run
from torch import nn

import quintic

# Of equal cost, so that without the first one all others but the last go to another rank; and one that is divided.
SHAPES = {"a": (12, 8), "b": (12, 8), "c": (12, 8), "d": (8, 12), "table": (2100, 3), "bias": (12,), "small": (8,)}


def started(comms, **options):
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape).to(DEVICE, torch.bfloat16)) for name, shape in SHAPES.items()}
    groups = [
        {"params": [(name, params[name]) for name in "abcd"]},
        {"params": [(name, params[name]) for name in ("table", "bias", "small")], "algorithm": "adamw"},
    ]
    common = {"lr": 0.1, "adamw_lr": 0.1, "compute_dtype": torch.float32, "normalize": "neuron", "master": "fp32"}
    return params, quintic.Muon(groups, comms=comms, **common, **options)


def take_steps(params, optimizer, first, last):
    for step in range(first, last):
        for index, param in enumerate(params.values()):
            generator = torch.Generator().manual_seed(100 * step + index)
            # The mean over ranks is what each of them has, to the last bit.
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param)
        optimizer.step()


def in_columns(params, name):
    """Give a parameter the other order in memory."""
    params[name].data = params[name].data.t().contiguous().t()


def without(optimizer, name):
    """Take a parameter out of its group."""
    for group in optimizer.param_groups:
        if name in group["param_names"]:
            place = group["param_names"].index(name)
            del group["param_names"][place], group["params"][place]


def set_all(optimizer, **options):
    for group in optimizer.param_groups:
        group.update(options)


CHANGES = {
    "order of a matrix": (lambda params, optimizer: in_columns(params, "a"), "a"),
    "order of a table": (lambda params, optimizer: in_columns(params, "table"), "table"),
    "fewer matrices": (lambda params, optimizer: without(optimizer, "a"), "b"),
    "fewer vectors": (lambda params, optimizer: without(optimizer, "bias"), "small"),
    "comms": (lambda params, optimizer: set_all(optimizer, comms="replicated"), "a"),
    "view": (lambda params, optimizer: optimizer.param_groups[0].update(view=quintic.Rows(4)), "a"),
    "ranks": (lambda params, optimizer: set_all(optimizer, process_group=dist.new_group([dist.get_rank()])), "a"),
}
"""Changes that give used state another meaning, and the first parameter for which they do."""


def message_of(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def weights_of(params):
    return [param.detach().clone() for param in params.values()]


def changed(rank, world_size, names):
    """By change: whether it is harmless before state is used, and what it says afterwards."""
    found = {}
    for name in names:
        change, _ = CHANGES[name]
        # Before a step everything may change; state that was made to be saved says nothing.
        params, optimizer = started("sharded")
        optimizer.state_dict()
        change(params, optimizer)
        alone, one = started("none")
        change(alone, one)
        set_all(one, comms="none")
        take_steps(params, optimizer, 0, 2)
        take_steps(alone, one, 0, 2)
        is_harmless = all(map(torch.equal, weights_of(params), weights_of(alone)))

        params, optimizer = started("sharded")
        take_steps(params, optimizer, 0, 2)
        before = weights_of(params)
        saved_groups = [
            {**group, "params": [*group["params"]], "param_names": [*group["param_names"]]}
            for group in optimizer.param_groups
        ]
        data = {key: param.data for key, param in params.items()}
        change(params, optimizer)
        texts = {message_of(take_steps, params, optimizer, 2, 3), message_of(optimizer.state_dict)}
        is_untouched = all(map(torch.equal, weights_of(params), before))
        # Taken back, everything goes on.
        for group, old in zip(optimizer.param_groups, saved_groups, strict=True):
            group.update(old)
        for key, param in params.items():
            param.data = data[key]
        take_steps(params, optimizer, 2, 3)
        alone, one = started("none")
        take_steps(alone, one, 0, 3)
        goes_on = all(map(torch.equal, weights_of(params), weights_of(alone)))
        found[name] = texts, is_harmless, is_untouched, goes_on
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_sharded_state_no_longer_fits_is_an_error_on_all_ranks(world_size):
    for found in run(changed, world_size, list(CHANGES), timeout=100):
        for name, (texts, is_harmless, is_untouched, goes_on) in found.items():
            [text] = texts
            assert text.startswith(f"{CHANGES[name][1]}: its sharded state no longer matches its group (comms"), name
            assert "call state_dict() on all ranks before such a change" in text
            assert (is_harmless, is_untouched, goes_on) == (True, True, True), name


def sharded_later(rank, world_size):
    """Weights of one device, and those with state that is sharded from the third step on."""
    found = []
    for comms in ("none", "replicated"):
        params, optimizer = started(comms)
        take_steps(params, optimizer, 0, 2)
        if comms != "none":
            set_all(optimizer, comms="sharded")
        take_steps(params, optimizer, 2, 4)
        found.append((weights_of(params), optimizer.state_dict()["state"]))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_state_is_divided_where_it_is(world_size):
    for (expected, expected_state), (weights, state) in run(sharded_later, world_size):
        assert all(map(torch.equal, weights, expected))
        for key, values in expected_state.items():
            assert all(torch.equal(state[key][name], value) for name, value in values.items())


def other_ranks(rank, world_size):
    """The error when state that ranks 0 and 1 divided is to be that of 0 and 2."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [0, 2], [1])]
    params, optimizer = started("sharded", process_group=groups[rank == 2])
    take_steps(params, optimizer, 0, 2)
    set_all(optimizer, process_group=groups[2 + (rank == 1)])
    return message_of(lambda: (optimizer.plan(), optimizer.state))


def test_as_many_other_ranks_do_not_have_the_state():
    first, second, third = run(other_ranks, 3)
    assert first == second
    assert first.startswith("a: its sharded state no longer matches its group (comms, process_group")
    # It had everything, and has its parts.
    assert third == ""


def written_by_hand(rank, world_size):
    """The error when a matrix whose state was written, but not stepped, is put in another order."""
    params, optimizer = started("sharded")
    momentum = optimizer.state[params["a"]]["momentum_buffer"].fill_(1.0)
    in_columns(params, "a")
    return momentum.numel(), message_of(lambda: optimizer.state)


def test_state_that_was_written_by_hand_is_not_taken_for_another_order():
    results = run(written_by_hand, 2)
    assert sorted(numel for numel, _ in results) == [0, 96]
    for numel, text in results:
        assert text.startswith("a: its sharded state no longer matches its group" if numel else ""), numel
        assert bool(text) == bool(numel)
