"""Checkpoints of a run: one folder for each saved step, either complete or absent.

    <run>/checkpoints/step-000200/
        model.safetensors       weights, under their parameter names
        optimizer.safetensors   optimizer state, as "<parameter name>/<state name>"
        state.json              step, hyperparameters, data position, configuration
        manifest.json           size and SHA-256 of the other files

Tensors are saved whole, by rank 0, so that any number of ranks reads them, in any layout.

Phases of a save: copy everything to the host memory of rank 0; write into a folder with a temporary name, flush it to
disk and rename it, in a background thread while training goes on; delete old checkpoints. A folder named step-* was
therefore complete when it was written.

`newest_checkpoint` verifies the hashes and falls back to older steps. The damaged folders stay, because they may be
repairable, until the run reaches their steps again and replaces them. They do not count toward `keep`, or they would
push out the good checkpoints, which are older.
"""

import hashlib
import json
import math
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintic.durable import discard, flush, new_folder, remove_unfinished, replace, save_tensors, unused
from quintic.errors import CheckpointError
from quintic.model.layers import distribute_like
from quintic.optim.layout.layouts import is_dtensor
from quintic.optim.muon import Muon
from quintic.streams import say
from quintic.train.distributed import SINGLE_PROCESS, Ranks

__all__ = [
    "Background",
    "checkpoint_of_step",
    "checkpoints",
    "load_model_weights",
    "newest_checkpoint",
    "read_state",
    "restore_optimizer",
    "save_checkpoint",
    "set_aside_later",
    "step_of",
]

# Names inside a run's folder and inside a checkpoint. Saved runs depend on them.
_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"
_STATE = "state.json"
_FILES = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}


class Background:
    """Runs one function at a time in a background thread of rank 0.

    All ranks must call `start` and `wait` in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._work: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """True on rank 0 if the function failed; the next `wait` raises its error."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the function in progress, then start the next one and return.

        Raises:
            Exception: as `wait`; `work` is then not started.
        """
        self.wait()
        if not self._ranks.is_first:
            return
        started = Future[None]()

        def run() -> None:
            try:
                work()
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        # A daemon, unlike the threads of executors: a second Ctrl-C ends the process without waiting for it.
        threading.Thread(target=run, name="quintic-background", daemon=True).start()
        self._work = started  # only now: nobody waits for a thread that could not start

    def wait(self) -> None:
        """Wait until the function in progress has ended.

        Raises:
            Exception: the function raised this exception, on rank 0.
            OtherRankError: the same on other ranks.
        """
        ended, self._work = self._work, None
        self._ranks.from_rank0(lambda: None if ended is None else ended.result())

    def close(self) -> None:
        """Wait until the function in progress has ended, and print its error.

        For after an exception: ranks may be at different points in the code, so no collective is called here.
        """
        if self._work is not None and (error := self._work.exception()) is not None:
            print(f"quintic: error: {error}", file=sys.stderr)


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    keep: int,
    ranks: Ranks = SINGLE_PROCESS,
    background: Background | None = None,
) -> Path:
    """Write the checkpoint of a step and delete older ones.

    All ranks must call it; rank 0 writes.

    Args:
        run_dir: the run's folder.
        step: number of optimizer steps made.
        model: its `state_dict` is saved.
        optimizer: its parameters must be named. None saves only the model, which then cannot be trained further.
        state: anything that JSON can hold; `step` is added. Rank 0's is saved.
        keep: number of checkpoints to keep, at least 1: the newest up to this step, this one included.
        ranks: the processes that train the run.
        background: a `Background` of the same ranks, which writes, hashes, renames and deletes once everything is
            copied to host memory; its `wait` raises the errors. None returns only when the checkpoint is complete.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or not writable. No half-written folder remains. With `background`, this may
            be the error of the previous checkpoint.
        OtherRankError: the same on other ranks.
    """
    if background is not None:
        background.wait()  # the previous checkpoint's copies fill host memory until it is written
    copies = {"model": _copy_to_host(model.state_dict(), ranks)}
    state = {**state, "step": step}
    if optimizer is not None:
        tensors, state["optimizer_groups"] = _optimizer_tensors(optimizer)
        copies["optimizer"] = _copy_to_host(tensors, ranks)
    final = run_dir / _FOLDER / f"step-{step:06d}"
    write = partial(_write, final, copies, json.dumps(state), keep)
    if background is None:
        ranks.from_rank0(write)
    else:
        background.start(write)
    return final


@torch.no_grad()
def _copy_to_host(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Copy tensors whole to the host memory of rank 0 and return the copies by name; {} on the other ranks.

    CUDA tensors are copied to page-locked memory, which takes copies at full speed and which PyTorch caches for the
    next checkpoint. Returns when the copies are complete. All ranks must call it, because `DTensor`s are gathered.

    Args:
        tensors: emptied while copying, so that tensors without another reference are freed early.
        ranks: the processes that train the run.
    """
    copies = {}
    for name in list(tensors):
        tensor = tensors.pop(name).detach()
        # 16-bit whole numbers cannot be gathered, so that their bits travel under another dtype.
        bits = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        whole = (bits.full_tensor() if is_dtensor(bits) else bits).view(tensor.dtype)
        if ranks.is_first:
            on_gpu = whole.is_cuda
            copy = torch.empty_like(whole, device="cpu", pin_memory=on_gpu, memory_format=torch.contiguous_format)
            copies[name] = copy.copy_(whole, non_blocking=True)  # copies of all tensors overlap
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copies


def _optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return optimizer state as "<parameter name>/<state name>" -> tensor, and the groups. All ranks must call it.

    The tensors are not copied, except that state sharded by `comms="sharded"` is gathered: in host memory, because the
    whole state may not fit on a GPU.
    """
    is_sharded = any(group.get("comms") == "sharded" for group in optimizer.param_groups)
    if isinstance(optimizer, Muon) and is_sharded and optimizer.param_groups[0]["params"][0].is_cuda:
        optimizer.offload(True)
        try:
            saved = optimizer.state_dict()
        finally:
            optimizer.offload(False)
    else:
        saved = optimizer.state_dict()
    tensors = {}
    for group in saved["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            for state_name, tensor in saved["state"].get(key, {}).items():  # frozen parameters have no state
                tensors[f"{name}/{state_name}"] = tensor
    return tensors, saved["param_groups"]


def _write(final: Path, tensors: dict[str, dict[str, Tensor]], state: str, keep: int) -> None:
    """Write a checkpoint's folder from copied tensors, then delete older checkpoints."""
    folder = final.parent
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            flush(folder.parent)
        remove_unfinished(folder)
        # The step's folder exists already if the run was resumed from an older step.
        with new_folder(final, discard_old=True) as unfinished:
            for part, content in tensors.items():
                save_tensors(content, unfinished / _FILES[part])
            (unfinished / _STATE).write_text(state, encoding="utf-8")
            manifest = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
            (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        saved = [path for path in checkpoints(folder.parent) if step_of(path) <= step_of(final)]
        for old in saved[keep:]:
            discard(old)
    except OSError as error:
        needed = sum(tensor.numel() * tensor.element_size() for part in tensors.values() for tensor in part.values())
        way = "continue the run with --resume" if "optimizer" in tensors else "repeat the run"
        raise CheckpointError(
            f"{final}: cannot be written ({error.strerror or error}); free {math.ceil(needed / 2**20)} MiB, then "
            f"{way}, or choose another --runs-dir"
        ) from None


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest step first, unverified."""
    folder = run_dir / _FOLDER
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)


def newest_checkpoint(run_dir: Path, *, message: Callable[[str], None] = say) -> Path:
    """Return the newest undamaged checkpoint's folder; call `message` with a line for each damaged one that is skipped.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    damage = ""
    for path in checkpoints(run_dir):
        damage = _damage(path)
        if not damage:
            return path
        message(f"{path}: {damage}; using the checkpoint before it")
    if damage:
        raise CheckpointError(f"{run_dir}: every checkpoint is damaged; start a new run")
    raise CheckpointError(f"{run_dir}: has no checkpoint yet; start a new run, without --resume")


def checkpoint_of_step(run_dir: Path, step: int, *, option: str = "--resume-step") -> Path:
    """Return the folder of the checkpoint of a step that the user chose; `option` names the option in errors.

    Raises:
        CheckpointError: the run has not kept a checkpoint of that step, or it is damaged.
    """
    kept = checkpoints(run_dir)
    path = next((path for path in kept if step_of(path) == step), None)
    if path is None:
        steps = ", ".join(str(step_of(path)) for path in reversed(kept)) or "none"
        raise CheckpointError(f"{option} {step}: {run_dir} has no checkpoint of that step; it has kept {steps}")
    if damage := _damage(path):
        raise CheckpointError(f"{option} {step}: {path}: {damage}; choose another step")
    return path


def set_aside_later(run_dir: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step` to set-aside-*, for a run that goes back to `step`.

    Otherwise the next `--resume` would take one of them for the newest. They stay, in case going back was a mistake;
    the user is told the new names.

    Raises:
        OSError: a checkpoint cannot be renamed.
    """
    names = []
    for path in (path for path in reversed(checkpoints(run_dir)) if step_of(path) > step):
        aside = unused(path.with_name(f"set-aside-{path.name}"))
        replace(path, aside)
        names.append(aside.name)
    if names:
        say(f"Set aside the checkpoints of later steps in {run_dir / _FOLDER}, as {', '.join(names)}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the `state` that was given to `save_checkpoint`, with `step` and `optimizer_groups`."""
    state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    return state


def load_model_weights(folder: Path, model: nn.Module) -> None:
    """Copy the weights in the folder of a checkpoint, or of an exported model, into `model`; each rank keeps its shard.

    Raises:
        CheckpointError: the file cannot be read, or names or shapes differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    own = model.state_dict()
    try:
        saved = load_file(folder / _FILES["model"])
        model.load_state_dict(
            {name: distribute_like(value, own[name]) if name in own else value for name, value in saved.items()}
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {_FILES['model']} cannot be read ({error})") from None
    except RuntimeError as error:
        names = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{folder}: does not fit this model: {names}") from None


def restore_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Load a checkpoint's optimizer state and hyperparameters into `optimizer`; each rank keeps its shard.

    Raises:
        CheckpointError: the state belongs to other parameters.
    """
    from safetensors.torch import load_file

    state: dict[int, dict[str, Tensor]] = {}
    groups = read_state(checkpoint)["optimizer_groups"]
    ids = {name: key for group in groups for name, key in zip(group["param_names"], group["params"], strict=True)}
    for full_name, tensor in load_file(checkpoint / _FILES["optimizer"]).items():
        name, _, key = full_name.rpartition("/")
        state.setdefault(ids[name], {})[key] = tensor
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damage(path: Path) -> str:
    """Describe the damage of a checkpoint folder; "" if it is intact."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        # The optimizer's file is optional: a speedrun saves only its model.
        missing = {_FILES["model"], _STATE} - set(manifest)
        if missing:
            return f"{_MANIFEST} does not list {min(missing)}"
        for name, expected in manifest.items():
            file = path / name
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
            if _fingerprint(file) != expected:
                return f"{name} was changed after it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return ""


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))
