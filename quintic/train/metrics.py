"""The log of a run: `MetricsLog`, and trackers that show it in TensorBoard or Weights & Biases.

The file `metrics.jsonl` has one JSON object per line. `quintic.report.history` reads it back,
``docs/reference/metrics.md`` lists the kinds of records; `trainer.py` and `watch.py` measure the values.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.launch import install_command
from quintic.report.history import read_metrics
from quintic.train.config import RunConfig

__all__ = ["MetricsLog", "Tracker", "check_trackers", "tensorboard_tracker", "wandb_tracker"]

Tracker = Callable[[Mapping[str, Any]], None]
"""Shows a record of the log elsewhere."""

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
        trackers: get every record, ignore kinds that they cannot show, and are entered and left with the log.

    Raises:
        DataError: if an existing file is damaged before its last line.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resume_step: int | None = None,
        trackers: Sequence[contextlib.AbstractContextManager[Tracker]] = (),
    ) -> None:
        self._opened = contextlib.ExitStack()
        self._trackers = [self._opened.enter_context(tracker) for tracker in trackers]
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
        self._file = self._opened.enter_context(path.open("a", encoding="utf-8", newline="\n"))

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
        for track in self._trackers:
            track(record)
        return record

    def close(self) -> None:
        """Close the file and the trackers; closing twice is fine."""
        self._opened.close()

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


@contextlib.contextmanager
def tensorboard_tracker(folder: Path, *, resume_step: int | None = None) -> Iterator[Tracker]:
    """Yield a tracker that shows the numbers and the samples in TensorBoard, by event files in `folder`.

    Points of steps after `resume_step` from an earlier process are hidden.
    """
    from torch.utils import tensorboard

    make: Any = tensorboard.SummaryWriter
    writer = make(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def track(record: Mapping[str, Any]) -> None:
        """Add the record's numbers as scalars named ``kind/field``, its samples and configuration as text."""
        kind, step = record["kind"], record.get("step")
        if kind == "run":
            settings = json.dumps(record.get("config", {}), indent=2, ensure_ascii=False)
            writer.add_text("config", textwrap.indent(settings, _CODE), 0)
        for name, value in _scalars(record):
            writer.add_scalar(name, value, step)
        for index, sample in enumerate(record.get("samples") or ()):
            text = f"{sample['prompt']}{sample['text']}"
            writer.add_text(f"sample/{index}", textwrap.indent(text, _CODE), step)
        if kind in ("eval", "final"):
            writer.flush()

    with contextlib.closing(writer):
        yield track


@contextlib.contextmanager
def wandb_tracker(project: str, *, folder: Path, run_id: str) -> Iterator[Tracker]:
    """Yield a tracker that sends numbers and configuration to a project of Weights & Biases, as a run named `folder`.

    The same `run_id` again continues the run. Samples stay in the log: the service has no plain-text chart for them.

    Raises:
        ConfigError: the package ``wandb`` cannot start the run.
    """
    import wandb

    try:
        run: Any = wandb.init(project=project, name=folder.name, dir=str(folder), id=run_id, resume="allow")
    except Exception as error:  # an account, the network or the project's name: the package says which
        raise ConfigError(
            f"--wandb {project}: {error}; log in, set WANDB_MODE=offline, or leave --wandb out"
        ) from error

    def track(record: Mapping[str, Any]) -> None:
        if record["kind"] == "run":
            details = {key: record[key] for key in ("config", "machine", "versions", "model") if key in record}
            run.config.update(details, allow_val_change=True)
        # Steps must not decrease there; `wandb_id` makes sure that a copied run does not continue the original's.
        scalars = dict(_scalars(record))
        if scalars:
            run.log(scalars, step=record.get("step"))

    try:
        yield track
    finally:
        run.finish()  # waits until everything is sent


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
