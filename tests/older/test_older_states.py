"""States that older versions saved are loaded as they were saved, to the last bit, and training goes on with them.

The files are made by `make.py`. Products of matrices differ between processors in their last bits, so what comes of a
loaded state is compared with what comes, on this machine, of the same state put in tensor by tensor.
"""

from pathlib import Path

import make
import pytest
import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).parent
VERSIONS = sorted(folder.name for folder in HERE.iterdir() if (folder / "muon.pt").exists())
MORE_STEPS = range(make.NUM_STEPS, make.NUM_STEPS + 3)


def saved_by(version, case):
    return torch.load(HERE / version / f"{case}.pt", weights_only=True)


def with_weights(saved):
    """Parameters with the saved weights, by name."""
    params = make.parameters(saved["weights"], next(iter(saved["weights"].values())).dtype)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(saved["weights"][name])
    return params


def states_by_name(optimizer, params):
    return {name: optimizer.state[param] for name, param in params.items()}


def saved_states(saved):
    """The saved state of each parameter, by its name."""
    state_dict = saved["optimizer"]
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return {name: state_dict["state"][number] for name, number in zip(names, numbers, strict=True)}


def assert_same_bits(found, expected, what):
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), what


def check_that_it_goes_on(saved, **options):
    expected = saved_states(saved)
    loaded = with_weights(saved)
    optimizer = make.optimizer_of(loaded, **options)
    optimizer.load_state_dict(saved["optimizer"])
    for name, state in states_by_name(optimizer, loaded).items():
        assert state.keys() == expected[name].keys()
        assert any(bool(value.any()) for value in state.values()), name
        for key, value in state.items():
            assert_same_bits(value, expected[name][key], (name, key))
    # The same state, put in by hand.
    copied = with_weights(saved)
    by_hand = make.optimizer_of(copied, **options)
    for group, of_saved in zip(by_hand.param_groups, saved["optimizer"]["param_groups"], strict=True):
        if "pending_steps" in of_saved:
            group["pending_steps"] = of_saved["pending_steps"]
    for name, state in states_by_name(by_hand, copied).items():
        for key, value in state.items():
            value.copy_(expected[name][key].view(value.shape))
    make.make_steps(loaded, optimizer, MORE_STEPS)
    make.make_steps(copied, by_hand, MORE_STEPS)
    for name, param in loaded.items():
        assert not torch.equal(param, saved["weights"][name]), name
        assert_same_bits(param.detach(), copied[name].detach(), name)


@pytest.mark.parametrize("case", make.CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_saved_state_goes_on(version, case):
    _, options = make.options_of(case)
    check_that_it_goes_on(saved_by(version, case), **options)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_saved_state_of_two_ranks_goes_on_one(version):
    check_that_it_goes_on(saved_by(version, "sharded"), **make.SHARDED)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is meant to be read by one process
@pytest.mark.parametrize("version", VERSIONS)
def test_a_distributed_checkpoint_is_read(version):
    saved = saved_by(version, "sharded")
    params = make.parameters(make.SHARDED_NAMES)
    optimizer = make.optimizer_of(params, **make.SHARDED)
    weights = {name: param.detach() for name, param in params.items()}
    read = {"weights": weights, "optimizer": optimizer.state_dict()}
    # Options that are called otherwise now, or that there were none of, are not in the checkpoint.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(read, checkpoint_id=HERE / version / "sharded", planner=planner, no_dist=True)
    optimizer.load_state_dict(read["optimizer"])
    for name, state in states_by_name(optimizer, params).items():
        assert_same_bits(params[name].detach(), saved["weights"][name], name)
        for key, value in state.items():
            assert_same_bits(value, saved_states(saved)[name][key], (name, key))
