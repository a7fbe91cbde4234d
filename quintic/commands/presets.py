"""Named defaults for the options of training, and checks of options that have no effect.

A preset has all options for a kind of machine; a recipe replaces the constants of the optimizer and its schedule.
`--init-from` takes the model's sizes and the tokenizer from trained weights.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quintic.durable import json_object
from quintic.errors import ConfigError
from quintic.limits import option_of
from quintic.model.sizes import VARIANTS
from quintic.report.history import METRICS_FILE
from quintic.speedrun import presets as speedrun
from quintic.train.config import OF_ADAMW, OF_MUON, Config, DataConfig, ModelConfig, marked
from quintic.train.saved_config import changed_options, load_config, values_of, with_options

__all__ = ["PRESETS", "check_initial", "preset", "suitable_preset", "unused_options", "with_initial", "with_recipe"]

# Files of GPU drivers: NVIDIA, NVIDIA Jetson, AMD, Windows Subsystem for Linux, and NVIDIA on Windows.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kfd", "/dev/dxg", r"C:\Windows\System32\nvcuda.dll")


# Preset -> the options in which it differs from the defaults of the dataclasses, which are those for a CPU.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {},
    # For a few megabytes of text, such as that of a Python installation: about three passes in 500 steps. With more
    # passes or a larger model, it is only memorised. Rates and decay were tuned at these sizes. Not compiled, because
    # compiling takes longer than the steps do.
    "gpu-small": {
        "depth": 8, "head_dim": 128, "seq_len": 2048,
        "adamw_lr": 0.003, "embedding_lr": 0.2, "head_lr": 0.002, "adamw_head_lr": 0.008, "weight_decay": 1.2,
        "steps": 500, "batch_tokens": 16_384, "rows": 8, "compile": False,
    },
    # For text of your own. Context and the AdamW learning rates follow nanochat's depth-12 recipe; batch and rates
    # scale with the model.
    "gpu": {
        "vocab_size": 32_768, "val_frac": 0.01,
        "depth": 12, "head_dim": 128, "seq_len": 2048,
        "scale_rates": True, "muon_lr": 0.02, "adamw_lr": 0.002, "embedding_lr": 0.5, "head_lr": 0.007,
        "adamw_head_lr": 0.007, "scalar_lr": 0.1, "weight_decay": 0.2,
        "momentum": 0.95, "momentum_warmup_steps": 300,
        "steps": None, "batch_tokens": None, "rows": 32, "warmup_frac": 0.0,
        "eval_every": 250, "eval_tokens": 2**21, "save_every": 1000,
    },
}  # fmt: skip


def preset(name: str) -> Config:
    """Return the defaults of a named preset, or raise a ConfigError."""
    if name not in PRESETS:
        races = ", ".join(speedrun.PRESETS)
        *first, last = PRESETS
        raise ConfigError(f"--preset {name}: unknown; choose {', '.join(first)} or {last} (for train also {races})")
    return with_options(Config(), **PRESETS[name])


def suitable_preset(device: str | None, data: str | None, *, guess: bool) -> str:
    """Return the name of the preset that suits a machine and a text, by `--device` and `--data` where they are given.

    With `guess`, look for the driver of a GPU and do not import PyTorch, which takes seconds. For `--help`, where a
    mistake only shows the defaults of another preset.
    """
    if device == "cpu":
        return "cpu"
    if guess and "torch" not in sys.modules:
        has_gpu = any(map(os.path.exists, _GPU_DRIVERS))
    else:
        import torch

        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        return "cpu"
    # The text of the Python installation is too short for the preset "gpu".
    return "gpu-small" if data in (None, DataConfig.data) else "gpu"


# At width 768, batches of 2^19 tokens and depth 12. Constants that are not options are in `train/recipe.py`.
_EARLY_NANOCHAT: Mapping[str, Any] = {
    "scale_rates": True, "muon_lr": 0.02, "embedding_lr": 0.3, "head_lr": 0.004, "scalar_lr": 0.5,
    "momentum": 0.95, "momentum_start": 0.85, "momentum_warmup_steps": 300, "momentum_end": None,
    "normalize": "neuron", "weight_decay": 0.2, "decay_shape": "linear", "beta1": 0.8, "beta2": 0.95,
    "tokens_per_param": 10.5, "warmup_frac": 0.0, "warmup_steps": None, "warmdown_frac": 0.5, "final_lr_frac": 0.0,
    "short_window": 0.25,
}  # fmt: skip
_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "seed": _EARLY_NANOCHAT,
    "nanochat": {
        **_EARLY_NANOCHAT,
        "variant": "nanochat", "head_lr": 0.008, "update_rule": "nanochat", "normalize": None,
        "momentum": 0.97, "momentum_warmup_steps": 400, "momentum_end": 0.90,
        "weight_decay": 0.28, "decay_shape": "cosine",
        "tokens_per_param": 12.0, "warmup_steps": 40, "warmdown_frac": 0.65, "final_lr_frac": 0.05,
    },
}  # fmt: skip


def with_recipe(config: Config, name: str) -> Config:
    """Return the configuration with a recipe's constants; a configuration that has this recipe is not changed.

    Sizes, batch and number of steps stay, because they depend on the machine.

    Raises:
        ConfigError: the recipe is "quintic", but the configuration has another one.
    """
    if name == config.optim.recipe:
        return config
    if name == "quintic":
        raise ConfigError(f"--recipe quintic: --config has the recipe {config.optim.recipe}; leave one of the two out")
    return with_options(config, recipe=name, **_RECIPES[name])


_RACE_ONLY = "its weights fit no other model; give a run of another --preset, or the export of one"


def with_initial(config: Config, name: str, runs_dir: Path) -> Config:
    """Return the configuration of a run that starts from the weights of a run or exported model, `--init-from NAME`.

    The model has their sizes, and the text their tokenizer.

    Raises:
        ConfigError: there is no such run or model, or its model cannot be trained further.
    """
    # A run's name comes before a path: `runs/first` may exist in the working folder, too.
    folders = (runs_dir / name, Path(name).expanduser())
    folder = next((folder.absolute() for folder in folders if (folder / "config.json").is_file()), None)
    if folder is None and any((folder / METRICS_FILE).is_file() for folder in folders):
        raise ConfigError(f"--init-from {name}: is a speedrun, and {_RACE_ONLY}")
    if folder is None:
        raise ConfigError(
            f"--init-from {name}: is neither a run in {runs_dir} nor the folder of a run or of an exported model; "
            "check the name, and --runs-dir"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"--init-from {folder}: has no tokenizer.json; export the run, and give the exported folder")
    values = json_object(folder / "config.json")
    kind = values.get("model_type")
    if kind not in (None, "quintic"):
        why = _RACE_ONLY if kind == "quintic_speedrun" else "only runs of quintic train and their exports can be used"
        raise ConfigError(f"--init-from {folder}: is a model of the kind {kind!r}, but {why}")
    model = load_config(folder / "config.json").model if kind is None else _exported_sizes(values, folder)
    data = replace(config.data, tokenizer=str(folder / "tokenizer.json"))
    return replace(config, model=model, data=data, run=replace(config.run, init_from=str(folder)))


def check_initial(config: Config, given: Config) -> None:
    """Raise a ConfigError if an option has changed the sizes of the weights that a run starts from, as `config` has."""
    shapes = vars(config.model).keys() - {"seq_len", "window_pattern", "short_window"}
    for name, (old, new) in changed_options(config, given).items():
        if name in shapes:
            needs = f"the weights of --init-from {config.run.init_from} need {option_of(name)} {old}"
            raise ConfigError(f"{option_of(name)} {new}: {needs}; leave it out")


def _exported_sizes(values: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Return the model options that give the sizes in an exported model's config.json."""
    if values.get("lookup_layers"):
        raise ConfigError(
            f"--init-from {folder}: lookup layers cannot be trained further from an export; give the run instead"
        )
    try:
        depth, seq_len, windows = values["num_hidden_layers"], values["max_position_embeddings"], values["windows"]
        heads = values["hidden_size"] // values["head_dim"]
        gain = values["value_gate_gain"]
        return ModelConfig(
            depth=depth,
            # The smallest ratio for which aspect_ratio x depth is rounded up to this width.
            aspect_ratio=(heads - 1) * values["head_dim"] // depth + 1,
            head_dim=values["head_dim"],
            kv_ratio=heads // values["num_key_value_heads"],
            seq_len=seq_len,
            window_pattern="".join("L" if window == seq_len else "S" for window in windows),
            short_window=min(windows) / seq_len,
            variant=next(name for name, variant in VARIANTS.items() if variant.value_gate_gain == gain),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        raise ConfigError(f"--init-from {folder}: its config.json is not from an export ({error!r})") from None


# (Options, the option that they need to have an effect, whether it is there.) Giving them without it is an error.
_NEEDS: Sequence[tuple[tuple[str, ...], str, Callable[[Config], bool]]] = (
    (("core_every", "core_items"), "--core FOLDER", lambda config: config.run.core is not None),
    (("l3_embeddings", "l3_d_up", "l3_k_max", "l3_tied"), "--l3-layers", lambda c: c.model.l3_layers is not None),
    (("fp8_recipe",), "--fp8", lambda config: config.run.fp8),
    (("shard_ranks",), "--parallel hsdp", lambda config: config.run.parallel == "hsdp"),
)
# Option -> another option that overrides it. Giving both only prints a note, so that one command line can be used with
# either choice.
_OVERRIDDEN = {
    "vocab_size": "tokenizer", "val_frac": "val_data", "warmup_frac": "warmup_steps", "normalize": "update_rule",
}  # fmt: skip


def unused_options(default: Config, config: Config, *, both_optimizers: bool = False) -> list[str]:
    """Return a line for each option that differs from its default but that another one overrides.

    With `both_optimizers`, runs with either are trained, as by `quintic compare`.

    Raises:
        ConfigError: an option was given without the one that it needs.
    """
    given = changed_options(default, config)
    if both_optimizers and "optimizer" in given:
        raise ConfigError("--optimizer: a comparison trains with both optimizers; leave it out")
    for names, needed, is_there in _NEEDS:
        for option in (option_of(name) for name in names if name in given and not is_there(config)):
            raise ConfigError(f"{option} has no effect without {needed}: add {needed}, or leave {option} out")
    overridden = {name: option_of(other) for name, other in _OVERRIDDEN.items() if values_of(config)[other] is not None}
    if not both_optimizers:
        unused = marked(OF_ADAMW if config.optim.optimizer == "muon" else OF_MUON)
        overridden |= dict.fromkeys(unused, f"--optimizer {config.optim.optimizer}")
    return [f"{option_of(name)} has no effect with {other}" for name, other in overridden.items() if name in given]
