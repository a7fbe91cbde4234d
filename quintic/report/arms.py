"""`Arm`: the runs under one name in a comparison, and whether and in which unit two arms can be compared.

`load_arm` reads the runs of a name, checks that they differ only in their seeds, and takes their medians. `unit_of`
decides between bits per byte and nats per token, and `unequal_speed` whether times can be compared. `final_difference`
says by how much two arms differ at the end, and how sure that is. `comparison` has the other numbers and the page.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from quintic.errors import ConfigError
from quintic.report.history import METRICS_FILE, RunHistory

__all__ = ["Arm", "final_difference", "load_arm", "median", "texts_of", "tokens_differ", "unequal_speed", "unit_of"]

# Options in which the runs of one name may differ in addition to the seed: folder, observation, and device of a run.
_FREE_AMONG_SEEDS = frozenset(
    {"run", "runs_dir", "seed", "data", "data_dir", "verify", "device", "threads", "eval_every", "core",
     "core_every", "core_items", "sample_every", "sample_tokens", "prompts", "save_every", "keep", "rms_every",
     "tensorboard", "wandb"}
)  # fmt: skip

# Stands for a setting that a log lacks.
_MISSING = "–"

# Forward and backward passes of the same model differ by less than this on a machine that does nothing else.
_MOST_UNEQUAL = 1.5


class Arm(NamedTuple):
    """One run, or several runs that differ in their seeds; each has a finite evaluation."""

    name: str
    histories: Sequence[RunHistory]
    # The `_medians` of each step at which all runs were evaluated, and of their last finite evaluations.
    course: Sequence[Mapping[str, Any]]
    end: Mapping[str, Any]

    @property
    def is_stopped(self) -> bool:
        """Whether a run has made fewer steps than it should."""
        return any(history.steps < (history.total_steps or 0) for history in self.histories)

    @property
    def last(self) -> str:
        """The word for its last loss."""
        return "last" if self.is_stopped else "final"


def load_arm(name: str, folders: Sequence[Path], *, errors: bool) -> Arm:
    """Return the runs of one name; with `errors`, a single run has its standard errors.

    Raises:
        ConfigError: a run has no finite validation loss, or the runs differ in more than their seeds, have equal seeds,
            or were never evaluated at the same step.
        DataError: a log is damaged.
    """
    runs = [(folder, RunHistory.load(folder)) for folder in folders]
    for folder, history in runs:
        if not history.scored:
            raise ConfigError(
                f"{folder / METRICS_FILE} ({name}) has no finite validation loss: let the run evaluate once"
            )
    histories = [history for _, history in runs]
    # Step -> evaluation, for each run.
    by_step = [{point["step"]: point for point in history.scored} for history in histories]
    steps = set(by_step[0]).intersection(*by_step[1:])
    if not steps:
        raise ConfigError(f"{name}: its runs were never evaluated at the same step: give them the same --eval-every")
    whose = f"{name}={','.join(folder.name for folder in folders)}: a median is that of runs"
    advice = "give each a name of its own (--runs A B), or leave some out"
    texts = texts_of([_fixed_settings(history) for history in histories])
    # A log may lack an option, which another version of quintic has.
    known = {key: dict.fromkeys(value for value in values if value != _MISSING) for key, values in texts.items()}
    if differing := "; ".join(f"{key} ({', '.join(values)})" for key, values in known.items() if len(values) > 1):
        raise ConfigError(f"{whose} which differ in their seeds only, and these differ in {differing}: {advice}")
    for seed in {history.seed for history in histories} - {None}:
        same = [folder.name for folder, history in runs if history.seed == seed]
        if len(same) > 1:
            raise ConfigError(
                f"{whose} with different seeds, and {' and '.join(same)} have the same (seed {seed}): {advice}"
            )
    course = [_medians([points[step] for points in by_step], errors=errors) for step in sorted(steps)]
    return Arm(name, histories, course, _medians([history.scored[-1] for history in histories], errors=errors))


def _fixed_settings(history: RunHistory) -> dict[str, Any]:
    """Return the settings of a run in which another seed of it may not differ."""
    settings = {key: value for key, value in history.options.items() if key.split(".")[-1] not in _FREE_AMONG_SEEDS}
    settings |= {key: value for key, value in history.run["machine"].items() if key in ("dtype", "fp8")}
    return settings | {"length": history.total_steps or _MISSING, "text and tokenizer": history.text or _MISSING}


def _medians(runs: Sequence[Mapping[str, Any]], *, errors: bool) -> dict[str, Any]:
    """Return the median of each field of one evaluation of each run.

    Several runs also have ranges, with ``_range`` appended to a field; a single one has, with `errors`, the standard
    error of bits per byte.
    """
    fields = ("step", "tokens", "seconds", "loss", "bpb")
    values: dict[str, list[Any]] = {field: [run.get(field) for run in runs] for field in fields}
    medians: dict[str, Any] = {field: median(numbers) for field, numbers in values.items()}
    if len(runs) == 1:
        return medians | {"bpb_stderr": runs[0].get("bpb_stderr") if errors else None}
    known = {field: numbers for field, numbers in values.items() if None not in numbers}
    return medians | {f"{field}_range": (min(numbers), max(numbers)) for field, numbers in known.items()}


def texts_of(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the value of each setting in all mappings as text, a dash if missing."""
    return {key: [str(one.get(key, _MISSING)) for one in settings] for key in dict.fromkeys(chain(*settings))}


def median(values: Iterable[float | None]) -> float | None:
    """Return the median; None if a value is None or the median is infinite."""
    known = list(values)
    middle = math.inf if None in known else statistics.median(value for value in known if value is not None)
    return middle if math.isfinite(middle) else None


def unit_of(baseline: Arm, arm: Arm) -> tuple[str, str]:
    """Return the field in which two arms are compared, "bpb" or "loss", and the reason if they cannot be compared."""
    histories = [*baseline.histories, *arm.histories]
    texts = {history.validated_on for history in histories} - {None}
    if tokens_differ([baseline, arm]) and len(texts) > 1:
        advice = "`quintic eval --data FILE` scores each run on one text"
        return "", f"they were validated on different texts, and so their losses cannot be compared; {advice}"
    if all(point.get("bpb") is not None for history in histories for point in history.scored):
        return "bpb", ""
    if tokens_differ([baseline, arm]):
        return "", "their tokenizers differ and a log lacks bits per byte, and so their losses cannot be compared"
    return "loss", ""


def unequal_speed(runs: Sequence[RunHistory]) -> float | None:
    """Return how many times as long the slowest run's forward and backward passes took as the fastest one's.

    The passes do not depend on the optimizer. If the same model needs much longer for them, something else slowed it,
    such as other programs, and the runs' times cannot be compared.

    Returns:
        The ratio if it is above 1.5; None if it is less, the models differ, or the passes were not timed.
    """
    if len({history.run["model"].get("flops_per_token") for history in runs}) > 1:
        return None
    seconds = []
    for history in runs:
        passes = [time for times in history.times if (time := times.get("forward_backward")) is not None]
        tokens = history.train[-1].get("tokens") if history.train else None
        if not passes or not tokens:
            return None
        # The first step of a compiled run takes long for another reason.
        seconds.append(statistics.mean(passes[1:] or passes) * history.train[-1]["step"] / tokens)
    ratio = max(seconds) / min(seconds) if min(seconds) > 0 else 1.0
    return ratio if ratio > _MOST_UNEQUAL else None


def final_difference(baseline: Arm, arm: Arm) -> tuple[str | None, float | None]:
    """Return in words by how much two arms' final bits per byte differ, and the standard error of that.

    Two single runs are compared document by document: they were scored on the same text, and so most of the error that
    each has does not count for their difference. Several runs are paired by their seeds.

    Returns:
        The words, None without bits per byte; and the error, None if the logs do not tell it: the words then say why.
    """
    if len(baseline.histories) == len(arm.histories) == 1:
        pairs = _document_differences(baseline.histories[0], arm.histories[0])
        over = "over the documents, which both were scored on"
        lacking = "it takes the bits of two documents or more, the same in both logs"
    else:
        pairs = _seed_differences(baseline, arm)
        over = f"over {len(arm.histories)} seeds"
        lacking = "it takes two runs or more of each, with the same seeds"
    if len(pairs) > 1:
        # The ratio of two sums, and the standard error of such a ratio, as in `quintic.eval.score`.
        total = sum(size for _, size in pairs)
        difference = sum(bits for bits, _ in pairs) / total
        scatter = sum((bits - difference * size) ** 2 for bits, size in pairs)
        error = math.sqrt(len(pairs) / (len(pairs) - 1) * scatter) / total
        sure = f", ± {error:.4f} {over}"
    else:
        start, end = baseline.end["bpb"], arm.end["bpb"]
        if start is None or end is None:
            return None, None
        difference, error = end - start, None
        sure = f"; how sure that is, is not known: {lacking}"
    side = "below" if difference < 0 else "above"
    verb = "is so far" if baseline.is_stopped or arm.is_stopped else "ended"
    return f"{arm.name} {verb} {abs(difference):.4f} bits per byte {side} {baseline.name}{sure}", error


def _seed_differences(baseline: Arm, arm: Arm) -> list[tuple[float, int]]:
    """Return (difference in bits per byte, 1) of the runs with each seed; nothing if the arms' seeds differ."""
    # Seed -> final bits per byte, for each arm.
    ends: list[dict[Any, Any]] = [{h.seed: h.evals[-1].get("bpb") for h in one.histories} for one in (baseline, arm)]
    first, other = ends
    if first.keys() != other.keys() or None in [*first, *first.values(), *other.values()]:
        return []
    return [(other[seed] - first[seed], 1) for seed in first]


def _document_differences(first: RunHistory, other: RunHistory) -> list[tuple[float, int]]:
    """Return (difference in bits, bytes) of each document; nothing if the last evaluations did not read the same."""
    # Nats of each document in both runs, and their bytes.
    nats, sizes = ([h.evals[-1].get(f"document_{what}") or [] for h in (first, other)] for what in ("nats", "bytes"))
    is_same = sizes[0] == sizes[1] and len(nats[0]) == len(nats[1]) == len(sizes[0])
    if not is_same or None in chain(*nats) or not all(sizes[0]):
        return []
    return [((b - a) / math.log(2), size) for a, b, size in zip(*nats, sizes[0], strict=True)]


def tokens_differ(arms: Sequence[Arm]) -> bool:
    """Return whether the runs' tokens or texts differ, so that nats per token cannot be compared."""
    return len({history.text for arm in arms for history in arm.histories} - {None}) > 1
