"""The options of all commands.

Commands that train have the fields of `quintic.train.config.Config` as options, and options that choose the defaults:
`--preset`, `--config`, `--resume`, `--recipe` and `--init-from`. Other commands have a dataclass here.

PyTorch is imported only if the defaults depend on whether there is a GPU, so that `--help` and mistakes are answered
quickly.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintic.commands.parsing import options_of, parse, pop_option, validate_args
from quintic.commands.presets import check_initial, preset, suitable_preset, unused_options, with_initial, with_recipe
from quintic.errors import ConfigError
from quintic.report.options import ReportOptions
from quintic.simulate.options import RatesOptions, SimulationOptions, size_in_bytes
from quintic.speedrun.presets import BYTES_BOS, SpeedrunOptions, switches
from quintic.speedrun.presets import preset as speedrun_preset
from quintic.train.config import Config, DataConfig, check_at_least, check_samples
from quintic.train.runs import CONFIG_FILE, find_comparison, find_run
from quintic.train.saved_config import check_resumed, load_config

__all__ = [
    "ComparisonOptions",
    "EvalOptions",
    "ExportOptions",
    "ReportOptions",
    "SampleOptions",
    "Start",
    "answer_early",
    "eval_options",
    "export_options",
    "prepare_options",
    "rates_options",
    "report_options",
    "sample_options",
    "simulation_options",
    "speedrun_options",
    "training_options",
]

# Seeds of one comparison. Each trains a pair of runs.
_MOST_SEEDS = 1000

_DESCRIPTIONS = {
    "train": "Train a GPT: prepare data if needed, train, evaluate, sample, write a report.",
    "compare": "Train the same GPT with AdamW and with Muon and compare their curves.",
    "plan": "Show what a run would be, without training: sizes, length, rates, memory, and what the optimizer does to "
    "each kind of weight. For another model, on any number of GPUs: quintic plan --model NAME --help.",
}


@dataclass(frozen=True, kw_only=True)
class FileOptions:
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
    resume_step: int | None = None
    """Continue it from the checkpoint of this step, if it was kept; by default from the newest undamaged one."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(FileOptions):
    """Source of the default options, how many runs, or the comparison to continue."""

    resume: bool = False
    """Continue the comparison named by --run, or the one started last: its finished runs stay as they are."""
    seeds: int = 1
    """Number of seeds to train with, counting up from --seed; the report compares medians over them."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(FileOptions):
    """Source of the default options, and the memory to plan for."""

    memory: str | None = None
    """Memory of the device, such as 16GiB: also names the cheapest settings that fit into it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The result of reading a training command's options."""

    config: Config
    resumed: Path | None
    """Folder of the run to continue, or file of the comparison; None for a new one."""
    resume_step: int | None = None
    """Step to continue from; None for the newest checkpoint."""
    seeds: int = 1
    """Number of seeds of a comparison."""
    preset: str | None = None
    """Name of the preset with the defaults; None if they came from a file or a run."""
    notes: tuple[str, ...] = ()
    """Lines for the user about options that others override."""
    memory: int | None = None
    """Bytes of the device that `quintic plan` fits a run into."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Score a trained model in bits per byte, and on the tasks of CORE."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    step: int | None = None
    """Step of the checkpoint to take, which the run must have kept; by default the newest good one."""
    data: str | None = None
    """Other text to score on, all of it: one source as in `quintic train`; by default the run's validation text."""
    text_field: str = "text"
    """Key or column that holds the text of --data in JSON, CSV and Parquet."""
    tokens: int | None = None
    """Most tokens to score, but at least one batch; by default all tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; 'auto' takes a GPU if there is one."""
    threads: int | None = None
    """CPU threads; by default as many as the run was given."""
    core: Path | None = None
    """Folder with tasks of CORE to answer as well: JSONL files, or nanochat's eval_bundle."""
    core_items: int = 500
    """Most items per task."""
    verify: bool = False
    """Compare all prepared data with its checksums; by default only files that are new on this machine or changed."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        check_at_least(1, tokens=self.tokens, core_items=self.core_items, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained model as a folder for other libraries."""

    run: str | None = None
    """Name of the run, which may also come first without `--run`; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    step: int | None = None
    """Step of the checkpoint to take, which the run must have kept; by default the newest good one."""
    to: Literal["hf"] = "hf"
    """Format: 'hf' is a folder that transformers loads with trust_remote_code=True."""
    out: Path | None = None
    """Folder to write; by default `hf` in the folder of the run."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Let a trained model write."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    step: int | None = None
    """Step of the checkpoint to take, which the run must have kept; by default the newest good one."""
    prompts: tuple[str, ...] = ("",)
    """Beginnings to continue; the empty one starts a new document."""
    interactive: bool = False
    """Read beginnings from standard input instead, a line each, until it ends (Ctrl-D). Ctrl-C stops a text."""
    tokens: int = 200
    """Tokens to write per prompt."""
    temperature: float = 0.8
    """0 always takes the most likely token; higher values give more varied text."""
    top_k: int | None = 50
    """Draw only from the most likely tokens, this many; 'None' for no limit."""
    top_p: float | None = None
    """Draw only from the smallest set of most likely tokens with this total probability; 'None' for no limit."""
    seed: int = 0
    """Seed of the draws."""
    threads: int | None = None
    """CPU threads; by default as many as the run was given."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and prompts that are not UTF-8."""
        check_at_least(1, tokens=self.tokens, threads=self.threads)
        check_samples(self.prompts, tokens=self.tokens)
        if self.interactive and self.prompts != ("",):
            raise ConfigError("--prompts: --interactive reads beginnings from standard input; leave one of the two out")


def answer_early(command: str, arguments: list[str]) -> None:
    """Print a command's `--help`, or report mistakes in its options, before PyTorch is imported.

    Raises:
        ConfigError: an option is wrong, as the command itself would report it.
        SystemExit: after `--help`.
    """
    readers = {"prepare": prepare_options, "sample": sample_options, "eval": eval_options, "report": report_options}
    readers |= {"export": export_options, "rates": rates_options}
    if command in readers:
        readers[command](arguments)
    elif command == "train" and speedrun_options(arguments) is not None:
        return
    elif command != "plan" or simulation_options(arguments) is None:
        training_options(arguments, command)


def prepare_options(arguments: list[str]) -> DataConfig:
    """Read the options of `quintic prepare`."""
    return _absolute(parse(DataConfig, arguments, "prepare", "Turn text into tokens."))


def sample_options(arguments: list[str]) -> SampleOptions:
    """Read the options of `quintic sample`."""
    return parse(SampleOptions, arguments, "sample")


def eval_options(arguments: list[str]) -> EvalOptions:
    """Read the options of `quintic eval`."""
    return parse(EvalOptions, arguments, "eval")


def report_options(arguments: list[str]) -> ReportOptions:
    """Read the options of `quintic report`."""
    return parse(ReportOptions, arguments, "report")


def rates_options(arguments: list[str]) -> RatesOptions:
    """Read the options of `quintic rates`."""
    return parse(RatesOptions, arguments, "rates")


def export_options(arguments: list[str]) -> ExportOptions:
    """Read the options of `quintic export`; the name of the run may come first."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--run", *arguments]
    return parse(ExportOptions, arguments, "export")


def simulation_options(arguments: list[str]) -> SimulationOptions | None:
    """Read the options of `quintic plan --model`; None without `--model`, to plan a run of `quintic train`.

    Raises:
        ConfigError: options that belong to `--model` are given without it, or an option is wrong.
    """
    others = {name for kind in (Config, PlanOptions) for name, _ in options_of(kind)}
    own = {name for name, _ in options_of(SimulationOptions)} - others
    given = [name for argument in arguments if (name := argument.partition("=")[0]) in own]
    if given and "--model" not in given:
        raise ConfigError(f"{given[0]} needs --model NAME: a model to plan for, such as llama-3-70b")
    return parse(SimulationOptions, arguments, "plan --model NAME") if given else None


def speedrun_options(arguments: list[str]) -> tuple[str, SpeedrunOptions] | None:
    """Read the options of `quintic train` with a speedrun's preset: its name and its options; None for another preset.

    Raises:
        ConfigError: an option is wrong, or belongs to ordinary runs.
    """
    preset_name, rest = pop_option(arguments, "--preset")
    if preset_name is None or not preset_name.startswith("speedrun"):
        return None
    chosen = speedrun_preset(preset_name)
    others = {name for kind in (Config, StartOptions) for name, _ in options_of(kind)}
    others -= {name for name, _ in options_of(SpeedrunOptions)}
    for argument in rest:
        if (option := argument.partition("=")[0].replace("_", "-")) in others:
            raise ConfigError(
                f"{option} does not work with --preset {preset_name}, whose model and schedule are fixed; leave it "
                f"out (quintic train --preset {preset_name} --help lists its options)"
            )
    description = f"Run the speedrun. Features that can be left out (--without): {', '.join(switches())}."
    options = parse(SpeedrunOptions, rest, f"train --preset {preset_name}", description, default=chosen.options)
    if options.tokenizer is not None and chosen.model.bos_id == BYTES_BOS:
        raise ConfigError(
            f"--tokenizer does not work with --preset {preset_name}, whose tokens are bytes; leave it out"
        )
    return preset_name, options


def training_options(arguments: list[str], command: str) -> Start:
    """Read the options of a training command.

    The defaults come from the run that is continued (`--resume`), from a file (`--config`), or from a preset
    (`--preset`, by default the one that suits the device). `--recipe` and `--init-from` change some of them.

    Raises:
        ConfigError: an option is wrong, does not fit the others, or cannot change when a run is resumed.
    """
    # First the options that decide about the defaults, then the rest.
    resume, rest = "--resume" in arguments, [argument for argument in arguments if argument != "--resume"]
    step, rest = pop_option(rest, "--resume-step")
    resume = resume or step is not None
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    seeds, rest = pop_option(rest, "--seeds") if command == "compare" else (None, rest)
    memory, rest = pop_option(rest, "--memory") if command == "plan" and not asks_help else (None, rest)
    size = None if memory is None else size_in_bytes(memory)
    if seeds is not None and not (seeds.isdecimal() and 0 < int(seeds) <= _MOST_SEEDS):
        raise ConfigError(f"--seeds {seeds}: needs a whole number of seeds from 1 to {_MOST_SEEDS:,}")
    path, rest = pop_option(rest, "--config")
    name, rest = pop_option(rest, "--preset")
    if path is not None and name is not None:
        raise ConfigError(f"--preset {name}: the options come from --config; give one of the two")
    if not asks_help:
        validate_args(Config, rest, command)  # before choosing a preset, which may import PyTorch
    if resume and not asks_help:
        if path is not None or name is not None:
            option = "--preset" if path is None else "--config"
            raise ConfigError(f"{option}: a resumed run keeps its own configuration; leave {option} out")
        name, _ = pop_option(rest, "--run")
        given, _ = pop_option(rest, "--runs-dir")
        runs_dir = Path(Config().run.runs_dir if given is None else given)
        if command == "compare":
            for option, value in (("--resume-step", step), ("--seeds", seeds)):
                if value is not None:
                    raise ConfigError(f"{option}: a resumed comparison continues its own runs; leave {option} out")
            comparison = find_comparison(runs_dir, name)
            config = _resumed(comparison.path, comparison.config, rest, command)
            return Start(config=config, resumed=comparison.path, seeds=comparison.seeds)
        run_dir = find_run(runs_dir, name)
        if step is not None and not step.isdecimal():
            raise ConfigError(f"--resume-step {step}: needs a whole number of steps")
        return Start(
            config=_resumed(run_dir / CONFIG_FILE, load_config(run_dir / CONFIG_FILE), rest, command),
            resumed=run_dir,
            resume_step=None if step is None else int(step),
            memory=size,
        )
    if path is not None:
        default = load_config(Path(path))
    else:
        device, _ = pop_option(rest, "--device")
        data, _ = pop_option(rest, "--data")
        name = name if name is not None else suitable_preset(device, data, guess=asks_help)
        default = preset(name)
    recipe, _ = pop_option(rest, "--recipe")
    if recipe is not None:
        default = with_recipe(default, recipe)
    source, rest = pop_option(rest, "--init-from") if not asks_help else (None, rest)
    if source is not None:
        default = with_initial(default, source, Path(pop_option(rest, "--runs-dir")[0] or default.run.runs_dir))
    kind: type[Config] = Config  # with the options that were read above only for `--help`
    if asks_help:
        start = {"train": StartOptions, "compare": ComparisonOptions, "plan": PlanOptions}[command]
        section = ("start", start, dataclasses.field(default_factory=start))
        kind = dataclasses.make_dataclass("_Help", [section], bases=(Config,), frozen=True, kw_only=True)
    sections = {section.name: getattr(default, section.name) for section in dataclasses.fields(Config)}
    origin = f"of {path}" if path is not None else f"of --preset {name}"
    description = (
        f"{_DESCRIPTIONS[command]}\n\nThe defaults shown are those {origin}. Without --preset they suit machine "
        "and text: 'cpu' is a small model, 'gpu-small' one for a GPU and the text of your Python installation, 'gpu' "
        "one of depth 12 for --data."
    )
    config = parse(kind, rest, command, description, default=kind(**sections))
    if config.run.init_from is not None:
        check_initial(default, config)
    notes = unused_options(default, config, both_optimizers=command == "compare")
    config = dataclasses.replace(config, data=_absolute(config.data))
    return Start(config=config, resumed=None, preset=name, seeds=int(seeds or 1), notes=tuple(notes), memory=size)


def _absolute(data: DataConfig) -> DataConfig:
    """Return the options of text with absolute paths, so that a run can be resumed from any folder."""
    source, tokenizer = _absolute_source(data.data), data.tokenizer
    val_data = None if data.val_data is None else _absolute_source(data.val_data)
    if tokenizer is not None and tokenizer != "gpt2" and Path(tokenizer).exists():
        tokenizer = os.path.abspath(tokenizer)
    data_dir = Path(os.path.abspath(data.data_dir))
    return dataclasses.replace(data, data=source, val_data=val_data, tokenizer=tokenizer, data_dir=data_dir)


def _absolute_source(source: str) -> str:
    if source in ("python", "") or source.startswith("hf:"):
        return source
    if Path(source).expanduser().exists():
        return os.path.abspath(Path(source).expanduser())
    # A mixture, "source=weight source=weight". Sources that do not exist are reported when they are opened.
    words = [word.rpartition("=") for word in source.split()]
    if len(words) < 2 or not all(sign and name for name, sign, _ in words):
        return source
    return " ".join(f"{_absolute_source(name)}={weight}" for name, _, weight in words)


def _resumed(path: Path, saved: Config, arguments: list[str], command: str) -> Config:
    """Return the configuration saved in `path`, of a run or comparison to continue, with the options given now."""
    saved, asked = (
        dataclasses.replace(config, data=_absolute(config.data))
        for config in (saved, parse(Config, arguments, command, "", default=saved))
    )
    check_resumed(saved, asked, path, is_comparison=command == "compare")
    unused_options(saved, asked)
    return asked
