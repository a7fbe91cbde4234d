"""Stages on whole matrices, before and after the polar step: masks, dtypes of state, and what `verify` computes."""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from quintic.optim.polar.matrix_stages import MatrixState, apply_stages
from quintic.optim.rules.rule import MOMENTUM_DIRECTION, UpdateRule
from quintic.optim.rules.stages import MatrixStage, StateSpec

OPTIONS = SimpleNamespace(normalize_beta=0.5)
RANGES = defaultdict(nullcontext)


@dataclass(frozen=True)
class Averaged(MatrixStage):
    """Matrices minus half of their running mean."""

    label = "average"
    state = (StateSpec("mean", "average", "param"),)

    def apply(self, matrices, state, options):
        state["mean"].lerp_(matrices.to(state["mean"].dtype), 1 - options.normalize_beta)
        return matrices - 0.5 * state["mean"], None


@dataclass(frozen=True)
class Neurons(MatrixStage):
    """Has a factor for each row."""

    label = "neurons"
    factors = "rows"


def batch(dtype):
    matrices = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    mean = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    return matrices, mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["before", "after"])
def test_state_of_a_stage_stays_where_the_mask_is_zero(place, dtype):
    rule = UpdateRule(title="test", algorithm="muon", direction=MOMENTUM_DIRECTION, **{place: (Averaged(),)})
    matrices, mean = batch(dtype)
    old, scales = mean.clone(), torch.ones(2, 1, 1)
    mask = torch.tensor([1, 0], dtype=torch.int32)
    apply_stages(getattr(rule, place), matrices, scales, MatrixState({"mean": mean}), OPTIONS, mask, RANGES)
    assert torch.equal(mean[1], old[1])
    assert torch.equal(mean[0], old[0].float().lerp(matrices[0], 0.5).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["before", "after"])
def test_the_reference_advances_the_same_bits(place, dtype):
    rule = UpdateRule(title="test", algorithm="muon", direction=MOMENTUM_DIRECTION, **{place: (Averaged(),)})
    matrices, mean = batch(dtype)
    expected, scales = mean.clone(), torch.ones(2, 1, 1)
    stages = getattr(rule, place)
    result, factors = apply_stages(stages, matrices, scales, MatrixState({"mean": mean}), OPTIONS, None, RANGES)
    assert factors is scales
    if place == "before":
        reference = rule.prepare(matrices, {"mean": expected}, OPTIONS)
    else:
        reference, _ = rule.finish(matrices, scales, {"mean": expected}, OPTIONS)
    assert torch.equal(result, reference)
    assert torch.equal(mean, expected)
    assert not torch.equal(mean, batch(dtype)[1])


def test_factors_before_the_polar_step_are_an_error():
    with pytest.raises(ValueError, match="test: factors multiply updates"):
        UpdateRule(title="test", algorithm="muon", direction=MOMENTUM_DIRECTION, before=(Neurons(),))
