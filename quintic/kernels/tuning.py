"""The search behind `quintic.kernels.tune`: times the candidates of each kernel beside the shipped configuration.

A candidate is taken if it is faster by more than the noise, twice in a row, if it loses on no input, and if it gives
the same bits on all of them. The shipped configuration stays where nothing is better.
"""

import difflib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quintic.errors import ConfigError
from quintic.kernels.configuration_cache import check_writable, device_key, write_configurations
from quintic.kernels.configurations import TUNABLES, Configuration, candidates_by_name, forget_tuned
from quintic.kernels.dispatch import triton_is_installed, triton_is_interpreted

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.tuning_problems import Problem, Run, Subject

__all__ = ["KernelReport", "Trial", "TuningReport", "same_bits", "search", "tune"]

# What a candidate must gain, and may not lose on any input.
_MARGIN = 0.03
# Samples of each configuration, one of either in turn.
_SAMPLES = 9
# Launches of a sample take so long together, and are so many at most.
_SAMPLE_SECONDS = 2e-3
_MOST_LAUNCHES = 50

Sampler = Callable[[], float]
"""Times some launches of one configuration; returns seconds for one of them."""

Verdict = Literal["faster", "no faster", "other bits", "does not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What came of one candidate."""

    configuration: Configuration
    verdict: Verdict
    ratio: float | None = None
    """Its time in parts of the shipped configuration's, the mean over all inputs; None if it does not run."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelReport:
    """What a search found out about one kernel."""

    name: str
    shipped: Configuration
    best: Configuration
    """What runs from now on."""
    num_candidates: int
    trials: tuple[Trial, ...] = ()
    skipped: str | None = None
    """Why nothing was tried, or None."""

    @property
    def ratio(self) -> float:
        """Return the time of the best configuration in parts of the shipped one's."""
        return next((t.ratio for t in self.trials if t.configuration == self.best and t.ratio is not None), 1.0)

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.name:<15} not searched: {self.skipped}"
        verdicts = Counter(trial.verdict for trial in self.trials)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        kept = "  (as shipped)" if self.best == self.shipped else ""
        tried = f"tried {len(self.trials)} of {self.num_candidates}: {counts}"
        return f"{self.name:<15} {self.ratio:>5.2f} x shipped  {self.best}{kept}; {tried}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningReport:
    """What `quintic.kernels.tune` found out; `print` it for a table."""

    device: str
    kernels: tuple[KernelReport, ...]
    path: Path
    """Where it is kept."""

    def __str__(self) -> str:
        return "\n".join([self.device, *map(str, self.kernels), f"kept in {self.path}"])


def tune(device: torch.device | str | None, *, seconds: float, only: str | Sequence[str] | None) -> TuningReport:
    """Search and keep the result; see `quintic.kernels.tune`."""
    names = _checked_names(only)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds}: give a number above 0")
    place = _checked_device(device)
    key = device_key(place)
    check_writable(key)
    from quintic.kernels.tuning_problems import subjects

    with torch.cuda.device(place), torch.no_grad():
        chosen = [subject for subject in subjects(place) if subject.tunable.name in names]
        kernels = search(chosen, place, seconds)
        found = {kernel.name: asdict(kernel.best) for kernel in kernels if kernel.trials}
        path = write_configurations(key, found, candidates_by_name())
    forget_tuned()
    name = f"{key.device}, compute capability {key.capability}, torch {key.torch}, triton {key.triton}"
    return TuningReport(device=name, kernels=kernels, path=path)


def _checked_names(only: str | Sequence[str] | None) -> Sequence[str]:
    names = list(TUNABLES) if only is None else [only] if isinstance(only, str) else only
    for name in names:
        if name not in TUNABLES:
            nearest = difflib.get_close_matches(name, TUNABLES, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(TUNABLES)}"
            raise ConfigError(f"only={name!r}: {hint}")
    return names


def _checked_device(device: torch.device | str | None) -> torch.device:
    needs = "tuning needs a CUDA device, on which it times Triton's kernels"
    try:
        place = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if place.type != "cuda":
        raise ConfigError(f"device={str(place)!r}: {needs}")
    if not torch.cuda.is_available():
        raise ConfigError(f"{needs}; PyTorch finds none here")
    if place.index is not None and place.index >= torch.cuda.device_count():
        raise ConfigError(f"device={str(place)!r}: there are {torch.cuda.device_count()} CUDA devices")
    if not triton_is_installed():
        raise ConfigError("tuning needs Triton, which is not installed: pip install triton")
    if triton_is_interpreted():
        raise ConfigError("TRITON_INTERPRET=1: interpreted kernels cannot be tuned; unset it")
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def search(
    subjects: Sequence["Subject"],
    device: torch.device,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sampler: "Callable[[Run], Sampler] | None" = None,
) -> tuple[KernelReport, ...]:
    """Try candidates of each subject until its part of the time is over; what one leaves is for those after it.

    Args:
        subjects: what to launch.
        device: where; on a CUDA device, it is the current one.
        seconds: no candidate is begun later than that.
        clock: tells the time in seconds.
        sampler: makes what times a run with the configuration now in use; CUDA graphs by default.
    """
    end = clock() + seconds
    reports = []
    for number, subject in enumerate(subjects):
        now = clock()
        until = now + (end - now) / (len(subjects) - number)
        reports.append(_search_one(subject, device, _before(until, clock), sampler or _graph_sampler))
    return tuple(reports)


def _before(until: float, clock: Callable[[], float]) -> Callable[[], bool]:
    return lambda: clock() < until


def _search_one(
    subject: "Subject", device: torch.device, has_time: Callable[[], bool], sampler: "Callable[[Run], Sampler]"
) -> KernelReport:
    tunable = subject.tunable
    shipped, in_use, candidates = tunable.shipped(device), tunable.on(device), tunable.candidates(device)

    def report(trials: Sequence[Trial] = (), best: Configuration = in_use, skipped: str | None = None) -> KernelReport:
        return KernelReport(
            name=tunable.name,
            shipped=shipped,
            best=best,
            num_candidates=len(candidates),
            trials=tuple(trials),
            skipped=skipped,
        )

    if subject.obstacle is not None:
        return report(skipped=subject.obstacle)
    if not has_time():
        return report(skipped="the time was over")
    try:
        runs = [problem(device) for problem in subject.timed]
        with tunable.using(shipped, device):
            baselines = [sampler(run) for run in runs]
    except Exception as error:  # of the compiler, the driver or the allocator, each with classes of its own
        return report(skipped=f"the shipped configuration does not run: {_first_line(error)}")
    trials: list[Trial] = []
    best, best_ratio = shipped, 1 - _MARGIN
    for candidate in candidates:
        if not has_time():
            break
        trial = _try(subject, device, candidate, runs, baselines, sampler, best_ratio)
        trials.append(trial)
        if trial.verdict == "faster" and trial.ratio is not None:
            best, best_ratio = candidate, trial.ratio
    return report(trials, best) if trials else report(skipped="the time was over")


def _try(
    subject: "Subject",
    device: torch.device,
    candidate: Configuration,
    runs: "Sequence[Run]",
    baselines: Sequence[Sampler],
    sampler: "Callable[[Run], Sampler]",
    to_beat: float,
) -> Trial:
    """Return what comes of a candidate; bits are compared last, because that compiles the kernel several times."""
    try:
        with subject.tunable.using(candidate, device):
            samplers = [sampler(run) for run in runs]
        ratio = 0.0
        # What was fast by chance is not so again.
        for _ in range(2):
            ratios = [_ratio(*pair) for pair in zip(samplers, baselines, strict=True)]
            ratio = max(ratio, statistics.geometric_mean(ratios))
            if ratio >= to_beat or max(ratios) > 1 + _MARGIN:
                return Trial(configuration=candidate, verdict="no faster", ratio=ratio)
        same = same_bits(subject, candidate, device)
        return Trial(configuration=candidate, verdict="faster" if same else "other bits", ratio=ratio)
    except Exception as error:  # as above; too little shared memory, above all
        return Trial(configuration=candidate, verdict="does not run", error=_first_line(error))


def _ratio(candidate: Sampler, baseline: Sampler) -> float:
    """Return a candidate's time in parts of the baseline's: medians of samples in turn, as a GPU's clock drifts."""
    samples = [(candidate(), baseline()) for _ in range(_SAMPLES)]
    return statistics.median(x for x, _ in samples) / statistics.median(y for _, y in samples)


def same_bits(subject: "Subject", candidate: Configuration, device: torch.device) -> bool:
    """Return whether a candidate's results are those of the shipped configuration, on every input there is."""
    # The timed ones are too large for the interpreter.
    problems = [*subject.compared, *(subject.timed if device.type == "cuda" else ())]
    for problem in problems:
        expected = _results(subject, subject.tunable.shipped(device), problem, device)
        found = _results(subject, candidate, problem, device)
        if not all(torch.equal(_bytes(x), _bytes(y)) for x, y in zip(found, expected, strict=True)):
            return False
    return True


def _results(
    subject: "Subject", configuration: Configuration, problem: "Problem", device: torch.device
) -> Sequence[Tensor]:
    run = problem(device)
    with subject.tunable.using(configuration, device):
        return run()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _graph_sampler(run: "Run") -> Sampler:
    """Return what times launches without the host's part in them: a captured graph of several."""
    run()  # compiles
    count = math.ceil(_SAMPLE_SECONDS / _device_seconds(run))
    count = max(1, min(count, _MOST_LAUNCHES))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for _ in range(count):
            run()
    graph.replay()
    return lambda: _device_seconds(graph.replay) / count


def _device_seconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return max(milliseconds, 1e-6) / 1e3


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
