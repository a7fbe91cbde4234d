"""Attention layers of every kind, of sizes that ranks do not divide well, and what each rank saw of their logits."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from harness import DEVICE
from models import gradient, local_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from quintic import Rule, Split

__all__ = [
    "HEADS",
    "THRESHOLD",
    "Attentions",
    "columns",
    "largest",
    "of_own_heads",
    "plain",
    "rows",
    "rules",
    "seen",
    "tensor_parallel",
    "tensor_parallel_rows",
]

HEADS = {"grouped": 4, "uneven": 3, "fused": 4, "latent": 4, "turned": 4, "wide": 4}
"""Query heads of each layer."""

THRESHOLD = 10.0


class _Attention(nn.Module):
    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, (features, inputs) in shapes.items():
            self.register_module(name, nn.Linear(inputs, features, bias=name != "o_proj"))


class _Turned(nn.Module):
    """A fused weight stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 24))
        self.bias = nn.Parameter(torch.empty(24))


class Attentions(nn.Module):
    """Grouped queries, heads that most numbers of ranks cut through, fused weights, multi-latent attention; weights for
    AdamW that are large enough to be divided.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.grouped = _Attention(q_proj=(12, 8), k_proj=(6, 8), v_proj=(6, 8), o_proj=(8, 12))
        self.uneven = _Attention(q_proj=(15, 8), k_proj=(15, 8))
        self.fused = _Attention(qkv=(24, 8), o_proj=(8, 12))
        self.latent = _Attention(q_proj=(20, 6), kv_a_proj_with_mqa=(6, 8), kv_b_proj=(20, 4))
        self.turned = nn.ModuleDict({"c_attn": _Turned()})
        self.wide = _Attention(q_proj=(16, 320), k_proj=(8, 320))
        self.to(DEVICE, dtype)
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(gradient(name, param.shape, torch.float32, -1) * 0.3)


def rules() -> list[Rule]:
    """Return the rules for `param_groups`: what the fused weights are."""
    return [
        Rule("fused.qkv.weight", "muon", Split((12, 6, 6))),
        Rule("turned.c_attn.weight", "muon", Split((12, 6, 6), transposed=True)),
        Rule("latent.*.weight", "muon"),
        Rule("wide.*.weight", "adamw"),
    ]


# -------------------------------------------------------------------------------------------------------------- layouts


def plain(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave everything whole on every rank."""


def rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2; HSDP where the mesh has two dimensions."""
    fully_shard(model, mesh=mesh)


def columns(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the last dimension where that divides evenly."""

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 and param.shape[1] % mesh.size() == 0 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column-wise queries and keys, of which some heads are cut; a row-wise up-projection; the rest is plain."""
    columns, rows = ColwiseParallel, RowwiseParallel
    styles = {
        "grouped.q_proj": columns(),
        "grouped.k_proj": columns(),
        "uneven.q_proj": columns(),
        "uneven.k_proj": columns(),
        "fused.qkv": columns(),
        "latent.q_proj": columns(),
        "latent.kv_b_proj": rows(),
        "wide.q_proj": columns(),
        "wide.k_proj": columns(),
    }
    parallelize_module(model, mesh, styles)
    turned = model.get_submodule("turned.c_attn")
    for name, dim in (("weight", 1), ("bias", 0)):
        cut = distribute_tensor(turned.get_parameter(name).detach(), mesh, [Shard(dim)])
        turned.register_parameter(name, nn.Parameter(cut))


def tensor_parallel_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism on the mesh's last axis, FSDP2 or HSDP on the others."""
    names = mesh.mesh_dim_names
    assert names is not None
    tensor_parallel(model, mesh[names[-1]])
    fully_shard(model, mesh=mesh[names[:-1]])


# --------------------------------------------------------------------------------------------------------------- logits


def seen(step: int, rank: int) -> dict[str, Tensor]:
    """Return the largest logits of every layer that a rank saw in a step, (heads,); about half are too large."""
    found = {}
    for layer, heads in HEADS.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{layer} {step} {rank}".encode()))
        found[layer] = (torch.rand(heads, generator=generator) * 3 * THRESHOLD - THRESHOLD).to(DEVICE)
    return found


def largest(of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the maxima over ranks, of which some may lack layers, as one device that sees all tokens has them."""
    found: dict[str, Tensor] = {}
    for maxima in of_ranks:
        for layer, values in maxima.items():
            found[layer] = torch.maximum(found[layer], values) if layer in found else values
    return found


def of_own_heads(maxima: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return maxima as tensor parallelism has them: each rank those of its own heads, of its own tokens."""
    placements: list[Placement] = [*[Partial("max")] * (mesh.ndim - 1), Shard(0)]
    along = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
    found = {}
    for layer, values in maxima.items():
        local = local_of(distribute_tensor(values, along, [Shard(0)], src_data_rank=None))
        found[layer] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
        )
    return found
