"""How this process was started (torchrun, make, script or module), and commands in messages that match it.

torchrun passes ranks in environment variables. Commands in messages are written so that the user can type them, in the
way that this process was started. Nothing here imports PyTorch.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quintic.errors import ConfigError

__all__ = [
    "Launch",
    "check_launcher",
    "environment_number",
    "hint",
    "install_command",
    "launched",
    "program",
    "with_program",
]

# The Makefile sets this variable to `make`, for the commands in `_MADE`.
_STARTED_BY = "QUINTIC_STARTED_BY"
_MADE = frozenset({"train", "compare"})

# Launchers other than torchrun -> the variable with the number of processes that they started. SLURM_NTASKS would be
# wrong: shells of salloc and scripts of sbatch also have it, although they are single processes.
_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}

# Texts without characters that are special to shells or make.
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)

# `quintic` before a command's name in a message, but not in a path or in `-m quintic train`.
_COMMAND_IN_TEXT = re.compile(
    r"(?<![\w./-])(?<!-m )quintic(?= (?:train|compare|prepare|sample|eval|report|plan|rates|export|COMMAND)\b)"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among the processes of torchrun; the defaults are for a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Number of processes on this host."""
    restarts: int = 0
    """Number of restarts so far (`torchrun --max-restarts`)."""
    may_restart: bool = False
    run_name: str | None = None
    """Name for a run without `--run`, the same after every restart; None if processes are not restarted."""


def launched() -> Launch:
    """Read torchrun's environment variables.

    Raises:
        ConfigError: a variable is not a number, or the variables do not fit each other.
    """
    launch = Launch(
        rank=environment_number("RANK", 0),
        size=max(1, environment_number("WORLD_SIZE", 1)),
        local_rank=environment_number("LOCAL_RANK", 0),
        local_size=max(1, environment_number("LOCAL_WORLD_SIZE", 1)),
        restarts=environment_number("TORCHELASTIC_RESTART_COUNT", 0),
        may_restart=environment_number("TORCHELASTIC_MAX_RESTARTS", 0) > 0,
        run_name=_run_name(),
    )
    if launch.size > 1 and not ("RANK" in os.environ and "MASTER_ADDR" in os.environ):
        raise ConfigError(
            f"WORLD_SIZE is {launch.size} without RANK and MASTER_ADDR: start several processes with torchrun "
            "--nproc-per-node N -m quintic ..., or unset WORLD_SIZE"
        )
    if not 0 <= launch.rank < launch.size or not 0 <= launch.local_rank < launch.local_size:
        raise ConfigError(
            f"RANK {launch.rank} of WORLD_SIZE {launch.size} and LOCAL_RANK {launch.local_rank} of LOCAL_WORLD_SIZE "
            f"{launch.local_size} do not fit each other: start with torchrun, or unset them"
        )
    return launch


def check_launcher() -> None:
    """Check that this process is not one of several unconnected ones, each of which would train the whole run.

    Raises:
        ConfigError: srun or mpirun started several processes, without torchrun's variables.
    """
    if os.environ.get("WORLD_SIZE", "").strip():
        return
    for launcher, name in _OTHER_LAUNCHERS.items():
        # Of the tasks of `srun --ntasks 8 --pty bash`, only one has a terminal and a user who types this command.
        is_shell = launcher == "srun" and "SLURM_PTY_PORT" in os.environ
        if not is_shell and (size := environment_number(name, 1)) > 1:
            raise ConfigError(
                f"{launcher} started {size} processes ({name}), and each would train the whole run: let it start one "
                f"torchrun on each host (torchrun --nproc-per-node N -m quintic train ...), or unset {name}"
            )


def _run_name() -> str | None:
    """Return a run name made from torchrun's run id; None without restarts or without an id."""
    if not environment_number("TORCHELASTIC_MAX_RESTARTS", 0):
        return None
    launch = re.sub(r"[^A-Za-z0-9]+", "-", os.environ.get("TORCHELASTIC_RUN_ID", "")).strip("-")
    # torchrun's id is "none" if it was not given.
    return None if launch in ("", "none") else f"torchrun-{launch[:36]}"


def environment_number(name: str, default: int) -> int:
    """Return the whole number in an environment variable; the default if it is empty or not set.

    Raises:
        ConfigError: the variable is not a number.
    """
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a number: unset it, or start with torchrun") from None


def program() -> str:
    """Return the command that runs this program from the shell: `quintic`, `.venv/bin/quintic`, ..."""
    started = Path(sys.argv[0] or "-")
    if started.stem in ("quintic", "quintic-script"):
        on_path = shutil.which("quintic")
        is_this = on_path is not None and os.path.realpath(on_path) == os.path.realpath(started)
        return "quintic" if is_this else _shown(started)
    if started.name == "__main__.py" and started.parent.name == "quintic":
        return f"{_python()} -m quintic"
    return "quintic"


def hint(command: str, options: Sequence[str] = ()) -> str:
    """Return the command line that runs a command with these options in the way that this process was started."""
    by_make = os.environ.get(_STARTED_BY) == "make" and command in _MADE
    if by_make and all(_PLAIN.fullmatch(option) for option in options):
        return f'make {command} ARGS="{" ".join(options)}"' if options else f"make {command}"
    return " ".join([program(), command, *map(shlex.quote, options)])


def with_program(text: str) -> str:
    """Return a message with `quintic COMMAND` replaced by the command that can be typed here."""
    name = program()
    return _COMMAND_IN_TEXT.sub(lambda match: name, text)


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml into the running Python."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        folder = "." if checkout == Path.cwd() else str(checkout)
        wanted = ["--editable", f"{folder}[{extra}]"]
    else:  # install the packages of the extra by name, because no package index has Quintic
        asked = importlib.metadata.requires("quintic") or []
        marker = re.compile(rf"""extra *== *['"]{re.escape(extra)}['"]""")
        wanted = [need.partition(";")[0].strip() for need in asked if marker.search(need)]
    return f"{_python()} -m pip install {shlex.join(wanted)}"


def _python() -> str:
    """Return the command that runs this Python."""
    running = Path(sys.executable)
    for name in ("python", "python3"):
        on_path = shutil.which(name)
        # Links are not resolved, because the Python of a virtual environment is a link to the base one.
        if on_path is not None and os.path.abspath(on_path) == os.path.abspath(running):
            return name
    return _shown(running)


def _shown(path: Path) -> str:
    """Return a path quoted for the shell, relative to the working folder if it lies inside."""
    full = os.path.abspath(path)
    try:
        short = os.path.relpath(full)
    except ValueError:  # another drive
        short = full
    inside = not short.startswith(os.pardir)
    return shlex.quote((short if os.sep in short else os.path.join(os.curdir, short)) if inside else full)
