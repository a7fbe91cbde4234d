"""Options of the command line: made from dataclasses, with one-line messages for what cannot be read.

The options of training are the fields of `config.Config`, those of the commands that use a trained model stand here.
tyro turns the fields and their docstrings into options and `--help`. What a user typed is looked over here first,
because tyro's own messages are boxes of many lines that speak of Python types.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from quintic.errors import ConfigError, QuinticError
from quintic.train.config import Config, changed_fields, gpu_preset, load_config
from quintic.train.runs import CONFIG_FILE, find_run

__all__ = [
    "EvalOptions",
    "RehearsalOptions",
    "ReportOptions",
    "SampleOptions",
    "Start",
    "asks_for_rehearsal",
    "parse",
    "training_options",
]

T = TypeVar("T")

# How a run is watched and stored may change when it is resumed; what it computes may not.
_FREE_WHEN_RESUMED = frozenset(
    {
        "data.data_dir", "data.verify", "run.run", "run.runs_dir", "run.threads", "run.eval_every", "run.sample_every",
        "run.sample_tokens", "run.prompts", "run.save_every", "run.keep", "run.rms_every", "run.tensorboard",
        "run.wandb",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Let a trained model write."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    prompts: tuple[str, ...] = ("",)
    """Beginnings to continue; the empty one starts a new document."""
    tokens: int = 200
    """Tokens to write per prompt."""
    temperature: float = 0.8
    """0 always takes the likeliest token; higher is more varied."""
    top_k: int | None = 50
    """Choose among this many likeliest tokens; 'None' among all."""
    seed: int = 0
    """Seed of the choices."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Score a trained model in bits per byte."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    data: str | None = None
    """Other text to score on, all of it, named as in `quintic train`; by default the validation text of the run."""
    tokens: int | None = None
    """Tokens to score, at most; by default all there are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; 'auto' takes a GPU if there is one."""
    verify: bool = False
    """Compare all prepared data with its checksums; by default once on each machine, and what changed since."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write report.html of a run again."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """Show what the optimizer of any model does on any number of GPUs, without them."""

    model: str
    """A well-known model such as llama-3-70b, the path of a config.json, or owner/name on the Hugging Face Hub."""
    mesh: str = "8"
    """Ranks along each dimension of the mesh, as in 8x4."""
    layout: str = "fsdp"
    """What each dimension does: dp (DDP), replicate, fsdp, ep, tp; as in fsdp,tp."""
    node_size: int = 8
    """Consecutive ranks that are on one node."""
    replicas: Literal["auto", "divide", "repeat"] = "auto"
    """Whether all ranks divide the work on several copies, or those of each copy do all of it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the parameters."""
    orthogonalizer: Literal["auto", "polar_express", "gram", "newton_schulz", "svd"] = "auto"
    """How matrices are orthogonalised."""
    normalize: Literal["neuron"] | None = None
    """'neuron' for NorMuon."""
    master: Literal["fp32", "mantissa"] | None = None
    """What stands behind bfloat16 parameters."""
    state_dtype: Literal["bf16"] | None = None
    """'bf16' for momentum and moments in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What to start from."""

    config: Path | None = None
    """Take the defaults of all other options from this file, the config.json of a run."""


@dataclass(frozen=True, kw_only=True)
class StartOptions(FileOptions):
    """What to start from."""

    resume: bool = False
    """Continue the run named by --run, or the one started last, with its own options."""


# What `--help` lists besides the configuration; these options are read before the others.
@dataclass(frozen=True, kw_only=True)
class _TrainOptions(Config):
    start: StartOptions = dataclasses.field(default_factory=StartOptions)


@dataclass(frozen=True, kw_only=True)
class _OtherOptions(Config):
    start: FileOptions = dataclasses.field(default_factory=FileOptions)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a training command starts from."""

    config: Config
    resumed: Path | None
    """Folder of the run to continue; None for a new one."""


def asks_for_rehearsal(arguments: list[str]) -> bool:
    """Return whether the arguments of `quintic plan` speak of another model than the harness' own.

    Raises:
        ConfigError: they do, but do not say of which.
    """
    own = {name for name, _ in _options(RehearsalOptions)} - {name for name, _ in _options(Config)}
    given = [name for argument in arguments if (name := argument.partition("=")[0]) in own]
    if given and "--model" not in given:
        raise ConfigError(f"{given[0]} needs --model NAME: a model to plan for, such as llama-3-70b")
    return bool(given)


def training_options(arguments: list[str], *, command: str, description: str) -> Start:
    """Read the options of a training command.

    The defaults come from `--config`, with `--resume` from the run that is continued, else from the preset of the
    device.

    Raises:
        ConfigError: an option cannot be read, does not fit the others, or cannot change when a run is resumed.
    """
    import torch

    resume, rest = "--resume" in arguments, [argument for argument in arguments if argument != "--resume"]
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    path, rest = _taken(rest, "--config")
    if resume and not asks_help:
        if path is not None:
            raise ConfigError("--config: a resumed run keeps its own configuration; leave it out")
        name, _ = _taken(rest, "--run")
        runs_dir, _ = _taken(rest, "--runs-dir")
        run_dir = find_run(Path(Config().run.runs_dir if runs_dir is None else runs_dir), name)
        return Start(config=_resumed(load_config(run_dir / CONFIG_FILE), rest, command), resumed=run_dir)
    if path is not None:
        default = load_config(Path(path))
    else:
        device, _ = _taken(rest, "--device")
        default = gpu_preset() if torch.cuda.is_available() and device != "cpu" else Config()
    kind: type[Config] = Config
    if asks_help:
        kind = _TrainOptions if command == "train" else _OtherOptions
    sections = {section.name: getattr(default, section.name) for section in dataclasses.fields(Config)}
    return Start(config=parse(kind, rest, command, description, default=kind(**sections)), resumed=None)


def parse(kind: type[T], arguments: list[str], command: str, description: str, default: T | None = None) -> T:
    """Return the options, `default` where they are not given; `--help` prints and leaves with `SystemExit`.

    Raises:
        ConfigError: an option is unknown, or its value is of the wrong kind or out of range.
    """
    import tyro

    if not any(argument in ("-h", "--help") for argument in arguments):
        _check(arguments, dict(_options(kind)), command)
    errors = io.StringIO()
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed: T = tyro.cli(
                kind,
                prog=f"quintic {command}",
                description=description,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes,),
                **given,
            )
            return parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            raise  # --help
        refused: BaseException | None = stop
        while refused is not None and not isinstance(refused, QuinticError):
            refused = refused.__context__
        # Ours, from a dataclass that refused its values; else what tyro says, without its box.
        message = str(refused) if refused is not None else _unboxed(errors.getvalue())
        raise ConfigError(message) from None


def _resumed(saved: Config, arguments: list[str], command: str) -> Config:
    asked = parse(Config, arguments, command, "", default=saved)
    for name, (old, _) in changed_fields(saved, asked).items():
        if name not in _FREE_WHEN_RESUMED:
            option = "--" + name.partition(".")[2].replace("_", "-")
            raise ConfigError(f"{option} cannot change when a run is resumed: leave it out (it is {old}) or start anew")
    return asked


def _options(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option and the type of its field; the sections of a configuration are looked into."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _options(hint)
        else:
            yield "--" + name.replace("_", "-"), hint
            if hint is bool:
                yield "--no-" + name.replace("_", "-"), hint


def _check(arguments: list[str], hints: dict[str, Any], command: str) -> None:
    """Raise what is wrong with the first wrong argument, in one line."""
    position = 0
    while position < len(arguments):
        typed, has_value, value = arguments[position].partition("=")
        position += 1
        option = typed.replace("_", "-")
        if not option.startswith("--"):
            raise ConfigError(f"{typed!r} is not an option; options begin with -- (see quintic {command} --help)")
        if option not in hints:
            nearest = difflib.get_close_matches(option, hints, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"quintic {command} --help lists the options"
            raise ConfigError(f"unknown option {typed}: {hint}")
        values = [value] if has_value else []
        while not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            values.append(arguments[position])
            position += 1
        _check_values(option, values, hints[option])


def _check_values(option: str, values: list[str], hint: Any) -> None:
    if typing.get_origin(hint) is tuple:
        return  # any number of texts
    if hint is bool:
        if values:
            raise ConfigError(f"{option} takes no value, but {values[0]!r} follows it")
        return
    expected = _expected(hint)
    if not values:
        raise ConfigError(f"{option} needs a value: {expected}")
    if len(values) > 1:
        raise ConfigError(f"{option} takes one value, but {values[1]!r} follows it; quote a value that has spaces")
    if not _reads(values[0], hint):
        raise ConfigError(f"{option} {values[0]}: give {expected}")


def _reads(text: str, hint: Any) -> bool:
    """Return whether a text on the command line can be read as a type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_reads(text, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return text in typing.get_args(hint)
    if hint is types.NoneType:
        return text == "None"
    if hint is bool:
        return text in ("True", "False")
    if hint in (int, float):
        try:
            hint(text)
        except ValueError:
            return False
    return True


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_expected(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path", types.NoneType: "None"}
    return names.get(hint, "a text")


def _taken(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value of an option (`--x value` or `--x=value`) and the arguments without it."""
    rest: list[str] = []
    value: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, text = argument.partition("=")
        if name.replace("_", "-") != option:
            rest.append(argument)
        elif has_value:
            value = text
        else:
            value = next(remaining, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{option} needs a value")
    return value, rest


def _unboxed(box: str) -> str:
    """Return a boxed message of many lines in one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", " ", box)
    return " ".join(plain.split()) or "the options cannot be read"
