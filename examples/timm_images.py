"""A vision transformer and a convolutional network of timm; convolutions are matrices once they are flattened.

torchrun --nproc-per-node 2 examples/timm_images.py --model vit
torchrun --nproc-per-node 2 examples/timm_images.py --model resnet
"""

import argparse

import timm
import torch
import torch.distributed as dist
from tiny import finish, mean_over_ranks, start, tell
from torch.nn.parallel import DistributedDataParallel

import quintic

MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 4, "depth": 2}),
    "resnet": ("resnet10t.c3_in1k", {}),
}


def images(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's (16, 3, 16, 16) images of noise, and which colour is brighter: red, green, blue or none."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x, y = torch.randn(16, 3, 16, 16, generator=generator), torch.randint(4, (16,), generator=generator)
    x += 0.5 * (torch.arange(3) == y[:, None])[:, :, None, None]
    return x.to(device), y.to(device)


def main(steps: int = 30, *, model: str = "vit") -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    device = start()
    torch.manual_seed(0)
    name, options = MODELS[model]
    network = DistributedDataParallel(timm.create_model(name, num_classes=4, **options).to(device))
    # Without these rules convolutions go to AdamW. The first one sees pixels, not features, and stays there.
    rules = [quintic.Rule("layer*.conv?.weight", "muon", quintic.Flatten())] if model == "resnet" else []
    groups = quintic.param_groups(network.module, rules=rules, example=images(0, device)[0])
    optimizer = quintic.Muon(groups, lr=0.02, adamw_lr=3e-3, comms="averaged")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        x, y = images(step, device)
        loss = torch.nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    print(optimizer.last_step())
    return tell(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="vit")
    main(**vars(parser.parse_args()))
    finish()
