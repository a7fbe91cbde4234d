"""Checkpoints: one folder per saved step, complete or absent.

    <run>/checkpoints/step-000200/
        model.safetensors       weights, under their parameter names
        optimizer.safetensors   optimizer state, as "<parameter name>/<state name>"
        state.json              step, hyperparameters, data position, configuration
        manifest.json           size and SHA-256 of the other files

Several ranks write the same names in the format of `torch.distributed.checkpoint` instead of the first two files, each
rank its own pieces: `.metadata` and `__<rank>_*.distcp`. Any number of ranks reads either, however they divide a model.
A run copies everything to host memory and goes on training, while a thread beside it writes (`saving/`).

Everything is written into a folder with a temporary name, flushed to disk, and renamed: a folder named step-* was
complete when it was written. `newest_checkpoint` verifies the hashes and falls back to the next older one.

A run that fell back comes by the damaged steps again. Until it has written such a step anew, the damaged folder stays
(it may be possible to mend it), and it never counts among the checkpoints that are kept: otherwise it would push out
the good ones, which are older.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintic.durable import discard, flush, remove_unfinished, replace, save_tensors
from quintic.errors import CheckpointError
from quintic.model.layers import distribute_like
from quintic.optim.layout.layouts import is_dtensor
from quintic.train.distributed import SINGLE_PROCESS, Ranks
from quintic.train.saving.background import Background
from quintic.train.saving.staging import copies_on_host, optimizer_tensors
from quintic.train.schedule import is_due

__all__ = [
    "Checkpoint",
    "checkpoint_of_step",
    "checkpoints",
    "copy_weights",
    "load_model_weights",
    "newest_checkpoint",
    "restore_optimizer",
    "save_checkpoint",
    "set_aside_later",
    "step_of",
]

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"
_STATE = "state.json"
_FILES = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
_METADATA, _PIECES = ".metadata", re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder."""

    path: Path

    def state(self) -> dict[str, Any]:
        """Return the saved `state`."""
        state: dict[str, Any] = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        return state


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    keep: int,
    keep_due: int = 0,
    ranks: Ranks = SINGLE_PROCESS,
    background: Background | None = None,
) -> Path:
    """Write the checkpoint of a step, then delete older ones.

    All ranks must call it, with one folder on a file system that they share.

    Args:
        run_dir: the run's folder.
        step: optimizer steps made.
        model: its `state_dict` is saved.
        optimizer: its parameters must be named. None to save the model alone, which cannot be trained further.
        state: JSON-able; `step` is added. Of several ranks that of the first one is saved.
        keep: checkpoints to keep, the newest up to this step, this one included, >= 1.
        keep_due: keep also the newest of a step that is a multiple of this; 0 for no other.
        ranks: the processes that train the run.
        background: of the same ranks. Once everything is copied to host memory, writing, hashing, renaming and
            deleting go on there, and its `wait` raises what goes wrong. None to return when the checkpoint is complete.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or not writable; nothing half written remains.
        OtherRankError: that is so on another rank.

    With `background`, these may be errors of the checkpoint before.
    """
    if background is not None:
        background.wait()  # its copies are in memory until then
    final = run_dir / _FOLDER / f"step-{step:06d}"
    copies = {"model": copies_on_host(model.state_dict())}
    state = {**state, "step": step}
    if optimizer is not None:
        tensors, state["optimizer_groups"] = optimizer_tensors(optimizer)
        copies["optimizer"] = copies_on_host(tensors)
    text = json.dumps(state)
    if background is None:
        _write(final, copies, text, keep, keep_due, ranks)
    else:
        background.start(lambda own_ranks: _write(final, copies, text, keep, keep_due, own_ranks))
    return final


def _write(
    final: Path, tensors: dict[str, dict[str, Tensor]], state: str, keep: int, keep_due: int, ranks: Ranks
) -> None:
    """Write a checkpoint's folder and delete older ones: `save_checkpoint` once all tensors are copied."""
    folder = final.parent
    temporary = folder / ranks.from_rank0(lambda: f".{final.name}.{os.getpid()}.tmp")
    needed = sum(tensor.numel() * tensor.element_size() for part in tensors.values() for tensor in part.values())

    is_resumable = "optimizer" in tensors

    @_naming_failures(final, temporary, needed, is_resumable)
    def begin() -> None:
        if not folder.exists():
            folder.mkdir(parents=True)
            flush(folder.parent)
        remove_unfinished(folder)
        temporary.mkdir()

    @_naming_failures(final, temporary, needed, is_resumable)
    def write() -> dict[str, Any]:
        """Write this rank's files; return their fingerprints."""
        if ranks.size == 1:
            for part, content in tensors.items():
                save_tensors(content, temporary / _FILES[part])
        else:
            _write_pieces(temporary, tensors, ranks)
        if ranks.is_first:
            (temporary / _STATE).write_text(state, encoding="utf-8")
        own = [path for path in sorted(temporary.iterdir()) if _writer(path) == ranks.rank]
        return {path.name: _fingerprint(path) for path in own}

    @_naming_failures(final, temporary, needed, is_resumable)
    def publish() -> None:
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        replace(temporary, final, discard_old=True)  # a run that was resumed from an older step comes by again
        saved = [path for path in checkpoints(folder.parent) if step_of(path) <= step_of(final)]
        due = next((path for path in saved if is_due(step_of(path), keep_due)), None)
        for old in saved[keep:]:
            if old != due:
                discard(old)

    ranks.from_rank0(begin)
    written = ranks.all_gather(ranks.run_on_all(write))
    manifest = {name: fingerprint for files in written for name, fingerprint in files.items()}
    ranks.from_rank0(publish)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest step first, unverified."""
    folder = run_dir / _FOLDER
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def newest_checkpoint(
    run_dir: Path, *, message: Callable[[str], None], every: int = 1, up_to: float = math.inf
) -> Checkpoint:
    """Return the newest checkpoint whose files are whole; damaged ones are reported and passed over.

    Args:
        run_dir: the run's folder.
        message: takes a line for each damaged checkpoint.
        every: consider only steps that are multiples of it.
        up_to: consider no later steps.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    damage = ""
    for path in checkpoints(run_dir):
        if step_of(path) % every or step_of(path) > up_to:
            continue
        damage = _damage(path)
        if not damage:
            return Checkpoint(path=path)
        message(f"{path}: {damage}; using the checkpoint before it")
    if damage:
        raise CheckpointError(f"{run_dir}: every checkpoint is damaged; start the run anew")
    raise CheckpointError(f"{run_dir}: has no checkpoint yet; start the run anew, without --resume")


def checkpoint_of_step(run_dir: Path, step: int, *, option: str = "--resume-step") -> Checkpoint:
    """Return the checkpoint of a step, which the user gave in an option.

    Raises:
        CheckpointError: the run has not kept it, or it is damaged.
    """
    kept = checkpoints(run_dir)
    path = next((path for path in kept if step_of(path) == step), None)
    if path is None:
        steps = ", ".join(str(step_of(path)) for path in reversed(kept)) or "none"
        raise CheckpointError(f"{option} {step}: {run_dir} has no checkpoint of that step; it has kept {steps}")
    if damage := _damage(path):
        raise CheckpointError(f"{option} {step}: {path}: {damage}; choose another step")
    return Checkpoint(path=path)


def set_aside_later(run_dir: Path, step: int, *, message: Callable[[str], None]) -> None:
    """Rename the checkpoints of steps after `step`, which a run that goes back makes anew; say their new names.

    The next `--resume` would otherwise take one of them for the newest. They stay whole, for whoever went back by
    mistake.

    Args:
        run_dir: the run's folder.
        step: from which the run continues.
        message: takes a line, if there are any.

    Raises:
        OSError: one cannot be renamed.
    """
    later = [path for path in reversed(checkpoints(run_dir)) if step_of(path) > step]
    names = []
    for path in later:
        free = (f"set-aside-{path.name}" + (f"-{number}" if number else "") for number in itertools.count())
        names.append(next(name for name in free if not path.with_name(name).exists()))
        replace(path, path.with_name(names[-1]))
    if names:
        message(f"Set aside in {run_dir / _FOLDER}, for steps that are made anew: {', '.join(names)}")


def load_model_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the saved weights into `model`.

    Raises:
        CheckpointError: names or shapes differ.
    """
    copy_weights(_read(checkpoint, "model", model.state_dict()), model, checkpoint.path)


def copy_weights(saved: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Copy weights by name into `model`, each rank its part.

    Raises:
        CheckpointError: names or shapes differ; the message says so of `path`.
    """
    own = model.state_dict()
    try:
        model.load_state_dict(
            {name: distribute_like(value, own[name]) if name in own else value for name, value in saved.items()}
        )
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise CheckpointError(f"{path}: does not fit this model: {lines[-1]}") from None


def restore_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Copy the saved optimizer state and hyperparameters into `optimizer`. All ranks must call it.

    Raises:
        CheckpointError: it belongs to other parameters.
    """
    state: dict[int, dict[str, Tensor]] = {}
    groups = checkpoint.state()["optimizer_groups"]
    ids = {name: key for group in groups for name, key in zip(group["param_names"], group["params"], strict=True)}
    # Whole tensors are read into the host's memory, and each rank takes its part; what is a DTensor is read in parts.
    in_parts = any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"])
    own = optimizer_tensors(optimizer)[0] if in_parts else {}
    for full_name, tensor in _read(checkpoint, "optimizer", own).items():
        name, _, key = full_name.rpartition("/")
        if name not in ids:
            raise CheckpointError(f"{checkpoint.path}: does not fit itself: state of an unknown parameter {name!r}")
        state.setdefault(ids[name], {})[key] = tensor
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def _write_pieces(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Write this rank's pieces of tensors; a piece that several ranks hold is written once."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.group)
    except CheckpointException as error:  # on all ranks, with what was wrong on each
        raise next(failure for failure, _ in error.failures.values()) from None


def _read(checkpoint: Checkpoint, part: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return saved tensors by name: whole on the CPU, but those that `own` has as DTensors in its place and parts.

    Args:
        checkpoint: to read from.
        part: "model" or "optimizer".
        own: tensors that may be overwritten.
    """
    if not (checkpoint.path / _METADATA).exists():
        from safetensors.torch import load_file

        whole: dict[str, Tensor] = load_file(checkpoint.path / _FILES[part])
        return whole
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint.path)
    tensors: dict[str, Tensor] = {}
    for key, described in reader.read_metadata().state_dict_metadata.items():
        prefix, _, name = key.partition(".")
        if prefix == part:
            assert isinstance(described, TensorStorageMetadata)
            mine = own.get(name)
            if mine is None or not is_dtensor(mine) or mine.shape != described.size:
                mine = torch.empty(described.size, dtype=described.properties.dtype)
            tensors[name] = mine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells that there is one process
        load({part: tensors}, storage_reader=reader)
    return tensors


@contextlib.contextmanager
def _naming_failures(final: Path, temporary: Path, needed: int, is_resumable: bool) -> Iterator[None]:
    """Remove a half-written checkpoint after an error; where the disk cannot be written, say what to do."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            way = "continue the run with --resume" if is_resumable else "repeat the run"
            raise CheckpointError(
                f"{final}: cannot be written ({error.strerror or error}); free {math.ceil(needed / 2**20)} MiB, then "
                f"{way}, or choose another --runs-dir"
            ) from None
        raise


def _writer(path: Path) -> int:
    """Return the rank that wrote a file of a checkpoint."""
    match = _PIECES.fullmatch(path.name)
    return int(match[1]) if match is not None else 0


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damage(path: Path) -> str:
    """Describe the damage of a checkpoint folder; empty where there is none."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        # A model that was saved alone has no file of the optimizer.
        missing = {_METADATA if _METADATA in manifest else _FILES["model"], _STATE} - set(manifest)
        if missing:
            return f"{_MANIFEST} does not list {min(missing)}"
        for name, expected in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
            if _fingerprint(file) != expected:
                return f"{name} was changed after it was written"
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return ""


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))
