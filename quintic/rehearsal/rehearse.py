"""Deprecated: the old name of `quintic.simulate.simulate.simulate_plan`."""

import warnings
from collections.abc import Sequence

from quintic.optim.muon import Muon
from quintic.simulate.simulate import Simulation, simulate_plan

__all__ = ["rehearse"]


def rehearse(
    optimizer: Muon, mesh: Sequence[int], names: Sequence[str], *, device: str = "cuda", node_size: int | None = None
) -> Simulation:
    """Call `simulate_plan` under its old name, with a DeprecationWarning."""
    warnings.warn(
        "quintic.rehearsal.rehearse.rehearse is deprecated: use quintic.simulate.simulate.simulate_plan",
        DeprecationWarning,
        stacklevel=2,
    )
    return simulate_plan(optimizer, mesh, names, device=device, node_size=node_size)
