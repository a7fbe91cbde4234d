"""Schedules and scaling laws as pure functions. Steps count from 0; `total` is the number of steps of the run.

Scaling follows nanochat. D is the number of training tokens that suits a model: --tokens-per-param times the parameters
of blocks and head. Batch and rates were tuned at depth 12, with D_ref tokens and batches of 2^19, and are scaled to
other sizes: the batch B as D^0.383 (arXiv 2505.13738), learning rates as the square root of B, and the weight decay so
that weights are forgotten over the same fraction of the run (arXiv 2405.13698).
"""

import math
from dataclasses import dataclass

from quintic.errors import ConfigError
from quintic.model.sizes import GPTConfig
from quintic.train.config import Config, ScheduleConfig

__all__ = [
    "Scale",
    "automatic_batch",
    "is_due",
    "lengths",
    "lr_multiplier",
    "momentum_at",
    "reading_lines",
    "scale_of",
    "weight_decay_multiplier",
]

_REFERENCE_DEPTH = 12
"""Depth at which batch and rates were tuned."""
_REFERENCE_BATCH = 2**19
"""Tokens of a step at that depth."""

_BATCH_EXPONENT = 0.383

# At a thousand steps per second, a run of this length takes eleven days.
_MOST_STEPS = 10**9

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
        return math.sqrt(self.batch_tokens / _REFERENCE_BATCH)

    @property
    def decay_factor(self) -> float:
        """Return sqrt(B / 2^19) x D_ref / D."""
        return self.lr_factor * self.reference_tokens / max(1, self.tokens)


def automatic_batch(tokens: int, reference_tokens: int) -> int:
    """Return the power of two nearest, in ratio, to 2^19 (tokens / reference_tokens)^0.383; at least 1."""
    ratio = max(1, tokens) / max(1, reference_tokens)
    return 1 << max(0, round(math.log2(_REFERENCE_BATCH * ratio**_BATCH_EXPONENT)))


def scale_of(config: Config, sizes: GPTConfig) -> Scale:
    """Return tokens, batch and steps of a run, and the factors by which its rates differ from depth 12.

    The length comes from --steps if it is given, else from --target-flops, else from --tokens-per-param. It counts
    equally many lookup rows for each token, so that a plan and a resumed run compute the same length: which tokens have
    more is only known once a run has begun.

    Raises:
        ConfigError: the run would have more than a billion steps.
    """
    schedule = config.schedule
    reference = GPTConfig.from_depth(
        _REFERENCE_DEPTH,
        vocab_size=sizes.vocab_size,
        seq_len=sizes.seq_len,
        bos_id=sizes.bos_id,
        head_dim=sizes.head_dim,
        aspect_ratio=config.model.aspect_ratio,
    )
    tokens, reference_tokens = (int(schedule.tokens_per_param * s.matrix_weights()) for s in (sizes, reference))
    batch = schedule.batch_tokens
    if batch is None:
        batch = automatic_batch(tokens, reference_tokens)
    option, value = lengths(schedule)[0]
    if option == "--steps":
        steps = int(value)
    elif option == "--target-flops":
        steps = round(value / (sizes.flops_per_token() * batch))
    else:
        steps = tokens // batch
    if steps > _MOST_STEPS:
        raise ConfigError(f"{option} {value:g}: gives {steps:.4g} steps, must be at most {_MOST_STEPS:,}; lower it")
    return Scale(tokens=tokens, reference_tokens=reference_tokens, batch_tokens=batch, steps=max(1, steps))


def lengths(schedule: ScheduleConfig) -> list[tuple[str, float]]:
    """Return the options that set the run's length and have a value; the first one decides."""
    values = {
        "--steps": schedule.steps,
        "--target-flops": schedule.target_flops,
        "--tokens-per-param": schedule.tokens_per_param,
    }
    return [(option, value) for option, value in values.items() if value is not None]


def lr_multiplier(schedule: ScheduleConfig, step: int, total: int) -> float:
    """Return the learning rate of a step divided by its peak: linear warm-up, constant, linear fall.

    The first step has 1 / (warm-up steps), not 0; `final_lr_frac` would be reached one step after the last. If warm-up
    and warm-down overlap, the warm-up has priority.
    """
    # Steps:  0 .. warmup - 1   warmup .. total - warmdown - 1   total - warmdown .. total - 1
    # Value:  1/warmup .. 1     1                                1 .. just above final_lr_frac
    warmup = round(schedule.warmup_frac * total) if schedule.warmup_steps is None else schedule.warmup_steps
    warmdown = round(schedule.warmdown_frac * total)
    if step < warmup:
        return (step + 1) / warmup
    if step >= total - warmdown:
        left = (total - step) / warmdown
        return left + (1 - left) * schedule.final_lr_frac
    return 1.0


def momentum_at(config: Config, step: int, total: int) -> float:
    """Return Muon's momentum: linear from its start to its peak in the warm-up, then to its end in the warm-down."""
    optim, warmdown = config.optim, round(config.schedule.warmdown_frac * total)
    if step < optim.momentum_warmup_steps:
        return optim.momentum_start + (optim.momentum - optim.momentum_start) * step / optim.momentum_warmup_steps
    if optim.momentum_end is not None and step >= total - warmdown:
        left = (total - step) / warmdown
        return optim.momentum_end + (optim.momentum - optim.momentum_end) * left
    return optim.momentum


def weight_decay_multiplier(step: int, total: int, shape: str = "linear") -> float:
    """Return the weight decay of a step divided by its peak: 1 at the first step, 0 after the last."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total))
    return 1.0 - step / total


def is_due(step: int, every: int) -> bool:
    """Return whether an action that is repeated every `every` steps is due after `step` steps; 0 means never."""
    return every > 0 and step % every == 0


def reading_lines(run_tokens: int, text_tokens: int) -> list[str]:
    """Return a phrase with the number of passes through the training text, and a warning if there are too many."""
    passes = run_tokens / text_tokens
    lines = [f"{passes:.1f} times through the text"]
    if passes > _MANY_PASSES:
        lines.append(
            f"Warning: this run reads its text {passes:,.1f} times, so the model will memorise it rather than learn "
            "from it; lower --steps (or --tokens-per-param), or give more text (--data)"
        )
    return lines
