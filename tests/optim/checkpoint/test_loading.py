"""Loading saved state: parameters in other groups, hyperparameters that come back, state of other optimizers."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from newer import torch_muon
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import quintic
from quintic.interchange import import_state

NO_DECAY = (quintic.Rule("norm.*", "adamw", options={"weight_decay": 0.0}),)


def new_optimizer(rules=(), **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    options = {"adamw_lr": 1e-3, "adamw_weight_decay": 0.1, "betas": (0.8, 0.9), **options}
    return model, quintic.Muon(quintic.param_groups(model, rules=rules), **options)


def trained(rules=(), **options):
    model, optimizer = new_optimizer(rules, **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a scheduler does
    return model, optimizer


def options_of(optimizer, *keys):
    """{name: values of its group}, for AdamW's parameters."""
    return {
        name: tuple(group[key] for key in keys)
        for group in optimizer.param_groups
        if group["algorithm"] == "adamw"
        for name in group["param_names"]
    }


def assert_same_state(model, optimizer, twin_model, twin):
    twins = dict(twin_model.named_parameters())
    for name, param in model.named_parameters():
        assert optimizer.state[param].keys() == twin.state[twins[name]].keys()
        for key, value in optimizer.state[param].items():
            assert torch.equal(twin.state[twins[name]][key], value), f"{name}: {key}"


# -- other groups ------------------------------------------------------------------------------------------------------


def test_a_split_group_keeps_what_it_was_split_for():
    model, optimizer = trained()
    twin_model, twin = new_optimizer(NO_DECAY, betas=(0.5, 0.6))
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(model, optimizer, twin_model, twin)
    # All groups agree about the rate and betas, and about the decay they do not.
    restored = (0.0005, (0.8, 0.9))
    assert options_of(twin, "weight_decay", "lr", "betas") == {
        **dict.fromkeys(["table.weight", "linear.bias"], (0.1, *restored)),
        **dict.fromkeys(["norm.weight", "norm.bias"], (0.0, *restored)),
    }
    assert twin.param_groups[0]["lr"] == 0.01


def test_merged_groups_get_what_they_agreed_about():
    model, optimizer = trained(NO_DECAY)
    twin_model, twin = new_optimizer(adamw_weight_decay=0.7, betas=(0.5, 0.6))
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(model, optimizer, twin_model, twin)
    assert set(options_of(twin, "weight_decay", "lr", "betas").values()) == {(0.7, 0.0005, (0.8, 0.9))}


def test_groups_that_share_parameters_through_others_are_looked_at_together():
    """Saved as {table, bias} and {norm}; now {table} and {bias, norm}."""
    model, optimizer = trained(NO_DECAY)
    rule = quintic.Rule("table.*", "adamw", options={"weight_decay": 0.3, "eps": 1e-6})
    twin_model, twin = new_optimizer((rule,), adamw_weight_decay=0.3)
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(model, optimizer, twin_model, twin)
    others = ["linear.bias", "norm.weight", "norm.bias"]
    assert options_of(twin, "weight_decay", "eps", "lr") == {
        "table.weight": (0.3, 1e-6, 0.0005),  # the saved groups disagree about the decay, these here about eps
        **dict.fromkeys(others, (0.3, 1e-8, 0.0005)),
    }


def test_groups_in_another_order_keep_their_own_options():
    model, optimizer = trained(NO_DECAY)
    twin_model, twin = new_optimizer()
    groups = quintic.param_groups(twin_model, rules=NO_DECAY)[::-1]
    twin = quintic.Muon(groups)
    twin.load_state_dict(optimizer.state_dict())
    assert_same_state(model, optimizer, twin_model, twin)
    assert options_of(twin, "weight_decay", "lr") == options_of(optimizer, "weight_decay", "lr")
    assert twin.param_groups[-1]["algorithm"] == "muon"
    assert twin.param_groups[-1]["lr"] == 0.01


def test_rates_come_back_together_or_not_at_all():
    """A rate without its ratio, or without what its scheduler computes it from, would be another rate."""
    _, optimizer = trained(adamw_lr_ratio=0.05, adamw_lr=3e-4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rule = quintic.Rule("norm.*", "adamw", options={"adamw_lr_ratio": 0.5})
    _, twin = new_optimizer((rule,), adamw_lr_ratio=0.05, adamw_lr=3e-4, lr=0.3)
    twin.load_state_dict(optimizer.state_dict())
    assert [group.effective_lr for group in twin._plans.current_groups()] == pytest.approx([0.01, 0.015, 0.15])
    assert ["initial_lr" in group for group in twin.param_groups] == [True, False, False]
    _, twin = new_optimizer(NO_DECAY, adamw_lr_ratio=0.05, adamw_lr=3e-4, lr=0.3)
    twin.load_state_dict(optimizer.state_dict())
    assert [group.effective_lr for group in twin._plans.current_groups()] == pytest.approx([0.01, 0.0005, 0.0005])
    assert all(group["initial_lr"] == 0.01 for group in twin.param_groups)


def test_a_rate_saved_before_there_were_ratios_is_the_rate():
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["adamw_lr_ratio"], group["adamw_weight_decay"]
    _, twin = new_optimizer(adamw_lr_ratio=0.05, adamw_lr=3e-4)
    twin.load_state_dict(saved)
    assert [group.effective_lr for group in twin._plans.current_groups()] == [0.01, 0.0005]


@pytest.mark.parametrize("option", ["cpu_offload", "full_state_dict", "flatten_optimizer_state_dict"])
def test_split_groups_through_distributed_checkpoints(option):
    options = StateDictOptions(**{option: True})
    model, optimizer = trained()
    twin_model, twin = new_optimizer(NO_DECAY)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    # PyTorch broadcasts what was saved in full, and fails if the groups differ; each rank can load it without.
    set_optimizer_state_dict(twin_model, twin, saved, options=options if "flatten" in option else None)
    assert_same_state(model, optimizer, twin_model, twin)
    assert options_of(twin, "weight_decay", "lr") == {
        **dict.fromkeys(["table.weight", "linear.bias"], (0.1, 0.0005)),
        **dict.fromkeys(["norm.weight", "norm.bias"], (0.0, 0.0005)),
    }


def test_parameters_on_one_side_only_are_named():
    model, optimizer = trained()
    saved = optimizer.state_dict()
    with_more = quintic.Muon([*quintic.param_groups(model), {"params": [("extra", nn.Parameter(torch.ones(3, 3)))]}])
    with pytest.raises(ValueError, match=r"^extra is not in the saved optimizer state, whose names are like linear\.w"):
        with_more.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"^extra is in the saved optimizer state, and is not a parameter"):
        optimizer.load_state_dict(with_more.state_dict())


def test_a_parameter_of_another_algorithm_is_named():
    model, optimizer = trained()
    twin = quintic.Muon(quintic.param_groups(model, rules=[quintic.Rule("linear.weight", "adamw")]))
    with pytest.raises(ValueError, match=r"^linear\.weight was saved with algorithm=muon, parameter group 0 has adamw"):
        twin.load_state_dict(optimizer.state_dict())


def test_equal_names_in_saved_state_are_told_apart_by_their_groups():
    """Older versions saved them; an optimizer of today has other names."""

    def two(values):
        params = [nn.Parameter(torch.full((2, 2), value)) for value in values]
        return params, quintic.Muon([{"params": [(f"{i}.weight", params[i])], "lr": 0.1} for i in range(2)])

    params, optimizer = two([1.0, 2.0])
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    others, twin = two([1.0, 2.0])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["param_names"] = ["weight"]
    twin.load_state_dict(saved)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(twin.state[other]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])
    one = quintic.Muon([{"params": [("weight", others[0])]}])
    with pytest.raises(ValueError, match="has 2 parameter groups, this one has 1, and without names in both"):
        one.load_state_dict(saved)


def test_saved_options_that_do_not_fit_change_nothing():
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["betas"] = 0.9
    saved["state"][1]["exp_avg"].add_(1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"the saved options do not fit: parameter group 1 \(table\.weight\): betas=0\.9"
    ):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert str(after) == str(before)
    assert model is not None


# -- state of other optimizers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda params: torch.optim.AdamW(params),
            r"state of torch\.optim\.AdamW, not.*import_state\(.*\"torch\", names",
        ),
        (lambda params: torch_muon()([p for p in params if p.ndim == 2]), r"state of torch\.optim\.Muon, not"),
        (lambda params: torch.optim.SGD(params, momentum=0.9), "state of another optimizer, not of quintic.Muon"),
    ],
)
def test_state_of_other_optimizers_says_what_to_do(other, message):
    model, optimizer = new_optimizer()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other(list(model.parameters())).state_dict())
    with pytest.raises(ValueError, match=r"a state dict has 'state' and 'param_groups', this one has \['model'"):
        optimizer.load_state_dict({"optimizer": {}, "model": {}})


def test_what_the_message_says_works():
    """Matrices begin anew, everything else goes on with AdamW's moments."""
    model, optimizer = new_optimizer()
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    before.step()
    algorithm = {name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]}
    names = [name if algorithm[name] == "adamw" else None for name, _ in model.named_parameters()]
    imported = import_state(optimizer, before.state_dict(), source="torch", names=names)
    assert sorted(imported) == sorted(name for name in names if name)
    assert torch.equal(optimizer.state[model["norm"].bias]["exp_avg"], before.state[model["norm"].bias]["exp_avg"])
    assert not optimizer.state[model["linear"].weight]["momentum_buffer"].any()


@pytest.mark.parametrize("stepped", [False, True])
def test_keys_of_the_users_are_loaded_as_they_were_saved(stepped):
    """A state dict with one could be loaded by no optimizer, though `state_dict` saves them."""
    optimizer, twin = (quintic.Muon([("w", nn.Parameter(torch.ones(4, 3)))]) for _ in range(2))
    (param,), (other,) = (each.param_groups[0]["params"] for each in (optimizer, twin))
    if stepped:
        param.grad = torch.randn(4, 3)
        optimizer.step()
    optimizer.state[param]["average"] = torch.full((4, 3), 7, dtype=torch.bfloat16)
    optimizer.state[param]["note"] = ["mine"]
    twin.state[other]["kept"] = 5
    saved = optimizer.state_dict()
    twin.load_state_dict(saved)
    assert torch.equal(twin.state[other]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])
    average = twin.state[other]["average"]
    assert average.dtype == torch.bfloat16
    assert torch.equal(average, optimizer.state[param]["average"])
    assert (twin.state[other]["note"], twin.state[other]["kept"]) == (["mine"], 5)
    average.zero_()  # a copy, as the rest of the state
    twin.state[other]["note"].append("other")
    assert optimizer.state[param]["average"].all()
    assert optimizer.state[param]["note"] == ["mine"]


# -- masters -----------------------------------------------------------------------------------------------------------


def of_bfloat16(master):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    return param, quintic.Muon([("weight", param)], lr=0.01, master=master)


def take_step(param, optimizer, step):
    param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(param.dtype)
    optimizer.step()


MASTERS = (None, "fp32", "mantissa", "8bit")
KEYS = {"fp32": "master", "mantissa": "mantissa", "8bit": "mantissa_byte"}


def value_of(param, state, master):
    """The bits of the value behind bfloat16 weights, read independently of the library."""
    upper = param.detach().view(torch.int16).to(torch.int64) & 0xFFFF
    if master == "fp32":
        return state["master"].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return (upper << 16) + {
        None: lambda: 0,
        "mantissa": lambda: state["mantissa"].to(torch.int64),
        "8bit": lambda: state["mantissa_byte"].to(torch.int64) << 8,
    }[master]()


def of_form(bits, master):
    return bits & {None: ~0xFFFF, "fp32": ~0, "mantissa": ~0, "8bit": ~0xFF}[master]


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("saved", MASTERS)
@pytest.mark.parametrize("wanted", MASTERS)
def test_a_saved_master_becomes_the_form_that_is_set(saved, wanted, weights_first):
    param, optimizer = of_bfloat16(saved)
    for step in range(2):
        take_step(param, optimizer, step)
    checkpoint, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    before = value_of(param, optimizer.state[param], saved)
    twin_param, twin = of_bfloat16(wanted)
    take_step(twin_param, twin, 7)
    twin.state[twin_param]["note"] = "mine"
    strict = saved is None or wanted is not None
    if not strict:
        untouched = copy.deepcopy(twin.state_dict())
        message = rf"weight: the state was saved with master='{saved}' and this optimizer has master=None, which drops"
        with pytest.raises(ValueError, match=message):
            twin.load_state_dict(state)
        for key, value in untouched["state"][0].items():
            assert key == "note" or torch.equal(twin.state[twin_param][key], value)
    loads = [lambda: twin_param.data.copy_(checkpoint), lambda: twin.load_state_dict(state, strict=strict)]
    for load in loads if weights_first else loads[::-1]:
        load()
    assert twin.param_groups[0]["master"] == wanted
    own = twin.state[twin_param]
    assert own.keys() == {"momentum_buffer", "note"} | ({KEYS[wanted]} if wanted else set())
    assert torch.equal(value_of(twin_param, own, wanted), of_form(before, wanted))
    assert torch.equal(own["momentum_buffer"], optimizer.state[param]["momentum_buffer"])
    # As if the option had been changed after loading.
    optimizer.param_groups[0]["master"] = wanted
    for step in (2, 3):
        take_step(param, optimizer, step)
        take_step(twin_param, twin, step)
    assert torch.equal(param, twin_param)
    if wanted:
        assert torch.equal(optimizer.state[param][KEYS[wanted]], own[KEYS[wanted]])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, on purpose
@pytest.mark.parametrize(("saved", "wanted"), [pair for pair in itertools.permutations(MASTERS, 2) if pair[1]])
def test_a_distributed_checkpoint_with_another_master_is_never_cast(saved, wanted, tmp_path):
    """It is read into the state that there is, by keys, of which every form has another."""
    model, optimizer = in_a_model(saved)
    take_step(model.weight, optimizer, 0)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    other, twin = in_a_model(wanted)
    state = get_optimizer_state_dict(other, twin)
    message = rf"Missing key in checkpoint state_dict: state\.weight\.{KEYS[wanted]}\."
    with pytest.raises(dcp.CheckpointException, match=message):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    # The way that the manual names: with the saved master, which is changed afterwards.
    other.load_state_dict(model.state_dict())
    twin.param_groups[0]["master"] = saved
    state = get_optimizer_state_dict(other, twin)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, twin, state)
    twin.param_groups[0]["master"] = wanted
    before = value_of(model.weight, optimizer.state[model.weight], saved)
    assert torch.equal(value_of(other.weight, twin.state[other.weight], wanted), of_form(before, wanted))


@pytest.mark.parametrize(("saved", "wanted"), [("mantissa", "8bit"), ("8bit", "fp32"), (None, "8bit")])
def test_a_whole_state_dict_with_another_master_is_set(saved, wanted):
    model, optimizer = in_a_model(saved)
    take_step(model.weight, optimizer, 0)
    state = get_optimizer_state_dict(model, optimizer)
    other, twin = in_a_model(wanted)
    set_optimizer_state_dict(other, twin, copy.deepcopy(state))
    other.load_state_dict(model.state_dict())
    before = value_of(model.weight, optimizer.state[model.weight], saved)
    assert torch.equal(value_of(other.weight, twin.state[other.weight], wanted), of_form(before, wanted))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, on purpose
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("saved", MASTERS)
def test_masters_that_a_distributed_checkpoint_leaves_out_are_named(saved, is_flat, tmp_path):
    option = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optimizer = in_a_model(saved)
    take_step(model.weight, optimizer, 0)
    states = get_state_dict(model, optimizer, options=option)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path, no_dist=True)

    def load(other, twin):
        states = get_state_dict(other, twin, options=option)
        dcp.load(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path, no_dist=True)
        set_state_dict(other, twin, model_state_dict=states[0], optim_state_dict=states[1], options=option)

    other, twin = in_a_model(None)
    take_step(other.weight, twin, 7)
    message = rf"^weight: saved with master='{saved}', and loaded without: .* make it with master='{saved}', load again"
    with pytest.warns(UserWarning, match=message) if saved else contextlib.nullcontext():
        load(other, twin)
    assert torch.equal(other.weight, model.weight)
    assert twin.state[other.weight].keys() == {"momentum_buffer"}
    assert torch.equal(twin.state[other.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])
    # What the message says.
    again, with_master = in_a_model(saved)
    load(again, with_master)
    before = value_of(model.weight, optimizer.state[model.weight], saved)
    assert torch.equal(value_of(again.weight, with_master.state[again.weight], saved), before)


@pytest.mark.parametrize(("saved", "wanted"), [pair for pair in itertools.permutations(MASTERS, 2) if pair[1]])
def test_a_master_that_pytorch_adds_to_a_whole_state_is_not_taken_for_a_saved_one(saved, wanted):
    """Where the optimizer was stepped, its own bits would complete the loaded weights, which they do not belong to."""
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = in_a_model(saved)
    take_step(model.weight, optimizer, 0)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=whole))
    other, twin = in_a_model(wanted)
    take_step(other.weight, twin, 7)
    keys = {"model_state_dict": states[0], "optim_state_dict": states[1], "options": whole}
    if saved is not None:
        message = rf"^weight: the state was saved with master='{saved}', and .* '{KEYS[wanted]}' of this optimizer"
        with pytest.raises(ValueError, match=message):
            set_state_dict(other, twin, **keys)
        twin.param_groups[0]["master"] = saved
    set_state_dict(other, twin, **keys)
    twin.param_groups[0]["master"] = wanted
    before = value_of(model.weight, optimizer.state[model.weight], saved)
    assert torch.equal(value_of(other.weight, twin.state[other.weight], wanted), of_form(before, wanted))


def in_a_model(master):
    torch.manual_seed(0)
    model = nn.Linear(4, 6, bias=False).bfloat16()
    return model, quintic.Muon([("weight", model.weight)], lr=0.01, master=master)


def test_weights_that_were_wide_when_they_were_saved_had_no_master_to_lose():
    """They are rounded to bfloat16 now, which is another matter."""
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = quintic.Muon([("weight", param)], lr=0.01, master="mantissa")
    take_step(param, optimizer, 0)
    twin_param, twin = of_bfloat16("mantissa")
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not twin.state[twin_param]["mantissa"].any()


@pytest.mark.parametrize("wanted", ["mantissa", "8bit"])
def test_a_frozen_parameter_keeps_a_saved_master_of_another_form(wanted):
    param, optimizer = of_bfloat16("fp32")
    take_step(param, optimizer, 0)
    twin_param, twin = of_bfloat16(wanted)
    twin_param.requires_grad_(False)
    twin_param.data.copy_(param.detach())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = value_of(param, optimizer.state[param], "fp32")
    twin_param.requires_grad_(True)
    assert torch.equal(value_of(twin_param, twin.state[twin_param], wanted), of_form(before, wanted))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("dtype", "saved"), [(torch.float32, "fp32"), (torch.float32, "8bit"), (torch.float16, "8bit")]
)
def test_a_saved_master_of_weights_of_another_dtype_is_an_error(dtype, saved, strict):
    """The bits complete bfloat16 weights: float32 weights without them would be others."""
    param, optimizer = of_bfloat16(saved)
    take_step(param, optimizer, 0)
    twin = quintic.Muon([("weight", nn.Parameter(param.detach().to(dtype)))], master="fp32")
    with pytest.raises(ValueError, match=r"weight: saved state has .*for weights of the dtype they had"):
        twin.load_state_dict(optimizer.state_dict(), strict=strict)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.float32])
def test_saved_bytes_of_integers_that_hold_them_are_loaded(dtype):
    param, optimizer = of_bfloat16("8bit")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["mantissa_byte"] = torch.arange(104, 128).to(dtype).view(6, 4)
    if dtype in (torch.int8, torch.float32):
        with pytest.raises(ValueError, match=r"weight: saved mantissa_byte is torch\.\w+, and must be torch.uint8"):
            optimizer.load_state_dict(saved)
        return
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["mantissa_byte"].tolist() == torch.arange(104, 128).view(6, 4).tolist()


@pytest.mark.parametrize("source", ["quintic", "torch"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(8, device="meta"), "on the meta device, without values"),
        (torch.zeros(8).to_sparse(), r"sparse \(torch.sparse_coo\)"),
        (torch.zeros(8, dtype=torch.complex64), "torch.complex64"),
        (None, "a NoneType"),
    ],
    ids=["meta", "sparse", "complex", "none"],
)
def test_state_without_dense_real_values_changes_nothing(value, message, source):
    """The last parameter of a saved state has it: those before it are not loaded."""
    model = nn.LayerNorm(8)
    fresh = quintic.Muon(quintic.param_groups(model))
    trained = torch.optim.AdamW(model.parameters()) if source == "torch" else quintic.Muon(quintic.param_groups(model))
    model(torch.arange(8.0)).square().sum().backward()
    trained.step()
    saved = trained.state_dict()
    saved["state"][1]["exp_avg"] = value
    loads = {
        "quintic": lambda: fresh.load_state_dict(saved),
        "torch": lambda: import_state(fresh, saved, source="torch", names=["weight", "bias"]),
    }
    with pytest.raises(ValueError, match=rf"bias: saved exp_avg is {message}, and must be a"):
        loads[source]()
    for state in fresh.state_dict()["state"].values():
        assert not any(values.any() for values in state.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, on purpose
def test_flat_pieces_load_into_other_groups(tmp_path):
    """As docs/how-to/checkpoints.md says; PyTorch's usual form numbers the groups, and misses one."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def made_with(rules):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        return model, quintic.Muon(quintic.param_groups(model, rules=rules))

    model, optimizer = made_with(())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.25  # a schedule's
    dcp.save({"flat": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path / "flat")
    dcp.save({"numbered": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "numbered")
    other, regrouped = made_with([quintic.Rule("1.*", "adamw", options={"weight_decay": 0.5})])
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"numbered": get_optimizer_state_dict(other, regrouped)}, checkpoint_id=tmp_path / "numbered")
    loaded = {"flat": get_optimizer_state_dict(other, regrouped, options=options)}
    dcp.load(loaded, checkpoint_id=tmp_path / "flat")
    set_optimizer_state_dict(other, regrouped, loaded["flat"], options=options)
    for (name, param), twin in zip(other.named_parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[twin].items():
            assert torch.equal(regrouped.state[param][key], value), (name, key)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    for group in regrouped.param_groups:
        assert {rates[name] for name in group["param_names"]} == {group["lr"]}
        assert (group["weight_decay"] == 0.5) == ("1.weight" in group["param_names"])


@pytest.mark.parametrize("groups", [[], [{"param_names": ["weight"], "algorithm": "adamw"}]], ids=["none", "one"])
def test_saved_state_without_groups_is_refused(groups):
    optimizer = quintic.Muon(quintic.param_groups(nn.LayerNorm(4)))
    with pytest.raises(ValueError, match="the saved optimizer state has no parameter groups, or one of them"):
        optimizer.load_state_dict({"state": {}, "param_groups": groups})


def in_group(saved, **changed):
    first, *others = saved["param_groups"]
    return {**saved, "param_groups": [{**first, **changed}, *others]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: None, "the state dict is a NoneType: give what optimizer.state_dict"),
        (lambda saved: [saved], "the state dict is a list"),
        (lambda saved: "checkpoint.pt", "the state dict is a str"),
        (lambda saved: {**saved, "state": None}, "'state' is a NoneType, and must be a mapping"),
        (lambda saved: {**saved, "state": []}, "'state' is a list, and must be a mapping"),
        (lambda saved: {**saved, "param_groups": None}, "'param_groups' is a NoneType, and must be a list of"),
        (lambda saved: {**saved, "param_groups": [None]}, "parameter group 0 is a NoneType, not a mapping"),
        (
            lambda saved: in_group(saved, params=None),
            "parameter group 0 has NoneType as 'params', and must have a list",
        ),
        (lambda saved: in_group(saved, param_names=3), "parameter group 0 has int as 'param_names', and must have"),
        (
            lambda saved: {**saved, "state": {**saved["state"], 0: [1]}},
            r"^\w+\.weight: the saved state is a list, and must",
        ),
    ],
)
def test_what_is_no_state_dict_is_named(damage, message):
    _, optimizer = trained()
    saved = optimizer.state_dict()
    with pytest.raises(TypeError, match=message):
        optimizer.load_state_dict(damage(saved))
    optimizer.load_state_dict(saved)
