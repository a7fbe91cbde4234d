"""The options of `quintic train --preset speedrun`."""

from dataclasses import dataclass
from pathlib import Path

from quintic.train.config import BaseRunConfig, check_at_least

__all__ = ["SpeedrunOptions"]


@dataclass(frozen=True, kw_only=True)
class SpeedrunOptions(BaseRunConfig):
    """Options of a speedrun."""

    data: str | None = None
    """Folder with *train*.bin and *val*.bin token shards, hf:owner/name with the race's, or 'python': the text of your
    Python installation as bytes (for speedrun-tiny). By default the preset's."""
    data_dir: Path = Path("data")
    """Folder for downloads."""
    shards: int | None = None
    """Training shards to take at most; by default the preset's number."""
    tokenizer: str | None = "gpt2"
    """Vocabulary of the shards, for prefixes and bits per byte: a tokenizer.json, a folder with GPT-2's two files, or
    'gpt2', which is downloaded. 'None' for neither."""
    steps: int | None = None
    """Optimizer steps; every stage shrinks or grows alike. By default the preset's."""
    without: tuple[str, ...] = ()
    """Features of the model to leave out, such as 'smear skip'."""
    warm_up: bool = True
    """Compile the code of every stage before the clock starts."""
    pass_tokens: int | None = None
    """Tokens up to which chunks of 16,384 to 49,152 go through the model together: fewer take less memory. By default
    the preset's."""
    eval_every: int | None = None
    """Steps between validations; by default the preset's."""
    val_tokens: int | None = None
    """Validation tokens; by default the preset's."""
    capture: bool = True
    """Replay passes and steps of the optimizer as CUDA graphs, on a GPU."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        super().__post_init__()
        check_at_least(
            1,
            shards=self.shards,
            pass_tokens=self.pass_tokens,
            eval_every=self.eval_every,
            val_tokens=self.val_tokens,
        )
