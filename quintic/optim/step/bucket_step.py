"""The step of one bucket of the plan. The whole algorithm is `BucketStep.run`.

Its phases, on the pieces of parameters that this rank holds, or owns where state is sharded; arrows are messages:

    gradients   sharded state: gradients -> the owners of their entries, where they become means
    momentum    the momentum advances; directions (b, m, n)
    gather      matrices in pieces: directions -> the owners of the matrices
    matrices    at the owner, whole: the rule's stages, before, polar and after (`polar/matrix_stages.py`)
    scatter     matrices in pieces: updates and neuron factors -> the pieces
    write       weights decay, and step against the updates
    publish     sharded state: weights -> all ranks

A bucket has the first and the last message (`transports.Shard`), the second and the third (`transports.Gather`), or
none. AdamW's parameters have no matrices: one element-wise update stands for all phases from momentum to write.

What holds throughout:

- All ranks of a process group start the same messages in the same order, with or without gradients. Which parameters
  are stepped is decided on the device, by a mask: where it is zero, weights and state keep their bits.
- `run` yields exactly twice if it sends messages, each time while one is under way, so that other buckets can compute
  in that time (`run_overlapping`).
- The host never waits for the device, but for a mask that plain PyTorch has to read.
- Before `run` yields it deletes the names of tensors that it needs no longer, so that the message frees them when it
  has arrived: temporary memory is as planned (`plan/workspace/`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group
from quintic.optim.groups.ties import Tie
from quintic.optim.plan.bucket import Bucket, Gathered, ParameterUnit, Sharded, ShardedMatrices
from quintic.optim.plan.members import BucketMember, update_dtype
from quintic.optim.plan.schedule import Schedule, prefetch_one_schedule
from quintic.optim.polar.forms import Form
from quintic.optim.polar.matrix_stages import NO_STATE, MatrixState, apply_after
from quintic.optim.polar.orthogonalize import apply_form, apply_function
from quintic.optim.rules.device import DeviceHyperparameters, is_capturing
from quintic.optim.rules.table import NEURON_MOMENT
from quintic.optim.rules.update import second_moment_shape
from quintic.optim.state.shards import StateShard
from quintic.optim.state.state import second_moments
from quintic.optim.step.averaging import PrecomputedAverages
from quintic.optim.step.consensus import RankConsensus
from quintic.optim.step.offload.offload import Offload, OffloadedPart
from quintic.optim.step.operands import BucketCache, Operands, State
from quintic.optim.step.ranges import NO_RANGES, Ranges, ranges_of
from quintic.optim.step.telemetry import Counts, Measured, measure
from quintic.optim.step.torch_backend import TorchBackend, UpdateBackend, step_adamw
from quintic.optim.step.transports import Gather, Shard, Transport, as_rows, factors_of_pieces, join_units, split_units
from quintic.optim.step.triton_backend import TritonBackend, step_adamw_triton

__all__ = ["NO_OPERANDS", "BucketStep", "StepContext", "orthogonalized", "run_overlapping"]

# The operands of a bucket between steps: no gradient is kept alive.
NO_OPERANDS = Operands((), [], [], [], 0)


@dataclass(slots=True)
class StepContext:
    """The objects that all buckets of a plan are stepped with, and facts about the step that runs."""

    # As they are now.
    groups: Sequence[Group]
    state: State
    communicators: Communicators
    consensus: RankConsensus
    # Averages of gradients that clipping made before the step.
    precomputed: PrecomputedAverages
    # None if no state is in host memory.
    offload: Offload | None = None
    # Whether this rank can step without other ranks' gradients or decisions; False until ranks have agreed.
    is_single_rank: bool = False
    # Steps made before this one.
    num_steps: int = 0
    # Whether a profiler runs, which shows the phases of each bucket.
    is_profiled: bool = False
    # Whether gradients that are not finite stop this step of all groups, also of those that would propagate them.
    skips_nonfinite: bool = False
    # Telemetry of the last sampled step of each bucket, by kind of matrix.
    measured: dict[int, dict[int, Measured]] = field(default_factory=dict)
    hyperparameters: dict[tuple[int, torch.device], DeviceHyperparameters] = field(default_factory=dict)

    def hyperparameters_of(self, number: int, device: torch.device) -> DeviceHyperparameters:
        """Return a group's hyperparameters on a device, up to date."""
        on_device = self.hyperparameters.get((number, device))
        if on_device is None:
            on_device = self.hyperparameters[number, device] = DeviceHyperparameters(device)
        group = self.groups[number]
        # Most steps ask once for each bucket, and a group is another object when it has changed.
        if on_device.is_of is not group:
            on_device.update(group.hyperparameters, group.lr_ratio)
            on_device.is_of = None if on_device.is_live else group
        return on_device


class BucketStep:
    """Steps one bucket of a plan.

    Args:
        number: of the bucket in the plan.
        bucket: the matrices or parameters.
        transport: its messages; None where this rank has all of it.
        cache: tensors on its device, other than state, that are kept between steps.
        context: objects and facts shared by all buckets.
    """

    def __init__(
        self, number: int, bucket: Bucket, transport: Transport | None, cache: BucketCache, context: StepContext
    ) -> None:
        self.number, self.bucket, self.cache, self._context = number, bucket, cache, context
        self.transport = transport
        self._rule = rule = bucket.rule
        self._orthogonalizes = rule.orthogonalizes
        # The units of all ranks; None for whole matrices, and for AdamW.
        self.units = bucket.units if isinstance(bucket, Gathered | ShardedMatrices) else None
        # The (m, n) of local matrices.
        self._shapes = [bucket.shape or (0, 0)]
        is_offloaded = context.offload is not None and context.offload.is_offloaded(number)
        self._offload = context.offload if is_offloaded else None
        # As it is now.
        self.group = context.groups[bucket.group]
        # Within a step: the parameters that have a gradient, or pieces, with their tensors.
        self.active = NO_OPERANDS
        # The numbers of matrices and parameters that the last step stepped.
        self.counts = Counts(bucket, 0, 0, ())
        # Parameters tied to the bucket's, whose weights are copied when the bucket has been stepped.
        self.copies: list[Tie] = []
        # Within a step: the profiler's ranges, by phase.
        self.ranges: Ranges = NO_RANGES
        # Whether gradients that are not finite stop this step of the bucket.
        self.is_guarded = False
        # The learning-rate scale times the own multiplier of each matrix: (matrices, 1), or (units, kinds).
        self._scales = torch.empty(0)
        # Within a step: whether this rank has something to do that needs no messages.
        self.has_local_work = False
        # Whether this step measures updates.
        self._is_sampled = False

    # ------------------------------------------------------------------------------------------------- the algorithm

    def begin(self) -> None:
        """Find the gradients, weights and state of a step."""
        context, bucket = self._context, self.bucket
        self.group = group = context.groups[bucket.group]
        if isinstance(self.transport, Shard):
            # Gradients are local still: weights and state of this rank's pieces come with their mean.
            self.active = active = self.transport.local_operands()
            if self.transport.table is not None:
                # Touched rows are read off the same gradient.
                self.transport.table.pin_gradient(next(iter(active.gradients), None))
        else:
            self.active = active = self.cache.operands(bucket, group, context.state)
        units = self.units
        if units is not None:
            self._scales = self.cache.scales(bucket, group, units.all, units.shapes, _numbers_of_units)
        elif self._orthogonalizes and active.params:
            self._scales = self.cache.scales(bucket, group, active.members, self._shapes, _numbers_of)
        # AdamW counts the steps of a parameter also where this rank holds no entry of it.
        has_work = self.transport is not None or (
            bool(active.params) and (bucket.numel > 0 or not self._orthogonalizes)
        )
        self.has_local_work = has_work and not bucket.needs_comm
        self.counts = Counts(bucket, len(active.members), active.num_matrices, active.missing)
        self.ranges = ranges_of(self.number, bucket) if context.is_profiled else NO_RANGES
        self.is_guarded = context.skips_nonfinite or group.on_nonfinite != "propagate"
        every = group.telemetry_every
        is_due = every is not None and context.num_steps % every == 0
        self._is_sampled = is_due and not is_capturing(bucket.device)
        if self._is_sampled:
            # Old measurements are of another step, also where nothing is stepped now.
            context.measured[self.number] = {}

    def run(self, apply_mask: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice, each time while a message is under way, or never if it sends none.

        Args:
            apply_mask: () int32 on a device, zero if the whole step must change nothing; None for always.
        """
        bucket, group, units, transport = self.bucket, self.group, self.units, self.transport
        active, context = self.active, self._context

        # gradients
        if isinstance(transport, Shard):
            with self.ranges["send gradients"]:
                wait_for_mean = transport.start_gradients(active)
            yield
            with self.ranges["receive gradients"]:
                mean = wait_for_mean()  # (entries of this rank,)
            del wait_for_mean  # and the gradients that were sent
            # The mask waits on the device for other ranks: it comes after the first message has started.
            mask = self._step_mask(apply_mask)
            assert mask is not None
            if transport.table is not None:
                mask = transport.table.guarded(mask)  # (pieces of all ranks,)
            own_mask: Tensor | None = mask[transport.bucket.local_slice]
            active = transport.owned_operands(group, context.state, mean)
            del mean
        else:
            steps_all = apply_mask is None and context.is_single_rank
            mask = own_mask = None if steps_all else self._step_mask(apply_mask)

        if not self._orthogonalizes:
            if active.params:
                with self.ranges["update"]:
                    self._step_adamw(active, own_mask)
            if isinstance(transport, Shard) and mask is not None:
                transport.count_elsewhere(group, context.state, mask)
        elif active.params or isinstance(transport, Gather):
            # momentum. A rank without pieces takes part in the messages: it may own units.
            backend: UpdateBackend | None = None
            if active.params and self._offload is None:
                backend = self._backend(active, group, self.cache, own_mask)
            elif active.params and self._offload is not None:
                backend = self._offload.backend(self.number, active, group, own_mask, self._backend)
            directions: Tensor | None = None
            # State of the parameter's shape that a stage on whole matrices needs travels as the directions do.
            batches: dict[str, Tensor] = {}
            wait_for_state: Callable[[], dict[str, Tensor]] | None = None
            if backend is not None:
                with self.ranges["momentum"]:
                    directions = backend.directions()  # (b, m, n), or pieces of units (units, rows, columns)
                    if units is not None:
                        directions = directions.contiguous()
                if self._rule.matrix_state:
                    batches = self._read_state(active)
            # gather
            if isinstance(transport, Gather):
                with self.ranges["send directions"]:
                    wait_for_units = transport.start_gather(directions)
                    if self._rule.matrix_state:
                        wait_for_state = transport.start_gather_state(group, batches)
                directions, batches = None, {}
                yield
                with self.ranges["receive directions"]:
                    directions = wait_for_units()  # (owned, *unit shape)
                    batches = {} if wait_for_state is None else wait_for_state()  # each like the directions
                del wait_for_units
                wait_for_state = None
            # matrices
            assert directions is not None
            scales = self._scales
            if units is None:
                state = NO_STATE
                if self._rule.after:
                    moments = None if self._rule.neuron_state is None else self.cache.moments(group.view, active)
                    state = self._matrix_state(active.members, batches, moments)
                update, factor = self.compute_update(
                    active.members, directions, bucket.form, scales.view(-1, 1, 1), state, mask
                )
                factors = [factor]
            else:
                update, factors, batches = self._compute_units(directions, batches, scales, mask)
            del directions
            # scatter
            if isinstance(transport, Gather):
                wait_for_factors = None
                with self.ranges["send updates"]:
                    wait_for_pieces = transport.start_scatter(update)
                    if self._rule.neuron_state is not None:
                        wait_for_factors = transport.start_neurons(factors, self._unit_moments())
                    if self._rule.matrix_state:
                        wait_for_state = transport.start_scatter_state(batches)
                del update, factors
                batches = {}
                yield
                with self.ranges["receive updates"]:
                    update = wait_for_pieces()  # (units, *piece shape)
                    # Without NorMuon the factors are the scales, which every rank has.
                    factors = [] if wait_for_factors is None else wait_for_factors()
                    batches = {} if wait_for_state is None else wait_for_state()
                del wait_for_pieces, wait_for_factors, wait_for_state
            # write
            if backend is not None:
                with self.ranges["update weights"]:
                    if batches:
                        self._write_state(active, batches)
                    if units is not None or group.scale_decay:
                        update = update if update.ndim == 3 else as_rows(update)
                        backend.apply(update, self._factors_of_pieces(factors, scales))
                    else:
                        backend.apply(update, factors[0])
            del backend, update, factors, batches

        # publish
        if isinstance(transport, Shard):
            del active
            with self.ranges["send weights"]:
                wait_for_weights = transport.start_weights()
            yield
            with self.ranges["receive weights"]:
                wait_for_weights()
        for tie in self.copies:
            tie.write()

    # ------------------------------------------------------------------------------------- the phases, one by one

    def _step_mask(self, apply_mask: Tensor | None) -> Tensor | None:
        """Return int32 flags on the device, 0 for what must keep its bits: () or (n,); None if all is stepped.

        There is a flag for each matrix of a local bucket, each AdamW parameter, or each piece or unit of all ranks.
        """
        if not self.is_guarded:
            apply_mask = None
        elif apply_mask is not None:
            apply_mask = apply_mask.to(self.bucket.device, non_blocking=True)
        if self._context.is_single_rank:
            return apply_mask
        entries: Sequence[BucketMember | StateShard | ParameterUnit] = self.active.members
        if isinstance(self.bucket, Sharded):
            entries = self.bucket.shards
        elif self.units is not None:
            entries = self.units.all
        # (n,) int32: 1 where enough ranks have a gradient.
        present = self._context.consensus.step_mask(self.number, self.bucket, entries, self._flagged)
        if present is None or apply_mask is None:
            return apply_mask if present is None else present
        return present * apply_mask

    def _flagged(self, entries: Sequence[BucketMember | StateShard | ParameterUnit]) -> list[int]:
        """Return the position in the group of the parameter that each flag of the mask is for."""
        # Local matrices have a flag each, because the kernels read one for each matrix.
        if self.transport is None and self._orthogonalizes:
            return [member.index for member in self.active.members for _ in range(member.num_matrices)]
        return [entry.index for entry in entries]

    def _backend(self, active: Operands, group: Group, cache: BucketCache, mask: Tensor | None) -> UpdateBackend:
        """Return the element-wise passes over operands whose state is on the device; the mask is () or (matrices,).

        The cache belongs to the operands, and the group has their view: offloaded state has its own of both.
        """
        bucket = self.bucket
        if bucket.kernels == "torch":
            flags = [] if mask is None or mask.ndim == 0 else mask.tolist()
            present = None if all(flags) else _present(active, flags)
            return TorchBackend(bucket, group, active, present, cache.places)
        hyperparameters = self._context.hyperparameters_of(bucket.group, bucket.device)
        return TritonBackend(bucket, group, active, cache, hyperparameters, mask)

    def _step_adamw(self, active: Operands, mask: Tensor | None) -> None:
        """Step AdamW parameters, or pieces of them; the mask is () or (members,)."""
        bucket, group = self.bucket, self.group
        pieces: Iterable[OffloadedPart] = [OffloadedPart(active, self.cache, slice(None))]
        # State in host memory comes piece by piece, each of a bounded size.
        if self._offload is not None:
            pieces = self._offload.parts(self.number, active)
        for piece in pieces:
            own_mask = mask if mask is None or mask.ndim == 0 else mask[piece.members]
            if bucket.kernels == "torch":
                operands = piece.active
                if own_mask is not None and own_mask.ndim and not bool(own_mask.all()):
                    operands = _those_stepped(operands, own_mask)
                step_adamw(bucket, group, operands)
            else:
                hyperparameters = self._context.hyperparameters_of(bucket.group, bucket.device)
                step_adamw_triton(bucket, group, piece.active, piece.cache, hyperparameters, own_mask)

    def _unit_moments(self) -> list[list[Tensor]]:
        """Return for each kind the second moments of all units, each (1, m, 1) or (1, 1, n), sharing memory."""
        units = self.units
        assert units is not None

        def make() -> list[list[Tensor]]:
            moments: list[list[Tensor]] = [[] for _ in units.kinds]
            for unit in units.all:
                param = self.group.params[unit.index]
                state = self._context.state[param][NEURON_MOMENT]
                blocks = second_moments(state, param.shape, self.group.view)
                for kind, (block, matrix) in enumerate(unit.unit.matrices):
                    moments[kind].append(blocks[block][matrix : matrix + 1])
            return moments

        return self.cache.cached("moments", None, make)

    def _read_state(self, active: Operands) -> dict[str, Tensor]:
        """Return by name copies (b, m, n), in order like directions, of state that stages on whole matrices need."""
        with nullcontext() if self._offload is None else self._offload.reachable():
            return {
                spec.name: self.cache.places.read(
                    active, self.group.view, [state[spec.name] for state in active.states]
                )
                for spec in self._rule.matrix_state
            }

    def _write_state(self, active: Operands, batches: Mapping[str, Tensor]) -> None:
        """Store what `_read_state` returned, advanced by its owners, as pieces (units, *piece shape) too."""
        with nullcontext() if self._offload is None else self._offload.reachable():
            for name, batch in batches.items():
                self.cache.places.write(active, self.group.view, [state[name] for state in active.states], batch)

    def _matrix_state(
        self,
        members: Sequence[BucketMember],
        batches: Mapping[str, Tensor],
        moments: Sequence[Tensor] | None,
        kind: int = 0,
    ) -> MatrixState:
        """Return the state of a batch of matrices, of the kind with this number in a unit."""
        if moments is None:
            return MatrixState(batches)
        names = (member.name for member in members)
        return MatrixState(batches, moments, self.cache.neuron_table(self.bucket, moments, names, kind))

    def _compute_units(
        self, directions: Tensor, batches: Mapping[str, Tensor], scales: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Return the updates of this rank's units, for each kind factors (b, m or 1, n or 1), and the state advanced.

        Args:
            directions: (owned, *unit shape) contiguous.
            batches: by name state that stages on whole matrices need, each like the directions.
            scales: (units of all ranks, kinds).
            mask: (units of all ranks,); where it is zero, state keeps its bits.
        """
        bucket, units = self.bucket, self.units
        assert units is not None
        normalizes, owned = self._rule.neuron_state is not None, units.local_slice
        own_batches: list[dict[str, Tensor]] = [{}] * len(units.kinds)  # for each kind (owned, m, n) by name
        if batches:
            split = {n: split_units(batch.view(len(batch), *units.shape), units) for n, batch in batches.items()}
            own_batches = [
                {name: blocks[number].flatten(1, 2).contiguous() for name, blocks in split.items()}
                for number, _ in enumerate(units.kinds)
            ]
        directions = directions.view(len(directions), *units.shape)
        scales, mask = scales[owned], None if mask is None else mask[owned]
        moments = [of_kind[owned] for of_kind in self._unit_moments()] if normalizes else None
        updates, factors = [], []
        # The matrices of one kind are orthogonalised together: one for each unit.
        for number, (kind, block) in enumerate(zip(units.kinds, split_units(directions, units), strict=True)):
            matrices = block.flatten(1, 2)  # (owned, g, r, n) -> (owned, m, n)
            if bucket.kernels == "torch":
                # The last bit of a product may follow from strides, which differ between layouts.
                matrices = matrices.contiguous()
            factor = scales[:, number].view(-1, 1, 1)
            if len(matrices):
                of_kind = None if moments is None else moments[number]
                members = units.local_matrices[number]
                state = NO_STATE
                if self._rule.after:
                    state = self._matrix_state(members, own_batches[number], of_kind, number)
                update, factor = self.compute_update(members, matrices, kind.form, factor, state, mask, number)
            else:
                # A new tensor: a view would keep the directions alive.
                update = torch.empty_like(matrices, dtype=update_dtype(kind.form, bucket.dtype))
                if normalizes:
                    factor = scales.new_empty((0, *second_moment_shape(*kind.shape)))
            updates.append(update)
            factors.append(factor)
        advanced: dict[str, Tensor] = {}
        if batches:
            advanced = {name: join_units([own[name] for own in own_batches], units) for name in batches}
        return join_units(updates, units), factors, advanced

    def _factors_of_pieces(self, factors: Sequence[Tensor], scales: Tensor) -> Tensor:
        """Return the factors of this rank's pieces, (b, rows or 1, columns or 1); with `scale_decay` (2b, ...).

        Args:
            factors: for each kind (b, m or 1, n or 1); none where they are the scales.
            scales: for each matrix (matrices, 1), or (units of all ranks, kinds).
        """
        units, transport = self.units, self.transport
        if isinstance(transport, Shard) and units is not None:
            scales = scales[units.local_slice]
        columns = scales.view(*scales.shape, 1, 1).unbind(1)  # for each kind (b, 1, 1)
        # Without NorMuon nothing came with the updates: every rank has the scales.
        factors = factors or columns
        if self.group.scale_decay:
            # The factors of decay stand behind the factors of the updates: (2b, ...).
            factors = [torch.cat([f, scale.expand_as(f)]) for f, scale in zip(factors, columns, strict=True)]
        if units is None or (len(factors) == 1 and factors[0].shape[1:] == (1, 1)):
            return factors[0]  # one number for each matrix
        piece = transport.bucket.exchange.piece if isinstance(transport, Gather) else None
        return factors_of_pieces(factors, units, piece)

    def compute_update(
        self,
        members: Sequence[BucketMember],
        directions: Tensor,
        form: Form | None,
        scales: Tensor,
        state: MatrixState,
        mask: Tensor | None,
        kind: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return updates (b, m, n) in `update_dtype`, and factors (b, m or 1, n or 1): all but the learning rate.

        Args:
            members: the matrices, in order, for telemetry and errors.
            directions: (b, m, n), of matrices of one kind.
            form: how they are orthogonalised; None for the group's function.
            scales: (b, 1, 1), the learning-rate scale times the own multiplier.
            state: of the batch; it is advanced.
            mask: () or (b,) int32 on the device; where it is zero, state keeps its bits. None for nowhere.
            kind: the number of the kind in a unit.
        """
        rule, group, bucket = self._rule, self.group, self.bucket
        prepared = directions
        if rule.before:
            with self.ranges[rule.before[0].label]:
                prepared = rule.prepare(directions, state.batches, group)
        with self.ranges["orthogonalize"]:
            polar = orthogonalized(prepared, form, bucket, group)
        del prepared
        update, factors = polar, scales
        if rule.after:
            update, factors = apply_after(rule, polar, scales, state, group, mask, self.ranges)
        if self._is_sampled:
            values = measure(directions, polar, update, factors)
            self._context.measured[self.number][kind] = Measured(list(members), values, mask)
        return update, factors


def orthogonalized(directions: Tensor, form: Form | None, bucket: Bucket, group: Group) -> Tensor:
    """Return the polar factors (b, m, n) of a bucket's directions: a new tensor, in `update_dtype`."""
    if form is not None:
        return apply_form(directions, form, bucket.kernels)
    assert callable(group.orthogonalizer)
    return apply_function(directions, group.orthogonalizer, bucket.name)


def _numbers_of(members: Sequence[BucketMember]) -> list[tuple[int]]:
    return [(member.first_matrix + i,) for member in members for i in range(member.num_matrices)]


def _numbers_of_units(units: Sequence[ParameterUnit]) -> list[tuple[int, ...]]:
    return [unit.first_matrices for unit in units]


def _present(active: Operands, flags: Sequence[int]) -> list[bool]:
    """Return for each member whether all of its matrices are stepped, given a flag for each matrix."""
    # Each member takes all of its flags from the iterator, so that the next one finds its own.
    of_matrices = iter(flags)
    return [all([*islice(of_matrices, member.num_matrices)]) for member in active.members]


def _those_stepped(active: Operands, mask: Tensor) -> Operands:
    """Return the members that are stepped; waits for the device."""
    rows = zip(active.gradients, mask.tolist(), strict=True)
    return active.present([gradient if flag else None for gradient, flag in rows])


def run_overlapping(
    steps: Sequence[Iterator[None]], schedule: Schedule | None = None, local: Iterable[Iterator[None]] = ()
) -> None:
    """Run generators that yield twice, while a message is under way; others compute in that time.

    Args:
        steps: the generators; all ranks of a process group run the same ones in the same order.
        schedule: whose turn it is, by number; None: each starts before the work on the one before it, and is finished
            after the work on the next.
        local: generators without messages, which run one after the other where the schedule has None.
    """
    for number in prefetch_one_schedule(len(steps)) if schedule is None else schedule:
        if number is not None:
            next(steps[number], None)
            continue
        for step in local:
            for _ in step:
                pass  # it has nothing to wait for
