"""Finds the tensors that a bucket's update reads and writes at a step, and keeps lookups and tables between steps.

`Operands` are the tensors of one step, `BucketCache` has everything that is kept. Sparse gradients are rejected with a
ValueError that names the parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import gradient_dtype, is_dtensor, local_gradients, local_tensor, reject_sparse
from quintic.optim.layout.pieces import Piece, block_of, take_matrices
from quintic.optim.layout.tables import AddressTable, upload_programs
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.rules.device import host_tensor, upload
from quintic.optim.rules.rule import MANTISSA, MANTISSA_BYTE, MASTER
from quintic.optim.rules.stages import StateSpec
from quintic.optim.state.state import vectors_of

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.programs import TilePrograms
    from quintic.kernels.update.matrix_layout import MatrixLayout

__all__ = ["GRADIENT", "BucketCache", "Operands", "State", "are_contiguous", "dense_gradient"]

GRADIENT = attrgetter("grad")
"""Return the gradient of a parameter."""

State = Mapping[Tensor, Mapping[str, Tensor]]


class Operands(NamedTuple):
    """The members of a bucket that have a gradient, with their tensors: equally long lists, one entry for each member.

    All members have the same kinds of state, so either all of them have a master or none has.
    `num_matrices` counts the matrices of all members.
    """

    members: tuple[Piece, ...]
    params: list[Tensor]
    gradients: list[Tensor]
    states: list[Mapping[str, Tensor]]
    num_matrices: int
    missing: tuple[int, ...] = ()
    """Positions in their group of parameters without a gradient."""

    def present(self, gradients: Sequence[Tensor | None]) -> "Operands":
        """Return the operands whose gradient is not None, with these gradients, in the strides of their parameters."""
        # Leave members without a gradient out of all four lists.
        rows = zip(self.members, self.params, gradients, self.states, strict=True)
        present = [(m, p, dense_gradient(p, g, m.name), s) for m, p, g, s in rows if g is not None]
        if len(present) == len(self.members):
            return self._replace(gradients=[gradient for _, _, gradient, _ in present])
        return self._replace(
            members=tuple(member for member, _, _, _ in present),
            params=[param for _, param, _, _ in present],
            gradients=[gradient for _, _, gradient, _ in present],
            states=[state for _, _, _, state in present],
            missing=tuple(m.index for m, gradient in zip(self.members, gradients, strict=True) if gradient is None),
        )


_T = TypeVar("_T")


class BucketCache:
    """Lookups, tables and small tensors of one bucket that are kept between steps; no state and no gradients."""

    def __init__(self, *, fills_missing: bool = False) -> None:
        self._fills_missing = fills_missing
        """Whether missing gradients are replaced by zeros, because other ranks may have these gradients."""
        self.everything: Operands | None = None
        """All members, without gradients."""
        self._owners: list[Tensor] = []
        """The parameter of each member; a `DTensor` where it is sharded."""
        self._names: list[str] = []
        """The name of each member's parameter."""
        self._contiguous = self._are_sharded = False
        self._kept: dict[str, tuple[object, Any]] = {}
        """Name -> (key, value); the value is made again when the key changes."""
        self.places: tuple[tuple[Piece, ...], list[tuple[torch.Size, tuple[int, ...], int]]] | None = None
        """Members, and for each shape, strides and offset of its matrices in its parameter (`torch_backend.py`)."""
        # Addresses of the members' tensors for kernels, and of AdamW's counts of steps.
        self.table, self.steps_table = AddressTable(), AddressTable()
        self.runs: list[tuple[MatrixLayout, int]] | None = None
        """Each layout of the members' matrices, with the number of consecutive matrices that have it."""
        self._vector_tables: dict[tuple[str, int], AddressTable] = {}
        """(name of vector state, index of a kind of matrix) -> the addresses of its vectors."""

    def invalidate_views(self) -> None:
        """Forget where weights and state are, because their memory may have changed."""
        self.everything = None
        self.places = None
        for name in [name for name in self._kept if name.startswith("vectors")]:
            del self._kept[name]

    def cached(self, name: str, key: object, make: Callable[[], _T]) -> _T:
        """Return the value that is kept under a name, made by `make` if there is none or the key has changed."""
        # A name has only one value: values of earlier keys are dropped.
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = key, make()
        value: _T = kept[1]
        return value

    def operands(self, bucket: Bucket, group: Group, state: State) -> Operands:
        """Return the members of the bucket that have a gradient, with tensors; local ones of `DTensor`s.

        This runs at every step for hundreds of parameters, so everything that follows from the plan is looked up once.
        """
        everything = self.everything
        if everything is None:
            self._owners = [group.params[member.index] for member in bucket.members]
            params = [local_tensor(owner) for owner in self._owners]
            self._names = [member.name for member in bucket.members]
            self._are_sharded = any(map(is_dtensor, self._owners))
            states = [_local_state(state[owner]) for owner in self._owners]
            everything = self.everything = Operands(bucket.members, params, [], states, bucket.num_matrices)
            self._contiguous = all(param.is_contiguous() for param in params)
        # Only gradients are looked up at every step: a backward pass may make new ones.
        owners = self._owners
        gradients = local_gradients(owners, self._names) if self._are_sharded else list(map(GRADIENT, owners))
        # The usual case: every gradient is there and lies as its parameter does.
        if self._contiguous and are_contiguous(gradients):
            return everything._replace(gradients=gradients)
        return self.with_gradients(everything, gradients)

    def with_gradients(self, everything: Operands, gradients: Sequence[Tensor | None]) -> Operands:
        """Return the members in `everything` that have a gradient, with gradients; None stands for a missing one.

        If the cache fills missing gradients, all members are returned, some with zeros.
        """
        if self._fills_missing:
            rows = zip(everything.members, everything.params, gradients, strict=True)
            # Note which are missing for the report of the step, before they are replaced by zeros.
            missing = tuple(member.index for member, _, gradient in rows if gradient is None)
            filled = [
                torch.zeros_like(param, dtype=gradient_dtype(param)) if gradient is None else gradient
                for param, gradient in zip(everything.params, gradients, strict=True)
            ]
            return everything.present(filled)._replace(missing=missing)
        # Fewer members have fewer matrices.
        present = everything.present(gradients)
        return present._replace(num_matrices=sum(member.batch_size for member in present.members))

    def scales(
        self, bucket: Bucket, group: Group, pieces: tuple[Piece, ...], shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return for each matrix the factor from `adjust_lr` times its entry in `lr_multipliers`, (count, kinds).

        Args:
            bucket: the bucket; it gives dtype and device.
            group: the bucket's group.
            pieces: the members or units with the matrices; units have one matrix of each kind.
            shapes: (m, n) of each kind.
        """

        def make() -> Tensor:
            numbers, multipliers = [number for piece in pieces for number in piece.matrices], group.lr_multipliers
            dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
            # (kinds,) -> (matrices or units, kinds)
            scales = host_tensor([group.rule.lr_factor(group.adjust_lr, m, n) for m, n in shapes], dtype)
            scales = scales.expand(len(numbers) // len(shapes), -1).clone()
            # Multipliers are listed in the order of a parameter's matrices.
            if multipliers is not None:
                scales *= host_tensor([multipliers[number] for number in numbers], dtype).view_as(scales)
            return upload(scales, bucket.device)

        return self.cached("scales", (group.adjust_lr, group.lr_multipliers, pieces), make)

    def vectors(self, spec: StateSpec, view: View, active: Operands) -> list[Tensor]:
        """Return vector state for each member, (matrices, m or 1, n or 1), as views of it."""
        # For each member the vector (numbers of all matrices of its parameter,).
        buffers = [state[spec.name] for state in active.states]

        def make() -> list[Tensor]:
            rows = zip(active.members, active.params, buffers, strict=True)
            return [
                take_matrices(vectors_of(spec, buffer, param.shape, view), member.matrices)
                for member, param, buffer in rows
            ]

        # Loading a checkpoint may replace these tensors or their memory, so both are in the key.
        key = active.members, list(map(id, buffers)), list(map(Tensor.data_ptr, buffers))
        return self.cached(f"vectors {spec.name}", key, make)

    def check_state(self, active: Operands, dtypes: Mapping[str, torch.dtype], addresses: tuple[int, ...]) -> None:
        """Reject state on a wrong device, of a wrong dtype or with wrong strides; kernels get only its address."""

        def check() -> None:
            # Kernels read bytes at an address, and would not notice other strides or another dtype.
            wanted = {**dtypes, MASTER: torch.float32, MANTISSA: torch.uint16, MANTISSA_BYTE: torch.uint8}
            for member, param, state in zip(active.members, active.params, active.states, strict=True):
                for key in wanted.keys() & state.keys():
                    value = state[key]
                    if (value.device, value.dtype, value.stride()) != (param.device, wanted[key], param.stride()):
                        right = f"{wanted[key]} on {param.device} with strides {param.stride()}"
                        raise _misread(member.name, key, value, right)

        # Checked again only when members or addresses have changed.
        self.cached("checked", (active.members, addresses), check)

    def matrix_places(self, view: View, active: Operands) -> tuple[Tensor, Tensor]:
        """Return for each matrix its member's number and its first entry in the parameter, both (matrices,) int64."""

        def make() -> tuple[Tensor, Tensor]:
            owners: list[Tensor] = []
            offsets: list[Tensor] = []
            for number, (member, param) in enumerate(zip(active.members, active.params, strict=True)):
                # Matrices of a block lie at equal distances.
                block = block_of(param, member, view)
                start = int(block.storage_offset()) - int(param.storage_offset())
                offsets.append(torch.arange(block.shape[0], device="cpu") * int(block.stride(0)) + start)
                owners.append(torch.full_like(offsets[-1], number))
            return torch.cat(owners), torch.cat(offsets)

        return self.cached("matrix_places", active.members, make)

    def programs(self, active: Operands, device: torch.device) -> "tuple[Tensor, TilePrograms]":
        """Return for AdamW's kernel the members' numbers of entries, (members,), and the work of its programs."""
        # Imported here because it needs Triton.
        from quintic.kernels.update.adamw import adamw_programs

        def make() -> "tuple[Tensor, TilePrograms]":
            numels = [param.numel() for param in active.params]
            return upload(host_tensor(numels), device), upload_programs(adamw_programs(numels), device)

        return self.cached("programs", active.members, make)

    def vector_table(
        self, bucket: Bucket, name: str, vectors: Sequence[Tensor], names: Iterable[str], kind: int = 0
    ) -> Tensor:
        """Return the address of each matrix' vector state, (matrices,) int64 on the device.

        Args:
            bucket: the bucket.
            name: the name of this state.
            vectors: for each member or unit (matrices, m or 1, n or 1), all of one kind.
            names: the parameter of each, for errors.
            kind: the index of this kind in a unit.

        Raises:
            ValueError: a kernel would misread a vector: wrong device or dtype, or memory with gaps.
        """
        # The table is made again when an address or a number of matrices has changed.
        bases = tuple(map(Tensor.data_ptr, vectors))

        def addresses() -> Tensor:
            for param_name, buffer in zip(names, vectors, strict=True):
                if (buffer.device, buffer.dtype) != (bucket.device, torch.float32) or not buffer.is_contiguous():
                    right = f"torch.float32 on {bucket.device} without gaps"
                    raise _misread(param_name, name, buffer, right)
            # (matrices of all members,) int64: one address for each matrix' own vector.
            rows = zip(bases, vectors, strict=True)
            each = [base + i * vector[0].nbytes for base, vector in rows for i in range(len(vector))]
            return host_tensor(each, torch.int64)

        counts = tuple(map(len, vectors))
        return self._vector_tables.setdefault((name, kind), AddressTable()).get(
            (bases, counts), addresses, bucket.device
        )


def _local_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a parameter's state with the local tensors of `DTensor`s; without any, the same object."""
    local = {key: local_tensor(value) for key, value in state.items()}
    return state if all(local[key] is value for key, value in state.items()) else local


def are_contiguous(gradients: list[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether no gradient is missing, and all are dense and contiguous."""
    try:
        return all(map(Tensor.is_contiguous, gradients))
    except (TypeError, RuntimeError):  # a gradient is None, or sparse
        return False


def dense_gradient(param: Tensor, gradient: Tensor, name: str) -> Tensor:
    """Return a parameter's gradient with the parameter's strides, copied if it has others; reject a sparse one."""
    reject_sparse(name, gradient)
    if gradient.stride() == param.stride():
        return gradient
    # Kernels pair entries of weights and gradient by their place in memory, and the view of a parameter may not be
    # possible on other strides without a copy.
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)


def _misread(name: str, key: str, value: Tensor, right: str) -> ValueError:
    return ValueError(
        f"{name}: its {key} is {value.dtype} on {value.device} with strides {value.stride()}, and must be {right}; "
        f"make the optimizer after moving the model, or move its state along"
    )
