"""`quintic compare`: trains the same model with AdamW and with Muon and writes a report with both curves.

Phases of `run`: read the options or the saved comparison; name the runs (`variants`); prepare the text; train the runs
one after the other and write the page (`compare`). A comparison that was stopped can be resumed from its saved file.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from quintic.commands.inputs import check_options, check_text, text_to_resume
from quintic.commands.options import Start
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.launch import hint
from quintic.limits import option_of
from quintic.optim.rules.table import rule_of
from quintic.report.comparison import write_comparison
from quintic.streams import say
from quintic.train.config import Config
from quintic.train.loop import Interrupted, train
from quintic.train.runs import CONFIG_FILE, check_new_run, create_run, discard_unstarted, is_finished, save_comparison
from quintic.train.saved_config import computation_changes, load_config, with_options

__all__ = ["compare", "run", "variants"]

# Most steps between evaluations of a comparison, so that the page can tell when one run reaches another's loss.
_EVAL_EVERY = 25

_OPTIMIZERS: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")


def variants(config: Config, seeds: int = 1, *, resumed: bool = False) -> tuple[Path, list[tuple[str, Path, Config]]]:
    """Return the path of the comparison's page, and (label, folder, configuration) of each run in training's order.

    The runs have the same initial weights, batches and schedules. They differ in the learning rates of matrices and
    head and the weight decay, which were tuned for each optimizer: `--muon-lr`, `--head-lr`, `--weight-decay`, and
    `--adamw-lr`, `--adamw-head-lr`, `--adamw-weight-decay`.

    Each seed, counted up from the configuration's, gives a pair of runs.

    Raises:
        ConfigError: the folder of a run cannot be made, or it exists and the comparison is not resumed.
    """
    runs_dir, name = config.run.runs_dir, config.run.run
    runs: list[tuple[str, Path, Config]] = []
    for seed in range(config.run.seed, config.run.seed + seeds):
        for optimizer in _OPTIMIZERS:
            variant = with_options(
                config,
                run=f"{name}-{optimizer}" + (f"-seed{seed}" if seeds > 1 else ""),
                seed=seed,
                eval_every=min(config.run.eval_every or _EVAL_EVERY, _EVAL_EVERY),
                optimizer=optimizer,
            )
            rule = rule_of(optimizer, config.optim.normalize, config.optim.update_rule)
            runs.append((rule.title, runs_dir / str(variant.run.run), variant))
            if not resumed:
                check_new_run(variant)
    return runs_dir / f"{name}.html", runs


def compare(
    page: Path, runs: Sequence[tuple[str, Path, Config]], dataset: Dataset, *, command: str, resumed: bool = False
) -> str:
    """Train the runs of `variants`, one after the other, and write the page that compares them.

    With several seeds the page compares medians and shows ranges. If `resumed`, finished runs are kept, a run that was
    stopped continues from its last checkpoint, and missing runs are started. Returns lines for the user: the result in
    a sentence, and the path of the page.
    """
    folders: dict[str, list[Path]] = {label: [] for label, _, _ in runs}
    for label, folder, variant in runs:
        seed = f", seed {variant.run.seed}" if len(runs) > len(_OPTIMIZERS) else ""
        is_there = resumed and (folder / CONFIG_FILE).is_file()
        was_finished = is_there and is_finished(folder)
        folders[label].append(folder)
        print(f"\n=== {label}{seed} ==={f' finished before: {folder}' if was_finished else ''}", flush=True)
        # The run may be of another comparison of that name, or was made longer.
        changes = computation_changes(load_config(folder / CONFIG_FILE), variant) if is_there else {}
        if changes:
            name, (of_run, of_comparison) = next(iter(changes.items()))
            raise ConfigError(
                f"{folder / CONFIG_FILE}: {option_of(name)} is {of_run} in this run, and {of_comparison} in the "
                "comparison, which so cannot be continued; draw runs as they are with `quintic report --runs ...`, or "
                "start a new comparison, with another --run"
            )
        if was_finished:
            continue
        if not is_there:
            create_run(variant)
        try:
            train(variant, dataset, folder, resume=is_there, command=command)
        except BaseException:
            discard_unstarted(folder)
            raise
    baseline, rule = folders
    found = write_comparison(folders, page, title=f"{rule} and {baseline} on the same model")[rule]
    lines = [found.sentence, *([] if found.ended is None else [found.ended])]
    if len(runs) == len(_OPTIMIZERS):
        lines.append("This is one seed. Another one gives other numbers; --seeds 3 shows by how much.")
    if found.unequal_speed is not None:
        slower = f"{found.unequal_speed:.1f} times"
        lines.append(f"Their times cannot be compared: something beside the optimizers slowed one run {slower}.")
    return "\n".join(["", *lines, f"report: {page}"])


def run(start: Start) -> int:
    """Run the command; return its exit code."""
    config, resumed, command = start.config, start.resumed is not None, start.command
    for note in [*start.notes, *check_options(config)]:
        say(note)
    if not 0 < (every := start.given.get("eval_every", _EVAL_EVERY)) <= _EVAL_EVERY:
        say(f"--eval-every {every} has no effect: a comparison evaluates every {_EVAL_EVERY} steps")
    # The name of the comparison: given, by the time, or of the one to resume.
    runs_dir, name = config.run.runs_dir, config.run.run or f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    if start.resumed is not None:
        runs_dir, name = start.resumed.parent, start.resumed.stem  # it may have been moved or renamed
    config = with_options(config, run=name, runs_dir=runs_dir)
    place = [] if runs_dir == Config().run.runs_dir else ["--runs-dir", str(runs_dir)]
    go_on = hint("compare", ["--resume", "--run", name, *place])
    file = runs_dir / f"{name}.json"
    if file.exists() and not resumed:
        raise ConfigError(f"{file} exists: choose another --run, or continue that comparison: {go_on}")
    # The runs, their text, and the file from which the comparison can be resumed.
    page, runs = variants(config, start.seeds, resumed=resumed)
    folders = [folder for _, folder, _ in runs]
    # A resumed comparison must use the text of its first run, even if the source has changed since.
    began = next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)
    dataset = prepared(config.data) if began is None else text_to_resume(began, config)
    check_text(config, dataset, start.preset)
    if not resumed:
        save_comparison(config, seeds=start.seeds, command=command)
    try:
        say(compare(page, runs, dataset, command=command, resumed=resumed))
    except Interrupted as stop:
        print(f"\n{stop}; continue with:\n    {go_on}")
        return 130
    finally:
        if not any(folder.exists() for folder in folders):  # no run was started, so there is nothing to resume
            file.unlink()
    return 0
