"""What PyTorch promises of every optimizer: groups, rates that are tensors, schedulers, averages, scaling, hooks.

PyTorch's own optimizers are the reference, or arithmetic by hand. State dicts have tests of their own.
"""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quintic


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def optimizer_of(model, **options):
    """Return an optimizer of Muon and AdamW groups, one of them without parameters and one with a rate of its own."""
    *layers, last = (module for module in model if list(module.parameters()))
    groups = quintic.param_groups(nn.ModuleList(layers))
    return quintic.Muon(
        [*groups, {"params": []}, {"params": last.parameters(), "algorithm": "adamw", "lr": 0.05}],
        **{"lr": 0.02, **options},
    )


def give_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def weights_of(model):
    return [param.detach().clone() for param in model.parameters()]


# ------------------------------------------------------------------------------------------------------------- groups


def test_a_tensor_is_in_one_place_only():
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"group0\.param1 is the same tensor as group0\.param0 of the same group"):
        quintic.Muon([param, param])
    with pytest.raises(ValueError, match=r"param0 is the same tensor as group0\.param0 of parameter group 0"):
        quintic.Muon([{"params": param}, {"params": param}])
    optimizer = quintic.Muon([param])
    with pytest.raises(ValueError, match="same tensor"):
        optimizer.add_param_group({"params": [param], "algorithm": "adamw"})
    assert len(optimizer.param_groups) == 1


def test_names_are_given_for_all_of_a_group_or_for_none():
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    with pytest.raises(ValueError, match="all optimizer params should be with/without names"):
        quintic.Muon([("weight", params[0]), params[1]])
    optimizer = quintic.Muon([{"params": [params[0]]}, {"params": [("weight", params[1])]}])
    assert [group["param_names"] for group in optimizer.param_groups] == [["group0.param0"], ["weight"]]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_computed_tensor_is_no_parameter(algorithm):
    source = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        quintic.Muon([{"params": [source * 2], "algorithm": algorithm}])
    kept = source * 2
    kept.retain_grad()  # then it has a gradient, and PyTorch takes it
    optimizer = quintic.Muon([{"params": [kept], "algorithm": algorithm}], lr=0.1, adamw_lr=0.1)
    before = kept.detach().clone()
    kept.square().sum().backward()
    optimizer.step()
    assert not torch.equal(kept, before)


def test_a_group_has_its_own_options_and_the_defaults_for_others():
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    optimizer = quintic.Muon([{"params": [params[0]], "lr": 0.5}, {"params": [params[1]]}], lr=0.1, weight_decay=0.2)
    optimizer.defaults["weight_decay"] = 0.3
    optimizer.add_param_group({"params": [params[2]], "momentum": 0.5})
    rows = [[group[key] for key in ("lr", "weight_decay", "momentum")] for group in optimizer.param_groups]
    assert rows == [[0.5, 0.2, 0.95], [0.1, 0.2, 0.95], [0.1, 0.3, 0.5]]


def test_groups_are_readable():
    optimizer = optimizer_of(small_model())
    optimizer.param_groups[0]["tag"] = "first"
    text = repr(optimizer)
    assert text.startswith("Muon (\nParameter Group 0\n")
    assert "    tag: first\n" in text
    assert text.count("Parameter Group") == len(optimizer.param_groups)


# -------------------------------------------------------------------------------------------------- rates as tensors


@pytest.mark.parametrize("shape", [(), (1,)])
def test_rates_may_be_tensors(shape):
    """Also where a schedule changes them in place, and where several groups have the same tensor."""
    stepped = []
    for kind in (float, lambda number: torch.full(shape, number, dtype=torch.float64)):
        model = small_model()
        optimizer = optimizer_of(model, lr=kind(0.25), adamw_lr=kind(0.125), weight_decay=0.5)
        schedulers = [
            lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        ]
        rates = []
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        assert isinstance(optimizer.param_groups[0]["lr"], type(kind(1.0)))
        stepped.append((weights_of(model), rates))
    (weights, rates), (others, other_rates) = stepped
    assert rates == other_rates
    assert rates[-1][0] < 0.05
    assert all(map(torch.equal, weights, others))


def test_a_rate_of_several_numbers_is_an_error():
    for lr in (torch.tensor([0.1, 0.2]), torch.ones(0)):
        with pytest.raises(ValueError, match=r"lr=tensor\(.*\) must be a number of at least 0"):
            optimizer_of(small_model(), lr=lr)


# --------------------------------------------------------------------------------------------------------- schedulers


def _sequential(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


def _chained(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(
        o, [lambda t, i=i: 1 / (1 + i + t) for i in range(len(o.param_groups))]
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, 0.7, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
}
NUM_STEPS = 8


def advance(scheduler, step):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 + (step > 2))
    else:
        scheduler.step()


def schedule_of(optimizer):
    """Return the rate and the momentum of every group, or AdamW's first beta, as a step has them."""
    if isinstance(optimizer, torch.optim.AdamW):
        return [(group["lr"], group["betas"][0]) for group in optimizer.param_groups]
    momenta = [
        group.momentum if group.algorithm == "muon" else group.betas[0] for group in optimizer._plans.current_groups()
    ]
    return [(group.lr, momentum) for group, momentum in zip(optimizer._plans.current_groups(), momenta, strict=True)]


def pytorch_twin(optimizer):
    """Return PyTorch's AdamW with groups of the same rates."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": group["lr"]} for group in optimizer.param_groups]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def test_every_scheduler_of_pytorch_is_tried():
    classes = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_what_they_set_in_pytorch_s_optimizers(name):
    model = small_model()
    optimizer = optimizer_of(model, momentum=0.9)
    twin = pytorch_twin(optimizer)
    schedulers = [SCHEDULERS[name](each) for each in (optimizer, twin)]
    seen = []
    for step in range(NUM_STEPS):
        seen.append(schedule_of(optimizer))
        assert seen[-1] == schedule_of(twin)
        give_gradients(model, step)
        optimizer.step()
        twin.step()
        for scheduler in schedulers:
            advance(scheduler, step)
        assert schedulers[0].get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert len({str(rows) for rows in seen}) > 1
    if name in ("CyclicLR", "OneCycleLR"):
        assert len({rows[0][1] for rows in seen}) > 2


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_that_is_saved_goes_on_to_the_bit(name):
    """Optimizer and scheduler are made anew half-way, as after a restart."""
    runs = []
    for restarts in (False, True):
        model = small_model()
        optimizer = optimizer_of(model, weight_decay=0.1)
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(NUM_STEPS):
            if restarts and step == NUM_STEPS // 2:
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                optimizer = optimizer_of(model, weight_decay=0.1)
                scheduler = SCHEDULERS[name](optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            give_gradients(model, step)
            optimizer.step()
            advance(scheduler, step)
        runs.append((weights_of(model), schedule_of(optimizer)))
    assert runs[0][1] == runs[1][1]
    assert all(map(torch.equal, runs[0][0], runs[1][0]))


def test_a_scheduler_knows_that_the_optimizer_stepped():
    """PyTorch warns where `scheduler.step()` comes before the first `optimizer.step()`."""
    optimizer = optimizer_of(small_model())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)"):
        scheduler.step()


# ----------------------------------------------------------------------------------------------- averages of weights


@pytest.mark.parametrize("kind", ["mean", "exponential"])
@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
def test_averaged_models_average_what_was_stepped(kind, master):
    model = small_model().to(torch.float32 if master is None else torch.bfloat16)
    optimizer = optimizer_of(model, master=master)
    decay = 0.75
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay) if kind == "exponential" else None)
    seen = []
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
        averaged.update_parameters(model)
        seen.append(weights_of(model))
    for index, average in enumerate(averaged.module.parameters()):
        values = [weights[index].double() for weights in seen]
        expected = torch.stack(values).mean(0)
        if kind == "exponential":
            expected = values[0]
            for value in values[1:]:
                expected = decay * expected + (1 - decay) * value
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=0.02 if master else 1e-6)
        assert not torch.equal(average, seen[-1][index]) or average.ndim == 1


@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
def test_weights_may_be_exchanged_for_an_evaluation(master):
    """As callbacks with averages of weights do: they copy others in, evaluate, and copy the weights back."""
    ends = []
    for exchanges in (False, True):
        model = small_model().to(torch.float32 if master is None else torch.bfloat16)
        optimizer = optimizer_of(model, master=master, lr=1e-3)
        for step in range(4):
            give_gradients(model, step)
            optimizer.step()
            if exchanges:
                kept = weights_of(model)
                with torch.no_grad():
                    for param in model.parameters():
                        param.copy_(torch.randn_like(param))
                    for param, weight in zip(model.parameters(), kept, strict=True):
                        param.copy_(weight)
        ends.append([*weights_of(model), *(t for p in model.parameters() for t in optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))


# ------------------------------------------------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaled_loss_gives_the_bits_of_the_loss(unscales):
    """The scale is a power of two, which no gradient here overflows: multiplying and dividing changes no bit."""
    x, ends = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), []
    for scales in (False, True):
        model = small_model()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=1024.0, growth_interval=2)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(weights_of(model))
        assert scaler.get_scale() == (4096.0 if scales else 1.0)
    assert all(map(torch.equal, *ends))


def test_an_overflow_leaves_out_the_step_of_every_group():
    model = small_model()
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        before = [*weights_of(model), *(t.clone() for p in model.parameters() for t in optimizer.state[p].values())]
        optimizer.zero_grad()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [*weights_of(model), *(t for p in model.parameters() for t in optimizer.state[p].values())]
        assert all(map(torch.equal, before, after)) is (factor != 1.0)
    assert scaler.get_scale() == 4.0
    assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} == {2.0}


# --------------------------------------------------------------------------------------------------------- gradients


def test_zero_grad_removes_gradients_or_fills_them():
    model = small_model()
    optimizer = optimizer_of(model)
    give_gradients(model)
    gradients = [param.grad for param in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), gradients, strict=True))
    assert not any(grad.any() for grad in gradients)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_zero_grad_cuts_gradients_from_their_graph():
    model = small_model()
    optimizer = optimizer_of(model)
    loss = model(torch.randn(5, 4)).square().mean()
    loss.backward(create_graph=True)
    gradients = [param.grad for param in model.parameters()]
    assert any(grad.requires_grad for grad in gradients)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(model.parameters(), gradients, strict=True):
        assert param.grad is grad
        assert not grad.requires_grad
        param.grad = None  # it is in a circle with its graph


def test_a_frozen_parameter_may_be_in_a_group():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = quintic.Muon(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2]},
            {"params": model[3].parameters(), "algorithm": "adamw"},
        ]
    )
    before = weights_of(model)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, False, True, True, True, False]


# ------------------------------------------------------------------------------------------------------------- hooks


def test_step_hooks_run_in_order_around_each_step():
    model, calls = small_model(), []
    optimizer = optimizer_of(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("first"))
    removed = optimizer.register_step_pre_hook(lambda *_: calls.append("removed"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    of_all = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre of all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post of all")),
    ]
    give_gradients(model)
    try:
        lr_scheduler.StepLR(optimizer, 1)  # which wraps `step`
        optimizer.step()
        assert calls == ["pre of all", "first", "removed", "post", "post of all"]
    finally:
        for handle in of_all:
            handle.remove()
    removed.remove()
    calls.clear()
    optimizer.step()
    assert calls == ["first", "post"]


def test_a_hook_sees_the_weights_before_and_after_and_may_change_gradients():
    model = small_model()
    optimizer, twin = optimizer_of(model), copy.deepcopy(model)
    other = optimizer_of(twin)
    seen = []

    def halve(optimizer, args, kwargs):
        seen.append(model[0].weight.detach().clone())
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad *= 0.5

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.detach().clone()))
    for step in range(2):
        give_gradients(model, step)
        give_gradients(twin, step)
        for param in twin.parameters():
            param.grad *= 0.5
        optimizer.step()
        other.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_a_hook_may_give_other_arguments():
    model, losses = small_model(), []
    optimizer = optimizer_of(model)

    def closure():
        losses.append(1.5)
        return 1.5

    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure), {}))
    give_gradients(model)
    assert optimizer.step() == 1.5
    assert losses == [1.5]
    optimizer.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match="None or a tuple"):
        optimizer.step()


def test_a_hook_that_raises_before_a_step_leaves_everything():
    model = small_model()
    optimizer = optimizer_of(model)
    give_gradients(model)

    def refuse(*_):
        raise KeyError("not now")

    handle = optimizer.register_step_pre_hook(refuse)
    before = weights_of(model)
    with pytest.raises(KeyError, match="not now"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    handle.remove()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_profile_has_the_step_under_its_name():
    model = small_model()
    optimizer = optimizer_of(model)
    give_gradients(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"} <= names
