"""Samples text from a trained model, token by token, with a key/value cache."""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.eval.row_models import LanguageModel

__all__ = ["GENERAL_PROMPTS", "default_prompts", "generate_tokens", "sample_text"]

GENERAL_PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)
"""Prompts (from nanochat) whose likeliest continuations show the knowledge of a model of general text."""

# Seeds of PyTorch's generators are below this number.
_SEEDS = 2**63


def default_prompts(data: str) -> tuple[str, ...]:
    """Return prompts that suit the data source of a run, its `--data`.

    An empty prompt starts a document, so that the model writes a text like its training text. No prompt ends in a
    space: the tokenizer joins a space to the following word, so that models have hardly seen single spaces.
    """
    if data.startswith("hf:"):
        return GENERAL_PROMPTS
    return ("import os\n", "class Reader:\n") if data == "python" else ("", "")


@torch.no_grad()
def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield up to `max_tokens` tokens that continue a prompt; the text ends early if the model starts a new document.

    Args:
        model: the model, on any device.
        prompt: tokens of the prompt, at least one, usually beginning with `bos_id`.
        max_tokens: number of tokens to generate.
        temperature: 0 takes the likeliest token; a larger number divides the logits before drawing.
        top_k: draw only from this many likeliest tokens; None for no limit.
        top_p: draw only from the smallest set of likeliest tokens with at least this total probability, after
            `top_k` (nucleus sampling); None for no limit.
        seed: seed of the draws, which are made on the CPU, so that devices agree.

    Raises:
        ValueError: a temperature, `top_k`, `top_p` or seed is out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed={seed}: must be at least 0 and below 2^63")
    device, generator = model.head.weight.device, torch.Generator().manual_seed(seed)
    cache, new = model.new_cache(len(prompt) + max_tokens), list(prompt)
    for _ in range(max_tokens):
        last = torch.tensor([len(new) - 1], device=device)
        logits_V = model(torch.tensor([new], device=device), cache=cache, positions=last)[0]
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = _draw(logits_V.float().cpu(), temperature, top_k, top_p, generator)
        if token == model.config.bos_id:  # not part of the text
            return
        yield token
        new = [token]


def sample_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: tuple[str, ...],
    *,
    seed: int = 0,
    write: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[dict[str, str]]:
    """Return `{"prompt": ..., "text": ...}` for each prompt, where `text` is the continuation without the prompt.

    Args:
        model: the model, on any device.
        tokenizer: the model's tokenizer.
        prompts: beginnings of texts; an empty one starts a document.
        seed: seed of the first prompt's draws; prompt n is drawn with seed + n, modulo 2^63.
        write: called with the samples as they grow, one after the other: a prompt, the characters of its text as soon
            as they are complete, and two line ends.
        **options: `max_tokens`, and how tokens are drawn, as for `generate_tokens`.

    Raises:
        ValueError: a temperature, `top_k`, `top_p` or seed is out of range.
    """
    bos_id = tokenizer.bos_id
    next(generate_tokens(model, [bos_id], seed=seed, **options | {"max_tokens": 0}), None)  # checks options only
    samples = []
    for number, prompt in enumerate(prompts):
        start = [bos_id, *tokenizer.encode(prompt)]
        tokens = generate_tokens(model, start, seed=(seed + number) % _SEEDS, **options)
        # A character of several bytes may span several tokens: the decoder waits for the rest.
        pieces = codecs.iterdecode((tokenizer.decode_bytes([token]) for token in tokens), "utf-8", "replace")
        if prompt:
            write(prompt)
        text = ""
        for piece in pieces:
            write(piece)
            text += piece
        write("\n\n")
        samples.append({"prompt": prompt, "text": text})
    return samples


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if top_k is not None and top_k < logits.numel():
        # Tokens with a logit equal to the k-th largest one stay, so ties may leave more than top_k.
        floor = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    # A smaller temperature would be zero in float32; at 1e-30 the likeliest token already has all of the probability.
    probabilities = (logits / max(temperature, 1e-30)).softmax(dim=-1)
    if top_p is not None:
        sorted_, order = probabilities.sort(descending=True)
        # Total probability of all likelier tokens.
        likelier = sorted_.double().cumsum(dim=-1) - sorted_
        probabilities[order[likelier >= top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
