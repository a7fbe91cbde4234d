"""State of `comms="sharded"`, which every rank has a part of: whose parts are which, and those of a saved whole."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from quintic.optim.comms.collectives import this_rank
from quintic.optim.comms.sharing import dividing_ranks, layouts_of
from quintic.optim.groups.options import Group
from quintic.optim.state.parts import Part, own_runs, parts_of

__all__ = ["DividedState", "Division", "divided_parameters", "part_of_saved"]


class Division(NamedTuple):
    """Which entry of a parameter is where in whose state: state that was divided otherwise means something else."""

    ranks: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    """(owner, start, stop): the position of an owner among the ranks, and its entries in the order of memory."""
    strides: tuple[int, ...]
    """Of the parameter's dimensions that have several entries: what the order of memory is."""


class DividedState(NamedTuple):
    """A parameter whose state is divided."""

    name: str
    group: Group
    parts: Sequence[Part]
    ranks: tuple[int, ...]

    @property
    def own(self) -> list[Part]:
        """Return the parts of this rank."""
        position = self.ranks.index(this_rank())
        return [part for part in self.parts if part.owner == position]

    def division(self, param: Tensor) -> Division:
        """How its state is divided, whatever parts the entries of one owner come in."""
        runs: list[tuple[int, int, int]] = []
        for part in self.parts:
            start = part.start
            if runs and runs[-1][0] == part.owner and runs[-1][2] == start:
                _, start, _ = runs.pop()
            runs.append((part.owner, start, part.stop))
        strides = tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
        return Division(self.ranks, tuple(runs), strides)


def divided_parameters(groups: Sequence[Group]) -> dict[Tensor, DividedState]:
    """Return the parameters whose state is divided among ranks."""
    found: dict[Tensor, DividedState] = {}
    for group in groups:
        ranks = dividing_ranks(group, layouts_of(group))
        if ranks:
            rows = zip(group.params, group.param_names, parts_of(group, ranks), strict=True)
            found |= {param: DividedState(name, group, parts, ranks) for param, name, parts in rows}
    return found


def part_of_saved(
    what: str, param: Tensor, divided: DividedState, target: Tensor, source: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what of this rank's flat state becomes what of a saved whole tensor; an error if its shape is another."""
    if source.shape != param.shape:
        raise ValueError(f"{what} has shape {tuple(source.shape)}, this optimizer needs {tuple(param.shape)}")
    yield from own_runs(target, source, divided.own, param)
