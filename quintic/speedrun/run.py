"""A speedrun from its options to its final validation: construction, loop, clock and log.

Phases: `speedrun` reads the options, opens the text and builds the `Race`; `train` warms up, then validates, saves and
makes the steps up to the next validation or save (`_make_steps`), in the order of `train.loop`. It is a loop of its own
because of the clock, which follows the rules of the modded-nanogpt speedrun: it runs only in training, not in the
warm-up, in validations or while the model is saved. Times and losses of steps are measured on the device and read
before the next validation, so that steps never wait for the GPU.
"""

import math
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from quintic.errors import DivergedError
from quintic.report.history import METRICS_FILE
from quintic.report.report import write_report
from quintic.speedrun.presets import FP8_FEATURES, SpeedrunOptions, preset, without
from quintic.speedrun.race import Race
from quintic.speedrun.shards import open_data
from quintic.stopping import StopRequests
from quintic.train.config import BaseRunConfig, Config, RunConfig
from quintic.train.distributed import Ranks
from quintic.train.hardware import Stopwatch, choose_hardware, multiplies_fp8, peak_memory_bytes
from quintic.train.loop import rare_collections
from quintic.train.metrics import MetricsLog
from quintic.train.runs import TOKENIZER_FILE, check_new_run, discard_unstarted, run_folder
from quintic.train.schedule import is_due

__all__ = ["speedrun", "train"]


def speedrun(name: str, options: SpeedrunOptions, *, command: str, ranks: Ranks) -> None:
    """Run a preset with these options, log the run and print its result; all ranks must call it."""
    chosen = preset(name)
    track = ranks.run_on_all(lambda: chosen.track.scaled(options.steps).validated(options.val_tokens))
    changes = {name: getattr(options, name) for name in ("eval_every", "pass_tokens", "untie_at")}
    track = replace(track, **changes)
    model = ranks.run_on_all(lambda: without(chosen.model, options.without))
    run = RunConfig(**{field.name: getattr(options, field.name) for field in fields(BaseRunConfig)})
    ranks.from_rank0(lambda: check_new_run(Config(run=run)))
    hardware = ranks.run_on_all(lambda: choose_hardware(run, local_ranks=ranks.local_size))
    without_fp8 = (model.fp8_head or model.fp8_mlp) and not multiplies_fp8(hardware.device)
    if without_fp8:
        model = without(model, FP8_FEATURES)
    data = ranks.once_per_host(lambda: open_data(options, model))
    capture = options.capture and hardware.device.type == "cuda"
    race = ranks.run_on_all(lambda: Race(track, model, data, hardware, ranks=ranks, seed=options.seed, capture=capture))
    files = {} if data.tokenizer is None else {TOKENIZER_FILE: data.tokenizer.definition}
    run_dir = ranks.from_rank0(lambda: run_folder(options, name, files))
    bits = "; without 8-bit products, which need a GPU of compute capability 8.9" if without_fp8 else ""
    print(f"Computing on {ranks.size} x {hardware}{bits}; {track.steps:,} steps; run folder {run_dir}")
    facts = {"command": command, "config": {**asdict(options), "preset": name}}
    try:
        final = train(race, run_dir, facts=facts, warm_up=options.warm_up, save_every=options.save_every)
    except BaseException:
        if ranks.is_first:
            discard_unstarted(run_dir)
        raise
    per_byte = "" if final["bpb"] is None else f" ({final['bpb']:.4f} bits per byte)"
    print(
        f"\nvalidation: {final['loss']:.4f} nats per token{per_byte} after {final['seconds']:.2f} s of training, "
        f"{1000 * final['seconds'] / track.steps:.2f} ms a step\nreport:     {run_dir / 'report.html'}"
    )


def train(
    race: Race, run_dir: Path, *, facts: Mapping[str, Any], warm_up: bool = True, save_every: int = 0
) -> dict[str, Any]:
    """Train and score a model, and return the final record of its log; all ranks must call it.

    Args:
        race: closed at the end.
        run_dir: the folder of the run; rank 0 writes `metrics.jsonl` and `report.html` there.
        facts: command and configuration, for the log.
        warm_up: compile before the clock starts rather than in the steps.
        save_every: steps between saves of the model; 0 for only the one at the end.

    Raises:
        CheckpointError: the model cannot be saved. At the end, log and report are complete by then.
        DivergedError: a validation loss is not finite; raised on all ranks.
        QuinticError: the text cannot be used.
    """
    track, ranks = race.track, race.ranks
    began = time.perf_counter()
    if warm_up:
        print("Warming up: compiling the code of every stage ...")
        race.warm_up()
    warmup_seconds = time.perf_counter() - began
    print(f"Warm-up took {warmup_seconds:.1f} s; the clock starts")
    step, tokens, seconds, scores = 0, 0, 0.0, list[tuple[float, int]]()
    log_file = run_dir / METRICS_FILE if ranks.is_first else None
    with closing(race), rare_collections() as collected, MetricsLog(log_file) as log:
        collected()  # collect garbage once now, and then not before the end
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        log.write("run", time=now, name=run_dir.name, **race.facts(), warmup_seconds=warmup_seconds, **facts)
        while True:
            if step % track.eval_every == 0 or step == track.steps:
                loss, bpb = race.evaluate(step)
                print(f"step {step}/{track.steps}  validation {loss:.4f}  {_time(seconds, step)}")
                record = {"step": step, "tokens": tokens, "seconds": seconds, "loss": loss, "bpb": bpb}
                log.write("eval", **record)
                scores += [] if bpb is None else [(bpb, step)]
                if not math.isfinite(loss):
                    raise DivergedError(f"{run_dir}: the validation loss of step {step} is {loss}: it diverged")
            if step == track.steps:
                break
            if step and is_due(step, save_every):
                race.save(run_dir, step)
            # Steps up to the next validation or save, without waiting for the GPU in between.
            following = [step - step % every + every for every in (track.eval_every, save_every) if every]
            until = min(track.steps, *following)
            tokens, seconds = _make_steps(race, log, range(step, until), tokens, seconds)
            step = until
        peak = peak_memory_bytes(race.device, race.passes)
        least = dict(zip(("least_bpb", "least_bpb_step"), min(scores), strict=True)) if scores else {}
        final = log.write("final", **record, **least, peak_memory_bytes=peak, tokens_per_second=tokens / seconds)
        if ranks.is_first:
            write_report(run_dir)
        race.save(run_dir, track.steps)
    return final


def _make_steps(race: Race, log: MetricsLog, steps: range, tokens: int, seconds: float) -> tuple[int, float]:
    """Make steps and log them; return the run's total tokens and seconds, given the totals before.

    After a stop request (only with one rank), the steps made so far are logged, then KeyboardInterrupt is raised.
    """
    watch, made = Stopwatch(race.device), []
    watch.mark()
    began = time.perf_counter() - seconds
    # Several ranks would need a collective in every step to agree on stopping, so there Ctrl-C just kills.
    requests = StopRequests()
    with requests if race.ranks.size == 1 else nullcontext():
        for number in steps:
            made.append(race.train_step(number, race.stream))
            watch.mark()
            # The host's time, which runs ahead of the device's.
            print(f"step {number + 1}/{race.track.steps}  {_time(time.perf_counter() - began, number + 1)}")
            if requests.is_stopped():
                break
    times = watch.seconds()  # waits for the last step
    ended = time.perf_counter() - began
    losses = race.ranks.total(torch.stack([loss for loss, _ in made]).double().cpu()).tolist()
    for number, loss, (_, epoch), took in zip(steps[: len(made)], losses, made, times, strict=True):
        settings = race.track.at(number)
        tokens, seconds = tokens + settings.batch_tokens, seconds + took
        log.write(
            "train",
            step=number + 1,
            stage=settings.stage,
            tokens=tokens,
            seconds=seconds,
            loss=loss,
            lr={group["name"]: group["initial_lr"] * settings.rate for group in race.optimizer.param_groups},
            lr_multiplier=settings.rate,
            momentum=settings.momentum,
            epoch=epoch,
            tokens_per_second=settings.batch_tokens / took,
            times_ms={"step": 1000 * took},
        )
    if requests.is_stopped():
        raise KeyboardInterrupt
    return tokens, ended


def _time(seconds: float, steps: int) -> str:
    return f"train time {1000 * seconds:.0f} ms  mean {1000 * seconds / max(1, steps):.2f} ms"
