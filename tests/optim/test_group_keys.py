"""Keys of groups that are no options: other code's are kept, slips of typing and unsupported options are refused."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from newer import needs_torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import quintic
from quintic.optim.group_keys import _is_one_slip
from quintic.optim.groups.options import OPTIONS

# Keys that wrappers, schedules and training code keep in groups, with values that they have there.
REAL_KEYS = {
    "rho": 0.05,  # SAM, Adadelta
    "adaptive": False,  # ASAM
    "lr_multiplier": 0.5,  # DINOv2
    "wd_multiplier": 0.0,
    "is_last_layer": True,
    "apply_lr_multiplier": True,
    "layer_id": 3,  # BEiT
    "lr_scale": 0.75,  # timm, MAE
    "lr_mult": 0.1,  # Detectron2, Megatron
    "decay_mult": 0.0,
    "wd_mult": 1.0,
    "is_expert_parallel": False,
    "initial_lr": 0.01,  # schedulers of PyTorch
    "max_lr": 0.1,
    "min_lr": 0.001,
    "swa_lr": 0.004,
    "base_momentum": 0.8,
    "max_momentum": 0.9,
    "initial_weight_decay": 0.1,
    "name": "backbone",
    "tag": ("a", 1),
    "tags": ["a", "b"],
    "group_name": None,
    "fused": True,  # torch.optim.AdamW
    "foreach": None,
    "capturable": True,
    "differentiable": False,
    "maximize": False,
    "amsgrad": False,
    "dampening": 0,
    "decoupled_weight_decay": True,
    "weight_decay_type": "decoupled",
    "weight_decouple": True,
    "momentum_decay": 0.004,
    "beta": 0.9,  # one number, where `betas` are two
    "beta1": 0.9,
    "beta3": 0.99,
    "eps1": 1e-30,
    "k": 0,
    "d0": 1e-6,
    "kernel": 3,
    "coefficient": 0.5,
    "lr_multipliers_by_name": {"a": 1.0},
    "learning_rate": 0.1,
    "_weight_decay": 0.1,
    "momentum2": 0.9,
    "lrs": 0.1,
    0: "a key that is no string",
}


def parameter(*shape):
    return nn.Parameter(torch.ones(shape))


def optimizer_of(extra, **options):
    group, vectors = {"params": [("w", parameter(4, 3))]}, {"params": [("b", parameter(4))], "algorithm": "adamw"}
    return quintic.Muon([{**group, **extra}, {**vectors, **extra}], **options)


@pytest.mark.parametrize("key", REAL_KEYS, ids=str)
def test_keys_of_other_code_stay_in_their_group(key):
    optimizer = optimizer_of({key: REAL_KEYS[key]})
    optimizer.add_param_group({"params": [parameter(2, 2)], key: REAL_KEYS[key]})
    optimizer.add_param_group({"params": [parameter(2, 3)]})
    assert [group[key] for group in optimizer.param_groups[:3]] == [REAL_KEYS[key]] * 3
    assert key not in optimizer.param_groups[3]
    assert key not in optimizer.defaults


def test_all_of_them_at_once_change_no_step():
    moved = []
    for extra in (REAL_KEYS, {}):
        optimizer = optimizer_of(extra, lr=0.1)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        torch.manual_seed(0)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        moved.append(params)
    assert all(map(torch.equal, *moved))
    assert not torch.equal(moved[0][0], parameter(4, 3))


def test_all_of_them_are_copied_saved_and_loaded():
    extra = {key: value for key, value in REAL_KEYS.items() if isinstance(key, str)}
    optimizer = optimizer_of(extra)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded, changed = optimizer_of({}), optimizer_of({**extra, "rho": 0.5, "mine": 1})
    saved = torch.load(file, weights_only=True)
    for other in (loaded, changed):
        other.load_state_dict(copy.deepcopy(saved))
    for twin in (loaded, changed, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group in twin.param_groups:
            assert {key: group[key] for key in extra} == extra
            assert type(group["tags"]) is list
    assert changed.param_groups[0]["mine"] == 1
    saved["param_groups"][0]["tags"].append("c")
    assert loaded.param_groups[0]["tags"] == ["a", "b"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.parametrize("flat", [False, True])
def test_keys_of_other_code_go_through_checkpoints_in_pieces(flat, tmp_path):
    options, model = StateDictOptions(flatten_optimizer_state_dict=flat), nn.Linear(3, 4)
    extra = {"rho": 0.05, "layer_id": 3, "name": "backbone", "is_last_layer": True}
    optimizers = [
        quintic.Muon([{**group, **extra, "rho": rho} for group in quintic.param_groups(model)]) for rho in (0.05, 0.5)
    ]
    dcp.save(get_optimizer_state_dict(model, optimizers[0], options=options), checkpoint_id=tmp_path, no_dist=True)
    wanted = get_optimizer_state_dict(model, optimizers[1], options=options)
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(model, optimizers[1], wanted, options=options)
    for group in optimizers[1].param_groups:
        assert {key: group[key] for key in extra} == extra


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])], ids=["tensor", "array"])
def test_arrays_in_keys_of_the_user_s_do_not_end_loading(value):
    """Groups are compared where they are other ones than the saved: such values cannot be by ==."""
    whole = quintic.Muon([{"params": [("a", parameter(2, 2)), ("b", parameter(2, 2))], "mine": value}], lr=0.5)
    parts = [{"params": [(name, parameter(2, 2))], "mine": value + 0} for name in "ab"]
    split = quintic.Muon(parts, lr=0.1)
    split.load_state_dict(whole.state_dict())
    assert [group["lr"] for group in split.param_groups] == [0.5, 0.5]
    for group in split.param_groups:
        np.testing.assert_array_equal(group["mine"], [1.0, 2.0])


# ------------------------------------------------------------------------------------------- wrappers and other classes


class Wrapper(torch.optim.Optimizer):
    """As SAM and its like: its own number goes into the groups, with the options, before the wrapped one sees them."""

    def __init__(self, params, base, rho, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def step(self, closure):
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
            shifts = [(p, p.grad * group["rho"] / norm) for group in self.param_groups for p in group["params"]]
            for param, shift in shifts:
                param.add_(shift)
        closure()
        with torch.no_grad():
            for param, shift in shifts:
                param.sub_(shift)
        self.base_optimizer.step()


def test_a_wrapper_puts_its_own_number_into_the_groups():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(32, 4)
    optimizer = Wrapper(quintic.param_groups(model), quintic.Muon, 0.05, lr=0.02, adamw_lr_ratio=0.05)
    assert [group["rho"] for group in optimizer.param_groups] == [0.05] * len(optimizer.param_groups)
    assert len(optimizer.param_groups) == 2
    assert [g.effective_lr for g in optimizer.base_optimizer._plans.current_groups()] == [0.02, 0.02 * 0.05]

    def closure():
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        return float(loss.detach())

    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(closure())
        optimizer.step(closure)
    assert losses[-1] < 0.5 * losses[0]
    more = parameter(3, 3)
    optimizer.add_param_group({"params": [("more", more)]})
    assert optimizer.param_groups[-1]["rho"] == 0.05
    more.grad = torch.randn(3, 3)
    optimizer.step(closure)
    assert not torch.equal(more, parameter(3, 3))


class WithOwnDefault(quintic.Muon):
    def __init__(self, params, rho=0.05, **options):
        super().__init__(params, **options)
        self.defaults["rho"] = rho
        for group in self.param_groups:
            group.setdefault("rho", rho)


def test_a_subclass_has_defaults_of_its_own():
    optimizer = WithOwnDefault([{"params": [parameter(3, 3)]}, {"params": [parameter(3, 4)], "rho": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [parameter(3, 5)]})
    optimizer.add_param_group({"params": [parameter(3, 6)], "rho": 0.25})
    for twin in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [group["rho"] for group in twin.param_groups] == [0.05, 0.5, 0.05, 0.25]
        assert twin.defaults["rho"] == 0.05


@pytest.mark.parametrize(
    "name", ["AdamW", "Adam", "SGD", pytest.param("Muon", marks=needs_torch("2.9", "torch.optim.Muon"))]
)
def test_groups_of_pytorch_s_optimizers_are_taken_as_they_are(name):
    other = getattr(torch.optim, name)([parameter(3, 3)], lr=0.1, weight_decay=0.0)
    (group,) = quintic.Muon(other.param_groups).param_groups
    assert {key: group[key] for key in other.param_groups[0]} == other.param_groups[0]
    assert group["lr"] == 0.1


# ---------------------------------------------------------------------------------------------------- slips of typing

SLIPS = {
    "momentun": (0.9, "momentum"),
    "mometum": (0.9, "momentum"),
    "momenutm": (0.9, "momentum"),
    "momentumm": (0.9, "momentum"),
    "Momentum": (0.9, "momentum"),
    "weight_dcay": (0.1, "weight_decay"),
    "weight-decay": (0.1, "weight_decay"),
    "weightdecay": (0.1, "weight_decay"),
    "WeightDecay": (0.1, "weight_decay"),
    "nestrov": (True, "nesterov"),
    "beta": ((0.9, 0.95), "betas"),
    "lr_multiplier": ((1.0, 2.0), "lr_multipliers"),
    "orthogonaliser": ("svd", "orthogonalizer"),
    "adjust_rl": ("unit_rms", "adjust_lr"),
    "normalise": ("neuron", "normalize"),
    "algoritm": ("adamw", "algorithm"),
    "adam_lr": (1e-3, "adamw_lr"),
    "comm": ("averaged", "comms"),
    "kernel": ("torch", "kernels"),
    "step_evry": (2, "step_every"),
}


@pytest.mark.parametrize("key", SLIPS)
def test_slips_name_the_option(key):
    value, option = SLIPS[key]
    message = f"parameter group 0: unknown option '{key}'; did you mean '{option}'.* set it once the optimizer is made"
    with pytest.raises(ValueError, match=message):
        optimizer_of({key: value})
    optimizer = quintic.Muon([parameter(2, 2)])
    with pytest.raises(ValueError, match=message.replace("group 0", "group 1")):
        optimizer.add_param_group({"params": [parameter(2, 2)], key: value})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][key] = value  # what the message says
    assert optimizer.plan().buckets


def test_slips_in_options_of_rules_and_algorithms_are_found():
    model = nn.Linear(3, 4)
    for groups in (
        quintic.param_groups(model, muon={"momentun": 0.9}),
        quintic.param_groups(model, rules=[quintic.Rule("weight", "muon", options={"momentun": 0.9})]),
    ):
        with pytest.raises(ValueError, match="unknown option 'momentun'; did you mean 'momentum'"):
            quintic.Muon(groups)


def test_no_option_is_a_slip_of_another():
    names = sorted(OPTIONS)
    assert not [(a, b) for a in names for b in names if a < b and _is_one_slip(a, b)]


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("abcde", "abcd", True),
        ("abcde", "bcde", True),
        ("abcde", "abxde", True),
        ("abcde", "abdce", True),
        ("abcde", "abced", True),
        ("abcde", "bacde", True),
        ("abcde", "abdcx", False),
        ("abcde", "axcdx", False),
        ("abcde", "abc", False),
        ("abcde", "edcba", False),
        ("abcde", "bcdea", False),
    ],
)
def test_one_slip(name, other, expected):
    assert _is_one_slip(name, other) is _is_one_slip(other, name) is expected


# ----------------------------------------------------------------------------- options that change PyTorch's optimizers

UNSUPPORTED = {
    "maximize": (True, "negate the loss"),
    "amsgrad": (True, "leave it out"),
    "differentiable": (True, "leave it out"),
    "dampening": (0.1, "leave it out"),
    "adjust_lr_fn": ("match_rms_adamw", "set adjust_lr"),
    "ns_steps": (3, "set orthogonalizer_steps"),
    "ns_coefficients": ((3.0, -4.0, 2.0), "set coefficients"),
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_options_that_would_change_the_update_are_refused(key):
    value, instead = UNSUPPORTED[key]
    message = rf"parameter group \d: {key}=.*, as PyTorch's optimizers have it, is not supported; .*{instead}"
    with pytest.raises(ValueError, match=message):
        optimizer_of({key: value})
    optimizer = optimizer_of({})
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2, 2)], key: value})
    assert len(optimizer.param_groups) == 2
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1].update({key: value, "lr": 0.7})
    with pytest.raises(ValueError, match=f"the saved options do not fit: {message}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lr"] != 0.7


@pytest.mark.parametrize("stepped", [False, True])
def test_options_that_would_change_the_update_are_refused_when_they_are_set(stepped):
    optimizer = optimizer_of({"maximize": False}, lr=0.1)
    weight, bias = (group["params"][0] for group in optimizer.param_groups)
    weight.grad, bias.grad = torch.ones(4, 3), torch.ones(4)
    if stepped:
        optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[1]["maximize"] = True
    for use in (optimizer.step, optimizer.plan, optimizer.state_dict, optimizer.step):
        with pytest.raises(ValueError, match="parameter group 1: maximize=True"):
            use()
    assert torch.equal(weight, before)
    optimizer.param_groups[1]["maximize"] = False
    optimizer.step()
    assert not torch.equal(weight, before)


def test_decay_through_the_gradient_is_refused_where_there_is_any():
    optimizer = optimizer_of({"decoupled_weight_decay": False})
    optimizer.param_groups[0]["weight_decay"] = 0.1
    message = r"parameter group 0: decoupled_weight_decay=False, .* weight decay never goes through the gradient"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match=message):
        optimizer_of({"decoupled_weight_decay": False}, weight_decay=0.1)


# ------------------------------------------------------------------------------------- keys that name the algorithm


def test_groups_of_keller_jordan_s_muon_say_which_algorithm_they_are_for():
    groups = [
        {"params": [parameter(4, 3)], "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.01},
        {"params": [parameter(4), parameter(5, 4)], "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10},
    ]
    optimizer = quintic.Muon(groups)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def test_groups_of_timm_s_muon_say_which_ones_are_adamw_s():
    groups = [{"params": [parameter(4, 3)], "use_fallback": True}, {"params": [parameter(4, 3)], "use_fallback": False}]
    assert [group["algorithm"] for group in quintic.Muon(groups).param_groups] == ["adamw", "muon"]


@pytest.mark.parametrize(
    ("key", "value", "algorithm", "meant"),
    [
        ("use_muon", True, "adamw", "muon"),
        ("use_muon", False, "muon", "adamw"),
        ("use_fallback", True, "muon", "adamw"),
    ],
)
def test_a_group_for_two_algorithms_is_an_error(key, value, algorithm, meant):
    message = f"group 0: {key}={value} means algorithm='{meant}', and the group has algorithm='{algorithm}'"
    with pytest.raises(ValueError, match=message):
        quintic.Muon([{"params": [parameter(4, 3)], key: value, "algorithm": algorithm}])
