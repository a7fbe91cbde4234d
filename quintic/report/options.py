"""The options of `quintic report`."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ReportOptions"]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write report.html of a run again, or a page that compares several (--runs)."""

    run: str | None = None
    """Name of the run; by default the one started last."""
    runs: tuple[str, ...] = ()
    """Names of runs, two at least, to compare on one page; the first is what the others are measured against. Runs that
    differ in their seeds only go together: LABEL=RUN,RUN,... stands for their median and range."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    out: Path | None = None
    """The page; by default report.html in the folder of the run, or comparison.html in the folder of all runs."""
