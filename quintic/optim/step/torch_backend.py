"""The element-wise passes of a bucket in plain PyTorch: momentum before the polar step, weights after it, and AdamW.

    directions   gradients, momentum -> directions (b, m, n)
    apply        updates (b, m, n), factors (b, m or 1, n or 1) -> weights and masters
    step_adamw   the whole update of AdamW

`triton_backend.py` has the same passes as kernels. `StagedBackend` runs the element-wise stages of rules that have
others than momentum, decay and step, and leaves the rest to one of the two.
"""

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from quintic.kernels.dispatch import is_dense
from quintic.optim.groups.group import Group
from quintic.optim.layout.pieces import block_of
from quintic.optim.layout.views import View
from quintic.optim.numeric.int8_state import GROUP, read_packed, store_packed_
from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.kinds import adamw_entries
from quintic.optim.rules.elementwise import drift_, keep_and_step_, stage_direction_, wide_weight
from quintic.optim.rules.rule import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP
from quintic.optim.rules.stages import StageOptions
from quintic.optim.rules.update import CPU_PIECE, adamw_, decay_and_step_, in_pieces, momentum_
from quintic.optim.state.state import master_key
from quintic.optim.step.operands import BucketCache, Operands

__all__ = [
    "StagedBackend",
    "TorchBackend",
    "UpdateBackend",
    "masters_of",
    "read_matrices",
    "step_adamw",
    "write_matrices",
]

_MOMENTUM, _DTYPE = itemgetter(MOMENTUM), attrgetter("dtype")


class UpdateBackend(Protocol):
    """The two passes over a bucket's own tensors, before and after its matrices are orthogonalised."""

    def directions(self) -> Tensor:
        """Advance the momentum; return the update directions, (b, m, n), rounded to `direction_dtype`."""
        ...

    def apply(self, update: Tensor, factors: Tensor, rate: Tensor | None = None) -> None:
        """Step the weights against updates (b, m, n), times factors and the learning rate.

        Factors are (b, m or 1, n or 1); with `scale_decay` (2b, ...), first of updates, then of decay. If the rule
        constrains weights, `factors` multiply weights, and `rate` updates.
        """
        ...


class TorchBackend:
    """The passes over at least one member of a bucket, see `UpdateBackend`, in plain PyTorch.

    `present` has a flag for each member: where it is false, weights and state stay, and directions are zeros. None
    steps all members.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        active: Operands,
        cache: BucketCache,
        present: Sequence[bool] | None = None,
    ) -> None:
        self._bucket, self._group, self._active, self._cache = bucket, group, active, cache
        self._present = None if present is None or all(present) else present

    def _select_stepped(self, *lists: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return each list without members that are not stepped."""
        assert self._present is not None
        return [[one for one, present in zip(each, self._present, strict=True) if present] for each in lists]

    def directions(self) -> Tensor:
        """Advance the momentum; return the directions (b, m, n)."""
        group, active, bucket = self._group, self._active, self._bucket
        # For each member (b, g, r, n) views of its momentum and its gradient.
        averages = list(map(_MOMENTUM, active.states))
        momenta, gradients = _blocks(active, group.view, self._cache, averages, active.gradients)
        counts = list(map(len, momenta))
        shape = momenta[0].shape[1:]
        # Members that are left out have directions, too: zeros, whose updates are not applied.
        new = torch.empty if self._present is None else torch.zeros
        # (g, r, n) of one matrix -> (b of all members, m, n)
        size = (sum(counts), shape[:2].numel(), shape[2:].numel())
        directions = new(size, dtype=bucket.direction_dtype, device=bucket.device)
        # One for each member, as `momenta`.
        outputs: Sequence[Tensor] = directions.view(size[0], *shape).split(counts)
        if self._present is not None:
            momenta, gradients, outputs = self._select_stepped(momenta, gradients, outputs)
        mu, nesterov = float(group.momentum), group.nesterov
        if averages[0].itemsize > 1:
            momentum_(momenta, gradients, mu=mu, nesterov=nesterov, out=outputs)
            return directions
        # Averages of 8 bits: one member at a time is in float32, on CPUs in pieces. Groups of 8 lie along the rows of a
        # parameter, which are the columns of a transposed matrix.
        entries = CPU_PIECE if bucket.device.type == "cpu" else None
        if momenta and momenta[0].stride(-1) != 1:
            momenta, gradients, outputs = ([x.transpose(2, 3) for x in xs] for xs in (momenta, gradients, outputs))
        for rows, gradient, out in in_pieces(momenta, gradients, outputs, entries=entries):
            average = read_packed(rows)
            momentum_([average], [gradient], mu=mu, nesterov=nesterov, out=[out])
            store_packed_(rows, average)
        return directions

    def apply(self, update: Tensor, factors: Tensor, rate: Tensor | None = None) -> None:
        """Step the weights."""
        group, active = self._group, self._active
        whole = masters_of(active)
        wanted = [active.params] if whole is None else [active.params, whole]
        blocks = _blocks(active, group.view, self._cache, *wanted)
        # Without masters both are the weights, and None is passed for each master below.
        weights, masters = blocks[0], blocks[-1]
        counts = list(map(len, weights))
        shape = weights[0].shape[1:]
        # (b, m, n) -> for each member (its b, g, r, n)
        updates: Sequence[Tensor] = update.view(len(update), *shape).split(counts)
        # 1 where factors do not vary.
        rows = shape[:2] if factors.shape[1] > 1 else (1, 1)
        columns = shape[2:] if factors.shape[2] > 1 else (1,) * len(shape[2:])
        # The first b factors are those of updates, the last b those of decay: the same ones without `scale_decay`.
        everything = factors.view(len(factors), *rows, *columns)
        scales: Sequence[Tensor] = everything[: len(update)].split(counts)
        decays: Sequence[Tensor] = everything[-len(update) :].split(counts)
        if self._present is not None:
            stepped = self._select_stepped(weights, updates, scales, decays, masters)
            weights, updates, scales, decays, masters = stepped
        decay_and_step_(
            weights,
            [None] * len(weights) if whole is None else masters,
            updates,
            scales,
            lr=float(group.lr),
            weight_decay=float(group.weight_decay),
            decay_coupling=group.decay_coupling,
            decay_factors=decays if group.scale_decay else None,
            cautious=group.cautious,
        )


class StagedBackend:
    """The passes of a rule with element-wise stages of its own, in plain PyTorch on any device, see `UpdateBackend`.

    Args:
        backend: has the passes that the rule leaves as they are.
        bucket: the bucket.
        group: its group.
        active: at least one member.
        cache: the bucket's.
        options: numbers that stages read.
        mask: () or (matrices,) int32; where it is zero, weights and state keep their bits. None for nowhere.
    """

    def __init__(
        self,
        backend: UpdateBackend,
        bucket: Bucket,
        group: Group,
        active: Operands,
        cache: BucketCache,
        options: StageOptions,
        mask: Tensor | None,
    ) -> None:
        self._backend, self._bucket, self._group, self._active = backend, bucket, group, active
        self._cache, self._options, self._mask = cache, options, mask

    def _states(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return for each member the blocks (b, g, r, n) of some state."""
        active = self._active
        lists = [[state[name] for state in active.states] for name in names]
        columns = _blocks(active, self._group.view, self._cache, *lists)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [{} for _ in active.params]

    def _split(self, numbers: Tensor, shape: torch.Size) -> Sequence[Tensor]:
        """Return numbers (b, m or 1, n or 1) for each member, to be broadcast to its blocks; `shape` is (g, r, n)."""
        rows = shape[:2] if numbers.shape[1] > 1 else (1, 1)
        columns = shape[2:] if numbers.shape[2] > 1 else (1,) * len(shape[2:])
        counts = [member.batch_size for member in self._active.members]
        result: Sequence[Tensor] = numbers.view(len(numbers), *rows, *columns).split(counts)
        return result

    def _masks(self, shape: torch.Size) -> Sequence[Tensor | None]:
        mask = self._mask
        if mask is None or mask.ndim == 0:
            return [mask] * len(self._active.members)
        return self._split(mask.view(-1, 1, 1), shape)

    def directions(self) -> Tensor:
        """Advance the state of the rule's first stage; return the directions (b, m, n)."""
        stage, active = self._bucket.rule.gradient_stage, self._active
        if stage is None:
            return self._backend.directions()
        (gradients,) = _blocks(active, self._group.view, self._cache, active.gradients)
        shape = gradients[0].shape[1:]
        size = (sum(map(len, gradients)), shape[:2].numel(), shape[2:].numel())
        directions = torch.empty(size, dtype=self._bucket.direction_dtype, device=self._bucket.device)
        rows = zip(
            gradients,
            self._states([spec.name for spec in stage.state]),
            self._masks(shape),
            _split(directions, gradients),
            strict=True,
        )
        for gradient, state, mask, out in rows:
            out.copy_(stage_direction_(stage, gradient, state, self._options, mask))
        return directions

    def apply(self, update: Tensor, factors: Tensor, rate: Tensor | None = None) -> None:
        """Step the weights, and let them drift."""
        active, drift = self._active, self._bucket.rule.drift
        given = masters_of(active)
        wanted = [active.params] if given is None else [active.params, given]
        blocks = _blocks(active, self._group.view, self._cache, *wanted)
        weights, masters = blocks[0], [None] * len(blocks[0]) if given is None else blocks[1]
        shape = weights[0].shape[1:]
        masks = self._masks(shape)
        # The weights before the step.
        before: list[Tensor] = []
        if drift is not None:
            before = [wide_weight(weight, master).clone() for weight, master in zip(weights, masters, strict=True)]
        if rate is None:
            self._backend.apply(update, factors)
        else:
            updates = _split(update, weights)
            keep_and_step_(weights, masters, updates, self._split(factors, shape), self._split(rate, shape), masks)
        if drift is not None:
            states = self._states([spec.name for spec in drift.state])
            for weight, master, old, state, mask in zip(weights, masters, before, states, masks, strict=True):
                drift_(drift, weight, master, old, state, self._options, mask)


def _blocks(active: Operands, view: View, cache: BucketCache, *lists: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return for each list the members' matrices, (b, g, r, n), as views of its tensors, one for each member.

    The tensors are like the members' parameters. Where their matrices are follows from the plan, and is kept. Views are
    not kept, because the memory of a parameter with views cannot be exchanged (`torch.utils.swap_tensors`).
    """
    # The tuple itself is the key: it is the plan's own as long as every member has a gradient.
    if cache.places is None or cache.places[0] is not active.members:
        pairs = [
            (param, block_of(param.detach(), member, view))
            for param, member in zip(active.params, active.members, strict=True)
        ]
        found = [(b.shape, b.stride(), int(b.storage_offset()) - int(p.storage_offset())) for p, b in pairs]
        cache.places = active.members, found
    of_lists: list[Sequence[Tensor]] = []
    for tensors in lists:
        blocks: list[Tensor] = []
        rows = zip(tensors, active.params, active.members, cache.places[1], strict=True)
        for tensor, param, member, (shape, stride, offset) in rows:
            # If a tensor has other strides than its parameter, the view finds its matrices, which takes longer.
            if tensor.stride() == param.stride():
                blocks.append(tensor.as_strided(shape, stride, tensor.storage_offset() + offset))
            else:
                blocks.append(block_of(tensor, member, view))
        of_lists.append(blocks)
    return of_lists


def read_matrices(active: Operands, view: View, cache: BucketCache, tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy (b, m, n) of all matrices in some tensors, contiguous.

    The tensors are like the members' parameters, one for each.
    """
    (blocks,) = _blocks(active, view, cache, tensors)
    shape = blocks[0].shape[1:]  # (groups, rows, columns...)
    size = (sum(map(len, blocks)), shape[:2].numel(), shape[2:].numel())
    batch = torch.empty(size, dtype=blocks[0].dtype, device=blocks[0].device)
    torch._foreach_copy_(_split(batch, blocks), list(blocks))
    return batch


def write_matrices(active: Operands, view: View, cache: BucketCache, tensors: Sequence[Tensor], batch: Tensor) -> None:
    """Copy a batch that `read_matrices` returned back to the tensors that it was read from."""
    (blocks,) = _blocks(active, view, cache, tensors)
    torch._foreach_copy_(list(blocks), _split(batch, blocks))


def _split(batch: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
    return list(batch.view(len(batch), *blocks[0].shape[1:]).split(list(map(len, blocks))))


def masters_of(active: Operands) -> list[Tensor] | None:
    """Return the fp32 master or the mantissa of each member's parameter; None if the parameters have none."""
    # float32 and float64 weights need no more precision.
    if active.params[0].itemsize >= 4:
        return None
    key = master_key(active.states[0])
    return None if key is None else [state[key] for state in active.states]


def step_adamw(bucket: Bucket, group: Group, active: Operands) -> None:
    """Step a bucket of AdamW parameters in PyTorch, by its fused kernel if that has the options asked for."""
    if not active.params:
        return
    masters = masters_of(active)
    lr, eps, weight_decay = group.effective_lr, float(group.eps), float(group.weight_decay)
    beta1, beta2 = map(float, group.betas)
    # The fused kernel would write into gaps between entries, which all parameters of the bucket have, or none.
    has_gaps = not (active.params[0].is_contiguous() or is_dense(active.params[0]))
    plain = not group.cautious and group.decay_coupling == "lr" and group.state_dtype is None and not has_gaps
    firsts = [*map(itemgetter(EXP_AVG), active.states)]
    # It would also round bfloat16 moments of bfloat16 weights differently by where an entry lies in memory.
    dtypes = {*map(_DTYPE, (*active.params, *active.gradients, *firsts))}
    if plain and masters is None and len(dtypes) == 1:
        torch_adamw(
            active.params,
            active.gradients,
            firsts,
            [*map(itemgetter(EXP_AVG_SQ), active.states)],
            [],
            [*map(itemgetter(STEP), active.states)],
            fused=bucket.device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return
    entries = adamw_entries(group.max_workspace_bytes)
    if entries is not None:
        entries = max(GROUP, entries // GROUP * GROUP)
    completing: Sequence[Tensor | None] = masters or [None] * len(firsts)
    rows = zip(active.params, completing, active.gradients, active.states, strict=True)
    for param, master, gradient, state in rows:
        tensors = [[tensor] for tensor in (param, master, gradient, state[EXP_AVG], state[EXP_AVG_SQ])]
        for piece, piece_master, piece_gradient, exp_avg, exp_avg_sq in in_pieces(*tensors, entries=entries):
            step = state[STEP].clone()  # counted once, after the last piece
            adamw_(
                piece,
                piece_master,
                piece_gradient,
                exp_avg,
                exp_avg_sq,
                step,
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=weight_decay,
                decay_coupling=group.decay_coupling,
                cautious=group.cautious,
            )
        state[STEP] += 1
