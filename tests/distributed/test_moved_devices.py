"""Process groups of parameters that are moved to another device after the optimizer was made."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run
from torch import nn

import quintic
from quintic.optim.comms import communicators
from quintic.optim.comms.communicators import Communicators
from quintic.optim.layout.layouts import replicated_layout


def check_group_without_cpus(rank, world_size):
    """NCCL knows GPUs alone, and models are often made on the host; here gloo is told to do the same."""
    param = nn.Parameter(torch.ones(4, 6))
    process_group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2), group=process_group)
    for comms in ("averaged", "sharded", "replicated"):
        optimizer = quintic.Muon([param], comms=comms, process_group=process_group)
        assert optimizer.plan().buckets[0].device == torch.device("cpu")


def test_the_host_may_be_unknown_to_the_process_group_at_construction():
    run(check_group_without_cpus, 2, timeout=60)


def check_warm_ups(rank, world_size):
    found, made = Communicators(), []
    layout = replicated_layout((3, 3), range(world_size))
    with (
        mock.patch.object(communicators, "warm_up", lambda group, device: made.append(device.type)),
        mock.patch.object(communicators, "supports_device", lambda group, device: device.type != "meta"),
    ):
        for device in ("meta", "cpu", "cpu", "cuda", "cuda", "cpu"):
            params = [SimpleNamespace(device=torch.device(device)) for _ in range(2)]
            found.connect([SimpleNamespace(comms="averaged", process_group=None, params=params)], [[layout, layout]])
            made.append("")
    return " ".join(made)


def test_collectives_run_once_on_every_kind_of_device():
    assert run(check_warm_ups, 2, timeout=60) == [" cpu   cuda   "] * 2
