"""Parameters whole, whatever their layout: what several ranks hold of weights, gradients and state, brought together.

For the reference of a step, which has no messages of its own, and for state that goes from one parameter to another.
Whole tensors are gathered one at a time, and every rank gets all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_uneven, this_rank
from quintic.optim.comms.sharing import layouts_of
from quintic.optim.current import Current
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, intersection, numel_of, relative, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.state.parts import CUT_KEYS, divided_state
from quintic.optim.state.sharded_state import DividedState, divided_parameters
from quintic.optim.state.state import second_moments
from quintic.optim.step.averages.gradient_averages import OfGroup

__all__ = ["Parameter", "parameters_of"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an optimizer, and where its pieces are."""

    name: str
    param: Tensor
    group: Group
    layout: Layout | None
    """None where this rank has all there is."""
    process_group: ProcessGroup | None
    """Of the layout's ranks."""
    divided: DividedState | None = None
    """Which parts of the state are whose; None where state lies as the parameter does."""
    early: OfGroup | None = None
    """The average of its gradients, where it was made before the step."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold pieces or copies, in the order of the process group."""
        return (this_rank(),) if self.layout is None else tuple(sorted(self.layout.ranks))

    @property
    def own_copy(self) -> tuple[int, ...]:
        """Return the ranks that hold the pieces of the same copy as this rank, in order."""
        if self.layout is None or self.layout.is_replicated:
            return (this_rank(),)
        copies = dict(zip(self.layout.ranks, self.layout.copies, strict=True))
        return tuple(rank for rank in self.ranks if copies[rank] == copies[this_rank()])

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole of what this rank holds a piece of, a new tensor. All of `ranks` must call it."""
        layout = self.layout
        if layout is None or self.process_group is None or layout.is_replicated:
            return local.clone()
        boxes = [layout.box_of(rank) for rank in self.ranks]
        parts = all_gather_uneven(local.reshape(-1), [numel_of(box) for box in boxes], self.process_group)
        whole = local.new_empty(layout.shape)
        for rank, box, part in zip(self.ranks, boxes, parts, strict=True):
            if rank in self.own_copy and part.numel():
                self.piece(whole, rank).copy_(part.view(size_of(box)))
        return whole

    def whole_of(self, key: str, local: Tensor) -> Tensor:
        """Return the whole of `"weight"` or of a state of the parameter's shape. All of `ranks` must call it.

        Args:
            key: name of the state.
            local: what this rank has.
        """
        if self.divided is None or key not in CUT_KEYS:
            return self.whole(local)
        return self._of_parts(local)

    def whole_average(self) -> Tensor | None:
        """Return the average of the gradients if it was made before. All of `ranks` must call it."""
        if self.early is None:
            return None
        if self.early.own is not None:
            return self._of_parts(self.early.own[self.param])
        return self.early.lent[self.param] if self.param.grad is None else self.param.grad

    def _of_parts(self, local: Tensor) -> Tensor:
        """Return the whole of what each rank has some parts of."""
        assert self.divided is not None
        assert self.process_group is not None
        positions = range(len(self.divided.ranks))
        sizes = [sum(part.numel for part in self.divided.parts if part.owner == owner) for owner in positions]
        found = all_gather_uneven(local, sizes, self.process_group)
        whole = torch.empty_like(self.param, dtype=local.dtype)
        for part in self.divided.parts:
            run = found[part.owner][part.offset : part.offset + part.numel]
            in_memory_order(whole)[part.start : part.stop].copy_(run)
        return whole

    def local_of(self, key: str, whole: Tensor) -> Tensor:
        """Return what this rank has of a whole weight or state."""
        if self.divided is None:
            return self.piece(whole, this_rank())
        return divided_state({key: whole}, self.divided.parts, self.divided.ranks.index(this_rank()))[key]

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return what a rank holds of a whole tensor, sharing memory."""
        if self.layout is None:
            return whole
        return whole[relative(self.layout.box_of(rank), tuple((0, size) for size in self.layout.shape))]

    def whole_second_moments(self, buffer: Tensor) -> Tensor:
        """Return NorMuon's second moments of all matrices: those of a matrix that one rank alone holds are there alone.

        All of `ranks` must call it.

        Args:
            buffer: what this rank has of them.
        """
        if self.layout is None or self.process_group is None:
            return buffer.clone()
        everyone = all_gather_uneven(buffer, [buffer.numel()] * len(self.ranks), self.process_group)
        shape, view = self.layout.shape, self.group.view
        by_rank = {rank: second_moments(one, shape, view) for rank, one in zip(self.ranks, everyone, strict=True)}
        result = buffer.clone()
        for (block, matrix), holder in self.sole_holders().items():
            second_moments(result, shape, view)[block][matrix].copy_(by_rank[holder][block][matrix])
        return result

    def sole_holders(self) -> dict[tuple[int, int], int]:
        """Return the matrices whose state one of several ranks alone has, as (block of the view, number in it)."""
        found: dict[tuple[int, int], int] = {}
        if self.layout is None:
            return found
        if self.divided is not None:
            for part in self.divided.parts:
                found |= dict.fromkeys(part.unit.matrices if part.unit else (), self.divided.ranks[part.owner])
            return found
        for unit in self.group.view.units(self.layout.shape):
            holders = [r for r in self.ranks if intersection(self.layout.box_of(r), unit.box) is not None]
            if len(holders) == 1:
                found |= dict.fromkeys(unit.matrices, holders[0])
        return found


def parameters_of(current: Current) -> Iterator[Parameter]:
    """Yield the parameters that this rank has a part in, by group. All ranks that share parameters must call it."""
    divided, early = divided_parameters(current.groups), current.early.fresh()
    layouts = list(map(layouts_of, current.groups))
    current.communicators.connect(current.groups, layouts)
    for group, found in zip(current.groups, layouts, strict=True):
        for name, param, layout in zip(group.param_names, group.params, found, strict=True):
            if layout is None:
                yield Parameter(name, param, group, None, None)
            elif this_rank() in layout.ranks:
                process_group = current.communicators[tuple(sorted(layout.ranks))]
                average = early.get(group.number)
                yield Parameter(name, param, group, layout, process_group, divided.get(param), average)
