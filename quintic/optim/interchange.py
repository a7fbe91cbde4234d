"""Optimizer state from and to PyTorch's own `torch.optim.Muon` and `torch.optim.AdamW`.

Both keep the moments that Quintic keeps, under the same names and with the same meaning (their Muon's momentum is the
same moving average). A model usually has two such optimizers where Quintic has one.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from quintic.optim.coefficients import newton_schulz_coefficients

__all__ = ["export_torch_state", "import_torch_state"]

_STATE_KEYS = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}

# Options of torch.optim.AdamW that Quintic does not have, at the values that mean what Quintic does.
_ADAMW_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

# torch.optim.Muon's guard of its norm.
_MUON_EPS = 1e-7


def import_torch_state(optimizer: Optimizer, *state_dicts: Mapping[str, Any]) -> None:
    """Copy the moments of PyTorch optimizers into a `quintic.Muon`; nothing changes unless everything fits.

    Parameters are matched by `param_names` where the saved groups have them, else by their order among the parameters
    of the same algorithm. Hyperparameters stay what they are; masters, if there are any, follow the weights.

    Args:
        optimizer: a `quintic.Muon`, changed.
        state_dicts: what `torch.optim.Muon.state_dict()` and `torch.optim.AdamW.state_dict()` returned, in any order;
            parameters that none of them knows keep their state.

    Raises:
        ValueError: a saved parameter is not in the optimizer, has another algorithm, shape or state than Quintic's, or
            the numbers differ where there are no names.
    """
    ours: dict[str, dict[str, Tensor]] = {"muon": {}, "adamw": {}}
    for group in optimizer.param_groups:
        ours[group["algorithm"]].update(zip(group["param_names"], group["params"], strict=True))
    copies: list[tuple[Tensor, Tensor]] = []
    for state_dict in state_dicts:
        for algorithm, name, saved in _named(state_dict, ours):
            state = optimizer.state[ours[algorithm][name]]
            for key in sorted(_STATE_KEYS[algorithm]):
                if saved[key].shape != state[key].shape:
                    raise ValueError(
                        f"{name}: saved {key} has shape {tuple(saved[key].shape)}, "
                        f"this optimizer needs {tuple(state[key].shape)}"
                    )
                copies.append((state[key], saved[key]))
    for target, source in copies:
        target.copy_(source)


def export_torch_state(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the state as `torch.optim.Muon` and `torch.optim.AdamW` load it.

    Args:
        optimizer: a `quintic.Muon`.

    Returns:
        `{"muon": state dict, "adamw": state dict}`, each with one group per group of the optimizer, in its order. The
        tensors are the optimizer's own. What PyTorch's optimizers do not have is left out: second moments of neurons,
        masters, views, Polar Express (their Muon has the Newton-Schulz triple).
    """
    exported: dict[str, dict[str, Any]] = {name: {"state": {}, "param_groups": []} for name in _STATE_KEYS}
    for group in optimizer.param_groups:
        algorithm = group["algorithm"]
        target = exported[algorithm]
        first = sum(len(other["params"]) for other in target["param_groups"])
        indices = list(range(first, first + len(group["params"])))
        options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if algorithm == "adamw":
            options |= {"betas": group["betas"], "eps": group["eps"], **_ADAMW_OPTIONS}
        else:
            options |= {
                "momentum": group["momentum"],
                "nesterov": group["nesterov"],
                "ns_coefficients": newton_schulz_coefficients()[0],
                "ns_steps": group["orthogonalizer_steps"],
                "eps": _MUON_EPS,
                "adjust_lr_fn": "match_rms_adamw" if group["lr_scale"] == "match_rms_adamw" else "original",
            }
        target["param_groups"].append({**options, "params": indices, "param_names": list(group["param_names"])})
        for index, param in zip(indices, group["params"], strict=True):
            state = optimizer.state[param]
            target["state"][index] = {key: state[key] for key in sorted(_STATE_KEYS[algorithm])}
    return exported


def _named(
    state_dict: Mapping[str, Any], ours: Mapping[str, Mapping[str, Tensor]]
) -> list[tuple[str, str, Mapping[str, Tensor]]]:
    """Return (algorithm, name, state) of every saved parameter that has state."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group.get("param_names", ())]
    found = []
    for position, key in enumerate(keys):
        saved = state_dict["state"].get(key)
        if not saved:
            continue
        algorithm = next((name for name, wanted in _STATE_KEYS.items() if set(saved) == wanted), None)
        label = names[position] if names else f"saved parameter {key}"
        if algorithm is None:
            raise ValueError(f"{label}: its state {sorted(saved)} is neither torch.optim.Muon's nor AdamW's")
        if not names and len(keys) != len(ours[algorithm]):
            raise ValueError(
                f"the saved {algorithm} state has {len(keys)} parameters without names, this optimizer has "
                f"{len(ours[algorithm])}; save with named parameters to match them by name"
            )
        name = names[position] if names else list(ours[algorithm])[position]
        if name not in ours[algorithm]:
            raise ValueError(f"{name}: saved with the state of {algorithm}, but not a parameter this optimizer has so")
        found.append((algorithm, name, saved))
    return found
