"""`adjust_lr` under its old name `lr_scale`, and the number that timm, MAE and BEiT keep under that name in groups."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optional_libraries import load, quietly
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import quintic
from quintic import Rule

SCALES = (0.5, 0.25)
RENAMED = pytest.warns(FutureWarning, match="'lr_scale' is called 'adjust_lr' now")


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer0 = nn.Linear(4, 8, bias=False)
        self.layer1 = nn.Linear(8, 6, bias=False)

    def group_matcher(self, coarse=False):
        return lambda name: int(name[5])


def scaled_groups(model, scales=SCALES):
    """Return a group for each layer, with a factor on its rate; one of None for a group without."""
    layers = zip((model.layer0, model.layer1), scales, strict=True)
    return [{"params": [layer.weight]} | ({} if scale is None else {"lr_scale": scale}) for layer, scale in layers]


def factor_of(optimizer, **options):
    """Return the factor on the rate that a wide weight is stepped with."""
    weight = nn.Parameter(torch.zeros(4, 16))
    optimizer.add_param_group({"params": [weight], **options})
    weight.grad = torch.randn(4, 16)
    optimizer.step()
    return float(torch.linalg.matrix_norm(weight.detach()) / 2 / optimizer.param_groups[-1]["lr"])


def new_optimizer(**options):
    return quintic.Muon([nn.Parameter(torch.zeros(2, 2))], lr=0.1, orthogonalizer="svd", **options)


# ------------------------------------------------------------------------------------------------ a number is a factor


@pytest.mark.parametrize("scale", [0.5, 1, torch.tensor(0.5), True])
def test_a_number_stays_in_its_group(scale):
    optimizer = quintic.Muon(scaled_groups(TwoLayers(), (scale, None)))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": scale})
    first, second, third = optimizer.param_groups
    assert first["lr_scale"] is third["lr_scale"] is scale
    assert "lr_scale" not in second
    assert {group["adjust_lr"] for group in optimizer.param_groups} == {"spectral"}
    assert "lr_scale" not in optimizer.defaults


def test_a_number_is_copied_saved_and_loaded_with_its_group():
    optimizer = quintic.Muon(scaled_groups(TwoLayers()), lr=0.1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = quintic.Muon(scaled_groups(TwoLayers(), (1.0, None)))
    other.load_state_dict(saved)
    for twin in (other, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [group["lr_scale"] for group in twin.param_groups] == list(SCALES)


def test_a_step_does_not_multiply_with_the_number():
    """As in PyTorch's optimizers. Schedules multiply, and rates would be scaled twice."""
    stepped = []
    for scales in (SCALES, (None, None)):
        model = TwoLayers()
        optimizer = quintic.Muon(scaled_groups(model, scales), lr=0.1)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        stepped.append(list(model.parameters()))
    assert all(map(torch.equal, *stepped))


def test_the_loop_of_mae_and_beit_multiplies_once():
    """Each group steps `lr_scale` times as far as the same group without: by the loop, and by nothing besides."""
    moved = []
    for scales in (SCALES, (1.0, None)):
        model = TwoLayers()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = quintic.Muon(scaled_groups(model, scales))
        for group in optimizer.param_groups:
            if "lr_scale" in group:
                group["lr"] = 0.1 * group["lr_scale"]
            else:
                group["lr"] = 0.1
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        moved.append([p.detach() - old for p, old in zip(model.parameters(), before, strict=True)])
    for scale, own, whole in zip(SCALES, *moved, strict=True):
        torch.testing.assert_close(own, scale * whole, rtol=0, atol=1e-7)
        assert float(whole.norm()) > 0.05


@pytest.mark.parametrize("scales", [(0.5, 0.25), (0.5, None), (None, None)], ids=str)
def test_schedulers_of_timm_give_the_rates_that_they_give_pytorch(scales):
    scheduler = load("timm.scheduler")
    rates = []
    for make in (quintic.Muon, torch.optim.AdamW):
        optimizer = make(scaled_groups(TwoLayers(), scales), lr=0.1)
        schedule = scheduler.CosineLRScheduler(optimizer, t_initial=8, warmup_t=2, warmup_lr_init=0.01, lr_min=0.001)
        rates.append([])
        for epoch in range(8):
            schedule.step(epoch)
            rates[-1].append([group["lr"] for group in optimizer.param_groups])
    assert rates[0] == rates[1]
    assert len({rate for row in rates[0] for rate in row}) > 5


@pytest.mark.parametrize("name", ["CosineLRScheduler", "TanhLRScheduler", "StepLRScheduler", "PolyLRScheduler"])
def test_schedulers_of_timm_drive_both_algorithms(name):
    """Each group's rate is its own initial one, times the schedule, times its `lr_scale`."""
    library = load("timm.scheduler")
    more = {"StepLRScheduler": {"decay_t": 2, "decay_rate": 0.5}}.get(name, {"t_initial": 6})
    groups = quintic.param_groups(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = quintic.Muon([{**group, "lr_scale": 0.5} for group in groups], lr=0.02, adamw_lr=1e-3)
    twin = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedules = [quietly(getattr(library, name), each, **more) for each in (optimizer, twin)]
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
    for epoch in range(5):
        for schedule in schedules:
            schedule.step(epoch)
        factor = twin.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(0.5 * factor * (0.02 if group["algorithm"] == "muon" else 1e-3))
    assert factor < 1


def test_groups_of_timm_s_layer_decay_are_taken_as_they_are():
    library = load("timm.optim")
    model = TwoLayers()
    groups = library.param_groups_layer_decay(model, layer_decay=0.5, weight_decay=0.1)
    expected = [(group["lr_scale"], group["weight_decay"]) for group in groups]
    optimizer = quintic.Muon(groups)
    assert [(group["lr_scale"], group["weight_decay"]) for group in optimizer.param_groups] == expected
    assert len({scale for scale, _ in expected}) == 2
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


# ----------------------------------------------------------------------------------- anything else is the option of old


@pytest.mark.parametrize(("value", "factor"), [("unit_rms", 0.5), (None, 1.0), (lambda m, n: m / n, 0.25)])
def test_the_old_name_works_with_a_warning(value, factor):
    with RENAMED:
        optimizer = new_optimizer(lr_scale=value)
    assert factor_of(optimizer) == pytest.approx(factor)
    optimizer = new_optimizer()
    with RENAMED:
        assert factor_of(optimizer, lr_scale=value) == pytest.approx(factor)
    for group in optimizer.param_groups:
        assert "lr_scale" not in group
    assert optimizer.param_groups[-1]["adjust_lr"] == value


def test_the_old_name_may_be_set_on_a_group_of_an_optimizer():
    optimizer = new_optimizer()
    assert factor_of(optimizer) == pytest.approx(1.0)
    group = optimizer.param_groups[-1]
    weight = group["params"][0]
    group["lr_scale"] = "unit_rms"
    before = weight.detach().clone()
    with RENAMED:
        optimizer.step()
    moved = float(torch.linalg.matrix_norm(weight.detach() - before)) / 2 / group["lr"]
    assert moved == pytest.approx(0.5)
    assert (group["adjust_lr"], "lr_scale" in group) == ("unit_rms", False)


def test_the_old_name_works_in_param_groups_and_explain():
    model = nn.Linear(16, 4)
    with RENAMED:
        group, _ = quintic.param_groups(model, muon={"lr_scale": "unit_rms"})
    assert (group["adjust_lr"], "lr_scale" in group) == ("unit_rms", False)
    with pytest.warns(FutureWarning, match="options of the rule for weight: 'lr_scale' is called 'adjust_lr' now"):
        group, _ = quintic.param_groups(model, rules=[Rule("weight", "muon", options={"lr_scale": None})])
    assert (group["adjust_lr"], "lr_scale" in group) == (None, False)
    for options in ({"lr_scale": "unit_rms"}, {"muon": {"lr_scale": "unit_rms"}}):
        with RENAMED:
            explanation = quintic.explain(model, **options)
        assert explanation.rows[0].lr_scale == (0.5,)


def test_a_warning_is_given_once_for_a_rule_of_many_parameters():
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
    with RENAMED as caught:
        quintic.param_groups(model, rules=[Rule("*", "muon", options={"lr_scale": "unit_rms"})])
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_warnings_point_at_the_caller():
    with RENAMED as caught:
        new_optimizer(lr_scale="unit_rms")
    with RENAMED as more:
        new_optimizer().add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": "unit_rms"})
    assert [warning.filename for warning in (*caught, *more)] == [__file__, __file__]


@pytest.mark.parametrize("rule_options", [{"lr_scale": 0.5}, {"adjust_lr": "unit_rms", "lr_scale": 0.5}])
def test_a_number_of_a_rule_stands_in_its_group(rule_options):
    group, _ = quintic.param_groups(nn.Linear(16, 4), rules=[Rule("weight", "muon", options=rule_options)])
    assert rule_options.items() <= group.items()
    assert quintic.Muon([group]).param_groups[0]["lr_scale"] == 0.5


def test_one_option_under_two_names_is_an_error():
    message = "'lr_scale' is the old name of 'adjust_lr', and both are given; leave 'lr_scale' out"
    both = {"lr_scale": "unit_rms", "adjust_lr": "unit_rms"}
    with pytest.raises(ValueError, match=f"quintic.Muon: {message}"):
        new_optimizer(**both)
    optimizer = new_optimizer()
    with pytest.raises(ValueError, match=f"parameter group 1: {message}"):
        factor_of(optimizer, **both)
    assert len(optimizer.param_groups) == 1


def test_a_number_is_no_keyword_of_the_constructor():
    with pytest.raises(TypeError, match=r"lr_scale=0\.5 is no option of quintic\.Muon: adjust_lr says .* in the group"):
        new_optimizer(lr_scale=0.5)
    with pytest.raises(ValueError, match=r"group0\.param0\): adjust_lr='moon': choose 'spectral'"), RENAMED:
        new_optimizer(lr_scale="moon")


# --------------------------------------------------------------------------------------- what older versions have saved


def as_older_versions_had(groups):
    for group in groups:
        group["lr_scale"] = group.pop("adjust_lr")


@pytest.mark.parametrize("value", ["spectral", None, "<function <lambda> at 0x7f>"])
def test_states_saved_with_the_old_name_load(value):
    """It was saved as text, or as None, and never came back."""
    optimizer = new_optimizer()
    factor_of(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    as_older_versions_had(saved["param_groups"])
    saved["param_groups"][1].update(lr_scale=value, lr=0.7)
    twin = new_optimizer(adjust_lr="unit_rms")
    factor_of(twin)
    twin.load_state_dict(saved)
    assert [(group["adjust_lr"], "lr_scale" in group) for group in twin.param_groups] == [("unit_rms", False)] * 2
    assert twin.param_groups[1]["lr"] == 0.7
    momenta = [each.state[each.param_groups[1]["params"][0]]["momentum_buffer"] for each in (optimizer, twin)]
    assert torch.equal(*momenta)


def test_optimizers_pickled_with_the_old_name_go_on():
    optimizer = new_optimizer(adjust_lr="unit_rms")
    factor_of(optimizer)
    state = optimizer.__getstate__()
    state = {**state, "param_groups": copy.copy(state["param_groups"]), "defaults": {**state["defaults"]}}
    state["param_groups"] = [dict(group) for group in state["param_groups"]]
    as_older_versions_had([state["defaults"], *state["param_groups"]])
    twin = quintic.Muon.__new__(quintic.Muon)
    twin.__setstate__(state)
    assert factor_of(twin) == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_in_pieces_with_the_old_name_load(flat, tmp_path):
    """PyTorch has every key that is asked for found, unless a partial load is allowed."""
    options, (model, other) = StateDictOptions(flatten_optimizer_state_dict=flat), (TwoLayers(), TwoLayers())
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    if flat:
        saved = {key.replace(".adjust_lr", ".lr_scale"): value for key, value in saved.items()}
    else:
        as_older_versions_had(saved["param_groups"])
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    twin = quintic.Muon(quintic.param_groups(other), lr=0.2)
    wanted = get_optimizer_state_dict(other, twin, options=options)
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other, twin, wanted, options=options)
    assert [(group["lr"], group["adjust_lr"]) for group in twin.param_groups] == [(0.1, "spectral")]
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], twin.state[same]["momentum_buffer"])
