"""One process among the others: how they meet, agree and begin together."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Ranks:
    """This process among the others, for all of its jobs.

    Attributes:
        device: of this process.
        control: a gloo group of all ranks.
        meshes: made so far, see `Place`.
        reference: the last one.
    """

    device: torch.device
    control: dist.ProcessGroup
    meshes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    reference: Any = None

    @property
    def cuda(self) -> bool:
        """Return whether the device has a queue of its own."""
        return self.device.type == "cuda"

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values. All ranks must call it."""
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return largest.item()

    def all_true(self, value: bool) -> bool:
        """Return whether all ranks give true. All ranks must call it."""
        return self.largest(float(not value)) == 0

    def align(self) -> None:
        """Let devices begin together. All ranks must call it."""
        dist.all_reduce(torch.zeros((), device=self.device))


@functools.cache
def join(device_type: str, store: str, rank: int, number: int) -> Ranks:
    """Return this process' place among the others; they meet in a file."""
    cuda = device_type == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        square = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        # Any training process has the workspace of cuBLAS: its size is not the optimizer's.
        torch.cuda.synchronize(square.mm(square).device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=number,
        device_id=device if cuda else None,
    )
    return Ranks(device, dist.new_group(backend="gloo"))
