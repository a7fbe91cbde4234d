"""Reads the metrics log of a run, `metrics.jsonl`, which has one JSON object per line.

Every record has a ``kind``: run, train, eval, core, sample, resume, rollback or final. ``docs/reference/metrics.md``
lists their fields and says what these mean.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# Objects whose fields are in the table, too.
_DESCRIPTIONS = ("machine", "model", "data")
# No run writes larger numbers. Where a person does, their squares and sums would not be finite.
_LARGEST = 1e100
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
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: give the folder of a run, which holds {path.name}") from error
    # `last` is the number of the last line with text, which may be incomplete.
    records: list[dict[str, Any]] = []
    last = len(lines) if lines[-1] else len(lines) - 1
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
        except (ValueError, RecursionError) as error:
            if number == last:
                break
            raise DataError(
                f"{path}, line {number}: not valid JSON ({error}); remove the line or restore the file"
            ) from error
        if (wrong := _wrong_in(record)) is not None:
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
    descriptions = [record[name] for name in _DESCRIPTIONS if isinstance(record.get(name), dict)]
    for name, value in itertools.chain(record.items(), *(fields.items() for fields in descriptions)):
        types, inner, words = _TYPES.get(name, (object, object, ""))
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        is_right = isinstance(value, types) and all(isinstance(entry, inner) for entry in entries)
        if value is not None and not is_right:
            return f'"{name}" is not {words}'
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """

    run: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    core: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    final: Mapping[str, Any]
    resumed: Sequence[Mapping[str, Any]]
    lengthened: Sequence[Mapping[str, Any]]
    spikes: Sequence[Mapping[str, Any]]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the history in a run folder's log.

        Raises:
            ConfigError: the folder holds no log, or a log without any step.
            DataError: the log is damaged.
        """
        path = Path(folder) / METRICS_FILE
        if not path.is_file():
            raise ConfigError(
                f"{folder} holds no {METRICS_FILE}, from which reports are made: give the folder that a training run "
                f"wrote to; of a run whose log is lost, `quintic sample`, `eval` and `export` still work, and "
                f"`quintic train --resume --run {Path(folder).name}` begins a new log"
            )
        kinds: dict[str, list[dict[str, Any]]] = {}
        for record in read_metrics(path):
            kinds.setdefault(str(record.get("kind")), []).append(record)
        run, final = kinds.get("run", [{}])[-1], kinds.get("final", [{}])[-1]
        train, evals = _by_step(kinds.get("train", [])), _by_step(kinds.get("eval", []))
        # A final evaluation without an `eval` record: `final` has no tokens, except in a speedrun.
        if final.get("loss") is not None and (final.get("step") or 0) > (evals[-1]["step"] if evals else 0):
            evals.append({"tokens": train[-1].get("tokens") if train else None, **final})
        if not (train or evals):
            raise ConfigError(
                f"{path} has no training step yet: wait for the first one, or continue the run if it was stopped, with "
                f"`quintic train --resume --run {Path(folder).name}`"
            )
        resumed = kinds.get("resume", [])
        sampled = [*_by_step(kinds.get("sample", [])), final]
        return cls(
            run={name: {} for name in _SETTINGS} | {name: value for name, value in run.items() if value is not None},
            train=train,
            evals=evals,
            core=_by_step(kinds.get("core", [])),
            samples=[record for record in sampled if record.get("samples")],
            final=final,
            resumed=resumed,
            lengthened=[
                {**record, "step": min(later["step"] for later in resumed[number:])}
                for number, record in enumerate(resumed)
                if record.get("total_steps")
            ],
            spikes=[record for record in kinds.get("train", []) if "spike" in record],
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run: section.name -> value."""
        return dict(flatten(self.run["config"]))

    @property
    def seed(self) -> int | None:
        """The seed of the run; None if the log does not have it."""
        seeds = [value for name, value in self.options.items() if name.split(".")[-1] == "seed"]
        return next((seed for seed in seeds if isinstance(seed, int)), None)

    @property
    def ranks(self) -> int:
        """Number of processes that trained the run."""
        return self.run.get("ranks") or 1

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
            changed = {name: (before[name], now[name]) for name in names}
            if changed:
                found.append((int(record["step"]), changed))
            before = now
        return found

    @property
    def repeat(self) -> str | None:
        """The commands that repeat the run, with torchrun for several ranks; None if the log has none."""
        command: str | None = self.run.get("repeat")
        if not command:
            return None
        commands = [command]
        for record in self.lengthened:
            start = "" if record["step"] == record.get("steps_before") else f" --resume-step {record['step']}"
            commands.append(f"quintic train --resume --steps {record['total_steps']}{start}")
        launcher = "" if self.ranks == 1 else f"torchrun --standalone --nproc-per-node={self.ranks} -m "
        return " && ".join(launcher + command for command in commands)

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run, the newest if it was made longer; None if the log has none."""
        return (self.lengthened[-1] if self.lengthened else self.run).get("total_steps")

    @property
    def steps(self) -> int:
        """Number of steps made so far, including steps after the last evaluation."""
        return max(int(records[-1]["step"]) for records in (self.train, self.evals) if records)

    @property
    def times(self) -> list[Mapping[str, float]]:
        """The milliseconds of each phase, of the steps that were timed."""
        return [record["times_ms"] for record in self.train if record.get("times_ms")]

    @property
    def newest_score(self) -> Mapping[str, Any]:
        """The last evaluation; empty without any."""
        return self.evals[-1] if self.evals else {}

    @property
    def scored(self) -> list[Mapping[str, Any]]:
        """The evaluations with a finite loss."""
        return [record for record in self.evals if record.get("loss") is not None]

    @property
    def least(self) -> Mapping[str, Any] | None:
        """The evaluation with the fewest bits per byte, the first of equal ones; None if no value is finite."""
        scored = [record for record in self.evals if record.get("bpb") is not None]
        return min(scored, key=lambda record: float(record["bpb"]), default=None)

    def largest(self, field: str) -> float | None:
        """Return the largest value of a number in records of steps, evaluations and the end; None without any."""
        records = (*self.train, *self.evals, self.final)
        return max((float(record[field]) for record in records if record.get(field) is not None), default=None)

    def newest(self, field: str) -> float | None:
        """Return a number from the final record, or else from the last training step; None if neither has it."""
        for record in (self.final, *self.train[-1:]):
            if record.get(field) is not None:
                return float(record[field])
        return None


def _by_step(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record for each step, the last one written, in the order of the steps."""
    steps = {int(record["step"]): record for record in records if "step" in record}
    return [steps[step] for step in sorted(steps)]
