"""The options of commands that train: the fields of `quintic.train.config.Config`, and what they start from."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from quintic.commands.parsing import parse, taken
from quintic.commands.presets import preset, with_recipe
from quintic.errors import ConfigError
from quintic.train.config import Config
from quintic.train.runs import CONFIG_FILE, find_run
from quintic.train.saved_config import changed_fields, load_config

__all__ = ["Start", "training_options"]

# How a run is watched and stored may change when it is resumed; what it computes may not.
_FREE_WHEN_RESUMED = frozenset(
    {
        "data.data_dir", "data.verify", "run.run", "run.runs_dir", "run.threads", "run.parallel", "run.shard_ranks",
        "run.eval_every", "run.core", "run.core_every", "run.core_items", "run.sample_every", "run.sample_tokens",
        "run.prompts", "run.save_every", "run.keep",
        "run.rms_every", "run.tensorboard", "run.wandb",
    }
)  # fmt: skip


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
    """Take them from what suits a kind of machine, 'cpu' or 'gpu'; by default the one of this machine."""


@dataclass(frozen=True, kw_only=True)
class StartOptions(FileOptions):
    """Source of the default options, or the run to continue."""

    resume: bool = False
    """Continue the run named by --run, or the one started last, with its own options."""
    resume_step: int | None = None
    """Continue it from this step, of which it must have kept a checkpoint; by default from the newest good one."""


# What `--help` lists besides the configuration; these options are read before the others.
@dataclass(frozen=True, kw_only=True)
class _TrainOptions(Config):
    start: StartOptions = dataclasses.field(default_factory=StartOptions)


@dataclass(frozen=True, kw_only=True)
class _OtherOptions(Config):
    start: FileOptions = dataclasses.field(default_factory=FileOptions)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Configuration of a training command, and the run that it continues, if any."""

    config: Config
    resumed: Path | None
    """Folder of the run to continue; None for a new one."""
    resume_step: int | None = None
    """Step to continue from; None for the newest checkpoint."""
    preset: str | None = None
    """Name of the preset that the options started from, if they did."""


def training_options(arguments: list[str], command: str) -> Start:
    """Read the options of a training command.

    The defaults come from `--config`, with `--resume` from the run that is continued, else from `--preset`, by default
    that of the device; `--recipe` changes some of them.

    Raises:
        ConfigError: an option cannot be read, does not fit the others, or cannot change when a run is resumed.
    """
    import torch

    resume, rest = "--resume" in arguments, [argument for argument in arguments if argument != "--resume"]
    step, rest = taken(rest, "--resume-step")
    resume = resume or step is not None
    asks_help = any(argument in ("-h", "--help") for argument in rest)
    path, rest = taken(rest, "--config")
    name, rest = taken(rest, "--preset")
    if path is not None and name is not None:
        raise ConfigError(f"--preset {name}: the options come from --config; give one of the two")
    if resume and not asks_help:
        if path is not None:
            raise ConfigError("--config: a resumed run keeps its own configuration; leave it out")
        if name is not None:
            raise ConfigError("--preset: a resumed run keeps its own configuration; leave it out")
        name, _ = taken(rest, "--run")
        runs_dir, _ = taken(rest, "--runs-dir")
        run_dir = find_run(Path(Config().run.runs_dir if runs_dir is None else runs_dir), name)
        if step is not None and not step.isdecimal():
            raise ConfigError(f"--resume-step {step}: needs a whole number of steps")
        return Start(
            config=_resumed(load_config(run_dir / CONFIG_FILE), rest, command),
            resumed=run_dir,
            resume_step=None if step is None else int(step),
        )
    if path is not None:
        default = load_config(Path(path))
    else:
        device, _ = taken(rest, "--device")
        has_gpu = torch.cuda.is_available() and device != "cpu"
        name = name if name is not None else "gpu" if has_gpu else "cpu"
        default = preset(name)
    recipe, _ = taken(rest, "--recipe")
    if recipe is not None:
        default = with_recipe(default, recipe)
    kind: type[Config] = Config
    if asks_help:
        kind = _TrainOptions if command == "train" else _OtherOptions
    sections = {section.name: getattr(default, section.name) for section in dataclasses.fields(Config)}
    description = (
        f"{_DESCRIPTIONS[command]}\n\nThe defaults suit the machine: a small model on a CPU, depth 12 on a GPU."
    )
    config = parse(kind, rest, command, description, default=kind(**sections))
    return Start(config=_absolute(config), resumed=None, preset=name)


def _absolute(config: Config) -> Config:
    """Return the configuration with paths of text that are good in any working folder."""
    data = config.data
    source, tokenizer = data.data, data.tokenizer
    if source != "python" and not source.startswith("hf:") and Path(source).expanduser().exists():
        source = os.path.abspath(Path(source).expanduser())
    if tokenizer is not None and tokenizer != "gpt2" and Path(tokenizer).exists():
        tokenizer = os.path.abspath(tokenizer)
    data_dir = Path(os.path.abspath(data.data_dir))
    data = dataclasses.replace(data, data=source, tokenizer=tokenizer, data_dir=data_dir)
    return dataclasses.replace(config, data=data)


def _resumed(saved: Config, arguments: list[str], command: str) -> Config:
    saved, asked = (_absolute(config) for config in (saved, parse(Config, arguments, command, "", default=saved)))
    # Where a run that goes back to checkpoints goes back to depends on when they were due.
    free = _FREE_WHEN_RESUMED - ({"run.save_every"} if saved.optim.on_spike == "rollback" else set())
    for name, (old, _) in changed_fields(saved, asked).items():
        if name not in free:
            option = "--" + name.partition(".")[2].replace("_", "-")
            raise ConfigError(f"{option} cannot change when a run is resumed: leave it out (it is {old}) or start anew")
    return asked
