"""`quintic compare`: the same model trained with AdamW and with Muon, and both curves in one report."""

import dataclasses
import shlex
from datetime import datetime
from typing import Literal

from quintic.commands.inputs import check_options, check_text
from quintic.commands.options import training_options
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.report.comparison import write_comparison
from quintic.train.config import Config
from quintic.train.loop import Interrupted, train
from quintic.train.runs import check_new_run, create_run, discard_unstarted

__all__ = ["compare", "run"]

# Steps between the evaluations of a comparison, at most.
_EVAL_EVERY = 25


def compare(config: Config, dataset: Dataset, *, command: str) -> str:
    """Train with AdamW, then with Muon, and write `compare.html` beside the two runs.

    Both runs have the same initial weights, the same batches in the same order and the same schedules; each has the
    learning rates of matrices and head, and the weight decay, that were tuned for it (`--muon-lr`, `--head-lr`,
    `--weight-decay`; `--adamw-lr`, `--adamw-head-lr`, `--adamw-weight-decay`). Evaluations are at most
    `_EVAL_EVERY` steps apart, so that it can be told when one run reaches the other's loss.

    Returns:
        What the comparison found and where the report is, as text.

    Raises:
        QuinticError: as `train`.
    """
    name = config.run.run or f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    variants: tuple[tuple[Literal["adamw", "muon"], str], ...] = (("adamw", "AdamW"), ("muon", "Muon"))
    configs = {}
    for optimizer, label in variants:
        configs[label] = dataclasses.replace(
            config,
            optim=dataclasses.replace(config.optim, optimizer=optimizer),
            run=dataclasses.replace(
                config.run,
                run=f"{name}-{optimizer}",
                eval_every=min(config.run.eval_every or _EVAL_EVERY, _EVAL_EVERY),
            ),
        )
        check_new_run(configs[label])  # both before the first is trained
    runs = {}
    for label, variant in configs.items():
        print(f"\n=== {label} ===", flush=True)
        runs[label] = create_run(variant)
        try:
            train(variant, dataset, runs[label], resume=False, command=command)
        except BaseException:
            discard_unstarted(runs[label])
            raise
    report = config.run.runs_dir / f"{name}.html"
    found = write_comparison(runs, report, title="Muon and AdamW on the same model")
    return f"\n{found['candidates']['Muon']['sentence']}\nreport: {report}"


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    start = training_options(arguments, "compare")
    if start.resumed is not None:
        raise ConfigError("--resume: a comparison is trained from the beginning; use quintic train --resume")
    check_options(start.config)
    dataset = prepared(start.config.data)
    check_text(start.config, dataset)
    try:
        print(compare(start.config, dataset, command=shlex.join(["quintic", "compare", *arguments])))
    except Interrupted as stop:
        print(f"\n{stop}; a comparison cannot be continued: start it again")
        return 130
    return 0
