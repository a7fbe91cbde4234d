"""Which saved parameter is which: by name, by position where one side has no names; and what is said if neither fits.

All layers have one shape, so that a parameter that gets another one's state is found by the values alone.
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import quintic
from quintic.interchange import export_torch_state, import_state
from quintic.optim.checkpoint.matching import Match, adopted_names

NAMES = ("a", "b", "c", "d")


def model_of(names=NAMES):
    torch.manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4)) for name in names})


def optimizer_of(model, named=(True, True), **options):
    """Two groups, of Muon and of AdamW, each with the names of its parameters or without."""
    rows = list(model.items())
    halves = (rows[: len(rows) // 2], rows[len(rows) // 2 :])
    params = [
        half if has_names else [param for _, param in half] for half, has_names in zip(halves, named, strict=True)
    ]
    return quintic.Muon([{"params": params[0]}, {"params": params[1], "algorithm": "adamw"}], lr=0.1, **options)


def trained(named=(True, True), **options):
    model = model_of()
    optimizer = optimizer_of(model, named, **options)
    for param in model.values():
        param.grad = torch.randn(4, 4)
    optimizer.step()
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.5 + number
    return model, optimizer


def assert_loaded(model, optimizer, source_model, source):
    for name, param in model.items():
        state, expected = optimizer.state[param], source.state[source_model[name]]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected), name
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.5]


SIDES = list(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize("way", ["state_dict", "file"])
@pytest.mark.parametrize("before", SIDES, ids=str)
@pytest.mark.parametrize("after", SIDES, ids=str)
def test_each_group_with_names_or_without_on_either_side(before, after, way):
    model, optimizer = trained(before)
    saved = optimizer.state_dict()
    if way == "file":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    twin_model = model_of()
    twin = optimizer_of(twin_model, after)
    twin.load_state_dict(saved)
    assert_loaded(twin_model, twin, model, optimizer)
    # As with PyTorch, names that one side has are those that there are afterwards, and again what is saved.
    names = [(["a", "b"], ["group0.param0", "group0.param1"]), (["c", "d"], ["group1.param0", "group1.param1"])]
    expected = [of[not (b or a)] for of, b, a in zip(names, before, after, strict=True)]
    assert [group["param_names"] for group in twin.state_dict()["param_groups"]] == expected
    again_model = model_of()
    again = optimizer_of(again_model)
    again.load_state_dict(twin.state_dict())
    assert_loaded(again_model, again, model, optimizer)


@pytest.mark.parametrize("before", SIDES, ids=str)
@pytest.mark.parametrize("after", SIDES, ids=str)
@pytest.mark.parametrize("option", [None, "full_state_dict", "flatten_optimizer_state_dict"])
def test_names_or_none_through_distributed_checkpoints(before, after, option):
    options = StateDictOptions(**({option: True} if option else {}))
    model, optimizer = trained(before)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    twin_model = model_of()
    twin = optimizer_of(twin_model, after)
    set_optimizer_state_dict(twin_model, twin, copy.deepcopy(saved), options=options)
    assert_loaded(twin_model, twin, model, optimizer)
    if option != "flatten_optimizer_state_dict":
        twin = optimizer_of(twin_model, after)
        twin.load_state_dict(saved)
        assert_loaded(twin_model, twin, model, optimizer)


def test_one_group_of_plain_parameters_and_the_groups_of_a_model():
    """What a script looks like before and after it uses `param_groups`: the same matrices, and names."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    before = quintic.Muon(list(model.parameters()), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn(4, 4)
    before.step()
    after = quintic.Muon(quintic.param_groups(model, rules=[quintic.Rule("*", "muon")]))
    after.load_state_dict(before.state_dict())
    for param in model.parameters():
        assert torch.equal(after.state[param]["momentum_buffer"], before.state[param]["momentum_buffer"])
    before.load_state_dict(after.state_dict())
    assert before.param_groups[0]["param_names"] == ["0.weight", "1.weight"]


def test_names_count_more_than_positions():
    """Named groups are found wherever they are, and only the others go by what is left."""
    model, optimizer = trained((False, True))
    twin_model = model_of()
    groups = [
        {"params": [("d", twin_model["d"]), ("c", twin_model["c"])], "algorithm": "adamw"},
        {"params": [twin_model["a"], twin_model["b"]]},
    ]
    twin = quintic.Muon(groups)
    twin.load_state_dict(optimizer.state_dict())
    for name, param in twin_model.items():
        for key, value in optimizer.state[model[name]].items():
            assert torch.equal(twin.state[param][key], value), name
    assert [group["lr"] for group in twin.param_groups] == [1.5, 0.5]
    assert [group["param_names"] for group in twin.param_groups] == [["d", "c"], ["group1.param0", "group1.param1"]]


def test_parameters_that_are_really_called_so_go_by_their_names():
    names = ("group0.param1", "group0.param0")

    def made(order):
        params = {name: nn.Parameter(torch.ones(4, 4)) for name in order}
        return params, quintic.Muon([{"params": list(params.items())}])

    params, optimizer = made(names)
    for number, param in enumerate(params.values()):
        param.grad = torch.eye(4) * (number + 1)
    optimizer.step()
    others, twin = made(names[::-1])
    twin.load_state_dict(optimizer.state_dict())
    for name in names:
        assert torch.equal(
            twin.state[others[name]]["momentum_buffer"], optimizer.state[params[name]]["momentum_buffer"]
        )


def test_what_goes_by_name_knows_the_names_that_were_loaded():
    _, named = trained()
    model = model_of()
    orders = {"comm_order": ["group0.param1"], "compute_order": ["group1.param0", "group0.param0"]}
    optimizer = optimizer_of(model, (False, False), telemetry_every=1, **orders)
    optimizer.load_state_dict(named.state_dict())
    for param in model.values():
        param.grad = torch.randn(4, 4)
    optimizer.param_groups[0]["telemetry_every"] = 1
    optimizer.step()
    assert optimizer.telemetry().keys() == {"a", "b"}
    assert {name for bucket in optimizer.plan() for name in bucket.names} == set(NAMES)
    optimizer.copy_state("c", "d")
    assert torch.equal(optimizer.state[model["c"]]["exp_avg"], optimizer.state[model["d"]]["exp_avg"])
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"parameter group 0 \(a\)"):
        optimizer.step()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_tie_finds_its_head_with_names_or_without(before, after):
    def made(has_names):
        model = model_of(("head", "embedding"))
        groups = [{"params": [(name, param) if has_names else param]} for name, param in model.items()]
        optimizer = quintic.Muon([{**group, "algorithm": "adamw"} for group in groups], lr=0.1)
        return model, optimizer

    model, optimizer = made(before)
    optimizer.tie(model["head"], model["embedding"])
    twin_model, twin = made(after)
    twin.load_state_dict(optimizer.state_dict())
    twin_model.load_state_dict(model.state_dict())
    for each, its_optimizer in ((model, optimizer), (twin_model, twin)):
        generator = torch.Generator().manual_seed(0)
        for param in each.values():
            param.grad = torch.randn(4, 4, generator=generator)
        its_optimizer.step()
        assert torch.equal(each["head"], each["embedding"])
    assert torch.equal(model["head"], twin_model["head"])
    own = made(after)[1]
    own.tie(*[group["param_names"][0] for group in own.param_groups])
    own.load_state_dict(made(before)[1].state_dict())
    assert own.param_groups[1]["tied_to"] is None


# -- what does not match -----------------------------------------------------------------------------------------------

LEAVE_OUT = r"optimizer\.load_state_dict\(state_dict, strict=False\)"


def grown(names, named=True):
    model = model_of(names)
    return model, quintic.Muon([{"params": list(model.items()) if named else list(model.values())}])


def test_new_and_missing_parameters_are_named_with_what_to_do():
    _, small = grown(("a", "b"))
    _, large = grown(("a", "b", "c", "d", "e"))
    with pytest.raises(
        ValueError, match=rf"^c is not in the saved .* like a, nor are 2 others such as d; to load .*{LEAVE_OUT}"
    ):
        large.load_state_dict(small.state_dict())
    with pytest.raises(
        ValueError, match=rf"^c is in the saved .* nor are 2 others such as d; .*{LEAVE_OUT}; .*add_param_group"
    ):
        small.load_state_dict(large.state_dict())
    _, renamed = grown(("a", "x"))
    with pytest.raises(ValueError, match=r"^x is not in the saved .* renamed, write .* into 'param_names'"):
        renamed.load_state_dict(small.state_dict())


def test_without_names_a_grown_model_cannot_be_matched():
    _, small = grown(("a", "b"), named=False)
    _, large = grown(("a", "b", "c"), named=False)
    for saving, loading, numbers in ((small, large, "2 parameters, not 3"), (large, small, "3 parameters, not 2")):
        for strict in (True, False):
            with pytest.raises(ValueError, match=f"group 0 was saved with {numbers}, and without names .* name them"):
                loading.load_state_dict(saving.state_dict(), strict=strict)
    large.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(
        ValueError,
        match=r"has 1 parameter groups, this one has 2, and without names .* new ones afterwards: .*add_param",
    ):
        large.load_state_dict(small.state_dict())
    _, named = grown(("a", "b", "c"))
    with pytest.raises(ValueError, match="was saved with 2 parameters, not 3, and without names in both"):
        named.load_state_dict(small.state_dict())


@pytest.mark.parametrize("grows", [True, False])
def test_parameters_that_both_have_are_loaded_and_the_rest_begins_anew(grows):
    model, optimizer = grown(("a", "b", "gone"))
    twin_model, twin = grown(("new", "b", "a") if grows else ("a",))
    for each, its_optimizer, steps in ((model, optimizer, 2), (twin_model, twin, 1)):
        for _ in range(steps):
            for param in each.values():
                param.grad = torch.randn(4, 4)
            its_optimizer.step()
    saved = optimizer.state_dict()
    twin.load_state_dict(saved, strict=False)
    for name, param in twin_model.items():
        momentum = twin.state[param]["momentum_buffer"]
        if name == "new":
            assert not momentum.any()
        else:
            assert torch.equal(momentum, optimizer.state[model[name]]["momentum_buffer"])
    for param in twin_model.values():
        param.grad = torch.randn(4, 4)
    twin.step()
    assert optimizer.state_dict().keys() == saved.keys()


@pytest.mark.parametrize("grows", [True, False])
def test_parameters_that_both_have_are_loaded_from_distributed_checkpoints(grows):
    """Their keys are names, of which an optimizer without a parameter cannot know that they are."""
    model, optimizer = grown(("a", "b"))
    twin_model, twin = grown(("a", "b", "c") if grows else ("b",))
    for param in model.values():
        param.grad = torch.randn(4, 4)
    optimizer.step()
    twin.load_state_dict(get_optimizer_state_dict(model, optimizer), strict=False)
    for name, param in twin_model.items():
        expected = optimizer.state[model[name]]["momentum_buffer"] if name in model else torch.zeros(4, 4)
        assert torch.equal(twin.state[param]["momentum_buffer"], expected), name


@pytest.mark.parametrize("size", [3, 5])
def test_another_shape_says_how_to_begin_anew_and_that_works(size):
    model, optimizer = grown(("a", "b"))
    for param in model.values():
        param.grad = torch.randn(4, 4)
    optimizer.step()
    other = nn.ParameterDict({"a": nn.Parameter(torch.randn(4, 4)), "b": nn.Parameter(torch.randn(4, size))})
    twin = quintic.Muon(other.items())
    saved = optimizer.state_dict()
    with pytest.raises(
        ValueError,
        match=rf"^b: saved momentum_buffer has shape \(4, 4\), .*needs \(4, {size}\).*del state_dict\['state'\]\[1\]",
    ):
        twin.load_state_dict(saved)
    assert not twin.state[other["a"]]["momentum_buffer"].any()
    del saved["state"][1]
    twin.load_state_dict(saved, strict=False)
    assert torch.equal(twin.state[other["a"]]["momentum_buffer"], optimizer.state[model["a"]]["momentum_buffer"])
    assert twin.state[other["b"]]["momentum_buffer"].shape == (4, size)


def test_state_that_was_lost_says_what_to_do():
    _, optimizer = trained()
    saved = optimizer.state_dict()
    del saved["state"][2]
    twin_model = model_of()
    twin = optimizer_of(twin_model)
    with pytest.raises(ValueError, match=rf"^c: the saved optimizer holds no state for this .* frozen .*{LEAVE_OUT}"):
        twin.load_state_dict(saved)
    twin.load_state_dict(saved, strict=False)
    assert twin.state[twin_model["c"]]["step"] == 0
    assert twin.state[twin_model["d"]]["step"] == 1


def test_a_saved_name_is_given_to_one_parameter_only():
    names = ["group0.param0", "group0.param1"]
    params = [nn.Parameter(torch.ones(1)) for _ in names]
    matches = [
        Match(name, param, 0, 0, key, "weight") for key, (name, param) in enumerate(zip(names, params, strict=True))
    ]
    assert adopted_names([{"params": params, "param_names": names}], matches) == {"group0.param0": "weight"}


# -- memory that both sides share --------------------------------------------------------------------------------------


def exchange_by_dcp(optimizer, twin, folder):
    """PyTorch reads by number, into tensors that belong to other parameters than the saved names say."""
    dcp.save(optimizer.state_dict(), checkpoint_id=folder, no_dist=True)
    found = twin.state_dict()
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    twin.load_state_dict(found)


def exchange_own(optimizer, twin, folder):
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # by name
    found = twin.state_dict()
    for group in found["param_groups"]:
        group["params"] = [*group["params"][1:], group["params"][0]]
    twin.load_state_dict(found)
    found = twin.state_dict()
    for group in found["param_groups"]:
        group["params"] = [group["params"][-1], *group["params"][:-1]]
    twin.load_state_dict(found)


def exchange_by_import(optimizer, twin, folder):
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for order in ("bca", "cab"):
        for exported in export_torch_state(twin).values():
            if exported["state"]:
                names = [name for group in exported["param_groups"] for name in group["param_names"]]
                moved = dict(zip("abc", order, strict=True))
                import_state(twin, exported, source="torch", names=[moved[name] for name in names])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, on purpose
@pytest.mark.parametrize("exchange", [exchange_by_dcp, exchange_own, exchange_by_import])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}, {"master": "mantissa"}], ids=str)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_state_that_is_read_from_memory_of_other_parameters(algorithm, options, exchange, tmp_path):
    def make(order):
        params = {name: nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for name in order}
        group = {"params": list(params.items()), "algorithm": algorithm}
        optimizer = quintic.Muon([group], lr=0.02, **options)
        for name, param in params.items():
            param.grad = torch.randn(8, 8).bfloat16() * 10.0 ** "abc".index(name)
        optimizer.step()
        return params, optimizer

    (params, optimizer), (twins, twin) = make("abc"), make("cab")
    exchange(optimizer, twin, tmp_path)
    for name, param in params.items():
        for key, value in optimizer.state[param].items():
            if key != "mantissa" or exchange is not exchange_by_import:
                assert torch.equal(twin.state[twins[name]][key], value), f"{name}: {key}"
