"""Lightning: automatic and manual optimization, and FSDP2 with ModelParallelStrategy.

python examples/lightning_loops.py --loop automatic
python examples/lightning_loops.py --loop manual
torchrun --nproc-per-node 2 examples/lightning_loops.py --loop fsdp2
"""

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny import GPT, batch, tell
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import quintic


class Automatic(lightning.LightningModule):
    """Lightning calls backward, step and zero_grad."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.model, self.losses = steps, GPT(), []

    def configure_optimizers(self) -> dict[str, Any]:
        """Called when the model is where it is trained, and sharded if it is."""
        groups = quintic.param_groups(self.model, example=batch(0, self.device, 0, 1))
        optimizer = quintic.Muon(groups, lr=0.02, adamw_lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, step: int) -> Tensor:
        loss = self.model(*batch(step, self.device, self.global_rank, self.trainer.world_size))
        self.losses.append(self.trainer.strategy.reduce(loss.detach()).item())
        return loss

    def training_step(self, data: Any, step: int) -> Tensor | None:
        return self.loss(step)


class Manual(Automatic):
    """The module does so itself."""

    automatic_optimization = False

    def training_step(self, data: Any, step: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(self.loss(step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class Sharded(Automatic):
    """FSDP2: the strategy has the mesh, the module says what is sharded."""

    def configure_model(self) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def main(steps: int = 30, *, loop: str = "automatic") -> list[float]:
    """Train, and return the losses, averaged over ranks."""
    torch.manual_seed(0)
    module = {"automatic": Automatic, "manual": Manual, "fsdp2": Sharded}[loop](steps)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_steps=steps,
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, tensor_parallel_size=1) if loop == "fsdp2" else "auto",
        use_distributed_sampler=False,  # all ranks get the same numbers of steps, and take their rows
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(range(steps)))  # the numbers of the steps
    return tell(module.losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=["automatic", "manual", "fsdp2"], default="automatic")
    main(**vars(parser.parse_args()))
