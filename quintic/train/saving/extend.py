"""A larger `--steps` for a run that is resumed: kept in its configuration, with what it does to the rates."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from quintic.durable import write_atomically
from quintic.train.recipe import apply_schedule, scale_of
from quintic.train.runs import CONFIG_FILE
from quintic.train.saved_config import check_longer, load_config, to_dict
from quintic.train.trainer import Trainer

__all__ = ["extend_run"]


def extend_run(run: Trainer, run_dir: Path, say: Callable[[str], None]) -> int | None:
    """Keep a larger `--steps` in the run's configuration, and say what it does to the rates; all ranks call it.

    From the step that the run continues from, its schedules are those of a run of the new length.

    Returns:
        The length before; None if it has not changed.

    Raises:
        ConfigError: the run would become shorter.
    """
    saved = load_config(run_dir / CONFIG_FILE)
    if run.config.schedule.steps == saved.schedule.steps:
        return None
    before = scale_of(saved, run.model).steps
    check_longer(run.total, before)
    if run.step:
        made = apply_schedule(run.optimizer, saved, run.step - 1, before)
        coming = apply_schedule(run.optimizer, run.config, run.step, run.total)
        parts = [f"{name} from {made['lr'][name]:.3g} to {rate:.3g}" for name, rate in coming["lr"].items()]
        decay = f"the weight decay from {made['weight_decay']:.3g} to {coming['weight_decay']:.3g}"
        say(
            f"From {before:,} to {run.total:,} steps: from step {run.step + 1:,} on, rates are those of a run of that "
            f"length. Learning rates go, with that step, {', '.join(parts)}; {decay}"
        )
    schedule = dataclasses.replace(saved.schedule, steps=run.config.schedule.steps)
    content = json.dumps(to_dict(dataclasses.replace(saved, schedule=schedule)), indent=2) + "\n"
    run.ranks.from_rank0(lambda: write_atomically(run_dir / CONFIG_FILE, content))
    return before
