"""The optimizer of a speedrun: one `quintic.Muon`, with a group for each role of parameters in the model.

NorMuon updates the banks of matrices in every step, AdamW everything else in every second step, with the gradients of
two steps added up. Weight decay is proportional to the square of the rate, so that it falls faster than the rate.

Source: rates, decays and orders are from the modded-nanogpt speedrun, whose contributors tuned them.
"""

from typing import Any

import quintic
from quintic.model.speedrun import SpeedrunGPT
from quintic.optim.rules.table import orthogonalizes
from quintic.speedrun.stages import ADAMW_EVERY, StepSettings

__all__ = ["build_optimizer", "set_rates"]


def _adamw(lr: float, decay: float, betas: tuple[float, float], comms: str = "replicated") -> dict[str, Any]:
    """Return AdamW's options for a role; `lr` and `decay` are factors on the base values."""
    return {
        "algorithm": "adamw",
        "lr": 0.008 * lr,
        "weight_decay": 0.005 * decay,
        "betas": betas,
        "cautious": "strict",
        "comms": comms,
        "step_every": ADAMW_EVERY,
    }


# In the order in which gradients are sent, after the banks' gradients.
_ADAMW = {
    "scalars": _adamw(5.0, 0.0, (0.9, 0.99)),
    "smear_gate": _adamw(0.01, 0.0, (0.9, 0.99)),
    "value_gates": _adamw(1.0, 1.0, (0.9, 0.99)),
    "head": _adamw(1.0, 150.0, (0.5, 0.95), "sharded"),
    "bigram": _adamw(75.0, 5.0, (0.75, 0.95), "sharded_sparse"),
    "output_scales": _adamw(1.0, 0.0, (0.9, 0.95)),
    "residual_scales": _adamw(5.0, 0.0, (0.9, 0.95)),
    "value_embedding": _adamw(75.0, 5.0, (0.75, 0.95), "sharded"),
    "embedding": _adamw(1.0, 150.0, (0.5, 0.95), "sharded"),
    "connection_weights": _adamw(0.25, 1.0, (0.9, 0.99)),
    "connection_bias": _adamw(0.25, 0.0, (0.9, 0.99)),
    "gate_weights": _adamw(0.1, 1.0, (0.9, 0.99)),
    "gate_bias": _adamw(0.1, 0.0, (0.9, 0.99)),
}
# Only the banks keep extra mantissa bits of their bfloat16 weights, as in the race.
_MUON: dict[str, Any] = {
    "lr": 0.023,
    "weight_decay": 1.2,
    "scale_decay": True,
    "cautious": True,
    "comms": "sharded",
    "master": "mantissa",
}
# Small groups first, while large gradients are in flight; the banks last, while updated tables are sent back.
_WORK_ORDER = (
    *("scalars", "smear_gate", "value_gates", "connection_bias", "gate_bias", "output_scales", "residual_scales"),
    *("connection_weights", "value_embedding", "bigram", "gate_weights", "head", "embedding"),
    *("qk_bank", "vo_bank", "mlp_bank"),
)


def build_optimizer(model: SpeedrunGPT, *, ranks: int = 1) -> quintic.Muon:
    """Return the optimizer; a group's `name` is its role, `initial_lr` its rate without the schedule's factor.

    With `config.tied`, the embedding is a copy of the head until `optimizer.untie`.

    Args:
        model: on its device, with initialised weights.
        ranks: number of ranks; if above 1, the optimizer averages their gradients.
    """
    sizes = model.config
    options = {
        "qk_bank": _MUON | {"view": quintic.Rows(2 * sizes.head_dim)},
        "vo_bank": _MUON | {"view": quintic.Rows(sizes.width)},
        "mlp_bank": _MUON | {"view": quintic.Rows(4 * sizes.width), "lr_multipliers": (1.0, 2.0) * sizes.num_layers},
        **_ADAMW,
    }
    names = model.names_by_role()
    groups: list[dict[str, Any]] = []
    for role, own in options.items():
        if names[role]:  # the model may lack the feature
            params = [(name, model.get_parameter(name)) for name in names[role]]
            groups.append({"name": role, "params": params, "initial_lr": own["lr"], **own})
            if ranks == 1:
                groups[-1]["comms"] = "none"
    optimizer = quintic.Muon(
        groups,
        decay_coupling="lr_squared",
        normalize="neuron",
        normalize_beta=0.9,
        eps=1e-10,
        comm_order=[name for role in options for name in names[role]],
        compute_order=[name for role in _WORK_ORDER for name in names[role]],
    )
    if sizes.tied:
        optimizer.tie(names["head"][0], names["embedding"][0], transposed=True)
    return optimizer


def set_rates(optimizer: quintic.Muon, settings: StepSettings) -> None:
    """Set the groups' learning rates and momentum for a step."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * settings.rate
        if orthogonalizes(group["algorithm"]):
            group["momentum"] = settings.momentum
