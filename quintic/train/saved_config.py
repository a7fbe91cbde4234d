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
from quintic.train.config import FREE, HIDDEN, OF_ADAMW, OF_MUON, SHOWN, Config, marked

__all__ = [
    "changed_options",
    "check_longer",
    "check_resumed",
    "computation_changes",
    "from_dict",
    "load_config",
    "repeat_command",
    "to_dict",
    "values_of",
    "with_options",
]


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(values: dict[str, Any], *, origin: str) -> Config:
    """Return a configuration from values made by `to_dict`.

    Missing fields get their defaults.

    Raises:
        ConfigError: a section or field is unknown, or a value has the wrong type or is out of range; names the file
            (`origin`) that the values come from.
    """
    sections, restored = vars(Config()), {}
    try:
        for section, fields in values.items():
            if section not in sections:
                raise ConfigError(f"unknown section {section!r}; the sections are {', '.join(sections)}")
            hints = typing.get_type_hints(type(sections[section]))
            for name, value in fields.items():
                if name not in hints:
                    raise ConfigError(f"unknown field {section}.{name}; remove it")
                if not _fits(value, hints[name]):
                    raise ConfigError(f"{section}.{name} cannot be {json.dumps(value)}; correct or remove it")
                # JSON has neither tuples nor paths.
                plain = tuple(value) if isinstance(value, list) else value
                restored[name] = Path(value) if hints[name] is Path else plain
        return with_options(Config(), **restored)
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
    """Return the configuration with other values of some options, of any section.

    Raises:
        ConfigError: a value is out of range, or the values do not fit each other.
    """
    sections = {}
    for name, section in vars(config).items():
        changes = {option: values.pop(option) for option in vars(section) if option in values}
        sections[name] = dataclasses.replace(section, **changes)
    return Config(**sections, **values)  # a name that is left is no option, which is a TypeError


def values_of(config: Config) -> dict[str, Any]:
    """Return the values of all options by name; no two sections share a name."""
    return {name: value for section in vars(config).values() for name, value in vars(section).items()}


def changed_options(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, as name -> (old value, new value)."""
    before, after = values_of(old), values_of(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def computation_changes(saved: Config, asked: Config) -> dict[str, tuple[Any, Any]]:
    """Return the changed options that affect the trained weights, as name -> (old value, new value)."""
    # Rollbacks go back to the newest checkpoint, so with them the interval of checkpoints affects the weights.
    free = {*marked(FREE)} - ({"save_every"} if saved.optim.on_spike == "rollback" else set())
    return {name: values for name, values in changed_options(saved, asked).items() if name not in free}


def check_resumed(saved: Config, asked: Config, path: Path, *, is_comparison: bool = False) -> None:
    """Check that the options given now may be used to continue the run, or comparison, that `path` configures.

    A run can be made longer, a comparison cannot. If `saved` has no number of steps, `extend_run` checks later that the
    new number is larger.

    Raises:
        ConfigError: an option changes the computation of the run.
    """
    for name, (old, new) in computation_changes(saved, asked).items():
        if name == "steps" and not is_comparison and new is not None:
            check_longer(new, old)
            continue
        option, why = option_of(name), ""
        if name in ("steps", "target_flops", "tokens_per_param"):
            why = ", because the schedules of all its steps depend on it"
        kind, new_one = "comparison", "a new one"
        if not is_comparison:
            again = f"quintic train --config {shlex.quote(str(path))} --run NEW {option} ..."
            kind, new_one = "run", f"a new run with its other options ({again})"
        raise ConfigError(
            f"{option} cannot change when a {kind} is resumed{why}: leave it out (it is {old}), or start {new_one}"
        )


def check_longer(steps: int, before: int | None) -> None:
    """Raise a ConfigError if `--steps` is not larger than the run's length so far, `before`, where that is known."""
    if before is not None and steps <= before:
        raise ConfigError(
            f"--steps {steps}: a resumed run can only be made longer, and this one has {before:,} steps: leave --steps "
            "out, or start a new run"
        )


def repeat_command(config: Config, *, steps: int, **chosen: Any) -> str:
    """Return the `quintic train` command that repeats a run, with `auto` and `None` replaced by their results.

    The batch of `config` must be a number; `chosen` has fields of `RunConfig`, such as `device` and `dtype`.
    """
    # The preset "cpu" has the defaults of the dataclasses, from which the options below are the differences.
    words = ["quintic", "train", "--preset", "cpu"]
    unused = marked(OF_ADAMW if config.optim.optimizer == "muon" else OF_MUON)
    always, never = {*marked(SHOWN)} - {*unused}, marked(HIDDEN)
    if config.optim.recipe != "quintic":  # which has other defaults for these sections, so their values are written out
        always |= {*vars(config.model), *vars(config.optim), *vars(config.schedule)}
    values = values_of(config) | {"steps": steps, **chosen}
    for name, default in values_of(Config()).items():
        value, option = values[name], option_of(name)
        if name in never or (name not in always and value == default):
            continue
        if isinstance(default, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
            continue
        is_path = name in ("data", "tokenizer", "data_dir", "core", "init_from") and value not in (None, "python")
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
