"""`quintic export`: write a trained model as a folder for other libraries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintic.commands.inputs import trained_model
from quintic.commands.parsing import parse
from quintic.eval.export import export_hf
from quintic.train.runs import find_run

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained model as a folder for other libraries."""

    run: str | None = None
    """Name of the run, which may also come first without `--run`; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    to: Literal["hf"] = "hf"
    """Format: 'hf' is a folder that transformers loads with trust_remote_code=True."""
    out: Path | None = None
    """Folder to write; by default `hf` in the folder of the run."""


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--run", *arguments]
    options = parse(ExportOptions, arguments, "export", "Write a trained model as a folder for other libraries.")
    model, dataset, _ = trained_model(options.runs_dir, options.run, "cpu")
    out = options.out or find_run(options.runs_dir, options.run) / options.to
    print(export_hf(model, dataset.tokenizer, out))
    return 0
