"""Schedules and scaling laws as pure functions. Steps count from 0; `total` is the number of steps of the run.

Scaling follows nanochat. D is the number of training tokens that suits a model: --tokens-per-param times the parameters
of blocks and head. Batch and rates were tuned at depth 12, with D_ref tokens and batches of 2^19, and are scaled to
other sizes: the batch B as D^0.383 (arXiv 2505.13738), learning rates as the square root of B, and the weight decay so
that weights are forgotten over the same fraction of the run (arXiv 2405.13698).
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
"""Tokens of a step at that depth."""

_BATCH_EXPONENT = 0.383

# From about the third pass on, the bits per byte of other text rise: the model memorises its text. Warn well after.
_MANY_PASSES = 8


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Batch, length and rate factors of a run, derived from the model's size and the schedule's options."""

    tokens: int
    """D, also if --steps or --target-flops sets the length of the run."""
    reference_tokens: int
    """D_ref: D of the model of depth 12."""
    batch_tokens: int
    """B: tokens of a step."""
    steps: int
    """Number of steps of the run."""

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
    """Return the learning rate of a step divided by its peak: linear warm-up, constant, linear fall to `final_frac`.

    The first step has 1 / (warm-up steps), not 0; `final_frac` would be reached one step after the last.
    `warmup_steps`, if given, replaces `warmup_frac`. If warm-up and warm-down overlap, the warm-up has priority.
    """
    # Steps:  0 .. warmup - 1   warmup .. total - warmdown - 1   total - warmdown .. total - 1
    # Value:  1/warmup .. 1     1                                1 .. just above final_frac
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
    """Return Muon's momentum: linear from `start` to `peak` over `warmup_steps`, then to `end` in the warm-down."""
    if step < warmup_steps:
        return start + (peak - start) * step / warmup_steps
    warmdown = round(warmdown_frac * total)
    if end is not None and step >= total - warmdown:
        left = (total - step) / warmdown
        return end + (peak - end) * left
    return peak


def weight_decay_multiplier(step: int, total: int, shape: Literal["linear", "cosine"] = "linear") -> float:
    """Return the weight decay of a step divided by its peak: 1 at the first step, 0 after the last."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total))
    return 1.0 - step / total


def is_due(step: int, every: int) -> bool:
    """Return whether an action that is repeated every `every` steps is due after `step` steps; 0 means never."""
    return every > 0 and step % every == 0


def reading_lines(run_tokens: int, text_tokens: int) -> list[str]:
    """Return a phrase with the number of passes through the training text, and a warning if there are too many.

    Args:
        run_tokens: tokens of all steps.
        text_tokens: tokens of the training text.
    """
    passes = run_tokens / text_tokens
    lines = [f"{passes:.1f} times through the text"]
    if passes > _MANY_PASSES:
        lines.append(
            f"Warning: this run reads its text {passes:,.1f} times, so the model will memorise it rather than learn "
            "from it; lower --steps (or --tokens-per-param), or give more text (--data)"
        )
    return lines
