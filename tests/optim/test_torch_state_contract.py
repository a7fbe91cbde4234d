"""State as PyTorch's own optimizers have it: hooks, copies, keys of the user's, names or none, wrappers, averages.

Where behaviour is PyTorch's, `torch.optim.AdamW` runs through the same lines and must end in the same place.
"""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import quintic


def model_of(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4, bias=False))


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def muon(params):
    """Muon with a group of matrices and one of everything else, of parameters with or without names."""
    rows = list(params)
    tensors = [row[1] if isinstance(row, tuple) else row for row in rows]
    matrices, others = ([row for row, t in zip(rows, tensors, strict=True) if (t.ndim > 1) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return quintic.Muon([group for group in groups if group["params"]], lr=0.05, momentum=0.8)


def named_muon(model):
    return muon(model.named_parameters())


BOTH = pytest.mark.parametrize("make", [adamw, muon], ids=["adamw", "muon"])


def take_steps(model, optimizer, first=0, last=2):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(left, right):
    assert all(map(torch.equal, left, right))


def assert_same_state(left, right):
    """Two state dicts are equal to the last bit; neither names nor keys of frozen parameters are looked at."""
    assert left["state"].keys() == right["state"].keys()
    for key, values in left["state"].items():
        others = right["state"][key]
        if not isinstance(values, dict):
            assert values == others
            continue
        assert values.keys() == others.keys()
        for name, value in values.items():
            assert torch.equal(value, others[name]) if isinstance(value, torch.Tensor) else value == others[name], name


# -- hooks -------------------------------------------------------------------------------------------------------------


@BOTH
def test_state_dict_hooks_add_state_and_change_what_is_saved(make):
    model = model_of()
    optimizer = make(model.parameters())
    take_steps(model, optimizer)
    calls = []

    def add(given):
        assert given is optimizer
        calls.append("pre")
        given.state["tokens_seen"] = 7

    def note(given, saved):
        assert given is optimizer
        calls.append("post")
        assert saved["state"]["tokens_seen"] == 7
        saved["note"] = "mine"

    def replace(given, saved):
        calls.append("replaced")
        return {**saved, "state": {key: value for key, value in saved["state"].items() if key != "tokens_seen"}}

    handles = [
        optimizer.register_state_dict_pre_hook(add),
        optimizer.register_state_dict_post_hook(note),
        optimizer.register_state_dict_post_hook(replace),
    ]
    saved = optimizer.state_dict()
    assert calls == ["pre", "post", "replaced"]
    assert saved["note"] == "mine"
    assert "tokens_seen" not in saved["state"]
    assert optimizer.state["tokens_seen"] == 7
    for handle in handles:
        handle.remove()
    assert optimizer.state_dict()["state"]["tokens_seen"] == 7
    assert len(calls) == 3


@BOTH
def test_a_hook_may_return_something_else_altogether(make):
    model = model_of()
    optimizer = make(model.parameters())
    take_steps(model, optimizer)
    optimizer.register_state_dict_post_hook(lambda _, saved: {"inner": saved})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["inner"])
    saved = optimizer.state_dict()
    assert list(saved) == ["inner"]
    twin_model = model_of()
    twin = make(twin_model.parameters())
    twin.register_load_state_dict_pre_hook(lambda _, saved: saved["inner"])
    twin.load_state_dict(saved)
    assert_same_state(twin.state_dict(), saved["inner"])


@BOTH
def test_load_hooks_see_the_state_before_and_after(make):
    model = model_of()
    optimizer = make(model.parameters())
    take_steps(model, optimizer)
    saved = optimizer.state_dict()
    saved["tokens_seen"] = 9
    calls = []

    def into_state(given, loading):
        calls.append("pre")
        assert loading is not saved  # a shallow copy
        loading["state"] = {**loading["state"], "tokens_seen": loading.pop("tokens_seen")}

    def after(given):
        calls.append(given.state["tokens_seen"])

    twin = make(model.parameters())
    twin.register_load_state_dict_pre_hook(into_state)
    twin.register_load_state_dict_pre_hook(lambda given, loading: calls.append("first"), prepend=True)
    twin.register_load_state_dict_post_hook(after)
    twin.load_state_dict(saved)
    assert calls == ["first", "pre", 9]
    assert saved["tokens_seen"] == 9
    assert twin.state["tokens_seen"] == 9


# -- state of no parameter ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("when", ["before a step", "after steps"])
def test_state_of_no_parameter_is_kept_saved_loaded_and_copied(make, when):
    model = model_of()
    optimizer = make(model.parameters())
    if when == "after steps":
        take_steps(model, optimizer)
    optimizer.state["tokens_seen"] = 1
    optimizer.state["per_rank"] = {"ranks": [1, 2]}
    optimizer.state["history"] = torch.arange(3)
    take_steps(model, optimizer, 2, 3)
    assert optimizer.state["tokens_seen"] == 1
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin_model = model_of()
    twin = make(twin_model.parameters())
    twin.state["tokens_seen"], twin.state["of another run"] = 5, True
    twin.load_state_dict(saved)
    for other in (twin, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state["tokens_seen"] == 1
        assert other.state["per_rank"] == {"ranks": [1, 2]}
        assert torch.equal(other.state["history"], torch.arange(3))
        assert "of another run" not in other.state
        other.state["per_rank"]["ranks"].append(3)
    assert optimizer.state["per_rank"] == {"ranks": [1, 2]}
    take_steps(twin_model, twin, 3, 4)


@BOTH
def test_values_of_no_parameter_may_have_parameters_and_numbers_as_keys(make):
    """As wrappers keep reference weights (TRAC of pytorch_optimizer): {parameter: tensor} under a word."""
    model = model_of()
    optimizer = make(model.parameters())
    take_steps(model, optimizer)
    weight = next(model.parameters())
    optimizer.state["references"] = {weight: torch.ones(2)}
    optimizer.state[1000] = "a number as key"
    optimizer.load_state_dict(optimizer.state_dict())
    assert list(optimizer.state["references"]) == [weight]
    assert next(iter(optimizer.state["references"])) is weight
    assert optimizer.state[1000] == "a number as key"


def test_a_number_that_stands_for_a_parameter_in_files_is_no_key():
    model = model_of()
    optimizer = named_muon(model)
    optimizer.state[0] = "mine"
    with pytest.raises(ValueError, match=r"key of your own, 0, .* use a string"):
        optimizer.state_dict()


def test_state_of_no_parameter_survives_what_changes_groups_and_state():
    """Every way in which the optimizer looks at its state again: options, new groups, another dtype, offloading."""
    model = model_of()
    optimizer = named_muon(model)
    optimizer.state["tokens_seen"] = 1
    optimizer.offload(True)
    take_steps(model, optimizer)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3, 3)))]})
    model.bfloat16()
    for group in optimizer.param_groups:
        group["master"] = "mantissa"
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state_dict()["state"]["tokens_seen"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.state["tokens_seen"] == optimizer.state["tokens_seen"] == 1
    assert twin.state[twin.param_groups[0]["params"][0]]["mantissa"].dtype == torch.uint16
    optimizer.state.clear()
    assert "tokens_seen" not in optimizer.state_dict()["state"]


# -- copies and files --------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "load", "file"])
def test_a_copy_goes_on_as_the_original_and_is_independent(make, way):
    if (make, way) == (adamw, "load"):
        pytest.skip("PyTorch's optimizers go on with the very tensors of a state dict that fit as they are")
    model = model_of()
    optimizer = make(model.parameters())
    take_steps(model, optimizer)
    if way == "deepcopy":
        twin_model, twin = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        twin_model = copy.deepcopy(model)
        twin = make(twin_model.parameters())
        saved = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        twin.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), twin.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    take_steps(twin_model, twin, 2, 4)
    assert_same_state(optimizer.state_dict(), before)
    take_steps(model, optimizer, 2, 4)
    assert_equal(weights_of(model), weights_of(twin_model))
    assert_same_state(optimizer.state_dict(), twin.state_dict())


@BOTH
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_group_added_to_a_copy_has_the_keys_of_the_original_s(make, way):
    """Distributed checkpoints look for every key of a group."""
    model = model_of()
    optimizer = make(list(model.parameters())[:-1])
    twin_model, twin = (
        copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickle.loads(pickle.dumps((model, optimizer)))
    )
    for own, of_model in ((optimizer, model), (twin, twin_model)):
        own.add_param_group({"params": list(of_model.parameters())[-1:]})
    assert [group.keys() for group in twin.param_groups] == [group.keys() for group in optimizer.param_groups]
    assert twin.defaults == optimizer.defaults


def test_loading_keeps_nothing_of_what_it_was_given():
    model = model_of()
    optimizer = named_muon(model)
    take_steps(model, optimizer)
    optimizer.state["history"], optimizer.state[model[0].weight]["mine"] = torch.ones(2), torch.ones(2)
    saved = copy.deepcopy(optimizer.state_dict())
    twin_model = model_of()
    twin = named_muon(twin_model)
    for _ in range(2):  # the second time over state that is there
        twin.load_state_dict(saved)
    loaded = copy.deepcopy(twin.state_dict())
    for value in saved["state"].values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            tensor.fill_(7)
    saved["param_groups"][0]["lr"] = 7.0
    after = twin.state_dict()
    assert after["param_groups"][0]["lr"] == 0.05
    assert torch.equal(after["state"].pop("history"), loaded["state"].pop("history"))
    assert_same_state(after, loaded)


def test_the_state_of_groups_in_another_order_and_with_other_keys_loads():
    model = model_of()
    optimizer = named_muon(model)
    take_steps(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    renumbered = {key: 100 - key for key in keys}
    saved["state"] = {renumbered[key]: saved["state"][key] for key in reversed(keys)}
    for group in saved["param_groups"]:
        group["params"] = [renumbered[key] for key in group["params"]]
    saved["param_groups"].reverse()
    twin_model = model_of()
    twin = named_muon(twin_model)
    twin.load_state_dict(saved)
    assert_same_state(twin.state_dict(), optimizer.state_dict())


# -- `optimizer.state` -------------------------------------------------------------------------------------------------


def test_state_is_a_mapping_of_parameters():
    model = model_of()
    optimizer = named_muon(model)
    take_steps(model, optimizer)
    assert len(optimizer.state) == 3
    assert set(optimizer.state) == set(model.parameters())
    assert model[0].weight in optimizer.state
    assert optimizer.state.get(nn.Parameter(torch.ones(1))) is None
    for param, state in optimizer.state.items():
        for key, value in state.items():
            assert value.shape == (() if key == "step" else param.shape)
    assert optimizer.state[model[0].bias]["step"] == 2


@pytest.mark.parametrize("way", ["delete", "pop", "clear", "new"])
def test_state_that_was_removed_begins_anew(way):
    """As that of an optimizer made now for these weights, while other parameters go on."""
    model = model_of()
    optimizer = named_muon(model)
    take_steps(model, optimizer)
    twin_model = copy.deepcopy(model)
    if way == "delete":
        del optimizer.state[model[0].bias]
    elif way == "pop":
        optimizer.state.pop(model[0].bias)
    elif way == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = type(optimizer.state)(dict)
    twin = named_muon(twin_model)
    take_steps(model, optimizer, 2, 3)
    take_steps(twin_model, twin, 2, 3)
    assert optimizer.state[model[0].bias]["step"] == 1
    same = list(map(torch.equal, model.parameters(), twin_model.parameters()))
    assert same == ([True, True, True] if way in ("clear", "new") else [False, True, False])


def test_a_model_that_comes_from_the_meta_device():
    with torch.device("meta"):
        model = model_of()
    optimizer = named_muon(model)
    assert all(value.is_meta for state in optimizer.state.values() for value in state.values())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, other in zip(model.parameters(), model_of().parameters(), strict=True):
            param.copy_(other)
    optimizer = named_muon(model)
    other_model = model_of()
    other = named_muon(other_model)
    take_steps(other_model, other)
    optimizer.load_state_dict(other.state_dict())
    model.load_state_dict(other_model.state_dict())
    take_steps(model, optimizer, 2, 3)
    take_steps(other_model, other, 2, 3)
    assert_equal(weights_of(model), weights_of(other_model))


# -- averages of weights, and calls without modules --------------------------------------------------------------------


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models_and_their_schedule(average):
    model = model_of()
    optimizer = named_muon(model)
    function = {} if average == "swa" else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    averaged = AveragedModel(model, **function)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2, anneal_strategy="linear")
    seen = []
    for step in range(4):
        take_steps(model, optimizer, step, step + 1)
        averaged.update_parameters(model)
        schedule.step()
        seen.append(weights_of(model))
    for number, param in enumerate(averaged.module.parameters()):
        expected = seen[0][number].double()
        for count, weights in enumerate(seen[1:], 1):
            share = 1 / (count + 1) if average == "swa" else 0.1
            expected += share * (weights[number].double() - expected)
        torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)
    twin_model = copy.deepcopy(model)
    twin = named_muon(twin_model)
    SWALR(twin, swa_lr=0.01, anneal_epochs=2, anneal_strategy="linear")
    twin.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in twin.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert all(group["swa_lr"] == 0.01 for group in twin.param_groups)
    # The state of a model is that of its average, whose names begin with `module`.
    of_average = muon(averaged.named_parameters())
    of_average.load_state_dict(optimizer.state_dict())
    assert_same_state(of_average.state_dict(), optimizer.state_dict())


def test_gradients_of_functional_calls():
    """torch.func leaves `p.grad` alone; what it returns is put there, as the optimizer needs it."""
    model, twin_model = model_of(), model_of()
    optimizer, twin = named_muon(model), named_muon(twin_model)
    batch = torch.randn(5, 4)

    def loss(params):
        return torch.func.functional_call(model, params, batch).square().mean()

    for _ in range(2):
        gradients = torch.func.grad(loss)({name: param.detach() for name, param in model.named_parameters()})
        for name, param in model.named_parameters():
            param.grad = gradients[name]
        optimizer.step()
        twin.zero_grad()
        twin_model(batch).square().mean().backward()
        twin.step()
    assert_equal(weights_of(model), weights_of(twin_model))


# -- wrappers ----------------------------------------------------------------------------------------------------------


class Borrowing:
    """As Lightning's wrapper is: of a class derived from the optimizer's, asking it for attributes that it lacks."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Borrowing" + type(optimizer).__name__, (Borrowing, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying:
    """As Lightning's wrapper was: it has the attributes of the optimizer from when it was made."""

    def __init__(self, optimizer):
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("step", "__del__")}
        self._optimizer = optimizer
        self.__class__ = type("Copying" + type(optimizer).__name__, (Copying, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)


class Asking:
    """A wrapper that is no optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("wrap", [Borrowing, Copying, Asking])
@pytest.mark.parametrize("made", ["before steps", "after steps"])
def test_wrappers_have_the_groups_and_state_of_what_they_wrap(wrap, made):
    model, twin_model = model_of(), model_of()
    optimizer, twin = named_muon(model), named_muon(twin_model)
    if made == "after steps":
        take_steps(model, optimizer, 0, 1)
    wrapper = wrap(optimizer)
    if made == "before steps":
        take_steps(model, wrapper, 0, 1)
    take_steps(twin_model, twin, 0, 1)
    assert_same_state(wrapper.state_dict(), twin.state_dict())
    assert wrapper.param_groups is optimizer.param_groups
    assert repr(wrapper).count("Parameter Group") == 2 or wrap is Asking
    wrapper.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    wrapper.state["tokens_seen"] = 1
    take_steps(twin_model, twin, 1, 2)
    wrapper.load_state_dict({**twin.state_dict()})
    model.load_state_dict(twin_model.state_dict())
    assert_same_state(optimizer.state_dict(), twin.state_dict())
    wrapper.state[model[0].bias]["mine"] = 1
    assert optimizer.state[model[0].bias].pop("mine") == 1
    wrapper.add_param_group({"params": [("more", nn.Parameter(torch.ones(3, 3)))], "lr": 0.5})
    assert [len(each.param_groups) for each in (wrapper, optimizer)] == [3, 3]
    del optimizer.param_groups[2]
    for each, its_model in ((wrapper, model), (twin, twin_model)):
        take_steps(its_model, each, 2, 4)
    assert_equal(weights_of(model), weights_of(twin_model))
    assert_same_state(wrapper.state_dict(), twin.state_dict())


@pytest.mark.parametrize("wrap", [Borrowing, Copying])
def test_state_and_groups_set_on_a_wrapper_are_those_of_what_it_wraps(wrap):
    model = model_of()
    optimizer = named_muon(model)
    take_steps(model, optimizer)
    wrapper = wrap(optimizer)
    wrapper.state = type(optimizer.state)(dict)
    assert optimizer.state[model[0].bias]["step"] == 0
    wrapper.param_groups = groups = list(optimizer.param_groups)
    assert optimizer.param_groups is groups
    take_steps(model, wrapper, 2, 3)
    assert wrapper.state[model[0].bias]["step"] == optimizer.state[model[0].bias]["step"] == 1


@pytest.mark.parametrize("wrap", [Borrowing, Copying])
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("comms", ["none", "replicated"])
def test_a_scaler_steps_a_wrapper_as_what_it_wraps(wrap, overflows, comms):
    """Where gradients are averaged the step itself unscales them, with what the scaler has set on the wrapper."""
    weights = []
    for wrapped in (False, True):
        model = model_of()
        # So large that a scale of the gradient shows in AdamW's update.
        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.05, eps=1.0, comms=comms)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        if overflows:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(wrap(optimizer) if wrapped else optimizer)
        scaler.update()
        weights.append(weights_of(model))
        is_same = all(map(torch.equal, weights[-1], weights_of(model_of())))
        assert is_same == overflows
        assert not vars(optimizer).keys() & {"found_inf", "grad_scale"}
        assert not hasattr(optimizer, "found_inf")
    assert_equal(*weights)
    model = model_of()
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.05, eps=1.0)
    if not overflows:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    for weight, expected in zip(weights[0], weights_of(model), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_hooks_of_steps_are_called_once_through_a_wrapper():
    model = model_of()
    optimizer = named_muon(model)
    calls = OrderedDict(pre=0, post=0)
    optimizer.register_step_pre_hook(lambda *_: calls.update(pre=calls["pre"] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.update(post=calls["post"] + 1))
    take_steps(model, Borrowing(optimizer), 0, 1)
    take_steps(model, Copying(optimizer), 1, 2)
    assert calls == {"pre": 2, "post": 2}
