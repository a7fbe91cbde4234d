"""The configuration: bounds, the presets, and its way into a file and back."""

import dataclasses
import json
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintic.commands.options import training_options
from quintic.commands.presets import preset
from quintic.errors import ConfigError
from quintic.train.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig
from quintic.train.saved_config import changed_options, from_dict, load_config, repeat_command, to_dict

SECTIONS = [DataConfig, ModelConfig, OptimConfig, ScheduleConfig, RunConfig]


def test_no_two_fields_share_a_name() -> None:
    # The options of the command line have no prefix for their section.
    names = [f.name for section in SECTIONS for f in dataclasses.fields(section)]
    assert len(names) == len(set(names))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type that are in range whatever the field."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of([values(option) for option in typing.get_args(hint)])
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    texts = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs", "Cc"]), min_size=1)
    texts = texts.filter(lambda text: not text.startswith("."))
    floats = st.floats(0, 0.49, exclude_min=True)
    strategies = {
        types.NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(300, 1000),
        float: floats,
        str: texts,
        Path: texts.map(Path),
        tuple[str, ...]: st.lists(texts).map(tuple),
    }
    return strategies[hint]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    made = []
    for section in SECTIONS:
        hints = typing.get_type_hints(section)
        made.append(section(**{name: draw(values(hint)) for name, hint in hints.items()}))
    data, model, optim, schedule, run = made
    schedule = dataclasses.replace(schedule, batch_tokens=schedule.rows * model.seq_len)
    return Config(data=data, model=model, optim=optim, schedule=schedule, run=run)


@given(configs())
def test_a_configuration_comes_back_from_its_file(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(to_dict(config)), encoding="utf-8")
    assert load_config(path) == config
    assert changed_options(config, load_config(path)) == {}


def test_fields_that_are_missing_in_a_file_keep_their_defaults() -> None:
    assert from_dict({}, origin="x") == Config()
    assert from_dict({"model": {"depth": 7}}, origin="x") == Config(model=ModelConfig(depth=7))


def test_the_presets_can_be_saved() -> None:
    assert from_dict(to_dict(preset("gpu")), origin="x") == preset("gpu")
    assert preset("gpu").model.depth == 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a configuration"),
        ("\x80", "cannot be read as a configuration"),
        ("[]", "not a configuration; give the config.json of a run"),
        ('{"model": 3}', "not a configuration"),
        ('{"modle": {}}', "unknown section 'modle'; the sections are data, model, optim, schedule, run"),
        ('{"model": {"dpeth": 3}}', "unknown field model.dpeth; remove it"),
        ('{"model": {"depth": "three"}}', 'model.depth cannot be "three"; correct or remove it'),
        ('{"model": {"depth": true}}', "model.depth cannot be true"),
        ('{"model": {"depth": 2.5}}', "model.depth cannot be 2.5"),
        ('{"model": {"depth": null}}', "model.depth cannot be null"),
        ('{"optim": {"optimizer": "sgd"}}', 'optim.optimizer cannot be "sgd"'),
        ('{"optim": {"muon_lr": "fast"}}', 'optim.muon_lr cannot be "fast"'),
        ('{"run": {"prompts": "The"}}', 'run.prompts cannot be "The"'),
        ('{"run": {"prompts": [1]}}', r"run.prompts cannot be \[1\]"),
        ('{"data": {"data_dir": 3}}', "data.data_dir cannot be 3"),
        ('{"run": {"tensorboard": 1}}', "run.tensorboard cannot be 1"),
        ('{"model": {"depth": 0}}', "--depth 0: must be at least 1"),
        (
            '{"schedule": {"rows": 3, "batch_tokens": 4096}, "model": {"seq_len": 256}}',
            "--batch-tokens 4096 is not a multiple of --rows 3 x --seq-len 256 = 768",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; give the config\.json of a run"):
        load_config(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read as a configuration"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("section", "name", "bad", "limit"),
    [
        *[(DataConfig, "vocab_size", value, "must be at least 257") for value in (256, 0, -1)],
        *[(DataConfig, "val_frac", value, "must lie strictly between 0 and 1") for value in (0, 1, -1, float("nan"))],
        (DataConfig, "max_bytes", 0, "must be at least 1"),
        *[
            (ModelConfig, f, 0, "must be at least 1")
            for f in ("depth", "aspect_ratio", "head_dim", "kv_ratio", "seq_len")
        ],
        *[(ModelConfig, "short_window", value, "must be above 0 and at most 1") for value in (0.0, 1.1, float("nan"))],
        *[(ScheduleConfig, "target_flops", v, "must be above 0 and finite") for v in (0, -1.0, float("inf"))],
        (ScheduleConfig, "warmup_steps", -1, "must be at least 0"),
        *[
            (OptimConfig, f.name, -0.1, "must be at least 0")
            for f in dataclasses.fields(OptimConfig)
            if typing.get_type_hints(OptimConfig)[f.name] is float
        ],
        (OptimConfig, "muon_lr", float("inf"), "must be at least 0 and finite"),
        (OptimConfig, "head_lr", float("nan"), "must be at least 0 and finite"),
        *[(OptimConfig, f, 1.0, "below 1") for f in ("momentum", "momentum_start", "momentum_end", "beta1", "beta2")],
        (OptimConfig, "momentum_warmup_steps", -1, "must be at least 0"),
        *[(OptimConfig, "clip_norm", v, "above 0 and finite") for v in (0.0, -1.0, float("inf"), float("nan"))],
        *[(ScheduleConfig, f, 0, "must be at least 1") for f in ("steps", "batch_tokens", "rows")],
        *[(ScheduleConfig, "tokens_per_param", v, "must be above 0") for v in (0.0, -1.0, float("nan"))],
        *[(ScheduleConfig, f, 1.1, "between 0 and 1") for f in ("warmup_frac", "warmdown_frac", "final_lr_frac")],
        *[(RunConfig, f, 0, "must be at least 1") for f in ("threads", "eval_tokens", "keep")],
        *[
            (RunConfig, f, -1, "must be at least 0")
            for f in ("seed", "eval_every", "sample_every", "sample_tokens", "save_every", "rms_every")
        ],
        (RunConfig, "threads", 5000, "must be at most 1,024"),
        (RunConfig, "seed", 2**63, r"must be below 2\^63"),
        *[(RunConfig, "run", value, "plain folder name") for value in ("", ".", "..", "a/b", "/a", ".hidden", "a/")],
    ],
)
def test_a_number_out_of_range_names_its_option(section: Any, name: str, bad: Any, limit: str) -> None:
    option = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"^{option} \S+: .*{limit}"):
        section(**{name: bad})


@pytest.mark.parametrize("name", ["momentum", "momentum_start", "beta1", "beta2"])
def test_bfloat16_state_needs_averages_that_it_can_follow(name: str) -> None:
    OptimConfig(**{name: 0.999})
    OptimConfig(state_dtype="bf16", **{name: 0.98})
    with pytest.raises(
        ConfigError, match=rf"^--{name.replace('_', '-')} 0\.999: must be at most 0\.98 with --state-dtype bf16"
    ):
        OptimConfig(state_dtype="bf16", **{name: 0.999})


def test_a_given_tokenizer_makes_the_size_of_the_vocabulary_unimportant() -> None:
    assert DataConfig(tokenizer="gpt2", vocab_size=1).tokenizer == "gpt2"


def test_warm_up_and_warm_down_must_fit_into_the_run() -> None:
    ScheduleConfig(warmup_frac=0.5, warmdown_frac=0.5)
    with pytest.raises(ConfigError, match="--warmup-frac and --warmdown-frac add up to more than 1"):
        ScheduleConfig(warmup_frac=0.5, warmdown_frac=0.6)


def test_changed_options_are_named_with_both_values() -> None:
    old = Config(model=ModelConfig(depth=4), run=RunConfig(keep=2))
    new = Config(model=ModelConfig(depth=3), run=RunConfig(keep=5))
    assert changed_options(old, new) == {"depth": (4, 3), "keep": (2, 5)}


@pytest.mark.parametrize(
    "options",
    [
        "--recipe seed --warmdown-frac 0.4 --no-scale-rates --normalize None",
        "--recipe nanochat --decay-shape linear --warmup-steps None --warmup-frac 0.02 --momentum 0.95",
        "--recipe nanochat --optimizer adamw --momentum-end None --tokens-per-param 10.5 --final-lr-frac 0",
        "--preset gpu --no-scale-rates --rows 16 --warmup-frac 0.02",
    ],
)
def test_the_command_that_repeats_a_run_has_its_configuration(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("python").mkdir()  # not the text that --data python stands for
    given = f"{options} --steps 40 --batch-tokens 65536"
    config = training_options(shlex.split(given), "train").config
    chosen = {name: getattr(config.run, name) for name in ("device", "dtype", "attention", "compile", "threads")}
    command = repeat_command(config, steps=40, **chosen)
    assert training_options(shlex.split(command)[2:], "train").config == config


@pytest.mark.parametrize(
    ("optimizer", "used", "unused"),
    [
        ("muon", "--muon-lr 0.03 --head-lr 0.006 --weight-decay 0.3", "--adamw"),
        (
            "adamw",
            "--adamw-lr 0.003 --adamw-head-lr 0.01 --adamw-weight-decay 0.1",
            "--muon-lr|--head-lr| --weight-decay",
        ),
    ],
)
def test_the_command_has_the_rates_of_its_optimizer(optimizer: str, used: str, unused: str) -> None:
    command = repeat_command(Config(optim=OptimConfig(optimizer=optimizer)), steps=40)
    words = re.findall(r"--\S+ [^-]\S*", used)
    assert len(words) == 3
    assert all(word in command for word in words)
    assert not re.search(unused, command)
