"""Small models of parameters that some ranks share, and which ranks these connect."""

import math

import torch
from harness import DEVICE
from models import local_of
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import quintic

__all__ = ["LAYOUTS", "SHARED", "Model", "connected_with", "world_of"]

# Which ranks hold each parameter: an expert before a dense layer, chains and rings of pairs, and ranks that nothing
# connects.
SHARED = {
    "expert and dense": {"expert": (0, 1), "dense": (0, 1, 2)},
    "dense and expert": {"dense": (0, 1, 2), "expert": (1, 2)},
    "pairs of experts": {"expert_0": (0, 2), "expert_1": (1, 3), "dense": (0, 1, 2, 3)},
    "chain": {"last": (2, 3), "first": (0, 1), "middle": (1, 2)},
    "ring": {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (0, 3)},
    "islands": {"left": (0, 1), "right": (2, 3)},
    "an island of one": {"left": (0, 1), "right": (2,)},
}

LAYOUTS = ("averaged", "replicated", "sharded", "cut", "copied")


def world_of(shared):
    return 1 + max(max(ranks) for ranks in shared.values())


def connected_with(rank, shared):
    """All ranks that a rank is connected with, by following parameters until no rank is added."""
    found = {rank}
    while True:
        more = found.union(*(ranks for ranks in shared.values() if found & set(ranks)))
        if more == found:
            return found
        found = more


class Model(nn.Module):
    """Parameters of ones, in groups of their own, and an optimizer that moves every entry with a gradient of ones.

    Args:
        rank: of this process.
        shared: name -> ranks.
        layout: one of `LAYOUTS`; of those with `comms` parameters are plain tensors.
        own: names of groups -> their options.
        options: of the optimizer.
    """

    def __init__(self, rank, shared, layout="averaged", own=None, **options):
        super().__init__()
        groups = []
        self.params = nn.ParameterDict()
        # Every rank calls, in one order, whatever it holds.
        process_groups = {name: dist.new_group(list(ranks)) for name, ranks in shared.items()}
        meshes = {name: DeviceMesh(DEVICE, list(ranks)) for name, ranks in shared.items() if len(ranks) > 1}
        for name, ranks in shared.items():
            if rank not in ranks:
                continue
            ones, of_group = torch.ones(6, 4, device=DEVICE), {}
            if len(ranks) == 1:
                pass
            elif layout in ("cut", "copied"):
                ones = distribute_tensor(ones, meshes[name], [Shard(0) if layout == "cut" else Replicate()])
            else:
                of_group = {"comms": layout, "process_group": process_groups[name]}
            self.params[name] = nn.Parameter(ones)
            groups.append({"params": [(name, self.params[name])], **of_group, **(own or {}).get(name, {})})
        self.optimizer = quintic.Muon(groups, lr=0.5, **options) if groups else None

    def give(self, bad=()):
        """Set gradients: entries that are not finite in the parameters named, ones elsewhere."""
        for name, param in self.params.items():
            param.grad = torch.full_like(param, math.inf if name in bad else 1.0)

    def moved(self):
        """Return the names of the parameters that are no longer ones; their entries are all alike."""
        found = set()
        for name, param in self.params.items():
            is_one = local_of(param.detach()) == 1
            assert bool(is_one.all()) or not bool(is_one.any()), name
            if is_one.numel() and not bool(is_one.any()):
                found.add(name)
        return found

    def held(self):
        """Return the names of the parameters of which this rank has entries."""
        return {name for name, param in self.params.items() if local_of(param).numel()}
