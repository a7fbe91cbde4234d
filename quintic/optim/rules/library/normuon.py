"""NorMuon: evens out the neurons of orthogonalised updates, by second moments (arXiv 2510.05491).

The formulas, and how they differ from the paper's, are with `update.neuron_factors_`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import MatrixStage, StageOptions, StateSpec
from quintic.optim.rules.update import neuron_factors_

__all__ = ["NEURON_MOMENT", "NORMUON", "NeuronSecondMoment"]

NEURON_MOMENT = "second_momentum_buffer"


@dataclass(frozen=True)
class NeuronSecondMoment(MatrixStage):
    """Factors that even out the neurons of updates, see `update.neuron_factors_`."""

    label = "normalize neurons"
    state = (StateSpec(NEURON_MOMENT, "wide", "neurons"),)
    factors = "neurons"
    has_kernel = True

    def apply(
        self, matrices: Tensor, state: Mapping[str, Tensor], options: StageOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the matrices and the factors; advance the second moments."""
        return matrices, neuron_factors_(matrices, state[NEURON_MOMENT], beta=float(options.normalize_beta))

    def apply_kernel(
        self, matrices: Tensor, addresses: Tensor, factors: Tensor, options: StageOptions, mask: Tensor | None
    ) -> Tensor:
        """See `MatrixStage`."""
        from quintic.kernels.update.neuron import advance_neuron_factors_

        return advance_neuron_factors_(
            matrices, addresses, factors, beta=float(options.normalize_beta), apply_mask=mask
        )


NORMUON = UpdateRule(title="NorMuon", after=(NeuronSecondMoment(),))
