"""QK-clip on a Hugging Face Llama: an attention function of your own shows the recorder queries and keys.

python examples/hf_qk_clip.py
"""

import torch
from tiny import LENGTH, VOCABULARY, batch, tell
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import quintic
from quintic.kernels.max_logits import MaxLogits

recorder = MaxLogits()


def recorded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **options) -> tuple[Tensor, None]:
    """Record each head's largest logit, then attend as ever; queries and keys are (batch, heads, time, channels)."""
    if module.training:
        layer = f"model.layers.{module.layer_idx}.self_attn"
        recorder.record(layer, query.transpose(1, 2), key.transpose(1, 2), scale=module.scaling)
    return sdpa_attention_forward(module, query, key, value, *args, **options)


def main(steps: int = 30, *, threshold: float = 1.0) -> tuple[list[float], list[float]]:
    """Train, and return the losses and the largest logits of all heads before each step's clip."""
    AttentionInterface.register("recorded", recorded)
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    model = LlamaForCausalLM(config).to(device).train()
    clip = quintic.QKClip(threshold=threshold)  # 100 in a real run
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, adamw_lr=3e-3, qk_clip=clip)
    losses, largest = [], []
    for step in range(steps):
        x, _ = batch(step, device)
        loss = model(x, labels=x).loss
        loss.backward()
        maxima = recorder.take()
        optimizer.step(qk_logits=maxima)
        optimizer.zero_grad()
        losses.append(loss.item())
        largest.append(max(heads.max().item() for heads in maxima.values()))
    print(f"largest logit {max(largest):.2f}, {optimizer.last_step()}")
    return tell(losses), largest


if __name__ == "__main__":
    main()
