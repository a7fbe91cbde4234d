"""The runs under one name in a comparison, and whether and in what unit two of them can be compared.

Here: `load_arm` reads the runs that one label stands for and checks that they differ in their seeds only; `unit_of`
decides between bits per byte and nats per token. Not here: the figures and the page (`comparison`).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintic.errors import ConfigError
from quintic.report.formatting import finite, flatten
from quintic.report.history import METRICS_FILE, RunHistory

__all__ = ["Arm", "Point", "load_arm", "median", "tokenizers_differ", "unit_of"]

# Options that may differ besides the seed where medians are taken: where a run is kept, how it is watched, the device.
_FREE_AMONG_SEEDS = frozenset(
    {"run", "runs_dir", "seed", "data", "data_dir", "verify", "device", "threads", "eval_every", "core",
     "core_every", "core_items", "sample_every", "sample_tokens", "prompts", "save_every", "keep", "rms_every",
     "tensorboard", "wandb"}
)  # fmt: skip


# An evaluation with a finite loss; other fields of `_FIELDS` are None where the log has no finite number.
Point = Mapping[str, Any]
_FIELDS = ("step", "loss", "bpb", "bpb_stderr", "tokens", "seconds")


@dataclass(frozen=True, slots=True)
class Arm:
    """One run, or several that differ in their seeds, and the finite evaluations of each."""

    name: str
    histories: Sequence[RunHistory]
    curves: Sequence[Sequence[Point]]

    def ends(self, field: str) -> list[float | None]:
        """A field of the last finite evaluation of each run."""
        return [points[-1][field] for points in self.curves]

    def steps(self) -> list[float | None]:
        """The number of steps that each run has made, also those since its last evaluation."""
        return [history.steps for history in self.histories]

    def shared(self) -> list[list[Point]]:
        """The points of all runs, for each step at which all were evaluated."""
        by_step = [{point["step"]: point for point in points} for points in self.curves]
        steps = set(by_step[0]).intersection(*by_step[1:])
        return [[points[step] for points in by_step] for step in sorted(steps)]


def load_arm(name: str, folders: Sequence[str | Path]) -> Arm:
    """Read the runs of one name.

    Raises:
        ConfigError: a run has no finite validation loss, or the runs differ in more than their seeds, have one seed, or
            were never evaluated at the same step.
        DataError: a log is damaged.
    """
    histories = [RunHistory.load(folder) for folder in folders]
    curves = [
        [{field: finite(r.get(field)) for field in _FIELDS} for r in history.evals if finite(r.get("loss")) is not None]
        for history in histories
    ]
    for folder, points in zip(folders, curves, strict=True):
        if not points:
            raise ConfigError(
                f"{Path(folder) / METRICS_FILE} ({name}) has no finite validation loss: let the run evaluate once"
            )
    _check_seeds(name, [Path(folder).name for folder in folders], histories)
    arm = Arm(name, histories, curves)
    if not arm.shared():
        raise ConfigError(f"{name}: its runs were never evaluated at the same step: give them the same --eval-every")
    return arm


def _check_seeds(name: str, runs: Sequence[str], histories: Sequence[RunHistory]) -> None:
    """Check that the runs of one name differ in their seeds, and in nothing else that changes what they learn."""
    options_of_runs = [dict(flatten(history.run.get("config") or {})) for history in histories]

    def settings(history: RunHistory, options: Mapping[str, Any]) -> dict[str, str]:
        kept = {key: str(value) for key, value in options.items() if key.split(".")[-1] not in _FREE_AMONG_SEEDS}
        machine = history.run.get("machine") or {}
        kept |= {name: str(machine[name]) for name in ("dtype", "fp8") if name in machine}
        kept |= {"length": str(history.total_steps)} if history.lengthened else {}
        text = _text_of(history)
        return kept if text is None else kept | {"text and tokenizer": text}

    of_runs = list(map(settings, histories, options_of_runs))
    differences = []
    for key in dict.fromkeys(key for entries in of_runs for key in entries):
        values = dict.fromkeys(entries[key] for entries in of_runs if key in entries)
        if len(values) > 1:
            differences.append(f"{key} ({', '.join(values)})")
    advice = "give each a name of its own (--runs A B), or leave some out"
    if differences:
        raise ConfigError(
            f"{name}={','.join(runs)}: a median is that of runs which differ in their seeds only, and these differ in "
            f"{'; '.join(differences)}: {advice}"
        )
    of_seeds: dict[Any, list[str]] = {}
    for run, options in zip(runs, options_of_runs, strict=True):
        seed = next((value for key, value in options.items() if key.split(".")[-1] == "seed"), None)
        of_seeds.setdefault(seed, []).append(run)
    for seed, same in of_seeds.items():
        if seed is not None and len(same) > 1:
            raise ConfigError(
                f"{name}={','.join(runs)}: a median is that of runs with different seeds, and {' and '.join(same)} "
                f"have the same (seed {seed}): {advice}"
            )


def median(values: Iterable[float | None], missing: float | None = None) -> float | None:
    """The median with ``missing`` in place of None; None where one is missing still, or the median is not finite."""
    known = [missing if value is None else value for value in values]
    if None in known:
        return None
    middle = statistics.median(value for value in known if value is not None)
    return middle if math.isfinite(middle) else None


def unit_of(baseline: Arm, arm: Arm) -> tuple[str, str]:
    """The field in which two losses are compared, "bpb" or "loss"; else, as the second text, why they cannot be."""
    texts = {_validated_on(history) for one in (baseline, arm) for history in one.histories} - {None}
    if tokenizers_differ([baseline, arm]) and len(texts) > 1:
        advice = "`quintic eval --data FILE` scores each run on one text"
        return "", f"they were validated on different texts, and so their losses cannot be compared; {advice}"
    if all(point["bpb"] is not None for one in (baseline, arm) for points in one.curves for point in points):
        return "bpb", ""
    if tokenizers_differ([baseline, arm]):
        return "", "their tokenizers differ and a log lacks bits per byte, and so their losses cannot be compared"
    return "loss", ""


def _text_of(history: RunHistory) -> str | None:
    """What tells a run's text and tokenizer from others: the key of prepared text, else the source of its shards."""
    data = history.run.get("data") or {}
    return data.get("key") or data.get("source")


def _validated_on(history: RunHistory) -> tuple[Any, ...] | None:
    """What tells a run's validation text from others, whatever the tokenizer; None where the log says nothing.

    The counts tell different shares of one source apart. A speedrun has none: its shards are cut in another way.
    """
    data = history.run.get("data") or {}
    options = (history.run.get("config") or {}).get("data")
    source = (options.get("val_data") if isinstance(options, Mapping) else None) or data.get("source")
    return (source, data.get("val_documents"), data.get("val_bytes")) if data else None


def tokenizers_differ(arms: Sequence[Arm]) -> bool:
    """Whether the runs' tokens differ, or are of different texts: nats per token say nothing then."""
    return len({_text_of(history) for arm in arms for history in arm.histories} - {None}) > 1
