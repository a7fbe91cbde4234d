"""HSDP: FSDP2 within pairs of ranks (the GPUs of a node, in a real run), copies of the model in each pair.

torchrun --nproc-per-node 4 examples/hsdp.py
"""

import torch
import torch.distributed as dist
from tiny import GPT, batch, finish, mean_over_ranks, start, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quintic


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    device = start()
    torch.manual_seed(0)
    model = GPT().to(device)
    shards = min(2, dist.get_world_size())
    copies = dist.get_world_size() // shards
    mesh = init_device_mesh(device.type, (copies, shards), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Whether all ranks divide the work, or each copy does all of it, is chosen by an estimate: replicas="auto".
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        loss = model(*batch(step, device, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return tell(losses)


if __name__ == "__main__":
    main()
    finish()
