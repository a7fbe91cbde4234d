"""Hugging Face Trainer: saved in the middle, resumed to the last bit; on several ranks under DDP, or FSDP2 with --fsdp.

torchrun --nproc-per-node 2 examples/hf_trainer.py --fsdp
"""

import argparse
import tempfile

import shims
import torch
from tiny import BATCH, LENGTH, VOCABULARY, batch, tell
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import quintic
from quintic.integrations.hugging_face import MuonFactory

SHARDED = {
    "version": 2,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "state_dict_type": "SHARDED_STATE_DICT",  # each rank writes what it has
}


class Rows(torch.utils.data.Dataset):
    """Row i of the examples' data."""

    def __len__(self) -> int:
        return 100 * BATCH

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, _ = batch(i // BATCH, "cpu", i % BATCH, BATCH)
        return {"input_ids": x[0], "labels": x[0]}


def main(
    steps: int = 30,
    *,
    fsdp: bool = False,
    factory: bool = True,
    folder: str | None = None,
    resume: str | None = None,
) -> list[float]:
    """Train, from a checkpoint or the beginning, save every ten steps, and return the losses."""
    shims.accelerate()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=folder or tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=BATCH // 2,
        lr_scheduler_type="linear",
        save_steps=10,
        logging_steps=1,
        max_grad_norm=0,  # a common norm would scale what enters the momentum: see docs/how-to/clip-gradients.md
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        fsdp=fsdp,
        fsdp_config=SHARDED if fsdp else None,
    )
    # The learning_rate of the arguments does not count. Under DDP ranks divide Muon's work.
    options = {"lr": 0.02, "adamw_lr": 3e-3, "comms": "none" if fsdp else "averaged"}
    if factory:
        optimizer = {"optimizer_cls_and_kwargs": (MuonFactory, {**options, "example": "dummy_inputs"})}
    else:  # a finished optimizer will do without FSDP, where the trainer trains the model that it is given
        optimizer = {"optimizers": (quintic.Muon(quintic.param_groups(model), **options), None)}
    trainer = Trainer(model, arguments, train_dataset=Rows(), **optimizer)
    trainer.train(resume_from_checkpoint=resume)
    return tell([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--finished", dest="factory", action="store_false", help="give it a finished optimizer")
    parser.add_argument("--folder", help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    main(**vars(parser.parse_args()))
