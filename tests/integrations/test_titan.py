"""`MuonContainer` as torchtitan builds, steps, saves and loads it; the example in tests/examples runs its trainer."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import quintic

pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan not installed: `make clients`"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

OPTIONS = {"lr": 0.05, "adamw_lr": 0.01, "normalize": "neuron"}


def parts() -> list[nn.Module]:
    """Two pipeline stages."""
    torch.manual_seed(1)
    first = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "up": nn.Linear(4, 8, bias=False)})
    return [first, nn.ModuleDict({"down": nn.Linear(8, 4, bias=False), "lm_head": nn.Linear(4, 5, bias=False)})]


def container(model_parts: list[nn.Module], **options: Any) -> Any:
    from quintic.integrations.titan import MuonContainer

    return MuonContainer.Config(options={**OPTIONS, **options}).build(model_parts=model_parts)


def give_gradients(model_parts: list[nn.Module], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in model_parts:
        for param in part.parameters():
            param.grad = torch.randn(param.shape, generator=generator)


def weights(model_parts: list[nn.Module]) -> list[Tensor]:
    return [param.detach().clone() for part in model_parts for param in part.parameters()]


def test_a_step_is_that_of_one_muon_for_each_part():
    ours, theirs = parts(), parts()
    made = container(ours)
    by_hand = [quintic.Muon(quintic.param_groups(part), **OPTIONS) for part in theirs]
    assert len(made) == 2
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        made.step()
        for optimizer in by_hand:
            optimizer.step()
    assert all(map(torch.equal, weights(ours), weights(theirs)))
    made.zero_grad()
    assert all(param.grad is None for part in ours for param in part.parameters())


@pytest.mark.parametrize("num_steps", [0, 2])
def test_what_is_saved_goes_on_as_if_nothing_had_happened(num_steps):
    ours = parts()
    made = container(ours)
    for seed in range(num_steps):
        give_gradients(ours, seed)
        made.step()
    saved = {key: value.clone() if isinstance(value, Tensor) else value for key, value in made.state_dict().items()}
    assert {"state.up.weight.momentum_buffer", "state.lm_head.weight.exp_avg"} <= saved.keys()
    assert saved["param_groups.down.weight.lr"] == OPTIONS["lr"]

    other = parts()
    for part, state in zip(other, [part.state_dict() for part in ours], strict=True):
        part.load_state_dict(state)
    loaded = container(other)
    loaded.load_state_dict(saved)
    for model_parts, optimizers in ((ours, made), (other, loaded)):
        give_gradients(model_parts, 7)
        optimizers.step()
    assert all(map(torch.equal, weights(ours), weights(other)))


def test_the_keys_are_those_that_pytorch_flattens():
    ours = parts()
    made = container(ours)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    keys = [get_optimizer_state_dict(part, one, options=flat).keys() for part, one in zip(ours, made, strict=True)]
    assert made.state_dict().keys() == keys[0] | keys[1]


def test_hooks_of_the_container_run():
    # torchtitan balances experts in one.
    called = []
    ours = parts()
    made = container(ours)
    made.register_step_pre_hook(lambda *_: called.append(True))
    give_gradients(ours, 0)
    made.step()
    assert called == [True]


def test_torchtitans_schedulers_scale_both_rates():
    from torchtitan.components.optimizer import LRSchedulersContainer

    made = container(parts())
    schedules = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=made, training_steps=10)
    rates = {group["algorithm"]: group["lr"] for one in made for group in one.param_groups}
    assert rates == {"muon": OPTIONS["lr"] / 4, "adamw": OPTIONS["adamw_lr"] / 4}
    assert len(schedules) == 2


def test_torchtitans_own_groups_are_an_error():
    from torchtitan.components.optimizer import ParamGroupConfig

    from quintic.integrations.titan import MuonContainer

    config = MuonContainer.Config(param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW")])
    with pytest.raises(ValueError, match=r"leave param_groups .* empty.*quintic.Rule"):
        config.build(model_parts=parts())
