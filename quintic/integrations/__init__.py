"""The optimizer for libraries that make it themselves, and with the constructors of other libraries' optimizers.

`hugging_face.MuonFactory` for the `Trainer` of transformers and TRL, `titan.MuonContainer` for torchtitan. In place of
other Muons, with their arguments: `torch_optim.Muon`, `keller_jordan.Muon`, `.SingleDeviceMuon`, `.MuonWithAuxAdam` and
`.SingleDeviceMuonWithAuxAdam`, `dion.Muon` and `.NorMuon`. Nothing here is imported by `import quintic`; `hugging_face`
and `titan` need the library that they are for, the others none.
"""

from inspect import signature
from typing import Any

from torch import nn

from quintic.grouping.param_groups import param_groups
from quintic.optim.muon import Muon

__all__ = ["muon_for"]


def muon_for(model: nn.Module, **options: Any) -> Muon:
    """Return `quintic.Muon` for all trainable parameters of a model.

    Args:
        model: as it will be trained: sharded, with adapters.
        options: keywords of `quintic.Muon` and of `quintic.param_groups`, such as `lr`, `adamw_lr`, `rules`.

    Raises:
        ValueError, TypeError: as these two.
    """
    of_groups = signature(param_groups).parameters.keys() & options.keys()
    groups = param_groups(model, **{name: options.pop(name) for name in of_groups})
    return Muon(groups, **options)
