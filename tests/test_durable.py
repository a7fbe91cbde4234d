"""Atomic writes: flushed before and after the rename, and nothing left behind by one that fails."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from durability import disk_events, durable_names
from safetensors.torch import load_file

from quintic.durable import (
    discard,
    flush,
    lock,
    new_folder,
    remove_unfinished,
    replace,
    save_tensors,
    write_atomically,
)


def fail_with(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def write_folder(path: Path) -> Path:
    path.mkdir()
    for name in "ab":
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_is_no_file_to_write(path: str) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(Path(path), "new")


@pytest.mark.parametrize("content", ["ä\n", b"\xff\n", ""])
def test_a_file_is_flushed_before_its_rename_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes
) -> None:
    path = tmp_path / "file"
    for earlier in (False, True):
        assert path.exists() == earlier
        events = disk_events(monkeypatch)
        write_atomically(path, content)
        assert durable_names(events) == ["file"]
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert os.listdir(tmp_path) == ["file"]


def test_everybody_may_read_what_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "file", "")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "file")]
    assert modes[0] == modes[1]


def test_whoever_may_read_a_folder_may_read_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with new_folder(tmp_path / "folder") as folder:
        os.close(os.open(folder / "hidden", os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "folder/hidden")]
    assert modes[0] == modes[1]


def test_a_folder_is_flushed_with_each_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = write_folder(tmp_path / "finished")
    events = disk_events(monkeypatch)
    replace(finished, tmp_path / "final")
    assert durable_names(events) == ["final"]
    assert len(events) == 5  # two files, their folder, the rename, the folder around it
    assert os.listdir(tmp_path) == ["final"]


def test_an_old_folder_stays_unless_it_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, finished = write_folder(tmp_path / "final"), write_folder(tmp_path / "finished")
    (finished / "c").touch()
    with pytest.raises(OSError, match=r"not empty|exists"):
        replace(finished, final)
    events = disk_events(monkeypatch)
    replace(finished, final, discard_old=True)
    assert durable_names(events) == ["final"]
    assert os.listdir(tmp_path) == ["final"]
    assert sorted(os.listdir(final)) == ["a", "b", "c"]


def test_the_old_folder_is_there_until_the_new_one_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, finished = write_folder(tmp_path / "final"), write_folder(tmp_path / "finished")
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        replace(finished, final, discard_old=True)
    assert sorted(os.listdir(final)) == ["a", "b"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, name, fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    """By safetensors itself, whose exception is none of the system's."""
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*nowhere.weights") as caught:
        save_tensors({"weight": torch.ones(2)}, tmp_path / "nowhere" / "weights")
    assert caught.value.filename == str(tmp_path / "nowhere" / "weights")
    with pytest.raises(IsADirectoryError):
        save_tensors({"weight": torch.ones(2)}, tmp_path)
    save_tensors({"weight": torch.ones(2)}, tmp_path / "weights")
    assert load_file(tmp_path / "weights")["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES])
def test_folders_that_cannot_be_flushed_are_passed_over_and_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fail_with(number))
    flush(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        flush(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        flush(tmp_path)


def test_a_folder_being_deleted_has_no_name_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "folder")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, **options: None)  # killed before it
        discard(folder)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".folder.")
    (tmp_path / ".file.1-2.tmp").touch()  # a write that was killed
    (tmp_path / "notes.tmp").touch()
    (tmp_path / ".hidden").touch()
    remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.tmp"]


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "above" / "folder"
    for number in range(2):
        with new_folder(path, discard_old=True) as unfinished:
            (unfinished / "file").write_text(str(number))
            assert path.exists() == bool(number)
        assert [file.name for file in path.parent.iterdir()] == ["folder"]
        assert (path / "file").read_text() == str(number)

    def fail() -> None:
        with new_folder(path, discard_old=True) as unfinished:
            (unfinished / "other").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [file.name for file in path.parent.iterdir()] == ["folder"]
    assert (path / "file").read_text() == "1"


def test_a_lock_is_waited_for_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as first, path.open("ab") as second:
        lock(first.fileno(), wait=False)
        with pytest.raises((BlockingIOError, PermissionError)):
            lock(second.fileno(), wait=False)
        waiting = threading.Thread(target=lock, args=(second.fileno(),), kwargs={"wait": True})
        waiting.start()
        waiting.join(timeout=0.1)
        assert waiting.is_alive()
        first.close()
        waiting.join(timeout=60)
        assert not waiting.is_alive()
