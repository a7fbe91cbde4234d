"""`Arm`: the runs under one name in a comparison, and the unit in which two arms can be compared.

`load_arm` reads the runs of a name and checks that they differ only in their seeds. `unit_of` decides between bits per
byte and nats per token, and `unequal_speed` whether times can be compared. `final_difference` says by how much two arms
differ at the end, and how sure that is. The other numbers and the page of a comparison are in `comparison`.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quintic.errors import ConfigError
from quintic.report.history import METRICS_FILE, RunHistory

__all__ = ["Arm", "final_difference", "load_arm", "median", "tokenizers_differ", "unequal_speed", "unit_of"]

# Options in which the runs of one name may differ in addition to the seed: folder, observation, and device of a run.
_FREE_AMONG_SEEDS = frozenset(
    {"run", "runs_dir", "seed", "data", "data_dir", "verify", "device", "threads", "eval_every", "core",
     "core_every", "core_items", "sample_every", "sample_tokens", "prompts", "save_every", "keep", "rms_every",
     "tensorboard", "wandb"}
)  # fmt: skip

# Forward and backward passes of the same model differ by less than this on a machine that does nothing else.
_MOST_UNEQUAL = 1.5


class Arm(NamedTuple):
    """One run, or several runs that differ in their seeds; each has a finite evaluation."""

    name: str
    histories: Sequence[RunHistory]

    @property
    def is_stopped(self) -> bool:
        """Whether a run has made fewer steps than it should."""
        return any(history.steps < (history.total_steps or 0) for history in self.histories)

    @property
    def last(self) -> str:
        """The word for its last loss."""
        return "last" if self.is_stopped else "final"

    def ends(self, field: str) -> list[float | None]:
        """Return a field of the last finite evaluation of each run."""
        return [history.scored[-1].get(field) for history in self.histories]

    def shared(self) -> list[list[Mapping[str, Any]]]:
        """Return the finite evaluations of all runs, for each step at which all of them were evaluated."""
        # step -> evaluation, for each run.
        by_step = [{point["step"]: point for point in history.scored} for history in self.histories]
        steps = set(by_step[0]).intersection(*by_step[1:])
        return [[points[step] for points in by_step] for step in sorted(steps)]


def load_arm(name: str, folders: Sequence[str | Path]) -> Arm:
    """Return the runs of one name.

    Raises:
        ConfigError: a run has no finite validation loss, or the runs differ in more than their seeds, have equal seeds,
            or were never evaluated at the same step.
        DataError: a log is damaged.
    """
    histories = [RunHistory.load(folder) for folder in folders]
    for folder, history in zip(folders, histories, strict=True):
        if not history.scored:
            raise ConfigError(
                f"{Path(folder) / METRICS_FILE} ({name}) has no finite validation loss: let the run evaluate once"
            )
    _check_seeds(name, [Path(folder).name for folder in folders], histories)
    arm = Arm(name, histories)
    if not arm.shared():
        raise ConfigError(f"{name}: its runs were never evaluated at the same step: give them the same --eval-every")
    return arm


def _check_seeds(name: str, runs: Sequence[str], histories: Sequence[RunHistory]) -> None:
    """Raise ConfigError unless the runs of one name differ in their seeds, and in no other setting that matters."""
    whose, advice = f"{name}={','.join(runs)}", "give each a name of its own (--runs A B), or leave some out"
    # Setting -> values of the runs that have it.
    values: dict[str, dict[str, None]] = {}
    for history in histories:
        settings = {key: value for key, value in history.options.items() if key.split(".")[-1] not in _FREE_AMONG_SEEDS}
        settings |= {key: value for key, value in history.run["machine"].items() if key in ("dtype", "fp8")}
        if history.lengthened:
            settings["length"] = history.total_steps
        if _text_of(history) is not None:
            settings["text and tokenizer"] = _text_of(history)
        for key, value in settings.items():
            values.setdefault(key, {})[str(value)] = None
    values = {key: of_runs for key, of_runs in values.items() if len(of_runs) > 1}
    if values:
        differences = "; ".join(f"{key} ({', '.join(of_runs)})" for key, of_runs in values.items())
        raise ConfigError(
            f"{whose}: a median is that of runs which differ in their seeds only, and these differ in {differences}: "
            f"{advice}"
        )
    for seed in {history.seed for history in histories} - {None}:
        same = [run for run, history in zip(runs, histories, strict=True) if history.seed == seed]
        if len(same) > 1:
            raise ConfigError(
                f"{whose}: a median is that of runs with different seeds, and {' and '.join(same)} have the same "
                f"(seed {seed}): {advice}"
            )


def median(values: Iterable[float | None], missing: float | None = None) -> float | None:
    """Return the median, with None replaced by ``missing``; None if a value is still None or the median is infinite."""
    known = [missing if value is None else value for value in values]
    if None in known:
        return None
    middle = statistics.median(value for value in known if value is not None)
    return middle if math.isfinite(middle) else None


def unit_of(baseline: Arm, arm: Arm) -> tuple[str, str]:
    """Return the field in which two arms are compared, "bpb" or "loss", and the reason if they cannot be compared."""
    histories = [*baseline.histories, *arm.histories]
    texts = {_validated_on(history) for history in histories} - {None}
    if tokenizers_differ([baseline, arm]) and len(texts) > 1:
        advice = "`quintic eval --data FILE` scores each run on one text"
        return "", f"they were validated on different texts, and so their losses cannot be compared; {advice}"
    if all(point.get("bpb") is not None for history in histories for point in history.scored):
        return "bpb", ""
    if tokenizers_differ([baseline, arm]):
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
    found: tuple[float, float | None] | None
    if len(baseline.histories) == len(arm.histories) == 1:
        found = _document_difference(baseline.histories[0], arm.histories[0])
        over = "over the documents, which both were scored on"
        lacking = "it takes the bits of two documents or more, the same in both logs"
    else:
        found = _seed_difference(baseline, arm)
        over = f"over {len(arm.histories)} seeds"
        lacking = "it takes two runs or more of each, with the same seeds"
    ends = [median(one.ends("bpb")) for one in (baseline, arm)]
    if found is None and ends[0] is not None and ends[1] is not None:
        found = ends[1] - ends[0], None
    if found is None:
        return None, None
    difference, error = found
    side = "below" if difference < 0 else "above"
    sure = f"; how sure that is, is not known: {lacking}" if error is None else f", ± {error:.4f} {over}"
    verb = "is so far" if baseline.is_stopped or arm.is_stopped else "ended"
    return f"{arm.name} {verb} {abs(difference):.4f} bits per byte {side} {baseline.name}{sure}", error


def _seed_difference(baseline: Arm, arm: Arm) -> tuple[float, float] | None:
    """Return the mean difference of runs with the same seed, and its standard error; None if their seeds differ."""
    # Seed -> final bits per byte, for each arm.
    ends: list[dict[Any, Any]] = [{h.seed: h.evals[-1].get("bpb") for h in one.histories} for one in (baseline, arm)]
    first, other = ends
    if first.keys() != other.keys() or len(first) < 2 or None in {*first, *first.values(), *other.values()}:
        return None
    differences = [other[seed] - first[seed] for seed in first]
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def _document_difference(first: RunHistory, other: RunHistory) -> tuple[float, float] | None:
    """Return the difference and its error of two runs whose last evaluations read the same documents; else None.

    The difference is the ratio of two sums over documents, of bits and of bytes, and its standard error that of such a
    ratio, as in `quintic.eval.score`.
    """
    ends = [history.evals[-1] for history in (first, other)]
    # Nats of each document in both runs, and their bytes.
    nats, num_bytes = ([end.get(f"document_{what}") or [] for end in ends] for what in ("nats", "bytes"))
    sizes = [size for size in num_bytes[0] if size]
    if num_bytes[0] != num_bytes[1] or not len(nats[0]) == len(nats[1]) == len(sizes) > 1:
        return None
    bits = [(b - a) / math.log(2) for a, b in zip(*nats, strict=True) if a is not None and b is not None]
    if len(bits) < len(sizes):
        return None
    ratio = sum(bits) / sum(sizes)
    scatter = sum((cost - ratio * size) ** 2 for cost, size in zip(bits, sizes, strict=True))
    error = math.sqrt(len(sizes) / (len(sizes) - 1) * scatter) / sum(sizes)
    return ratio, error


def tokenizers_differ(arms: Sequence[Arm]) -> bool:
    """Return whether the runs' tokens or texts differ, so that nats per token cannot be compared."""
    return len({_text_of(history) for arm in arms for history in arm.histories} - {None}) > 1


def _text_of(history: RunHistory) -> str | None:
    """Return an identity of a run's text and tokenizer: the key of prepared text, or else the source of its shards."""
    text: str | None = history.run["data"].get("key") or history.run["data"].get("source")
    return text


def _validated_on(history: RunHistory) -> tuple[Any, ...] | None:
    """Return an identity of a run's validation text, independent of the tokenizer; None if the log does not have it.

    The counts distinguish different fractions of one source. A speedrun has no counts, since its shards are divided
    differently.
    """
    data = history.run["data"]
    source = str(history.options.get("data.val_data") or data.get("source"))
    return (source, data.get("val_documents"), data.get("val_bytes")) if data else None
