"""`quintic eval`: score a trained model in bits per byte."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintic.commands.inputs import prepared, trained_model, verify
from quintic.commands.parsing import parse
from quintic.data.loader import validation_rows
from quintic.data.shards import SplitName
from quintic.errors import ConfigError
from quintic.eval.reference import reference_scores
from quintic.eval.score import score

__all__ = ["run"]


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


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(EvalOptions, arguments, "eval", "Score a trained model in bits per byte.")
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens {options.tokens}: must be at least 1")
    model, trained_on, config = trained_model(options.runs_dir, options.run, options.device)
    verify(trained_on, again=options.verify)  # its training text makes the bigram model
    dataset = trained_on
    splits: tuple[SplitName, ...] = ("val",)
    if options.data is not None:
        tokenizer = str(trained_on.path / "tokenizer.json")
        data = dataclasses.replace(config.data, data=options.data, tokenizer=tokenizer, verify=options.verify)
        dataset = prepared(data)
        splits = ("train", "val")
    batches = validation_rows(
        dataset, rows=config.schedule.rows, seq_len=config.model.seq_len, max_tokens=options.tokens, splits=splits
    )
    result = score(model, batches, dataset.tokenizer.token_bytes(), model.head.weight.device)
    reference = reference_scores(trained_on, batches)
    print(f"{result.bpb:.4f} bits per byte ({result.loss:.4f} nats per token) over {result.num_bytes:,} bytes of text")
    print(f"for comparison: xz -9 {reference['xz_bpb']:.4f}, byte-bigram model {reference['bigram_bpb']:.4f}")
    return 0
