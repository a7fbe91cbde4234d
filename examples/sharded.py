"""Plain data parallelism with divided state, as ZeRO-1: the optimizer averages gradients, no wrapper is needed.

torchrun --nproc-per-node 2 examples/sharded.py
"""

import torch
import torch.distributed as dist
from tiny import GPT, batch, finish, mean_over_ranks, start, tell

import quintic


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    device = start()
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = GPT().to(device)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3, comms="sharded")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        loss = model(*batch(step, device, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()  # averages gradients on their way to the owners; the weights come back
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return tell(losses)


if __name__ == "__main__":
    main()
    finish()
