"""Layouts of a model's parameters on a mesh of ranks, from the names of the usual parallelisms.

For planning without wrapping a model. The layouts equal the results of `fully_shard`, `parallelize_module` and
expert parallelism; they depend on the kinds of the mesh dimensions and, for tensor parallelism, on parameters' names.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintic.errors import ConfigError
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, mesh_layout, replicated_layout
from quintic.optim.layout.views import Flatten

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["PARALLELISMS", "layouts_by_name"]

PARALLELISMS = {
    "dp": 'whole copies under DDP, comms="averaged"; the only dimension of its mesh',
    "replicate": "copies of the parameters as the other dimensions shard them, as under HSDP",
    "fsdp": "every parameter sharded along its first dimension, as by fully_shard",
    "ep": "stacked experts sharded by expert; other parameters as by fsdp if there is one, else copies",
    "tp": "tensor parallelism: known layers sharded by output or input features, other parameters copies",
}
"""The kinds of mesh dimensions, in the order that they must have in a mesh."""

_MOST_RANKS = 2**14  # planning takes up to a minute for this many ranks, and several for four times as many

# Last components of module names, or names of stacked parameters, in several model libraries. Column-wise layers shard
# their outputs, row-wise layers their inputs. Embeddings shard their rows.
_COLUMN_WISE = re.compile(
    r"([qkv]|qkv|[qk]v?_b|gate|up|gate_up)_proj|w(q|k|v|1|3)|query|key|value|query_key_value|Wqkv|c_attn"
    r"|c_fc|fc1|fc_in|dense_h_to_4h|lm_head|embed_out"
)
_ROW_WISE = re.compile(r"(o|out|down|c)_proj|w[o2]|fc2|fc_out|dense|dense_4h_to_h")
_EMBEDDINGS = re.compile(r"embed_tokens|embed_in|wte|(tok|word)_embeddings")


def _check_parallelism(mesh: Sequence[int], names: Sequence[str]) -> None:
    """Raise a ConfigError unless mesh and names fit each other, as described at `layouts_by_name`."""
    shown, shape = ",".join(names), "x".join(map(str, mesh))
    if not mesh or min(mesh) < 1:
        raise ConfigError(f"mesh={shape}: give at least one rank per dimension, such as 8x4")
    if math.prod(mesh) > _MOST_RANKS:
        raise ConfigError(f"mesh={shape}: {math.prod(mesh):,} ranks; must be at most {_MOST_RANKS:,}")
    for name in names:
        if name not in PARALLELISMS:
            raise ConfigError(f"layout={shown}: {name!r} is unknown; choose from {', '.join(PARALLELISMS)}")
    if len(names) != len(mesh):
        raise ConfigError(
            f"layout={shown}: {len(names)} names for the {len(mesh)} dimensions of mesh {shape}; give a name for each"
        )
    # PyTorch nests parallelisms in this order.
    order = [list(PARALLELISMS).index(name) for name in names]
    if any(later <= earlier for earlier, later in itertools.pairwise(order)):
        raise ConfigError(f"layout={shown}: give each name once, in the order {', '.join(PARALLELISMS)}")
    if "dp" in names and len(names) > 1:
        raise ConfigError(f"layout={shown}: dp cannot be combined; use 'replicate' for copies of a sharded model")


def layouts_by_name(param_groups: Sequence[Group], mesh: Sequence[int], names: Sequence[str]) -> list[list[Layout]]:
    """Return the layout of each parameter of each group; ranks are numbered from 0 in row-major order of the mesh.

    Args:
        param_groups: groups of `Muon`, whose parameters have the shapes of the whole model, on any device.
        mesh: ranks along each dimension.
        names: one of `PARALLELISMS` for each dimension.

    Raises:
        ConfigError: a name is unknown, there are more or fewer names than dimensions, the order is not that of
            `PARALLELISMS`, a dimension has no ranks, or the model has no parameter that "ep" or "tp" shards. The
            message begins with `mesh=` or `layout=`.
    """
    _check_parallelism(mesh, names)
    layouts: list[list[Layout]] = []
    sharded_by: set[str] = set()
    for group in param_groups:
        layouts.append([])
        for name, param in zip(group.param_names, group.params, strict=True):
            if "dp" in names:
                layouts[-1].append(replicated_layout(param.shape, range(mesh[0])))
                continue
            dims = {
                "fsdp": 0 if param.ndim else None,
                "ep": 0 if _is_stack(name, param, group) else None,
                "tp": _feature_dim(name, param, group),
            }
            sharded_by |= {kind for kind, dim in dims.items() if dim is not None}
            layouts[-1].append(_layout(param, dict(zip(names, mesh, strict=True)), dims))
    for name, missing in (("ep", "stacked experts"), ("tp", "layer that is known to be column- or row-wise")):
        if name in names and name not in sharded_by:
            raise ConfigError(f"layout={','.join(names)}: {name} shards nothing, because the model has no {missing}")
    return layouts


def _layout(param: Tensor, sizes: dict[str, int], dims: Mapping[str, int | None]) -> Layout:
    """Return a parameter's layout.

    Args:
        param: the whole parameter.
        sizes: kind of each mesh dimension -> its number of ranks.
        dims: kind -> the dimension of the parameter that it shards, or None.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if "ep" in sizes and "fsdp" in sizes and dims["ep"] is None:
        # Parameters other than experts: fsdp shards them over the ranks of both dimensions.
        sizes["fsdp"] *= sizes.pop("ep")
    # A placement for each mesh dimension, as a DTensor of this parameter would have.
    placements: list[Placement] = []
    for position, name in enumerate(sizes):
        dim = dims.get(name)
        if dim is None:
            placements.append(Replicate())
            continue
        # If a later mesh dimension shards the same dimension of the parameter, it did so first: `fully_shard` gets a
        # parameter that `parallelize_module` has already sharded.
        splits = math.prod(sizes[later] for later in list(sizes)[position + 1 :] if dims[later] == dim)
        placements.append(_StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim))
    ranks = torch.arange(math.prod(sizes.values()), device="cpu").view(tuple(sizes.values()))
    return mesh_layout(param.shape, ranks, placements)


def _is_stack(name: str, param: Tensor, group: Group) -> bool:
    """Return whether a parameter is a stack of experts, or of their biases."""
    if group.rule.orthogonalizes and not isinstance(group.view, Flatten) and param.ndim == 3:
        return True
    return param.ndim > 1 and re.search(r"(^|\.)experts\.(?!\d)", name) is not None


def _feature_dim(name: str, param: Tensor, group: Group) -> int | None:
    """Return the dimension that tensor parallelism shards; None if every rank holds the whole parameter."""
    path = name.split(".")
    is_bias = path[-1] == "bias"
    layer = path[-2] if path[-1] in ("weight", "bias") and len(path) > 1 else path[-1]
    if is_bias:
        # A bias has the outputs' size, which only column-wise layers shard.
        return 0 if _COLUMN_WISE.fullmatch(layer) else None
    if param.ndim < 2 or path[-1].endswith("_bias"):
        return None
    if _EMBEDDINGS.fullmatch(layer):
        return 0
    # A matrix is (outputs, inputs), a stack of experts (experts, outputs, inputs), unless its view is transposed.
    outputs, inputs = param.ndim - 2, param.ndim - 1
    if getattr(group.view, "transposed", False):
        outputs, inputs = inputs, outputs
    if _COLUMN_WISE.fullmatch(layer):
        return outputs
    return inputs if _ROW_WISE.fullmatch(layer) else None
