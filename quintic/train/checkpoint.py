"""Checkpoints: one folder per saved step, complete or absent.

    <run>/checkpoints/step-000200/
        model.safetensors       weights, under their parameter names
        optimizer.safetensors   optimizer state, as "<parameter name>/<state name>"
        state.json              step, hyperparameters, data position, configuration
        manifest.json           size and SHA-256 of the other files

Everything is written into a folder with a temporary name, flushed to disk, and renamed: a folder named step-* was
complete when it was written. `newest_checkpoint` verifies the hashes and falls back to the next older one.

A run that fell back comes by the damaged steps again. Until it has written such a step anew, the damaged folder stays
(somebody may be able to mend it), and it never counts among the checkpoints that are kept: otherwise it would push out
the good ones, which are older.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintic.durable import discard, flush, remove_unfinished, replace
from quintic.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "checkpoints",
    "load_model_weights",
    "newest_checkpoint",
    "restore_optimizer",
    "save_checkpoint",
]

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint folder."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Return what was saved as `state`."""
        state: dict[str, Any] = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        return state


def save_checkpoint(
    run_dir: Path, *, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of a step, then delete all but the newest `keep` up to this step.

    Args:
        run_dir: the run's folder.
        step: optimizer steps made.
        model: its `state_dict` is saved.
        optimizer: its parameters must be named.
        state: JSON-able; `step` is added.
        keep: checkpoints to keep, this one included, >= 1.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or not writable; nothing half written remains.
    """
    from safetensors.torch import save_file

    folder = run_dir / _FOLDER
    final = folder / f"step-{step:06d}"
    temporary = folder / f".step-{step:06d}.{os.getpid()}.tmp"
    optimizer_tensors, optimizer_groups = _flatten(optimizer)
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            flush(run_dir)
        remove_unfinished(folder)
        temporary.mkdir()
        save_file(_saveable(model.state_dict()), temporary / _WEIGHTS)
        save_file(_saveable(optimizer_tensors), temporary / _OPTIMIZER)
        text = json.dumps({**state, "step": step, "optimizer_groups": optimizer_groups})
        (temporary / _STATE).write_text(text, encoding="utf-8")
        manifest = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        replace(temporary, final, discard_old=True)  # a run that was resumed from an older step comes by again
        for old in [path for path in checkpoints(run_dir) if _step(path) <= step][keep:]:
            discard(old)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk with an exception class of its own.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            needed = sum(
                t.numel() * t.element_size() for t in [*model.state_dict().values(), *optimizer_tensors.values()]
            )
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            raise CheckpointError(
                f"{final}: cannot be written ({reason}); free {math.ceil(needed / 2**20)} MiB, then continue the run "
                "with --resume, or choose another --runs-dir"
            ) from None
        raise
    return final


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest step first, unverified."""
    folder = run_dir / _FOLDER
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def newest_checkpoint(run_dir: Path, *, message: Callable[[str], None]) -> Checkpoint:
    """Return the newest checkpoint whose files are whole; damaged ones are reported and passed over.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    damage = ""
    for path in checkpoints(run_dir):
        damage = _damage(path)
        if not damage:
            return Checkpoint(path=path, step=_step(path))
        message(f"{path}: {damage}; using the checkpoint before it")
    if damage:
        raise CheckpointError(f"{run_dir}: every checkpoint is damaged; start the run anew")
    raise CheckpointError(f"{run_dir}: has no checkpoint yet; start the run anew, without --resume")


def load_model_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the saved weights into `model`.

    Raises:
        CheckpointError: names or shapes differ.
    """
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(checkpoint.path / _WEIGHTS))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise CheckpointError(f"{checkpoint.path}: does not fit this model: {lines[-1]}") from None


def restore_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Copy the saved optimizer state and hyperparameters into `optimizer`.

    Raises:
        CheckpointError: it belongs to other parameters.
    """
    from safetensors.torch import load_file

    state: dict[int, dict[str, Tensor]] = {}
    groups = checkpoint.state()["optimizer_groups"]
    ids = {name: key for group in groups for name, key in zip(group["param_names"], group["params"], strict=True)}
    for full_name, tensor in load_file(checkpoint.path / _OPTIMIZER).items():
        name, _, key = full_name.rpartition("/")
        if name not in ids:
            raise CheckpointError(f"{checkpoint.path}: does not fit itself: state of an unknown parameter {name!r}")
        state.setdefault(ids[name], {})[key] = tensor
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def _flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    saved = optimizer.state_dict()
    tensors = {}
    for group in saved["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            for state_name, tensor in saved["state"][key].items():
                tensors[f"{name}/{state_name}"] = tensor
    return tensors, saved["param_groups"]


def _saveable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
        for name, tensor in tensors.items()
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damage(path: Path) -> str:
    """Return what is wrong with a checkpoint folder, or an empty string."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        missing = {_WEIGHTS, _OPTIMIZER, _STATE} - set(manifest)
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


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
