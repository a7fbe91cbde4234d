"""`quintic report`: writes the page of a run again, or a page that compares several runs."""

from functools import partial

from quintic.commands.options import ReportOptions
from quintic.errors import ConfigError
from quintic.report.comparison import write_comparison
from quintic.report.report import write_report
from quintic.train.runs import find_run

__all__ = ["run"]


def run(options: ReportOptions) -> int:
    """Run the command; return its exit code."""
    find = partial(find_run, options.runs_dir, allow_speedrun=True)
    if not options.runs:
        print(write_report(find(options.run), options.out))
        return 0
    if options.run is not None:
        raise ConfigError(f"--run {options.run}: cannot be combined with --runs; list the run first in --runs instead")
    # Each word is LABEL=RUN,RUN,... or RUN,RUN,...: runs that differ only in their seeds.
    arms = {word.rpartition("=")[0] or word: word.rpartition("=")[2].split(",") for word in options.runs}
    names = [name for runs in arms.values() for name in runs]
    if "" in names or any(word.startswith("=") for word in options.runs):
        raise ConfigError(f"--runs {' '.join(options.runs)}: a name or label is empty; write RUN, or LABEL=RUN,RUN,...")
    if len(options.runs) < 2 or len(arms) < len(options.runs) or len(set(names)) < len(names):
        raise ConfigError(f"--runs {' '.join(options.runs)}: give at least two groups of runs, and no run twice")
    folders = {label: [find(name) for name in runs] for label, runs in arms.items()}
    out = options.out if options.out is not None else options.runs_dir / "comparison.html"
    candidates = write_comparison(folders, out, title=f"{', '.join(arms)} compared")
    for candidate in candidates.values():
        print("\n".join(filter(None, (candidate.sentence, candidate.ended))))
    print(out)
    return 0
