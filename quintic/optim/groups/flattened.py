"""Parameters that other libraries have flattened or divided, so that no matrices are left: errors that say so.

FullyShardedDataParallel (FSDP1) and DeepSpeed's ZeRO keep what a rank has as runs of one long vector.
ZeroRedundancyOptimizer gives each rank some of the parameters of a group, but all of their names. All of them are known
by what they leave on modules, parameters and groups: none has to be imported.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quintic.optim.groups.uses import attribute_of
from quintic.optim.rules.table import orthogonalizes

__all__ = ["check_group_is_whole", "check_model_is_whole"]

_WAY_OUT = (
    "matrices cannot be orthogonalised from such pieces; shard the model with "
    "torch.distributed.fsdp.fully_shard (FSDP2), or keep it whole on all ranks, without any wrapper, and divide state "
    "and work with quintic.Muon(..., comms='sharded'), which averages gradients, too"
)


def check_model_is_whole(model: nn.Module) -> None:
    """Reject a model whose parameters are pieces of a vector; the ValueError names the library and the way out."""
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        # Without sharding it is data parallelism, and keeps the shapes.
        strategy = getattr(attribute_of(module, "sharding_strategy"), "name", "NO_SHARD")
        if "FullyShardedDataParallel" in bases and strategy != "NO_SHARD":
            raise ValueError(f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1): {_WAY_OUT}")
    for name, param in model.named_parameters():
        _check_parameter(name, param)


def check_group_is_whole(number: int, group: Mapping[str, Any], *, was_checked: bool = False) -> None:
    """Reject a group that has pieces of its parameters, or only some of them.

    `was_checked` says that the group was right before something else became of its parameters.
    """
    names, params = group["param_names"], group["params"]
    if names is None or isinstance(names, str):
        raise TypeError(
            f"parameter group {number}: param_names={names!r} must be a list with a name for each of the "
            f"{len(params)} params"
        )
    if len(names) != len(params):
        first = f" ({names[0]}, ...)" if names else ""
        message = (
            f"parameter group {number}{first} has {len(params)} params but {len(names)} param_names; give one name for "
            f"each, in the same order, or params as (name, parameter) pairs"
        )
        if len(params) < len(names):  # as these libraries leave it: all names, and some of the params or one of all
            message += f". If ZeroRedundancyOptimizer or DeepSpeed ZeRO put them there: {_WAY_OUT}"
        raise ValueError(message)
    for name, param in zip(names, params, strict=True):
        _check_parameter(name, param)
        if was_checked and orthogonalizes(group["algorithm"]) and param.ndim < 2:
            raise ValueError(
                f"{name}: this matrix is {param.ndim}-D now, of shape {tuple(param.shape)}; something has flattened "
                f"it, as FullyShardedDataParallel (FSDP1) and DeepSpeed ZeRO do: {_WAY_OUT}"
            )


def _check_parameter(name: str, param: Tensor) -> None:
    if getattr(param, "_is_flat_param", False):
        raise ValueError(f"{name} is a vector of all parameters, made by FullyShardedDataParallel (FSDP1): {_WAY_OUT}")
    if hasattr(param, "ds_id"):
        raise ValueError(f"{name} is a parameter that DeepSpeed ZeRO-3 has divided among ranks: {_WAY_OUT}")
