"""Which ranks decide together: those that share a parameter, directly or through parameters shared with other ranks.

A bad gradient that stops the step of one rank must stop it on every rank that shares a parameter with this rank, since
copies and pieces of the parameter would drift apart otherwise; and therefore on those that share one with these. The
same holds for the norm by which gradients are clipped. Ranks without such a connection, like the stages of a pipeline,
neither hear of each other nor wait for each other, unless the user binds them together (`process_group`).

A rank knows only the process groups that it is in itself. So before the first step ranks tell each other of theirs,
until all connected ranks know the whole picture.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_agree_, all_gather_values, start_all_max, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.comms.sharing import user_linked_ranks
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import Layout, local_tensor
from quintic.optim.rules.device import host_tensor, upload

__all__ = ["Connected", "RankInfo", "gather_rank_info", "local_rank_info", "num_rounds"]

Ranks: TypeAlias = tuple[int, ...]


class RankInfo(NamedTuple):
    """The facts that a rank tells the ranks that it is connected with."""

    sets: tuple[Ranks, ...]
    """The sets of ranks that share parameters with it, or that its user binds together, in ascending order."""
    guards_nonfinite: bool
    """Whether a group of its acts on gradients that are not finite."""
    raises: bool
    """Whether such a group raises."""
    devices: tuple[str, ...]
    """Types of the devices of its parameters."""
    has_own: bool
    """Whether it has parameters that it shares with no other rank."""
    names: str
    """Digest of the names of its parameters."""
    problem: str | None
    """Why it cannot make a step."""


def local_rank_info(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]], problem: str | None = None
) -> RankInfo:
    """Return this rank's facts about its parameter groups, with the problem that prevents a step, if any."""
    of_params = [layout for of_group in layouts for layout in of_group]
    sharing = {tuple(sorted(layout.ranks)) for layout in of_params if layout and this_rank() in layout.ranks}
    bound = {user_linked_ranks(group) for group in groups} - {()}
    policies = [group.on_nonfinite for group in groups if group.on_nonfinite != "propagate" and group.params]
    return RankInfo(
        sets=tuple(sorted(sharing | bound)),
        guards_nonfinite=bool(policies),
        raises="raise" in policies,
        devices=tuple(_devices(groups)),
        has_own=None in of_params,
        names=hashlib.sha256("\n".join(_names(groups)).encode()).hexdigest(),
        problem=problem,
    )


def gather_rank_info(own: RankInfo, communicators: Communicators) -> dict[int, RankInfo]:
    """Return the facts of all ranks that this rank is connected with, itself included. All of them must call it."""
    known = {this_rank(): own}
    rounds, is_over = 0, not own.sets
    while not is_over:
        # In one order everywhere, so that ranks never wait for each other in a circle.
        for ranks in own.sets:
            for info in all_gather_values(known, communicators[ranks]):
                known |= info
            known = _interned(known)
        rounds += 1
        sets_of = {rank: info.sets for rank, info in known.items()}
        is_closed = all(rank in known for sets in sets_of.values() for ranks in sets for rank in ranks)
        # A rank may know everything earlier than others, and still has to tell them.
        is_over = is_closed and rounds == num_rounds(sets_of)
    return known


def num_rounds(sets_of: Mapping[int, Sequence[Ranks]]) -> int:
    """Return after how many rounds of `gather_rank_info` every rank knows the facts of all.

    The sets of ranks are those of all connected ranks.
    """
    knows = {rank: {rank} for rank in sets_of}
    in_order = sorted({ranks for sets in sets_of.values() for ranks in sets})
    rounds = 0
    while any(len(ranks) < len(sets_of) for ranks in knows.values()):
        for ranks in in_order:
            together: set[int] = set().union(*(knows[rank] for rank in ranks))
            knows |= dict.fromkeys(ranks, together)
        rounds += 1
    return rounds


class Connected:
    """The ranks that this rank decides with, by the facts of all of them; these are the same on all."""

    def __init__(self, infos: Mapping[int, RankInfo], groups: Sequence[Group], communicators: Communicators) -> None:
        self._groups, self._communicators = groups, communicators
        self.ranks = tuple(sorted(infos))
        """Global ranks, in ascending order."""
        self.is_single_rank = len(infos) == 1
        """Whether this rank decides by itself."""
        self.guards_nonfinite = any(info.guards_nonfinite for info in infos.values())
        """Whether any of them acts on gradients that are not finite."""
        self.may_raise = any(info.raises for info in infos.values())
        """Whether any of them raises in that case: then all of them do."""
        self._all_share_all = all(info.sets == (self.ranks,) and not info.has_own for info in infos.values())
        self._have_equal_names = len({info.names for info in infos.values()}) == 1
        self._slots: dict[str, int] | None = None
        own, shared = _devices(groups), set.intersection(*(set(info.devices) for info in infos.values()))
        # Of devices of several types, one that all ranks have; an accelerator, for which the host need not wait.
        kind = min(shared, key=lambda name: (name == "cpu", name), default="cpu")
        self.device = own.get(kind, torch.device("cpu"))
        """On which they communicate."""

    def connect(self) -> None:
        """Make the process group of these ranks, if steps need it. All of them must call it."""
        if self.guards_nonfinite and not self.is_single_rank:
            self._process_group()

    def all_agree_(self, flags: Tensor) -> None:
        """Replace int32 flags on `device` by the smallest of all ranks', in place. All of them must call it."""
        if not self.is_single_rank:
            all_agree_(flags, self._process_group())

    def all_gather(self, value: str | None) -> dict[int, str | None]:
        """Return the value of each rank, by rank; waits. All of them must call it."""
        if self.is_single_rank:
            return {this_rank(): value}
        return dict(zip(self.ranks, all_gather_values(value, self._process_group()), strict=True))

    def total(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the sum over all parameters of all ranks, each parameter counted once. All of them must call it.

        Values are (names of this rank's parameters,), at least 0, or NaN; the sum, (), has the same bits on all ranks.
        Where several ranks have a parameter of one name, the largest value counts. Those that share it have equal
        values. Of others nothing says whether they have copies.
        """
        if self.is_single_rank or self._all_share_all:
            return values.sum()
        slots = self._slots_of_names()
        here = values.to(self.device)
        by_name = here.new_zeros(len(slots) + 1)
        by_name.index_add_(0, upload(host_tensor([slots[name] for name in names], torch.int64), self.device), here)
        # What the largest of NaN and a number is, differs between libraries.
        by_name[-1] = by_name.isnan().any()
        largest = start_all_max(by_name.nan_to_num(0.0, math.inf), self._process_group()).wait()
        total = largest[:-1].sum()
        return torch.where(largest[-1] > 0, math.nan, total).to(values.device)

    def _slots_of_names(self) -> dict[str, int]:
        """Return the place of each parameter in a vector of all; the first time all ranks must call it."""
        if self._slots is None:
            names = _names(self._groups)
            if not self._have_equal_names:
                names = sorted({*names}.union(*all_gather_values(names, self._process_group())))
            self._slots = {name: number for number, name in enumerate(names)}
        return self._slots

    def _process_group(self) -> ProcessGroup:
        return self._communicators.spanning(self.ranks, self.device)


def _names(groups: Sequence[Group]) -> list[str]:
    return sorted({str(name) for group in groups for name in group.param_names})


def _devices(groups: Sequence[Group]) -> dict[str, torch.device]:
    """Return the first device of each type, by type, in alphabetical order."""
    by_type: dict[str, torch.device] = {}
    for group in groups:
        for param in group.params:
            device = local_tensor(param).device
            by_type.setdefault(device.type, device)
    return dict(sorted(by_type.items()))


def _interned(known: Mapping[int, RankInfo]) -> dict[int, RankInfo]:
    """Return the facts with one object for equal sets of ranks, so that pickle writes each set once."""
    distinct: dict[Ranks, Ranks] = {}
    return {
        rank: info._replace(sets=tuple(distinct.setdefault(ranks, ranks) for ranks in info.sets))
        for rank, info in known.items()
    }
