"""Samples text from a trained model, token by token, for several prompts at a time, with a key/value cache."""

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.data.tokenizer import Tokenizer
from quintic.eval.row_models import LanguageModel

__all__ = ["GENERAL_PROMPTS", "default_prompts", "generate_batch", "sample_text"]

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

# Prompts that are continued at the same time: memory for their keys and values grows with the number.
_MOST_ROWS = 32

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
def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    on_tokens: Callable[[Mapping[int, int]], None] | None = None,
) -> list[list[int]]:
    """Return up to `max_tokens` tokens that continue each prompt; a row ends early if the model starts a new document.

    The tokens of a row do not depend on the other rows, except through the rounding of sums.

    Args:
        model: the model, on any device.
        prompts: tokens of each prompt, at least one, usually beginning with `bos_id`; lengths may differ.
        max_tokens: number of tokens to generate per row.
        temperature: 0 takes the likeliest token; a larger number divides the logits before drawing.
        top_k: draw only from this many likeliest tokens; None for no limit.
        top_p: draw only from the smallest set of likeliest tokens with at least this total probability, after
            `top_k` (nucleus sampling); None for no limit.
        seeds: seed of each row's draws, by default 0, 1, ...; draws are made on the CPU, so that devices agree.
        on_tokens: called after each step with the new tokens, row -> token, of the rows that have not ended.

    Raises:
        ValueError: a temperature, `top_k` or `top_p` is out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
    made: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_tokens < 1:
        return made
    device, bos_id = model.head.weight.device, model.config.bos_id
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    cache = model.new_cache(len(prompts), longest + max_tokens)
    # Padding is at the end, where causal attention hides it from the prompt, and leaves the cache before the first new
    # token. The logits of each prompt's last token are needed, (rows, vocabulary).
    padded = [[*prompt, *[bos_id] * (longest - len(prompt))] for prompt in prompts]
    last = torch.tensor([row * longest + length - 1 for row, length in enumerate(lengths)], device=device)
    logits_BV = model(torch.tensor(padded, device=device), cache=cache, positions=last)
    cache.rewind(lengths)
    # Rows that have neither ended nor reached `max_tokens`.
    running = set(range(len(prompts)))
    while True:
        tokens = [bos_id] * len(prompts)
        if temperature == 0:
            tokens = logits_BV.argmax(dim=-1).tolist()
        else:
            for row in running:
                tokens[row] = _draw(logits_BV[row].float().cpu(), temperature, top_k, top_p, generators[row])
        # A document start ends a row and is not part of its text. Ended rows are fed with it to keep the batch's shape.
        running = {row for row in running if tokens[row] != bos_id}
        for row in running:
            made[row].append(tokens[row])
        if on_tokens is not None:
            on_tokens({row: tokens[row] for row in sorted(running)})
        running = {row for row in running if len(made[row]) < max_tokens}
        if not running:
            return made
        logits_BV = model(torch.tensor(tokens, device=device).unsqueeze(1), cache=cache)[:, -1]


def sample_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: tuple[str, ...],
    *,
    seed: int = 0,
    write: Callable[[str], None] | None = None,
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
        **options: `max_tokens`, and how tokens are drawn, as for `generate_batch`.

    Raises:
        ValueError: a temperature, `top_k`, `top_p` or seed is out of range.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed={seed}: must be at least 0 and below 2^63")
    samples = []
    for first in range(0, max(1, len(prompts)), _MOST_ROWS):  # options are checked without a prompt, too
        some = prompts[first : first + _MOST_ROWS]
        writer = _Writer(tokenizer, some, write or (lambda text: None))
        made = generate_batch(
            model,
            [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in some],
            seeds=[(seed + first + number) % _SEEDS for number in range(len(some))],
            on_tokens=writer.add,
            **options,
        )
        writer.add({})  # all texts have ended
        samples += [{"prompt": prompt, "text": tokenizer.decode(row)} for prompt, row in zip(some, made, strict=True)]
    return samples


class _Writer:
    """Writes the texts of a batch one after the other, although all of them grow at the same time.

    The bytes of a text wait until the texts before it have ended.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], write: Callable[[str], None]) -> None:
        self.tokenizer, self.prompts, self.write = tokenizer, prompts, write
        self.waiting = [b""] * len(prompts)
        self.row = -1
        self._begin_next()

    def add(self, tokens: Mapping[int, int]) -> None:
        """Add the new tokens, row -> token; rows that are missing have ended."""
        for row, token in tokens.items():
            self.waiting[row] += self.tokenizer.decode_bytes([token])
        while self.row < len(self.prompts):
            has_ended = self.row not in tokens
            text = self.decoder.decode(self.waiting[self.row], final=has_ended) + "\n\n" * has_ended
            self.waiting[self.row] = b""
            if text:
                self.write(text)
            if not has_ended:
                return
            self._begin_next()

    def _begin_next(self) -> None:
        self.row += 1
        # A character of several bytes may span several tokens; the decoder keeps the bytes of an incomplete one.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self.row < len(self.prompts) and self.prompts[self.row]:
            self.write(self.prompts[self.row])


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
