"""Processes that torchrun has started: how they meet and what they tell each other."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Team", "join"]

# Ranks whose libraries compile or tune something wait for each other.
LIMIT = timedelta(minutes=5)


@dataclass(frozen=True)
class Team:
    """This process among the others."""

    device: torch.device
    control: dist.ProcessGroup
    """All ranks, for what is not measured."""

    @property
    def cuda(self) -> bool:
        """Return whether the device has a queue of its own."""
        return self.device.type == "cuda"

    def from_all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. All ranks must call it."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def slowest(self, times: list[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one. All ranks must call it."""
        return [max(of_ranks) for of_ranks in zip(*self.from_all(times), strict=True)]


def join(device_type: str, module: str) -> Team:
    """Return this process' place among those that torchrun started.

    Args:
        device_type: "cuda", rank r on device r, or "cpu".
        module: that torchrun should have been given, for the error.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node N -m {module} ...")
    cuda = device_type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # The machine's own name need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=LIMIT)
    return Team(device, dist.new_group(backend="gloo", timeout=LIMIT))
