"""The log of a run: `MetricsLog`, and trackers that show it in TensorBoard or Weights & Biases.

The file `metrics.jsonl` has one JSON object per line. `quintic.report.history` reads it back,
``docs/reference/metrics.md`` lists the kinds of records; `trainer.py` and `watch.py` measure the values.
"""

import importlib.util
import itertools
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.launch import install_command
from quintic.report.history import read_metrics
from quintic.train.config import RunConfig

__all__ = ["MetricsLog", "TensorBoardTracker", "WandbTracker", "check_trackers"]

_STEPPED_KINDS = ("train", "eval", "core", "sample")
_CODE = 4 * " "  # indents a code block in Markdown, which keeps spaces and line breaks


class MetricsLog:
    """Appends records to ``metrics.jsonl``; `write` flushes each to the operating system.

    A context manager. Only rank 0 writes a log.

    Args:
        path: the file; it and its folder are created if missing. An existing file is continued, and a last line that
            a crash left half-written is removed. None for a log that keeps nothing, for ranks other than 0.
        resume_step: the step of the checkpoint that the run continues from. Records of later steps, which will be
            repeated, and everything from a ``final`` record on are removed first, so that the log has each step once.
            The file is replaced in one move: after a crash, the old or the new file is there.
        trackers: get every record, ignore kinds that they cannot show, and are closed with the log.

    Raises:
        DataError: if an existing file is damaged before its last line.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resume_step: int | None = None,
        trackers: Sequence["TensorBoardTracker | WandbTracker"] = (),
    ) -> None:
        self._trackers = trackers
        self._file: TextIO | None = None  # stays None on ranks other than 0
        if path is None:
            return
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            records = read_metrics(path)  # without a half-written last line
            if resume_step is not None:
                # A resumed run writes its final record again, and everything that follows it.
                unfinished = itertools.takewhile(lambda r: r.get("kind") != "final", records)
                records = [r for r in unfinished if not _is_after(r, resume_step)]
            write_atomically(path, "".join(map(_encode, records)))
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one record and hand it to the trackers.

        Args:
            kind: the kind of the record (see ``docs/reference/metrics.md``).
            **fields: its fields: numbers, strings, ``None``, and mappings or sequences of them. Zero-dimensional arrays
                and tensors become numbers (waiting for the GPU if they are there), anything else becomes its ``str``.

        Returns:
            The record as written, with ``None`` in place of numbers that are not finite.
        """
        record: dict[str, Any] = _plain({"kind": kind, **fields})
        if self._file is not None:
            self._file.write(_encode(record))
            self._file.flush()
        for tracker in self._trackers:
            tracker.log(record)
        return record

    def close(self) -> None:
        """Close the file and the trackers; closing twice is fine."""
        if self._file is None or self._file.closed:
            return
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_after(record: Mapping[str, Any], resume_step: int) -> bool:
    """Return whether a run that continues from ``resume_step`` will write this record again."""
    if record.get("kind") == "rollback":  # its `step` is the one it went back to; the spike came later
        return bool(record.get("step", 0) >= resume_step)
    # A run that starts from 0 also repeats the evaluation at step 0.
    return record.get("kind") in _STEPPED_KINDS and (record.get("step", 0) > resume_step or resume_step == 0)


def _encode(record: Mapping[str, Any]) -> str:
    """Return a record, made of JSON's types, as one line of the log."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types (see `MetricsLog.write`)."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        # Lone surrogates, which stand for bytes that were not UTF-8, cannot be written to the file.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == ():  # zero-dimensional arrays and tensors of numpy and torch
        return _plain(value.item())
    return _plain(str(value))


class TensorBoardTracker:
    """Shows the numbers of train, eval and final records, and the samples, in TensorBoard.

    Args:
        folder: where TensorBoard's event files go; ``tensorboard --logdir`` reads it.
        resume_step: as in `MetricsLog`; points of later steps from before are hidden.
    """

    def __init__(self, folder: str | Path, *, resume_step: int | None = None) -> None:
        from torch.utils import tensorboard

        # `purge_step` hides points from this step on that an earlier process wrote.
        writer: Any = tensorboard.SummaryWriter
        self._writer = writer(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add the record's numbers as scalars named ``kind/field``, its samples and configuration as text."""
        kind, step = record["kind"], record.get("step")
        if kind == "run":
            settings = json.dumps(record.get("config", {}), indent=2, ensure_ascii=False)
            self._writer.add_text("config", textwrap.indent(settings, _CODE), 0)
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, step)
        for index, sample in enumerate(record.get("samples") or ()):
            text = f"{sample['prompt']}{sample['text']}"
            self._writer.add_text(f"sample/{index}", textwrap.indent(text, _CODE), step)
        if kind in ("eval", "final"):
            self._writer.flush()

    def close(self) -> None:
        """Write buffered points and close the event file."""
        self._writer.close()


class WandbTracker:
    """Sends the numbers of train, eval and final records, and the configuration, to Weights & Biases.

    Samples stay in the log: the service has no plain-text chart for them.

    Args:
        project: the project that the run appears under.
        name: the name of the run.
        folder: where the package keeps its own files.
        run_id: identifies the run; the same one again continues it after a resume.

    Raises:
        ConfigError: if the package ``wandb`` cannot start the run.
    """

    def __init__(self, project: str, *, name: str, folder: str | Path, run_id: str) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(project=project, name=name, dir=str(folder), id=run_id, resume="allow")
        except Exception as error:  # an account, the network or the project's name: the package says which
            raise ConfigError(
                f"--wandb {project}: {error}; log in, set WANDB_MODE=offline, or leave --wandb out"
            ) from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the record's numbers under ``kind/field``, or the configuration of a run record."""
        if record["kind"] == "run":
            details = {key: record[key] for key in ("config", "machine", "versions", "model") if key in record}
            self._run.config.update(details, allow_val_change=True)
        # Steps must not decrease there; `wandb_id` makes sure that a copied run does not continue the original's.
        scalars = dict(_scalars(record))
        if scalars:
            self._run.log(scalars, step=record.get("step"))

    def close(self) -> None:
        """Wait until everything is sent and end the run."""
        self._run.finish()


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a train, eval, core or final record as ``kind/field`` or ``kind/field/key``."""
    if record["kind"] in ("train", "eval", "core", "final"):
        # A field that is a mapping, such as the learning rates by group, becomes a chart for each key.
        for field, value in record.items():
            entries = value.items() if isinstance(value, Mapping) else [(None, value)]
            for key, number in entries:
                if field != "step" and isinstance(number, (int, float)) and not isinstance(number, bool):
                    yield f"{record['kind']}/{field}" + (f"/{key}" if key is not None else ""), number


def check_trackers(run: RunConfig) -> None:
    """Check that the packages of the requested trackers are installed, before anything is written.

    Raises:
        ConfigError: a package is missing.
    """
    for is_wanted, name in ((run.tensorboard, "tensorboard"), (run.wandb is not None, "wandb")):
        if is_wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--{name} needs the package {name}, which is not installed; run {install_command(name)}")
