"""State is made when it is needed, for the parameters that are there then, and moves along with them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from allocated import peak_bytes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import quintic
from quintic import Muon, Rows
from quintic.optim.state.state import master_key

OPTIONS = {"lr": 0.05, "adamw_lr": 0.05, "weight_decay": 0.1, "normalize": "neuron"}


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.LayerNorm(5)).to(dtype)


def optimizer_of(model, **options):
    return Muon(quintic.param_groups(model), **{**OPTIONS, **options})


def take_steps(optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_same(first, second):
    """Weights and state have the same bits."""
    for a, b in zip(params_of(first), params_of(second), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        mine, other = first.state[a], second.state[b]
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key


def exchange(optimizer, make):
    """Put other parameters into the groups, in place, as training libraries do."""
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            group["params"][index] = make(param)


def stored(optimizer):
    """The state that there is, whether it was asked for or not."""
    return optimizer.__dict__["state"]


# -- made when needed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_allocated_before_it_is_needed(offload):
    model = nn.Linear(1000, 1000, bias=False)

    def make():
        optimizer = Muon(quintic.param_groups(model), offload=offload, master="fp32")
        optimizer.plan()
        copy.deepcopy(optimizer.param_groups[0]["view"])
        return optimizer

    make()
    assert peak_bytes(make) < 100_000
    optimizer = make()
    assert not stored(optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert set(stored(optimizer)[model.weight]) == {"momentum_buffer"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_who_asks_for_state_gets_it_whole_and_new(dtype):
    model = model_of(dtype)
    optimizer = optimizer_of(model, master="fp32")
    state = {name: optimizer.state[param] for name, param in model.named_parameters()}
    master = ["master"] * (dtype == torch.bfloat16)
    assert set(state["0.weight"]) == {"momentum_buffer", "second_momentum_buffer", *master}
    assert set(state["3.bias"]) == {"step", "exp_avg", "exp_avg_sq", *master}
    assert all(not value.any() for of_param in state.values() for key, value in of_param.items() if key != "master")
    assert all(torch.equal(state[name]["master"], param.float()) for name, param in model.named_parameters() if master)
    assert all(
        value.dtype == (torch.float64 if dtype == torch.float64 and key != "step" else torch.float32)
        for of_param in state.values()
        for key, value in of_param.items()
    )


def test_a_save_before_the_first_step_has_the_keys_of_one_after_it():
    before, after = optimizer_of(model_of()), optimizer_of(model_of())
    take_steps(after, 0, 1)
    first, second = before.state_dict()["state"], after.state_dict()["state"]
    assert {key: set(value) for key, value in first.items()} == {key: set(value) for key, value in second.items()}
    loaded = optimizer_of(model_of())
    loaded.load_state_dict(copy.deepcopy(before.state_dict()))
    take_steps(loaded, 0, 1)
    assert_same(loaded, after)


def test_distributed_checkpoints_need_no_step_and_make_none():
    """PyTorch makes a step with gradients of zeros where `state` is empty, which would count, and decay."""
    model, plain = model_of(torch.bfloat16), model_of(torch.bfloat16)
    optimizer, expected = (optimizer_of(each, master="mantissa", step_every=2) for each in (model, plain))
    saved = get_optimizer_state_dict(model, optimizer)
    assert optimizer.last_step() == expected.last_step()
    assert [group["pending_steps"] for group in optimizer.param_groups] == [0, 0]
    assert all(not value.any() for state in saved["state"].values() for value in [state["mantissa"].view(torch.int16)])
    set_optimizer_state_dict(model, optimizer, saved)
    for each in (optimizer, expected):
        take_steps(each, 0, 4)
    assert_same(optimizer, expected)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_copies_before_and_after_the_first_step(duplicate, steps, master):
    optimizer = optimizer_of(model_of(torch.bfloat16), master=master)
    take_steps(optimizer, 0, steps)
    twin = duplicate(optimizer)
    assert bool(stored(twin)) is bool(steps)
    for each in (optimizer, twin):
        take_steps(each, steps, steps + 2)
    assert_same(optimizer, twin)


def test_a_copy_of_an_optimizer_whose_parameters_were_exchanged():
    optimizer, expected = optimizer_of(model_of()), optimizer_of(model_of())
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
    exchange(optimizer, lambda param: nn.Parameter(param.detach().clone()))
    twin = copy.deepcopy(optimizer)
    for each in (twin, expected):
        take_steps(each, 2, 4)
    assert_same(twin, expected)


# -- moved, converted, materialised ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_a_model_converted_before_the_first_step(planned, asked):
    model, expected = model_of(), model_of(torch.bfloat16)
    optimizer, other = (optimizer_of(each, master="mantissa") for each in (model, expected))
    if planned:
        optimizer.plan()
    if asked:
        assert "mantissa" not in optimizer.state[model[0].weight]
    model.bfloat16()
    assert {bucket.dtype for bucket in optimizer.plan()} == {torch.bfloat16}
    for each in (optimizer, other):
        take_steps(each, 0, 3)
    assert_same(optimizer, other)


@pytest.mark.parametrize("swap", [False, True])
def test_a_model_converted_between_steps_keeps_its_momentum(swap):
    """As if the state had been loaded into an optimizer of the converted model."""
    model = model_of()
    optimizer = optimizer_of(model, master="fp32")
    take_steps(optimizer, 0, 3)
    expected = copy.deepcopy(model).bfloat16()
    other = optimizer_of(expected, master="fp32")
    saved = copy.deepcopy(optimizer.state_dict())
    for key, param in zip(saved["state"], params_of(other), strict=True):
        saved["state"][key]["master"] = param.detach().float()
    other.load_state_dict(saved)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for param in model.parameters():
            param.grad = None
        model.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for each in (optimizer, other):
        take_steps(each, 3, 6)
    assert_same(optimizer, other)


def test_state_that_is_zero_in_its_first_row_only_is_not_new():
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = Muon([("weight", param)], master="fp32")
    param.grad = torch.tensor([0.0, 1.0, 2.0])[:, None] * torch.randn(3, 4)
    optimizer.step()
    momentum = optimizer.state[param]["momentum_buffer"].clone()
    assert momentum.any(1).tolist() == [False, True, True]
    exchange(optimizer, lambda param: nn.Parameter(param.detach().bfloat16()))
    assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"], momentum)


def test_a_model_converted_to_float32_has_no_masters_any_more():
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model, master="fp32")
    take_steps(optimizer, 0, 3)
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    model.float()
    assert set(optimizer.state[model[0].weight]) == {"momentum_buffer", "second_momentum_buffer"}
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)
    take_steps(optimizer, 3, 4)


def test_masters_are_made_of_the_weights_that_are_there():
    """Weights of a checkpoint may come after the first need of state, and before it."""
    found = []
    for asks in (False, True):
        model = model_of(torch.bfloat16)
        optimizer = optimizer_of(model, master="fp32")
        if asks:
            optimizer.state_dict()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        take_steps(optimizer, 0, 2)
        found.append(optimizer)
    assert_same(*found)


def test_the_default_device_does_not_matter_to_state():
    """Under `torch.device("meta")` used state counted as new, and was made anew."""
    optimizer, expected = optimizer_of(model_of()), optimizer_of(model_of())
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
        exchange(each, lambda param: param.detach().double().requires_grad_())
    with torch.device("meta"):
        optimizer.state_dict()
    assert_same(optimizer, expected)


def test_the_default_device_does_not_matter_to_loading():
    optimizer = optimizer_of(model_of())
    take_steps(optimizer, 0, 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][max(state_dict["state"])]["step"] = 2  # as some save it
    loaded = optimizer_of(model_of())
    with torch.device("meta"):
        loaded.load_state_dict(state_dict)
    for param, (key, values) in zip(params_of(loaded), optimizer.state_dict()["state"].items(), strict=True):
        assert all(torch.equal(loaded.state[param][name], value) for name, value in values.items()), key


@pytest.mark.parametrize("asked", [False, True])
def test_parameters_materialised_in_place(asked):
    with torch.device("meta"):
        model = model_of()
    optimizer = optimizer_of(model)
    if asked:
        optimizer.plan()
        assert optimizer.state[model[0].weight]["momentum_buffer"].is_meta
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    expected = model_of()
    model.load_state_dict(expected.state_dict())
    other = optimizer_of(expected)
    for each in (optimizer, other):
        take_steps(each, 0, 3)
    assert_same(optimizer, other)


def test_another_memory_format_takes_state_along():
    """Kernels pair entries by their place in memory."""
    found = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3, bias=False)
        optimizer = Muon([{"params": model.parameters(), "algorithm": "adamw"}], adamw_lr=0.1)
        take_steps(optimizer, 0, 2)
        if converts:
            model.to(memory_format=torch.channels_last)
        take_steps(optimizer, 2, 4)
        state = optimizer.state[model.weight]["exp_avg"]
        assert state.stride() == model.weight.stride()
        found.append((model.weight, state))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


def test_other_memory_is_noticed_without_a_new_plan():
    model, expected = model_of(), model_of()
    optimizer, other = optimizer_of(model), optimizer_of(expected)
    plan = optimizer.plan().buckets
    for step in range(3):
        for param in model.parameters():
            param.data = param.data.clone()
        for each in (optimizer, other):
            take_steps(each, step, step + 1)
    assert_same(optimizer, other)
    assert all(a is b for a, b in zip(plan, optimizer.plan().buckets, strict=True))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("first", "second"), [("fp32", "mantissa"), ("mantissa", "fp32")])
def test_masters_keep_their_values_in_the_other_form(first, second, offload):
    optimizer = optimizer_of(model_of(torch.bfloat16), master=first, offload=offload)
    expected = optimizer_of(model_of(torch.bfloat16), master=second)
    take_steps(optimizer, 0, 3)
    take_steps(expected, 0, 3)
    for group in optimizer.param_groups:
        group["master"] = second
    assert_same(optimizer, expected)
    for each in (optimizer, expected):
        take_steps(each, 3, 5)
    assert_same(optimizer, expected)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("first", "second"), [("fp32", "8bit"), ("mantissa", "8bit"), ("8bit", "fp32"), ("8bit", "mantissa")]
)
def test_masters_become_bytes_and_bytes_masters(first, second, offload):
    """From a byte nothing is lost; to a byte the last bits are, and no weight changes."""
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model, master=first, offload=offload)
    take_steps(optimizer, 0, 3)
    weights = [param.detach().clone() for param in model.parameters()]
    before = [bits_behind(param, optimizer) for param in model.parameters()]
    for group in optimizer.param_groups:
        group["master"] = second
    for param, weight, bits in zip(model.parameters(), weights, before, strict=True):
        assert torch.equal(param, weight)
        assert torch.equal(bits_behind(param, optimizer), bits & ~0xFF)
        assert (bits & 0xFF).any() == (second == "8bit")
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        take_steps(each, 3, 5)
    assert_same(optimizer, twin)


def bits_behind(param, optimizer):
    """The upper bits are the weight's, also of a float32 master; the others are what the optimizer keeps."""
    key = master_key(optimizer.state[param])
    kept, high = optimizer.state[param][key], param.detach().view(torch.int16).to(torch.int64) << 16
    if key == "master":
        assert torch.equal(kept.view(torch.int32).to(torch.int64) & ~0xFFFF, high)
        return kept.view(torch.int32).to(torch.int64)
    return high | kept.to(torch.int64) << (8 if key == "mantissa_byte" else 0)


def test_a_master_of_other_weights_does_not_become_the_other_form():
    """What is kept of bfloat16 weights says nothing of those that were converted to float16 and back, or so far."""
    model = model_of(torch.bfloat16)
    optimizer = optimizer_of(model, master="mantissa")
    take_steps(optimizer, 0, 3)
    for group in optimizer.param_groups:
        group["master"] = "fp32"
    for param in model.parameters():
        param.grad = None
    model.half()
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["master"], param.detach().float())


@pytest.mark.parametrize("view", [quintic.Matrix(transposed=True), quintic.Heads(2)])
def test_second_moments_of_other_matrices_begin_anew(view):
    """Those of rows were taken for those of columns, where there are as many."""
    params = [nn.Parameter(torch.eye(6) + 1 / (1 + torch.arange(36.0).view(6, 6))) for _ in range(2)]
    first, second = Muon([params[0]], **OPTIONS), Muon([{"params": [params[1]], "view": view}], **OPTIONS)
    take_steps(first, 0, 3)
    first.param_groups[0]["view"] = view
    params[1].data.copy_(params[0])
    second.state[params[1]]["momentum_buffer"].copy_(first.state[params[0]]["momentum_buffer"])
    for each in (first, second):
        take_steps(each, 3, 5)
    assert_same(first, second)


# -- exchanged ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_parameters_exchanged_for_copies_of_another_dtype(asked):
    """As mixed-precision wrappers do, which keep float32 copies of the weights and step these."""
    optimizer, expected = optimizer_of(model_of(torch.bfloat16)), optimizer_of(model_of(torch.bfloat16).float())
    if asked:
        optimizer.state_dict()
    exchange(optimizer, lambda param: param.detach().float().requires_grad_())
    for each in (optimizer, expected):
        take_steps(each, 0, 3)
    assert_same(optimizer, expected)


def test_used_state_follows_to_the_parameters_that_stand_in_the_same_places():
    optimizer, expected = optimizer_of(model_of(torch.bfloat16)), optimizer_of(model_of(torch.bfloat16))
    for each in (optimizer, expected):
        each.defaults["master"] = "mantissa"
        take_steps(each, 0, 2)
    exchange(optimizer, lambda param: nn.Parameter(param.detach().clone()))
    for each in (optimizer, expected):
        take_steps(each, 2, 4)
    assert_same(optimizer, expected)
    assert stored(optimizer).keys() == set(params_of(optimizer))


def test_state_belongs_to_its_parameter_before_its_place():
    optimizer, expected = (
        Muon([parameter for parameter in model_of().parameters() if parameter.ndim == 2]) for _ in "ab"
    )
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
    first, second = params_of(optimizer)
    group = optimizer.param_groups[0]
    new = nn.Parameter(torch.ones(4, 4))
    # Another order, and a parameter more.
    group["params"], group["param_names"] = [second, new, first], ["second", "new", "first"]
    for param, twin in zip((first, second), params_of(expected), strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], expected.state[twin]["momentum_buffer"])
    assert not optimizer.state[new]["momentum_buffer"].any()


def test_state_of_a_parameter_that_leaves_and_comes_back():
    optimizer, expected = (Muon([p for p in model_of().parameters() if p.ndim == 2]) for _ in "ab")
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
        group = each.param_groups[0]
        kept = group["params"].pop(), group["param_names"].pop()
        take_steps(each, 2, 3)
        if each is optimizer:
            assert len(each.state_dict()["state"]) == 1
        group["params"].append(kept[0])
        group["param_names"].append(kept[1])
        take_steps(each, 3, 4)
    assert_same(optimizer, expected)
    assert all(state["momentum_buffer"].any() for state in stored(optimizer).values())


def test_used_state_does_not_fit_another_shape():
    model = model_of()
    optimizer = optimizer_of(model)
    take_steps(optimizer, 0, 1)
    group = optimizer.param_groups[0]
    old = group["params"][1]
    group["params"][1] = nn.Parameter(torch.ones(7, 9))
    match = r"2\.weight: its momentum_buffer has shape \(5, 8\), and the parameter that replaced it needs \(7, 9\)"
    before = copy.deepcopy(stored(optimizer)[old])
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            optimizer.step()
    assert all(torch.equal(value, stored(optimizer)[old][key]) for key, value in before.items())
    group["params"][1] = old
    take_steps(optimizer, 1, 2)


def test_unused_state_is_made_anew_for_another_shape():
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.state_dict()
    new = nn.Parameter(torch.ones(7, 9))
    optimizer.param_groups[0]["params"][1] = new
    take_steps(optimizer, 0, 1)
    assert optimizer.state[new]["momentum_buffer"].shape == (7, 9)
    assert model[2].weight not in stored(optimizer)


def test_an_exchange_after_saving_and_loading_keeps_no_old_parameter():
    """As wrappers do that bring state to the device by `load_state_dict(state_dict())`, and shard the model next."""
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not stored(optimizer)
    old = [weakref.ref(param) for param in model.parameters()]
    placeholders = []
    exchange(optimizer, lambda param: placeholders.append(torch.empty(1)) or placeholders[-1])
    del model
    gc.collect()
    assert not any(ref() is not None for ref in old)
    new = iter(
        [param for param in model_of().parameters() if param.ndim == 2]
        + [p for p in model_of().parameters() if p.ndim < 2]
    )
    exchange(optimizer, lambda _: next(new))
    expected = optimizer_of(model_of())
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
    assert_same(optimizer, expected)


def test_state_brought_to_the_device_by_a_wrapper():
    """State is saved, copied to where the weights are, and loaded: before the first step, and once more after it."""
    with torch.device("meta"):
        model = model_of()
    optimizer = optimizer_of(model)
    optimizer.state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.load_state_dict(model_of().state_dict())
    expected = optimizer_of(model_of())
    for step in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in (optimizer, expected):
            take_steps(each, step, step + 1)
    assert_same(optimizer, expected)


# -- changed by others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tensors", "dicts", "dtypes", "mapping"])
def test_state_that_somebody_replaced_counts(way):
    optimizer, expected = optimizer_of(model_of()), optimizer_of(model_of())
    for each in (optimizer, expected):
        take_steps(each, 0, 2)
    if way == "mapping":
        optimizer.state = copy.copy(optimizer.state)
    for param, twin in zip(params_of(optimizer), params_of(expected), strict=True):
        for key, value in expected.state[twin].items():
            value.copy_((value * 0.5).bfloat16() if key != "step" else value)
        halves = {key: value.clone() for key, value in expected.state[twin].items()}
        if way == "dtypes":
            halves = {key: value.bfloat16() for key, value in halves.items()}
        if way == "tensors":
            optimizer.state[param].update(halves)
        else:
            optimizer.state[param] = halves
    for each in (optimizer, expected):
        take_steps(each, 2, 4)
    assert_same(optimizer, expected)


def test_state_that_somebody_cleared_is_made_anew():
    model = model_of()
    optimizer = optimizer_of(model)
    take_steps(optimizer, 0, 2)
    optimizer.state.clear()
    expected = optimizer_of(copy.deepcopy(model))
    for each in (optimizer, expected):
        take_steps(each, 2, 4)
    assert_same(optimizer, expected)


def test_keys_of_the_users_stay():
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.state[model[0].weight]["note"] = "mine"
    model.bfloat16()
    take_steps(optimizer, 0, 1)
    model.float()
    take_steps(optimizer, 1, 2)
    assert optimizer.state[model[0].weight]["note"] == "mine"


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_added_after_steps(offload):
    optimizer = Muon([nn.Parameter(torch.ones(4, 6))], offload=offload)
    take_steps(optimizer, 0, 2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 6))], "view": Rows(2)})
    momentum = optimizer.state[params_of(optimizer)[0]]["momentum_buffer"].clone()
    assert momentum.any()
    take_steps(optimizer, 2, 3)
    assert not torch.equal(optimizer.state[params_of(optimizer)[0]]["momentum_buffer"], momentum)


@pytest.mark.parametrize("ask", [lambda o: o.state_dict(), lambda o: o.step()])
def test_state_that_inference_mode_asks_for_first(ask):
    """A save during an evaluation before the first step: no step outside could change what it had made."""
    results = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = model_of()
        optimizer = optimizer_of(model)
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        with mode():
            ask(optimizer)
        take_steps(optimizer, 0, 2)
        results.append([param.detach() for param in params_of(optimizer)])
    assert all(map(torch.equal, *results))
