"""The speedrun's presets by name, and the options of `quintic train --preset speedrun` that change them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from quintic.errors import ConfigError
from quintic.limits import Count, Whole, at_most
from quintic.model.speedrun_sizes import SpeedrunConfig
from quintic.speedrun.stages import SPEEDRUN, TINY, Track
from quintic.train.config import BaseRunConfig

__all__ = ["BYTES_BOS", "FP8_FEATURES", "PRESETS", "Preset", "SpeedrunOptions", "preset", "switches", "without"]

BYTES_BOS = 256  # the token that starts a document if all other tokens are bytes
FP8_FEATURES = ("fp8-head", "fp8-mlp", "fp8-mlp-backward")  # features that need a device with 8-bit products


@dataclass(frozen=True, kw_only=True)
class SpeedrunOptions(BaseRunConfig):
    """Options of a speedrun; the defaults are the race's."""

    data: str = "hf:kjj0/fineweb10B-gpt2"
    """Folder with *train*.bin and *val*.bin token shards, hf:owner/name with the race's, or 'python': the text of your
    Python installation as bytes (for speedrun-tiny)."""
    data_dir: Path = Path("data")
    """Folder for downloads."""
    shards: Count = 9
    """Training shards to take at most."""
    tokenizer: str | None = "gpt2"
    """Vocabulary of the shards, for prefixes and bits per byte: a tokenizer.json, a folder with GPT-2's two files, or
    'gpt2', which is downloaded. 'None' for neither, and for speedrun-tiny, whose tokens are bytes."""
    steps: Annotated[int, at_most(10**6)] = SPEEDRUN.steps
    """Optimizer steps; all stages are scaled in proportion."""
    without: tuple[str, ...] = ()
    """Features of the model to leave out, such as 'smear skip'."""
    warm_up: bool = True
    """Compile the code of every stage before the clock starts."""
    pass_tokens: Count = SPEEDRUN.pass_tokens
    """Most tokens of one forward and backward pass, in chunks of 16,384 to 49,152: fewer take less memory."""
    eval_every: Count = SPEEDRUN.eval_every
    """Steps between validations."""
    val_tokens: Count = SPEEDRUN.validation_tokens
    """Validation tokens."""
    untie_at: Whole | None = None
    """Step at which head and embedding are untied, --steps for never; by default at the start of the third stage."""
    save_every: Whole = 0
    """Steps between saves of the model; all saves are kept (0: only at the end)."""
    capture: bool = True
    """Replay passes as CUDA graphs, on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The defaults of a run: schedule, model and options."""

    track: Track
    model: SpeedrunConfig
    options: SpeedrunOptions


PRESETS: Mapping[str, Preset] = {
    "speedrun": Preset(
        track=SPEEDRUN,
        model=SpeedrunConfig(fp8_head=True, fp8_mlp=True, fp8_mlp_backward=True),
        options=SpeedrunOptions(),
    ),
    "speedrun-tiny": Preset(
        track=TINY,
        model=SpeedrunConfig(
            vocab_size=264,
            num_layers=6,
            width=32,
            num_heads=2,
            head_dim=16,
            bos_id=BYTES_BOS,
            bigram_rows=1024,
            bigram_sign_rows=64,
            gate_channels=8,
            prefix_tokens=False,  # tokens of one byte have no prefixes
        ),
        options=SpeedrunOptions(
            data="python",
            shards=1,
            tokenizer=None,
            steps=TINY.steps,
            pass_tokens=TINY.pass_tokens,
            eval_every=TINY.eval_every,
            val_tokens=TINY.validation_tokens,
        ),
    ),
}


def preset(name: str) -> Preset:
    """Return the preset of the given name.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: unknown; choose {' or '.join(PRESETS)}")
    return PRESETS[name]


def switches() -> tuple[str, ...]:
    """Return the features of the model that can be left out, as written in options."""
    names = [field.name for field in fields(SpeedrunConfig) if field.type is bool]
    return tuple(name.replace("_", "-") for name in (*names, "gate_channels"))


def without(model: SpeedrunConfig, names: Sequence[str]) -> SpeedrunConfig:
    """Return the model's configuration without some features: their switches off, their numbers 0.

    Raises:
        ConfigError: a name is not a feature.
    """
    changes: dict[str, Any] = {}
    for name in names:
        if name not in switches():
            raise ConfigError(f"--without {name}: not a feature of the model; choose from {', '.join(switches())}")
        changes[name.replace("-", "_")] = 0 if name == "gate-channels" else False
    return replace(model, **changes)
