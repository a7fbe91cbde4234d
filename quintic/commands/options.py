"""The options of all commands.

Commands that train have the fields of `quintic.train.config.Config` as options, and options that choose the defaults:
`--preset`, `--config`, `--resume`, `--recipe` and `--init-from`. Other commands have a dataclass here.

PyTorch is imported only if the defaults depend on whether there is a GPU, so that `--help` and mistakes are answered
quickly.
"""

import contextlib
import dataclasses
import itertools
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from quintic.commands.parsing import asks_help, options_of, parse, print_help, read_options
from quintic.commands.presets import check_initial, preset, suitable_preset, unused_options, with_initial, with_recipe
from quintic.errors import ConfigError
from quintic.limits import Count, Limited, Whole, at_least, at_most
from quintic.simulate.options import RatesOptions, SimulationOptions, size_in_bytes
from quintic.speedrun.presets import BYTES_BOS, SpeedrunOptions, switches
from quintic.speedrun.presets import preset as speedrun_preset
from quintic.train.config import Config, DataConfig, RunConfig, SampleTokens, check_prompts
from quintic.train.runs import CONFIG_FILE, find_comparison, find_run
from quintic.train.saved_config import check_resumed, load_config, values_of, with_options

__all__ = [
    "ComparisonOptions",
    "EvalOptions",
    "ExportOptions",
    "PlanOptions",
    "ReportOptions",
    "SampleOptions",
    "Start",
    "StartOptions",
    "TrainedOptions",
    "read_command",
    "speedrun_options",
    "training_options",
]


@dataclass(frozen=True, kw_only=True)
class FileOptions(Limited):
    """Source of the default options."""

    config: Path | None = None
    """Take the defaults of all other options from this file, the config.json of a run."""
    preset: str | None = None
    """Take them from what suits a machine and a text: 'cpu', 'gpu-small' (a few megabytes of text) or 'gpu'; by default
    'cpu' without a GPU, 'gpu' with a GPU and --data, else 'gpu-small'. 'speedrun' and 'speedrun-tiny' of quintic train
    are another model, with options of its own (--preset speedrun --help)."""


@dataclass(frozen=True, kw_only=True)
class StartOptions(FileOptions):
    """Source of the default options, or the run to continue."""

    resume: bool = False
    """Continue the run named by --run, or the one started last, with its own options; --steps makes it longer."""
    resume_step: Whole | None = None
    """Continue it from the checkpoint of this step, if it was kept; by default from the newest undamaged one."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(FileOptions):
    """Source of the default options, how many runs, or the comparison to continue."""

    resume: bool = False
    """Continue the comparison named by --run, or the one started last: its finished runs stay as they are."""
    seeds: Annotated[int, at_least(1), at_most(1000)] = 1  # each seed trains a pair of runs
    """Number of seeds to train with, counting up from --seed; the report compares medians over them."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(FileOptions):
    """Source of the default options, and the memory to plan for."""

    resume: bool = False
    """Plan the run named by --run, or the one started last, as it would be continued."""
    memory: str | None = None
    """Memory of the device, such as 16GiB: also names the cheapest settings that fit into it."""

    def __post_init__(self) -> None:
        """Reject a text that is no size."""
        super().__post_init__()
        if self.memory is not None:
            size_in_bytes(self.memory)


# Command that trains or plans it -> its options beside the configuration, and the beginning of its help.
_TRAINING: Mapping[str, tuple[Any, str]] = {
    "train": (StartOptions, "Train a GPT: prepare data if needed, train, evaluate, sample, write a report."),
    "compare": (ComparisonOptions, "Train the same GPT with AdamW and with Muon and compare their curves."),
    "plan": (
        PlanOptions,
        "Show what a run would be, without training: sizes, length, rates, memory, and what the optimizer does to each "
        "kind of weight. For another model, on any number of GPUs: quintic plan --model NAME --help.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The result of reading a training command's options."""

    config: Config
    resumed: Path | None = None
    """Folder of the run to continue, or file of the comparison; None for a new one."""
    seeds: int = 1
    """Number of seeds of a comparison."""
    preset: str | None = None
    """Name of the preset with the defaults; None if they came from a file or a run."""
    notes: tuple[str, ...] = ()
    """Lines for the user about options that others override."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The options on the command line, by the names of their fields."""
    command: str = ""
    """The command line that started it, for the log."""


@dataclass(frozen=True, kw_only=True)
class TrainedOptions(Limited):
    """The checkpoint of a trained model."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    step: int | None = None
    """Step of the checkpoint to take, which the run must have kept; by default the newest good one."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(TrainedOptions):
    """Score a trained model in bits per byte, and on the tasks of CORE."""

    data: str | None = None
    """Other text to score on, all of it: one source as in `quintic train`; by default the run's validation text."""
    text_field: str = "text"
    """Key or column that holds the text of --data in JSON, CSV and Parquet."""
    tokens: Count | None = None
    """Most tokens to score, but at least one batch; by default all tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; 'auto' takes a GPU if there is one."""
    threads: Count | None = None
    """CPU threads; by default as many as the run was given."""
    core: Path | None = None
    """Folder with tasks of CORE to answer as well: JSONL files, or nanochat's eval_bundle."""
    core_items: Count = 500
    """Most items per task."""
    verify: bool = False
    """Compare all prepared data with its checksums; by default only files that are new on this machine or changed."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainedOptions):
    """Write a trained model as a folder for other libraries."""

    run: str | None = None
    """Name of the run, which may also come first without `--run`; by default the one started last."""
    to: Literal["hf"] = "hf"
    """Format: 'hf' is a folder that transformers loads with trust_remote_code=True."""
    out: Path | None = None
    """Folder to write; by default `hf` in the folder of the run."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(TrainedOptions):
    """Let a trained model write."""

    prompts: tuple[str, ...] = ("",)
    """Beginnings to continue; the empty one starts a new document."""
    interactive: bool = False
    """Read beginnings from standard input instead, a line each, until it ends (Ctrl-D). Ctrl-C stops a text."""
    tokens: Annotated[SampleTokens, at_least(1)] = 200
    """Tokens to write per prompt."""
    temperature: float = 0.8
    """0 always takes the most likely token; higher values give more varied text."""
    top_k: int | None = 50
    """Draw only from the most likely tokens, this many; 'None' for no limit."""
    top_p: float | None = None
    """Draw only from the smallest set of most likely tokens with this total probability; 'None' for no limit."""
    seed: int = 0
    """Seed of the draws."""
    threads: Count | None = None
    """CPU threads; by default as many as the run was given."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and prompts that cannot be used."""
        super().__post_init__()
        check_prompts(self.prompts)
        if self.interactive and self.prompts != ("",):
            raise ConfigError("--prompts: --interactive reads beginnings from standard input; leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write report.html of a run again, or a page that compares several (--runs)."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs: tuple[str, ...] = ()
    """Names of runs, two at least, to compare on one page; the first is what the others are measured against. Runs that
    differ in their seeds only go together: LABEL=RUN,RUN,... stands for their median and range."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    out: Path | None = None
    """The page; by default report.html in the folder of the run, or comparison.html in the folder of all runs."""


_PLAIN_OPTIONS: Mapping[str, Any] = {
    "sample": SampleOptions,
    "eval": EvalOptions,
    "export": ExportOptions,
    "report": ReportOptions,
    "rates": RatesOptions,
}


def read_command(command: str, arguments: list[str]) -> Any:
    """Return a command's options, or print its `--help`.

    Raises:
        ConfigError: an option is wrong.
        SystemExit: after `--help`.
    """
    if command == "export" and arguments and not arguments[0].startswith("-"):  # the name of the run may come first
        arguments = ["--run", *arguments]
    if command in _PLAIN_OPTIONS:
        return parse(_PLAIN_OPTIONS[command], arguments, command)
    if command == "prepare":
        return _absolute(parse(DataConfig, arguments, "prepare", "Turn text into tokens."))
    if command == "plan" and any(argument.partition("=")[0] == "--model" for argument in arguments):
        return parse(SimulationOptions, arguments, "plan --model NAME")
    race = speedrun_options(arguments) if command == "train" else None
    return training_options(arguments, command) if race is None else race


def speedrun_options(arguments: list[str]) -> tuple[str, SpeedrunOptions] | None:
    """Read the options of `quintic train` with a speedrun's preset: its name and its options; None for another preset.

    Raises:
        ConfigError: an option is wrong, or belongs to ordinary runs.
    """
    # The preset decides which options there are, so it is looked for before the others are read. The last one counts.
    words = [word for argument in arguments for word in argument.split("=", 1)]
    name = dict(itertools.pairwise(words)).get("--preset", "")
    if not name.startswith("speedrun"):
        return None
    chosen = speedrun_preset(name)
    command = f"train --preset {name}"
    if asks_help(arguments):
        description = f"Run the speedrun. Features that can be left out (--without): {', '.join(switches())}."
        print_help(SpeedrunOptions, command, description, chosen.options)
    why = (
        f"does not work with --preset {name}, whose model and schedule are fixed; leave it out (quintic {command} "
        "--help lists its options)"
    )
    unavailable = dict.fromkeys(options_of(Config, StartOptions), why)
    given = read_options({"--preset": str} | options_of(SpeedrunOptions), arguments, command, unavailable)
    del given["preset"]
    options = dataclasses.replace(chosen.options, **given)
    if options.tokenizer is not None and chosen.model.bos_id == BYTES_BOS:
        raise ConfigError(f"--tokenizer does not work with --preset {name}, whose tokens are bytes; leave it out")
    return name, options


def training_options(arguments: list[str], command: str) -> Start:
    """Read the options of a training command.

    The defaults come from the run that is continued (`--resume`), from a file (`--config`), or from a preset
    (`--preset`, by default the one that suits the device). `--recipe` and `--init-from` change some of them.

    Raises:
        ConfigError: an option is wrong, does not fit the others, or cannot change when a run is resumed.
    """
    if asks_help(arguments):
        with contextlib.suppress(ConfigError):  # the help answers mistakes, too
            _print_training_help([word for word in arguments if word not in ("-h", "--help")], command)
        _print_training_help([], command)
    given, values, start = _given_options(arguments, command)
    if start.config is not None and start.preset is not None:
        raise ConfigError(f"--preset {start.preset}: the options come from --config; give one of the two")
    line = shlex.join(["quintic", command, *arguments])
    if start.resume or "resume_step" in given:
        for option in ("--config", "--preset"):
            if getattr(start, option[2:]) is not None:
                raise ConfigError(f"{option}: a resumed run keeps its own configuration; leave {option} out")
        return _continued(values, given, command, line)
    default, name = _defaults(values, start)
    source = values.pop("init_from", None)
    if source is not None:
        default = with_initial(default, source, values.get("runs_dir", default.run.runs_dir))
    config = with_options(default, **values)
    if config.run.init_from is not None:
        check_initial(default, config)
    notes = unused_options(default, config, both_optimizers=command == "compare")
    config, seeds = dataclasses.replace(config, data=_absolute(config.data)), given.get("seeds", 1)
    return Start(config=config, preset=name, seeds=seeds, notes=tuple(notes), given=given, command=line)


def _given_options(arguments: list[str], command: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return all given options, the configuration's among them, and the others as the command's dataclass."""
    kind, _ = _TRAINING[command]
    needs = "needs --model NAME: a model to plan for, such as llama-3-70b"
    unavailable = dict.fromkeys(options_of(SimulationOptions), needs) if command == "plan" else {}
    given = read_options(options_of(Config, kind), arguments, command, unavailable)
    values = {name: given[name] for name in values_of(Config()) if name in given}
    return given, values, kind(**{name: given[name] for name in given.keys() - values.keys()})


def _defaults(values: Mapping[str, Any], start: Any, *, guess: bool = False) -> tuple[Config, str | None]:
    """Return the defaults of a new run's options, and the name of their preset."""
    if start.config is not None:
        default, name = load_config(start.config), None
    else:
        name = start.preset or suitable_preset(values.get("device"), values.get("data"), guess=guess)
        default = preset(name)
    return with_recipe(default, values.get("recipe", default.optim.recipe)), name


def _continued(values: Mapping[str, Any], given: Mapping[str, Any], command: str, line: str) -> Start:
    """Return the run or comparison to continue, with the options given now; `values` belong to its configuration."""
    runs_dir, name, is_comparison = values.get("runs_dir", RunConfig.runs_dir), values.get("run"), command == "compare"
    if is_comparison:
        if "seeds" in given:
            raise ConfigError("--seeds: a resumed comparison continues its own runs; leave --seeds out")
        file, saved, seeds, line = find_comparison(runs_dir, name)
        resumed = file
    else:
        resumed = find_run(runs_dir, name)
        file, seeds = resumed / CONFIG_FILE, 1
        saved = load_config(file)
    asked = with_options(saved, **values)
    saved, config = (dataclasses.replace(each, data=_absolute(each.data)) for each in (saved, asked))
    check_resumed(saved, config, file, is_comparison=is_comparison)
    unused_options(saved, config)
    return Start(config=config, resumed=resumed, seeds=seeds, given=given, command=line)


def _print_training_help(words: list[str], command: str) -> NoReturn:
    """Print the help, with the defaults that these options give."""
    _, values, start = _given_options(words, command)
    default, name = _defaults(values, start, guess=True)
    kind, description = _TRAINING[command]
    origin = f"--preset {name}" if start.config is None else start.config
    description += (
        f"\n\nThe defaults shown are those of {origin}. Without --preset they suit machine and text: 'cpu' is a small "
        "model, 'gpu-small' one for a GPU and the text of your Python installation, 'gpu' one of depth 12 for --data."
    )
    # The options about the start are a section beside the configuration's.
    section = ("start", kind, field(default_factory=kind))
    shown = dataclasses.make_dataclass("_Help", [section], bases=(Config,), frozen=True, kw_only=True)
    print_help(shown, command, description, shown(**vars(default)))


def _absolute(data: DataConfig) -> DataConfig:
    """Return the options of text with absolute paths, so that a run can be resumed from any folder."""
    paths: dict[str, Any] = {name: _absolute_source(getattr(data, name)) for name in ("data", "val_data", "tokenizer")}
    return dataclasses.replace(data, **paths, data_dir=Path(os.path.abspath(data.data_dir)))


def _absolute_source(source: str | None) -> str | None:
    if source is None or source in ("python", "") or source.startswith("hf:"):
        return source
    if Path(source).expanduser().exists():
        return os.path.abspath(Path(source).expanduser())
    # A mixture, "source=weight source=weight". Sources that do not exist are reported when they are opened.
    words = [word.rpartition("=") for word in source.split()]
    if len(words) < 2 or not all(sign and name for name, sign, _ in words):
        return source
    return " ".join(f"{_absolute_source(name)}={weight}" for name, _, weight in words)
