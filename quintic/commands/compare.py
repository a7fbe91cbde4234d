"""`quintic compare`: the same model trained with AdamW and with Muon, and both curves in one report."""

import dataclasses
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from quintic.commands.inputs import check_options, check_text, duration_lines
from quintic.commands.options import training_options
from quintic.commands.parsing import taken
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.report.comparison import write_comparison
from quintic.streams import say
from quintic.train.config import Config
from quintic.train.loop import Interrupted, train
from quintic.train.runs import check_new_run, create_run, discard_unstarted

__all__ = ["compare", "run", "variants"]

# Steps between the evaluations of a comparison, at most.
_EVAL_EVERY = 25

_OPTIMIZERS: tuple[tuple[Literal["adamw", "muon"], str], ...] = (("adamw", "AdamW"), ("muon", "Muon"))


def variants(config: Config, seeds: int = 1) -> tuple[Path, list[tuple[str, Config]]]:
    """Return the path of the comparison's page, and label and configuration of each run, in their order.

    The runs have the same initial weights, the same batches in the same order and the same schedules; each has the
    learning rates of matrices and head, and the weight decay, that were tuned for its optimizer (`--muon-lr`,
    `--head-lr`, `--weight-decay`; `--adamw-lr`, `--adamw-head-lr`, `--adamw-weight-decay`). Evaluations are at most
    `_EVAL_EVERY` steps apart, so that it can be told when one run reaches the other's loss. With several ``seeds``,
    from that of the configuration on, there is a pair of runs for each.

    Raises:
        ConfigError: a run cannot be made.
    """
    name = config.run.run or f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    configs: list[tuple[str, Config]] = []
    for seed in range(config.run.seed, config.run.seed + seeds):
        for optimizer, label in _OPTIMIZERS:
            settings = dataclasses.replace(
                config.run,
                run=f"{name}-{optimizer}" + (f"-seed{seed}" if seeds > 1 else ""),
                seed=seed,
                eval_every=min(config.run.eval_every or _EVAL_EVERY, _EVAL_EVERY),
            )
            optim = dataclasses.replace(config.optim, optimizer=optimizer)
            configs.append((label, dataclasses.replace(config, optim=optim, run=settings)))
            check_new_run(configs[-1][1])
    return config.run.runs_dir / f"{name}.html", configs


def compare(page: Path, configs: Sequence[tuple[str, Config]], dataset: Dataset, *, command: str) -> str:
    """Train the runs of `variants`, one after the other, and write the page that compares them.

    Where there are several seeds it compares medians and shows ranges.

    Returns:
        The comparison's sentence and the path of the page, as text.

    Raises:
        QuinticError: as `train`.
    """
    runs: dict[str, list[Path]] = {label: [] for _, label in _OPTIMIZERS}
    for label, variant in configs:
        seed = f", seed {variant.run.seed}" if len(configs) > len(_OPTIMIZERS) else ""
        print(f"\n=== {label}{seed} ===", flush=True)
        folder = create_run(variant)
        runs[label].append(folder)
        try:
            train(variant, dataset, folder, resume=False, command=command)
        except BaseException:
            discard_unstarted(folder)
            raise
    figures = write_comparison(runs, page, title="Muon and AdamW on the same model")
    return f"\n{figures['candidates']['Muon']['sentence']}\nreport: {page}"


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    start = training_options(arguments, "compare")
    if start.resumed is not None:
        raise ConfigError("--resume: a comparison is trained from the beginning; use quintic train --resume")
    check_options(start.config)
    for note in [*start.notes, *duration_lines(start.config)]:
        say(note)
    if (every := taken(arguments, "--eval-every")[0]) is not None and not 0 < int(every) <= _EVAL_EVERY:
        say(f"--eval-every {every} has no effect: a comparison evaluates every {_EVAL_EVERY} steps")
    page, configs = variants(start.config, start.seeds)
    dataset = prepared(start.config.data)
    check_text(start.config, dataset)
    command = shlex.join(["quintic", "compare", *arguments])
    try:
        say(compare(page, configs, dataset, command=command))
    except Interrupted as stop:
        print(f"\n{stop}; a comparison cannot be continued: start it again, with another --run")
        return 130
    return 0
