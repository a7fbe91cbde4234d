"""Connected ranks: ranks that share parameters, directly or through other ranks; they skip steps and clip as one.

A non-finite gradient that stops the step of one rank must stop it on every rank that shares a parameter with this rank,
since copies and pieces of the parameter would drift apart otherwise; and so on, to all ranks connected with these.
The same holds for the norm by which gradients are clipped. Ranks without such a connection, like the stages of a
pipeline, exchange nothing, unless the user links them (`process_group`).

A rank knows only the process groups that it is in itself. So before the first step the ranks of every group exchange
all they know, round after round, until every rank knows the facts of all connected ranks:

    ranks 0 and 1 share A, 1 and 2 share B    round 1: 0 and 1 know {0, 1}, then 1 and 2 know {0, 1, 2}
                                              round 2: 0 knows {0, 1, 2}, too
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
    """The facts about one rank that all ranks connected with it must know."""

    sets: tuple[Ranks, ...]
    """The sets of ranks that it shares parameters with, or that its user links, in ascending order."""
    guards_nonfinite: bool
    """Whether `on_nonfinite` of one of its groups is "skip" or "raise"."""
    raises: bool
    """Whether `on_nonfinite` of one of its groups is "raise"."""
    devices: tuple[str, ...]
    """Device types of its parameters."""
    has_own: bool
    """Whether it has parameters that it shares with no other rank."""
    names: str
    """Digest of the names of its parameters."""
    problem: str | None
    """Why it cannot step, as an error message; None if it can."""


def local_rank_info(
    groups: Sequence[Group], layouts: Sequence[Sequence[Layout | None]], problem: str | None = None
) -> RankInfo:
    """Return the facts about this rank, with the problem that prevents its step, if any; nothing is communicated."""
    of_params = [layout for of_group in layouts for layout in of_group]  # None for a parameter of this rank only
    sharing = {tuple(sorted(layout.ranks)) for layout in of_params if layout and this_rank() in layout.ranks}
    # Ranks that the user links although they share no parameter.
    linked = {user_linked_ranks(group) for group in groups} - {()}
    policies = [group.on_nonfinite for group in groups if group.on_nonfinite != "propagate" and group.params]
    return RankInfo(
        sets=tuple(sorted(sharing | linked)),
        guards_nonfinite=bool(policies),
        raises="raise" in policies,
        devices=tuple(_devices(groups)),
        has_own=None in of_params,
        names=hashlib.sha256("\n".join(_names(groups)).encode()).hexdigest(),
        problem=problem,
    )


def gather_rank_info(own: RankInfo, communicators: Communicators) -> dict[int, RankInfo]:
    """Return the facts about all connected ranks, by rank, this one included. All of these ranks must call it."""
    known = {this_rank(): own}
    rounds, is_over = 0, not own.sets
    while not is_over:
        # Groups in ascending order on all ranks, so that ranks cannot wait for each other in a circle.
        for ranks in own.sets:
            for info in all_gather_values(known, communicators[ranks]):
                known |= info
            known = _interned(known)
        rounds += 1
        # Complete once every rank that a known set mentions is known itself.
        sets_of = {rank: info.sets for rank, info in known.items()}
        is_closed = all(rank in known for sets in sets_of.values() for ranks in sets for rank in ranks)
        # A rank may know everything before others do, and must then go on with the rounds that they need. All ranks
        # compute the same number of rounds, from the same facts.
        is_over = is_closed and rounds == num_rounds(sets_of)
    return known


def num_rounds(sets_of: Mapping[int, Sequence[Ranks]]) -> int:
    """Return how many rounds of `gather_rank_info` it takes until every rank knows the facts about all others.

    `sets_of` has the sets of every connected rank. The rounds are simulated here, without messages.
    """
    knows = {rank: {rank} for rank in sets_of}
    in_order = sorted({ranks for sets in sets_of.values() for ranks in sets})
    rounds = 0
    while any(len(ranks) < len(sets_of) for ranks in knows.values()):
        # One round: every set of ranks, in order, learns everything that any of its ranks knew.
        for ranks in in_order:
            together: set[int] = set().union(*(knows[rank] for rank in ranks))
            knows |= dict.fromkeys(ranks, together)
        rounds += 1
    return rounds


class Connected:
    """The ranks that this rank skips steps and clips with, and what all of them know; equal on all of them."""

    def __init__(self, infos: Mapping[int, RankInfo], groups: Sequence[Group], communicators: Communicators) -> None:
        self._groups, self._communicators = groups, communicators
        # Global ranks, in ascending order.
        self.ranks = tuple(sorted(infos))
        # Whether this rank is connected with no other.
        self.is_single_rank = len(infos) == 1
        # Whether a non-finite gradient on any of them skips the step, or raises.
        self.guards_nonfinite = any(info.guards_nonfinite for info in infos.values())
        # Whether it raises on any of them: then it raises on all.
        self.may_raise = any(info.raises for info in infos.values())
        # Whether every parameter is on all of them, so that their numbers are equal anyway.
        self._all_share_all = all(info.sets == (self.ranks,) and not info.has_own for info in infos.values())
        self._have_equal_names = len({info.names for info in infos.values()}) == 1
        self._slots: dict[str, int] | None = None
        own, shared = _devices(groups), set.intersection(*(set(info.devices) for info in infos.values()))
        # They communicate on a type of device that all of them have; preferably not the CPU, where the host would wait.
        kind = min(shared, key=lambda name: (name == "cpu", name), default="cpu")
        self.device = own.get(kind, torch.device("cpu"))

    def connect(self) -> None:
        """Make the process group of the connected ranks now if steps will need it. All of them must call it."""
        if self.guards_nonfinite and not self.is_single_rank:
            self._process_group()

    def all_agree_(self, flags: Tensor) -> None:
        """Replace each int32 flag on `device` by the smallest of all connected ranks. All of them must call it."""
        if not self.is_single_rank:
            all_agree_(flags, self._process_group())

    def all_gather(self, value: str | None) -> dict[int, str | None]:
        """Return the values of all connected ranks, by rank; waits. All of them must call it."""
        if self.is_single_rank:
            return {this_rank(): value}
        return dict(zip(self.ranks, all_gather_values(value, self._process_group()), strict=True))

    def total(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the () sum over all parameters of all connected ranks, each name counted once. All must call it.

        Args:
            names: n names of this rank's parameters.
            values: (n,), one for each name: at least 0, or NaN, which makes the sum NaN.

        The sum has the same bits on all ranks. Where several ranks have a parameter of one name, the largest value
        counts: ranks that share the parameter have equal values, and of others it is unknown whether they are copies.
        """
        if self.is_single_rank or self._all_share_all:
            return values.sum()
        # One slot for each name on any rank, and a last one that is 1 if a value is NaN: (slots + 1,).
        slots = self._slots_of_names()
        here = values.to(self.device)
        by_name = here.new_zeros(len(slots) + 1)
        by_name.index_add_(0, upload(host_tensor([slots[name] for name in names], torch.int64), self.device), here)
        # NaN goes to the last slot, because libraries differ in the maximum of NaN and a number.
        by_name[-1] = by_name.isnan().any()
        largest = start_all_max(by_name.nan_to_num(0.0, math.inf), self._process_group()).wait()
        total = largest[:-1].sum()
        return torch.where(largest[-1] > 0, math.nan, total).to(values.device)

    def _slots_of_names(self) -> dict[str, int]:
        """Return the index of each parameter name in a vector of all ranks' names; all must call it the first time."""
        if self._slots is None:
            names = _names(self._groups)
            # Exchange names only if they differ; sorted, so that all ranks number them alike.
            if not self._have_equal_names:
                names = sorted({*names}.union(*all_gather_values(names, self._process_group())))
            self._slots = {name: number for number, name in enumerate(names)}
        return self._slots

    def _process_group(self) -> ProcessGroup:
        # Made at the first use, which therefore must be the same on all ranks.
        return self._communicators.spanning(self.ranks, self.device)


def _names(groups: Sequence[Group]) -> list[str]:
    return sorted({str(name) for group in groups for name in group.param_names})


def _devices(groups: Sequence[Group]) -> dict[str, torch.device]:
    """Return the first device of each type that holds a parameter, by type, in alphabetical order."""
    by_type: dict[str, torch.device] = {}
    for group in groups:
        for param in group.params:
            device = local_tensor(param).device
            by_type.setdefault(device.type, device)
    return dict(sorted(by_type.items()))


def _interned(known: Mapping[int, RankInfo]) -> dict[int, RankInfo]:
    """Return the facts with equal sets of ranks made one object, which pickle then writes once."""
    distinct: dict[Ranks, Ranks] = {}
    return {
        rank: info._replace(sets=tuple(distinct.setdefault(ranks, ranks) for ranks in info.sets))
        for rank, info in known.items()
    }
