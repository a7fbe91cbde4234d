"""Layouts: which box of a parameter each rank holds.

A layout is read from a `DTensor`'s mesh and placements, or made for plain tensors that several ranks hold whole. Boxes
are in coordinates of the logical (global) tensor. Reading and comparing layouts needs no process group, so that layouts
of large meshes can be planned anywhere. The second half of the file gets this rank's piece of weights and gradients:
only `placed_as`, and `local_gradients` by way of it, communicate.
"""

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from quintic.optim.layout.wrappers import opened
from quintic.versions import STRIDED_NEEDS, moves_strided_shards, torch_version

if TYPE_CHECKING:  # importing it takes a second; avoid it when DTensor is unused
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "Box",
    "Layout",
    "gradient_dtype",
    "intersection",
    "is_dtensor",
    "layout_of",
    "local_gradients",
    "local_tensor",
    "mesh_layout",
    "numel_of",
    "placed_as",
    "reject_plain_gradient",
    "reject_sparse",
    "relative",
    "replicated_layout",
    "size_of",
    "writable_gradient",
]

_MOVES_STRIDED = moves_strided_shards()

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A range (start, stop) for each dimension of the logical tensor; empty where start == stop."""

_GRADIENT = attrgetter("grad")

# How one mesh dimension splits a tensor: (tensor dimension, split factor), see `mesh_layout`; None if it replicates.
_MeshSplit: TypeAlias = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The boxes of one tensor on all ranks of its mesh; layouts with equal boxes are equal, though of different meshes.

    Args:
        shape: shape of the logical (global) tensor.
        ranks: global ranks, in row-major order of the mesh, also those with an empty box.
        boxes: for each of these ranks the box that it holds.
        copies: for each of these ranks the index of the complete copy that its box belongs to, counted from 0; the
            boxes of one copy tile the tensor exactly once.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    copies: tuple[int, ...]
    _positions: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the ranks, so that `box_of` need not search."""
        object.__setattr__(self, "_positions", {rank: position for position, rank in enumerate(self.ranks)})

    def box_of(self, rank: int) -> Box:
        """Return the box that a global rank holds; the rank must be one of the layout's."""
        return self.boxes[self._positions[rank]]

    @property
    def num_copies(self) -> int:
        """The number of complete copies of the tensor."""
        return max(self.copies) + 1

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds a complete copy of its own."""
        return self.num_copies == len(self.ranks)

    def among(self, ranks: Collection[int]) -> "Layout":
        """Return the layout on some of its ranks, which must hold one or more complete copies."""
        kept = [position for position, rank in enumerate(self.ranks) if rank in ranks]
        if len(kept) == len(self.ranks):
            return self
        # Number the remaining copies from 0 again.
        numbers: dict[int, int] = {}
        copies = tuple(numbers.setdefault(self.copies[position], len(numbers)) for position in kept)
        return Layout(
            self.shape,
            tuple(self.ranks[position] for position in kept),
            tuple(self.boxes[position] for position in kept),
            copies,
        )


def intersection(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor; None if it is empty."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        # Empty in one dimension is empty in all.
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def relative(box: Box, to: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that holds the box `to`; a ValueError if it is not inside."""
    # In the coordinates of that tensor, whose first entry is at the start of `to`.
    if any(start < low or stop > high for (start, stop), (low, high) in zip(box, to, strict=True)):
        raise ValueError(f"the box {box} is not inside {to}")
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, to, strict=True))


def size_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds `box`."""
    return tuple(stop - start for start, stop in box)


def numel_of(box: Box) -> int:
    """Return the number of entries in `box`."""
    return math.prod(size_of(box))


def replicated_layout(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """Return the layout of a plain tensor that every one of `ranks` holds whole, as under DDP."""
    return _replicated(tuple(shape), tuple(ranks))


@lru_cache(maxsize=1024)
def _replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    # Each rank holds the whole tensor, as a copy of its own.
    whole = tuple((0, size) for size in shape)
    return Layout(shape, ranks, (whole,) * len(ranks), tuple(range(len(ranks))))


def mesh_layout(shape: Sequence[int], mesh_ranks: Tensor | Sequence[Any], placements: "Sequence[Placement]") -> Layout:
    """Return the layout of a tensor with `placements` on a mesh, by PyTorch's rules.

    `Shard` splits as `torch.chunk` does: every rank but the last ones gets ceil(size / ranks), the last ones less or
    nothing. Several splits of one dimension are applied in the order of the mesh dimensions, except `_StridedShard`:
    FSDP2 makes it if a later mesh dimension (tensor or expert parallel) has split the dimension first. FSDP2 then
    splits the piece of each rank, so that a rank holds one contiguous range, also if sizes are uneven. `split_factor`
    is the number of pieces that there were before.

    Args:
        shape: shape of the logical tensor.
        mesh_ranks: global ranks in the shape of the mesh: a tensor (`mesh.mesh`) or nested sequences.
        placements: one `Replicate`, `Shard` or `_StridedShard` per mesh dimension.

    Raises:
        ValueError: a placement is not one of a parameter (`Partial`), names a dimension that the tensor does not have,
            or has a `split_factor` other than the number of pieces made by later mesh dimensions.
    """
    mesh = torch.as_tensor(mesh_ranks, dtype=torch.int64, device="cpu")  # in the mesh's shape
    shape = tuple(shape)
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements {_repr(placements)} on a mesh of {mesh.ndim} dimensions")
    # Placements become plain tuples, which `lru_cache` can hash.
    splits = tuple(_split_of(placement, shape) for placement in placements)
    try:
        return _mesh_layout(shape, tuple(mesh.shape), tuple(mesh.flatten().tolist()), splits)
    except ValueError as error:
        raise ValueError(f"{error} (placements {_repr(placements)}, mesh of shape {tuple(mesh.shape)})") from None


def layout_of(name: str, param: Tensor) -> Layout | None:
    """Return the layout of a `DTensor` parameter; None for a plain tensor. `name` is for error messages.

    Nothing is communicated, and ranks outside the parameter's mesh may call it. The local tensor has the shape of this
    rank's box, except that an empty one may have another empty shape.

    Raises:
        ValueError: a placement is not allowed for parameters (see `mesh_layout`), or the local tensor does not have the
            shape of this rank's box.
    """
    if not is_dtensor(param):
        return None
    mesh, placements = param.device_mesh, param.placements
    try:
        layout = mesh_layout(param.shape, mesh.mesh, placements)
    except ValueError as error:
        raise ValueError(f"parameter '{name}' of shape {tuple(param.shape)}: {error}") from error
    if mesh.get_coordinate() is None:  # this rank is not in the mesh
        return layout
    rank, local = mesh.get_rank(), param._local_tensor
    box = layout.box_of(rank)
    # An empty piece may have another empty shape: FSDP2 keeps (0, 0) for (1, 0), for instance.
    if size_of(box) != tuple(local.shape) and (numel_of(box) or local.numel()):
        raise ValueError(
            f"parameter '{name}' of shape {tuple(param.shape)}: by its placements {_repr(placements)} on a mesh of "
            f"shape {tuple(mesh.shape)}, rank {rank} holds a tensor of shape {size_of(box)}, but its local tensor "
            f"has shape {tuple(local.shape)}; make the parameter with fully_shard, parallelize_module or "
            f"distribute_tensor, or choose a dimension that divides evenly"
        )
    return layout


# Tensors of exactly these classes are not wrappers, which saves `local_tensor` a slower test.
_ORDINARY = frozenset({Tensor, nn.Parameter})


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's box of `tensor`, sharing its memory, without the cost of `DTensor.to_local`.

    For a wrapper that is opened for steps (`wrappers.py`), return the ordinary tensor that stands in for it.
    """
    # Called for every parameter in every step: the usual classes come first.
    if not is_dtensor(tensor):
        return tensor if type(tensor) in _ORDINARY else opened(tensor)
    return _waited_for(tensor._local_tensor)


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype that a parameter's gradients have: its `grad_dtype` if that is set, else its own dtype."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if dtype is None else dtype


def writable_gradient(param: Tensor) -> Tensor | None:
    """Return a parameter's gradient for writing; one made in inference mode is replaced by an ordinary copy first."""
    gradient = param.grad
    if gradient is not None and gradient.is_inference():
        with torch.inference_mode(False):
            param.grad = gradient = gradient.clone()
    return gradient


def reject_sparse(name: str, gradient: Tensor) -> None:
    """Raise a ValueError that names the parameter if its gradient is sparse."""
    if gradient.layout is not torch.strided:
        raise ValueError(f"{name}: sparse gradients are not supported; build the embedding with sparse=False")


def reject_plain_gradient(name: str, param: Tensor, gradient: Tensor) -> None:
    """Raise a ValueError that names the parameter if it is sharded and its gradient is a plain tensor.

    PyTorch lets users set `p.grad` to a whole plain tensor, but nothing tells whether all ranks have set equal ones.
    """
    if (
        is_dtensor(param)
        and not is_dtensor(gradient)
        and not all(placement.is_replicate() for placement in param.placements)
    ):
        raise ValueError(
            f"{name}: its gradient is a plain tensor, and the parameter a DTensor with placements "
            f"{_repr(param.placements)}; make it a DTensor as well, with torch.distributed.tensor.distribute_tensor if "
            f"every rank has all of it"
        )


def local_gradients(params: Sequence[Tensor], names: Sequence[str]) -> list[Tensor | None]:
    """Return each parameter's gradient on this rank, with the placements of the parameter; None without a gradient.

    Tensor parallelism leaves some gradients `Partial` (of the weights of norms between sharded sequences). These are
    reduced here, in which case all ranks of the mesh must call it; in a step that was done before, by
    `partial_gradients.py`, since ranks may lack such gradients. A ValueError names a parameter that is sharded and
    has a plain gradient.
    """
    gradients: list[Any] = list(map(_GRADIENT, params))
    kind = _dtensor_type()
    if kind == ():  # no DTensor exists in this process
        return gradients
    owners: list[Any] = list(params)
    for number, (param, gradient) in enumerate(zip(owners, gradients, strict=True)):
        # A plain gradient stays as it is; for a sharded parameter it is an error.
        if not isinstance(gradient, kind) or not isinstance(param, kind):
            if gradient is not None:
                reject_plain_gradient(names[number], param, gradient)
            continue
        # Hundreds in every step: nearly all have the placements of their parameters, most even the same `_spec` object,
        # which is the quickest test.
        if gradient._spec is not param._spec and gradient.placements != param.placements:
            gradient = placed_as(names[number], param, gradient)
        # This rank's box, as `local_tensor` returns it.
        local = gradient._local_tensor
        gradients[number] = local if type(local) is Tensor else _waited_for(local)
    return gradients


def placed_as(name: str, param: Any, gradient: Any) -> Any:
    """Return a DTensor gradient redistributed to its parameter's placements; all ranks of the mesh must call it.

    Raises:
        ValueError: this version of PyTorch would misplace rows; the message names the parameter.
    """
    # Older versions of PyTorch redistribute `_StridedShard` without an error and give wrong rows.
    placements = (*gradient.placements, *param.placements)
    if not _MOVES_STRIDED and any(type(placement).__name__ == "_StridedShard" for placement in placements):
        raise ValueError(
            f"{name}: its gradient has placements {_repr(gradient.placements)} and the parameter "
            f"{_repr(param.placements)}, between which PyTorch {torch_version()} misplaces rows; give it the "
            f"parameter's placements, or use PyTorch {STRIDED_NEEDS}"
        )
    return gradient.redistribute(param.device_mesh, param.placements)


def _waited_for(local: Tensor) -> Tensor:
    # It may be the result of a collective that still runs, which `_local_tensor` does not wait for.
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def _dtensor_type() -> Any:
    """Return the class `DTensor` for `isinstance`, or an empty tuple if its module has not been imported."""
    # A program with DTensors has imported their module; others need not pay for the import.
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Return whether a tensor is a `DTensor`."""
    # An empty tuple of classes matches nothing.
    return isinstance(tensor, _dtensor_type())


def _repr(placements: "Sequence[Placement]") -> str:
    return f"({', '.join(repr(placement) for placement in placements)})"


def _split_of(placement: "Placement", shape: tuple[int, ...]) -> _MeshSplit:
    """Return the tensor dimension that a placement splits, and its split factor; None for `Replicate`."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    # Exactly these types: a class derived from them may split in another way.
    if type(placement) is Replicate:
        return None
    if type(placement) is not Shard and type(placement) is not _StridedShard:
        raise ValueError(f"{placement!r} is no layout of a parameter; use Replicate or Shard")
    if not -len(shape) <= placement.dim < len(shape):
        raise ValueError(f"{placement!r} names a dimension that a tensor of shape {shape} does not have")
    split_factor = placement.split_factor if type(placement) is _StridedShard else 1
    return placement.dim % len(shape), int(split_factor)


@lru_cache(maxsize=1024)
def _mesh_layout(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], ranks: tuple[int, ...], splits: tuple[_MeshSplit, ...]
) -> Layout:
    # Integer arithmetic on tensors of the mesh's shape, one entry per rank. On the CPU explicitly, since the user may
    # have set another default device.
    cpu = torch.device("cpu")
    coordinates = torch.meshgrid(*(torch.arange(size, device=cpu) for size in mesh_shape), indexing="ij")
    columns = []  # for each tensor dimension the (start, stop) of every rank
    for dim, size in enumerate(shape):
        # Each split narrows the range [start, start + length) of a rank to one chunk of it.
        start, length = torch.tensor(0, device=cpu), torch.tensor(size, device=cpu)
        for mesh_dim in _split_order(dim, mesh_shape, splits):
            # As torch.chunk: ceil(length / ranks) entries each, fewer or none on the last ranks.
            chunk = (length + (mesh_shape[mesh_dim] - 1)) // mesh_shape[mesh_dim]
            offset = torch.minimum(chunk * coordinates[mesh_dim], length)
            start, length = start + offset, torch.minimum(chunk, length - offset)
        starts = start.expand(mesh_shape).flatten().tolist()
        stops = (start + length).expand(mesh_shape).flatten().tolist()
        columns.append(list(zip(starts, stops, strict=True)))
    # The index of a copy: the coordinates in the mesh dimensions that replicate, in row-major order.
    copies = torch.tensor(0, device=cpu)
    for mesh_dim, split in enumerate(splits):
        if split is None:
            copies = copies * mesh_shape[mesh_dim] + coordinates[mesh_dim]
    # From a list per dimension to a box per rank; a 0-d tensor's box has no ranges.
    boxes = tuple(zip(*columns, strict=True)) if columns else ((),) * len(ranks)
    return Layout(shape, ranks, boxes, tuple(copies.expand(mesh_shape).flatten().tolist()))


def _split_order(dim: int, mesh_shape: tuple[int, ...], splits: tuple[_MeshSplit, ...]) -> list[int]:
    """Return the mesh dimensions that split tensor dimension `dim`, in the order in which they are applied."""
    order: list[int] = []
    # From the last mesh dimension to the first, each inserted after the later ones that its split factor counts.
    for mesh_dim in reversed(range(len(splits))):
        split = splits[mesh_dim]
        if split is None or split[0] != dim or mesh_shape[mesh_dim] == 1:
            continue
        # The number of pieces after the first `count` splits; `Shard` has split factor 1 and so comes first.
        parts = [math.prod(mesh_shape[earlier] for earlier in order[:count]) for count in range(len(order) + 1)]
        if split[1] not in parts:
            raise ValueError(
                f"_StridedShard with split_factor {split[1]} of mesh dimension {mesh_dim} must follow splits by later "
                f"mesh dimensions that make {split[1]} pieces of dimension {dim}, possible are {parts}"
            )
        order.insert(parts.index(split[1]), mesh_dim)
    return order
