"""One device: two lines make the optimizer, one scheduler serves Muon and AdamW.

torchrun --nproc-per-node 1 examples/plain.py
"""

import torch
from tiny import GPT, batch, tell

import quintic


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        loss = model(*batch(step, device))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(optimizer.last_step())
    return tell(losses)


if __name__ == "__main__":
    main()
