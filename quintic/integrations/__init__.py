"""Adapters: `quintic.Muon` inside other libraries, and under the constructors of other libraries' optimizers.

For trainers that construct the optimizer: `hugging_face.MuonFactory` for the `Trainer` of transformers and TRL,
`titan.MuonContainer` for torchtitan. As replacements of other Muons, with their arguments: `torch_optim.Muon`,
`keller_jordan.Muon`, `.SingleDeviceMuon`, `.MuonWithAuxAdam` and `.SingleDeviceMuonWithAuxAdam`, `dion.Muon` and
`.NorMuon`. `import quintic` imports none of them. Only `hugging_face` and `titan` need the library that they are for.
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
        model: the model as it will be trained, after sharding and adding adapters.
        options: keywords of `quintic.Muon` and of `quintic.param_groups`, such as `lr`, `adamw_lr`, `rules`.

    Raises:
        ValueError, TypeError: as `quintic.Muon` and `quintic.param_groups`.
    """
    # Divide the keywords between the two by the signature of `param_groups`.
    of_groups = signature(param_groups).parameters.keys() & options.keys()
    groups = param_groups(model, **{name: options.pop(name) for name in of_groups})
    return Muon(groups, **options)
