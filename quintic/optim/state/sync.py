"""Keeps state in sync with an optimizer's parameters, which may be replaced, moved, converted or sharded at any time.

Models are moved, converted and sharded after the optimizer was made, and training libraries put other tensors into
`group["params"]`. The optimizer is not told. So `ParamFingerprint` checks at every step whether parameters are the same
objects with the same memory and dtype, which takes about ten microseconds for a hundred parameters. Only if this has
changed does it compare their other properties.

`StateSync` makes state when it is first needed (by a step, a save or a load), and adapts it when it is needed again:

1. State follows its parameter. If a parameter was replaced by a new tensor and is in no group any more, its state moves
   to the tensor at the same position of the group, if that has the same name.
2. State stays if it fits its parameter as it is. State at its defaults (zeros, and masters equal to their weights) is
   made anew, and so are numbers of matrices (`UpdateRule.vector_state`) if the
   view has changed, because it decides which matrices there are.
3. Other state is copied into new state, as if it were loaded: to another device, to other strides, to a rank's piece of
   a whole tensor, or from one form of a master to another.
4. Other cases are errors: this rank lacks values that it needs, the shape differs, or the state would be sharded in
   another way than when it was last used.

Frozen parameters (`requires_grad=False`) get no state until they are unfrozen or given a gradient; parameters that are
frozen later keep theirs. Only weights of low precision have masters: after `model.float()` a master is dropped, and
after `model.bfloat16()` it is made from the current weights. Nothing is communicated.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.groups.group import Group, needs_state
from quintic.optim.layout.layouts import is_dtensor, local_tensor
from quintic.optim.numeric.precision import full_precision
from quintic.optim.rules.rule import MASTER, PARAM_SHAPED_STATE, STATE_KEYS
from quintic.optim.state.placement import check_conversion, init_state, matches_spec, state_forms
from quintic.optim.state.shards import StateShard, StateSharding, local_shard_pairs, sharded_parameters
from quintic.optim.state.state import MASTER_KEYS, as_tensor, copy_, master_key, piece_of

__all__ = ["Change", "ParamFingerprint", "StateSync"]

_dtype_of, _local_of = attrgetter("dtype"), attrgetter("_local_tensor")


class Change(Enum):
    """A change of parameters."""

    NONE = 0
    MEMORY = 1
    """Only the addresses of their memory changed."""
    PARAMETERS = 2
    """Other parameters, or their device, dtype, shape, strides or layout changed."""


class ParamFingerprint:
    """A record of the groups' parameters at the last check; it keeps these parameters alive."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._remember(groups)

    def check(self, groups: Sequence[Sequence[Tensor]]) -> Change:
        """Return the kind of change since the last check."""
        # The usual case must be quick: the same objects, addresses and dtypes.
        same = _identities(groups) == self._identities
        if same and self._memory() == self._seen:
            return Change.NONE
        # Otherwise record everything anew, and compare the properties.
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
        # This runs at every step, and `map` over C functions is several times faster than a loop.
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
# (index of a parameter's group, position of the parameter in the group).
_Place = tuple[int, int]
# (index of a group, name) -> the shardings of the parameters with this name, since several may have one name.
_Shardings = dict[tuple[int, str], list[StateSharding | None]]


class _Entry(NamedTuple):
    """A parameter, and the properties that its state depends on."""

    name: str
    param: Tensor
    group: Group
    # The dtype of the weights.
    dtype: torch.dtype
    # This rank's shards, and the sharding over all ranks, if the state is sharded.
    local: list[StateShard] | None
    sharding: StateSharding | None
    # Whether it is frozen: no state is made for it, and existing state is kept.
    is_idle: bool


class _Source(NamedTuple):
    """Existing state for a parameter: its own, or the state of the parameter that it replaces."""

    # The parameter, with its properties when the state was made.
    was: _Entry
    state: dict[str, Any]


class StateSync:
    """Makes and adapts one optimizer's state, and remembers for which parameters and options it was made."""

    def __init__(self) -> None:
        # Whether some state may be missing, or may not fit its parameter.
        self.is_stale = True
        # Whether a caller got the state dictionary, and may have put other tensors into it since.
        self.may_be_edited = False
        # The parameters that state was made for, by tensor and by place; these keep references.
        self._entries: dict[Tensor, _Entry] = {}
        self._places: dict[_Place, Tensor] = {}
        # The sharding of all state, including state of parameters that are in no group any more.
        self._shardings: _Shardings = {}
        # The sharding when state was last used. Every rank knows it, also if it owns no shard.
        self._used: _Shardings = {}
        # The state's tensors as they were made, to notice when a caller has put in others.
        self._tensors: list[object] = []

    def use(self) -> None:
        """Record that the state was stepped or loaded: on some rank at least it is no longer at its defaults."""
        self._used = self._shardings

    def is_current(self, groups: _Groups, states: _States) -> bool:
        """Return whether the state fits the parameters; `ParamFingerprint` has checked that they have not changed."""
        # Compare the state's tensors by identity with the ones that were made.
        if self.may_be_edited:
            tensors = _tensors_of(groups, states)
            self.is_stale |= len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors))
            self.may_be_edited = False
        return not self.is_stale

    # Tensors made in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def bring_up_to_date(self, groups: _Groups, states: _States) -> None:
        """Make or adapt the state of every parameter in `states`.

        If state is moved, the host waits for the device. Temporary memory is at most one parameter's state.

        Raises:
            ValueError: existing state cannot be adapted; nothing was changed.
        """
        # The parameters now, and the existing state for each of them.
        places = _entries_of(groups)
        entries = {entry.param: entry for entry in places.values()}
        sources = {entry.param: self._source(place, entry, entries, states) for place, entry in places.items()}
        # Used state must not change owners, because it is never sent to a new one. All ranks know the sharding that was
        # used, so all of them raise.
        shardings: _Shardings = {}
        for (number, _), entry in places.items():
            if not entry.is_idle or _has_state(sources[entry.param]):
                shardings.setdefault((number, entry.name), []).append(entry.sharding)
        for (number, name), current in shardings.items():
            used = self._used.get((number, name), ())
            if any(used) and used != current:
                raise _sharding_changed(name)
        # Find all values to move before changing any state, so that an error here changes nothing.
        values = {param: _values_to_move(entry, sources[param]) for param, entry in entries.items()}
        for param, entry in entries.items():
            _set_state(entry, values[param], sources[param], states)
        # Drop default state of parameters that are in no group. Used state stays, as in PyTorch, since the parameter
        # may come back. Keys that are not tensors are the user's.
        for param in states.keys() - entries.keys():
            if isinstance(param, Tensor) and _is_default_state(states[param], param.dtype):
                del states[param]
        self._entries, self._places = entries, {place: entry.param for place, entry in places.items()}
        self._shardings, self._tensors = {**self._used, **shardings}, _tensors_of(groups, states)
        self.is_stale = self.may_be_edited = False

    def drop_unused(self, states: _States) -> None:
        """Drop state at its defaults, which is made again when it is needed.

        State with other keys, which are the user's, stays. State of frozen parameters stays, too, because it would not
        be made again, and may be used on other ranks.
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
        """Return the existing state for a parameter: its own, or the state of the parameter that it replaces."""
        # A deep-copied optimizer has no recorded entry; its state already fits.
        if states.get(entry.param):
            return _Source(self._entries.get(entry.param, entry), states[entry.param])
        # Otherwise look for the parameter that was at this place before. It must have left all groups.
        before = self._places.get(place)
        if before is None or before in entries or not states.get(before):
            return None
        was = self._entries[before]
        return _Source(was, states[before]) if was.name == entry.name else None


def _entries_of(groups: _Groups) -> dict[_Place, _Entry]:
    """Return the current parameters of all groups, by place."""
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
    """Return the values of the state of all parameters, in the order of the groups."""
    tensors: list[object] = []
    for group in groups:
        for param in group.params:
            tensors += states.get(param, {}).values()
    return tensors


def _values_to_move(entry: _Entry, source: _Source | None) -> dict[str, Tensor] | None:
    """Return the values that move to a parameter's new state, by name; None if it keeps the state of its source.

    Values are this rank's pieces, or whole tensors if the new state is sharded and the old one was not.

    Raises:
        ValueError: the values cannot move; the message names the parameter.
    """
    # A frozen parameter gets no state.
    if entry.is_idle and not _has_state(source):
        return None
    # No state to move: all of it is new.
    if source is None:
        return {}
    # State that fits as it is stays. Sharding and view decide which entries and matrices it has.
    is_same_layout = source.was.sharding == entry.sharding and source.was.group.view == entry.group.view
    if is_same_layout and matches_spec(source.state, entry.param, entry.group, entry.local):
        return None
    name, param, moved = entry.name, entry.param, dict[str, Tensor]()
    forms = state_forms(param, entry.group)
    # Before anything that ranks may answer differently, such as whether a piece is empty.
    for key, (dtype, _) in forms.items():
        if key in source.state and key not in MASTER_KEYS:
            check_conversion(f"{name}: its {key}", param, as_tensor(source.state[key]).dtype, dtype)
    # State at its defaults is made anew.
    if _is_default_state(source.state, source.was.dtype):
        return moved
    vectors = {spec.name for spec in entry.group.rule.vector_state}
    for key, (_, other_shape) in forms.items():
        # A master may be made from another form; after a conversion of the weights it is made anew from these.
        other = master_key(source.state) if key in MASTER_KEYS and source.was.dtype == param.dtype else None
        was_key = other or key
        is_of_others = key in vectors and source.was.group.view != entry.group.view
        if was_key not in source.state or is_of_others:
            continue
        what, value = f"{name}: its {was_key}", as_tensor(source.state[was_key])
        # State that was sharded is flat, (entries of this rank's shards,), and fits only the same sharding.
        if key in PARAM_SHAPED_STATE and source.was.local is not None:
            if entry.sharding != source.was.sharding:
                raise _sharding_changed(name)
            moved[key] = value
            continue
        shape = tuple(param.shape) if other_shape is None else other_shape
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}, and the parameter that replaced it needs {shape}: state that "
                f"steps have used does not fit a parameter of another shape; make a new optimizer for it"
            )
        # State becomes this rank's piece of it, or stays whole for `_set_state`, which takes the shards from it.
        piece = piece_of(what, param, value) if key in PARAM_SHAPED_STATE and entry.local is None else value
        if piece is not None:
            moved[key] = piece
    return moved


def _set_state(entry: _Entry, values: dict[str, Tensor] | None, source: _Source | None, states: _States) -> None:
    """Give a parameter its state: the source's if `values` is None, otherwise new state with these values."""
    # Nothing to do: no state, or its own state that fits.
    if values is None and (source is None or source.was.param is entry.param):
        return
    # The source's state object, or new state with the values and the user's own keys.
    new = old = {} if source is None else source.state
    if values is not None:
        others = {key: value for key, value in old.items() if key not in STATE_KEYS}  # the user's
        if not values:
            old.clear()  # frees its memory before new state is allocated
        made = init_state(entry.param, entry.group, entry.local)
        was_whole = source is not None and source.was.local is None
        for key, value in values.items():
            if key in PARAM_SHAPED_STATE and entry.local is not None and was_whole:
                # Whole state becomes sharded: copy this rank's shards out of it.
                for shard, of_value in local_shard_pairs(made[key], value, entry.local, entry.param):
                    _move(key, shard, of_value)
            else:
                _move(key, local_tensor(made[key]), value)
        new = {**made, **others}
    if source is not None:
        del states[source.was.param]
    states[entry.param] = new


def _move(key: str, target: Tensor, value: Tensor) -> None:
    """Copy a value into new state, converting a master to another form."""
    # A mantissa is the lower 16 bits of an fp32 master, or the upper 8 of these; the weights in bfloat16 are the upper
    # 16. So an fp32 master becomes a mantissa by dropping other bits. For the other way, `target` has just been made
    # from the weights.
    mantissas = (torch.uint16, torch.uint8)
    if key not in MASTER_KEYS:
        copy_(target, value)
        return
    if target.dtype == torch.float32 and value.dtype in mantissas:
        value = full_precision(target.bfloat16(), value.to(target.device))
    elif target.dtype in mantissas and value.dtype != target.dtype:
        bits = value.view(torch.int32) if value.dtype == torch.float32 else value.to(torch.int32)
        # From the lower 16 bits to the place in the target.
        bits = bits << 8 if value.dtype == torch.uint8 else bits
        value = bits >> 8 if target.dtype == torch.uint8 else bits
    copy_(target, value)


def _has_state(source: _Source | None) -> bool:
    # Keys of the user do not count.
    return source is not None and not source.state.keys().isdisjoint(STATE_KEYS)


def _sharding_changed(name: str) -> ValueError:
    return ValueError(
        f"{name}: its sharded state no longer matches its group (comms, process_group, view, the group's parameters or "
        f"the memory order changed), so that ranks do not have the shards that they now own; call state_dict() on all "
        f"ranks before such a change, and load it into an optimizer made after it"
    )


def _is_default_state(state: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether all state is at its initial value: zeros, and a master equal to its weight of `dtype`."""
    return all(_is_default_value(key, local_tensor(as_tensor(state[key])), dtype) for key in state.keys() & STATE_KEYS)


def _is_default_value(key: str, value: Tensor, dtype: torch.dtype) -> bool:
    if value.is_meta or not value.numel():
        return True
    # A float32 master is new if the dtype of the weights can hold all of its bits.
    if key == MASTER:
        return dtype.itemsize >= 4 or bool((value.to(dtype) == value).all())
    if value.dtype == torch.uint16:
        value = value.view(torch.int16)
    # Other state is new if it is zero. The first row is tested first, since used state is rarely zero there.
    return not (value.ndim and bool(value[:1].any())) and not bool(value.any())
