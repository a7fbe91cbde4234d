"""Steps as a CUDA graph: what is refused anywhere, and on a device the same bits as without."""

import pytest
import torch
from torch import nn

import quintic
from quintic import CapturedStep, Muon


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_every": 2}, "step_every counts on the host"),
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
    return Muon(groups, lr=0.02, normalize="neuron", master="mantissa", **options)


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
            assert step._graph is not None
        assert len(momenta) > 4

    def test_changed_options_and_loaded_state_are_followed(self):
        params, twins = params_of(), params_of()
        eager, optimizer = optimizer_of(twins), optimizer_of(params)
        step = CapturedStep(optimizer)
        for number in range(12):
            for found in (params, twins):
                give_gradients(found, number, moves=False)
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
