"""What a profiler and the log show of a step that several ranks make."""

import logging

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import quintic

TRAVEL = {
    "averaged": ["momentum", "send directions", "receive directions", "orthogonalize", "send updates"],
    "sharded": ["send gradients", "receive gradients", "momentum", "orthogonalize", "update weights", "send weights"],
    "replicated": ["momentum", "orthogonalize", "update weights"],
}
TRAVEL["fsdp"] = TRAVEL["averaged"] = [*TRAVEL["averaged"], "receive updates", "update weights"]
TRAVEL["sharded"] += ["receive weights"]


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def watched(rank, world_size, layout):
    """The stages of the first Muon bucket in their order, all names of ranges, and the log."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(DEVICE)
    options = {}
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh(DEVICE, (world_size,)))
    else:
        options["comms"] = layout
    optimizer = quintic.Muon(quintic.param_groups(model, rules=[quintic.Rule("*.weight", "muon")]), **options)
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    logger, kept = logging.getLogger("quintic"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    optimizer.step()
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    names = [event.name for event in profiled.events() if event.name.startswith("quintic.")]
    number = next(number for number, bucket in enumerate(optimizer.plan()) if bucket.algorithm == "muon")
    stages = [name.rpartition("/")[2] for name in names if name.startswith(f"quintic.step/bucket {number} muon ")]
    return stages, names, kept.lines, number


@pytest.mark.parametrize("layout", TRAVEL)
def test_stages_and_owners_on_two_ranks(layout):
    found = run(watched, 2, layout)
    for rank, (stages, names, lines, number) in enumerate(found):
        assert stages == TRAVEL[layout]
        assert ("quintic.step/average gradients" in names) == (layout == "replicated")
        assert any(line.startswith(f"plan of rank {rank}: ") for line in lines)
        owners = {line for line in lines if line.startswith(f"bucket {number}: rank ")}
        if layout == "replicated":
            assert owners == {f"bucket {number}: rank {rank} owns 0.weight, 1.weight, 2.weight"}
        else:
            owned = sorted(name for line in owners for name in line.partition(" owns ")[2].split(", "))
            assert owned == ["0.weight", "1.weight", "2.weight"]
            assert len(owners) == 2
    if layout != "replicated":
        owners = [{line for line in lines if line.startswith(f"bucket {n}: rank ")} for _, _, lines, n in found]
        assert owners[0] == owners[1]
