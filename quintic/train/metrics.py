"""The log of a run, trackers that show it in TensorBoard or Weights & Biases, and measurements for it.

The file `metrics.jsonl` has one JSON object per line. `quintic.report.history` reads it back,
``docs/reference/metrics.md`` lists the kinds of records. Measured here are the RMS of gradients and updates by kind of
layer, which are the first values to show a wrong learning rate, and the smoothed loss with its spikes.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.launch import install_command
from quintic.optim.layout.layouts import is_dtensor
from quintic.report.history import read_metrics
from quintic.train.config import RunConfig

__all__ = [
    "LossWatch",
    "MetricsLog",
    "RmsMeter",
    "Tracker",
    "check_trackers",
    "layer_kind",
    "summarize_log",
    "tensorboard_tracker",
    "wandb_tracker",
]

Tracker = Callable[[Mapping[str, Any]], None]
"""Shows a record of the log in another program."""

_STEPPED_KINDS = ("train", "eval", "core", "sample")
_CODE = 4 * " "  # indents a code block in Markdown, which keeps spaces and line breaks

_LAYER_KINDS = (
    # The first match counts: "value_embeddings." before "embedding.".
    ("value_embeddings.", "value embeddings"),
    ("embedding.", "embedding"),
    ("head.", "head"),
    (".attention.", "attention"),
    (".mlp.", "MLP"),
)

_SMOOTHING = 0.9  # decay of the smoothed loss, per step
_DEVIATIONS = 0.99  # decay of the squared deviations, per step
_FEWEST_DEVIATIONS = 20  # observed before a loss can be a spike
_UNSTEADY_STEPS = 10  # compiling and warming up, not counted for the speed
_LEAST_STD = 1e-12  # avoids a division by zero where the loss was constant


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
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


def layer_kind(name: str) -> str:
    """Return the kind of layer that a parameter of `quintic.model.GPT` belongs to, as a chart's label."""
    if "gate" in name:
        return "scalars and gates"
    return next((kind for part, kind in _LAYER_KINDS if part in name), "scalars and gates")


class RmsMeter:
    """Measures the RMS of gradients and of updates over the parameters of each kind of layer.

    Call `before` and `after` around an optimizer step; with several ranks, all of them must call both.

    Args:
        model: its parameters are measured.
        mean_gradient: returns a gradient averaged over ranks, as the optimizer will see it.
    """

    def __init__(self, model: nn.Module, *, mean_gradient: Callable[[Tensor], Tensor] = lambda grad: grad) -> None:
        self._mean_gradient = mean_gradient
        self._params = [(layer_kind(name), param) for name, param in model.named_parameters() if param.requires_grad]
        self._before: list[Tensor] = []
        self.grad_norm = math.nan
        """Euclidean norm of all gradients, measured by the last call of `before`."""

    @torch.no_grad()
    def before(self) -> dict[str, float]:
        """Copy the weights and return the RMS of the gradients by kind of layer."""
        self._before = [param.detach().clone() for _, param in self._params]
        # Averaged one after the other, so that one gradient is held twice, not all.
        rms, counts = self._rms(
            None if param.grad is None else self._mean_gradient(param.grad) for _, param in self._params
        )
        self.grad_norm = math.sqrt(sum(counts[kind] * value**2 for kind, value in rms.items()))
        return rms

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """Return the RMS of the weights' change since `before` by kind of layer, and drop the copies."""
        # The change of the weights, not the optimizer's direction: it includes decay and the learning rate.
        changes = (param - old for (_, param), old in zip(self._params, self._before, strict=True))
        rms, _ = self._rms(changes)
        self._before = []
        return rms

    def _rms(self, tensors: Iterable[Tensor | None]) -> tuple[dict[str, float], dict[str, int]]:
        """Return RMS and element count per kind of layer; missing tensors are skipped."""
        squares: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for (kind, _), tensor in zip(self._params, tensors, strict=True):
            if tensor is not None:
                # For a DTensor, `sum` is partial on each rank, and `full_tensor` adds up the ranks' sums.
                square = tensor.float().square().sum()
                square = square.full_tensor() if is_dtensor(square) else square
                squares[kind] = squares[kind] + square if kind in squares else square
                counts[kind] = counts.get(kind, 0) + tensor.numel()
        return {kind: float((square / counts[kind]).sqrt()) for kind, square in squares.items()}, counts


@dataclass(kw_only=True)
class LossWatch:
    """Tracks the smoothed loss of a run and its spikes; checkpoints save all fields, so that resuming is exact.

    A spike is a loss more than `sigmas` standard deviations above the smoothed loss of the steps before it. The
    deviations of losses from the smoothed loss before them are averaged over roughly the last hundred steps. A spike
    enters this average clipped to `sigmas` deviations, so that it does not hide the next one.
    """

    steps: int = 0
    mean: float = 0.0
    """Sum of losses with weights 0.1 x 0.9^age; `smoothed` divides it by the sum of the weights."""
    square: float = 0.0
    """Sum of squared deviations with weights 0.01 x 0.99^age."""
    least: float = math.inf
    """Minimum of the smoothed loss."""
    rollbacks: int = 0
    """Number of times that the run went back to a checkpoint."""

    @property
    def smoothed(self) -> float:
        """Return the mean of the losses with weights 0.9^age."""
        return self.mean / (1 - _SMOOTHING**self.steps) if self.steps else math.nan

    def add(self, loss: float, sigmas: float) -> float | None:
        """Add the loss of a step; return its height in standard deviations if it is a spike, else None."""
        if not math.isfinite(loss):
            return None  # `loop.train` stops the run with DivergedError
        above = None
        if self.steps:
            deviation = loss - self.smoothed
            known = self.steps - 1  # deviations so far
            # The weights sum to 1 - decay^n, so dividing by that corrects for the start at zero, as Adam does.
            std = math.sqrt(self.square / (1 - _DEVIATIONS**known)) if known else math.inf
            if known >= _FEWEST_DEVIATIONS and deviation > sigmas * std:
                above = deviation / max(std, _LEAST_STD)
                deviation = sigmas * std
            self.square = _DEVIATIONS * self.square + (1 - _DEVIATIONS) * deviation**2
        self.steps += 1
        self.mean = _SMOOTHING * self.mean + (1 - _SMOOTHING) * loss
        self.least = min(self.least, self.smoothed)
        return above


def summarize_log(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the final record that follow from a run's log.

    Speeds are means over steady steps, which are all but the first ten of each process; without any, they are missing.
    """
    peaks = [record["peak_memory_bytes"] for record in records if record.get("peak_memory_bytes")]
    evals = [record for record in records if record.get("kind") == "eval" and record.get("bpb") is not None]
    steps: list[Mapping[str, Any]] = []
    steady: list[Mapping[str, Any]] = []
    made = 0  # steps of this process
    for record in records:
        if record.get("kind") in ("run", "resume"):
            made = 0
        elif record.get("kind") == "train" and record.get("times_ms"):  # which a log that was edited may lack
            made += 1
            steps.append(record)
            if made > _UNSTEADY_STEPS and record.get("mfu") and record.get("tokens_per_second"):
                steady.append(record)
    phases = {
        phase: sum(record["times_ms"].get(phase) or 0.0 for record in steps)
        for phase in ("data", "forward_backward", "optimizer")
    }
    total = sum(phases.values()) or 1.0
    summary: dict[str, Any] = {
        "peak_memory_bytes": max(peaks, default=None),
        "breakdown": {f"{phase}_frac": milliseconds / total for phase, milliseconds in phases.items()},
    }
    if evals:
        summary["least_bpb"], summary["least_bpb_step"] = min((record["bpb"], record["step"]) for record in evals)
    if steady:
        # Means over time: a slow step counts for as long as it took.
        for field in ("tokens_per_second", "mfu"):
            summary[field] = harmonic_mean([record[field] for record in steady])
        first, *others = (sum(filter(None, record["times_ms"].values())) / 1000 for record in (steps[0], *steady))
        summary["first_step_extra_seconds"] = max(0.0, first - fmean(others))
    return summary
