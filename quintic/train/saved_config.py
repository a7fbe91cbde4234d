"""A run's configuration as a file: `config.json`, nested plain values in the sections of `Config`."""

import dataclasses
import json
import shlex
import types
import typing
from pathlib import Path
from typing import Any, Literal

from quintic.errors import ConfigError
from quintic.train.config import Config

__all__ = ["changed_fields", "check_longer", "check_resumed", "from_dict", "load_config", "repeat_command", "to_dict"]


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values, ready for JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(values: dict[str, Any], *, origin: str) -> Config:
    """Return the configuration that `to_dict` made these values from.

    Args:
        values: nested plain values; missing fields keep their defaults.
        origin: file the values come from, for messages.

    Raises:
        ConfigError: an unknown section or field, or values that do not fit.
    """
    sections: dict[str, Any] = {}
    section_types = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    try:
        for section, fields in values.items():
            if section not in section_types:
                raise ConfigError(f"unknown section {section!r}; there are {', '.join(section_types)}")
            section_type: Any = section_types[section]
            hints = typing.get_type_hints(section_type)
            restored = {}
            for name, value in fields.items():
                if name not in hints:
                    raise ConfigError(f"unknown field {section}.{name}; remove it")
                if not _fits(value, hints[name]):
                    raise ConfigError(f"{section}.{name} cannot be {json.dumps(value)}; correct or remove it")
                plain = tuple(value) if isinstance(value, list) else value
                restored[name] = Path(value) if hints[name] is Path else plain
            sections[section] = section_type(**restored)
        return Config(**sections)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def load_config(path: Path) -> Config:
    """Read a configuration saved as JSON (a run's `config.json`).

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else.
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


# Options of watching and storing a run may change when it is resumed; those of its computation may not.
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
    """Check that a run can be continued with other options.

    Args:
        saved: the run's own.
        asked: the options now.
        path: the file of `saved`, for the message.
        is_comparison: the options are those of a comparison. A run can get more steps, a comparison cannot; where
            `saved` has no number of steps, whether there are more is checked later.

    Raises:
        ConfigError: they change what the run computes.
    """
    # Where a run that goes back to checkpoints goes back to depends on when they were due.
    free = _FREE_WHEN_RESUMED - ({"run.save_every"} if saved.optim.on_spike == "rollback" else set())
    for name, (old, new) in changed_fields(saved, asked).items():
        if name == "schedule.steps" and not is_comparison and new is not None:
            check_longer(new, old)
        elif name not in free:
            option = "--" + name.partition(".")[2].replace("_", "-")
            why = ", as the schedules of all its steps follow from it" if name in _LENGTHS else ""
            what, new_one = "comparison", "a new one"
            if not is_comparison:
                again = f"quintic train --config {shlex.quote(str(path))} --run NEW {option} ..."
                what, new_one = "run", f"a new run with its other options ({again})"
            raise ConfigError(
                f"{option} cannot change when a {what} is resumed{why}: leave it out (it is {old}), or start {new_one}"
            )


def check_longer(steps: int, before: int | None) -> None:
    """Check that `--steps` makes a run longer than it is; None for a length that is not known yet.

    Raises:
        ConfigError: it does not.
    """
    if before is not None and steps <= before:
        raise ConfigError(
            f"--steps {steps}: a resumed run can be made longer, not shorter, and it has {before:,} steps: leave the "
            "option out, or start a new run"
        )


# Written out whatever they are: who reads the command sees the run, and defaults may change.
_ALWAYS = frozenset(
    {"data", "vocab_size", "depth", "head_dim", "seq_len", "optimizer", "muon_lr", "embedding_lr", "head_lr",
     "scalar_lr", "weight_decay", "steps", "batch_tokens", "rows", "seed", "device", "dtype", "attention", "compile",
     "threads"}
)  # fmt: skip
# Where a run is kept and shown changes nothing in it.
_NEVER = frozenset({"run", "runs_dir", "verify", "tensorboard", "wandb"})


def repeat_command(config: Config, *, steps: int, **chosen: Any) -> str:
    """Return the `quintic train` command that makes the same run again, with `auto` and `None` written out.

    Args:
        config: the run's, with its batch as a number.
        steps: number of steps.
        **chosen: other fields of `RunConfig` as they came out, `device` and `dtype` among them.
    """
    words = ["quintic", "train", "--preset", "cpu"]
    for section in dataclasses.fields(Config):
        values, defaults = getattr(config, section.name), getattr(Config(), section.name)
        for f in dataclasses.fields(values):
            value = {"steps": steps, **chosen}.get(f.name, getattr(values, f.name))
            # A recipe has defaults of its own, in these sections.
            by_recipe = config.optim.recipe != "quintic" and section.name in ("model", "optim", "schedule")
            may_stay_out = f.name not in _ALWAYS and not by_recipe
            if f.name in _NEVER or (may_stay_out and value == getattr(defaults, f.name)):
                continue
            option = "--" + f.name.replace("_", "-")
            if isinstance(getattr(defaults, f.name), bool):
                words.append(option if value else option.replace("--", "--no-", 1))
                continue
            is_path = f.name in ("data", "tokenizer", "data_dir", "core", "init_from") and value not in (None, "python")
            if is_path and Path(value).exists():
                value = Path(value).resolve()  # the same from another folder
            words += [option, *map(str, value)] if isinstance(value, tuple) else [option, str(value)]
    return shlex.join(words)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value read from JSON is of a field's type."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in options)
    if origin is Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    # `bool` is a kind of `int` to Python, but not to a reader of the file.
    return type(value) is (str if hint is Path else hint)
