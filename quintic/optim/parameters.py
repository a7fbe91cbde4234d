"""Parameters whole, whatever their layout: what several ranks hold of weights, gradients and state, brought together.

For state that is saved, or goes from one parameter to another, and for the reference of a step, which has no messages
of its own. Whole tensors are gathered one at a time, and every rank gets all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_uneven, start_broadcasts, this_rank
from quintic.optim.comms.sharing import DIVIDING, layouts_of
from quintic.optim.current import Current
from quintic.optim.groups.options import Group
from quintic.optim.layout.layouts import Layout, intersection, numel_of, relative, size_of
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.layout.views import View
from quintic.optim.state.parts import CUT_KEYS, own_runs
from quintic.optim.state.sharded_state import DividedState, divided_parameters
from quintic.optim.state.state import second_moments
from quintic.optim.step.averages.gradient_averages import OfGroup

__all__ = ["Parameter", "parameters_of", "whole_states"]


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
        """Return the whole of `"weight"` or of a state of the parameter's shape. All of `ranks` must call it."""
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
        parts = sorted(self.divided.parts, key=lambda part: part.owner)
        sizes = [sum(part.numel for part in parts if part.owner == owner) for owner in range(len(self.ranks))]
        rows = local.new_empty(sum(sizes))
        rows.split(sizes)[self.ranks.index(this_rank())].copy_(local)
        # As bytes: backends do not know every dtype.
        num_bytes = [size * rows.itemsize for size in sizes]
        start_broadcasts(rows.view(torch.uint8), num_bytes, self.process_group).wait()
        whole = torch.empty_like(self.param, dtype=local.dtype)
        for part, run in zip(parts, rows.split([part.numel for part in parts]), strict=True):
            in_memory_order(whole)[part.start : part.stop].copy_(run)
        return whole

    def local_of(self, key: str, whole: Tensor) -> Tensor:
        """Return what this rank has of a whole weight or state."""
        if self.divided is None or key not in CUT_KEYS:
            return self.piece(whole, this_rank())
        own = self.divided.own
        flat = whole.new_empty(sum(part.numel for part in own))
        for run, of_whole in own_runs(flat, whole, own, self.param):
            run.copy_(of_whole)
        return flat

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """Return what a rank holds of a whole tensor, sharing memory."""
        if self.layout is None:
            return whole
        return whole[relative(self.layout.box_of(rank), tuple((0, size) for size in self.layout.shape))]

    def whole_second_moments(self, buffer: Tensor) -> Tensor:
        """Return NorMuon's second moments of all matrices: those of a matrix that one rank alone holds are there alone.

        All of `ranks` must call it.
        """
        if self.layout is None or self.process_group is None:
            return buffer.clone()
        everyone = all_gather_uneven(buffer, [buffer.numel()] * len(self.ranks), self.process_group)
        shape, view = self.layout.shape, self.group.view
        by_rank = {rank: second_moments(one, shape, view) for rank, one in zip(self.ranks, everyone, strict=True)}
        result = buffer.clone()
        targets = second_moments(result, shape, view)
        for (block, matrix), holders in self.holders().items():
            targets[block][matrix].copy_(by_rank[holders[0]][block][matrix])
        return result

    def holders(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Return the ranks that have a matrix' state, of matrices (block of the view, number in it) that others lack.

        Those are matrices with divided state, and those that are whole on one rank of each copy, which may step it
        without any exchange (`replicas="repeat"`, if there are several copies).
        """
        if self.divided is not None:
            parts, ranks = self.divided.parts, self.divided.ranks
            return {matrix: (ranks[part.owner],) for part in parts if part.unit for matrix in part.unit.matrices}
        return {} if self.layout is None else _holders(self.layout, self.group.view)


@lru_cache(maxsize=1024)
def _holders(layout: Layout, view: View) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Return the ranks that hold a matrix, of those matrices of which one rank of each copy alone holds anything."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    if layout.is_replicated:
        return found
    for unit in view.units(layout.shape):
        rows = zip(layout.ranks, layout.boxes, strict=True)
        holders = tuple(rank for rank, box in rows if intersection(box, unit.box) is not None)
        if len(holders) == layout.num_copies:
            found |= dict.fromkeys(unit.matrices, holders)
    return found


def parameters_of(current: Current) -> Iterator[Parameter]:
    """Yield the parameters that this rank has a part in, by group. All ranks that share parameters must call it."""
    return _connected(current, list(map(layouts_of, current.groups)))


def _connected(current: Current, layouts: Sequence[Sequence[Layout | None]]) -> Iterator[Parameter]:
    """Connect the ranks of these layouts, and yield the parameters that this rank has a part in."""
    divided, early = divided_parameters(current.groups), current.early.fresh()
    current.communicators.connect(current.groups, layouts)
    for group, found in zip(current.groups, layouts, strict=True):
        for name, param, layout in zip(group.param_names, group.params, found, strict=True):
            if layout is None:
                yield Parameter(name, param, group, None, None)
            elif this_rank() in layout.ranks:
                process_group = current.communicators[tuple(sorted(layout.ranks))]
                average = early.get(group.number)
                yield Parameter(name, param, group, layout, process_group, divided.get(param), average)


def whole_states(current: Current, states: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state that ranks divide, whole, and give every rank NorMuon's second moments of all matrices.

    Matrices that are whole on one rank of each copy (experts, heads) may be stepped without any exchange, so that only
    these ranks know their second moments; they are changed in place where no state is divided. All ranks that share
    parameters with such state must call it; without any, nothing is communicated. Temporary memory: that of one
    parameter's state, besides the result.
    """
    layouts = [
        [layout if layout is not None and _has_state_apart(group, layout) else None for layout in layouts_of(group)]
        for group in current.groups
    ]
    found: dict[Tensor, dict[str, Tensor]] = {}
    if not any(layout for of_group in layouts for layout in of_group):
        return found
    # In one order everywhere: ranks of several process groups wait for each other.
    for one in sorted(_connected(current, layouts), key=lambda one: one.ranks):
        if one.layout is None:
            continue
        state = states[one.param]
        if one.divided is None:
            moments = state["second_momentum_buffer"]
            moments.copy_(one.whole_second_moments(moments))
            continue
        found[one.param] = whole = dict(state)
        for key in CUT_KEYS:
            if key in state:  # in the host's memory, where the state is there
                whole[key] = one.whole_of(key, state[key].to(one.param.device)).to(state[key].device)
        if "second_momentum_buffer" in state:
            whole["second_momentum_buffer"] = one.whole_second_moments(state["second_momentum_buffer"])
    return found


def _has_state_apart(group: Group, layout: Layout) -> bool:
    """Return whether a rank may have state of a shared parameter that others need for a whole one, and lack."""
    if group.comms in DIVIDING:
        return True
    return group.algorithm == "muon" and group.normalize is not None and bool(_holders(layout, group.view))
