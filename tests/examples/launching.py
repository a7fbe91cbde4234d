"""Run an example as torchrun would: `main` of examples/NAME.py on processes with torchrun's environment variables."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

sys.path.append(str(ROOT / "tests" / "distributed"))

import harness  # noqa: E402

__all__ = ["EXAMPLES", "ROOT", "needs", "run_example"]


def run_example(name: str, *calls: Mapping[str, Any], ranks: int = 1, timeout: float = 60.0) -> list[Any]:
    """Call `main` of an example on new processes, once with each call's arguments; return what rank 0 gets.

    The processes join no group beforehand; the rendezvous that torchrun would host is here, at a free port. What `main`
    returns must be the same on all ranks.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many GPUs")
    stores = []

    def make_args() -> tuple[str, int, tuple[Mapping[str, Any], ...]]:
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return name, stores[-1].port, calls or ({},)

    results = harness.run_with(make_args, _main, ranks, timeout=timeout)
    assert all(result == results[0] for result in results), results
    return results[0]


def needs(*libraries: str) -> None:
    """Skip a test whose libraries are not installed; finding that out imports none of them."""
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: `make clients`, or `make vision` for timm")


def _main(rank: int, world_size: int, name: str, port: int, calls: tuple[Mapping[str, Any], ...]) -> list[Any]:
    dist.destroy_process_group()  # the harness's own
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # Nothing may be downloaded.
            "HF_HUB_OFFLINE": "1",
        }
    )
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(name)
    return [example.main(**arguments) for arguments in calls]
