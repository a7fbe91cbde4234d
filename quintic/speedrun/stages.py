"""The schedule of a speedrun as data: the settings of every step, from a few frozen tables.

A track consists of stages of equal length and a short last stage, the extension. Batches, windows and document lengths
change from stage to stage; rates, momentum and loss weights from step to step. Steps count from 0; `Track.steps` has
the settings of the final validation.

Source: the constants are from the modded-nanogpt speedrun (github.com/KellerJordan/modded-nanogpt, August 2026).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from quintic.errors import ConfigError

__all__ = ["ADAMW_EVERY", "SPEEDRUN", "TINY", "Stage", "StepSettings", "Track"]

ADAMW_EVERY = 2  # AdamW updates its parameters in every second step, the odd ones; each stage needs one of each kind


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Settings of a stage; loss weights change linearly from the first to the second number of a pair."""

    batch_tokens: int
    document_tokens: int  # documents are truncated to this length
    windows: tuple[int, int]  # short and long attention windows, in tokens
    rate: float  # factor on all learning rates, until they fall
    weights: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # [k]: loss weight of the token k + 1 positions ahead
    prefix_weight: tuple[float, float] = (0.0, 0.0)  # loss weight of the longest token that the next one begins with


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of one step."""

    stage: int
    batch_tokens: int
    document_tokens: int
    windows: tuple[int, int]
    rate: float
    momentum: float
    loss_weights: tuple[float, ...]  # as in `Stage.weights`, and last the weight of the prefix
    unties: bool  # head and embedding are untied after this step


@dataclass(frozen=True, kw_only=True)
class Track:
    """The schedule of a whole run."""

    stages: tuple[Stage, ...]  # in order; the last one is the extension, at the final rate
    scheduled_steps: int  # steps of all stages except the extension
    extension_steps: int
    final_long_window: int  # in tokens, for the final validation, without adapting rotary positions
    fall: float = 0.6  # fraction of the scheduled steps in which rates fall linearly
    final_rate: float = 0.15
    momentum: tuple[float, float] = (0.85, 0.95)  # minimum and maximum
    momentum_rise_steps: int  # number of first steps in which the momentum rises
    momentum_fall_steps: int  # number of last steps in which the momentum falls
    untie_at: int | None = None  # step at which head and embedding are untied; None for the start of the third stage
    chunks: int = 8  # chunks of a batch; each begins with a document, and a rank reads `chunks / ranks` of them
    pass_tokens: int = 65_536  # most tokens of one forward and backward pass of a rank
    eval_every: int  # steps between validations
    validation_tokens: int
    validation_chunk: int  # tokens scored at once

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.scheduled_steps + self.extension_steps

    @property
    def starts(self) -> tuple[int, ...]:
        """First step of each stage."""
        thirds = len(self.stages) - 1
        return tuple(round(self.scheduled_steps * number / thirds) for number in range(thirds + 1))

    @property
    def untie_step(self) -> int:
        """The step after which head and embedding are untied: the first odd step from `untie_at` on.

        Only odd steps update them. If the run ends before, they stay tied.
        """
        return (self.starts[2] if self.untie_at is None else self.untie_at) | 1

    def at(self, step: int) -> StepSettings:
        """Return the settings of a step, counted from 0; for `steps`, the settings of the final validation."""
        number = bisect_right(self.starts, step) - 1
        stage, start, end = self.stages[number], self.starts[number], (*self.starts, self.steps)[number + 1]
        done = min(1.0, (step - start) / (end - start))
        short, long = stage.windows
        return StepSettings(
            stage=number,
            batch_tokens=stage.batch_tokens,
            document_tokens=stage.document_tokens,
            windows=(short, long if step < self.steps else self.final_long_window),
            rate=self._rate(step, stage.rate),
            momentum=self._momentum(step),
            loss_weights=tuple(a + (b - a) * done for a, b in (*stage.weights, stage.prefix_weight)),
            unties=step == self.untie_step,
        )

    def passes(self, settings: StepSettings, ranks: int) -> int:
        """Return each rank's number of forward and backward passes in a step, as few as `pass_tokens` allows."""
        own, tokens = self.chunks // ranks, settings.batch_tokens // ranks
        return next(n for n in range(1, own + 1) if n == own or (own % n == 0 and tokens // n <= self.pass_tokens))

    def validated(self, tokens: int) -> "Track":
        """Return the track with another number of validation tokens, in chunks that are not larger than before."""
        chunk = max(1, min(self.validation_chunk, tokens // self.chunks))
        return replace(self, validation_tokens=tokens, validation_chunk=chunk)

    def scaled(self, steps: int) -> "Track":
        """Return the track with another number of steps; all numbers of steps are scaled in proportion.

        Raises:
            ConfigError: there are too few steps for the stages.
        """
        fewest = ADAMW_EVERY * len(self.stages)
        if steps < fewest:
            raise ConfigError(f"--steps {steps}: must be at least {fewest}, for the {len(self.stages)} stages")
        factor = steps / self.steps
        extension = max(ADAMW_EVERY, round(self.extension_steps * factor))
        return replace(
            self,
            scheduled_steps=steps - extension,
            extension_steps=extension,
            momentum_rise_steps=round(self.momentum_rise_steps * factor),
            momentum_fall_steps=round(self.momentum_fall_steps * factor),
        )

    def _rate(self, step: int, rate: float) -> float:
        start = int(self.scheduled_steps * (1 - self.fall))
        if step < start:
            return rate
        fallen = min(1.0, (step - start) / (self.scheduled_steps - start))
        return rate * (1 - fallen) + self.final_rate * fallen

    def _momentum(self, step: int) -> float:
        least, most = self.momentum
        fall_start = self.steps - self.momentum_fall_steps
        if step < self.momentum_rise_steps:
            return least + (most - least) * step / self.momentum_rise_steps
        if step > fall_start:
            return most - (most - least) * (step - fall_start) / self.momentum_fall_steps
        return most


_FIRST = Stage(
    batch_tokens=131_072,
    document_tokens=896,
    windows=(1 * 128, 3 * 128),
    rate=1.0,
    weights=((1.0, 1.0), (0.5, 0.5), (0.25, 0.0)),
    prefix_weight=(0.25, 0.25),
)
_SECOND = Stage(
    batch_tokens=262_144,
    document_tokens=2048,
    windows=(3 * 128, 7 * 128),
    rate=1.52,  # 2^0.6
    weights=((1.0, 1.0), (0.5, 0.0)),
    prefix_weight=(0.25, 0.0),
)
_THIRD = Stage(batch_tokens=393_216, document_tokens=2048, windows=(5 * 128, 11 * 128), rate=1.73)  # 3^0.5

SPEEDRUN = Track(
    stages=(_FIRST, _SECOND, _THIRD, replace(_THIRD, windows=(6 * 128, 13 * 128))),
    final_long_window=20 * 128,
    scheduled_steps=1270,
    extension_steps=15,
    momentum_rise_steps=300,
    momentum_fall_steps=50,
    eval_every=250,
    validation_tokens=10_485_760,
    validation_chunk=262_144,
)

TINY = replace(
    SPEEDRUN,
    stages=tuple(
        replace(
            stage,
            batch_tokens=stage.batch_tokens // 512,
            document_tokens=stage.document_tokens // 16,
            windows=(stage.windows[0] // 16, stage.windows[1] // 16),
        )
        for stage in SPEEDRUN.stages
    ),
    final_long_window=SPEEDRUN.final_long_window // 16,
    scheduled_steps=21,
    extension_steps=3,
    momentum_rise_steps=6,
    momentum_fall_steps=2,
    chunks=2,
    pass_tokens=256,
    eval_every=8,
    validation_tokens=4096,
    validation_chunk=1024,
)
