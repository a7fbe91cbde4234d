"""`quintic sample`: let a trained model write."""

from dataclasses import dataclass
from pathlib import Path

from quintic.commands.inputs import trained_model
from quintic.commands.parsing import parse
from quintic.errors import ConfigError
from quintic.eval.generate import sample_text
from quintic.train.config import check_prompts

__all__ = ["run"]


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
    """Draw only from this many likeliest tokens; 'None' for no limit."""
    top_p: float | None = None
    """Draw only from the smallest set of likeliest tokens with this total probability; 'None' for no limit."""
    seed: int = 0
    """Seed of the draws."""


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(SampleOptions, arguments, "sample", "Let a trained model write.")
    if options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: must be at least 1")
    check_prompts(options.prompts)
    model, dataset, _ = trained_model(options.runs_dir, options.run)
    try:
        samples = sample_text(
            model,
            dataset.tokenizer,
            options.prompts,
            max_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
    except ValueError as error:
        # The library speaks of its argument, the user of the option.
        raise ConfigError("--" + str(error).replace("_", "-").replace("=", " ", 1)) from None
    for sample in samples:
        print(f"{sample['prompt']}{sample['text']}\n")
    return 0
