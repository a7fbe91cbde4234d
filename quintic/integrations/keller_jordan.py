"""`quintic.Muon` with the constructors and the updates of KellerJordan/Muon's optimizers.

    from quintic.integrations.keller_jordan import MuonWithAuxAdam  # instead of: from muon import MuonWithAuxAdam

`docs/how-to/coming-from/keller-jordan.md` lists the differences.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from quintic.integrations.dropin import DropIn, check_momentum, split_by, translated
from quintic.optim.layout.views import Experts, Flatten, Matrix
from quintic.optim.muon import Muon as QuinticMuon

__all__ = ["KellerJordanMuon", "Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"]

# Defaults of groups that do not set these.
_LR, _ADAM_LR, _ADAM_BETAS, _ADAM_EPS = 0.02, 3e-4, (0.9, 0.95), 1e-10


class _KellerJordan(DropIn):
    """Base of the four optimizers: their update, and their treatment of parameters with more than two dimensions."""

    comms: ClassVar[Literal["none", "averaged"]] = "none"

    def _construct(self, params: Any, **options: Any) -> None:
        QuinticMuon.__init__(
            self,
            params,
            orthogonalizer="newton_schulz",
            adamw_lr=_ADAM_LR,
            betas=_ADAM_BETAS,
            eps=_ADAM_EPS,
            comms=self.comms,
            **options,
        )

    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the group split by kind of parameter: matrices, stacks of matrices, convolutions."""
        if "momentum" in group:
            check_momentum(group["momentum"], "momentum", where)
        return split_by(dict(group), lambda name, param: _options_of(f"{where}, {name}", param))


class _WithAuxAdam(_KellerJordan):
    """Base of the optimizers whose groups choose with `use_muon` between Muon and Adam."""

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        self._construct(param_groups, lr=_LR)

    def translate(self, group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """Return a group with `use_muon=True` split by kind of parameter, and one of Adam with `algorithm="adamw"`."""
        if not isinstance(group.get("use_muon"), bool):
            raise ValueError(f"{where}: use_muon={group.get('use_muon')!r}; give every group use_muon=True or False")
        own = translated(group, {}, frozenset({"use_muon"}))
        return super().translate(own, where) if group["use_muon"] else [{**own, "algorithm": "adamw"}]


class SingleDeviceMuon(_KellerJordan):
    """`quintic.Muon` with the arguments of KellerJordan/Muon's `SingleDeviceMuon`.

    Args:
        params: matrices, stacks of matrices (three dimensions), convolutions (four), or groups of these.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: averaging coefficient in [0, 1).

    Raises:
        ValueError, TypeError: as `quintic.Muon`; also if a parameter has more than four dimensions.
    """

    def __init__(self, params: Iterable[Any], lr: float = _LR, weight_decay: float = 0, momentum: float = 0.95) -> None:
        check_momentum(momentum, "momentum", type(self).__name__)
        self._construct(params, lr=lr, weight_decay=weight_decay, momentum=momentum)


class KellerJordanMuon(SingleDeviceMuon):
    """`quintic.Muon` with the arguments of KellerJordan/Muon's `Muon`; the ranks of DDP share the work.

    Arguments and errors as `SingleDeviceMuon`.
    """

    comms = "averaged"


# The name of the original, so that only the import changes.
Muon = KellerJordanMuon


class SingleDeviceMuonWithAuxAdam(_WithAuxAdam):
    """`quintic.Muon` with the argument of KellerJordan/Muon's `SingleDeviceMuonWithAuxAdam`.

    Args:
        param_groups: with `use_muon=True` and `lr` (0.02), `momentum` (0.95), `weight_decay` (0); or with
            `use_muon=False` and `lr` (3e-4), `betas` (0.9, 0.95), `eps` (1e-10), `weight_decay` (0).

    Raises:
        ValueError, TypeError: as `quintic.Muon`; also if a group has no `use_muon`.
    """


class MuonWithAuxAdam(_WithAuxAdam):
    """`quintic.Muon` with the argument of KellerJordan/Muon's `MuonWithAuxAdam`; the ranks of DDP share the work.

    Argument and errors as `SingleDeviceMuonWithAuxAdam`.
    """

    comms = "averaged"


def _options_of(name: str, param: Tensor) -> dict[str, Any]:
    """Return the view of a parameter, and for convolutions the scale of its learning rate."""
    if param.ndim == 3:
        return {"view": Experts()}
    if param.ndim == 4:
        # The original computes the scale from the last two dimensions of the gradient before flattening it.
        height, width = param.shape[-2:]
        factor = math.sqrt(max(1.0, height / width))
        return {"view": Flatten(), "adjust_lr": None, "lr_multipliers": None if factor == 1 else (factor,)}
    if param.ndim > 4:
        raise ValueError(
            f"{name}: a parameter of shape {tuple(param.shape)}: KellerJordan/Muon treats its last two dimensions as "
            f"matrices; use quintic.Muon(quintic.param_groups(model, convolutions='muon')), which flattens convolutions"
        )
    return {"view": Matrix()}
