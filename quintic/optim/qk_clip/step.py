"""QK-clip within a step: from the logits that `Muon.step` is given to the rows that this rank holds.

Phases:
    start     resolve each layer (`layers.py`), check its maxima, and start their all-reduces (`maxima.py`); before any
              weight changes, so that errors leave everything as it was
    finish    after the update: turn maxima into factors (`LayerClip.factors`), equal on all ranks, and scale the box of
              each parameter that this rank holds
    send      with `comms="sharded"` only the owner of a master can scale its weight; it broadcasts the result
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import group_ranks, has_process_group, this_rank
from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group
from quintic.optim.layout.layouts import is_dtensor, local_tensor, mesh_layout, relative
from quintic.optim.layout.packing import in_memory_order
from quintic.optim.numeric.precision import full_precision, store_
from quintic.optim.qk_clip.clip import LayerClip, QKClip, RowFactors
from quintic.optim.qk_clip.layers import is_projection
from quintic.optim.qk_clip.maxima import Layer, LayerSpec, LocalMaxima, Maxima
from quintic.optim.state.parameters import Parameter, all_parameters, broadcast_shards
from quintic.optim.state.shards import view_as_shard
from quintic.optim.state.state import master_of

__all__ = ["QKStep"]


class QKStep:
    """QK-clip of one optimizer, step after step; made anew when its groups change. `communicators` are connected."""

    def __init__(
        self,
        clip: QKClip,
        groups: Sequence[Group],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        communicators: Communicators,
    ) -> None:
        self.clip, self._state, self._communicators = clip, state, communicators
        self._held = {held.name: held for held in all_parameters(groups, communicators)}
        self._layers: dict[Layer, LayerClip] = {}
        self._maxima = self._reductions()

    def start(self, qk_logits: Mapping[Layer, Tensor]) -> None:
        """Check the `qk_logits` of a step and start to reduce them over ranks; a ValueError means nothing has changed.

        `qk_logits` maps a layer to the (num_heads,) maxima of its heads. All ranks that share parameters must call it.
        """
        # Sort the maxima by the ranks that they are reduced over. An error is kept until the reductions have started.
        seen: dict[tuple[int, ...], dict[Layer, LocalMaxima]] = {ranks: {} for ranks in self._maxima}
        known = dict(self._layers)
        problem = None
        try:
            if not isinstance(qk_logits, Mapping):
                raise ValueError(f"qk_logits is a {type(qk_logits).__name__}: give a mapping, layer -> largest logits")
            for layer, maxima in qk_logits.items():
                if not isinstance(maxima, Tensor):
                    raise ValueError(
                        f"qk_logits[{layer!r}] is a {type(maxima).__name__}: give a tensor with the largest logit of "
                        f"each query head"
                    )
                clip = self._resolved(layer, maxima.numel())
                clip.check(maxima)
                ranks = self._ranks_of(clip)
                dtypes = (self._held[name].param.dtype for name in clip.names)
                spec = LayerSpec(clip.num_heads, clip.names, reduce(torch.promote_types, dtypes, torch.float32))
                seen[ranks][layer] = LocalMaxima(spec, _own_maxima(layer, maxima, ranks, spec.dtype))
        except ValueError as error:
            problem = error
        # Start every reduction, with the error if there is one, so that other ranks hear of it instead of waiting.
        problems = [reduction.start(seen[ranks], problem) for ranks, reduction in self._maxima.items()]
        for problem in problems:
            if problem is not None:
                self._layers = known
                raise problem
        # Layers that only other ranks gave logits of, but whose parameters this rank has, too.
        for reduction in self._maxima.values():
            for layer, spec in reduction.specs.items():
                if layer not in self._layers and not self._held.keys().isdisjoint(spec.names):
                    self._resolved(layer, spec.num_heads)

    @torch.no_grad()
    def finish(self, apply_mask: Tensor | None) -> None:
        """Scale this rank's pieces, unless `apply_mask`, () int32, is zero. Collective: ranks that share parameters."""
        scaled: list[str] = []
        for reduction in self._maxima.values():
            for layer, maxima in reduction.finish().items():
                if layer not in self._layers:
                    continue  # only other ranks of the group have parameters of this layer
                for name, factors in self._layers[layer].factors(maxima).items():
                    # Factors of one instead of a branch, which would wait for the device.
                    if apply_mask is not None:
                        factor = factors.factor
                        stays = apply_mask.to(factor.device) == 0
                        factors = factors._replace(factor=factor.masked_fill(stays, 1.0))
                    self._scale(self._held[name], factors)
                    scaled.append(name)
        self._send_again(scaled)

    # -- which ranks

    def _reductions(self) -> dict[tuple[int, ...], Maxima]:
        """Return one `Maxima` per set of ranks that share attention layers, in the same order on all ranks."""
        # The reductions run on the device of the first projection, or else of the first parameter.
        projections = [held for name, held in self._held.items() if is_projection(name, self.clip.names)]
        devices = [held.param.device for held in (*projections, *self._held.values())]
        alone: dict[tuple[int, ...], Maxima] = {(this_rank(),): Maxima(None, torch.device("cpu"))}
        explicit = self.clip.process_group
        if explicit is not None:
            ranks = tuple(sorted(group_ranks(explicit)))
            return {ranks: Maxima(explicit, devices[0])} if len(ranks) > 1 else alone
        shared = {frozenset(held.ranks) for held in projections if held.is_here and held.layout is not None}
        # A set of ranks that is contained in a larger one needs no reduction of its own: the larger one has the same
        # heads, and more tokens do no harm. All ranks of a set answer alike whether it is contained in another.
        largest = [ranks for ranks in shared if not any(ranks < other for other in shared)]
        groups = [tuple(sorted(ranks)) for ranks in largest]  # sorted below: collectives need one order on all ranks
        # The reduction over this rank only comes last, so that other ranks hear of an error before this rank raises it.
        return {ranks: Maxima(self._communicators[ranks], devices[0]) for ranks in sorted(groups)} | alone

    def _ranks_of(self, clip: LayerClip) -> tuple[int, ...]:
        """Return the ranks that a layer's maxima are taken over; a ValueError if nothing tells which they are."""
        where = f"qk_logits[{clip.layer!r}]"
        parts = [self._held[name] for name in clip.names]
        needed = {rank for held in parts for rank in held.ranks}
        # Plain tensors with comms="none" may have copies on other ranks that the optimizer does not know about.
        is_private = all(held.group.comms == "none" and not is_dtensor(held.param) for held in parts)
        is_unsaid = self.clip.process_group is None and is_private
        if is_unsaid and has_process_group() and len(group_ranks(None)) > 1:
            raise ValueError(
                f"{where}: its parameters are plain tensors with comms='none', so nothing says which of the "
                f"{len(group_ranks(None))} ranks saw other tokens; give quintic.QKClip(process_group=...), "
                f"torch.distributed.group.WORLD for all of them, or the optimizer comms='averaged' under DDP"
            )
        for ranks in self._maxima:
            # A layer that only this rank has must not be reduced with other ranks' layers of the same name.
            is_own = needed == {this_rank()} and self.clip.process_group is None
            if needed == set(ranks) or (needed <= set(ranks) and not is_own):
                return ranks
        raise ValueError(
            f"{where}: its parameters lie on the ranks {sorted(needed)}, but its maxima can be taken over "
            f"{' or '.join(str(list(ranks)) for ranks in self._maxima)}; give quintic.QKClip(process_group=...) with "
            f"all ranks that hold a piece of the layer or see other tokens"
        )

    # -- layers

    def _resolved(self, layer: Layer, num_heads: int) -> LayerClip:
        """Return a layer's parameters, found once; a ValueError if another layer has some of them."""
        if layer not in self._layers:
            resolved = self.clip.resolve(
                layer,
                {name: held.param.shape for name, held in self._held.items()},
                num_heads,
                views={name: held.group.view for name, held in self._held.items()},
            )
            # Two names for one layer would scale its weights twice.
            for other, clip in self._layers.items():
                both = sorted(set(clip.names) & set(resolved.names))
                if both:
                    raise ValueError(
                        f"qk_logits[{layer!r}] and qk_logits[{other!r}] both mean {both[0]}; call a layer by one name, "
                        f"on all ranks and in all steps"
                    )
            self._layers[layer] = resolved
        return self._layers[layer]

    # -- this rank's pieces

    def _scale(self, held: Parameter, factors: RowFactors) -> None:
        """Scale this rank's piece of a parameter, and its master."""
        state = self._state.get(held.param, {})  # empty for a frozen parameter
        weight, master = local_tensor(held.param).detach(), master_of(state)
        if not weight.numel():
            return
        # There is no master, or one of the weight's own shape: scale this rank's whole box.
        if held.sharded is None or master is None:
            if held.layout is not None:
                factors = factors.within(held.layout.box_of(this_rank()))
            _multiply(weight, None if master is None else local_tensor(master), factors.over(weight))
            return
        # The master is sharded: scale only the shards that this rank owns. `master` is (entries,), one shard after the
        # other; a shard is a unit's box, or a range of the parameter's memory.
        for shard in held.sharded.local:
            runs = in_memory_order(weight)[shard.start : shard.stop], master[shard.offset : shard.offset + shard.numel]
            weight_shard, master_shard = (view_as_shard(run, shard, weight) for run in runs)
            if shard.unit is None:
                factor = factors.factor_for_range(shard.start, shard.stop, weight)
            else:
                factor = factors.within(shard.unit.box).over(weight_shard)
            _multiply(weight_shard, master_shard, factor)

    def _send_again(self, names: Iterable[str]) -> None:
        """Broadcast weights that only their masters' owners could scale. All ranks must call it, with equal names."""
        together: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[Parameter]] = {}
        for name in names:
            held = self._held[name]
            if held.sharded is not None and master_of(self._state.get(held.param, {})) is not None:
                # One message per set of ranks, dtype and device.
                key = held.sharded.ranks, held.param.dtype, held.param.device
                together.setdefault(key, []).append(held)
        # A few parameters at a time keep the temporary memory within the smallest `max_workspace_bytes` of the groups.
        for (ranks, dtype, _), parameters in together.items():
            limits = [held.group.max_workspace_bytes for held in parameters]
            limit = min((value for value in limits if value is not None), default=2**62)
            for some in _runs_within(parameters, limit // dtype.itemsize):
                wholes = [(held.param.detach(), held.sharded) for held in some if held.sharded is not None]
                broadcast_shards(wholes, self._communicators[ranks])


def _own_maxima(layer: Layer, maxima: Any, ranks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return (num_heads,) in a dtype: the maxima that this rank has seen, -inf for heads of other ranks.

    `maxima` is (num_heads,), plain or a `DTensor` sharded by heads; `ranks` are the ranks that it is reduced over.
    """
    local = local_tensor(maxima).detach().to(dtype)  # (heads of this rank,)
    mesh = getattr(maxima, "device_mesh", None)
    # A plain tensor has all heads.
    if mesh is None:
        return local
    from torch.distributed.tensor import Partial, Replicate

    # Partial("max") along a mesh dimension is a maximum that our own reduction takes anyway: treat it as Replicate.
    placements = [
        Replicate() if isinstance(placement, Partial) and placement.reduce_op == "max" else placement
        for placement in maxima.placements
    ]
    try:
        layout = mesh_layout(maxima.shape, mesh.mesh, placements)
    except ValueError as error:
        raise ValueError(f"qk_logits[{layer!r}]: {error}; use Shard(0), Replicate() or Partial('max')") from error
    if not set(layout.ranks) <= set(ranks):
        raise ValueError(
            f"qk_logits[{layer!r}] is a DTensor on the ranks {sorted(layout.ranks)}, but its maxima are taken over "
            f"{sorted(ranks)}, which share the parameters; give quintic.QKClip(process_group=...) with all of them"
        )
    # Put this rank's heads at their places among all heads.
    own = local.new_full(maxima.shape, -math.inf)
    own[relative(layout.box_of(this_rank()), ((0, maxima.numel()),))] = local
    return own


def _multiply(weight: Tensor, master: Tensor | None, factor: Tensor) -> None:
    """Multiply a weight in place, computing from its master if there is one, which is set, too."""
    if master is None:
        weight.mul_(factor)
        return
    # `full_precision` is the value behind the weight; `store_` rounds it to the weight and keeps it in the master.
    here = master.to(weight.device, non_blocking=True)
    store_(weight, here, full_precision(weight, here) * factor)
    if here is not master:  # the master is in host memory
        master.copy_(here, non_blocking=True)


def _runs_within(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Return parameters in lists of at most `limit` entries each, in order; a larger parameter gets its own list."""
    runs: list[list[Parameter]] = []
    entries = 0
    for held in parameters:
        if not runs or entries + held.param.numel() > limit:
            runs.append([])
            entries = 0
        runs[-1].append(held)
        entries += held.param.numel()
    return runs
