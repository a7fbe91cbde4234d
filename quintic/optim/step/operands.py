"""The tensors that a bucket's update reads and writes, found anew at every step, and what is kept between steps.

A sparse gradient is an error, here and wherever a step finds its tensors: a ValueError that names the parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import gradient_dtype, is_dtensor, local_gradients, local_tensor, reject_sparse
from quintic.optim.layout.tables import AddressTable, upload_programs
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import BucketMember, block_of
from quintic.optim.rules.device import host_tensor, upload
from quintic.optim.rules.rule import MANTISSA, MASTER
from quintic.optim.rules.table import NEURON_MOMENT
from quintic.optim.state.state import master_key, second_moments

if TYPE_CHECKING:  # needs Triton
    from quintic.kernels.programs import TilePrograms
    from quintic.kernels.update.matrix_layout import MatrixLayout

__all__ = ["GRADIENT", "BlockPlaces", "BucketCache", "Operands", "State", "are_contiguous", "dense_gradient"]

GRADIENT = attrgetter("grad")
"""Return the gradient of a parameter."""

State = Mapping[Tensor, Mapping[str, Tensor]]


class Operands(NamedTuple):
    """The members of a bucket that have a gradient, with the tensors their update reads and writes, side by side.

    All of a bucket's parameters have the same state, and so all or none have a master.
    """

    members: tuple[BucketMember, ...]
    params: list[Tensor]
    gradients: list[Tensor]
    states: list[Mapping[str, Tensor]]
    num_matrices: int
    missing: tuple[int, ...] = ()
    """Positions in their group of parameters without a gradient."""

    def present(self, gradients: Sequence[Tensor | None]) -> "Operands":
        """Return the operands that have a gradient, with these gradients, dense."""
        # Four lists side by side, thinned out together.
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

    def masters(self) -> list[Tensor] | None:
        """Return the fp32 master or mantissa of each parameter, or None."""
        # float32 and float64 weights need no more precision.
        if self.params[0].itemsize >= 4:
            return None
        key = master_key(self.states[0])
        return None if key is None else [state[key] for state in self.states]


class BlockPlaces:
    """Where in the memory of its tensors each member's matrices are: looked up once, as it follows from the plan.

    No views are kept: they would keep a parameter's memory from being exchanged (`torch.utils.swap_tensors`).
    """

    def __init__(self) -> None:
        self._members: tuple[BucketMember, ...] = ()
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []

    def blocks(self, active: "Operands", view: View, *lists: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the matrices of the members in lists of tensors that are like their parameters, sharing memory."""
        # The tuple itself is the key: it is the plan's own as long as every member has a gradient.
        if self._members is not active.members:
            pairs = [
                (param, block_of(param.detach(), member, view))
                for param, member in zip(active.params, active.members, strict=True)
            ]
            self._places = [(b.shape, b.stride(), int(b.storage_offset()) - int(p.storage_offset())) for p, b in pairs]
            self._members = active.members
        of_lists: list[Sequence[Tensor]] = []
        for tensors in lists:
            blocks: list[Tensor] = []
            rows = zip(tensors, active.params, active.members, self._places, strict=True)
            for tensor, param, member, (shape, stride, offset) in rows:
                # A tensor with other strides, such as a gradient's, is looked up by its view, which takes longer.
                if tensor.stride() == param.stride():
                    blocks.append(tensor.as_strided(shape, stride, tensor.storage_offset() + offset))
                else:
                    blocks.append(block_of(tensor, member, view))
            of_lists.append(blocks)
        return of_lists

    def read(self, active: "Operands", view: View, tensors: Sequence[Tensor]) -> Tensor:
        """Return a copy (b, m, n), contiguous on the parameters' device, of the matrices in tensors like these."""
        (blocks,) = self.blocks(active, view, tensors)
        shape = blocks[0].shape[1:]  # (groups, rows, columns...)
        size = (sum(map(len, blocks)), shape[:2].numel(), shape[2:].numel())
        batch = torch.empty(size, dtype=blocks[0].dtype, device=active.params[0].device)
        # State in host memory is pinned: the host does not wait for the copies.
        torch._foreach_copy_(self._split(batch, blocks), list(blocks), non_blocking=True)
        return batch

    def write(self, active: "Operands", view: View, tensors: Sequence[Tensor], batch: Tensor) -> None:
        """Copy a batch that `read` returned back to the tensors that it was read from."""
        (blocks,) = self.blocks(active, view, tensors)
        torch._foreach_copy_(list(blocks), self._split(batch, blocks), non_blocking=True)

    @staticmethod
    def _split(batch: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
        return list(batch.view(len(batch), *blocks[0].shape[1:]).split(list(map(len, blocks))))


_P = TypeVar("_P")
_T = TypeVar("_T")

# What shares memory with state or weights.
_PLACED = ("moments", "owned", "elsewhere")


class BucketCache:
    """Memory of one bucket on its device between steps, besides state."""

    def __init__(self, *, fills_missing: bool = False) -> None:
        self._fills_missing = fills_missing
        """Whether a missing gradient stands as zeros, because other ranks may have one."""
        self.everything: Operands | None = None
        """All members, without gradients."""
        self._owners: list[Tensor] = []
        self._names: list[str] = []
        """The parameter of each member."""
        self._contiguous = self._are_sharded = False
        self._kept: dict[str, tuple[object, Any]] = {}
        """Name -> what a value was made for, and the value: it is made again when that is another one."""
        self.places = BlockPlaces()
        self.table, self.steps_table = AddressTable(), AddressTable()
        self.runs: list[tuple[MatrixLayout, int]] | None = None
        """The layouts of the members' matrices, and how many in a row have each; nearly always one."""
        self._neuron_tables: dict[int, AddressTable] = {}

    def invalidate_views(self) -> None:
        """Forget where weights and state are: they may have other memory now."""
        self.everything = None
        self.places = BlockPlaces()
        for name in _PLACED:
            self._kept.pop(name, None)

    def cached(self, name: str, key: object, make: Callable[[], _T]) -> _T:
        """Return the value kept under a name, made anew where its key is another one."""
        # One value for each name: the last key counts.
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = key, make()
        value: _T = kept[1]
        return value

    def operands(self, bucket: Bucket, group: Group, state: State) -> Operands:
        """Return the members of the bucket that have a gradient; of `DTensor`s what this rank holds.

        A model has hundreds of parameters and this runs every step: what follows from the plan alone is looked up once.
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
        # Gradients are new objects after each backward pass; everything else is as it was.
        owners = self._owners
        gradients = local_gradients(owners, self._names) if self._are_sharded else list(map(GRADIENT, owners))
        # The usual case: every gradient is there and lies as its parameter does.
        if self._contiguous and are_contiguous(gradients):
            return everything._replace(gradients=gradients)
        return self.of_those(everything, gradients)

    def of_those(self, everything: Operands, gradients: Sequence[Tensor | None]) -> Operands:
        """Return the members that have a gradient, given all members and their gradients; arguments are not kept."""
        if self._fills_missing:
            rows = zip(everything.members, everything.params, gradients, strict=True)
            # The positions are kept for the report of the step, before zeros take their place.
            missing = tuple(member.index for member, _, gradient in rows if gradient is None)
            filled = [
                torch.zeros_like(param, dtype=gradient_dtype(param)) if gradient is None else gradient
                for param, gradient in zip(everything.params, gradients, strict=True)
            ]
            return everything.present(filled)._replace(missing=missing)
        present = everything.present(gradients)
        return present._replace(num_matrices=sum(member.num_matrices for member in present.members))

    def scales(
        self,
        bucket: Bucket,
        group: Group,
        parts: Sequence[_P],
        shapes: Sequence[tuple[int, int]],
        numbers_of: Callable[[Sequence[_P]], Sequence[Sequence[int]]],
    ) -> Tensor:
        """Return the learning-rate scale times the own multiplier of each matrix, (count, kinds).

        The matrices belong to `parts`, a tuple that is the same one as long as nothing changes; `numbers_of` returns of
        each matrix, by kind, the position among the matrices of its parameter.
        """

        def make() -> Tensor:
            numbers, multipliers = numbers_of(parts), group.lr_multipliers
            dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
            # (kinds,) -> (matrices or units, kinds)
            scales = host_tensor([group.rule.lr_factor(group.adjust_lr, m, n) for m, n in shapes], dtype)
            scales = scales.expand(len(numbers), -1).clone()
            if multipliers is not None:
                each = [[multipliers[number] for number in row] for row in numbers]
                scales *= host_tensor(each, dtype).view_as(scales)
            return upload(scales, bucket.device)

        return self.cached("scales", (group.adjust_lr, group.lr_multipliers, parts), make)

    def moments(self, view: View, active: Operands) -> list[Tensor]:
        """Return the second moments of each member's matrices, (matrices, m, 1) or (matrices, 1, n), sharing memory."""
        # (neurons of all matrices of a parameter,) each.
        buffers = [state[NEURON_MOMENT] for state in active.states]

        def make() -> list[Tensor]:
            rows = zip(active.members, active.params, buffers, strict=True)
            return [
                second_moments(buffer, param.shape, view)[m.block][m.start : m.start + m.num_matrices]
                for m, param, buffer in rows
            ]

        # Loading a state puts other tensors, or other memory, in their place.
        key = active.members, list(map(id, buffers)), list(map(Tensor.data_ptr, buffers))
        return self.cached("moments", key, make)

    def check_state(self, active: Operands, dtypes: Mapping[str, torch.dtype], addresses: tuple[int, ...]) -> None:
        """Reject state of another device, dtype or memory order, where kernels see addresses alone."""

        def check() -> None:
            # Kernels read bytes at an address: other strides or another dtype would go unnoticed.
            wanted = {**dtypes, MASTER: torch.float32, MANTISSA: torch.uint16}
            for member, param, state in zip(active.members, active.params, active.states, strict=True):
                for key in wanted.keys() & state.keys():
                    value = state[key]
                    if (value.device, value.dtype, value.stride()) != (param.device, wanted[key], param.stride()):
                        right = f"{wanted[key]} on {param.device} with strides {param.stride()}"
                        raise _misread(member.name, key, value, right)

        self.cached("checked", (active.members, addresses), check)

    def matrix_places(self, view: View, active: Operands) -> tuple[Tensor, Tensor]:
        """Return for each matrix which operand it belongs to, and where it starts in the parameter, in entries."""

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
        """Return on the device the entries of each tensor, and how programs are divided among them."""
        from quintic.kernels.update.adamw import adamw_programs

        def make() -> "tuple[Tensor, TilePrograms]":
            numels = [param.numel() for param in active.params]
            return upload(host_tensor(numels), device), upload_programs(adamw_programs(numels), device)

        return self.cached("programs", active.members, make)

    def neuron_table(
        self, bucket: Bucket, moments: Sequence[Tensor], names: Iterable[str], kind: int = 0
    ) -> Tensor | None:
        """Return on the device the address of each matrix' second moments; None where the bucket has no kernels.

        The moments, (matrices, m, 1) or (matrices, 1, n), are those of whole members, of one of the bucket's kinds.
        Those that the kernel would misread are an error.
        """
        if bucket.kernels == "torch":
            return None
        bases = tuple(map(Tensor.data_ptr, moments))

        def addresses() -> Tensor:
            for name, buffer in zip(names, moments, strict=True):
                if (buffer.device, buffer.dtype) != (bucket.device, torch.float32) or not buffer.is_contiguous():
                    right = f"torch.float32 on {bucket.device} without gaps"
                    raise _misread(name, NEURON_MOMENT, buffer, right)
            # (matrices of all members,) int64: one address for each matrix' own moments.
            rows = zip(bases, moments, strict=True)
            each = [base + i * moment[0].nbytes for base, moment in rows for i in range(len(moment))]
            return host_tensor(each, torch.int64)

        counts = tuple(map(len, moments))
        return self._neuron_tables.setdefault(kind, AddressTable()).get((bases, counts), addresses, bucket.device)


def _local_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a parameter's state itself, or for a `DTensor` what this rank holds of it."""
    local = {key: local_tensor(value) for key, value in state.items()}
    return state if all(local[key] is value for key, value in state.items()) else local


def are_contiguous(gradients: list[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether all gradients are there, and contiguous."""
    try:
        return all(map(Tensor.is_contiguous, gradients))
    except (TypeError, RuntimeError):  # a gradient is None, or sparse
        return False


def dense_gradient(param: Tensor, gradient: Tensor, name: str) -> Tensor:
    """Return a parameter's gradient with the parameter's strides."""
    reject_sparse(name, gradient)
    if gradient.stride() == param.stride():
        return gradient
    # Views may be impossible without a copy, and fused kernels pair entries by their place in memory.
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)


def _misread(name: str, key: str, value: Tensor, right: str) -> ValueError:
    return ValueError(
        f"{name}: its {key} is {value.dtype} on {value.device} with strides {value.stride()}, and must be {right}; "
        f"make the optimizer after moving the model, or move its state along"
    )
