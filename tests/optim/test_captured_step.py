"""Steps as a CUDA graph: what is refused anywhere, and on a device the same bits as without."""

import pytest
import torch
from host_graphs import GRAPHS, capture_on_hosts
from torch import nn

import quintic
from quintic import CapturedStep, Muon
from quintic.optim.rules.table import RULES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_every": 9}, "repeats after 9 steps, .* needs a CUDA graph, .* may be 8"),
        ({"telemetry_every": 3}, "telemetry_every"),
        ({"on_nonfinite": "raise"}, "on_nonfinite='raise' waits"),
        ({"offload": True}, "offload copies state"),
        ({}, "needs all parameters on one CUDA device, these are on cpu"),
    ],
    ids=str,
)
def test_what_the_host_must_act_on_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CapturedStep(Muon([nn.Parameter(torch.randn(4, 5))], **options))


# -- which graph, on the host ------------------------------------------------------------------------------------------


def cadences(every, tied=False, **options):
    """A bank, a scalar, a head and an embedding, each in a group of its own, that step every k-th time."""
    torch.manual_seed(0)
    shapes = {"bank": (8, 4), "scalar": (), "head": (3, 5), "embed": (5, 3)}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    groups = [
        {"params": [pair], "algorithm": "muon" if pair[0] == "bank" else "adamw", "step_every": step_every}
        for pair, step_every in zip(params.items(), every, strict=True)
    ]
    groups[0]["view"] = quintic.Rows(4)
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.1, weight_decay=0.1, **options)
    if tied:
        optimizer.tie("head", "embed", transposed=True)
    return params, optimizer


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("every", "num_graphs"),
    [((1, 1, 1, 1), 1), ((1, 2, 2, 2), 2), ((1, 2, 3, 3), 4), ((2, 2, 2, 2), 1), ((2, 4, 4, 4), 2)],
)
def test_each_set_of_groups_has_a_graph(every, num_graphs, moves, monkeypatch):
    (params, optimizer), (twins, eager) = (cadences(every, tied=True, on_nonfinite="skip") for _ in range(2))
    capture_on_hosts(monkeypatch, optimizer)
    step = CapturedStep(optimizer)
    for number in range(40):
        for param, twin in zip(params.values(), twins.values(), strict=True):
            gradient = torch.full(param.shape, torch.nan) if number == 30 else torch.randn(param.shape)
            for one in (param, twin):
                if one.grad is None or moves:
                    one.grad = gradient.clone() if one.grad is None else one.grad + gradient
                else:
                    one.grad += gradient
        for one in (optimizer, eager):
            for group in one.param_groups:
                group["lr"] = 0.1 / (1 + number % 5)
        if number == 20:
            for one in (optimizer, eager):
                one.untie("embed")
            assert len(GRAPHS) == num_graphs
        step()
        eager.step()
        for name, param in params.items():
            assert torch.equal(param, twins[name]), (number, name)
            for key, value in optimizer.state[param].items():
                assert torch.equal(value, eager.state[twins[name]][key]), (number, name, key)
        assert [g["pending_steps"] for g in optimizer.param_groups] == [g["pending_steps"] for g in eager.param_groups]
        assert optimizer.last_step() == eager.last_step()
        for one in (optimizer, eager):
            one.zero_grad(set_to_none=moves)
    assert sum(graph.replays for graph in GRAPHS) >= 20 // max(every) - 2 * num_graphs
    step.close()
    assert not GRAPHS


def test_a_graph_reads_the_gradients_of_its_groups_alone(monkeypatch):
    """Between two of its steps a group may lack a gradient, or have it elsewhere."""
    params, optimizer = cadences((1, 2, 2, 2))
    capture_on_hosts(monkeypatch, optimizer)
    step = CapturedStep(optimizer)
    for number in range(12):
        for name, param in params.items():
            param.grad = torch.randn(param.shape) if name == "bank" or number % 2 else None
        step()
    assert len(GRAPHS) == 2
    params["head"].grad = None
    step()
    with pytest.raises(RuntimeError, match="head: its gradient is missing now and was there"):
        step()


def params_of():
    torch.manual_seed(0)
    shapes = [(64, 48), (64, 48), (300, 40), (7, 64, 32), (100,)]
    return [nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in shapes]


def optimizer_of(params, **options):
    groups = [
        {"params": params[:3]},
        {"params": params[3:4], "view": quintic.Experts()},
        {"params": params[4:], "algorithm": "adamw"},
    ]
    rule = {} if "update_rule" in options else {"normalize": "neuron"}
    return Muon(groups, **{"lr": 0.02, "master": "mantissa", **rule, **options})


def give_gradients(params, step, moves):
    generator = torch.Generator("cuda").manual_seed(step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator, device="cuda").bfloat16()
        if param.grad is None or moves:
            param.grad = gradient
        else:
            param.grad.copy_(gradient)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("moves", [False, True])
    @pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
    def test_the_bits_of_eager_steps(self, on_nonfinite, moves):
        params, twins = params_of(), params_of()
        eager, optimizer = (
            optimizer_of(twins, on_nonfinite=on_nonfinite),
            optimizer_of(params, on_nonfinite=on_nonfinite),
        )
        with CapturedStep(optimizer) as step:
            kept = []
            for number in range(8):
                for found in (params, twins):
                    give_gradients(found, number, moves)
                if number == 5 and on_nonfinite == "skip":
                    for found in (params, twins):
                        found[0].grad[0, 0] = float("nan")
                kept.append([param.grad for param in params])  # no address is used again
                for one in (eager, optimizer):
                    for group in one.param_groups:
                        group["lr"] = 0.01 * (number + 1)
                step()
                eager.step()
                for param, twin in zip(params, twins, strict=True):
                    assert torch.equal(param, twin), number
                for param, twin in zip(params, twins, strict=True):
                    for key, value in optimizer.state[param].items():
                        assert torch.equal(value, eager.state[twin][key]), (number, key)
            assert optimizer.last_step().skipped_steps == eager.last_step().skipped_steps

    @pytest.mark.parametrize("live", [False, True])
    def test_schedules_with_absolute_rates_and_cycled_momentum_are_followed(self, live):
        params, twins = params_of(), params_of()
        eager, optimizer = optimizer_of(twins, adamw_lr_ratio=0.05), optimizer_of(params, adamw_lr_ratio=0.05)
        schedulers = []
        for one in (eager, optimizer):
            if live:
                for group in one.param_groups:
                    group["lr"] = torch.tensor(group["lr"], device="cuda")
            schedulers.append(torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=12))
        momenta = set()
        with CapturedStep(optimizer) as step:
            for number in range(8):
                for found in (params, twins):
                    give_gradients(found, number, moves=False)
                step()
                eager.step()
                for scheduler in schedulers:
                    scheduler.step()
                momenta.add(optimizer.param_groups[0]["momentum"])
                for param, twin in zip(params, twins, strict=True):
                    assert torch.equal(param, twin), number
            assert len(step._graphs) == 1
        assert len(momenta) > 4

    @pytest.mark.parametrize("update_rule", RULES)
    def test_changed_options_and_loaded_state_are_followed(self, update_rule):
        params, twins = params_of(), params_of()
        eager, optimizer = (optimizer_of(one, update_rule=update_rule, weight_decay=0.1) for one in (twins, params))
        step = CapturedStep(optimizer)
        for number in range(12):
            for found in (params, twins):
                give_gradients(found, number, moves=False)
            for one in (eager, optimizer):
                for group in one.param_groups[:2]:
                    group["lr"], group["momentum"] = 0.01 + 0.001 * number, 0.9 + 0.005 * number
            if number == 4:
                for one in (eager, optimizer):
                    one.param_groups[0]["normalize_beta"] = 0.5
            if number == 8:
                for one in (eager, optimizer):
                    one.load_state_dict(one.state_dict())
            step()
            eager.step()
            for param, twin in zip(params, twins, strict=True):
                assert torch.equal(param, twin), number

    @pytest.mark.parametrize("moves", [False, True])
    @pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
    def test_odd_and_even_steps_and_tied_weights_have_the_bits_of_eager_ones(self, on_nonfinite, moves):
        def made():
            torch.manual_seed(0)
            shapes = {"bank": (256, 64), "scalar": (3,), "head": (96, 320), "embed": (320, 96)}
            params = {
                name: nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for name, shape in shapes.items()
            }
            groups = [
                {"params": [pair], "algorithm": "adamw", "step_every": 2, "master": "mantissa", "cautious": "strict"}
                for pair in params.items()
            ]
            bank = {"algorithm": "muon", "view": quintic.Rows(64), "lr_multipliers": (1, 2, 1, 2), "cautious": True}
            groups[0] |= {**bank, "step_every": 1, "normalize": "neuron"}
            decays = {"weight_decay": 1.2, "adamw_weight_decay": 0.5, "decay_coupling": "lr_squared"}
            optimizer = Muon(groups, lr=0.02, scale_decay=True, on_nonfinite=on_nonfinite, **decays)
            optimizer.tie("head", "embed", transposed=True)
            return params, optimizer

        (params, optimizer), (twins, eager) = made(), made()
        with CapturedStep(optimizer) as step:
            for number in range(20):
                if number == 12:
                    for one in (optimizer, eager):
                        one.untie("embed")
                for found in (params, twins):
                    torch.manual_seed(number)
                    for param in found.values():
                        gradient = torch.randn_like(param)
                        if number == 9 and param.ndim == 1:
                            gradient[0] = torch.nan if on_nonfinite == "skip" else 1.0
                        if param.grad is None:
                            param.grad = gradient
                        elif moves:
                            param.grad = param.grad + gradient
                        else:
                            param.grad += gradient
                step()
                eager.step()
                for name, param in params.items():
                    assert torch.equal(param, twins[name]), (number, name)
                    for key, value in optimizer.state[param].items():
                        assert torch.equal(value, eager.state[twins[name]][key]), (number, name, key)
                for one in (optimizer, eager):
                    one.zero_grad(set_to_none=moves)
            assert len(step._graphs) == 2
            assert optimizer.last_step() == eager.last_step()

    def test_a_missing_gradient_is_an_error(self):
        params = params_of()
        optimizer = optimizer_of(params)
        step = CapturedStep(optimizer)
        for number in range(3):
            give_gradients(params, number, moves=False)
            step()
        params[1].grad = None
        with pytest.raises(RuntimeError, match=r"group0.param1: its gradient is missing now"):
            step()
        step.close()
        step()
