"""Follows an optimizer's parameters: notices those that were exchanged, and keeps their state in step with them.

Models are moved, converted and sharded after the optimizer was made, and training libraries put other tensors into
`group["params"]`. None of them tells the optimizer, so `ParamFingerprint` looks in every step. That costs some ten
microseconds for a hundred parameters: whether they are the same objects, with the same memory and dtype. The rest is
compared where these differ.

`StateSync` makes state when it is first needed, and moves it along. Frozen parameters (`requires_grad=False`) get none
until they are unfrozen or given a gradient; those that are frozen later keep theirs. Between two needs of state (a
step, a save, a load) parameters may have been moved, converted or sharded, or other tensors may stand for them in
`group.params`. State follows its parameter object; where another tensor stands for one that no group has any more, it
follows the position in the group. If it does not fit there as it is,

- zeros, masters without a bit that the weight lacks, and second moments of the matrices of another view are made anew;
- state that is not at its defaults is copied into new state, as if it were loaded: to another device, into other
  strides, a rank's piece of a whole tensor, or a master in its other form;
- it is an error if this rank lacks what it needs, the shape is another one, or ranks would shard state otherwise than
  when it was used last: they do not have what is theirs then.

Nothing is communicated. A master belongs to weights of low precision: after `model.float()` there is none, and after
`model.bfloat16()` it is made of the weights that are there.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.options import Group, needs_state
from quintic.optim.layout.layouts import is_dtensor, local_tensor
from quintic.optim.rules.precision import full_precision
from quintic.optim.rules.rule import MASTER
from quintic.optim.rules.table import PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.placement import init_state, matches_spec, state_forms
from quintic.optim.state.shards import StateShard, StateSharding, local_shard_pairs, sharded_parameters
from quintic.optim.state.state import MASTER_KEYS, as_tensor, copy_, master_key, piece_of

__all__ = ["Change", "ParamFingerprint", "StateSync"]

_dtype_of, _local_of = attrgetter("dtype"), attrgetter("_local_tensor")


class Change(Enum):
    """A change of parameters."""

    NONE = 0
    MEMORY = 1
    """They have other memory of the same device, dtype, shape and strides."""
    PARAMETERS = 2
    """There are other parameters, or their device, dtype, shape, strides or layout changed."""


class ParamFingerprint:
    """Parameters of groups as they are now. Keeps references to them."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._remember(groups)

    def check(self, groups: Sequence[Sequence[Tensor]]) -> Change:
        """Return the kind of change since the last look."""
        same = _identities(groups) == self._identities
        if same and self._memory() == self._seen:
            return Change.NONE
        properties = self._properties
        self._remember(groups)
        return Change.MEMORY if same and properties == self._properties else Change.PARAMETERS

    def _remember(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._params = [param for group in groups for param in group]
        self._identities = _identities(groups)
        self._locals = list(map(local_tensor, self._params))
        self._dtensors: list[Any] = list(filter(is_dtensor, self._params))
        self._properties = list(map(_properties_of, self._params, self._locals))
        self._seen = self._memory()

    def _memory(self) -> tuple[list[int], list[int], list[Any]]:
        pieces = list(map(id, map(_local_of, self._dtensors)))
        return pieces, list(map(Tensor.data_ptr, self._locals)), list(map(_dtype_of, self._locals))


def _identities(groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    return [list(map(len, groups)), list(map(id, chain.from_iterable(groups)))]


def _properties_of(param: Tensor, local: Tensor) -> tuple[Any, ...]:
    """Return the facts about a parameter that plans, state and kernels depend on."""
    placed = (param.device_mesh, param.placements) if is_dtensor(param) else None
    return placed, param.shape, local.dtype, local.device, local.shape, local.stride()


_Groups = Sequence[Group]
_States = dict[Tensor, dict[str, Any]]
_Place = tuple[int, int]
"""Position of a parameter's group, and its own in it."""
_Shardings = dict[tuple[int, str], list[StateSharding | None]]
"""By the position of the group and the name, which several parameters might have."""


class _Entry(NamedTuple):
    """A parameter, and what its state is made for."""

    name: str
    param: Tensor
    group: Group
    dtype: torch.dtype
    """The dtype of the weights."""
    local: list[StateShard] | None
    """The parts of this rank, where ranks shard the state."""
    sharding: StateSharding | None
    """The parts of all ranks."""
    is_idle: bool
    """Whether it is frozen: no state is made for it, and state that exists is kept."""


class _Source(NamedTuple):
    """State that there is for a parameter: its own, or that of one which it stands for."""

    was: _Entry
    """The parameter and options that the state was made for."""
    state: dict[str, Any]


class StateSync:
    """The parameters and options that one optimizer's state was made for. Keeps references to the parameters."""

    def __init__(self) -> None:
        self.is_stale = True
        """Whether there may be no state, or not what is needed."""
        self.is_given = False
        """Whether a caller has been given the state, who may have put other tensors there since."""
        self._entries: dict[Tensor, _Entry] = {}
        self._places: dict[_Place, Tensor] = {}
        self._shardings: _Shardings = {}
        """The sharding of state, also that of parameters that are in no group any more."""
        self._used: _Shardings = {}
        """The sharding when state was used last: all ranks know, also those that have none of it."""
        self._tensors: list[object] = []

    def use(self) -> None:
        """Note that the state has been stepped or loaded: from now on it says something, on this rank or another."""
        self._used = self._shardings

    def is_current(self, groups: _Groups, states: _States) -> bool:
        """Return whether the state is what the parameters of the last look need."""
        if self.is_given:
            tensors = _tensors_of(groups, states)
            self.is_stale |= len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors))
            self.is_given = False
        return not self.is_stale

    # What inference mode makes could not be stepped outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def bring_up_to_date(self, groups: _Groups, states: _States) -> None:
        """Let every parameter have the state that it needs, where it needs it; a ValueError if that is impossible.

        Waits for the device where state moves. Temporary memory: that of one parameter's state.
        """
        places = _entries_of(groups)
        entries = {entry.param: entry for entry in places.values()}
        sources = {entry.param: self._source(place, entry, entries, states) for place, entry in places.items()}
        shardings: _Shardings = {}
        for (number, _), entry in places.items():
            if not entry.is_idle or _has_state(sources[entry.param]):
                shardings.setdefault((number, entry.name), []).append(entry.sharding)
        for (number, name), current in shardings.items():
            used = self._used.get((number, name), ())
            if any(used) and used != current:
                raise _sharding_changed(name)
        # All of them before the first state is changed: this may raise.
        values = {param: _values_to_move(entry, sources[param]) for param, entry in entries.items()}
        for param, entry in entries.items():
            _make(entry, values[param], sources[param], states)
        for param in states.keys() - entries.keys():
            # State that steps have used stays, as in PyTorch: the parameter may come back. Other keys are the user's.
            if isinstance(param, Tensor) and _is_default_state(states[param], param.dtype):
                del states[param]
        self._entries, self._places = entries, {place: entry.param for place, entry in places.items()}
        self._shardings, self._tensors = {**self._used, **shardings}, _tensors_of(groups, states)
        self.is_stale = self.is_given = False

    def drop_unused(self, states: _States) -> None:
        """Drop state that is at its defaults: it is made again when it is needed. Keys of the user's own stay.

        So does the state of frozen parameters, for which none is made: what is at its defaults on one rank may be in
        use on another.
        """
        for param in [key for key in states if isinstance(key, Tensor) and needs_state(key)]:
            if states[param].keys() <= STATE_KEYS and _is_default_state(states[param], param.dtype):
                del states[param]
        self._entries = {param: entry for param, entry in self._entries.items() if param in states}
        self._places = {place: param for place, param in self._places.items() if param in states}
        self._tensors, self.is_stale = [], True

    def _source(
        self, place: _Place, entry: _Entry, entries: Mapping[Tensor, _Entry], states: _States
    ) -> _Source | None:
        """Return the state that there is for a parameter: its own, or that of one which it stands for."""
        if states.get(entry.param):
            # Of a copy nothing is remembered, and nothing has changed since it was made.
            return _Source(self._entries.get(entry.param, entry), states[entry.param])
        before = self._places.get(place)
        if before is None or before in entries or not states.get(before):
            return None
        was = self._entries[before]
        return _Source(was, states[before]) if was.name == entry.name else None


def _entries_of(groups: _Groups) -> dict[_Place, _Entry]:
    """Return the parameters that are there now, by their places."""
    sharded = sharded_parameters(groups)
    entries: dict[_Place, _Entry] = {}
    for group in groups:
        for index, (name, param) in enumerate(zip(group.param_names, group.params, strict=True)):
            this = sharded.get(param)
            own, sharding = (None, None) if this is None else (this.local, this.sharding(param))
            is_idle = index in group.idle
            entries[group.number, index] = _Entry(name, param, group, param.dtype, own, sharding, is_idle)
    return entries


def _tensors_of(groups: _Groups, states: _States) -> list[object]:
    tensors: list[object] = []
    for group in groups:
        for param in group.params:
            tensors += states.get(param, {}).values()
    return tensors


def _values_to_move(entry: _Entry, source: _Source | None) -> dict[str, Tensor] | None:
    """Return the values that move to a parameter's new state, by name; None if it keeps the state of its source.

    Values are those of this rank; whole where ranks shard the new state, and did not shard the old one. If they
    cannot move, that is a ValueError that names the parameter.
    """
    if entry.is_idle and not _has_state(source):
        return None
    if source is None:
        return {}
    is_cut_alike = source.was.sharding == entry.sharding and source.was.group.view == entry.group.view
    if is_cut_alike and matches_spec(source.state, entry.param, entry.group, entry.local):
        return None
    name, param, moved = entry.name, entry.param, dict[str, Tensor]()
    if _is_default_state(source.state, source.was.dtype):
        return moved
    for key, (_, other_shape) in state_forms(param, entry.group).items():
        # The other form of a master; weights of another dtype have no part of its value any more.
        other = master_key(source.state) if key in MASTER_KEYS and source.was.dtype == param.dtype else None
        was_key = other or key
        is_of_others = key == _neuron_key(entry.group) and source.was.group.view != entry.group.view
        if was_key not in source.state or is_of_others:
            continue
        what, value = f"{name}: its {was_key}", as_tensor(source.state[was_key])
        if key in PARAM_SHAPED_STATE and source.was.local is not None:
            if entry.sharding != source.was.sharding:
                raise _sharding_changed(name)
            moved[key] = value
            continue
        shape = tuple(param.shape) if other_shape is None else other_shape
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}, and the parameter that is there now needs {shape}: state that "
                f"steps have used does not fit a parameter of another shape; make a new optimizer for it"
            )
        piece = piece_of(what, param, value) if key in PARAM_SHAPED_STATE and entry.local is None else value
        if piece is not None:
            moved[key] = piece
    return moved


def _neuron_key(group: Group) -> str | None:
    return None if group.rule.neuron_state is None else group.rule.neuron_state.name


def _make(entry: _Entry, values: dict[str, Tensor] | None, source: _Source | None, states: _States) -> None:
    """Give a parameter its state: the source's, or new state with these values."""
    if values is None and (source is None or source.was.param is entry.param):
        return
    new = old = {} if source is None else source.state
    if values is not None:
        others = {key: value for key, value in old.items() if key not in STATE_KEYS}  # the user's
        if not values:
            old.clear()  # before there is new state
        made = init_state(entry.param, entry.group, entry.local)
        was_whole = source is not None and source.was.local is None
        for key, value in values.items():
            if key in PARAM_SHAPED_STATE and entry.local is not None and was_whole:
                for run, of_value in local_shard_pairs(made[key], value, entry.local, entry.param):
                    _move(run, of_value)
            else:
                _move(local_tensor(made[key]), value)
        new = {**made, **others}
    if source is not None:
        del states[source.was.param]
    states[entry.param] = new


def _move(target: Tensor, value: Tensor) -> None:
    """Copy a value into new state. A master may come in its other form; a float32 one has been made of the weights."""
    if target.dtype == torch.uint16 and value.dtype == torch.float32:
        value = value.view(torch.int32)
    elif target.dtype == torch.float32 and value.dtype == torch.uint16:
        value = full_precision(target.bfloat16(), value.to(target.device))
    copy_(target, value)


def _has_state(source: _Source | None) -> bool:
    return source is not None and not source.state.keys().isdisjoint(STATE_KEYS)


def _sharding_changed(name: str) -> ValueError:
    return ValueError(
        f"{name}: its state was sharded among ranks for another comms, process_group or view, other parameters in its "
        f"group, or another order of its memory, and is not where the next step needs it; call state_dict() on all "
        f"ranks before such a change, and load it into an optimizer made after it"
    )


def _is_default_state(state: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether state is as if it were new: of a master whatever the weight of `dtype` does not show, zeros."""
    return all(_is_new(key, local_tensor(as_tensor(state[key])), dtype) for key in state.keys() & STATE_KEYS)


def _is_new(key: str, value: Tensor, dtype: torch.dtype) -> bool:
    if value.is_meta or not value.numel():
        return True
    if key == MASTER:
        return dtype.itemsize >= 4 or bool((value.to(dtype) == value).all())
    if value.dtype == torch.uint16:
        value = value.view(torch.int16)
    # A look at the first entries often settles it.
    return not (value.ndim and bool(value[:1].any())) and not bool(value.any())
