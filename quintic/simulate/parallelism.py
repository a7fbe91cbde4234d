"""The usual parallelisms by name: how each dimension of a mesh cuts the parameters of a model.

For planning without the model's own wrapping. What `fully_shard`, `parallelize_module` and expert parallelism make of a
parameter follows from the name of the mesh dimension and, for tensor parallelism, from the parameter's name.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintic.errors import ConfigError
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, mesh_layout, replicated_layout
from quintic.optim.layout.views import Flatten

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["PARALLELISMS", "layouts_by_name"]

PARALLELISMS = {
    "dp": 'copies under DDP, comms="averaged"; it stands alone',
    "replicate": "copies of what the other dimensions cut, as under HSDP",
    "fsdp": "every parameter cut along its first dimension, as by fully_shard",
    "ep": "stacked experts cut by expert; other parameters as by fsdp where there is one, else copies",
    "tp": "tensor parallelism: known layers cut by their output or input features, other parameters copies",
}
"""The kinds of mesh dimensions, in the order in which they stand in a mesh."""

_MOST_RANKS = 2**14  # a plan for them takes up to a minute, for four times as many several

# Last parts of module names, or names of stacked parameters, across model libraries. Rows of an embedding are its
# inputs, and the first dimension of its weight.
_COLUMN_WISE = re.compile(
    r"([qkv]|qkv|[qk]v?_b|gate|up|gate_up)_proj|w(q|k|v|1|3)|query|key|value|query_key_value|Wqkv|c_attn"
    r"|c_fc|fc1|fc_in|dense_h_to_4h|lm_head|embed_out"
)
_ROW_WISE = re.compile(r"(o|out|down|c)_proj|w[o2]|fc2|fc_out|dense|dense_4h_to_h")
_EMBEDDINGS = re.compile(r"embed_tokens|embed_in|wte|(tok|word)_embeddings")


def _check_parallelism(mesh: Sequence[int], names: Sequence[str]) -> None:
    shown, shape = ",".join(names), "x".join(map(str, mesh))
    if not mesh or min(mesh) < 1:
        raise ConfigError(f"mesh={shape}: give at least one rank per dimension, such as 8x4")
    if math.prod(mesh) > _MOST_RANKS:
        raise ConfigError(f"mesh={shape}: {math.prod(mesh):,} ranks; a plan is made for at most {_MOST_RANKS:,}")
    for name in names:
        if name not in PARALLELISMS:
            raise ConfigError(f"layout={shown}: {name!r} is unknown; choose of {', '.join(PARALLELISMS)}")
    if len(names) != len(mesh):
        raise ConfigError(
            f"layout={shown}: {len(names)} names for the {len(mesh)} dimensions of mesh {shape}; give one for each"
        )
    order = [list(PARALLELISMS).index(name) for name in names]
    if any(later <= earlier for earlier, later in itertools.pairwise(order)):
        raise ConfigError(f"layout={shown}: each name once, in the order {', '.join(PARALLELISMS)}")
    if "dp" in names and len(names) > 1:
        raise ConfigError(f"layout={shown}: dp stands alone; copies of a model that is also cut are 'replicate'")


def layouts_by_name(param_groups: Sequence[Group], mesh: Sequence[int], names: Sequence[str]) -> list[list[Layout]]:
    """Return for each parameter of each group where its pieces are; ranks count from 0 in row-major order of the mesh.

    Args:
        param_groups: of `Muon`; their parameters have the shapes of the whole model, on any device.
        mesh: ranks along each dimension.
        names: for each dimension one of `PARALLELISMS`.

    Raises:
        ConfigError: an unknown name, another number of names than dimensions, an order in which PyTorch does not nest
            them, a dimension without ranks, or the model has nothing that "ep" or "tp" cuts; the message begins with
            `mesh=` or `layout=`.
    """
    _check_parallelism(mesh, names)
    layouts: list[list[Layout]] = []
    cut_by: set[str] = set()
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
            cut_by |= {kind for kind, dim in dims.items() if dim is not None}
            layouts[-1].append(_layout(param, dict(zip(names, mesh, strict=True)), dims))
    for name, missing in (("ep", "stacked experts"), ("tp", "layer that is known to be column- or row-wise")):
        if name in names and name not in cut_by:
            raise ConfigError(f"layout={','.join(names)}: {name} cuts nothing, the model has no {missing}")
    return layouts


def _layout(param: Tensor, sizes: dict[str, int], dims: Mapping[str, int | None]) -> Layout:
    """Return a parameter's layout on a mesh of named sizes; `dims` has the dimensions that "fsdp", "ep", "tp" cut."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if "ep" in sizes and "fsdp" in sizes and dims["ep"] is None:
        # One dimension for both, cut once.
        sizes["fsdp"] *= sizes.pop("ep")
    placements: list[Placement] = []
    for position, name in enumerate(sizes):
        dim = dims.get(name)
        if dim is None:
            placements.append(Replicate())
            continue
        # What fully_shard gets has been cut by the dimensions behind it.
        parts = math.prod(sizes[later] for later in list(sizes)[position + 1 :] if dims[later] == dim)
        placements.append(_StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim))
    ranks = torch.arange(math.prod(sizes.values()), device="cpu").view(tuple(sizes.values()))
    return mesh_layout(param.shape, ranks, placements)


def _is_stack(name: str, param: Tensor, group: Group) -> bool:
    """Return whether a parameter is a stack of experts, or of their biases."""
    if group.rule.orthogonalizes and not isinstance(group.view, Flatten) and param.ndim == 3:
        return True
    return param.ndim > 1 and re.search(r"(^|\.)experts\.(?!\d)", name) is not None


def _feature_dim(name: str, param: Tensor, group: Group) -> int | None:
    """Return the dimension that tensor parallelism cuts; None where every rank keeps the whole."""
    parts = name.split(".")
    is_bias = parts[-1] == "bias"
    layer = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    if is_bias:
        # Column-wise layers cut theirs with the outputs.
        return 0 if _COLUMN_WISE.fullmatch(layer) else None
    if param.ndim < 2 or parts[-1].endswith("_bias"):
        return None
    if _EMBEDDINGS.fullmatch(layer):
        return 0
    outputs, inputs = param.ndim - 2, param.ndim - 1
    if getattr(group.view, "transposed", False):
        outputs, inputs = inputs, outputs
    if _COLUMN_WISE.fullmatch(layer):
        return outputs
    return inputs if _ROW_WISE.fullmatch(layer) else None
