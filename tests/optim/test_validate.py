"""Options that are set on a group after construction: checked as at construction, before anything changes."""

import inspect
import operator
import time
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import quintic
from quintic.optim import plan_cache
from quintic.optim.groups.group import Group
from quintic.optim.groups.options import options_affecting


def optimizer_of(**options):
    weight, bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6))
    optimizer = quintic.Muon(
        [{"params": [("weight", weight)]}, {"params": [("bias", bias)], "algorithm": "adamw"}], **options
    )
    for param in (weight, bias):
        param.grad = torch.randn_like(param)
    return optimizer, weight


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("normalize", "no rule", "normalize='no rule' must be None or 'neuron'"),
        ("master", "bf16", "master='bf16' must be"),
        ("telemetry_every", 0, "telemetry_every=0 must be an integer of at least 1"),
        ("step_every", 0, "step_every=0 must be"),
        ("orthogonalizer", "qr", "orthogonalizer='qr': choose"),
        ("orthogonalizer_steps", 0, "orthogonalizer_steps=0"),
        ("adjust_lr", "moon", "adjust_lr='moon': choose"),
        ("max_workspace_bytes", 0, "max_workspace_bytes=0 must be"),
        ("comms", "shared", "comms='shared' must be"),
        ("view", quintic.Heads(4), r"weight: Heads\(num_heads=4"),
        ("lr_multipliers", (1.0, 2.0), "weight: lr_multipliers are 2, the matrices 1"),
        ("on_nonfinite", "stop", "on_nonfinite='stop' must be"),
        ("qk_clip", 100, "qk_clip=100 must be"),
        ("nesterov", "no", "nesterov='no' must be"),
        ("kernels", "triton", "weight: kernels='triton'"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_changed_options_are_checked_before_the_next_step(key, value, message, stepped):
    optimizer, weight = optimizer_of()
    group = optimizer.param_groups[0]
    if stepped:
        optimizer.step()
    before, good = weight.detach().clone(), group[key]
    group[key] = value
    for use in (optimizer.step, optimizer.plan, optimizer.step):  # the mistake stays one until it is mended
        with pytest.raises(ValueError, match=message):
            use()
    assert torch.equal(weight, before)
    group[key] = good
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize(
    ("key", "value", "need"),
    [
        ("lr", None, "a number of at least 0"),
        ("lr", "0.1", "a number of at least 0"),
        ("lr", float("nan"), "a number of at least 0"),
        ("lr", torch.ones(2), "a number of at least 0"),
        ("lr", -1, "a number of at least 0"),
        ("lr", torch.tensor(-1.0), "a number of at least 0"),
        ("weight_decay", float("inf"), "a number of at least 0"),
        ("weight_decay", -0.1, "a number of at least 0"),
        ("momentum", torch.tensor(float("nan")), r"a number in \[0, 1\)"),
        ("momentum", 1.5, r"a number in \[0, 1\)"),
        ("momentum", -0.1, r"a number in \[0, 1\)"),
        ("normalize_beta", 1, r"a number in \[0, 1\)"),
        ("eps", None, "a number of at least 0"),
        ("eps", -1e-8, "a number of at least 0"),
        ("betas", 0.9, r"two numbers in \[0, 1\)"),
        ("betas", (0.9, None), r"two numbers in \[0, 1\)"),
        ("betas", (0.9, 1.0), r"two numbers in \[0, 1\)"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_what_a_schedule_sets_must_be_numbers_in_range(key, value, need, number):
    """Some of these ended a step in the middle, after the matrices had been stepped, others made weights undefined."""
    optimizer, weight = optimizer_of(normalize="neuron")
    optimizer.step()
    bias = optimizer.param_groups[1]["params"][0]
    kept = [tensor.detach().clone() for tensor in (weight, bias, optimizer.state[weight]["momentum_buffer"])]
    group = optimizer.param_groups[number]
    good, group[key] = group[key], value
    which = ("weight", "bias")[number]
    for use in (optimizer.step, optimizer.plan, optimizer.upload_hyperparameters, optimizer.step):
        with pytest.raises(ValueError, match=rf"parameter group {number} \({which}\): {key}=.* must be {need}"):
            use()
    group[key] = good
    assert all(map(torch.equal, (weight, bias, optimizer.state[weight]["momentum_buffer"]), kept))
    optimizer.step()
    assert not torch.equal(weight, kept[0])


def test_a_schedule_is_checked_when_it_changes_something_and_not_at_every_step(monkeypatch):
    optimizer, _ = optimizer_of()
    checked = []
    monkeypatch.setattr(plan_cache, "check_scheduled", lambda number, group: checked.append(number))
    optimizer.step()
    for lr in (0.1, 0.1, 0.1, 0.2):
        optimizer.param_groups[1]["lr"] = lr
        optimizer.step()
    assert checked == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float16(0.125), np.int64(1), np.array(0.1), np.array(1)], ids=repr
)
def test_numbers_of_numpy_are_numbers(value, tmp_path):
    gradients, stepped = [torch.randn(6, 4), torch.randn(6)], []
    for number in (value, value.item()):
        optimizer, weight = optimizer_of(lr=number, weight_decay=number, adamw_lr=number)
        bias = optimizer.param_groups[1]["params"][0]
        for _ in range(2):
            weight.grad, bias.grad = (gradient.clone() for gradient in gradients)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5 if value.dtype.kind == "f" else 2
        stepped.append((weight, bias))
        torch.save(optimizer.state_dict(), tmp_path / "state")
        optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert all(map(torch.equal, *stepped))


@pytest.mark.parametrize(
    "value", [np.array([0.1]), np.array("0.1"), np.array(0.1j), np.array(np.nan), 10**400], ids=repr
)
def test_arrays_that_are_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match=r"parameter group 0 \(weight\): lr=.* must be a number of at least 0"):
        optimizer_of(lr=value)


@pytest.mark.parametrize("number", [torch.tensor(0.1), np.array(0.1)], ids=["tensor", "array"])
def test_values_on_the_host_that_are_changed_in_place_are_seen(number):
    """As schedulers change a learning rate that is a tensor. The kernels went on with the old one."""
    optimizer, weight = optimizer_of()
    optimizer.param_groups[0]["lr"] = number
    optimizer.step()
    before, group = weight.detach().clone(), optimizer._plans.current_groups()[0]
    assert optimizer._plans.current_groups()[0] is group
    number *= 2
    assert optimizer._plans.current_groups()[0] is not group  # of the other one the values in a device's memory are
    optimizer.plan()
    number -= 1
    with pytest.raises(ValueError, match=r"lr=.* must be a number of at least 0"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_a_schedule_may_end_a_rounding_below_zero():
    optimizer, weight = optimizer_of()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.0, total_iters=10)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    assert -1e-15 < optimizer.param_groups[0]["lr"] < 0
    optimizer.param_groups[0]["kernels"] = "torch"  # everything is checked again
    optimizer.step()
    assert weight.isfinite().all()
    optimizer.load_state_dict(optimizer.state_dict())


# Made when they are needed: PyTorch warns of some.
NO_PARAMETERS = {
    "float8": (lambda: torch.ones(6, 4).to(torch.float8_e4m3fn), r": dtype torch\.float8_e4m3fn .* must be float64, "),
    "scales": (lambda: torch.ones(6, 4).to(torch.float8_e8m0fnu), r": dtype torch\.float8_e8m0fnu cannot"),
    "complex": (lambda: torch.ones(6, 4, dtype=torch.complex64), r": dtype torch\.complex64 cannot"),
    "int8": (lambda: torch.ones(6, 4, dtype=torch.int8), r": dtype torch\.int8 cannot .* leave out a frozen one"),
    "bool": (lambda: torch.ones(6, 4, dtype=torch.bool), r": dtype torch\.bool cannot"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8), r": dtype torch\.qint8"),
    "coo": (lambda: torch.eye(6).to_sparse(), r" is stored as torch\.sparse_coo"),
    "csr": (lambda: torch.eye(6).to_sparse_csr(), r" is stored as torch\.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 4)]), " is a nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged), " is a nested tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("kind", NO_PARAMETERS)
def test_what_is_no_dense_tensor_of_real_numbers_is_refused_by_name(kind, algorithm):
    """Some of these failed only in the first step, by an error of PyTorch's that named no parameter."""
    make, message = NO_PARAMETERS[kind]
    tensor = make()
    param = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    optimizer, _ = optimizer_of()
    with pytest.raises(TypeError, match=r"layer\.weight" + message):
        optimizer.add_param_group({"params": [("layer.weight", param)], "algorithm": algorithm})
    assert len(optimizer.param_groups) == 2


def test_a_model_converted_to_eight_bits_is_refused_by_name():
    optimizer, weight = optimizer_of()
    optimizer.step()
    weight.grad, weight.data = None, weight.data.to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"weight: dtype torch\.float8_e5m2 cannot"):
        optimizer.step()


def test_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"group0\.param0 has no shape yet: run one batch"):
        quintic.Muon(nn.LazyLinear(4, bias=False).parameters())


def test_changed_options_hold():
    optimizer, _ = optimizer_of()
    optimizer.step()
    assert optimizer.telemetry() == {}
    optimizer.param_groups[0]["telemetry_every"] = 1
    optimizer.step()
    assert list(optimizer.telemetry()) == ["weight"]
    optimizer.param_groups[0]["orthogonalizer"] = "svd"
    optimizer.step()
    assert optimizer.last_step().matrices == {"svd fp32": 1}


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "eps", "normalize_beta", "adamw_lr_ratio"])
def test_integers_beyond_all_floats_are_refused(key):
    with pytest.raises(ValueError, match=rf"parameter group 0 \(weight\): {key}=1000.* must be a number"):
        optimizer_of(**{key: 10**400})
    with pytest.raises(ValueError, match=r"parameter group 0 \(weight\): betas=.* must be two numbers"):
        optimizer_of(betas=(0.9, 10**400))


def test_checking_costs_a_steady_step_nothing():
    """About what comparing the options of the plan alone takes, one by one."""
    optimizer, _ = optimizer_of()
    groups, typed = optimizer.param_groups, optimizer._plans.current_groups()
    keys = options_affecting("plan")
    planned = [[group[key] for key in keys] for group in groups]

    def seconds(function):
        times = []
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(50):
                function()
            times.append(time.perf_counter() - start)
        return min(times)

    one_by_one = seconds(lambda: [[group[key] for key in keys] for group in groups] == planned)
    assert all(map(Group.has_options_of, typed, groups))
    assert seconds(lambda: all(map(Group.has_options_of, typed, groups))) < 3 * one_by_one


def test_schedules_look_at_no_parameter():
    optimizer, _ = optimizer_of()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * group["lr"]
    before = [one.params for one in optimizer._plans.groups]
    # Whatever is made for each parameter would cost a large model's step time.
    with (
        mock.patch("quintic.optim.plan_cache.Group.of", side_effect=AssertionError),
        mock.patch("quintic.optim.plan_cache.check_group", side_effect=AssertionError),
    ):
        optimizer.step()
    groups = optimizer._plans.groups
    assert [one.lr for one in groups] == [group["lr"] for group in optimizer.param_groups]
    assert all(map(operator.is_, (one.params for one in groups), before))


def test_schedules_do_not_make_the_plan_anew():
    optimizer, _ = optimizer_of()
    optimizer.step()
    runner, (group, other) = optimizer._plans.runner, optimizer.param_groups
    for value in (0.1, torch.tensor(0.2)):
        group.update(lr=value, momentum=0.5, weight_decay=0.3, normalize_beta=0.5, initial_lr=1.0)
        other.update(lr=value, betas=(0.5, 0.6), eps=1e-3)
        optimizer.step()
        assert optimizer._plans.runner is runner


# -- options that decide which state there is --------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["normalize", "master"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_state_that_a_changed_option_needs_begins_as_in_a_new_optimizer(key, steps_before):
    value = {"normalize": "neuron", "master": "mantissa"}[key]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 4).bfloat16()) for _ in range(2)]
    params[1].data.copy_(params[0])
    first = quintic.Muon([("weight", params[0])], lr=0.1)

    def step(*optimizers):
        gradient = torch.randn(6, 4).bfloat16()
        for param, optimizer in zip(params, optimizers, strict=False):
            param.grad = gradient.clone()
            optimizer.step()

    for _ in range(steps_before):
        step(first)
    first.param_groups[0][key] = value
    assert first.state[params[0]].keys() > {"momentum_buffer"}
    params[1].data.copy_(params[0])
    second = quintic.Muon([("weight", params[1])], lr=0.1, **{key: value})
    if steps_before:
        second.state[params[1]]["momentum_buffer"].copy_(first.state[params[0]]["momentum_buffer"])
    for _ in range(3):
        step(first, second)
        assert torch.equal(*params)
    assert first.state[params[0]].keys() == second.state[params[1]].keys() > {"momentum_buffer"}
    first.param_groups[0][key] = None
    assert first.state[params[0]].keys() == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("key", "value"), [("cautious", True), ("scale_decay", True), ("decay_coupling", "lr_squared")]
)
def test_options_of_decay_are_refused_where_the_rule_decides_about_decay(key, value):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    with pytest.raises(ValueError, match=rf"{key}={value!r} with the update rule radial brake, .*leave {key} out"):
        quintic.Muon([weight], update_rule="radial_brake", **{key: value})


def test_a_group_may_change_its_algorithm():
    optimizer, weight = optimizer_of()
    optimizer.step()
    optimizer.param_groups[0]["algorithm"] = "adamw"
    optimizer.step()
    assert optimizer.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(optimizer.state[weight]["step"]) == 1
    optimizer.param_groups[1]["algorithm"] = "muon"
    with pytest.raises(ValueError, match=r"bias: a 1-D parameter \(shape \(6,\)\) cannot be orthogonalised"):
        optimizer.step()


# -- what is given as parameters, or as a group ------------------------------------------------------------------------


def matrix():
    return nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3)), r"params is a Sequential: give quintic\.param_groups\(model\)"),
        (lambda: None, "params is None: give parameters, .* or parameter groups"),
        (lambda: 3, "params is an int: give parameters"),
        (lambda: "weights", "params is the string 'weights': give parameters"),
        (lambda: {"params": [matrix()]}, r"params is a dictionary: give \[group\]"),
        (lambda: {"weight": matrix()}, r"params is a dictionary: give params\.items\(\)"),
        (matrix, "params argument given to the optimizer should be an iterable of Tensors or dicts"),
        (lambda: [None], r"group 0: params\[0\] is None; an optimizer can only optimize Tensors"),
        (lambda: [matrix(), [matrix()]], r"group 0: params\[1\] is a list; an .* parameters or .* pairs in one list"),
        (lambda: [nn.Linear(2, 2).parameters()], r"group 0: params\[0\] is a generator; an .* in one list"),
        (lambda: [matrix(), {"params": [matrix()]}], r"params\[1\] is a dict; .* several groups as dictionaries"),
        (lambda: [(matrix(), "weight")], r"params\[0\] is a tuple; .* \(name, parameter\) pairs"),
        (lambda: [("weight", matrix(), 0.1)], r"params\[0\] is a tuple; .* \(name, parameter\) pairs"),
        (lambda: [("weight", "bias")], r"params\[0\] is the string 'bias'"),
        (lambda: [{"params": {matrix()}}], "need to be organized in ordered collections"),
        (lambda: [{"params": None}], "group 0: 'params' is None: give a list of parameters"),
        (lambda: [{"params": "weight"}], "group 0: 'params' is the string 'weight': give a list"),
        (lambda: [{"params": nn.Linear(2, 2)}], r"group 0: 'params' is a Linear: give module\.named_parameters\(\)"),
        (lambda: [{"params": {"w": matrix()}}], r"group 0: 'params' is a dict: give dictionary\.items\(\)"),
    ],
)
def test_what_holds_no_parameters_says_what_to_give(make, message):
    with pytest.raises(TypeError, match=message):
        quintic.Muon(make())


NO_GROUPS = {
    "list of parameters": (lambda: [matrix()], r"is a list: give {'params': parameters}"),
    "generator": (lambda: nn.Linear(2, 2).parameters(), r"is a generator: give {'params': parameters}"),
    "pairs": (lambda: [("weight", matrix())], r"is a list: give {'params': parameters}"),
    "list of groups": (lambda: [{"params": [matrix()]}], r"is a list: add its groups one by one: for group in groups:"),
    "parameter": (matrix, r"is a Parameter: give {'params': \[parameter\]}"),
    "module": (lambda: nn.Linear(2, 2), r"is a Linear: add each group of quintic\.param_groups\(module\)"),
    "None": (lambda: None, r"is None: give a dictionary, {'params': \[...\]}"),
    "number": (lambda: 3, r"is an int: give a dictionary"),
    "string": (lambda: "weight", r"is the string 'weight': give a dictionary"),
    "empty list": (list, r"is a list: give a dictionary"),
}


@pytest.mark.parametrize("kind", NO_GROUPS)
def test_what_is_no_group_says_what_to_give(kind):
    make, message = NO_GROUPS[kind]
    optimizer, weight = optimizer_of()
    with pytest.raises(TypeError, match=f"parameter group 2 {message}"):
        optimizer.add_param_group(make())
    with pytest.raises(TypeError, match=f"parameter group 1 {message}"):
        quintic.Muon([{"params": [matrix()]}, make()])
    assert len(optimizer.param_groups) == 2
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize(("group", "keys"), [({}, "no keys"), ({"parms": [], "lr": 0.1}, "'parms', 'lr'")])
def test_a_group_without_parameters_says_which_keys_it_has(group, keys):
    optimizer, _ = optimizer_of()
    with pytest.raises(ValueError, match=f"parameter group 2 has no 'params', it has {keys}; give"):
        optimizer.add_param_group(group)


def test_parameters_may_come_from_any_iterable():
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
    params = list(model.parameters())
    for given in (
        iter(params),
        tuple(params),
        (param for param in params),
        nn.ParameterList(params),
        model.named_parameters(),
        dict(model.named_parameters()).items(),
        [{"params": iter(params)}],
        ({"params": param} for param in params),
        [{"params": nn.ParameterList(params)}],
        [{"params": []}, {"params": params}],
    ):
        groups = quintic.Muon(given).param_groups
        assert [param for group in groups for param in group["params"]] == params
        assert len({name for group in groups for name in group["param_names"]}) == 2


def test_a_group_may_be_empty_and_filled_by_nobody():
    optimizer, weight = optimizer_of(lr=0.1)
    optimizer.add_param_group({"params": []})
    optimizer.add_param_group({"params": [], "algorithm": "adamw"})
    before = weight.detach().clone()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.step()
    scheduler.step()
    assert not torch.equal(weight, before)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 0, 0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 1.5e-4, 0.05, 1.5e-4]


# -- keywords of the constructor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("weight_dcay", "did you mean 'weight_decay'"),
        ("ns_steps", "did you mean 'orthogonalizer_steps'"),
        ("learning_rate", "did you mean 'lr'"),
        ("fused", "did you mean 'kernels'"),
        ("maximize", "negate the loss"),
        ("amsgrad", "quintic.Muon does not have it; leave it out"),
        ("transport", "the options are adamw_lr, adamw_lr_ratio, adamw_weight_decay, adjust_lr, betas, cautious"),
    ],
)
def test_unknown_keywords_name_the_nearest(key, hint):
    with pytest.raises(TypeError, match=f"^unknown option '{key}'; {hint}"):
        quintic.Muon([nn.Parameter(torch.ones(3, 3))], **{key: 1})
    with pytest.raises(TypeError, match=f"^unknown option '{key}'; {hint}"):
        quintic.explain(nn.Linear(3, 3), **{key: 1})


def test_the_constructor_keeps_its_signature():
    parameters = inspect.signature(quintic.Muon).parameters
    assert list(parameters)[:3] == ["params", "lr", "momentum"]
    assert parameters["betas"].default == (0.9, 0.95)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'params'"):
        quintic.Muon()
