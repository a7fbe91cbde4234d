"""Saving, loading, changing and comparing a run's configuration, which config.json holds as an object per section."""

import dataclasses
import json
import shlex
import types
import typing
from pathlib import Path
from typing import Any, Literal

from quintic.errors import ConfigError
from quintic.limits import option_of
from quintic.train.config import Config

__all__ = [
    "changed_fields",
    "check_longer",
    "check_resumed",
    "from_dict",
    "load_config",
    "repeat_command",
    "to_dict",
    "with_options",
]


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(values: dict[str, Any], *, origin: str) -> Config:
    """Return a configuration from values made by `to_dict`.

    Args:
        values: section -> field -> value; missing fields get their defaults.
        origin: the file that the values come from, for messages.

    Raises:
        ConfigError: a section or field is unknown, or a value has the wrong type or is out of range.
    """
    sections: dict[str, Any] = {}
    section_types = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    try:
        for section, fields in values.items():
            if section not in section_types:
                raise ConfigError(f"unknown section {section!r}; the sections are {', '.join(section_types)}")
            section_type: Any = section_types[section]
            hints = typing.get_type_hints(section_type)
            restored = {}
            for name, value in fields.items():
                if name not in hints:
                    raise ConfigError(f"unknown field {section}.{name}; remove it")
                if not _fits(value, hints[name]):
                    raise ConfigError(f"{section}.{name} cannot be {json.dumps(value)}; correct or remove it")
                # JSON has neither tuples nor paths.
                plain = tuple(value) if isinstance(value, list) else value
                restored[name] = Path(value) if hints[name] is Path else plain
            sections[section] = section_type(**restored)
        return Config(**sections)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def load_config(path: Path) -> Config:
    """Read a run's `config.json`.

    Raises:
        ConfigError: the file is missing, is not JSON, or is not a configuration.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the config.json of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration ({error})") from None
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise ConfigError(f"{path}: not a configuration; give the config.json of a run")
    return from_dict(values, origin=str(path))


def with_options(config: Config, **values: Any) -> Config:
    """Return the configuration with other values of some fields, whatever their sections.

    Raises:
        ConfigError: a value is out of range, or the values do not fit each other.
    """
    sections = {}
    for section in dataclasses.fields(Config):
        old = getattr(config, section.name)
        changes = {f.name: values.pop(f.name) for f in dataclasses.fields(old) if f.name in values}
        sections[section.name] = dataclasses.replace(old, **changes)
    if values:
        raise TypeError(f"no such option: {', '.join(values)}")
    return Config(**sections)


def changed_fields(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ as `{"section.field": (old, new)}`."""
    changes = {}
    for section in dataclasses.fields(Config):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for f in dataclasses.fields(before):
            values = getattr(before, f.name), getattr(after, f.name)
            if values[0] != values[1]:
                changes[f"{section.name}.{f.name}"] = values
    return changes


# These options may change when a run is resumed, because they do not affect the trained weights.
_FREE_WHEN_RESUMED = frozenset(
    {
        "data.data", "data.data_dir", "data.verify", "run.run", "run.runs_dir", "run.threads", "run.parallel",
        "run.shard_ranks", "run.eval_every", "run.core", "run.core_every", "run.core_items", "run.sample_every",
        "run.sample_tokens", "run.prompts", "run.save_every", "run.keep", "run.rms_every", "run.tensorboard",
        "run.wandb",
    }
)  # fmt: skip

_LENGTHS = frozenset({"schedule.steps", "schedule.target_flops", "schedule.tokens_per_param"})


def check_resumed(saved: Config, asked: Config, path: Path, *, is_comparison: bool = False) -> None:
    """Check that the options given now may be used to continue a run.

    Args:
        saved: the run's saved configuration.
        asked: the configuration with the options given now.
        path: the file of `saved`, for the message.
        is_comparison: check for a comparison, whose number of steps cannot change. A run can be made longer; if `saved`
            has no number of steps, `saving.extend` checks later that the new number is larger.

    Raises:
        ConfigError: an option changes the computation of the run.
    """
    # Rollbacks go back to regular checkpoints, so with them the interval of checkpoints affects the weights.
    free = _FREE_WHEN_RESUMED - ({"run.save_every"} if saved.optim.on_spike == "rollback" else set())
    for name, (old, new) in changed_fields(saved, asked).items():
        # A run may get more steps; every other change must be of an option that does not affect the weights.
        if name == "schedule.steps" and not is_comparison and new is not None:
            check_longer(new, old)
        elif name not in free:
            option = option_of(name.partition(".")[2])
            why = ", because the schedules of all its steps depend on it" if name in _LENGTHS else ""
            kind, new_one = "comparison", "a new one"
            if not is_comparison:
                again = f"quintic train --config {shlex.quote(str(path))} --run NEW {option} ..."
                kind, new_one = "run", f"a new run with its other options ({again})"
            raise ConfigError(
                f"{option} cannot change when a {kind} is resumed{why}: leave it out (it is {old}), or start {new_one}"
            )


def check_longer(steps: int, before: int | None) -> None:
    """Check that `--steps` is larger than the run's length so far, `before`; None skips the check.

    Raises:
        ConfigError: it is not larger.
    """
    if before is not None and steps <= before:
        raise ConfigError(
            f"--steps {steps}: a resumed run can only be made longer, and this one has {before:,} steps: leave --steps "
            "out, or start a new run"
        )


# Options that the command always has, also at their defaults: they describe the run to a reader, and defaults may
# change in later versions.
_ALWAYS = frozenset(
    {"data", "vocab_size", "depth", "head_dim", "seq_len", "optimizer", "embedding_lr", "scalar_lr", "steps",
     "batch_tokens", "rows", "seed", "device", "dtype", "attention", "compile", "threads"}
)  # fmt: skip
# The options of the matrices and the head under each optimizer; the command always has the set that the run uses.
_OF_OPTIMIZER = {
    "muon": frozenset({"muon_lr", "head_lr", "weight_decay"}),
    "adamw": frozenset({"adamw_lr", "adamw_head_lr", "adamw_weight_decay"}),
}
# Options that the command never has, because they do not affect the result.
_NEVER = frozenset({"run", "runs_dir", "verify", "tensorboard", "wandb"})


def repeat_command(config: Config, *, steps: int, **chosen: Any) -> str:
    """Return the `quintic train` command that repeats a run, with `auto` and `None` replaced by their results.

    Args:
        config: the run's configuration, with its batch as a number.
        steps: number of steps.
        **chosen: fields of `RunConfig` with `auto` resolved, such as `device` and `dtype`.
    """
    # The preset "cpu" has the defaults of the dataclasses, from which the options below are the differences.
    words = ["quintic", "train", "--preset", "cpu"]
    always = _ALWAYS | _OF_OPTIMIZER[config.optim.optimizer]
    for section in dataclasses.fields(Config):
        values, defaults = getattr(config, section.name), getattr(Config(), section.name)
        for f in dataclasses.fields(values):
            value = {"steps": steps, **chosen}.get(f.name, getattr(values, f.name))
            # --recipe changes the defaults of these sections, so write their values out.
            by_recipe = config.optim.recipe != "quintic" and section.name in ("model", "optim", "schedule")
            may_stay_out = f.name not in always and not by_recipe
            if f.name in _NEVER or (may_stay_out and value == getattr(defaults, f.name)):
                continue
            option = option_of(f.name)
            if isinstance(getattr(defaults, f.name), bool):
                words.append(option if value else option.replace("--", "--no-", 1))
                continue
            is_path = f.name in ("data", "tokenizer", "data_dir", "core", "init_from") and value not in (None, "python")
            if is_path and Path(value).exists():
                value = Path(value).resolve()  # works from any folder
            words += [option, *map(str, value)] if isinstance(value, tuple) else [option, str(value)]
    return shlex.join(words)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value read from JSON has a field's type."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in options)
    if origin is Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    # Compare types exactly: in Python True is an int, but `"steps": true` is a mistake.
    return type(value) is (str if hint is Path else hint)
