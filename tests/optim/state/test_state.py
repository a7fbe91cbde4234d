"""Saving and loading on one device: what is matched, what is restored, what is refused."""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import quintic


def square_layers(*names, **options):
    """Layers of one shape, so that only names tell them apart."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names}).bfloat16()
    optimizer = quintic.Muon(quintic.param_groups(model), normalize="neuron", master="mantissa", **options)
    return model, optimizer


def trained(*names, **options):
    model, optimizer = square_layers(*names, **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def assert_same_state(model, optimizer, twin_model, twin):
    twins = dict(twin_model.named_parameters())
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found = twin.state[twins[name]][key]
            assert found.dtype == value.dtype
            assert torch.equal(found, value), f"{name}: {key}"


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}], ids=str)
def test_dcp_state_finds_its_parameter_in_another_order(options):
    options = StateDictOptions(**options)
    model, optimizer = trained("a", "b", "c")
    twin_model, twin = square_layers("c", "a", "b")
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(twin_model, twin, saved, options=options)
    assert_same_state(model, optimizer, twin_model, twin)


def test_dcp_state_finds_its_parameter_without_dcp():
    model, optimizer = trained("a", "b", "c")
    twin_model, twin = square_layers("c", "a", "b")
    twin.load_state_dict(get_optimizer_state_dict(model, optimizer))
    assert_same_state(model, optimizer, twin_model, twin)


def test_state_in_another_order_leaves_the_names_where_they_are():
    model, optimizer = trained("a", "b", "c")
    twin_model, twin = square_layers("c", "a", "b")
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(model, optimizer, twin_model, twin)
    (group,) = twin.param_groups
    assert group["param_names"] == ["c.weight", "a.weight", "b.weight"]
    assert group["params"] == list(twin_model.parameters())


def test_dcp_state_of_own_names_in_another_order_is_an_error():
    _, optimizer = trained("a", "b")
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    saved["state"] = {f"net.{name}": saved["state"][key] for name, key in zip("ab", group["params"], strict=True)}
    group["params"], group["param_names"] = ["net.a", "net.b"], group["param_names"][::-1]
    with pytest.raises(ValueError, match=r"another order, b\.weight first, and under keys such as net\.a"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wide_mantissas_keep_their_bits(dtype):
    model, optimizer = trained("a")
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["mantissa"].dtype == torch.uint16
    saved["state"][0]["mantissa"] = torch.arange(65536 - 16, 65536, dtype=dtype).view(4, 4)
    optimizer.load_state_dict(saved)
    mantissa = optimizer.state[model["a"].weight]["mantissa"]
    assert mantissa.dtype == torch.uint16
    assert mantissa.tolist() == saved["state"][0]["mantissa"].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.float32])
def test_mantissas_of_other_types_are_refused(dtype):
    _, optimizer = trained("a")
    saved = optimizer.state_dict()
    saved["state"][0]["mantissa"] = torch.zeros(4, 4, dtype=dtype)
    with pytest.raises(ValueError, match=r"a\.weight: saved mantissa is torch\.\w+, and must be torch\.uint16"):
        optimizer.load_state_dict(saved)


def test_what_may_be_a_piece_of_one_rank_is_an_error_that_says_so():
    _, optimizer = trained("a")
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"a\.weight: saved momentum_buffer.*\(2, 4\).*\(4, 4\); if it is the piece"):
        optimizer.load_state_dict(saved)


# Of every option, a value in the saved state and another one that this run was made with. After loading:
RESTORED = {
    "lr": (0.5, 0.1),
    "momentum": (0.9, 0.8),
    "nesterov": (False, True),
    "weight_decay": (0.1, 0.0),
    "decay_coupling": ("lr_squared", "lr"),
    "scale_decay": (True, False),
    "cautious": ("strict", False),
    "orthogonalizer_steps": (6, 5),
    "coefficients": (((2.0, -1.5, 0.5),), None),
    "normalize_beta": (0.9, 0.95),
    "lr_multipliers": ((2.0,), None),
    "adamw_lr": (1e-3, 3e-4),
    "adamw_lr_ratio": (0.1, None),
    "adamw_weight_decay": (0.1, 0.0),
    "betas": ((0.8, 0.9), (0.9, 0.95)),
    "eps": (1e-6, 1e-8),
    "step_every": (2, 1),
    "on_nonfinite": ("skip", "propagate"),
    "telemetry_every": (3, None),
}
# Functions, what is no plain value, and where and with how much memory the work is done.
KEPT = {
    "orthogonalizer": ("newton_schulz", "gram"),
    "adjust_lr": ("unit_rms", "spectral"),
    "compute_dtype": (torch.float32, torch.bfloat16),
    "kernels": ("torch", "auto"),
    "qk_clip": (quintic.QKClip(threshold=50.0), None),
    "process_group": (None, None),
    "comms": ("averaged", "none"),
    "replicas": ("repeat", "auto"),
    "offload": (True, False),
    "max_workspace_bytes": (1000, 2**31),
    "state_dtype": ("bf16", None),
}
# These decide which state there is, and are equal wherever loading succeeds.
OF_THE_STATE = {"normalize", "update_rule", "master"}


def test_every_option_is_restored_or_kept():
    of_the_optimizer = {"params", "comm_order", "compute_order", "release_gradients"}
    options = set(inspect.signature(quintic.Muon).parameters) - of_the_optimizer
    assert options == {*RESTORED, *KEPT, *OF_THE_STATE}


@pytest.mark.parametrize(
    ("option", "saved_value", "own", "expected"),
    [
        *((option, saved, own, saved) for option, (saved, own) in RESTORED.items()),
        *((option, saved, own, own) for option, (saved, own) in KEPT.items()),
    ],
)
def test_hyperparameters_are_restored_and_functions_and_places_kept(option, saved_value, own, expected):
    model, _ = square_layers("a")
    optimizer = quintic.Muon(quintic.param_groups(model), normalize="neuron", master="mantissa")
    optimizer.param_groups[0][option] = saved_value
    saved = copy.deepcopy(optimizer.state_dict())
    _, twin = square_layers("a", **{option: own})
    twin.load_state_dict(saved)
    assert twin.param_groups[0][option] == expected


def test_hyperparameters_stay_tuples():
    coefficients = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
    options = {"coefficients": coefficients, "orthogonalizer_steps": 2, "lr_multipliers": (2.0,)}
    _, optimizer = trained("a", **options)
    saved = optimizer.state_dict()
    for key in ("betas", "coefficients", "lr_multipliers"):
        value = saved["param_groups"][0][key]
        saved["param_groups"][0][key] = [list(v) if isinstance(v, tuple) else v for v in value]
    model, twin = square_layers("a", **options)
    twin.load_state_dict(saved)
    (group,) = twin.param_groups
    assert (group["betas"], group["coefficients"], group["lr_multipliers"]) == ((0.9, 0.95), coefficients, (2.0,))
    model["a"].weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    twin.step()


def test_tensors_in_a_state_dict_share_memory():
    model, optimizer = trained("a")
    for key, value in optimizer.state_dict()["state"][0].items():
        assert value.data_ptr() == optimizer.state[model["a"].weight][key].data_ptr(), key


def test_only_options_are_in_groups_and_what_is_none_is_saved_as_none():
    _, optimizer = trained("a")
    saved = optimizer.state_dict()["param_groups"][0]
    assert saved.keys() == optimizer.param_groups[0].keys() == {*optimizer.defaults, "params", "param_names"}
    assert "not_of_groups" not in saved
    for key in ("compute_dtype", "process_group", "qk_clip", "comm_order", "release_gradients"):
        assert saved.get(key) is None, key
    _, other = trained("a", adjust_lr=None, compute_dtype=torch.bfloat16, qk_clip=quintic.QKClip(50))
    saved = other.state_dict()["param_groups"][0]
    assert saved["adjust_lr"] is None
    assert (saved["compute_dtype"], saved["qk_clip"][:20]) == ("torch.bfloat16", "QKClip(threshold=50,")


# A state saved when constructors left their list of names in every group, and None was saved as text.
OLD_OPTIONS = {
    "lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.25, "decay_coupling": "lr", "cautious": False,
    "orthogonalizer": "auto", "orthogonalizer_steps": 5, "coefficients": None, "compute_dtype": "None",
    "normalize": None, "normalize_beta": 0.95, "adjust_lr": "spectral", "lr_multipliers": None, "adamw_lr": 0.0003,
    "betas": [0.9, 0.95], "eps": 1e-08, "step_every": 1, "comms": "none", "process_group": "None",
    "transport": "collectives", "master": None, "qk_clip": "None", "offload": False, "on_nonfinite": "propagate",
    "max_workspace_bytes": 2147483648, "kernels": "auto", "telemetry_every": None,
    "not_of_groups": ["self", "params", "launch_order", "work_order", "__class__"],
    "view": "Matrix(transposed=False)", "pending_steps": 0,
}  # fmt: skip
OLD_STATE = {
    "state": {
        0: {"momentum_buffer": torch.tensor([[1.0, 2.0], [3.0, -0.0]])},
        1: {"step": torch.tensor(7.0), "exp_avg": torch.tensor([1.0, 2.0]), "exp_avg_sq": torch.tensor([3.0, 4.0])},
    },
    "param_groups": [
        {**OLD_OPTIONS, "algorithm": "muon", "param_names": ["weight"], "params": [0]},
        {**OLD_OPTIONS, "algorithm": "adamw", "lr": 0.125, "param_names": ["bias"], "params": [1]},
    ],
}


@pytest.mark.parametrize("transport", ["collectives", "copy_engines"])
def test_states_of_older_versions_load(transport):
    model = nn.Linear(2, 2)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=1.0, compute_dtype=torch.float32)
    saved = copy.deepcopy(OLD_STATE)
    for group in saved["param_groups"]:
        group["transport"] = transport
    optimizer.load_state_dict(saved)
    for key, param in enumerate([model.weight, model.bias]):
        for name, value in OLD_STATE["state"][key].items():
            assert torch.equal(optimizer.state[param][name], value)
            assert torch.equal(optimizer.state[param][name].signbit(), value.signbit())
    matrices, vectors = optimizer.param_groups
    assert (matrices["lr"], vectors["lr"]) == (0.5, 0.125)
    for group in (matrices, vectors):
        assert (group["momentum"], group["weight_decay"], group["betas"]) == (0.9, 0.25, (0.9, 0.95))
        assert group["compute_dtype"] == torch.float32
        assert group["process_group"] is None
        assert "not_of_groups" not in group
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for group in optimizer.state_dict()["param_groups"]:
        assert group.keys().isdisjoint({"not_of_groups", "transport"})


def test_numbers_of_numpy_are_saved_as_python_s(tmp_path):
    """Learning rates that NumPy computed were saved in a file that `torch.load` refused."""
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = quintic.Muon(
        [param], lr=np.float64(0.5), weight_decay=np.float32(0.25), betas=(np.float64(0.75), 0.875)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.exp2(-step))
    param.grad = torch.ones(4, 3)
    optimizer.step()
    scheduler.step()
    torch.save(optimizer.state_dict(), tmp_path / "state")
    (group,) = torch.load(tmp_path / "state", weights_only=True)["param_groups"]
    options = {key: group[key] for key in ("lr", "initial_lr", "weight_decay", "betas")}
    assert options == {"lr": 0.25, "initial_lr": 0.5, "weight_decay": 0.25, "betas": (0.75, 0.875)}
    assert type(optimizer.param_groups[0]["lr"]) is np.float64  # what is there stays
