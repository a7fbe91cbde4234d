"""For authors of update rules: the kinds of stages, the library's rules by name, and stages to combine.

    from quintic import Muon, UpdateRule
    from quintic.update_rules import Equalize, NeuronSecondMoment

    rule = UpdateRule(title="mine", before=(Equalize(),), after=(NeuronSecondMoment(),))
    optimizer = Muon(groups, lr=0.02, update_rule=rule)

    UpdateRule       a rule: the stages of a step, in order
    GradientStage    element-wise: gradients to directions, in place of momentum
    MatrixStage      whole matrices, before or after they are orthogonalised
    PolarStage       how they are orthogonalised
    WeightStage      whole matrices: how weights take an update, in place of decay and step
    DriftStage       element-wise: an addition to weights after their step
    StateSpec        one tensor that a stage keeps
    StageOptions     the options of a group that stages may read
    RULES            name -> rule
    norms, sums      of rows or columns, with the same bits in a batch of any size

`docs/how-to/write-an-update-rule.md` writes a rule, and `quintic.testing.check_update_rule` tests one.
"""

from quintic.optim.numeric.sums import norms, sums
from quintic.optim.rules.library.adamuon import ElementSecondMoment, Signs
from quintic.optim.rules.library.aurora import BalancedPolar
from quintic.optim.rules.library.ema_nesterov import Lookahead
from quintic.optim.rules.library.hyperball import Hyperball, without_scale
from quintic.optim.rules.library.muon_plus import Renormalize
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.muown import Magnitudes
from quintic.optim.rules.library.normuon import NeuronSecondMoment
from quintic.optim.rules.library.radial import RadialBrake, RelativeUpdate
from quintic.optim.rules.library.row_directions import RowDirections
from quintic.optim.rules.library.two_rate import TwoRateMomentum
from quintic.optim.rules.rule import MOMENTUM, UpdateRule
from quintic.optim.rules.stages import (
    WEIGHT,
    DriftStage,
    GradientStage,
    MatrixStage,
    PolarStage,
    StageOptions,
    StateSpec,
    VectorShape,
    WeightStage,
    WholeGradient,
)
from quintic.optim.rules.table import RULES

__all__ = [
    "MOMENTUM",
    "RULES",
    "WEIGHT",
    "BalancedPolar",
    "DriftStage",
    "ElementSecondMoment",
    "Equalize",
    "GradientStage",
    "Hyperball",
    "Lookahead",
    "Magnitudes",
    "MatrixStage",
    "NeuronSecondMoment",
    "PolarStage",
    "RadialBrake",
    "RelativeUpdate",
    "Renormalize",
    "RowDirections",
    "Signs",
    "StageOptions",
    "StateSpec",
    "TwoRateMomentum",
    "UpdateRule",
    "VectorShape",
    "WeightStage",
    "WholeGradient",
    "norms",
    "sums",
    "without_scale",
]
