"""torchtitan's trainer, Llama and checkpoints, FSDP2 over all ranks; MuonContainer takes the place of its optimizers.

torchrun --nproc-per-node 2 examples/titan.py
"""

import argparse
import os
import tempfile

import titan_data
from tiny import BATCH, LENGTH, finish, tell
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from quintic.integrations.titan import MuonContainer


def main(steps: int = 30, *, folder: str = "", resume: int = -1) -> list[float]:
    """Train, from the checkpoint of step `resume` in the folder or from the beginning, and return the losses."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = Trainer.Config(
        model_spec=spec,
        optimizer=MuonContainer.Config(options={"lr": 0.02, "adamw_lr": 3e-3}),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(local_batch_size=BATCH // ranks, seq_len=LENGTH, steps=steps),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=bool(folder), interval=max(1, steps // 2), load_step=resume),
        dump_folder=folder or tempfile.mkdtemp(),
        loss=CrossEntropyLoss.Config(),
        tokenizer=titan_data.NoTokenizer.Config(),
        dataloader=titan_data.Rows.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0),
    )
    trainer, losses = Trainer(config), []
    titan_data.sum_gradients(trainer.model_parts)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    trainer.close()
    return tell(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="", help="where checkpoints go, half way and at the end")
    parser.add_argument("--resume", type=int, default=-1, metavar="STEP", help="the checkpoint to go on from")
    main(**vars(parser.parse_args()))
    finish()
