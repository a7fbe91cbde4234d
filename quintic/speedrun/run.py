"""A speedrun from its first step to its last validation: the loop, the clock and the log.

The clock is the race's: it runs while the model trains, and stands still in the warm-up and in validations. The log's
times and losses of steps are measured on the device and read when the clock stands still.

Source: the rules of the clock follow the modded-nanogpt speedrun.
"""

import gc
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quintic
from quintic.errors import DivergedError
from quintic.report.history import METRICS_FILE
from quintic.report.report import write_report
from quintic.speedrun.race import Race
from quintic.speedrun.stages import StepSettings
from quintic.train.hardware import Hardware, Stopwatch, git_state, machine_facts, package_versions, peak_memory_bytes
from quintic.train.metrics import MetricsLog

__all__ = ["RaceResult", "train"]


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """The results of a finished run."""

    loss: float
    """Loss of the validation text, in nats per token."""
    bpb: float | None
    """In bits per byte; None where the vocabulary is not at hand."""
    seconds: float
    """By the race's clock."""


class _Clock:
    """Seconds of training on the host, and of each step on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0
        self._began = 0.0
        self._watch = Stopwatch(device)

    def start(self) -> None:
        self._synchronize()
        self._watch = Stopwatch(self._device)
        self._watch.mark()
        self._began = time.perf_counter()

    def mark(self) -> float:
        """Note the end of a step; return the seconds so far, of the host, which does not wait."""
        self._watch.mark()
        return self.seconds + time.perf_counter() - self._began

    def stop(self) -> list[tuple[float, float]]:
        """Wait for the device; return (seconds, seconds of the run before it) of each step since the start."""
        self._synchronize()
        before, self.seconds = self.seconds, self.seconds + time.perf_counter() - self._began
        steps = self._watch.seconds()
        return list(zip(steps, itertools.accumulate(steps, initial=before), strict=False))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def train(
    race: Race,
    hardware: Hardware,
    run_dir: Path,
    *,
    facts: Mapping[str, Any],
    warm_up: bool = True,
    say: Callable[[str], None] = print,
) -> RaceResult:
    """Train and score a model; all ranks must call it.

    Args:
        race: as constructed.
        hardware: where it computes, for the log.
        run_dir: the folder of the run; the first rank writes `metrics.jsonl` and `report.html` there.
        facts: command and configuration, for the log.
        warm_up: compile before the clock starts rather than in the steps.
        say: takes lines for people.

    Raises:
        DivergedError: a validation loss is not finite.
        QuinticError: text that cannot be used.
    """
    track, ranks = race.track, race.ranks
    began = time.perf_counter()
    if warm_up:
        say("Warming up: compiling what every stage needs ...")
        race.warm_up()
    warmup_seconds = time.perf_counter() - began
    say(f"Warm-up took {warmup_seconds:.1f} s; the clock starts")
    clock, tokens = _Clock(race.device), 0
    waiting: list[_Step] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with closing(race), MetricsLog(run_dir / METRICS_FILE if ranks.is_first else None) as log:
            log.write("run", **_facts(race, hardware), name=run_dir.name, warmup_seconds=warmup_seconds, **facts)
            clock.start()
            for number in range(track.steps + 1):
                settings = track.at(number)
                if number == track.steps or number % track.eval_every == 0:
                    _write_steps(race, log, waiting, clock.stop())
                    loss, bpb = race.evaluate(settings)
                    say(f"step {number}/{track.steps}  validation {loss:.4f}  {_time(clock.seconds, number)}")
                    record = {"step": number, "tokens": tokens, "seconds": clock.seconds, "loss": loss, "bpb": bpb}
                    log.write("eval", **record)
                    if not math.isfinite(loss):
                        raise DivergedError(f"{run_dir}: the validation loss of step {number} is {loss}: it diverged")
                    if number == track.steps:
                        break
                    clock.start()
                loss_here, epoch = race.train_step(settings, race.stream)
                seconds = clock.mark()
                tokens += settings.batch_tokens
                waiting.append((number + 1, settings, tokens, epoch, loss_here))
                say(f"step {number + 1}/{track.steps}  {_time(seconds, number + 1)}")
            peak = peak_memory_bytes(race.device)
            log.write("final", **record, peak_memory_bytes=peak, tokens_per_second=tokens / clock.seconds)
            if ranks.is_first:
                write_report(run_dir)
    finally:
        gc.unfreeze()
        gc.enable()
    return RaceResult(loss=loss, bpb=bpb, seconds=clock.seconds)


def _time(seconds: float, steps: int) -> str:
    return f"train time {1000 * seconds:.0f} ms  mean {1000 * seconds / max(1, steps):.2f} ms"


_Step = tuple[int, StepSettings, int, int, Tensor]
"""(number from 1, settings, tokens so far, epoch of the text, loss)"""


def _write_steps(race: Race, log: MetricsLog, steps: list[_Step], times: list[tuple[float, float]]) -> None:
    """Write the records of the steps since the clock was started, and forget them."""
    if not steps:
        return
    losses = race.ranks.total(torch.stack([loss.double() for *_, loss in steps]).cpu()).tolist()
    for (number, settings, tokens, epoch, _), loss, (took, seconds) in zip(steps, losses, times, strict=True):
        log.write(
            "train",
            step=number,
            stage=settings.stage,
            tokens=tokens,
            seconds=seconds + took,
            loss=loss,
            lr={group["name"]: group["initial_lr"] * settings.rate for group in race.optimizer.param_groups},
            momentum=settings.momentum,
            epoch=epoch,
            tokens_per_second=settings.batch_tokens / took,
            times_ms={"step": 1000 * took},
        )
    steps.clear()


def _facts(race: Race, hardware: Hardware) -> dict[str, Any]:
    """Return the facts of the log's `run` record."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine_facts(hardware),
        "ranks": race.ranks.size,
        "git": git_state(),
        "code": code_hash(),
        "versions": package_versions(),
        "model": {
            "parameters": sum(param.numel() for param in race.model.parameters()),
            "flops_per_token": race.model.flops_per_token(),
            **asdict(race.model.config),
        },
        "data": {"source": race.data.source, "shards": len(race.data.train)},
        "track": asdict(race.track),
        "total_steps": race.track.steps,
    }


def code_hash() -> str:
    """Return the SHA-256 of all source files of this package, in the order of their names."""
    root = Path(quintic.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
