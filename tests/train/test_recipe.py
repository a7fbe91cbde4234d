"""The recipe: which parameter learns how fast, and what each step sets."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_config

import quintic
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.model.gpt import GPT
from quintic.train.config import Config, ModelConfig, OptimConfig, ScheduleConfig
from quintic.train.recipe import apply_schedule, build_model, build_optimizer, model_config, total_steps

CPU = torch.device("cpu")


def build(config: Config, vocab_size: int = 300) -> GPT:
    sizes = model_config(config, vocab_size=vocab_size, bos_id=0)
    return build_model(sizes, device=CPU, dtype=torch.float32, attention="sdpa", seed=config.run.seed)


def config(depth: int = 2, **optim: Any) -> Config:
    return Config(
        model=ModelConfig(depth=depth, head_dim=32, seq_len=32),
        optim=OptimConfig(**optim),
        schedule=ScheduleConfig(rows=4, batch_tokens=256, steps=10),
    )


def groups(optimizer: quintic.Muon) -> dict[str, dict[str, Any]]:
    """The groups by name; several groups of one name must agree, and their parameters are joined."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        if group["name"] in found:
            first = found[group["name"]]
            assert all(first[key] == group[key] for key in ("lr", "weight_decay", "algorithm", "cautious"))
            first["param_names"] = [*first["param_names"], *group["param_names"]]
        else:
            found[group["name"]] = dict(group)
    return found


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_parameter_is_in_one_group_of_the_right_name(depth: int, kind: Any) -> None:
    model = build(config(depth))
    optimizer = build_optimizer(model, config(depth, optimizer=kind))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    found = groups(optimizer)
    assert found.keys() == {"embedding", "value embeddings", "head", "residual scales", "scalars", "matrices"}
    assert found["embedding"]["param_names"] == ["embedding.weight"]
    assert all(name.startswith("value_embeddings.") for name in found["value embeddings"]["param_names"])
    assert found["head"]["param_names"] == ["head.weight"]
    assert found["residual scales"]["param_names"] == ["residual_scales"]
    matrices = ["query", "key", "value", "out"]
    expected = {f"blocks.{layer}.attention.{part}.weight" for layer in range(depth) for part in matrices}
    expected |= {f"blocks.{layer}.mlp.{part}.weight" for layer in range(depth) for part in ("up", "down")}
    assert set(found["matrices"]["param_names"]) == expected
    assert found["matrices"]["algorithm"] == kind
    assert all(group["algorithm"] == "adamw" for name, group in found.items() if name != "matrices")


@pytest.mark.parametrize(("depth", "scale"), [(4, 1.0), (1, 2.0), (16, 0.5)])
def test_learning_rates_of_the_tables_fall_with_the_root_of_the_width(depth: int, scale: float) -> None:
    wanted = config(depth, embedding_lr=0.2, head_lr=0.006, scalar_lr=0.03, muon_lr=0.02, adamw_lr=0.003)
    with torch.device("meta"):
        model = GPT(model_config(wanted, vocab_size=300, bos_id=0))
    rates = {name: group["lr"] for name, group in groups(build_optimizer(model, wanted)).items()}
    assert rates == pytest.approx(
        {
            "embedding": 0.2 * scale,
            "value embeddings": 0.1 * scale,
            "head": 0.006 * scale,
            "residual scales": 0.003,
            "scalars": 0.03,
            "matrices": 0.02,
        }
    )


def test_only_the_matrices_decay() -> None:
    for kind, expected in (("muon", 0.3), ("adamw", 0.1)):
        wanted = config(optimizer=kind, weight_decay=0.3, adamw_weight_decay=0.1)
        found = groups(build_optimizer(build(wanted), wanted))
        decays = {name: group["weight_decay"] for name, group in found.items()}
        assert decays == {name: expected if name == "matrices" else 0.0 for name in decays}


def test_adamw_of_the_matrices_is_pytorchs() -> None:
    wanted = config(optimizer="adamw", cautious=False, beta1=0.8, beta2=0.9, adamw_lr=0.01, adamw_weight_decay=0.2)
    model = build(wanted)
    reference = copy.deepcopy(model)
    optimizer = build_optimizer(model, wanted)
    names = groups(optimizer)["matrices"]["param_names"]
    params = dict(reference.named_parameters())
    pytorchs = torch.optim.AdamW(
        [params[name] for name in names], lr=0.01, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.2, fused=True
    )
    for _ in range(3):
        for name, param in model.named_parameters():
            param.grad = torch.randn_like(param)
            params[name].grad = param.grad.clone()
        optimizer.step()
        pytorchs.step()
    ours = dict(model.named_parameters())
    for name in names:
        torch.testing.assert_close(ours[name], params[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(ours[name], torch.zeros_like(ours[name]))


def test_what_each_step_sets() -> None:
    wanted = Config(
        model=ModelConfig(depth=1, head_dim=32, seq_len=32),
        optim=OptimConfig(momentum=0.9, momentum_start=0.5, momentum_warmup_steps=4, muon_lr=0.1, weight_decay=0.4),
        schedule=ScheduleConfig(
            rows=4, batch_tokens=256, steps=8, warmup_frac=0.25, warmdown_frac=0.5, final_lr_frac=0.5
        ),
    )
    optimizer = build_optimizer(build(wanted), wanted)
    multipliers = [0.5, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625]
    momenta = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9]
    peaks = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
    for step in (*range(8), 0):  # in any order: nothing builds up
        settings = apply_schedule(optimizer, wanted, step, 8)
        assert settings["momentum"] == pytest.approx(momenta[step])
        assert settings["weight_decay"] == pytest.approx(0.4 * (1 - step / 8))
        assert settings["lr"] == pytest.approx({name: peak * multipliers[step] for name, peak in peaks.items()})
        for group in optimizer.param_groups:
            assert group["lr"] == settings["lr"][group["name"]]
            if group["algorithm"] == "muon":
                assert group["momentum"] == settings["momentum"]
                assert group["weight_decay"] == settings["weight_decay"]


def test_the_number_of_steps() -> None:
    model = build(config())
    assert total_steps(config(), model) == 10
    counts = model.num_parameters()
    derived = Config(
        model=config().model, schedule=ScheduleConfig(rows=4, batch_tokens=256, steps=None, tokens_per_param=3.0)
    )
    assert total_steps(derived, model) == round(3 * (counts["blocks"] + counts["head"]) / 256)
    none = Config(
        model=config().model, schedule=ScheduleConfig(rows=4, batch_tokens=256, steps=None, tokens_per_param=0)
    )
    assert total_steps(none, model) == 1


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = build(config()), build(config())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(param.device == CPU and param.dtype == torch.float32 for param in first.parameters())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 7}, "--head-dim 7: rotary positions need an even number"),
        ({"kv_ratio": 3, "depth": 4, "head_dim": 64}, "--kv-ratio 3 does not divide the 4 query heads of depth 4"),
        ({"window_pattern": "SX"}, "--window-pattern 'SX': use the letters S"),
        ({"window_pattern": ""}, "--window-pattern '': use the letters S"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(Config(model=ModelConfig(**sizes)), vocab_size=300, bos_id=0)


def test_the_tiny_configuration_builds(tiny_dataset: Dataset, tmp_path: Path) -> None:
    tiny = tiny_config(tiny_dataset, tmp_path)
    sizes = model_config(tiny, vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    assert (sizes.width, sizes.num_heads, sizes.vocab_size) == (64, 2, 300)
