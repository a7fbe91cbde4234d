"""`Muon`: `quintic.Muon` with the constructor and the update of `torch.optim.Muon`.

    from quintic.integrations.torch_optim import Muon  # instead of: from torch.optim import Muon

`docs/how-to/coming-from/torch-muon.md` lists the differences.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from quintic.integrations.dropin import DropIn, check_guard, check_momentum, translated
from quintic.optim.muon import Muon as QuinticMuon
from quintic.optim.polar.coefficients import DEFAULT_STEPS, newton_schulz_coefficients

__all__ = ["Muon", "TorchMuon"]

# Values of `adjust_lr_fn` -> values of `adjust_lr`. PyTorch has the last one since 2.14.
_SCALES = {
    None: "spectral",
    "original": "spectral",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "unit_rms",
}

_NAMES = {"ns_coefficients": "coefficients", "ns_steps": "orthogonalizer_steps"}


class TorchMuon(DropIn):
    """`quintic.Muon` with the arguments of `torch.optim.Muon`; groups may set all of them except `params`.

    Args:
        params: matrices, or groups of matrices. Groups may also have options of `quintic.Muon`, such as
            `algorithm="adamw"` with AdamW's options.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: averaging coefficient in [0, 1).
        nesterov: use Nesterov momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial.
        eps: accepted up to 1e-6 and ignored, because Quintic normalises without it.
        ns_steps: number of Newton-Schulz steps, at least 1.
        adjust_lr_fn: None and `"original"` are `adjust_lr="spectral"`, `"match_rms_adamw"` has the same name here,
            `"spectral_unclamped"` is `adjust_lr="unit_rms"`.

    Raises:
        ValueError, TypeError: as `quintic.Muon`, and if an argument has no counterpart.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = newton_schulz_coefficients(1)[0],
        eps: float = 1e-7,
        ns_steps: int = DEFAULT_STEPS,
        adjust_lr_fn: str | None = None,
    ) -> None:
        given = {"momentum": momentum, "eps": eps, "adjust_lr_fn": adjust_lr_fn}
        options = self._options(given, type(self).__name__)
        QuinticMuon.__init__(
            self,
            params,
            lr,
            weight_decay=weight_decay,
            nesterov=nesterov,
            orthogonalizer="newton_schulz",
            coefficients=ns_coefficients,
            orthogonalizer_steps=ns_steps,
            **options,
        )

    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the group with Quintic's options; a group with `algorithm="adamw"` already has them."""
        return [dict(group) if group.get("algorithm") == "adamw" else self._options(group, where)]

    @staticmethod
    def _options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
        if "momentum" in group:
            check_momentum(group["momentum"], "momentum", where)
        if "eps" in group:
            check_guard(group["eps"], "eps", where, "leave it at 1e-7")
        options = translated(group, _NAMES, frozenset({"eps", "adjust_lr_fn"}))
        if "adjust_lr_fn" in group:
            name = group["adjust_lr_fn"]
            if name not in _SCALES:
                raise ValueError(f"{where}: adjust_lr_fn={name!r}: choose one of {', '.join(map(repr, _SCALES))}")
            options["adjust_lr"] = _SCALES[name]
        return options


# The name of the original, so that only the import changes.
Muon = TorchMuon
