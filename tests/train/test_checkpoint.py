"""Checkpoints: exact, complete or absent, and found again when the newest is damaged."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from durability import Synced, as_it_is, disk_events, durable_names
from safetensors import SafetensorError
from tiny_runs import Killed
from torch import nn

import quintic
from quintic.errors import CheckpointError
from quintic.train.checkpoint import (
    checkpoints,
    load_model_weights,
    newest_checkpoint,
    read_state,
    restore_optimizer,
    save_checkpoint,
    step_of,
)

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def parts(width: int = 8) -> tuple[nn.Module, quintic.Muon]:
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    return model, quintic.Muon(quintic.param_groups(model), lr=0.1, normalize="neuron")


def make_step(model: nn.Module, optimizer: quintic.Muon) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()


def save(run_dir: Path, step: int, *, keep: int = 10, **state: Any) -> Path:
    """Save a model that says which step it is of: each weight is the step."""
    model, optimizer = parts()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            for value in optimizer.state[param].values():
                value.fill_(step)
    return save_checkpoint(run_dir, step=step, model=model, optimizer=optimizer, state=state, keep=keep)


def newest(run_dir: Path) -> Path:
    return newest_checkpoint(run_dir, message=lambda text: None)


def assert_whole(checkpoint: Path) -> None:
    """Load everything and compare it with what `save` wrote for that step."""
    model, optimizer = parts()
    load_model_weights(checkpoint, model)
    restore_optimizer(checkpoint, optimizer)
    assert read_state(checkpoint)["step"] == step_of(checkpoint)
    for param in model.parameters():
        assert (param == step_of(checkpoint)).all()
        assert all((value == step_of(checkpoint)).all() for value in optimizer.state[param].values())


def steps(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run_dir)]


def test_everything_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    model, optimizer = parts()
    for _ in range(3):
        make_step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2  # no short decimal
    state = {"tokens": 123, "loader": {"waiting": [1, 2]}}
    path = save_checkpoint(tmp_path, step=3, model=model, optimizer=optimizer, state=state, keep=1)
    assert path == tmp_path / "checkpoints" / "step-000003"
    assert sorted(file.name for file in path.iterdir()) == FILES

    checkpoint = newest(tmp_path)
    other_model, other = parts()
    make_step(other_model, other)
    load_model_weights(checkpoint, other_model)
    restore_optimizer(checkpoint, other)
    assert {name: read_state(checkpoint)[name] for name in state} == state
    for left, right in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert optimizer.state[left].keys() == other.state[right].keys()
        for name, value in optimizer.state[left].items():
            assert torch.equal(value, other.state[right][name])
            assert value.dtype == other.state[right][name].dtype
    assert other.param_groups[0]["lr"] == 0.1 + 0.2
    torch.manual_seed(1)
    make_step(model, optimizer)
    torch.manual_seed(1)
    make_step(other_model, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))


def test_a_model_alone_is_a_checkpoint_and_is_checked_like_one(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (1, 2, 3):
        model, _ = parts()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        path = save_checkpoint(tmp_path, step=step, model=model, optimizer=None, state={"kind": "x"}, keep=9)
        assert sorted(file.name for file in path.iterdir()) == [name for name in FILES if name[:3] != "opt"]
        assert read_state(newest(tmp_path)) == {"kind": "x", "step": step}
    (path / "model.safetensors").unlink()
    (path.with_name("step-000002") / "model.safetensors").write_bytes(b"cut off")
    checkpoint = newest_checkpoint(tmp_path, message=said.append)
    assert [line.partition("step-")[2].partition(";")[0] for line in said] == [
        "000003: model.safetensors is missing",
        f"000002: model.safetensors has 7 bytes instead of {manifest_bytes(path.with_name('step-000002'))}",
    ]
    model, _ = parts()
    load_model_weights(checkpoint, model)
    assert all((param == 1).all() for param in model.parameters())


def manifest_bytes(path: Path) -> int:
    return int(json.loads((path / "manifest.json").read_text())["model.safetensors"]["bytes"])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 999_999, 1_000_000):
        save(tmp_path, step, keep=3)
    assert steps(tmp_path) == [1_000_000, 999_999, 10]
    assert step_of(newest(tmp_path)) == 1_000_000
    save(tmp_path, 1_000_001, keep=1)
    assert steps(tmp_path) == [1_000_001]


def test_newer_damaged_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step)
    for step in (6, 8):
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json").unlink()
    assert step_of(newest(tmp_path)) == 4
    # The run goes on from 4, with another distance between saves than before.
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [8, 6, 5, 4]
    assert step_of(newest(tmp_path)) == 5
    save(tmp_path, 6, keep=2)
    assert steps(tmp_path) == [8, 6, 5]
    assert_whole(newest(tmp_path))
    assert step_of(newest(tmp_path)) == 6
    save(tmp_path, 8, keep=2)
    assert steps(tmp_path) == [8, 6]


def test_other_files_among_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("notes", "step-000001-best", "step-1"):
        (folder / name).mkdir(parents=True)
    save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step-000001-best", "step-000002", "step-1"]


# -- damage -----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step-000003" / name)
    said: list[str] = []
    checkpoint = newest_checkpoint(tmp_path, message=said.append)
    assert step_of(checkpoint) == 2
    assert_whole(checkpoint)
    assert len(said) == 1
    assert "step-000003" in said[0]
    assert "using the checkpoint before it" in said[0]
    if name != "manifest.json":
        assert name in said[0]


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"state.json": 3}', "\x80", '{"model.safetensors": {}}'])
def test_a_manifest_of_another_form_is_damage(content: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "step-000002" / "manifest.json").write_text(content, encoding="latin-1")
    assert step_of(newest(tmp_path)) == 1


def test_damage_everywhere_is_an_error(tmp_path: Path) -> None:
    for step in (1, 2):
        flip_a_bit(save(tmp_path, step) / "model.safetensors")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged; start a new run"):
        newest(tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        newest(tmp_path / "elsewhere")


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model, optimizer = parts(width=9)
    with pytest.raises(CheckpointError, match=r"step-000001: does not fit this model: size mismatch for 2\.weight"):
        load_model_weights(newest(tmp_path), model)
    with pytest.raises(CheckpointError, match=r"0\.weight: saved .* has shape \(8, 4\), this optimizer needs \(9, 4\)"):
        restore_optimizer(newest(tmp_path), optimizer)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_model_weights(newest(tmp_path), nn.Linear(4, 8))


# -- what a crash leaves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_saved_step_survives_a_crash(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if not first:
        save(run_dir, 1)
    events = disk_events(monkeypatch)
    save(run_dir, 2)
    assert durable_names(events) == ["step-000002"]
    # The folder of all checkpoints has a name in the run's folder, which is new with the first one.
    assert (as_it_is(run_dir).identity in [event.identity for event in events if isinstance(event, Synced)]) == first
    assert all(as_it_is(path) in events for path in (run_dir / "checkpoints" / "step-000002").iterdir())


# -- failures while saving --------------------------------------------------------------------------------------------


class Writes:
    """Every function that a save changes the disk with; lets the one of a given number fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.failing: int | None = None
        self.error: BaseException = Killed()
        targets: list[tuple[Any, str]] = [
            (safetensors.torch, "save_file"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (hashlib, "file_digest"),
            (os, "fsync"),
            (os, "replace"),
            (shutil, "rmtree"),
        ]
        for owner, name in targets:
            monkeypatch.setattr(owner, name, self.watched(getattr(owner, name), name))

    def watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # Clean-up of what an error left behind is not a write of the save.
            if name == "rmtree" and options.get("ignore_errors") and not isinstance(self.error, Killed):
                return function(*args, **options)
            self.count += 1
            if self.count != self.failing:
                return function(*args, **options)
            if name in ("write_text", "save_file"):  # half of it is on the disk
                function(*args, **options)
                truncate(args[0] if name == "write_text" else args[1])
            raise self.error

        return call

    @contextlib.contextmanager
    def fail(self, number: int | None, error: BaseException) -> Iterator[None]:
        self.count, self.failing, self.error = 0, number, error
        try:
            yield
        finally:
            self.failing = None


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [Killed(), full_disk()], ids=["killed", "disk full"])
@pytest.mark.parametrize("again", [False, True], ids=["new step", "damaged step again"])
def test_a_save_that_fails_anywhere_leaves_a_good_checkpoint(
    again: bool, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)

    def prepared(name: str) -> Path:
        run_dir = tmp_path / name
        for step in (1, 2, 3):
            save(run_dir, step)
        if again:
            (run_dir / "checkpoints" / "step-000003" / "model.safetensors").unlink()
        return run_dir

    step = 3 if again else 4
    run_dir = prepared("counted")
    with writes.fail(None, error):
        save(run_dir, step, keep=2)
        total = writes.count
    assert total >= 12
    reached = set()
    for number in range(1, total + 1):
        run_dir = prepared(str(number))
        kind = Killed if isinstance(error, Killed) else CheckpointError
        with writes.fail(number, error), pytest.raises(kind):
            save(run_dir, step, keep=2)
        checkpoint = newest(run_dir)
        reached.add(step_of(checkpoint))
        assert step_of(checkpoint) in ((2, 3) if again else (3, 4))
        assert_whole(checkpoint)
        if kind is CheckpointError:
            # Nothing half written remains; only a failure after the step was saved may leave something to delete.
            assert step_of(checkpoint) == step or not list((run_dir / "checkpoints").glob(".*.tmp"))
        save(run_dir, 5, keep=2)
        assert step_of(newest(run_dir)) == 5
        assert not list((run_dir / "checkpoints").glob(".*"))
        assert len(steps(run_dir)) == 2
    assert len(reached) == 2  # some failures came before the step was there, some after


@pytest.mark.parametrize(
    "error", [full_disk(), SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")]
)
def test_a_full_disk_says_what_to_do(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise error

    save(tmp_path, 1)
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    text = str(caught.value)
    assert "\n" not in text
    assert "step-000002: cannot be written (" in text
    assert "No space left on device); free 1 MiB" in text
    assert "--runs-dir" in text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_an_error_of_our_own_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 1, unfit=object())
    assert list(tmp_path.rglob("*")) == []


def test_the_manifest_names_every_file_with_its_hash(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in FILES[1:]
        for data in [(path / name).read_bytes()]
    }
