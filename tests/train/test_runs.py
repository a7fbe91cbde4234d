"""Run folders: made in one move, found again, and never overwritten."""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from durability import disk_events, durable_names

from quintic.errors import ConfigError
from quintic.report.history import METRICS_FILE, SOURCE_FILE
from quintic.train import runs
from quintic.train.config import Config, ModelConfig, RunConfig
from quintic.train.runs import (
    CONFIG_FILE,
    check_new_run,
    create_run,
    discard_unstarted,
    find_run,
    lock_run,
    save_comparison,
    wandb_id,
)
from quintic.train.saved_config import load_config, with_options


def config(runs_dir: Path, run: str | None = None, depth: int = 4) -> Config:
    return Config(model=ModelConfig(depth=depth), run=RunConfig(runs_dir=runs_dir, run=run))


def test_a_new_run_holds_its_configuration_and_nothing_else(tmp_path: Path) -> None:
    wanted = config(tmp_path / "deep" / "runs", "first", depth=3)
    folder = create_run(wanted)
    assert folder == tmp_path / "deep" / "runs" / "first"
    names = {path.name for path in folder.iterdir()}
    assert {CONFIG_FILE, SOURCE_FILE} <= names <= {CONFIG_FILE, SOURCE_FILE, "source.diff"}
    assert load_config(folder / CONFIG_FILE) == wanted
    assert list(folder.parent.iterdir()) == [folder]


def test_each_run_has_a_wandb_id_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    first, second = (create_run(config(tmp_path / place, "base run")) for place in ("here", "there"))
    ids = {wandb_id(first), wandb_id(second)}
    assert len(ids) == 2
    assert all(re.fullmatch(r"[0-9a-f]{16}", one) for one in ids)
    assert wandb_id(first) == wandb_id(first)
    kept = wandb_id(first)
    moved = first.rename(tmp_path / "base run")  # to another folder of runs
    assert wandb_id(moved) == kept
    copied = Path(shutil.copytree(moved, tmp_path / "branch"))
    assert wandb_id(copied) != kept
    assert wandb_id(moved) == kept
    shutil.rmtree(moved)
    assert wandb_id(create_run(config(tmp_path, "base run"))) != kept  # deleted and made again


def test_a_new_run_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = disk_events(monkeypatch)
    create_run(config(tmp_path, "first"))
    assert durable_names(events) == ["first"]


def test_unnamed_runs_of_one_second_get_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Clock":
            return cls(2026, 5, 4, 3, 2, 1)

    monkeypatch.setattr(runs, "datetime", Clock)
    names = [create_run(config(tmp_path)).name for _ in range(3)]
    assert names == ["20260504-030201-d4", "20260504-030201-d4-2", "20260504-030201-d4-3"]


def test_an_existing_run_is_not_touched(tmp_path: Path) -> None:
    folder = create_run(config(tmp_path, "a"))
    before = (folder / CONFIG_FILE).read_bytes()
    for make in (check_new_run, create_run):
        with pytest.raises(ConfigError, match="a exists: choose another --run, or continue it with --resume --run a"):
            make(config(tmp_path, "a", depth=9))
    assert (folder / CONFIG_FILE).read_bytes() == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.md").touch()
    (tmp_path / "file").touch()
    for name in ("thesis", "file"):
        with pytest.raises(ConfigError, match=f"{name} exists: choose another --run$"):
            create_run(config(tmp_path, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis"]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    check_new_run(config(tmp_path, "a"))
    assert (create_run(config(tmp_path, "a")) / CONFIG_FILE).is_file()


@pytest.mark.parametrize(("owner", "name"), [(Path, "write_text"), (os, "fsync"), (os, "replace")])
def test_a_full_disk_leaves_nothing(owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(ConfigError, match=r"a: cannot be made \(No space left on device\); choose another --runs-dir"):
        create_run(config(tmp_path, "a"))
    assert list(tmp_path.iterdir()) == []


def test_a_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\); choose another --runs-dir"):
        create_run(config(tmp_path / "runs", "a"))


def test_files_that_vanish_while_runs_are_searched_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may be replacing a file of its run: reports and logs are written under a temporary name."""
    folder = create_run(config(tmp_path, "run"))
    (folder / ".report.html.7-ab.tmp").touch()
    is_file = Path.is_file

    def last_seen(path: Path) -> bool:
        found = is_file(path)
        if path.suffix == ".tmp":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", last_seen)
    assert find_run(tmp_path, None) == folder


def test_the_run_started_last_is_found(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "c", "a")):
        folder = create_run(config(tmp_path, name))
        os.utime(folder / CONFIG_FILE, ns=(0, 10**9 * (10 - age)))
    half_made = tmp_path / ".d.123.tmp"
    half_made.mkdir()
    (half_made / CONFIG_FILE).touch()
    (tmp_path / "notes").mkdir()
    assert find_run(tmp_path, None) == tmp_path / "b"
    assert find_run(tmp_path, "a") == tmp_path / "a"


def test_a_speedrun_is_found_where_a_log_is_enough(tmp_path: Path) -> None:
    """By the time of its first file: the log itself is written to until the run ends."""
    os.utime(create_run(config(tmp_path, "model")) / CONFIG_FILE, ns=(0, 20 * 10**9))
    for name, started in (("first", 10), ("last", 30)):
        (tmp_path / name).mkdir()
        for file, seconds in ((SOURCE_FILE, started), (METRICS_FILE, 100 - started)):
            (tmp_path / name / file).write_text("{}\n")
            os.utime(tmp_path / name / file, ns=(0, seconds * 10**9))
    assert find_run(tmp_path, None) == tmp_path / "model"
    assert find_run(tmp_path, None, allow_speedrun=True) == tmp_path / "last"
    assert find_run(tmp_path, "first", allow_speedrun=True) == tmp_path / "first"
    (tmp_path / "first" / SOURCE_FILE).unlink()  # as older versions left it
    assert find_run(tmp_path, None, allow_speedrun=True) == tmp_path / "first"
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ConfigError, match="holds no run yet"):
        find_run(tmp_path, None)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs holds no run yet; start one with: quintic train"):
        find_run(tmp_path / "runs", None)
    (tmp_path / "notes").mkdir()
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / METRICS_FILE).write_text("{}\n")
    with pytest.raises(
        ConfigError,
        match=r"race is a speedrun, or a run whose config\.json is lost, which cannot be resumed or repeated; use it",
    ):
        find_run(tmp_path, "race")
    with pytest.raises(ConfigError, match=r"notes is not a run: it has no config\.json; check --run and --runs-dir"):
        find_run(tmp_path, "notes")
    save_comparison(with_options(Config(), run="c", runs_dir=tmp_path), seeds=1, command="")
    with pytest.raises(ConfigError, match=r"c is no run but a comparison: name a run, or continue"):
        find_run(tmp_path, "c")
    for name in ("c-muon", "c-adamw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_FILE).touch()
    with pytest.raises(ConfigError, match=r"a comparison, of the runs c-adamw, c-muon: .*compare --resume --run c`"):
        find_run(tmp_path, "c")


def test_only_a_run_that_logged_nothing_is_discarded(tmp_path: Path) -> None:
    for name in ("started", "unstarted"):
        create_run(config(tmp_path, name))
    (tmp_path / "started" / "metrics.jsonl").touch()
    for name in ("started", "unstarted"):
        discard_unstarted(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["started"]


# -- one process for one run ------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from quintic.train.runs import lock_run
with lock_run(Path(sys.argv[1]), message=print):
    print("held", flush=True)
    sys.stdin.read()
"""


def never(text: str) -> None:
    raise AssertionError(text)


def try_to_hold(folder: Path) -> None:
    with lock_run(folder, message=never):
        pass


def test_a_run_is_held_by_one_process_until_it_dies(tmp_path: Path) -> None:
    folder = create_run(config(tmp_path, "a"))
    arguments = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            holder = (
                rf"{re.escape(str(folder))} is being trained by another process \(process {process.pid} on .+\): wait "
            )
            with pytest.raises(ConfigError, match=holder):
                try_to_hold(folder)
            # Nor is it discarded by the process that made it.
            discard_unstarted(folder)
            assert (folder / CONFIG_FILE).exists()
        finally:
            process.kill()
            process.wait(timeout=60)
    try_to_hold(folder)
    discard_unstarted(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_held_by_one_user_within_a_process(tmp_path: Path) -> None:
    folder, other = create_run(config(tmp_path, "a")), create_run(config(tmp_path, "b"))
    with lock_run(folder, message=never):
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* or choose another --run$"):
            try_to_hold(folder)
        try_to_hold(other)
    with pytest.raises(KeyError), lock_run(folder, message=never):
        raise KeyError
    try_to_hold(folder)


def failing(number: int) -> Callable[..., None]:
    def lock(descriptor: int, *, wait: bool) -> None:
        raise OSError(number, os.strerror(number))

    return lock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(config(tmp_path, "a"))
    monkeypatch.setattr(runs, "lock", failing(number))
    said: list[str] = []
    with lock_run(folder, message=said.append):
        assert len(said) == 1
        assert said[0].startswith(
            f"{folder} is on a file system without locks ({os.strerror(number)}): make sure that no"
        )


def test_another_failure_of_the_lock_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(config(tmp_path, "a"))
    monkeypatch.setattr(runs, "lock", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        try_to_hold(folder)
    monkeypatch.setattr(runs, "lock", failing(errno.EAGAIN))
    with pytest.raises(ConfigError, match="by another process: wait until it has ended or stop it"):
        try_to_hold(folder)
