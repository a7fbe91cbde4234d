"""Sampling: text from a trained model, one token at a time with a key/value cache."""

import math

import torch
from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.model.gpt import GPT

__all__ = ["generate", "sample_text"]

_SEEDS = 2**63  # what PyTorch's generators take


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> list[int]:
    """Return up to `max_tokens` tokens that continue a prompt; ends early where the model starts a new document.

    Args:
        model: on any device.
        prompt: tokens, the first of them usually `bos_id`; at least one.
        max_tokens: tokens to make.
        temperature: 0 takes the likeliest token; above, logits are divided by it before drawing.
        top_k: draw among this many likeliest tokens; None among all.
        seed: of the draws; drawn on the CPU, so that devices agree.

    Raises:
        ValueError: an empty prompt, a temperature, `top_k` or seed out of range.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; start with the document token")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    _check_seed(seed)
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(1, len(prompt) + max_tokens)
    inputs = torch.tensor([prompt], device=device)
    tokens: list[int] = []
    for _ in range(max_tokens):
        logits = model(inputs, cache=cache)[0, -1].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        if token == model.config.bos_id:
            break
        tokens.append(token)
        inputs = torch.tensor([[token]], device=device)
    return tokens


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: tuple[str, ...],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Return `{"prompt", "text"}` for each prompt; `text` is the continuation alone.

    Prompt n is drawn with seed + n, which after 2^63 - 1, the largest seed, goes on from 0.

    Raises:
        ValueError: a temperature, `top_k` or seed out of range.
    """
    _check_seed(seed)
    samples = []
    for number, prompt in enumerate(prompts):
        start = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        own = (seed + number) % _SEEDS
        made = generate(model, start, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=own)
        samples.append({"prompt": prompt, "text": tokenizer.decode(made)})
    return samples


def _check_seed(seed: int) -> None:
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed={seed}: must be at least 0 and below 2^63")


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        floor = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
