"""The speedrun's presets: a track, a model and where their text comes from, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from quintic.errors import ConfigError
from quintic.model.speedrun_sizes import SpeedrunConfig
from quintic.speedrun.stages import SPEEDRUN, TINY, Track

__all__ = ["BYTES_BOS", "FP8_FEATURES", "PRESETS", "Preset", "preset", "switches", "without"]

BYTES_BOS = 256
"""The token that begins a document where every other token is a byte."""

FP8_FEATURES = ("fp8-head", "fp8-mlp")
"""Features that take a device which multiplies in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that a run has by default."""

    track: Track
    model: SpeedrunConfig
    data: str
    """Source of the shards, see `quintic.speedrun.shards.open_data`."""
    num_shards: int
    """Training shards to take at most."""


PRESETS: Mapping[str, Preset] = {
    "speedrun": Preset(
        track=SPEEDRUN, model=SpeedrunConfig(fp8_head=True, fp8_mlp=True), data="hf:kjj0/fineweb10B-gpt2", num_shards=9
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
        ),
        data="python",
        num_shards=1,
    ),
}


def preset(name: str) -> Preset:
    """Return a preset.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: unknown; choose {' or '.join(PRESETS)}")
    return PRESETS[name]


def switches() -> tuple[str, ...]:
    """Return the features of the model that can be left out, as options write them."""
    model = PRESETS["speedrun"].model
    names = [field.name for field in fields(model) if getattr(model, field.name) is True]
    return tuple(name.replace("_", "-") for name in (*names, "gate_channels"))


def without(model: SpeedrunConfig, names: Sequence[str]) -> SpeedrunConfig:
    """Return a model without some features: switches are off, numbers are 0.

    Raises:
        ConfigError: there is no feature of a name.
    """
    for name in names:
        if name not in switches():
            raise ConfigError(f"--without {name}: no feature of the model; choose among {', '.join(switches())}")
    changes = {name.replace("-", "_"): False if name != "gate-channels" else 0 for name in names}
    return replace(model, **changes)  # type: ignore[arg-type]  # mypy takes the values for those of one field
