"""Run an example as torchrun would: `main` of examples/NAME.py on processes with torchrun's environment variables."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

sys.path.append(str(ROOT / "tests" / "distributed"))

import harness  # noqa: E402

__all__ = ["EXAMPLES", "ROOT", "run_example"]


def run_example(name: str, ranks: int = 1, timeout: float = 60.0, **arguments: Any) -> list[Any]:
    """Call `main(**arguments)` of an example on new processes and return the results by rank.

    The processes join no group beforehand; the rendezvous that torchrun would host is here, at a free port.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many GPUs")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return harness.run(_main, ranks, name, store.port, arguments, timeout=timeout)


def _main(rank: int, world_size: int, name: str, port: int, arguments: dict[str, Any]) -> Any:
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
        }
    )
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name).main(**arguments)
