"""Run folders: making, naming, finding and locking them; and the files of comparisons.

<runs-dir>/<run>/
    config.json               configuration; the folder of a speedrun has none
    tokenizer.json            copy of the text's tokenizer
    source.json, source.diff  the source that ran (source.py)
    metrics.jsonl             log (metrics.py)
    checkpoints/              (checkpoint.py)
    report.html               page of the run
    wandb-id.txt              with --wandb
    .lock                     locked by the process that trains the run
<runs-dir>/<comparison>.json  configuration of a `quintic compare`, from which it can be continued
"""

import contextlib
import errno
import glob
import json
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from quintic.durable import json_object, lock, new_folder, unused, write_atomically
from quintic.errors import ConfigError, QuinticError
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.streams import say
from quintic.train.config import BaseRunConfig, Config
from quintic.train.saved_config import from_dict, load_config, to_dict
from quintic.train.source import source_files

__all__ = [
    "CONFIG_FILE",
    "TOKENIZER_FILE",
    "check_new_run",
    "create_run",
    "discard_unstarted",
    "find_comparison",
    "find_run",
    "is_finished",
    "lock_run",
    "newest_unfinished",
    "run_folder",
    "save_comparison",
    "wandb_id",
]

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
"""Allows using the model after its prepared text was deleted."""
_LOCK_FILE = ".lock"
_WANDB_FILE = "wandb-id.txt"

# Errors that file systems without locks raise.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


def check_new_run(config: Config) -> None:
    """Check that the run's folder can be made, before spending time on preparing text.

    Raises:
        ConfigError: a run of that name exists, or --runs-dir cannot be written.
    """
    runs_dir = config.run.runs_dir.absolute()
    # --runs-dir need not exist: its nearest existing parent must be writable.
    existing = next(folder for folder in (runs_dir, *runs_dir.parents) if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"--runs-dir {config.run.runs_dir}: {existing} is not a writable folder; choose another")
    if config.run.run is not None and _is_taken(config.run.runs_dir / config.run.run):
        raise _exists(config.run.runs_dir / config.run.run)


def create_run(config: Config) -> Path:
    """Make the folder of a new run, with its configuration and source in it, and return it.

    The folder appears in one move, complete or not at all.

    Raises:
        ConfigError: a run of that name exists, or the folder cannot be made.
    """
    files = {CONFIG_FILE: json.dumps(to_dict(config), indent=2) + "\n"}
    return run_folder(config.run, f"d{config.model.depth}", files)


def run_folder(run: BaseRunConfig, kind: str, files: Mapping[str, str]) -> Path:
    """Make the folder of a new run with its source and some files (name -> content) in it, and return it.

    It appears in one move, complete or not at all. Without a name in `run` it is named <date>-<time>-<kind>.

    Raises:
        ConfigError: a run of that name exists, or the folder cannot be made.
    """
    if run.run is not None:
        folder = run.runs_dir / run.run
    else:  # several runs may start within a second
        folder = unused(run.runs_dir / f"{datetime.now():%Y%m%d-%H%M%S}-{kind}")
    try:
        with new_folder(folder) as unfinished:
            for file, content in {**files, **source_files()}.items():
                (unfinished / file).write_text(content, encoding="utf-8")
            if _is_taken(folder):  # another process may have made it since `check_new_run`
                raise _exists(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); choose another --runs-dir or --run") from None
    return folder


def discard_unstarted(folder: Path) -> None:
    """Remove the folder of a run that failed before it logged anything, unless another process is training the run."""
    # `lock_run` raises ConfigError if another process has the run, and OSError if the folder is gone.
    with contextlib.suppress(ConfigError, OSError), lock_run(folder, message=lambda text: None):
        if not (folder / METRICS_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)


def wandb_id(folder: Path) -> str:
    """Return the id of a run at Weights & Biases, and keep it in the run's folder for resuming.

    The id is random because the service would merge runs of the same name from several places. A copied folder under
    another name gets a new id, because the service would drop its steps as already seen.
    """
    file = folder / _WANDB_FILE
    # The file has the id and the folder's name, so that a copy under another name is noticed.
    number, _, name = file.read_text(encoding="utf-8").rstrip("\n").partition(" ") if file.exists() else ("", "", "")
    if not number or name != folder.name:
        number = secrets.token_hex(8)
        write_atomically(file, f"{number} {folder.name}\n")
    return number


@contextlib.contextmanager
def lock_run(folder: Path, *, message: Callable[[str], None] = say) -> Iterator[None]:
    """Lock a run while the `with` block runs, so that no other process trains it.

    The system releases the lock if the process dies; the lock file stays. On a file system without locks, the block
    runs without one, after a warning through `message`.

    Raises:
        ConfigError: another process holds the lock.
        OSError: the lock file cannot be written.
    """
    # Opened without truncating it: until this process has the lock, the content is the holder's.
    with (folder / _LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            lock(file.fileno(), wait=False)
        except (BlockingIOError, PermissionError):  # the process that has the lock wrote its number into the file
            file.seek(0)
            holder = file.read()
            raise ConfigError(
                f"{folder} is being trained by another process{f' ({holder})' if holder else ''}: wait until it has "
                "ended or stop it, or choose another --run"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            message(
                f"{folder} is on a file system without locks ({error.strerror}): make sure that no other process "
                "trains this run"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield  # closing the file releases the lock


def find_run(runs_dir: Path, name: str | None, *, allow_speedrun: bool = False) -> Path:
    """Return the folder of a run, or of the run that was started last if `name` is None.

    Speedruns have a log and possibly checkpoints, but no configuration, so that they cannot be continued.

    Raises:
        ConfigError: there is no such run.
    """
    files = (CONFIG_FILE, METRICS_FILE) if allow_speedrun else (CONFIG_FILE,)
    if name is None:
        folders = _newest_first(runs_dir, *files)
        if not folders:
            raise ConfigError(f"{runs_dir} holds no run yet; start one with: quintic train")
        return folders[0]
    folder = runs_dir / name
    if any((folder / file).is_file() for file in files):
        return folder
    if (folder / METRICS_FILE).is_file():
        kind = f"a speedrun, or a run whose {CONFIG_FILE} is lost"
        advice = "use it with `quintic sample`, `eval`, `export` or `report`"
        raise ConfigError(f"{folder} is {kind}, which cannot be resumed or repeated; {advice}")
    if isinstance(json_object(runs_dir / f"{name}.json").get("comparison"), dict):
        of_it = ", ".join(sorted(path.parent.name for path in runs_dir.glob(f"{glob.escape(name)}-*/{CONFIG_FILE}")))
        raise ConfigError(
            f"{folder} is no run but a comparison{f', of the runs {of_it}' if of_it else ''}: name a run, or continue "
            f"the comparison with `quintic compare --resume --run {name}`"
        )
    raise ConfigError(f"{folder} is not a run: it has no {CONFIG_FILE}; check --run and --runs-dir")


def _newest_first(runs_dir: Path, *files: str) -> list[Path]:
    """Return the folders of runs that hold one of these files, the run started last first."""
    folders = {path.parent for file in files for path in runs_dir.glob(f"*/{file}")}
    # Unfinished folders have a leading dot.
    return sorted((folder for folder in folders if not folder.name.startswith(".")), key=_started, reverse=True)


def is_finished(folder: Path) -> bool:
    """Return whether a run has been trained and scored, and has written its samples, to its end.

    Raises:
        DataError: its log is damaged.
    """
    if not (folder / METRICS_FILE).is_file():
        return False
    kinds = [record.get("kind") for record in read_metrics(folder / METRICS_FILE)]
    wanted = {"sample", "core"} if load_config(folder / CONFIG_FILE).run.core is not None else {"sample"}
    return "final" in kinds and wanted <= set(kinds[kinds.index("final") :])


def newest_unfinished(runs_dir: Path) -> Path | None:
    """Return the folder of the run started last that is not finished, if there is one and its log can be read."""
    for folder in _newest_first(runs_dir, CONFIG_FILE):
        with contextlib.suppress(QuinticError):
            if not is_finished(folder):
                return folder
    return None


def save_comparison(config: Config, *, seeds: int, command: str) -> None:
    """Write the file of a comparison, <runs-dir>/<name>.json; `config` must have a name.

    Raises:
        OSError: the file cannot be written.
    """
    config.run.runs_dir.mkdir(parents=True, exist_ok=True)
    content = {"comparison": {"seeds": seeds, "command": command}, "config": to_dict(config)}
    write_atomically(config.run.runs_dir / f"{config.run.run}.json", json.dumps(content, indent=2) + "\n")


def find_comparison(runs_dir: Path, name: str | None) -> tuple[Path, Config, int, str]:
    """Return file, configuration, number of seeds and command line of a comparison, by default of the one started last.

    Raises:
        ConfigError: there is no such comparison, or its file is damaged.
    """
    paths = [runs_dir / f"{name}.json"] if name is not None else list(runs_dir.glob("*.json"))
    found = {path: json_object(path) for path in paths}
    started = [path for path in found if isinstance(found[path].get("comparison"), dict)]
    if not started:
        problem = f"{runs_dir} holds no comparison" if name is None else f"{paths[0]} is not a comparison"
        raise ConfigError(f"{problem} to continue; check --run and --runs-dir, or start one: quintic compare")
    path = max(started, key=lambda path: path.stat().st_mtime)
    facts = found[path]["comparison"]
    try:
        config = from_dict(found[path]["config"], origin=str(path))
        return path, config, int(facts["seeds"]), str(facts["command"])
    except ConfigError:  # its message already names the file and the field
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: damaged ({error!r}); start a new comparison, with another --run") from None


def _started(folder: Path) -> float:
    """Return the time at which a run was started, in seconds since 1970: that of the oldest file in its folder."""
    # Hidden files are temporary and may vanish.
    return min(file.stat().st_mtime for file in folder.glob("[!.]*") if file.is_file())


def _is_taken(folder: Path) -> bool:
    # An empty folder may be replaced by a new run.
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _exists(folder: Path) -> ConfigError:
    advice = f", or continue it with --resume --run {folder.name}" if (folder / CONFIG_FILE).is_file() else ""
    return ConfigError(f"{folder} exists: choose another --run{advice}")
