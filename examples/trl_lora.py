"""TRL's SFTTrainer with LoRA: the trainer adds the adapters, and the factory makes the optimizer for these.

torchrun --nproc-per-node 2 examples/trl_lora.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import BATCH, LENGTH, VOCABULARY, batch, tell
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from quintic.integrations.hugging_face import MuonFactory


def main(steps: int = 30) -> list[float]:
    """Train, and return the losses."""
    words = {str(token): token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    rows = [row for step in range(steps) for row in batch(step)[0].tolist()]
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            max_grad_norm=0,  # a common norm would scale what enters the momentum: see docs/how-to/clip-gradients.md
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        optimizer_cls_and_kwargs=(MuonFactory, {"lr": 0.1, "comms": "averaged"}),
    )
    trainer.train()
    print(trainer.optimizer.optimizer.last_step())
    return tell([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
