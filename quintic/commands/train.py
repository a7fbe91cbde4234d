"""`quintic train`: prepares data if needed, trains, evaluates, samples and writes a report.

Phases: connect the ranks; read and check the options; prepare the text; make the run's folder, so that text that cannot
be used leaves no run behind; train (`train.loop`); print the results. A preset of the speedrun goes to
`speedrun.run` instead.
"""

import contextlib
import dataclasses
import shlex
import shutil
from pathlib import Path

import torch

from quintic.commands.inputs import check_options, check_text, text_to_resume
from quintic.commands.options import Start, read_command
from quintic.commands.text import prepared
from quintic.errors import CheckpointError, ConfigError, DivergedError, OtherRankError
from quintic.launch import hint, launched
from quintic.report.history import RunHistory
from quintic.streams import say
from quintic.train.checkpoint import newest_checkpoint, step_of
from quintic.train.config import DataConfig
from quintic.train.distributed import Ranks, connected
from quintic.train.loop import Interrupted, Result, train
from quintic.train.runs import CONFIG_FILE, check_new_run, create_run, discard_unstarted, is_finished, newest_unfinished
from quintic.train.saved_config import load_config, with_options

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command, on all ranks that torchrun has started; return its exit code."""
    with connected(launched()) as ranks:
        start = ranks.run_on_all(lambda: read_command("train", arguments))
        try:
            if isinstance(start, Start):
                return _run(start, ranks)
            from quintic.speedrun.run import speedrun

            name, options = start
            speedrun(name, options, command=shlex.join(["quintic", "train", *arguments]), ranks=ranks)
            return 0
        except DivergedError:
            if ranks.is_first:
                raise
            raise OtherRankError("rank 0 reports it") from None  # all ranks raise the same error


def _run(start: Start, ranks: Ranks) -> int:
    start = ranks.run_on_all(lambda: _restarted(start, ranks))
    config, run_dir = start.config, start.resumed
    if run_dir is not None and (note := ranks.from_rank0(lambda: _finished_note(start))) is not None:
        say(note)
        return 0
    for note in [*start.notes, *ranks.run_on_all(lambda: check_options(config, ranks=ranks.size))]:
        say(note)
    if ranks.size == 1 and config.run.parallel != "sharded":
        say(f"--parallel {config.run.parallel} has no effect on one rank; torchrun starts several")
    if run_dir is None:
        ranks.from_rank0(lambda: check_new_run(config))
        dataset = ranks.once_per_host(lambda: prepared(config.data))
        ranks.run_on_all(lambda: check_text(config, dataset, start.preset))
        run_dir = ranks.from_rank0(lambda: create_run(config))
    else:
        resumed = run_dir
        dataset = ranks.once_per_host(lambda: text_to_resume(resumed, config))
        say(f"Continuing with the text as it was prepared in {dataset.path}")
    try:
        result = train(
            config,
            dataset,
            run_dir,
            resume=start.resumed is not None,
            # After a restart, continue from the newest checkpoint: --resume-step was for the first attempt.
            resume_step=None if ranks.restarts else start.given.get("resume_step"),
            command=start.command,
            ranks=ranks,
        )
    except Interrupted as stop:
        runs_dir = [] if config.run.runs_dir == Path("runs") else ["--runs-dir", str(config.run.runs_dir)]
        options = ["--resume", "--run" if ranks.size == 1 else "--name", run_dir.name, *runs_dir]
        begin = f"torchrun ... -m quintic train {shlex.join(options)}" if ranks.size > 1 else hint("train", options)
        print(f"\n{stop}; continue with:\n    {begin}", flush=True)
        if not stop.together:  # an exception, so that `connected` does not wait for the other ranks
            raise SystemExit(130) from None
        return 130
    except BaseException:
        if start.resumed is None and ranks.is_first:  # a run that fails before it logs anything leaves no folder
            discard_unstarted(run_dir)
        raise
    _print_result(result)
    # A GPU that trained on the text of the Python installation, which is meant for a first try.
    if config.data.data == DataConfig.data and config.run.device != "cpu" and torch.cuda.is_available():
        _print_next_steps(ranks)
    return 0


def _restarted(start: Start, ranks: Ranks) -> Start:
    """Continue the run that the first attempt started, if torchrun has restarted this process."""
    if start.resumed is not None or not ranks.may_restart:
        return start
    name = start.config.run.run or ranks.run_name
    if name is None:
        raise ConfigError("--name: is needed with torchrun --max-restarts, so that a restart can find its run")
    run_dir = start.config.run.runs_dir / name
    if ranks.restarts and (run_dir / CONFIG_FILE).is_file():
        return dataclasses.replace(start, config=load_config(run_dir / CONFIG_FILE), resumed=run_dir)
    return dataclasses.replace(start, config=with_options(start.config, run=name))


def _finished_note(start: Start) -> str | None:
    """Return what to say in place of continuing a run that is finished and whole; None if there is something to do."""
    run_dir = start.resumed
    # Other options ask for more: steps, tasks of CORE, another interval of checkpoints.
    asks_more = start.given.keys() - {"resume", "run", "runs_dir", "threads"}
    if run_dir is None or asks_more or not is_finished(run_dir):
        return None
    with contextlib.suppress(CheckpointError):  # of a damaged checkpoint the steps are made again
        step = step_of(newest_checkpoint(run_dir, message=lambda text: None))
        if step < int(RunHistory.load(run_dir).final.get("step", 0)):
            return None
        runs_dir = [] if run_dir.parent == Path("runs") else ["--runs-dir", str(run_dir.parent)]
        longer = hint("train", ["--resume", "--run", run_dir.name, *runs_dir, "--steps", str(2 * step)])
        note = f"{run_dir} is already finished, after step {step:,}; to make it longer: {longer}"
        other = newest_unfinished(run_dir.parent)
        if other is not None:
            go_on = hint("train", ["--resume", "--run", other.name, *runs_dir])
            note += f"\n{other} is not finished; to continue it: {go_on}"
        return note
    return None


def _print_result(result: Result) -> None:
    final, baselines = result.final, result.final["baselines"]
    for sample in result.samples:
        text = f"{sample['prompt']}{sample['text']}".rstrip()
        rule = "-" * min(49, shutil.get_terminal_size().columns - len("--- sample "))
        print(f"\n--- sample {rule}\n{text}")
    say(
        f"\nvalidation: {final['bpb']:.4f} bits per byte after {final['seconds'] / 60:.1f} minutes of training "
        f"(xz -9 needs {baselines['xz_bpb']:.3f} for the same text, a byte-bigram model "
        f"{baselines['bigram_bpb']:.3f}; lower is better)"
    )
    if final.get("least_bpb", final["bpb"]) < final["bpb"]:
        print(f"least:      {final['least_bpb']:.4f} bits per byte, at step {final['least_bpb_step']:,}")
    print(f"report:     {result.report}")


def _print_next_steps(ranks: Ranks) -> None:
    """Print commands that train on more text than that of the Python installation."""
    print("\nThat was the text of your Python installation, with a small model. Train for real (depth 12) with:")
    for source in (["path/to/my/texts"], ["hf:HuggingFaceFW/fineweb-edu/sample-10BT", "--max-bytes", "6000000000"]):
        options = ["--data", *source]
        if ranks.size > 1:
            print(f"    torchrun --nproc-per-node {ranks.local_size} -m quintic train {shlex.join(options)}")
        else:
            print(f"    {hint('train', options)}")
