"""Errors for parameters that other libraries have flattened or distributed, so that no matrices are left.

FullyShardedDataParallel (FSDP1) and DeepSpeed's ZeRO keep a rank's weights as spans of one long vector.
ZeroRedundancyOptimizer gives each rank some of the parameters of a group, but all of their names. Each is recognised by
the marks it leaves on modules, parameters and groups, so that none has to be imported.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quintic.optim.rules.table import orthogonalizes

__all__ = ["FLATTENED_REMEDY", "check_group_is_whole", "check_is_not_flattened"]

FLATTENED_REMEDY = (
    "matrices cannot be orthogonalised from such pieces; shard the model with "
    "torch.distributed.fsdp.fully_shard (FSDP2), or keep it whole on all ranks, without any wrapper, and shard state "
    "and work with quintic.Muon(..., comms='sharded'), which averages gradients, too"
)


def check_group_is_whole(number: int, group: Mapping[str, Any], *, was_checked: bool = False) -> None:
    """Reject a group whose parameters are flattened, or that has only some of the parameters it has names for.

    `was_checked`: the group passed before, so that another library has changed its parameters since.
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
            message += f". If ZeroRedundancyOptimizer or DeepSpeed ZeRO put them there: {FLATTENED_REMEDY}"
        raise ValueError(message)
    for name, param in zip(names, params, strict=True):
        check_is_not_flattened(name, param)
        if was_checked and orthogonalizes(group["algorithm"]) and param.ndim < 2:
            raise ValueError(
                f"{name}: this matrix is {param.ndim}-D now, of shape {tuple(param.shape)}; something has flattened "
                f"it, as FullyShardedDataParallel (FSDP1) and DeepSpeed ZeRO do: {FLATTENED_REMEDY}"
            )


def check_is_not_flattened(name: str, param: Tensor) -> None:
    """Reject a parameter that FSDP1 or DeepSpeed has flattened; the ValueError names the library and the remedy."""
    if getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"{name} is a vector of all parameters, made by FullyShardedDataParallel (FSDP1): {FLATTENED_REMEDY}"
        )
    if hasattr(param, "ds_id"):
        raise ValueError(f"{name} is a parameter that DeepSpeed ZeRO-3 has divided among ranks: {FLATTENED_REMEDY}")
