"""Exports optimizer state to PyTorch's optimizers."""

from typing import Any

import torch

from quintic.interchange.saved_formats import STATE_KEYS
from quintic.optim.groups.group import Group
from quintic.optim.muon import muon_in
from quintic.optim.polar.coefficients import DEFAULT_STEPS, newton_schulz_coefficients
from quintic.optim.polar.forms import resolve
from quintic.optim.rules.rule import Algorithm
from quintic.optim.state.state import as_numbers

__all__ = ["export_torch_state"]

# Options of torch.optim.AdamW that Quintic does not have, at the values that describe Quintic's step.
_ADAMW_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

# The number that torch.optim.Muon adds to norms, its default.
_MUON_EPS = 1e-7


def export_torch_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state in the form that `torch.optim.Muon` and `torch.optim.AdamW` load.

    With `comms="sharded"` whole tensors are returned on every rank: all ranks must call it, as `state_dict`. The state
    of `DTensor`s is exported as `DTensor`s; if it is of 8 bits and ranks share its groups, all of them must call it.

    Args:
        optimizer: a `quintic.Muon`, also as Accelerate or Lightning have wrapped it.

    Returns:
        `{"muon": state dict, "adamw": state dict}`, each with one group per group of the optimizer, in its order. The
        tensors are the optimizer's own unless they are sharded, or of 8 bits, which become float32. State and options
        that PyTorch's optimizers do not have are left out: second moments of neurons, masters, views. Their Muon knows
        one polynomial for all steps: in place of several, as of Polar Express, it gets its own.
    """
    muon = muon_in(optimizer, "export_torch_state")
    saved = muon.state_dict()
    exported: dict[str, dict[str, Any]] = {name: {"state": {}, "param_groups": []} for name in STATE_KEYS}
    for group, saved_group in zip(muon._plans.current_groups(), saved["param_groups"], strict=True):
        algorithm: Algorithm = group.algorithm
        # Parameters are numbered through the groups of their algorithm.
        target = exported[algorithm]
        first = sum(len(other["params"]) for other in target["param_groups"])
        indices = list(range(first, first + len(group.params)))
        # Options under PyTorch's names.
        lr = group.lr if group.adamw_lr_ratio is None else group.effective_lr
        options: dict[str, Any] = {"lr": lr, "weight_decay": group.weight_decay}
        if not group.rule.orthogonalizes:
            options |= {"betas": group.betas, "eps": group.eps, **_ADAMW_OPTIONS}
        else:
            options |= {
                "momentum": group.momentum,
                "nesterov": group.nesterov,
                **_newton_schulz_options(group),
                "eps": _MUON_EPS,
                "adjust_lr_fn": "match_rms_adamw" if group.adjust_lr == "match_rms_adamw" else "original",
            }
        target["param_groups"].append({**options, "params": indices, "param_names": list(group.param_names)})
        # State that PyTorch's optimizers have, under the same names.
        for index, key in zip(indices, saved_group["params"], strict=True):
            state = saved["state"].get(key, {})
            if not state.keys().isdisjoint(STATE_KEYS[algorithm]):  # frozen parameters have none
                target["state"][index] = {name: as_numbers(state[name]) for name in sorted(STATE_KEYS[algorithm])}
    return exported


def _newton_schulz_options(group: Group) -> dict[str, Any]:
    """Return the polynomial of a group's steps in PyTorch's terms; PyTorch's default where a group has several."""
    method, steps, coefficients = group.orthogonalizer, group.orthogonalizer_steps, group.coefficients
    triples = newton_schulz_coefficients(steps or DEFAULT_STEPS)
    if isinstance(method, str) and method != "svd":
        own = resolve(method, 1, 1, steps=steps, coefficients=coefficients, device_type="cpu").coefficients
        triples = own if len({*own}) == 1 else newton_schulz_coefficients(len(own))
    return {"ns_coefficients": triples[0], "ns_steps": len(triples)}
