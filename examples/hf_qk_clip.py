"""QK-clip on a Hugging Face Llama: an attention function of your own shows the recorder queries and keys.

torchrun --nproc-per-node 2 examples/hf_qk_clip.py
"""

from typing import Any

import torch
import torch.distributed as dist
from tiny import LENGTH, VOCABULARY, batch, finish, mean_over_ranks, start, tell
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import quintic
from quintic.kernels.attention.max_logits import MaxLogits

recorder = MaxLogits()


def recorded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    """Record each head's largest logit, then attend as ever; queries and keys are (batch, heads, time, channels)."""
    if module.training:
        layer = f"model.layers.{module.layer_idx}.self_attn"
        recorder.record(layer, query.transpose(1, 2), key.transpose(1, 2), scale=module.scaling)
    return sdpa_attention_forward(module, query, key, value, *args, **options)


def main(steps: int = 30, *, threshold: float = 1.0) -> tuple[list[float], list[float]]:
    """Train, and return the losses and the largest logits of all heads in each step's batch."""
    device = start()
    AttentionInterface.register("recorded", recorded)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="recorded",
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(config).to(device).train())
    clip = quintic.QKClip(threshold=threshold)  # 100 in a real run
    groups = quintic.param_groups(model.module)
    optimizer = quintic.Muon(groups, lr=0.02, adamw_lr=3e-3, qk_clip=clip, comms="averaged")
    losses, largest = [], []
    for step in range(steps):
        x, _ = batch(step, device, dist.get_rank(), dist.get_world_size())
        loss = model(x, labels=x).loss
        loss.backward()
        maxima = recorder.take()  # of this rank's tokens: the step takes those of all ranks
        optimizer.step(qk_logits=maxima)
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        most = torch.stack(list(maxima.values())).max()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        largest.append(most.item())
    print(f"largest logit {max(largest):.2f}; {optimizer.last_step()}")
    return tell(losses), largest


if __name__ == "__main__":
    main()
    finish()
