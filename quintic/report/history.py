"""Reads the metrics log of a run, `metrics.jsonl`, which has one JSON object per line.

Every record has a ``kind``: run, train, eval, core, sample, resume, rollback or final. ``docs/reference/metrics.md``
lists their fields and says what these mean.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from quintic.errors import ConfigError, DataError
from quintic.report.formatting import flatten

__all__ = ["METRICS_FILE", "SOURCE_FILE", "RunHistory", "read_metrics"]

METRICS_FILE = "metrics.jsonl"
"""The name of the log in a run's folder."""
SOURCE_FILE = "source.json"
"""The name of the file that describes the source code of a run; a .diff may accompany it."""

_SETTINGS = ("config", "machine", "versions", "git", "model", "data")
# Facts of a machine that do not matter for the result.
_MEASURED_FACTS = ("memory_gb", "matrix_flops_per_second")

_STEPPED_KINDS = ("train", "eval", "core", "sample", "resume", "rollback")
# JSON's types of the fields that a run writes: (type, type of its entries, in words, names). None stands for a missing
# value of any type, and for a missing number in an object or a list.
_NUMBER = (int, float)
_FIELDS = (
    (str, object, "a text", "kind name time command repeat code on_spike source key"),
    (
        _NUMBER,
        object,
        "a number",
        "step total_steps steps_before spike_step least_bpb_step epoch stage ranks tokens seconds loss bpb "
        "bpb_stderr core core_stderr lr_multiplier momentum weight_decay tokens_per_second smoothed_loss least_loss "
        "least_bpb flops mfu peak_memory_bytes grad_norm spike first_step_extra_seconds compile_seconds "
        "warmup_seconds parameters parameters_blocks parameters_head flops_per_token matrix_flops_per_second "
        "val_documents val_bytes",
    ),
    (
        dict,
        (*_NUMBER, type(None)),
        "an object of numbers",
        "lr times_ms grad_rms update_rms baselines breakdown centred accuracy epochs",
    ),
    (dict, object, "an object", "config machine versions git model data track"),
    (list, (*_NUMBER, type(None)), "a list of numbers", "document_nats document_bytes"),
    (list, str, "a list of texts", "missing"),
    (list, dict, "a list of objects", "samples"),
)
# No run writes larger numbers. Where a person does, their squares and sums would not be finite.
_LARGEST = 1e100

_step = itemgetter("step")
_TYPES = {name: (types, inner, words) for types, inner, words, names in _FIELDS for name in names.split()}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics log, oldest first; a run may still be writing it.

    Args:
        path: the file. An incomplete last line, left by a crash or a run that is writing, is ignored.

    Returns:
        The records; a number that was not finite, or is beyond 1e100, is ``None``.

    Raises:
        ConfigError: the file does not exist.
        DataError: a line before the last one is not a JSON object, or a field of a record has the wrong type.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} holds no {path.name}, from which reports are made: give the folder that a training run "
            f"wrote to; of a run whose log is lost, `quintic sample`, `eval` and `export` still work, and "
            f"`quintic train --resume --run {path.parent.name}` begins a new log"
        )
    lines = path.read_bytes().rstrip().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(
                line,
                parse_constant=lambda _: None,
                parse_float=lambda text: _measured(float(text)),
                parse_int=lambda text: _measured(int(text)),
            )
            wrong = _wrong_in(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            wrong = f"not valid JSON ({error})"
        if wrong:
            raise DataError(f"{path}, line {number}: {wrong}; remove the line or restore the file")
        records.append(record)
    return records


def _measured(number: float) -> float | None:
    return number if abs(number) <= _LARGEST else None


def _wrong_in(record: Any) -> str | None:
    """Describe the first mistake in a line of the log, such as `"loss" is not a number`; None if it is right."""
    if not isinstance(record, dict):
        return "not a JSON object"
    if record.get("kind") in _STEPPED_KINDS and record.get("step") is None:
        return 'it has no "step"'
    # Fields of these objects are in the table, too.
    described = [record[name] for name in ("machine", "model", "data") if isinstance(record.get(name), dict)]
    for name, value in itertools.chain(*(fields.items() for fields in [record, *described])):
        types, inner, words = _TYPES.get(name, (object, object, ""))
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        is_right = isinstance(value, types) and all(isinstance(entry, inner) for entry in entries)
        if value is not None and not is_right:
            return f'"{name}" is not {words}'
    return None


class RunHistory:
    """The records of one run by kind, one record per step, in the order of the steps.

    Attributes:
        run: the ``run`` record; settings that the log lacks are empty.
        train: the ``train`` records.
        evals: the evaluations on the validation text, including the ``final`` record if its step is later.
        core: the results of the tasks of CORE.
        samples: the records with samples, the newest last.
        final: the ``final`` record; empty while the run is unfinished.
        resumed: the ``resume`` records.
        lengthened: the ``resume`` records that made the run longer. Their step is the last one with the schedules of
            the former length; it is earlier than the record's own step if a later resume went further back.
        spikes: the ``train`` records of steps whose loss jumped, including steps that a rollback repeated.
        options: the options of the run: section.name -> value.
        seed: the seed of the run; None if the log does not have it.
        text: identifies the text and its tokenizer: the key of prepared text, or the source of a speedrun's shards.
        validated_on: identifies the validation text, for every tokenizer; None if the log does not have it. The counts
            distinguish fractions of one source; a speedrun has none, since it divides its shards in another way.
        ranks: number of processes that trained the run.
        total_steps: number of steps of the whole run, the newest if it was made longer; None if the log has none.
        steps: number of steps made so far, including steps after the last evaluation.
        scored: the evaluations with a finite loss.
        newest_score: the last evaluation; empty without any.
        times: the milliseconds of each phase, of the steps that were timed.
        peak_memory_gib: the most memory in GiB, of steps, evaluations and the whole run; None if the log has none.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        kinds = defaultdict[str | None, list[dict[str, Any]]](list)
        for record in records:
            kinds[record.get("kind")].append(record)
        run = kinds["run"][-1] if kinds["run"] else {}
        self.run: dict[str, Any] = {name: {} for name in _SETTINGS}
        self.run |= {name: value for name, value in run.items() if value is not None}
        self.options = dict(flatten(self.run["config"]))
        self.seed = self.options.get("run.seed", self.options.get("seed"))
        data = self.run["data"]
        self.text: str | None = data.get("key") or data.get("source")
        val_source = str(self.options.get("data.val_data") or data.get("source"))
        self.validated_on = (val_source, data.get("val_documents"), data.get("val_bytes")) if data else None
        self.ranks: int = self.run.get("ranks") or 1
        self.train, self.evals, self.core = (_by_step(kinds[kind]) for kind in ("train", "eval", "core"))
        self.final = kinds["final"][-1] if kinds["final"] else {}
        # A final evaluation without an `eval` record: `final` has no tokens, except in a speedrun.
        if self.final.get("loss") is not None and (self.final.get("step") or 0) > max([0, *map(_step, self.evals)]):
            self.evals.append({"tokens": self.train[-1].get("tokens") if self.train else None, **self.final})
        self.samples = [record for record in [*_by_step(kinds["sample"]), self.final] if record.get("samples")]
        self.spikes = [record for record in kinds["train"] if "spike" in record]
        self.resumed = kinds["resume"]
        self.lengthened = [
            {**record, "step": min(map(_step, self.resumed[number:]))}
            for number, record in enumerate(self.resumed)
            if record.get("total_steps")
        ]
        self.total_steps = (self.lengthened[-1] if self.lengthened else self.run).get("total_steps")
        self.steps = max(map(_step, [*self.train, *self.evals]), default=0)
        self.scored = [record for record in self.evals if record.get("loss") is not None]
        self.newest_score = self.evals[-1] if self.evals else {}
        self.times = [record["times_ms"] for record in self.train if record.get("times_ms")]
        peaks = [record.get("peak_memory_bytes") for record in (*self.train, *self.evals, self.final)]
        self.peak_memory_gib = max((peak / 2**30 for peak in peaks if peak), default=None)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the history in a run folder's log.

        Raises:
            ConfigError: the folder holds no log, or a log without any step.
            DataError: the log is damaged.
        """
        path = Path(folder) / METRICS_FILE
        history = cls(read_metrics(path))
        if not (history.train or history.evals):
            raise ConfigError(
                f"{path} has no training step yet: wait for the first one, or continue the run if it was stopped, with "
                f"`quintic train --resume --run {path.parent.name}`"
            )
        return history

    @property
    def changes(self) -> list[tuple[int, dict[str, tuple[Any, Any]]]]:
        """Each resumption with other threads, ranks or device: its step, and field -> (value before, value after).

        Such a run is not the one that its settings describe: other numbers of threads round a little differently.
        """
        before = {**self.run["machine"], "ranks": self.ranks}
        found = []
        for record in self.resumed:
            now = {**before, **(record.get("machine") or {}), "ranks": record.get("ranks") or before["ranks"]}
            names = [name for name in before if before[name] != now[name] and name not in _MEASURED_FACTS]
            if names:
                found.append((_step(record), {name: (before[name], now[name]) for name in names}))
            before = now
        return found

    @property
    def repeat(self) -> str | None:
        """The commands that repeat the run, with torchrun for several ranks; None if the log has none."""
        if not self.run.get("repeat"):
            return None
        commands = [self.run["repeat"]]
        for record in self.lengthened:
            start = "" if record["step"] == record.get("steps_before") else f" --resume-step {record['step']}"
            commands.append(f"quintic train --resume --steps {record['total_steps']}{start}")
        launcher = "" if self.ranks == 1 else f"torchrun --standalone --nproc-per-node={self.ranks} -m "
        return " && ".join(launcher + command for command in commands)

    def newest(self, field: str) -> float | None:
        """Return a number from the final record, or else from the last training step; None if neither has it."""
        records = (self.final, *self.train[-1:])
        return next((record[field] for record in records if record.get(field) is not None), None)


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record for each step, the last one written, in the order of the steps."""
    return sorted({_step(record): record for record in records}.values(), key=_step)
