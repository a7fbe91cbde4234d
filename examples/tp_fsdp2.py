"""Tensor parallelism over pairs of ranks, FSDP2 over the rest: the optimizer reads the layout from each DTensor.

torchrun --nproc-per-node 4 examples/tp_fsdp2.py
"""

import torch
import torch.distributed as dist
from tiny import GPT, batch, finish, mean_over_ranks, start, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quintic

COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.out", "mlp.down")


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    device = start()
    torch.manual_seed(0)
    model = GPT().to(device)
    tensor = min(2, dist.get_world_size())
    mesh = init_device_mesh(device.type, (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        styles = {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
        parallelize_module(block, mesh["tensor"], styles)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        loss = model(*batch(step, device, mesh["data"].get_local_rank(), mesh["data"].size()))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return tell(losses)


if __name__ == "__main__":
    main()
    finish()
