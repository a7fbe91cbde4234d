"""`quintic report`: write the page of a run again."""

from dataclasses import dataclass
from pathlib import Path

from quintic.commands.parsing import parse
from quintic.report.report import write_report
from quintic.train.runs import find_run

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write report.html of a run again."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(ReportOptions, arguments, "report", "Write report.html of a run again.")
    print(write_report(find_run(options.runs_dir, options.run)))
    return 0
