"""Extending a resumed run with a larger `--steps`."""

import json
from collections.abc import Callable
from pathlib import Path

from quintic.durable import write_atomically
from quintic.train.recipe import apply_schedule
from quintic.train.runs import CONFIG_FILE
from quintic.train.saved_config import check_longer, load_config, to_dict, with_options
from quintic.train.schedule import scale_of
from quintic.train.trainer import Trainer

__all__ = ["extend_run"]


def extend_run(run: Trainer, run_dir: Path, say: Callable[[str], None]) -> int | None:
    """Save a larger `--steps` in the run's configuration and tell the user how the rates change; all ranks call it.

    All further steps follow the schedules of a run of the new length, so learning rates and weight decay jump when the
    run continues.

    Returns:
        The previous number of steps; None if it has not changed.

    Raises:
        ConfigError: the run would become shorter.
    """
    saved = load_config(run_dir / CONFIG_FILE)
    if run.config.schedule.steps == saved.schedule.steps:
        return None
    before = scale_of(saved, run.model.config).steps
    check_longer(run.total, before)
    # Compare the rates of the last step made with those of the next one. `apply_schedule` sets the groups' rates, but
    # each step sets them again.
    if run.step:
        made = apply_schedule(run.optimizer, saved, run.step - 1, before)
        coming = apply_schedule(run.optimizer, run.config, run.step, run.total)
        changes = [f"{name} from {made['lr'][name]:.3g} to {rate:.3g}" for name, rate in coming["lr"].items()]
        decay = f"the weight decay from {made['weight_decay']:.3g} to {coming['weight_decay']:.3g}"
        say(
            f"From {before:,} to {run.total:,} steps: from step {run.step + 1:,} on, rates are those of a run of that "
            f"length. At that step, learning rates change: {', '.join(changes)}; {decay}"
        )
    longer = with_options(saved, steps=run.config.schedule.steps)
    content = json.dumps(to_dict(longer), indent=2) + "\n"
    run.ranks.from_rank0(lambda: write_atomically(run_dir / CONFIG_FILE, content))
    return before
