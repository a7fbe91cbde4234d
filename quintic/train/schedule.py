"""Schedules and scaling laws: pure functions. Step 0 is the first one; `total` is the number of steps of the run.

Scaling follows nanochat. D is the number of tokens that suits a model: a ratio times the parameters of blocks and head.
Batch and rates are tuned at depth 12 (D_ref tokens, batches of 2^19) and carried over to other sizes: the best batch
grows as D^0.383 (arXiv 2505.13738), learning rates as the root of the batch, and weight decay so that the time in which
weights are forgotten stays the same share of the run (arXiv 2405.13698).
"""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "REFERENCE_BATCH",
    "REFERENCE_DEPTH",
    "Scale",
    "automatic_batch",
    "is_due",
    "lr_multiplier",
    "momentum_at",
    "reading_lines",
    "weight_decay_multiplier",
]

REFERENCE_DEPTH = 12
"""Depth at which batch and rates were tuned."""
REFERENCE_BATCH = 2**19
"""Tokens of a step there."""

_BATCH_EXPONENT = 0.383

# More passes teach the model its text by heart: bits per byte of other text rise from about the third on.
_MANY_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Batch, length and scaling of a run, from the model's size and the schedule's options."""

    tokens: int
    """D: --tokens-per-param times the parameters of blocks and head, whatever sets the length of the run."""
    reference_tokens: int
    """The same for depth 12."""
    batch_tokens: int
    """Tokens of a step."""
    steps: int
    """Length of the run."""

    @property
    def lr_factor(self) -> float:
        """Return sqrt(B / 2^19)."""
        return math.sqrt(self.batch_tokens / REFERENCE_BATCH)

    @property
    def decay_factor(self) -> float:
        """Return sqrt(B / 2^19) x D_ref / D."""
        return self.lr_factor * self.reference_tokens / max(1, self.tokens)


def automatic_batch(tokens: int, reference_tokens: int) -> int:
    """Return the power of two nearest, in ratio, to 2^19 (tokens / reference_tokens)^0.383; at least 1."""
    ratio = max(1, tokens) / max(1, reference_tokens)
    return 1 << max(0, round(math.log2(REFERENCE_BATCH * ratio**_BATCH_EXPONENT)))


def lr_multiplier(
    step: int,
    total: int,
    *,
    warmup_frac: float,
    warmdown_frac: float,
    final_frac: float,
    warmup_steps: int | None = None,
) -> float:
    """Return the share of the peak learning rate: linear warm-up, constant, linear warm-down to `final_frac`.

    The first step already moves (1 / warm-up steps) and the last one would, one step later, reach `final_frac`.
    `warmup_steps` takes the place of `warmup_frac`; where the two ends overlap, the warm-up goes first.
    """
    warmup = round(warmup_frac * total) if warmup_steps is None else warmup_steps
    warmdown = round(warmdown_frac * total)
    if step < warmup:
        return (step + 1) / warmup
    if step >= total - warmdown:
        left = (total - step) / warmdown
        return left + (1 - left) * final_frac
    return 1.0


def momentum_at(
    step: int,
    total: int,
    *,
    start: float,
    peak: float,
    end: float | None,
    warmup_steps: int,
    warmdown_frac: float,
) -> float:
    """Return Muon's momentum: linear from `start` to `peak` over `warmup_steps`, and to `end` over the warm-down."""
    if step < warmup_steps:
        return start + (peak - start) * step / warmup_steps
    warmdown = round(warmdown_frac * total)
    if end is not None and step >= total - warmdown:
        left = (total - step) / warmdown
        return end + (peak - end) * left
    return peak


def weight_decay_multiplier(step: int, total: int, shape: Literal["linear", "cosine"] = "linear") -> float:
    """Return the share of the weight decay: 1 at the first step, 0 after the last, on a line or half a cosine."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total))
    return 1.0 - step / total


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens `every` so many steps happens after this many; 0 is never."""
    return every > 0 and step % every == 0


def reading_lines(run_tokens: int, text_tokens: int) -> list[str]:
    """Say how often a run reads its training text, and what to do where that is too often to learn from.

    Args:
        run_tokens: tokens of all steps.
        text_tokens: tokens of the training text.
    """
    passes = run_tokens / text_tokens
    lines = [f"{passes:.1f} times through the text"]
    if passes > _MANY_PASSES:
        lines.append(
            f"Warning: this run reads its text {passes:,.1f} times, and learns it by heart rather than what it has in "
            "common with other text; lower --steps (or --tokens-per-param), or give more text (--data)"
        )
    return lines
