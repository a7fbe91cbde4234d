"""Accelerate: `prepare` moves the model and wraps it in DDP, or with --fsdp shards it under FSDP2.

torchrun --nproc-per-node 2 examples/hf_accelerate.py --fsdp
"""

import argparse

import shims
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny import GPT, batch, tell

import quintic


def main(steps: int = 30, *, fsdp: bool = False) -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    shims.accelerate()
    plugin = (
        FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
        )
        if fsdp
        else None
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = GPT()
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3, comms="none" if fsdp else "averaged")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        x, y = batch(step, accelerator.device, accelerator.process_index, accelerator.num_processes)
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return tell(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    main(**vars(parser.parse_args()))
