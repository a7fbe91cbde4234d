"""Imports optimizer state from PyTorch, KellerJordan/Muon, dion and nanochat.

Phases of an import:
    name     each saved parameter gets a name of the optimizer: given, saved, or by order
    read     names and meaning of the state become Quintic's (`saved_formats.py`)
    check    algorithm, shapes and placements against the existing state; nothing has changed up to here
    copy     into the existing state, rounded once to its dtype
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from quintic.interchange.saved_formats import (
    PER_RANK,
    READERS,
    STATE_KEYS,
    SavedParameter,
    SavedState,
    Source,
)
from quintic.optim.groups.names import resolve_name
from quintic.optim.layout.views import Flatten, View
from quintic.optim.muon import Muon, muon_in
from quintic.optim.rules.library.normuon import NEURON_MOMENT
from quintic.optim.rules.rule import MOMENTUM, PARAM_SHAPED_STATE
from quintic.optim.state.placement import check_conversion
from quintic.optim.state.shards import ShardedState, shard_of_saved, sharded_parameters
from quintic.optim.state.state import copy_, saved_tensor, separate_sources

__all__ = ["SecondMoments", "Source", "import_state", "import_torch_state"]

SecondMoments = Literal["exact", "average", "drop"]


# A parameter of the optimizer with its group and state.
class _Owned(NamedTuple):
    param: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Tensor]
    # The owners of the state's shards, if it is sharded over ranks.
    divided: ShardedState | None


class _Copy(NamedTuple):
    """A copy that is made once everything has been checked: target = factor * source."""

    target: Tensor
    source: Tensor
    factor: float


def import_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    source: Source,
    names: Sequence[str | None] | None = None,
    second_moments: SecondMoments = "exact",
) -> list[str]:
    """Copy the state that another library's optimizer saved into a `quintic.Muon`; nothing changes unless all fits.

    Quintic's momentum is the moving average m <- m + (1 - mu)(g - m). If the source sums gradients, M <- mu M + g, the
    saved momentum is multiplied by 1 - mu, mu from the saved group. Both give the same directions afterwards if the
    optimizer's `momentum` is mu. Hyperparameters do not change; masters, if there are any, follow the weights.

    Args:
        optimizer: a `quintic.Muon`, changed; also as Accelerate or Lightning have wrapped it.
        saved: the result of an optimizer's `state_dict()`, or of torch.distributed.checkpoint's
            `get_optimizer_state_dict`. For KellerJordan/Muon and nanochat, with which each rank saves the parameters
            that it owns, a list with the state dicts of all ranks in their order.
        source: `"torch"` (torch.optim.Muon, torch.optim.AdamW); `"keller_jordan"` (since February 2025);
            `"keller_jordan_2024"` (before, and copies of it: its momentum is a sum); `"dion"` (dion's Muon and NorMuon
            with AdamW); `"nanochat"`.
        names: the optimizer's names of the saved parameters, in the order of the saved groups and of `params` in each;
            None for a parameter to leave out. Required if the saved state has no names; overrides the names it has.
            PyTorch's optimizers without names are matched by order among the parameters of the same algorithm.
        second_moments: treatment of the mean squares of neurons (NorMuon). `"exact"`: it is an error if the source
            averages over other entries than Quintic does (dion has one per row; Quintic has one per column of a matrix
            with more columns than rows). `"average"`: Quintic's begin with the averages of the saved ones. `"drop"`:
            they do not change.

    Returns:
        The names of the parameters whose state was set, in the order of the optimizer. The others keep their state, as
        do second moments that the source does not have.

    Raises:
        ValueError: a saved parameter is not in the optimizer, has another algorithm, shape or state than Quintic's, or
            names are missing; the message names the parameter. Or the state is that of a `quintic.Muon`.
    """
    if source not in READERS:
        raise ValueError(f"source={source!r}: choose one of {', '.join(map(repr, READERS))}")
    if second_moments not in get_args(SecondMoments):
        raise ValueError(f"second_moments={second_moments!r}: choose 'exact', 'average' or 'drop'")
    ranks = [saved] if isinstance(saved, Mapping) else list(saved)
    owned = _owned(muon_in(optimizer, "import_state"))
    return _copy_in(_read(ranks, source, names, owned), owned, second_moments)


def import_torch_state(optimizer: torch.optim.Optimizer, *state_dicts: Mapping[str, Any]) -> list[str]:
    """Copy the state of several PyTorch optimizers at once, as `import_state` does; nothing changes unless all fits.

    Args:
        optimizer: a `quintic.Muon`, changed; also as Accelerate or Lightning have wrapped it.
        state_dicts: of `torch.optim.Muon` and `torch.optim.AdamW`, in any order; other parameters keep their state.

    Returns:
        The names of the parameters whose state was set.

    Raises:
        ValueError: as `import_state`.
    """
    owned = _owned(muon_in(optimizer, "import_torch_state"))
    return _copy_in([entry for saved in state_dicts for entry in _read([saved], "torch", None, owned)], owned, "exact")


def _owned(optimizer: Muon) -> dict[str, _Owned]:
    divided, states = sharded_parameters(optimizer._plans.current_groups()), optimizer.state
    return {
        name: _Owned(param, group, states.get(param, {}), divided.get(param))
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def _read(
    ranks: Sequence[Mapping[str, Any]], source: Source, names: Sequence[str | None] | None, owned: Mapping[str, _Owned]
) -> list[SavedState]:
    """Return the saved state of each named parameter in Quintic's terms; `ranks` has the state dict of each rank."""
    # Check the state dicts.
    if not ranks or (len(ranks) > 1 and source not in PER_RANK):
        raise ValueError(
            f"{len(ranks)} state dicts with source={source!r}: pass one; only {', '.join(PER_RANK)} save one per rank"
        )
    for rank in ranks:
        if not {"state", "param_groups"} <= rank.keys():
            raise ValueError(f"a state dict has 'state' and 'param_groups', the saved one has {sorted(rank)}")
        if any("view" in group for group in rank["param_groups"]):
            raise ValueError(
                f"the saved state is quintic.Muon's own, not of source={source!r}: load it with "
                f"optimizer.load_state_dict(state_dict), which also restores masters and second moments"
            )
    # All ranks have the same parameters, and groups with the same keys.
    groups = ranks[0]["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    for number, rank in enumerate(ranks):
        if [key for group in rank["param_groups"] for key in group["params"]] != keys:
            raise ValueError(
                f"state dict {number} has other parameters than state dict 0: pass those of the ranks of one optimizer"
            )
    states = [rank["state"] for rank in ranks]
    states_read: list[SavedState] = []
    # Name the parameters, then read group by group.
    labels = iter(_names(groups, keys, states[0], source, names, owned))
    for group in groups:
        members = [_member(key, next(labels), source, states[0], owned) for key in group["params"]]
        states_read += READERS[source](group, members, states)
    return states_read


def _names(
    groups: Sequence[Mapping[str, Any]],
    keys: Sequence[Any],
    states: Mapping[Any, Mapping[str, Any]],
    source: Source,
    names: Sequence[str | None] | None,
    owned: Mapping[str, _Owned],
) -> Sequence[str | None]:
    """Return the name of each saved parameter, None for one to leave out.

    `keys` are all saved parameters. Names are taken from the argument `names`, else from the saved state, else, for
    PyTorch's optimizers, from the optimizer's parameters of the same algorithm in their order.
    """
    # Saved names: as keys (torch.distributed.checkpoint), or in the groups.
    if names is None and all(isinstance(key, str) for key in keys):
        return [resolve_name(key, owned) for key in keys]
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is not None:
        if len(names) != len(keys):
            raise ValueError(
                f"{len(names)} names for {len(keys)} saved parameters: names needs one for each, in the order of the "
                f"saved groups, and None for a parameter to leave out"
            )
        return [None if name is None else resolve_name(name, owned) for name in names]
    if source != "torch":
        raise ValueError(
            f"the saved state of {source} has no parameter names: pass names, one for each of its {len(keys)} "
            f"parameters, in the order of the saved groups"
        )
    # By order: the names of their state tell the algorithm of the saved parameters.
    saved_keys = set().union(*states.values())
    if not saved_keys:  # no parameter was ever stepped
        return [None] * len(keys)
    algorithm = next((name for name, wanted in STATE_KEYS.items() if wanted & saved_keys), None)
    if algorithm is None:
        raise ValueError(f"the saved state {sorted(saved_keys)} is neither torch.optim.Muon's nor torch.optim.AdamW's")
    same = [name for name, own in owned.items() if own.group["algorithm"] == algorithm]
    if len(same) != len(keys):
        raise ValueError(
            f"the saved {algorithm} state has {len(keys)} parameters without names, this optimizer has {len(same)}; "
            f"pass names, or save with named parameters"
        )
    return same


def _member(
    key: Any, name: str | None, source: Source, states: Mapping[Any, Mapping[str, Any]], owned: Mapping[str, _Owned]
) -> SavedParameter:
    """Return a saved parameter with its name and shape; a ValueError if the optimizer has none of this name."""
    if name is None or name in owned:
        return SavedParameter(key, name, None if name is None else owned[name].param.shape)
    if source not in PER_RANK and not states.get(key):
        return SavedParameter(key, None, None)  # it was never stepped, as a frozen parameter
    example = next(iter(owned), "none")
    raise ValueError(
        f"{name}: has saved state, but is not a parameter of this optimizer, whose names are like {example}; "
        f"give names with None in its place to leave it out"
    )


def _copy_in(entries: Sequence[SavedState], owned: Mapping[str, _Owned], mode: SecondMoments) -> list[str]:
    """Check everything, then copy; return the names of the parameters whose state was set."""
    copies: list[_Copy] = []
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ValueError(f"{entry.name}: has two saved states; each parameter can have one")
        seen.add(entry.name)
        copies += _copies(entry, owned[entry.name], mode)
    pairs = separate_sources([(one.target, one.source) for one in copies])
    for (target, source), (_, _, factor) in zip(pairs, copies, strict=True):
        if factor != 1:  # multiplied in float32 or wider; `copy_` rounds once
            source = source.to(torch.promote_types(target.dtype, torch.float32)) * factor
        copy_(target, source)
    return [name for name in owned if name in seen]


def _copies(entry: SavedState, own: _Owned, mode: SecondMoments) -> list[_Copy]:
    """Return the copies for one parameter, after checking that they fit."""
    algorithm = own.group["algorithm"]
    if algorithm != entry.algorithm:
        raise ValueError(
            f"{entry.name}: saved with the state of {entry.algorithm}, this optimizer steps it with {algorithm}; give "
            f"it the same algorithm (quintic.Rule), or names with None in its place"
        )
    if own.state.keys().isdisjoint(STATE_KEYS[algorithm]):
        raise ValueError(
            f"{entry.name}: has saved state, but is frozen here (requires_grad=False) and has none; call "
            f"requires_grad_(True) on it before, or give names with None in its place"
        )
    copies = []
    for key, value in entry.values.items():
        if key == NEURON_MOMENT:
            copies += _second_moment_copies(entry.name, own, value, mode)
            continue
        target, source = own.state[key], saved_tensor(value, f"{entry.name}: saved {key}")
        check_conversion(f"{entry.name}: saved {key}", own.param, source.dtype, target.dtype)
        if source.ndim == 2 and target.ndim > 2 and source.shape == target.flatten(1).shape:
            source = source.reshape(target.shape)  # some libraries save convolutions as (out, rest) matrices
        factor = entry.momentum_factor if key == MOMENTUM else 1.0
        if own.divided is not None and key in PARAM_SHAPED_STATE:
            pieces = shard_of_saved(f"{entry.name}: saved {key}", own.param, own.divided, target, source)
            copies += [_Copy(target_piece, piece, factor) for target_piece, piece in pieces]
        else:
            copies.append(_checked(entry.name, key, _Copy(target, source, factor)))
    return copies


def _checked(name: str, key: str, copy: _Copy) -> _Copy:
    """Return the copy; a ValueError if shapes differ, or only one of source and target is a `DTensor`."""
    target, source, _ = copy
    if source.shape != target.shape:
        raise ValueError(
            f"{name}: saved {key} has shape {tuple(source.shape)}, this optimizer needs {tuple(target.shape)}"
        )
    if hasattr(source, "placements") != hasattr(target, "placements"):
        kinds = ["a DTensor" if hasattr(tensor, "placements") else "a plain tensor" for tensor in (source, target)]
        raise ValueError(
            f"{name}: saved {key} is {kinds[0]}, this optimizer's is {kinds[1]}; distribute the saved tensors like the "
            f"parameters (distribute_tensor), or make them whole (full_tensor)"
        )
    return copy


def _second_moment_copies(name: str, own: _Owned, saved: Tensor, mode: SecondMoments) -> list[_Copy]:
    """Return the copy of the mean squares of a parameter's neurons; an empty list if they are dropped.

    `saved` has the parameter's number of dimensions, with size 1 in the averaged ones. It is expanded to the parameter,
    and averaged over each of Quintic's neurons, which is exact if every neuron consists of whole saved means.
    """
    if mode == "drop":
        return []
    buffer, shape, view = own.state.get(NEURON_MOMENT), own.param.shape, own.group["view"]
    if buffer is None:
        raise ValueError(
            f"{name}: saved with second moments of its neurons, which this optimizer does not keep; construct it with "
            f"normalize='neuron', or pass second_moments='drop'"
        )
    if saved.ndim != len(shape) or any(size not in (1, full) for size, full in zip(saved.shape, shape, strict=True)):
        raise ValueError(
            f"{name}: saved second moments have shape {tuple(saved.shape)}, which is no mean over dimensions of a "
            f"parameter of shape {tuple(shape)}"
        )
    if not shape.numel():
        return []
    # Exact if a neuron extends over the whole of every dimension that was averaged.
    averaged = [dim for dim, size in enumerate(saved.shape) if size != shape[dim]]
    if mode == "exact" and not all(_neurons_span(dim, shape, view) for dim in averaged):
        raise ValueError(
            f"{name}: saved second moments of shape {tuple(saved.shape)} are means over other entries than the neurons "
            f"of {view} for shape {tuple(shape)}; pass second_moments='average' to begin with their means, or 'drop'"
        )
    # In float64, the mean of equal float32 numbers is exactly that number. One number per neuron, (neurons,).
    means = [neurons.mean(-1, dtype=torch.float64).flatten() for neurons in _neurons(saved, shape, view)]
    return [_checked(name, NEURON_MOMENT, _Copy(buffer, torch.cat(means), 1.0))]


@cache
def _neurons_span(dim: int, shape: torch.Size, view: View) -> bool:
    """Return whether every neuron of the view extends over the whole of a dimension of the parameter."""
    # The index along `dim` of every entry, with size 1 in the other dimensions.
    places = torch.arange(shape[dim], device="cpu").view([-1 if other == dim else 1 for other in range(len(shape))])
    extents = [neurons.amax(-1) - neurons.amin(-1) for neurons in _neurons(places, shape, view)]
    return all(bool((extent == shape[dim] - 1).all()) for extent in extents)


def _neurons(means: Tensor, shape: torch.Size, view: View) -> list[Tensor]:
    """Return the entries of every neuron, (b, neurons, entries) for each batch of the view.

    Neurons are the rows of a matrix, or its columns if it has more columns than rows. `means` has size 1 in the
    dimensions of the parameter along which it is constant.
    """
    # `Flatten` needs contiguous memory; the other views accept expanded tensors.
    spread = means.expand(shape)
    batches = view.batches(spread.contiguous() if isinstance(view, Flatten) else spread)
    return [batch if batch.shape[1] >= batch.shape[2] else batch.mT for batch in batches]
