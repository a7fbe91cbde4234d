"""The tensors that a bucket's update reads and writes, found anew at every step, and what is kept between steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import local_gradients, local_tensor
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.members import Member
from quintic.optim.rules.device_memory import host_tensor, upload
from quintic.optim.rules.update import lr_scale_factor
from quintic.optim.state.state import master_key, second_moments

__all__ = ["BucketMemory", "Operands", "State", "are_contiguous", "dense_gradient"]

State = Mapping[Tensor, Mapping[str, Tensor]]


class Operands(NamedTuple):
    """The members of a bucket that have a gradient, with the tensors their update reads and writes, side by side.

    All of a bucket's parameters have the same state, and so all or none have a master.
    """

    members: tuple[Member, ...]
    params: list[Tensor]
    gradients: list[Tensor]
    states: list[Mapping[str, Tensor]]
    num_matrices: int
    missing: tuple[int, ...] = ()
    """Positions in their group of parameters without a gradient."""

    def present(self, gradients: Sequence[Tensor | None]) -> "Operands":
        """Return the operands that have a gradient, with these gradients, dense.

        Raises:
            ValueError: a gradient is sparse; the message names the parameter.
        """
        rows = zip(self.members, self.params, gradients, self.states, strict=True)
        found = [(m, p, dense_gradient(p, g, m.name), s) for m, p, g, s in rows if g is not None]
        if len(found) == len(self.members):
            return self._replace(gradients=[gradient for _, _, gradient, _ in found])
        return self._replace(
            members=tuple(member for member, _, _, _ in found),
            params=[param for _, param, _, _ in found],
            gradients=[gradient for _, _, gradient, _ in found],
            states=[state for _, _, _, state in found],
            missing=tuple(m.index for m, gradient in zip(self.members, gradients, strict=True) if gradient is None),
        )

    def masters(self) -> list[Tensor] | None:
        """Return what completes each parameter to float32, or None."""
        key = master_key(self.states[0])
        return None if key is None else [state[key] for state in self.states]


class BucketMemory:
    """What one bucket keeps on its device between steps, besides state."""

    def __init__(self) -> None:
        self.everything: Operands | None = None
        """All members, without gradients."""
        self._owners: list[Tensor] = []
        """The parameter of each member."""
        self._contiguous = False
        self._moments_key: object = None
        self._moments: list[Tensor] = []
        self._factors_key: tuple[object, ...] | None = None
        self._factors = torch.empty(0)

    def renew(self) -> None:
        """Forget where weights and state are: they may have other memory now."""
        self.everything = None
        self._moments_key, self._moments = None, []

    def operands(self, bucket: Bucket, group: Group, state: State) -> Operands:
        """Return the members of the bucket that have a gradient; of `DTensor`s what this rank holds.

        A model has hundreds of parameters and this runs every step: what follows from the plan alone is looked up once.
        Where matrices travel, all members take part, whatever this rank has: a gradient that is missing stands as
        zeros.

        Raises:
            ValueError: a gradient is sparse; the message names the parameter.
        """
        everything = self.everything
        if everything is None:
            self._owners = [group.params[member.index] for member in bucket.members]
            params = [local_tensor(owner) for owner in self._owners]
            states = [_local_state(state[owner]) for owner in self._owners]
            everything = self.everything = Operands(bucket.members, params, [], states, bucket.num_matrices)
            self._contiguous = all(param.is_contiguous() for param in params)
        gradients = local_gradients(self._owners)
        if self._contiguous and are_contiguous(gradients):
            return everything._replace(gradients=gradients)
        if bucket.travel is None:
            found = everything.present(gradients)
            return found._replace(num_matrices=sum(member.num_matrices for member in found.members))
        rows = list(zip(everything.members, everything.params, gradients, strict=True))
        whole = [torch.zeros_like(param) if gradient is None else gradient for _, param, gradient in rows]
        missing = tuple(member.index for member, _, gradient in rows if gradient is None)
        return everything.present(whole)._replace(missing=missing)

    def base_factors(self, bucket: Bucket, group: Group, active: Operands) -> Tensor:
        """Return the learning-rate scale times each matrix' own multiplier, (b, 1, 1)."""
        assert bucket.shape is not None
        scale = lr_scale_factor(group.lr_scale, *bucket.shape)
        multipliers = group.lr_multipliers
        count = active.num_matrices
        key = (scale, multipliers, count if multipliers is None else active.members)
        if key != self._factors_key:
            dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
            values = torch.full((count, 1, 1), scale, dtype=dtype, device="cpu")
            if multipliers is not None:
                ranges = [(member.first_matrix, member.num_matrices) for member in active.members]
                each = [multiplier for first, number in ranges for multiplier in multipliers[first : first + number]]
                values *= host_tensor(each, dtype).view(-1, 1, 1)
            self._factors, self._factors_key = upload(values, bucket.device), key
        return self._factors

    def moments(self, view: View, active: Operands) -> list[Tensor]:
        """Return the second moments of each member's matrices, (matrices, m, 1) or (matrices, 1, n), sharing memory."""
        buffers = [state["second_momentum_buffer"] for state in active.states]
        key = (active.members, tuple(map(id, buffers)), tuple(map(Tensor.data_ptr, buffers)))
        if key != self._moments_key:
            self._moments = [
                second_moments(buffer, param.shape, view)[member.block][
                    member.start : member.start + member.num_matrices
                ]
                for member, param, buffer in zip(active.members, active.params, buffers, strict=True)
            ]
            self._moments_key = key
        return self._moments

    def neuron_table(
        self, bucket: Bucket, moments: Sequence[Tensor], names: Iterable[str], kind: int = 0
    ) -> Tensor | None:
        """Return where the kernels find second moments, None for plain PyTorch; arguments as in `DeviceMemory`'s."""
        return None


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
    """Return a parameter's gradient with the parameter's strides.

    Raises:
        ValueError: the gradient is sparse.
    """
    if gradient.layout is not torch.strided:
        raise ValueError(f"{name}: sparse gradients are not supported; build the embedding with sparse=False")
    if gradient.stride() == param.stride():
        return gradient
    # Views may be impossible without a copy, and fused kernels pair entries by their place in memory.
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
