"""Reads the optimizer state of other libraries into Quintic's names and meaning; `interchange.py` copies it.

With gradient g, momentum coefficient mu and Quintic's moving average, m <- m + (1 - mu)(g - m):

| source               | momentum                         | mean squares of neurons    | AdamW                   |
|----------------------|----------------------------------|----------------------------|-------------------------|
| `torch`              | `momentum_buffer` = m            | none                       | `exp_avg`, `exp_avg_sq` |
| `keller_jordan`      | `momentum_buffer` = m            | none                       | as torch or as in 2024  |
| `keller_jordan_2024` | `momentum_buffer`, M <- mu M + g | none                       | `moment1`, `moment2`    |
| `dion`               | `momentum`, M <- mu M + g        | `variance_neuron`, of rows | `momentum`, `variance`  |
| `nanochat`           | `momentum_buffer` = m            | `second_momentum_buffer`   | `exp_avg`, `exp_avg_sq` |

nanochat stacks the matrices of a group, (matrices, m, n), in the state of the group's first parameter, and shards the
stack over ranks. A sum M is m / (1 - mu). All libraries keep moving averages of element-wise moments and of the mean
squares of neurons, so these are copied unchanged.

A reader takes one saved group, its parameters and the state dicts of all ranks, and yields a `SavedState` for each
parameter that has a name.

Sources: torch 2.13, torch/optim/_muon.py; KellerJordan/Muon 857d1ad, for 2024 28c793b; microsoft/dion 0a059a4,
dion/muon.py, normuon.py, megabatch_base.py; karpathy/nanochat 92d63d4, nanochat/optim.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quintic.optim.rules.rule import Algorithm
from quintic.optim.rules.table import orthogonalizes

__all__ = ["PER_RANK", "READERS", "STATE_KEYS", "SavedParameter", "SavedState", "Source"]

Source = Literal["torch", "keller_jordan", "keller_jordan_2024", "dion", "nanochat"]
State = Mapping[str, Any]

STATE_KEYS: dict[Algorithm, set[str]] = {"muon": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""The state that PyTorch's optimizers keep for a parameter of each algorithm; Quintic uses the same names."""

# nanochat's state for matrices; before January 2026 second moments were optional.
_NANOCHAT_KEYS = ("momentum_buffer", "second_momentum_buffer")

# Entries of a parameter's state that hold no state, and other names for PyTorch's.
_LABELS = ("use_muon", "algorithm")
_SYNONYMS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


class SavedParameter(NamedTuple):
    """One parameter of a saved group."""

    key: object
    """Its key in the saved state."""
    name: str | None
    """Its name in the optimizer; None for a parameter to leave out."""
    shape: torch.Size | None
    """The shape of the optimizer's parameter; None for a parameter to leave out."""


class SavedState(NamedTuple):
    """The saved state of one parameter, under Quintic's names."""

    name: str
    algorithm: Algorithm
    values: Mapping[str, Any]
    """By name. Second moments of neurons broadcast to the parameter, with size 1 in the dimensions averaged over."""
    momentum_factor: float = 1.0
    """The factor that turns the saved momentum into a moving average."""


# The arguments of readers: the parameters of one saved group, and the saved states.
Members = Sequence[SavedParameter]
Ranks = Sequence[Mapping[Any, State]]
"""The saved state of each rank, by key."""


def _read_torch(group: State, members: Members, ranks: Ranks) -> Iterator[SavedState]:
    # One state dict; a parameter that was never stepped has no state.
    for member in members:
        state = _plain(ranks[0].get(member.key))
        if member.name is not None and state:
            yield SavedState(member.name, _algorithm(member.name, state), state)


def _read_keller_jordan(group: State, members: Members, ranks: Ranks) -> Iterator[SavedState]:
    # Each parameter's state is in the state dict of the rank that owns it.
    for member in members:
        if member.name is not None:
            state = _of_some_rank(member, ranks)
            yield SavedState(member.name, _algorithm(member.name, state), state)


def _read_keller_jordan_2024(group: State, members: Members, ranks: Ranks) -> Iterator[SavedState]:
    # The momentum is a sum, not an average.
    for saved in _read_keller_jordan(group, members, ranks):
        if orthogonalizes(saved.algorithm):
            saved = saved._replace(momentum_factor=_factor_of_sum(saved.name, group, "momentum"))
        yield saved


def _read_dion(group: State, members: Members, ranks: Ranks) -> Iterator[SavedState]:
    algorithm = group.get("algorithm")
    for member in members:
        name, state = member.name, ranks[0].get(member.key)
        if name is None or not state:
            continue
        # Its AdamW keeps what PyTorch's does, under other names.
        if algorithm == "adamw":
            # Older versions of dion count steps in the group, newer ones for each parameter.
            state = {"step_dev": group["step"], **state} if "step" in group else state
            _need(name, state, "momentum", "variance", "step_dev")
            values = {"exp_avg": state["momentum"], "exp_avg_sq": state["variance"], "step": state["step_dev"]}
            yield SavedState(name, "adamw", values)
        # Its Muon and NorMuon sum gradients.
        elif algorithm in ("muon", "normuon"):
            _need(name, state, "momentum")
            values = {"momentum_buffer": state["momentum"]}
            if algorithm == "normuon":
                _need(name, state, "variance_neuron")
                values["second_momentum_buffer"] = _without_split_scales(state["variance_neuron"], member.shape, group)
            yield SavedState(name, "muon", values, _factor_of_sum(name, group, "mu"))
        else:
            raise ValueError(
                f"{name}: saved by dion with algorithm={algorithm!r}, whose state Quintic cannot use (it reads "
                f"'muon', 'normuon' and 'adamw'); give names with None in its place to leave it out"
            )


def _read_nanochat(group: State, members: Members, ranks: Ranks) -> Iterator[SavedState]:
    ndim = next((len(member.shape) for member in members if member.shape is not None), None)
    if ndim is None:  # no parameter of this group is wanted
        return
    # A stack has one dimension more than the parameters.
    states = [_plain(rank.get(members[0].key)) for rank in ranks]
    if "momentum_buffer" in states[0] and states[0]["momentum_buffer"].ndim == ndim + 1:
        yield from _unstacked(members, states)
        return
    # Otherwise every parameter has state of its own.
    for member in members:
        if member.name is None:
            continue
        state = _of_some_rank(member, ranks)
        # Before January 2026 each matrix had its own state.
        if "momentum_buffer" in state:
            yield SavedState(member.name, "muon", {key: state[key] for key in _nanochat_keys(member.name, state)})
            continue
        # AdamW's moments may be sharded along the first dimension.
        if "exp_avg" in state and state["exp_avg"].shape != member.shape:
            pieces = [_plain(rank.get(member.key)) for rank in ranks]
            state = _joined(member.name, pieces, ("exp_avg", "exp_avg_sq"))
        yield SavedState(member.name, _algorithm(member.name, state), state)


READERS: dict[Source, Callable[[State, Members, Ranks], Iterator[SavedState]]] = {
    "torch": _read_torch,
    "keller_jordan": _read_keller_jordan,
    "keller_jordan_2024": _read_keller_jordan_2024,
    "dion": _read_dion,
    "nanochat": _read_nanochat,
}
"""Readers by library: they yield the state of a group's named parameters; a ValueError names one they cannot read."""

PER_RANK: tuple[Source, ...] = ("keller_jordan", "keller_jordan_2024", "nanochat")
"""Libraries with which each rank saves the state of the parameters that it owns."""


def _plain(state: State | None) -> dict[str, Any]:
    """Return a parameter's saved state under PyTorch's names, without labels."""
    return {_SYNONYMS.get(key, key): value for key, value in (state or {}).items() if key not in _LABELS}


def _of_some_rank(member: SavedParameter, ranks: Ranks) -> dict[str, Any]:
    """Return a parameter's state from the first rank that has it; a ValueError if no rank has."""
    for rank in ranks:
        state = _plain(rank.get(member.key))
        if state:
            return state
    raise ValueError(
        f"{member.name}: no state was saved for it; each rank saves the parameters it owns, so pass the state dicts of "
        f"all ranks, in their order; give names with None in its place to leave it out"
    )


def _algorithm(name: str, state: State) -> Algorithm:
    """Return the algorithm whose state has exactly these names."""
    for algorithm, wanted in STATE_KEYS.items():
        if set(state) == wanted:
            return algorithm
    raise ValueError(
        f"{name}: its state {sorted(state)} is neither Muon's {sorted(STATE_KEYS['muon'])} "
        f"nor AdamW's {sorted(STATE_KEYS['adamw'])}; was it saved by another source?"
    )


def _need(name: str, state: State, *keys: str) -> None:
    for key in keys:
        if key not in state:
            raise ValueError(f"{name}: its state {sorted(state)} has no {key!r}; was it saved by another source?")


def _factor_of_sum(name: str, group: State, key: str) -> float:
    """Return 1 - mu of a saved group, the factor that turns the sum M <- mu M + g into a moving average."""
    if key not in group or not 0 <= float(group[key]) < 1:
        raise ValueError(
            f"{name}: its momentum is a sum of gradients, and to average them the saved group must have {key!r} in "
            f"[0, 1), it has {group.get(key)!r}; was it saved by another source?"
        )
    return 1 - float(group[key])


def _without_split_scales(second_moment: Tensor, shape: torch.Size | None, group: State) -> Tensor:
    """Return dion's mean squares of neurons, (..., rows, 1), as they are for updates of unit spectral norm.

    With `split_sizes`, dion multiplies the update of each block of rows by the quotient of its learning-rate scale and
    the scale of all rows, before it takes mean squares. This divides by the square of the quotient.
    """
    sizes, adjust = group.get("split_sizes"), group.get("adjust_lr")
    if sizes is None or adjust is None or shape is None:  # one block, or no scale
        return second_moment
    rows, columns = shape[-2:]
    # One squared quotient per block of rows, (blocks,), repeated over its rows, (rows, 1).
    if adjust == "spectral_norm":
        squared_scales = [size / rows for size in sizes]
    else:
        squared_scales = [max(size, columns) / max(rows, columns) for size in sizes]
    scale = torch.tensor(squared_scales, dtype=second_moment.dtype, device=second_moment.device)
    return second_moment / scale.repeat_interleave(torch.tensor(sizes, device=scale.device)).unsqueeze(-1)


def _unstacked(members: Members, states: Sequence[State]) -> Iterator[SavedState]:
    """Yield the state of each matrix of a group from its stack, (matrices, m, n).

    Each rank has an equal chunk of the stack; the last chunks are padded.
    """
    first = next(member.name for member in members if member.name is not None)
    keys = _nanochat_keys(first, states[0])
    # The whole stack, (per_rank * ranks, m, n); its first entries are the group's parameters in order.
    stacks = _joined(first, states, keys)
    per_rank = -(-len(members) // len(states))
    for key in keys:
        if len(stacks[key]) != per_rank * len(states):
            raise ValueError(
                f"{first}: {len(states)} state dicts hold {len(stacks[key])} matrices of {key} for the {len(members)} "
                f"parameters of its group; pass the state dicts of all ranks, in their order"
            )
    for number, member in enumerate(members):
        if member.name is not None:
            yield SavedState(member.name, "muon", {key: stacks[key][number] for key in keys})


def _nanochat_keys(name: str, state: State) -> list[str]:
    """Return the names of a matrix's state; a ValueError if nanochat does not use one of them."""
    unknown = sorted(state.keys() - set(_NANOCHAT_KEYS))
    if unknown:
        raise ValueError(
            f"{name}: its state has {unknown}, which nanochat does not keep; was it saved by another source?"
        )
    return [key for key in _NANOCHAT_KEYS if key in state]


def _joined(name: str, states: Sequence[State], keys: Sequence[str]) -> dict[str, Any]:
    """Return the first rank's state, with the tensors of `keys` concatenated over ranks along dimension 0."""
    joined = dict(states[0])
    for key in keys:
        pieces = [state[key] for state in states if key in state]
        # Chunks are equal, so other shapes mean that state dicts of several optimizers were mixed.
        if len(pieces) < len(states) or any(piece.shape != pieces[0].shape for piece in pieces):
            raise ValueError(
                f"{name}: the pieces of {key} that the ranks saved do not fit together, their shapes are "
                f"{[tuple(piece.shape) for piece in pieces]}; pass the state dicts of all ranks, in their order"
            )
        joined[key] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return joined
