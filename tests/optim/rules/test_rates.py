"""Learning rates and momenta from PyTorch's schedulers, and which parameters decay."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import quintic
from quintic import Muon
from quintic.interchange import export_torch_state
from quintic.optim.rules.device import HYPERPARAMETERS, DeviceHyperparameters

RATIO = 0.05
EXACT = {"compute_dtype": torch.float64}

SCHEDULERS = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "three phases": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, three_phase=True),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "eta_min": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=0.01),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, eta_min=0.01),
    "swa": lambda optimizer: SWALR(optimizer, swa_lr=0.004, anneal_epochs=4),
    "min_lr": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.005),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5),
}


def layer():
    model = nn.Linear(4, 6)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


def groups_of(model):
    return {"muon": {"params": [("weight", model.weight)]}, "adamw": {"params": [("bias", model.bias)]}}


def optimizer_of(model, **options):
    groups = [{**group, "algorithm": algorithm} for algorithm, group in groups_of(model).items()]
    return Muon(groups, lr=0.02, **EXACT, **options)


def advance(scheduler):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_rate_and_momentum_drives_both_algorithms(name):
    """Muon's groups have the numbers that the same scheduler gives to SGD, AdamW's groups the ratio of its rate."""
    model = layer()
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = optimizer_of(model, adamw_lr_ratio=RATIO)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.02, momentum=0.95)
    # The rule, driven by hand: PyTorch's AdamW, and a Muon without any AdamW group.
    adamw = torch.optim.AdamW([twin.bias], betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    muon = Muon([("weight", other.weight)], **EXACT)
    scheduler, reference = SCHEDULERS[name](optimizer), SCHEDULERS[name](sgd)
    cycles = "max_momentum" in sgd.param_groups[0]
    rates = []
    for _ in range(7):
        lr, momentum = sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]
        rates.append(lr)
        matrices, vectors = optimizer.param_groups
        assert (matrices["lr"], matrices["momentum"]) == (lr, momentum)
        assert (vectors["lr"], optimizer._plans.current_groups()[1].effective_lr) == (lr, lr * RATIO)
        assert vectors["betas"] == (momentum if cycles else 0.9, 0.95)
        adamw.param_groups[0].update(lr=lr * RATIO, betas=vectors["betas"])
        muon.param_groups[0].update(lr=lr, momentum=momentum)
        for param, same in ((model.weight, other.weight), (model.bias, twin.bias)):
            param.grad = torch.randn_like(param)
            same.grad = param.grad.clone()
        for each in (optimizer, adamw, muon, sgd):
            each.step()
        for each in (scheduler, reference):
            advance(each)
        assert torch.equal(model.bias, twin.bias)
        assert torch.equal(model.weight, other.weight)
    assert len(set(rates)) > 2
    assert min(rates) > 0


def test_without_a_ratio_rates_are_the_groups_own():
    optimizer = optimizer_of(layer(), adamw_lr=0.003)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=0.001)
    optimizer.step()
    scheduler.step()
    matrices, vectors = optimizer.param_groups
    assert (
        optimizer._plans.current_groups()[0].effective_lr
        == matrices["lr"]
        == pytest.approx(0.001 + 0.019 * (1 + math.cos(math.pi / 4)) / 2)
    )
    assert (
        optimizer._plans.current_groups()[1].effective_lr
        == vectors["lr"]
        == pytest.approx(0.001 + 0.002 * (1 + math.cos(math.pi / 4)) / 2)
    )
    assert vectors["adamw_lr_ratio"] is None


def test_groups_may_have_ratios_of_their_own():
    weight, head, bias, scalar = nn.Parameter(torch.ones(4, 4)), *(nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = Muon(
        [
            {"params": [weight], "adamw_lr_ratio": 7.0},  # a Muon group has no use for it
            {"params": [bias], "algorithm": "adamw"},
            {"params": [head], "algorithm": "adamw", "adamw_lr_ratio": 0.5},
            {"params": [scalar], "algorithm": "adamw", "adamw_lr_ratio": None, "lr": 0.007},
        ],
        lr=0.02,
        adamw_lr_ratio=RATIO,
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02, 0.02, 0.007]
    assert [group.effective_lr for group in optimizer._plans.current_groups()] == pytest.approx(
        [0.02, 0.001, 0.01, 0.007]
    )
    again = Muon([dict(group) for group in optimizer.param_groups], lr=0.5)
    assert [group.effective_lr for group in again._plans.current_groups()] == pytest.approx([0.02, 0.001, 0.01, 0.007])
    optimizer.param_groups[1]["adamw_lr_ratio"] = -1
    with pytest.raises(ValueError, match="adamw_lr_ratio=-1 must be a number of at least 0, or None"):
        optimizer.step()


@pytest.mark.parametrize("key", ["lr", "adamw_lr"])
def test_a_rate_and_a_ratio_are_an_error(key):
    group = {"params": [("head", nn.Parameter(torch.ones(4)))], "algorithm": "adamw", key: 1e-3}
    with pytest.raises(ValueError, match=rf"group 0 \(head\): {key}=0.001 is a learning rate of its own.*ratio=0.05"):
        Muon([group], adamw_lr_ratio=RATIO)
    with pytest.raises(ValueError, match=r"adamw_lr=0.001 and adamw_lr_ratio=0.05: give one of them"):
        optimizer_of(layer(), adamw_lr=1e-3, adamw_lr_ratio=RATIO)


@pytest.mark.parametrize("live", [False, True])
def test_what_kernels_read_is_the_rate_of_the_step(live):
    """A learning rate that is a tensor on the device is multiplied there."""
    optimizer = optimizer_of(layer(), adamw_lr_ratio=RATIO, weight_decay=0.3, adamw_weight_decay=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    values = [DeviceHyperparameters(torch.device("cpu")) for _ in optimizer.param_groups]
    for _ in range(4):
        if live:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        for group, device in zip(optimizer._plans.current_groups(), values, strict=True):
            device.update(group.hyperparameters, group.lr_ratio)
            found = dict(zip(HYPERPARAMETERS, device.values.tolist(), strict=True))
            assert found["lr"] == float(group.lr) * (RATIO if group.algorithm == "adamw" else 1)
            assert found["momentum" if group.algorithm == "muon" else "beta1"] == group.betas[0]
            assert found["weight_decay"] == (0.1 if group.algorithm == "adamw" else 0.3)
        optimizer.step()
        scheduler.step()


def test_explanation_verification_and_export_have_the_rate_of_the_step():
    model = layer()
    rates = {row.algorithm: row.lr for row in quintic.explain(model, lr=0.02, adamw_lr_ratio=RATIO).rows}
    assert rates == {"muon": 0.02, "adamw": pytest.approx(0.001)}
    optimizer = Muon(quintic.param_groups(model), lr=0.02, adamw_lr_ratio=RATIO)
    model(torch.randn(3, 4)).square().mean().backward()
    assert quintic.verify(model, optimizer).ok
    exported = export_torch_state(optimizer)
    assert [exported[name]["param_groups"][0]["lr"] for name in ("muon", "adamw")] == [0.02, pytest.approx(0.001)]
    twin, expected = copy.deepcopy((model, optimizer)), copy.deepcopy((model, optimizer))
    for other in (twin[0], expected[0]):
        for param, given in zip(other.parameters(), model.parameters(), strict=True):
            param.grad = given.grad.clone()
    quintic.reference_step(twin[1])
    expected[1].step()
    for param, other, before in zip(*(each.parameters() for each in (twin[0], expected[0], model)), strict=True):
        torch.testing.assert_close(param, other)
        assert not torch.equal(param, before)


# -- the momentum that schedulers cycle --------------------------------------------------------------------------------


def give_gradients(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)


def momenta(optimizer):
    return [group["momentum"] for group in optimizer.param_groups if group["algorithm"] == "muon"]


def test_upload_reads_the_cycled_momentum_of_a_group_at_hand():
    """A captured step uploads what its plan's groups say, without asking for them first."""
    optimizer = optimizer_of(layer())
    optimizer.step()
    group = optimizer.param_groups[0]
    group["max_momentum"] = 0.9
    group["betas"] = (0.87, 0.95)
    optimizer.upload_hyperparameters()
    assert group["momentum"] == 0.87


def test_momentum_is_whatever_was_set_last():
    optimizer = optimizer_of(layer())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert momenta(optimizer) == [0.95]
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    assert momenta(optimizer) == [0.5]
    scheduler.step()
    assert momenta(optimizer) == [optimizer.param_groups[0]["betas"][0]]
    assert 0.85 < momenta(optimizer)[0] < 0.95


def test_betas_that_no_scheduler_cycles_are_adamws():
    optimizer = optimizer_of(layer(), momentum=0.7)
    for group in optimizer.param_groups:
        group["betas"] = (0.8, 0.99)
    assert momenta(optimizer) == [0.7]
    saved = optimizer_of(layer(), betas=(0.6, 0.9), momentum=0.65).state_dict()
    saved["param_groups"][0]["max_momentum"] = 0.9
    optimizer.load_state_dict(saved)
    assert momenta(optimizer) == [0.65]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_follow_their_own_scheduler(duplicate):
    optimizer = optimizer_of(layer(), momentum=0.5)
    twin = duplicate(optimizer)
    give_gradients(twin)
    scheduler = lr_scheduler.CyclicLR(twin, 0.01, 0.1, step_size_up=4)
    assert (momenta(optimizer), momenta(twin)) == ([0.5], [0.9])
    twin.step()
    scheduler.step()
    assert (momenta(optimizer), momenta(twin)) == ([0.5], [pytest.approx(0.875)])
    twin = duplicate(twin)
    added = nn.Parameter(torch.ones(3, 3))
    twin.add_param_group({"params": [added], "max_momentum": 0.9, "base_momentum": 0.8})
    twin.param_groups[2]["betas"] = (0.82, 0.95)
    assert momenta(twin) == [pytest.approx(0.875), 0.82]


def test_a_resumed_schedule_goes_on_with_the_momentum():
    optimizer = optimizer_of(layer(), adamw_lr_ratio=RATIO)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    resumed = optimizer_of(layer(), adamw_lr_ratio=0.5)
    its_scheduler = lr_scheduler.OneCycleLR(resumed, max_lr=0.1, total_steps=8)
    resumed.load_state_dict(optimizer.state_dict())
    its_scheduler.load_state_dict(scheduler.state_dict())
    for _ in range(3):
        for group, other in zip(optimizer.param_groups, resumed.param_groups, strict=True):
            assert [other[key] for key in ("lr", "momentum", "betas", "adamw_lr_ratio")] == [
                group[key] for key in ("lr", "momentum", "betas", "adamw_lr_ratio")
            ]
        for each in (optimizer, resumed, scheduler, its_scheduler):
            each.step()


# -- weight decay ------------------------------------------------------------------------------------------------------


def test_only_matrices_decay_unless_asked():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))

    def decays(options, **groups):
        optimizer = Muon(quintic.param_groups(model, **groups), **options)
        return {
            name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]
        }  # fmt: skip

    everything = dict.fromkeys([name for name, _ in model.named_parameters()], 0.0)
    assert decays({"weight_decay": 0.1}) == {**everything, "1.weight": 0.1}
    asked = {"weight_decay": 0.1, "adamw_weight_decay": 0.2}
    assert decays(asked) == {**dict.fromkeys(everything, 0.2), "1.weight": 0.1}
    assert decays({"weight_decay": 0.1}, adamw={"weight_decay": 0.3}) == {
        **dict.fromkeys(everything, 0.3),
        "1.weight": 0.1,
    }
    rule = quintic.Rule("0.weight", "adamw", options={"weight_decay": 0.4})
    assert decays(asked, rules=[rule]) == {**dict.fromkeys(everything, 0.2), "1.weight": 0.1, "0.weight": 0.4}


def test_what_does_not_decay_stays():
    model = layer()
    optimizer = optimizer_of(model, weight_decay=0.1)
    before = copy.deepcopy(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(model.bias, before.bias)
    torch.testing.assert_close(model.weight, before.weight * (1 - 0.02 * 0.1))
