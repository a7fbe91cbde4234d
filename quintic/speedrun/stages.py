"""The schedule of a speedrun as data: the settings of every step, from a few frozen tables.

A track is a number of stages of equal length and an extension at the end. Batches, windows and documents change from
stage to stage; rates, momentum and the weights of the predictions from step to step. Steps count from 0; the settings
of the step after the last one are those of the final validation.

Source: the constants are those of the modded-nanogpt speedrun (github.com/KellerJordan/modded-nanogpt, August 2026).
"""

from dataclasses import dataclass, replace
from typing import Any

from quintic.errors import ConfigError

__all__ = ["SPEEDRUN", "TINY", "Stage", "StepSettings", "Track"]

# Each stage needs one step in which AdamW's parameters move and one in which they wait.
_FEWEST_STEPS_OF_A_STAGE = 2


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Settings that stay the same for a third of the run, and the first and last weights of the predictions."""

    batch_tokens: int
    document_tokens: int
    """Documents are cut at so many tokens."""
    windows: tuple[int, int]
    """(short, long) attention windows in tokens."""
    rate: float
    """Factor on all learning rates, until they fall."""
    first_weights: tuple[float, ...] = (1.0,)
    """Weights of the losses for the next token, the one after it, ...; one entry per predicted token."""
    last_weights: tuple[float, ...] = (1.0,)
    prefix_weights: tuple[float, float] = (0.0, 0.0)
    """First and last weight of the loss for the longest token that the next one begins with."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of one step."""

    stage: int
    batch_tokens: int
    document_tokens: int
    windows: tuple[int, int]
    rate: float
    momentum: float
    prediction_weights: tuple[float, ...]
    prefix_weight: float
    unties: bool
    """Head and embedding part after this step."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """A whole run.

    Attributes:
        stages: of equal length, one after the other.
        extension: the stage of the last steps, at the final rate.
        scheduled_steps: of `stages` together.
        extension_steps: of `extension`.
        final_long_window: in tokens, for the last validation; the rotary embedding does not grow with it.
        fall: share of the scheduled steps in which rates fall linearly.
        final_rate: the rate at the end of the fall.
        momentum: (least, most); it rises in the first steps and falls in the last.
        momentum_rise_steps: first steps, in which the momentum rises.
        momentum_fall_steps: last steps, in which it falls.
        untie_stage: number of the stage at whose beginning head and embedding part, after its first odd step: only odd
            steps move them.
        chunks: pieces of a batch; each begins with a document, and a rank reads `chunks / ranks` of them per step.
        pass_tokens: tokens up to which a rank's chunks go through the model together.
        eval_every: steps between validations.
        validation_tokens: tokens to score.
        validation_chunk: tokens scored at once.
    """

    stages: tuple[Stage, ...]
    extension: Stage
    scheduled_steps: int
    extension_steps: int
    final_long_window: int
    fall: float = 0.6
    final_rate: float = 0.15
    momentum: tuple[float, float] = (0.85, 0.95)
    momentum_rise_steps: int
    momentum_fall_steps: int
    untie_stage: int = 2
    chunks: int = 8
    pass_tokens: int = 65_536
    eval_every: int
    validation_tokens: int
    validation_chunk: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.scheduled_steps + self.extension_steps

    @property
    def starts(self) -> tuple[int, ...]:
        """First step of each stage, the extension included."""
        count = len(self.stages)
        return tuple(round(self.scheduled_steps * number / count) for number in range(count + 1))

    @property
    def untie_step(self) -> int:
        """The step after which head and embedding part."""
        return self.starts[self.untie_stage] | 1

    def at(self, step: int) -> StepSettings:
        """Return the settings of a step from 0; those of the final validation for `steps`."""
        starts = self.starts
        number = max(place for place, start in enumerate(starts) if start <= step)
        stage = (*self.stages, self.extension)[number]
        end = (*starts[1:], self.steps)[number]
        done = min(1.0, (step - starts[number]) / (end - starts[number]))
        weights = zip(stage.first_weights, stage.last_weights, strict=True)
        first_prefix, last_prefix = stage.prefix_weights
        short, long = stage.windows
        return StepSettings(
            stage=number,
            batch_tokens=stage.batch_tokens,
            document_tokens=stage.document_tokens,
            windows=(short, long if step < self.steps else self.final_long_window),
            rate=self._rate(step, stage.rate),
            momentum=self._momentum(step),
            prediction_weights=tuple(first + (last - first) * done for first, last in weights),
            prefix_weight=first_prefix + (last_prefix - first_prefix) * done,
            unties=step == self.untie_step,
        )

    def passes(self, settings: StepSettings, ranks: int) -> int:
        """Return the number of passes in which each rank takes its chunks of a step through the model."""
        own, tokens = self.chunks // ranks, settings.batch_tokens // ranks
        return next(n for n in range(1, own + 1) if n == own or (own % n == 0 and tokens // n <= self.pass_tokens))

    def validated(self, tokens: int) -> "Track":
        """Return the same track with another number of tokens to score, in chunks of at most as many as now."""
        chunk = max(1, min(self.validation_chunk, tokens // self.chunks))
        return replace(self, validation_tokens=tokens, validation_chunk=chunk)

    def scaled(self, steps: int) -> "Track":
        """Return the same track in another number of steps: every length in steps shrinks or grows alike.

        Raises:
            ConfigError: there are too few for each stage.
        """
        if steps == self.steps:
            return self
        share = steps / self.steps
        extension = max(_FEWEST_STEPS_OF_A_STAGE, round(self.extension_steps * share))
        fewest = _FEWEST_STEPS_OF_A_STAGE * (len(self.stages) + 1)
        if steps < fewest:
            raise ConfigError(f"--steps {steps}: the track has {len(self.stages) + 1} stages; give at least {fewest}")
        return replace(
            self,
            scheduled_steps=steps - extension,
            extension_steps=extension,
            momentum_rise_steps=round(self.momentum_rise_steps * share),
            momentum_fall_steps=round(self.momentum_fall_steps * share),
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


def _track(tokens: int, documents: tuple[int, int], block: int, **lengths: Any) -> Track:
    """Return a track of three stages and the extension.

    Args:
        tokens: of the first batch.
        documents: tokens at which documents are cut, in the first stage and in the others.
        block: tokens of a window's unit.
        lengths: the other fields.
    """
    first, rest = documents
    stages = (
        Stage(
            batch_tokens=tokens,
            document_tokens=first,
            windows=(block, 3 * block),
            rate=1.0,
            first_weights=(1.0, 0.5, 0.25),
            last_weights=(1.0, 0.5, 0.0),
            prefix_weights=(0.25, 0.25),
        ),
        Stage(
            batch_tokens=2 * tokens,
            document_tokens=rest,
            windows=(3 * block, 7 * block),
            rate=1.52,  # 2^0.6
            first_weights=(1.0, 0.5),
            last_weights=(1.0, 0.0),
            prefix_weights=(0.25, 0.0),
        ),
        Stage(
            batch_tokens=3 * tokens,
            document_tokens=rest,
            windows=(5 * block, 11 * block),
            rate=1.73,  # 3^0.5
        ),
    )
    extension = replace(stages[-1], windows=(6 * block, 13 * block))
    return Track(stages=stages, extension=extension, final_long_window=20 * block, **lengths)


SPEEDRUN = _track(
    131_072,
    (896, 2048),
    128,
    scheduled_steps=1270,
    extension_steps=15,
    momentum_rise_steps=300,
    momentum_fall_steps=50,
    eval_every=250,
    validation_tokens=10_485_760,
    validation_chunk=262_144,
)

TINY = _track(
    256,
    (56, 128),
    8,
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
