"""The options of `quintic train --preset speedrun`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintic.errors import ConfigError

__all__ = ["SpeedrunOptions"]


@dataclass(frozen=True, kw_only=True)
class SpeedrunOptions:
    """What may differ from the race."""

    data: str | None = None
    """Folder with *train*.bin and *val*.bin token shards, hf:owner/name with the race's, or 'python': the text of your
    Python installation as bytes (for speedrun-tiny). By default the preset's."""
    data_dir: Path = Path("data")
    """Folder for downloads."""
    shards: int | None = None
    """Training shards to take at most; by default the preset's number."""
    tokenizer: str | None = "gpt2"
    """What tokens stand for, for prefixes and bits per byte: a tokenizer.json, a folder with GPT-2's two files, or
    'gpt2', which is downloaded. 'None' for neither."""
    steps: int | None = None
    """Optimizer steps; every stage shrinks or grows alike. By default the preset's."""
    without: tuple[str, ...] = ()
    """Features of the model to leave out, such as 'smear skip'."""
    fp8_head: bool = False
    """Multiply in 8 bits in the head in training."""
    warm_up: bool = True
    """Compile what every stage needs before the clock starts."""
    pass_tokens: int | None = None
    """Tokens up to which chunks of 16,384 to 49,152 go through the model together: fewer take less memory. By default
    the preset's."""
    eval_every: int | None = None
    """Steps between validations; by default the preset's."""
    val_tokens: int | None = None
    """Validation tokens; by default the preset's."""
    run: str | None = None
    """Name of the run's folder; by default date, time and preset. Behind torchrun the option is --name."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    seed: int = 1337
    """Seed of the weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; 'auto' takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrices, tables and activations; 'auto' is bfloat16 where the hardware has it, else float32."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"] = "auto"
    """Attention implementation; 'auto' takes the fastest the device has."""
    compile: bool | None = None
    """Compile the model with torch.compile; by default only on a GPU."""
    capture: bool = True
    """Replay passes and steps of the optimizer as CUDA graphs, on a GPU."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        for name in ("shards", "pass_tokens", "eval_every", "val_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
