"""What torchrun says about this process, in environment variables; without PyTorch, so that it can be asked at once."""

import os
import re
from dataclasses import dataclass

from quintic.errors import ConfigError

__all__ = ["Launch", "environment_number", "launched"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What torchrun says about this process; one process that nobody launched by default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this host."""
    restarts: int = 0
    """How often the processes were started again (`torchrun --max-restarts`)."""
    may_restart: bool = False
    run_name: str | None = None
    """What to call a run without a name: the same after every restart, where the processes may be restarted."""


def launched() -> Launch:
    """Read torchrun's environment variables.

    Raises:
        ConfigError: one is not a number, or they do not fit each other.
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


def _run_name() -> str | None:
    """Name a run after the launch that may start it again; None where it will not, or has no name of its own."""
    if not environment_number("TORCHELASTIC_MAX_RESTARTS", 0):
        return None
    launch = re.sub(r"[^A-Za-z0-9]+", "-", os.environ.get("TORCHELASTIC_RUN_ID", "")).strip("-")
    # What torchrun says where it has neither drawn an id nor been given one.
    return None if launch in ("", "none") else f"torchrun-{launch[:36]}"


def environment_number(name: str, default: int) -> int:
    """Return a whole number from an environment variable of torchrun's; the default where it is empty or not set.

    Raises:
        ConfigError: it is something else.
    """
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a number: unset it, or start with torchrun") from None
