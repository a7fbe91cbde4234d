"""The recipe: which parameter learns how fast, and what each step sets."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny_runs import tiny_config

import quintic
from quintic.commands.presets import preset, with_recipe
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.model.gpt import GPT
from quintic.optim.rules.names import RuleName
from quintic.optim.rules.table import RULES, rule_of
from quintic.train.config import Config, DataConfig, ModelConfig, OptimConfig, ScheduleConfig
from quintic.train.recipe import (
    apply_schedule,
    build_model,
    build_optimizer,
    empty_model,
    model_config,
    scale_lines,
)
from quintic.train.saved_config import with_options
from quintic.train.schedule import scale_of

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


def meta(wanted: Config, vocab_size: int = 32_768) -> GPT:
    with torch.device("meta"):
        return GPT(model_config(wanted, vocab_size=vocab_size, bos_id=0))


def of_depth(depth: int, recipe: str = "seed", **schedule: Any) -> Config:
    changed = with_recipe(preset("gpu"), recipe)
    return dataclasses.replace(
        changed,
        model=dataclasses.replace(changed.model, depth=depth),
        schedule=dataclasses.replace(changed.schedule, **schedule),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"depth": 3, "kv_ratio": 2},
        {"depth": 2, "head_dim": 8, "aspect_ratio": 8},  # narrower than what the gates read
        {"depth": 4, "l3_layers": "1,3", "l3_d_up": 10, "l3_embeddings": 900},
        {"depth": 1, "l3_layers": "0", "l3_embeddings": 700, "l3_tied": False},
    ],
)
def test_sizes_count_the_weights_of_the_model(sizes: dict[str, Any]) -> None:
    wanted = Config(
        model=ModelConfig(**{"head_dim": 32, "seq_len": 32, **sizes}), schedule=ScheduleConfig(batch_tokens=None)
    )
    model = meta(wanted, vocab_size=300)
    parts = model.num_parameters()
    assert model.config.matrix_weights() == parts["blocks"] + parts["head"]
    multiplied = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    rows = 12 * model.config.width * model.config.l3_embeddings * len(model.config.l3_layers) / 300
    visible = 12 * model.config.width * sum(model.config.windows)
    assert model.config.flops_per_token() == 6 * multiplied + visible + round(rows)
    assert model.config.flops_per_token(0.0) == 6 * multiplied + visible


def test_the_length_is_set_by_steps_then_operations_then_the_ratio() -> None:
    wanted = of_depth(12)
    model = meta(wanted)
    counts = model.num_parameters()
    by_ratio = scale_of(wanted, model.config)
    assert by_ratio.tokens == int(10.5 * (counts["blocks"] + counts["head"]))
    assert by_ratio.steps == by_ratio.tokens // 2**19
    by_operations = scale_of(of_depth(12, target_flops=1e18), model.config)
    assert by_operations.steps == round(1e18 / (model.flops_per_token() * 2**19))
    by_steps = scale_of(of_depth(12, target_flops=1e18, steps=77), model.config)
    assert by_steps.steps == 77
    # Batch and rates follow from the model, whatever sets the length.
    assert by_ratio.tokens == by_operations.tokens == by_steps.tokens
    for small in (of_depth(12, tokens_per_param=1e-9), of_depth(12, target_flops=1.0)):
        assert scale_of(small, model.config).steps == 1


@pytest.mark.parametrize(
    ("depth", "batch", "lr", "decay", "steps"),
    [(12, 2**19, 1.0, 1.0, 2205), (20, 1_048_576, 1.414, 0.358, 4357), (26, 1_048_576, 1.414, 0.170, 9196)],
)
def test_batch_rates_and_decay_follow_the_size(depth: int, batch: int, lr: float, decay: float, steps: int) -> None:
    wanted = of_depth(depth)
    found = scale_of(wanted, meta(wanted).config)
    assert (found.batch_tokens, found.steps) == (batch, steps)
    assert (round(found.lr_factor, 3), round(found.decay_factor, 3)) == (lr, decay)
    # The law, written anew: blocks have 12 width^2 weights, and gates that hardly count.
    ours, reference = (10.5 * (depth * 12 * (64 * depth) ** 2 + 32768 * 64 * depth) for depth in (depth, 12))
    assert found.tokens == pytest.approx(ours, rel=1e-4)
    assert found.decay_factor == pytest.approx((batch / 2**19) ** 0.5 * reference / ours, rel=1e-4)


def rates_of(wanted: Config) -> dict[str, dict[str, Any]]:
    return groups(build_optimizer(meta(wanted), wanted))


def test_the_rates_of_the_named_recipes() -> None:
    for depth, lr, decay in ((12, 1.0, 1.0), (20, 2**0.5, 0.35779)):
        by_width = lr * (64 * depth / 768) ** -0.5
        common = {"residual scales": 0.005 * lr, "x0 scales": 0.5 * lr, "smear": 0.2, "backout": 0.2}
        seed = rates_of(of_depth(depth, "seed"))
        assert {name: group["lr"] for name, group in seed.items()} == pytest.approx(
            {
                **common,
                "matrices": 0.02 * lr,
                "embedding": 0.3 * by_width,
                "value embeddings": 0.3 * by_width,
                "head": 0.004 * by_width,
            }
        )
        assert {name: group["weight_decay"] for name, group in seed.items()} == pytest.approx(
            {name: 0.2 * decay if name == "matrices" else 0.0 for name in seed}, rel=1e-4
        )
        assert {name: group["betas"] for name, group in seed.items() if name != "matrices"} == {
            name: (0.96, 0.95) if name == "x0 scales" else (0.8, 0.95) for name in seed if name != "matrices"
        }
        newest = rates_of(of_depth(depth, "nanochat"))
        assert {name: group["lr"] for name, group in newest.items()} == pytest.approx(
            {
                **common,
                "matrices": 0.02 * lr,
                "embedding": 0.3 * by_width,
                "value embeddings": 0.15 * by_width,
                "head": 0.008 * by_width,
            }
        )
        assert {name: group["weight_decay"] for name, group in newest.items()} == pytest.approx(
            {
                "matrices": 0.28 * decay,
                "embedding": 0.001,
                "value embeddings": 0.01,
                "head": 0.01,
                "residual scales": 0.05,
                "x0 scales": 0.0,
                "smear": 0.0,
                "backout": 0.0,
            },
            rel=1e-4,
        )
        assert newest["embedding"]["betas"] == newest["value embeddings"]["betas"] == (0.8, 0.995)
        assert (newest["head"]["betas"], newest["x0 scales"]["betas"]) == ((0.8, 0.96), (0.96, 0.95))
        assert newest["residual scales"]["betas"] == newest["smear"]["betas"] == (0.8, 0.95)
        for found, name, beta in ((seed, "normuon", 0.95), (newest, "nanochat", 0.9)):
            matrices = found["matrices"]
            assert rule_of("muon", matrices["normalize"], matrices["update_rule"]) == RULES[name]
            assert matrices["normalize_beta"] == beta
            assert "blocks.1.attention.value_gate.weight" in found["matrices"]["param_names"]


@pytest.mark.parametrize("recipe", ["quintic", "seed", "nanochat"])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_state_that_cannot_follow_a_recipe_is_an_error_that_names_both(recipe: str, state_dtype: str) -> None:
    config = with_recipe(with_options(Config(), depth=2, state_dtype=state_dtype), recipe)
    model = empty_model(model_config(config, vocab_size=64, bos_id=0), dtype=torch.float32, attention="sdpa")
    if recipe != "nanochat":
        build_optimizer(model, config)
        return
    with pytest.raises(
        ConfigError, match=rf"^--state-dtype {state_dtype}: --recipe nanochat has the coefficient 0\.995"
    ):
        build_optimizer(model, config)


def test_a_rule_is_chosen_by_name() -> None:
    assert get_args(RuleName) == tuple(RULES)
    for given, rule in (
        ({}, "muon"),
        ({"normalize": "neuron"}, "normuon"),
        ({"normalize": "element"}, "adamuon"),
        *(({"update_rule": name}, name) for name in RULES),
        ({"update_rule": "muown", "normalize": "neuron"}, "muown"),  # as with --recipe seed
    ):
        wanted = config(4, **given)
        groups = build_optimizer(meta(wanted), wanted)._plans.current_groups()
        assert [group.rule for group in groups if group.algorithm == "muon"] == [RULES[rule]]
        assert scale_lines(wanted, vocab_size=300)[4].startswith(f"Rates ({RULES[rule].title}): matrices 0.03, ")
    adamw = config(4, optimizer="adamw", update_rule="muown")
    assert scale_lines(adamw, vocab_size=300)[4].startswith("Rates (AdamW): ")


def test_the_course_of_the_newest_recipe() -> None:
    wanted = of_depth(12, "nanochat", steps=1000)
    optimizer = build_optimizer(meta(wanted), wanted)
    peak = next(group for group in optimizer.param_groups if group["name"] == "embedding")["lr"]
    for step in (0, 39, 40, 349, 350, 399, 400, 700, 999):
        found = apply_schedule(optimizer, wanted, step, 1000)
        # base_train.py: 40 steps up, from step 350 on 0.65 of the run down to 0.05; momentum up over 400 steps first.
        left = (1000 - step) / 650
        rate = (step + 1) / 40 if step < 40 else min(1.0, left + 0.05 * (1 - left))
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 * left + 0.90 * (1 - left)
        assert found["lr"]["embedding"] == pytest.approx(peak * rate)
        assert found["momentum"] == pytest.approx(momentum)
        assert found["weight_decay"] == pytest.approx(0.14 * (1 + math.cos(math.pi * step / 1000)))
        decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
        assert (decays["head"], decays["residual scales"]) == (0.01, 0.05)


def test_a_recipe_leaves_sizes_and_length_alone() -> None:
    changed = with_recipe(Config(), "nanochat")
    assert (changed.schedule.steps, changed.schedule.batch_tokens) == (500, 4096)
    assert changed.model == ModelConfig(variant="nanochat")
    assert changed.data == DataConfig()
    assert with_recipe(changed, "nanochat") is changed
    assert with_recipe(Config(), "quintic") == Config()
    with pytest.raises(ConfigError, match="--recipe quintic: --config has the recipe nanochat"):
        with_recipe(changed, "quintic")


def test_the_automatic_batch_must_be_whole_passes() -> None:
    wanted = of_depth(12, rows=3)
    with pytest.raises(ConfigError, match="--batch-tokens 524288 is not a multiple of --rows 3 x --seq-len 2048"):
        with_options(wanted, batch_tokens=scale_of(wanted, meta(wanted).config).batch_tokens)


def test_what_a_run_will_be_is_told_with_what_was_passed_over() -> None:
    lines = scale_lines(of_depth(20), vocab_size=32_768)
    counts = meta(of_depth(20)).num_parameters()
    # The gates of the blocks are scalars for the optimizer, and count as blocks here.
    names = {name: name.replace("_", " ") for name in counts} | {"scalars": "scalars outside the blocks"}
    assert all(f"{names[name]} {count:,}" in lines[0] for name, count in counts.items())
    assert "2,886,212,784 per token" in lines[1]
    assert "4,357 steps, 4,568,645,632 tokens" in lines[2]
    assert lines[2].endswith("by --tokens-per-param 10.5")
    assert "1,048,576 tokens (automatic), in 16 passes of 32 x 2,048" in lines[3]
    assert scale_lines(of_depth(20), vocab_size=32_768, data_ranks=8)[3].endswith(
        "in 2 passes of 32 x 2,048 on each of 8 ranks"
    )
    assert "rates x 1.414, decay x 0.358" in lines[4]
    both = scale_lines(of_depth(12, steps=9, target_flops=1e18, batch_tokens=2**18), vocab_size=32_768)
    assert both[2].endswith("by --steps 9, not by --target-flops 1e+18 or --tokens-per-param 10.5")
    assert "262,144 tokens (given)" in both[3]
    one = scale_lines(of_depth(12, target_flops=1e18), vocab_size=32_768)
    assert one[2].endswith("by --target-flops 1e+18, not by --tokens-per-param 10.5")


def test_a_warm_up_that_is_cut_is_told() -> None:
    rates = scale_lines(of_depth(4, steps=10, warmup_steps=7, warmdown_frac=0.4), vocab_size=300)[4]
    assert rates.endswith("; --warmup-steps 7 ends after they begin to fall (step 6)")
    assert "warmup" not in scale_lines(of_depth(4, steps=10, warmup_steps=6, warmdown_frac=0.4), vocab_size=300)[4]


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = build(config()), build(config())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(param.device == CPU and param.dtype == torch.float32 for param in first.parameters())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 7}, "--head-dim 7: rotary positions need an even number"),
        ({"kv_ratio": 3, "depth": 4, "head_dim": 64}, "--kv-ratio 3 does not divide the 4 query heads of depth 4"),
        ({"window_pattern": "SX"}, "--window-pattern SX: use the letters S"),
        ({"short_window": 1.0, "aspect_ratio": 100, "kv_ratio": 3}, "--kv-ratio 3 does not divide the 7 query heads"),
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
