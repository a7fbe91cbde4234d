"""The training loop: it decides when to step, evaluate, sample, save, stop and finish.

Phases of `train`: lock the run's folder; choose the hardware; build the `Trainer`; load a checkpoint, initial weights,
or nothing; open log and progress display; make the steps; evaluate, save, report and sample. `trainer.py` does the work
of each, `metrics.py` records it, and `checkpoint.py` saves it.

A run that is killed and resumed ends with the same weights as an uninterrupted one: checkpoints hold everything that
the next step depends on (weights, optimizer, data position, step), and nothing else is random.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quintic.data.dataset import Dataset
from quintic.errors import CheckpointError, DivergedError, QuinticError
from quintic.eval.core import core_lines
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.report.progress import Progress
from quintic.report.report import write_report
from quintic.stopping import StopRequests
from quintic.streams import say
from quintic.train.checkpoint import checkpoint_of_step, checkpoints, newest_checkpoint, set_aside_later
from quintic.train.config import Config
from quintic.train.distributed import SINGLE_PROCESS, Ranks
from quintic.train.hardware import choose_hardware, compile_seconds, machine_facts
from quintic.train.metrics import MetricsLog, summarize_log, tensorboard_tracker, wandb_tracker
from quintic.train.recipe import scale_lines
from quintic.train.runs import TOKENIZER_FILE, lock_run, wandb_id
from quintic.train.schedule import is_due
from quintic.train.source import keep_source
from quintic.train.start import allocate_lookups, extend_run, load_initial_weights
from quintic.train.trainer import Trainer

__all__ = ["Interrupted", "Result", "rare_collections", "train"]


# Rare enough to cost nothing, frequent enough that garbage of evaluations and checkpoints does not pile up.
_STEPS_PER_COLLECTION = 100

# Rollbacks of one run. If the loss spikes again after this many, the text is not the cause.
_MOST_ROLLBACKS = 10


class Interrupted(QuinticError):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP); its last step is finished and saved."""

    together = True
    """All ranks have stopped at the same point; otherwise some may be waiting for others."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of a finished run."""

    run_dir: Path
    report: Path
    samples: list[dict[str, str]]
    final: Mapping[str, Any]
    """The final record of the log (`quintic.report.history`)."""


def train(
    config: Config,
    dataset: Dataset,
    run_dir: Path,
    *,
    resume: bool,
    command: str,
    resume_step: int | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Result:
    """Train, evaluate, sample and report one run.

    Args:
        config: the run's configuration.
        dataset: prepared text.
        run_dir: the run's folder, made by `create_run`.
        resume: continue from the newest undamaged checkpoint, or from the start if the run has no checkpoint yet.
        command: the command line, for the log.
        resume_step: step of the checkpoint to continue from; None for the newest undamaged one.
        ranks: the processes that train the run; all must call this with the same arguments.

    Raises:
        Interrupted: after Ctrl-C, SIGTERM or SIGHUP; the checkpoint is written.
        DivergedError: the loss or the weights are not finite. They are not saved; earlier checkpoints stay.
        QuinticError: the input cannot be used, or another process is training the run.
        OtherRankError: another rank raised one of these.

    After any exception, the log and the report hold every step that was made.
    """
    with contextlib.ExitStack() as held:
        ranks.from_rank0(lambda: held.enter_context(lock_run(run_dir)))
        checkpoint = ranks.from_rank0(lambda: _find_checkpoint(run_dir, resume_step)) if resume else None
        hardware = ranks.run_on_all(lambda: choose_hardware(config.run, local_ranks=ranks.local_size))
        devices = "" if ranks.size == 1 else f"{ranks.size} ranks ({config.run.parallel}), each on "
        say(f"Computing on {devices}{hardware}")
        run = ranks.run_on_all(lambda: Trainer(config, dataset, run_dir, hardware, ranks))
        data_ranks = run.parallelism.data_size
        say("\n".join(scale_lines(config, vocab_size=dataset.vocab_size, data_ranks=data_ranks)))
        # Weights: of a checkpoint, of another run, or random as `Trainer` has initialised them.
        if checkpoint is not None:
            ranks.run_on_all(lambda: run.restore(checkpoint))
            say(f"Continuing {run_dir.name} after step {run.step}")
        elif (source := config.run.init_from) is not None:
            say(ranks.run_on_all(lambda: load_initial_weights(run.model, Path(source), dataset.tokenizer)))
        elif allocation := allocate_lookups(run.model, dataset, seed=config.run.seed):
            say(allocation)
        lengths = ranks.run_on_all(lambda: extend_run(run)) if resume else {}
        ranks.from_rank0(lambda: dataset.tokenizer.save(run_dir / TOKENIZER_FILE))
        say("\n".join(run.describe()))
        # From here on the run's folder changes. `held` closes everything in reverse order, also after an error.
        if resume_step is not None:
            ranks.from_rank0(lambda: set_aside_later(run_dir, resume_step))
        held.callback(run.background.close)
        held.enter_context(run.loader)
        has_log = ranks.from_rank0(lambda: (run_dir / METRICS_FILE).exists())
        if checkpoint is not None and not has_log:
            say(f"{run_dir / METRICS_FILE} is missing: a new log starts here, without the steps up to {run.step}")
        log = held.enter_context(ranks.run_on_all(lambda: _open_log(run, run.step if resume else None)))
        progress = held.enter_context(Progress(run.total, start_step=run.step))
        stop_requests = held.enter_context(StopRequests(progress.stopping))
        # A new log starts with the run's facts; each resumption adds a record, and its source if that has changed.
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        if checkpoint is None or not has_log:
            log.write("run", time=now, name=run_dir.name, command=command, **run.facts())
        if checkpoint is not None:
            facts = {"command": command, "machine": machine_facts(hardware), "ranks": ranks.size}
            log.write("resume", step=run.step, time=now, **facts, **lengths)
            if ranks.from_rank0(lambda: keep_source(run_dir, run.step)):
                progress.message("The source of quintic has changed since the run was stopped; its folder keeps both")
        try:
            _make_steps(run, log, progress, stop_requests)
            return _finish(run, log, progress, stop_requests)
        except Exception:
            with contextlib.suppress(QuinticError, OSError):  # the first error is the one to report
                if ranks.is_first:
                    write_report(run_dir)
            raise


def _make_steps(run: Trainer, log: MetricsLog, progress: Progress, stop_requests: StopRequests) -> None:
    """Make all remaining steps, with the evaluations, samples and checkpoints that are due between them."""
    if run.hardware.compile:
        progress.message("Compiling, until the first step is made")
    if run.step == 0 and run.config.run.eval_every:
        _evaluate(run, log, progress)  # the untrained model
    is_first = True
    with rare_collections() as collect_rarely:
        while run.step < run.total:
            record = run.train_step()
            collect_rarely()
            progress.train(log.write("train", **record))
            if run.hardware.compile and is_first:
                seconds = sum(record["times_ms"].values()) / 1000
                progress.message(f"Compiled in {compile_seconds():.1f} s; the first step took {seconds:.1f} s")
            is_first = False
            # A spike is looked for only in a finite loss: NaN ends the run.
            _check_loss("training loss", record, run)
            if "spike" in record and run.config.optim.on_spike == "rollback" and _roll_back(run, log, progress):
                continue
            if run.step == run.total:
                break
            if is_due(run.step, run.config.run.eval_every):
                _evaluate(run, log, progress)
            if run.suite is not None and is_due(run.step, run.config.run.core_every):
                _answer_core(run, log, progress)
            if is_due(run.step, run.config.run.sample_every):
                log.write("sample", step=run.step, samples=_sample(run, progress))
            # Read the request once: one that arrives during the save is honoured after the next step. A failed
            # background save also stops the run; `_save` then raises its error.
            stop = run.ranks.any(stop_requests.is_stopped() or run.background.has_failed)
            if stop or is_due(run.step, run.config.run.save_every):
                _save(run, wait=stop)
            if stop:
                raise Interrupted(f"stopped after step {run.step} of {run.total}, which is saved")


def _roll_back(run: Trainer, log: MetricsLog, progress: Progress) -> bool:
    """Go back to the newest checkpoint but continue with the following text; False if there is no checkpoint yet."""
    spike_step = run.step
    run.background.wait()  # the checkpoint to go back to may still be in progress
    if run.watch.rollbacks >= _MOST_ROLLBACKS:
        raise _diverged(f"the loss spiked again at step {spike_step} after {run.watch.rollbacks} rollbacks", run)

    def find() -> Path | None:
        with contextlib.suppress(CheckpointError):  # none yet, or all damaged: that is no reason to end a healthy run
            return newest_checkpoint(run.run_dir, message=progress.message)
        return None

    checkpoint = run.ranks.from_rank0(find)
    if checkpoint is None:
        progress.message(f"step {spike_step}: no checkpoint to go back to yet; training goes on")
        return False
    run.ranks.run_on_all(lambda: run.roll_back(checkpoint))
    log.write("rollback", step=run.step, spike_step=spike_step)
    progress.message(f"step {spike_step}: went back to the checkpoint of step {run.step}; continues with later text")
    return True


def _finish(run: Trainer, log: MetricsLog, progress: Progress, stop_requests: StopRequests) -> Result:
    """Evaluate, save, report and sample after the last step; after a failure, all earlier results are on disk."""
    if run.score is None:
        # The trained weights must not be lost because their evaluation fails. Saving needs all ranks, which cannot meet
        # again after a failure of one alone.
        if run.ranks.size > 1:
            _save(run, wait=True)
        try:
            _evaluate(run, log, progress)
        except DivergedError:
            raise
        except Exception:
            if run.ranks.size == 1:
                _save(run, wait=True)
            progress.message(f"{run.run_dir.name} is trained and saved; its evaluation failed")
            raise
        _save(run, wait=True)
    with progress.busy("compressing the validation text with xz, for comparison"):
        final = run.finish()
    summary = run.ranks.from_rank0(lambda: summarize_log(read_metrics(run.run_dir / METRICS_FILE)))
    final = log.write("final", **final, **summary)
    report = run.ranks.from_rank0(lambda: write_report(run.run_dir))
    try:
        samples = _sample(run, progress)
    except Exception:
        progress.message(f"{run.run_dir.name} is trained, saved and reported in {report}; writing samples failed")
        raise
    log.write("sample", step=run.step, samples=samples)
    # CORE last: it takes long, and by now a first Ctrl-C loses nothing.
    if run.suite is not None:
        try:
            with stop_requests.at_once():
                _answer_core(run, log, progress)
        except KeyboardInterrupt:
            stop = Interrupted(
                f"{run.run_dir.name} is trained, saved and reported in {report}; stopped while answering CORE"
            )
            stop.together = False
            raise stop from None
    return Result(
        run_dir=run.run_dir,
        report=run.ranks.from_rank0(lambda: write_report(run.run_dir)),
        samples=samples,
        final=final,
    )


def _evaluate(run: Trainer, log: MetricsLog, progress: Progress) -> None:
    with progress.busy("scoring the validation text"):
        record = run.evaluate()
    progress.evaluation(log.write("eval", **record))
    _check_loss("validation loss", record, run)


def _sample(run: Trainer, progress: Progress) -> list[dict[str, str]]:
    with progress.busy("writing samples"):
        return run.sample()


def _answer_core(run: Trainer, log: MetricsLog, progress: Progress) -> None:
    with progress.busy("answering the tasks of CORE"):
        result = run.answer_core()
    log.write(
        "core",
        step=run.step,
        tokens=run.tokens,
        seconds=run.seconds,
        core=result.core,
        core_stderr=result.stderr,
        centred={task.label: task.centred for task in result.tasks},
        accuracy={task.label: task.accuracy for task in result.tasks},
        missing=result.missing,
    )
    progress.message(f"step {run.step:,}/{run.total:,}  {core_lines(result)[-1]}")


def _save(run: Trainer, *, wait: bool) -> None:
    # A finite loss does not suffice: it was computed before the last step changed the weights.
    if not run.has_finite_weights():
        raise _diverged(f"weights are not finite after step {run.step}", run)
    run.save()
    if wait:
        run.background.wait()


def _check_loss(name: str, record: dict[str, Any], run: Trainer) -> None:
    if not math.isfinite(record["loss"]):
        raise _diverged(f"the {name} of step {record['step']} is {record['loss']}", run)


def _diverged(reason: str, run: Trainer) -> DivergedError:
    rates, decay = "--muon-lr, --head-lr", "--weight-decay"
    if run.config.optim.optimizer == "adamw":
        rates, decay = "--adamw-lr, --adamw-head-lr", "--adamw-weight-decay"
    run.background.wait()
    saved = checkpoints(run.run_dir)
    kept = f"{saved[0].name} is kept" if saved else "it has no checkpoint"
    return DivergedError(
        f"{run.run_dir}: {reason}: training has diverged and was stopped ({kept}); start a new run with lower learning "
        f"rates ({rates}, --embedding-lr, --scalar-lr), a lower weight decay ({decay}) or a longer warm-up "
        "(--warmup-frac)"
    )


def _find_checkpoint(run_dir: Path, step: int | None) -> Path | None:
    if step is not None:
        return checkpoint_of_step(run_dir, step)
    if not checkpoints(run_dir):
        say(f"{run_dir.name} was stopped before its first checkpoint: starting it from the beginning")
        return None
    return newest_checkpoint(run_dir)


def _open_log(run: Trainer, resume_step: int | None) -> MetricsLog:
    if not run.ranks.is_first:
        return MetricsLog(None)
    options, folder = run.config.run, run.run_dir
    trackers = []
    if options.tensorboard:
        trackers.append(tensorboard_tracker(folder / "tensorboard", resume_step=resume_step))
    if options.wandb is not None:
        trackers.append(wandb_tracker(options.wandb, folder=folder, run_id=wandb_id(folder)))
    return MetricsLog(folder / METRICS_FILE, resume_step=resume_step, trackers=trackers)


@contextlib.contextmanager
def rare_collections() -> Iterator[Callable[[], None]]:
    """Run Python's garbage collector only between steps, and rarely; yield a function to call after each step.

    Left to itself, the collector runs in the middle of steps and scans all objects of PyTorch each time. Objects that
    exist after the first step live for the whole run, so they are frozen, which excludes them from scans.
    """
    was_enabled, steps = gc.isenabled(), 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            gc.collect()
            gc.freeze()
            gc.disable()
        elif steps % _STEPS_PER_COLLECTION == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        if steps:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
