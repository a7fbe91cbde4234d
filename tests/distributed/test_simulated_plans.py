"""Rehearsals against real ranks: what every rank plans, sends and keeps is what was foretold without it."""

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quintic
from quintic.optim.comms import collectives as comms
from quintic.optim.layout.layouts import layout_of, local_tensor
from quintic.simulate.parallelism import layouts_by_name
from quintic.simulate.planned_models import Decoder, Sizes
from quintic.simulate.simulate import simulate_plan

DENSE = Sizes(layers=2, width=10, heads=2, kv_heads=1, head_dim=6, hidden=14, vocab_size=19)
CUT = Sizes(layers=1, width=16, heads=3, kv_heads=3, head_dim=8, hidden=32, vocab_size=19)
MIXTURE = Sizes(layers=1, width=10, heads=2, kv_heads=1, head_dim=6, hidden=6, vocab_size=19, qk_norm=True, experts=5)


def fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    styles = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    for layer in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
        styles[f"model.layers.*.{layer}_proj"] = ColwiseParallel()
    for layer in ("self_attn.o", "mlp.down"):
        styles[f"model.layers.*.{layer}_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, styles)


def copies(model, mesh):
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(whole))


def expert_parallel(model, mesh):
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, param in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
        fully_shard(experts, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh._flatten("all"))


def wrap(model, mesh, names):
    if names == ("dp",):
        return
    if names == ("replicate",):
        copies(model, mesh)
    elif "ep" in names:
        expert_parallel(model, mesh)
    else:
        if "tp" in names:
            tensor_parallel(model, mesh["tp"])
        data = tuple(name for name in names if name != "tp")
        if data:
            fsdp(model, mesh[data])


class Counter:
    """Counts the bytes that this rank sends to others."""

    def __init__(self, monkeypatch, rank):
        self.sent, self._rank = 0, rank
        self._all_to_all, self._all_gather = dist.all_to_all_single, comms._all_gather
        monkeypatch.setattr(comms.dist, "all_to_all_single", self.all_to_all)
        self._broadcast = dist.broadcast
        monkeypatch.setattr(comms, "_all_gather", self.all_gather)
        monkeypatch.setattr(comms.dist, "broadcast", self.broadcast)

    def broadcast(self, tensor, source, **options):
        if source == self._rank:
            self.sent += tensor.nbytes * (dist.get_world_size(options["group"]) - 1)
        return self._broadcast(tensor, source, **options)

    def all_to_all(self, received, send, receives, sends, **options):
        mine = dist.get_group_rank(options["group"], self._rank)
        self.sent += (sum(sends) - sends[mine]) * send.element_size()
        return self._all_to_all(received, send, receives, sends, **options)

    def all_gather(self, received, send, **options):
        self.sent += send.nbytes * (dist.get_world_size(options["group"]) - 1)
        return self._all_gather(received, send, **options)


def real(rank, shape, names, sizes, dtype, options):
    """One rank's plan, messages and state, and the places of its state."""
    torch.manual_seed(0)
    model = Decoder(sizes).to(DEVICE, dtype)
    wrap(model, init_device_mesh(DEVICE, shape, mesh_dim_names=names), names)
    comms_option = {"comms": "averaged"} if names == ("dp",) else {}
    optimizer = quintic.Muon(quintic.param_groups(model), **comms_option, **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    with pytest.MonkeyPatch.context() as monkeypatch:
        optimizer.step()  # connects the ranks and compares plans
        counter = Counter(monkeypatch, rank)
        optimizer.step()
    layouts = {}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            layouts[name] = layout_of(name, param)
    state = sum(local_tensor(value).nbytes for values in optimizer.state.values() for value in values.values())
    plan = optimizer.plan()
    return {
        "buckets": sorted((bucket.method, bucket.flops, bucket.workspace_bytes) for bucket in plan),
        "balance": plan.balance,
        "sent": counter.sent,
        "state": state,
        "workspace": plan.peak_workspace_bytes,
        "layouts": layouts,
    }


BF16 = {"master": "mantissa", "state_dtype": "bf16"}
CASES = {
    # Shards of equal sizes, and so of equal buffers for offloaded state.
    2: [
        ((2,), ("fsdp",), DENSE, torch.bfloat16, BF16 | {"offload": True, "max_workspace_bytes": 4000}),
        ((2,), ("fsdp",), DENSE, torch.float32, {"offload": True, "update_rule": "adamuon"}),
        ((2,), ("tp",), DENSE, torch.bfloat16, {"offload": True, "master": "fp32"}),
        ((2,), ("dp",), DENSE, torch.bfloat16, BF16),
        ((2,), ("tp",), CUT, torch.float32, {"state_dtype": "int8"}),
    ],
    3: [
        ((3,), ("fsdp",), DENSE, torch.float32, {}),
        ((3,), ("fsdp",), MIXTURE, torch.bfloat16, {"normalize": "neuron", "master": "mantissa"}),
        ((3,), ("dp",), DENSE, torch.float32, {"normalize": "neuron"}),
        ((3,), ("replicate",), DENSE, torch.float32, {}),
        ((3,), ("tp",), DENSE, torch.float32, {"max_workspace_bytes": 8000}),
        ((3,), ("fsdp",), DENSE, torch.float32, {"max_workspace_bytes": 8000}),
        ((3,), ("tp",), CUT, torch.float32, {"state_dtype": "int8"}),
    ],
    4: [
        ((2, 2), ("replicate", "fsdp"), DENSE, torch.float32, {"normalize": "neuron", "replicas": "divide"}),
        ((2, 2), ("replicate", "fsdp"), DENSE, torch.float32, {"normalize": "neuron", "replicas": "repeat"}),
        ((2, 2), ("replicate", "fsdp"), DENSE, torch.float32, {"normalize": "neuron"}),
        ((2, 2), ("fsdp", "tp"), DENSE, torch.float32, {"replicas": "repeat", "max_workspace_bytes": 8000}),
        ((2, 2), ("fsdp", "tp"), DENSE, torch.bfloat16, {"master": "fp32"}),
        ((2, 2), ("fsdp", "tp"), CUT, torch.float32, {"state_dtype": "int8"}),
        ((2, 2), ("fsdp", "ep"), MIXTURE, torch.float32, {"normalize": "neuron"}),
    ],
}


def several(rank, world_size, cases):
    return [real(rank, *case) for case in cases]


@pytest.mark.parametrize("world_size", CASES)
def test_every_rank_does_what_was_simulated(world_size):
    by_rank = run(several, world_size, CASES[world_size], timeout=110)
    for number, (shape, names, sizes, dtype, options) in enumerate(CASES[world_size]):
        with torch.device("meta"):
            model = Decoder(sizes).to(dtype)
        optimizer = quintic.Muon(quintic.param_groups(model), **options)
        # The ranks of a test are on one host.
        simulation = simulate_plan(optimizer, shape, names, device=DEVICE, node_size=world_size)
        places = {}
        groups = optimizer._plans.current_groups()
        for group, found in zip(groups, layouts_by_name(groups, shape, names), strict=True):
            places |= dict(zip(group.param_names, found, strict=True))
        for rank, found in enumerate(by_rank):
            one, context = found[number], f"{names} of {shape}, rank {rank}"
            loads = [load for load in simulation.bucket_loads if load.present[rank]]
            assert one["buckets"] == sorted(
                (load.method, int(load.flops[rank]), int(load.workspace_bytes[rank])) for load in loads
            ), context
            assert one["sent"] == int(simulation.bytes_sent[rank]), context
            assert one["state"] == int(simulation.state_bytes[rank]), context
            assert one["workspace"] == int(simulation.workspace_bytes[rank]), context
            assert one["balance"] == pytest.approx(simulation.balance), context
            for name, layout in one["layouts"].items():
                if layout is not None:
                    assert layout.box_of(rank) == places[name].box_of(rank), f"{context}: {name}"
