"""FSDP2, saved in pieces by torch.distributed.checkpoint; resumed on as many or other ranks, or in another layout.

torchrun --nproc-per-node 2 examples/fsdp2.py --until 15 --save checkpoint
torchrun --nproc-per-node 2 examples/fsdp2.py --resume checkpoint
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import GPT, batch, finish, mean_over_ranks, start, tell
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quintic


def main(steps: int = 30, *, until: int | None = None, save: str = "", resume: str = "") -> list[float]:
    """Train up to step `until`, from a checkpoint or the beginning, and return the losses of the steps made."""
    device = start()
    torch.manual_seed(0)
    model = GPT().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3)  # after fully_shard
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    if resume:
        state = current_state(model, optimizer, schedule)
        dcp.load(state, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    losses = []
    for step in range(schedule.last_epoch, until or steps):
        loss = model(*batch(step, device, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    if save:
        dcp.save(current_state(model, optimizer, schedule), checkpoint_id=save)  # each time to a new folder
    return tell(losses)


def current_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> dict[str, Any]:
    """Return the state for a checkpoint; all ranks must call it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "schedule": schedule.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, help="stop before this step, to go on later")
    parser.add_argument("--save", default="", metavar="FOLDER", help="where to save at the end")
    parser.add_argument("--resume", default="", metavar="FOLDER", help="what to go on from")
    main(**vars(parser.parse_args()))
    finish()
