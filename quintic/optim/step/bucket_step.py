"""The step of one bucket of the plan. The whole algorithm is `BucketStep.run`.

A step goes through these phases in order. A rank works on the pieces of parameters that it holds or, where state is
sharded, on the pieces that it owns. Phases with an arrow send a message:

    gradients   sharded state: gradients -> the owners of their entries, who average them over the ranks
    momentum    momentum advances and gives the directions: (b, m, n), or pieces of units (units, rows, columns)
    gather      matrices in pieces: directions -> the owners of the matrices
    matrices    the owner has whole matrices: the polar step (`polar/orthogonalize.py`), and the rule's stages before
                and after it (`polar/matrix_stages.py`)
    scatter     matrices in pieces: updates and their numbers -> the ranks that hold the pieces
    write       weights decay and step against the updates
    publish     sharded state: weights -> all ranks

A bucket with a `transports.Shard` has the phases gradients and publish, one with a `transports.Gather` has gather and
scatter, and one without a transport has none of these four. AdamW's parameters have no matrices: one element-wise
update takes the place of the phases from momentum to write.

What holds throughout:

- All ranks of a process group start the same messages in the same order, with or without gradients. Which parameters
  are stepped is decided on the device, by a mask: where it is zero, weights and state keep their bits.
- `run` yields exactly twice if the bucket has a transport, each time after starting a message and before waiting for
  it, so that other buckets can compute in that time (`run_overlapping`). Without a transport it never yields.
- The host does not wait for the device, with two exceptions: plain PyTorch reads the mask on the host, and a sparse
  table's counts of touched rows must be known before its rows are sent (`sparse_rows.py`).
- Before `run` yields, it deletes the names of tensors that it no longer needs. The message then has the only reference
  and frees their memory when it has arrived, which the plan's bound on temporary memory counts on (`plan/workspace/`).
- Once gradients are read for good, `run` clears the list in `Operands.gradients`, which this step alone has. With
  `release_gradients` it holds the last references, so that later buckets can use the memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from quintic.optim.comms.communicators import Communicators
from quintic.optim.groups.group import Group
from quintic.optim.groups.ties import Tie
from quintic.optim.layout.pieces import Piece, take_matrices
from quintic.optim.layout.views import View
from quintic.optim.plan.bucket import Bucket, Sharded
from quintic.optim.plan.kinds import update_dtype
from quintic.optim.plan.offload_size import DIRECTIONS, WEIGHTS
from quintic.optim.plan.schedule import Schedule, prefetch_one_schedule
from quintic.optim.polar.forms import Form
from quintic.optim.polar.matrix_stages import NO_STATE, MatrixState, apply_stages, constrained
from quintic.optim.polar.orthogonalize import apply_form, apply_function
from quintic.optim.rules.device import DeviceHyperparameters, is_capturing
from quintic.optim.rules.elementwise import wide_weight
from quintic.optim.rules.stages import WEIGHT, StageOptions, vector_shape
from quintic.optim.state.state import master_of, vectors_of
from quintic.optim.step.consensus import RankConsensus
from quintic.optim.step.offload.offload import Offload
from quintic.optim.step.offload.pieces import BLOCKS, BucketPiece
from quintic.optim.step.operands import BucketCache, Operands, State
from quintic.optim.step.ranges import NO_RANGES, Ranges, ranges_of
from quintic.optim.step.telemetry import Counts, Measured, measure
from quintic.optim.step.torch_backend import (
    StagedBackend,
    TorchBackend,
    UpdateBackend,
    read_matrices,
    step_adamw,
    write_matrices,
)
from quintic.optim.step.transports import Gather, Shard, Transport, as_rows, factors_of_pieces, join_units, split_units
from quintic.optim.step.triton_backend import TritonBackend, step_adamw_triton

__all__ = ["NO_OPERANDS", "BucketStep", "StepContext", "orthogonalized", "run_overlapping"]

# A bucket has these operands between steps, so that it keeps no gradient alive.
NO_OPERANDS = Operands((), [], [], [], 0)

# For rules without stages, which read none.
_NO_OPTIONS = StageOptions()

# The context of computations whose state is on the device anyway.
_ON_DEVICE = nullcontext[Sequence[Mapping[str, Tensor]]](())


@dataclass(slots=True)
class StepContext:
    """The objects that all buckets of a plan are stepped with, and facts about the step that runs."""

    # The parameter groups with their present options; `PlanCache` puts new ones here when options change.
    groups: Sequence[Group]
    state: State
    communicators: Communicators
    consensus: RankConsensus
    # Loads state from host memory and stores it there; None if no group has `offload=True`.
    offload: Offload | None = None
    # Whether this rank steps without gradients or decisions of other ranks; False until ranks have compared plans.
    is_single_rank: bool = False
    # Steps made before this one.
    num_steps: int = 0
    # Whether a profiler runs: then each phase of each bucket is a named range in the profile.
    is_profiled: bool = False
    # Whether gradients that are not finite stop this step of all groups, even with `on_nonfinite="propagate"`.
    skips_nonfinite: bool = False
    # Index of a bucket -> index of a kind of matrix in its units -> telemetry of the last sampled step.
    measured: dict[int, dict[int, Measured]] = field(default_factory=dict)
    # (index of a group, device) -> its learning rate, momentum and so on in the memory of the device.
    hyperparameters: dict[tuple[int, torch.device], DeviceHyperparameters] = field(default_factory=dict)

    def hyperparameters_of(self, number: int, device: torch.device) -> DeviceHyperparameters:
        """Return the current hyperparameters of the group with this index, as tensors on a device."""
        on_device = self.hyperparameters.get((number, device))
        if on_device is None:
            on_device = self.hyperparameters[number, device] = DeviceHyperparameters(device)
        group = self.groups[number]
        # Every bucket asks at every step. Groups are frozen: a group with changed options is another object.
        if on_device.is_of is not group:
            on_device.update(group.hyperparameters, group.lr_ratio)
            on_device.is_of = None if on_device.is_live else group
        return on_device


class BucketStep:
    """Steps one bucket of a plan.

    Args:
        number: the bucket's position in the plan.
        bucket: the plan's description of the matrices or parameters to step.
        transport: sends the bucket's messages; None if this rank has weights, gradients and state whole.
        cache: tensors on the bucket's device, other than state, that are kept between steps.
        context: objects and facts that all buckets of the plan have in common.
    """

    def __init__(
        self, number: int, bucket: Bucket, transport: Transport | None, cache: BucketCache, context: StepContext
    ) -> None:
        self.number, self.bucket, self.cache, self._context = number, bucket, cache, context
        self.transport = transport
        self._rule = rule = bucket.rule
        self._orthogonalizes = rule.orthogonalizes
        # The units of all ranks; None if this rank has the matrices whole, and for AdamW.
        self.units = bucket.units
        # The (m, n) of the matrices that this rank has whole; AdamW's (0, 0) is never used.
        self._shapes = [bucket.shape or (0, 0)]
        is_offloaded = context.offload is not None and context.offload.is_offloaded(number)
        self._offload = context.offload if is_offloaded else None
        # The bucket's group with its present options; `begin` brings it up to date.
        self.group = context.groups[bucket.group]
        # Within a step: the parameters or pieces that have a gradient, with their tensors.
        self.active = NO_OPERANDS
        # The numbers of matrices and parameters that the last step stepped.
        self.counts = Counts(bucket, 0, 0, ())
        # Parameters tied to the bucket's, whose weights are copied when the bucket has been stepped.
        self.copies: list[Tie] = []
        # Within a step: the profiler's ranges, by phase.
        self.ranges: Ranges = NO_RANGES
        # Whether gradients that are not finite stop this step of the bucket.
        self.is_guarded = False
        # The factor that `adjust_lr` gives a matrix times its entry in `lr_multipliers`: (matrices, 1), or with units
        # (units of all ranks, kinds). In this file `scales` always means these numbers.
        self._scales = torch.empty(0)
        # Within a step: whether this rank steps anything here and the bucket sends no messages.
        self.has_local_work = False
        # Within a step: whether it measures updates for telemetry.
        self._is_sampled = False

    # ------------------------------------------------------------------------------------------------- the algorithm

    def begin(self) -> None:
        """Find the gradients, weights and state of a step."""
        context, bucket = self._context, self.bucket
        self.group = group = context.groups[bucket.group]
        if isinstance(self.transport, Shard):
            # These are whole gradients of this rank, not averaged yet. Weights and state of the owned pieces follow
            # in `run`, when the mean has arrived.
            self.active = active = self.transport.local_operands()
            if self.transport.table is not None:
                # The table finds its touched rows in the same gradient that is sent.
                self.transport.table.pin_gradient(next(iter(active.gradients), None))
        else:
            self.active = active = self.cache.operands(bucket, group, context.state)
        units = self.units
        if units is not None:
            self._scales = self.cache.scales(bucket, group, units.all, units.shapes)
        elif self._orthogonalizes and active.params:
            self._scales = self.cache.scales(bucket, group, active.members, self._shapes)
        # An AdamW parameter without entries on this rank is still stepped: its count of steps must advance.
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
            # Forget measurements of an earlier step, even if nothing is stepped now.
            context.measured[self.number] = {}

    def run(self, apply_mask: Tensor | None) -> Iterator[None]:
        """Step the bucket; yields twice if it has a transport, each time while a message is under way, else never.

        Args:
            apply_mask: () int32 on a device: 0 if non-finite gradients stop the step, so that buckets whose group acts
                on them change nothing; None if nothing can stop it.
        """
        bucket, group, units, transport = self.bucket, self.group, self.units, self.transport
        active, context = self.active, self._context

        # gradients
        if isinstance(transport, Shard):
            with self.ranges["send gradients"]:
                wait_for_mean = transport.start_gradients(active)
            # The message has a copy of the gradients, or refers to them until it has arrived.
            active.gradients.clear()
            if transport.table is not None:
                transport.table.unpin()
            yield
            with self.ranges["receive gradients"]:
                mean = wait_for_mean()  # (entries of this rank,)
            del wait_for_mean  # frees the gradients that were sent, too
            # The device waits for other ranks to make the mask, so the first message starts before.
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
                    if self._offload is None:
                        self._step_adamw(active, self.cache, own_mask)
                    else:
                        self._step_adamw_pieces(self._offload, active, own_mask)
                active.gradients.clear()
            if isinstance(transport, Shard) and mask is not None:
                transport.count_unowned_steps(group, context.state, mask)
        elif active.params or isinstance(transport, Gather):
            # momentum. A rank without pieces has no backend but sends and receives messages, since it may own units.
            backend: UpdateBackend | None = None
            piece: BucketPiece | None = None
            operands, own_group, cache = active, group, self.cache
            if active.params:
                if self._offload is not None:
                    (piece,) = self._offload.pieces(self.number)
                    operands, own_group, cache = piece.operands(active), replace(group, view=BLOCKS), piece.cache
                backend = self._backend(operands, own_group, cache, own_mask)
            directions: Tensor | None = None
            # Name -> state of the parameter's shape that a stage on whole matrices needs. It goes to the owner and
            # comes back in messages like the ones of directions and updates.
            batches: dict[str, Tensor] = {}
            wait_for_state: Callable[[], dict[str, Tensor]] | None = None
            if backend is not None:
                with self.ranges["momentum"], _ON_DEVICE if piece is None else piece.loaded(DIRECTIONS) as states:
                    directions = backend.directions()  # (b, m, n), or pieces of units (units, rows, columns)
                    if units is not None:
                        directions = directions.contiguous()
                    if self._rule.sent_state:
                        batches = self._read_state(operands, own_group.view, cache, states or operands.states)
                if not isinstance(transport, Shard):
                    # The pieces of offloaded buckets have lists of their own.
                    active.gradients.clear()
                    operands.gradients.clear()
            # gather
            if isinstance(transport, Gather):
                with self.ranges["send directions"]:
                    wait_for_units = transport.start_gather(directions)
                    if self._rule.sent_state:
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
                if self._rule.stages:
                    vectors = {
                        spec.name: self.cache.vectors(spec, group.view, active) for spec in self._rule.vector_state
                    }
                    state = self._matrix_state(active.members, batches, vectors)
                update, of_matrices = self.compute_update(
                    active.members, directions, bucket.form, scales.view(-1, 1, 1), state, mask
                )
                numbers = [of_matrices]
                batches = self._advanced(batches) if batches else batches
            else:
                update, numbers, batches = self._compute_units(directions, batches, scales, mask)
            del directions
            # scatter
            if isinstance(transport, Gather):
                wait_for_numbers = None
                with self.ranges["send updates"]:
                    wait_for_pieces = transport.start_scatter(update)
                    if self._rule.numbers or self._rule.vector_state:
                        wait_for_numbers = transport.start_numbers(numbers, self._unit_vectors())
                    if self._rule.matrix_state:
                        wait_for_state = transport.start_scatter_state(batches)
                del update, numbers
                batches = {}
                yield
                with self.ranges["receive updates"]:
                    update = wait_for_pieces()  # (units, *piece shape)
                    # Without numbers of its own a rule has only the scales as factors, which every rank has already.
                    numbers = [] if wait_for_numbers is None else wait_for_numbers()
                    batches = {} if wait_for_state is None else wait_for_state()
                del wait_for_pieces, wait_for_numbers, wait_for_state
            # write
            if backend is not None:
                with self.ranges["update weights"]:
                    of_pieces = numbers[0] if numbers else []
                    if units is not None or group.scale_decay:
                        update = update if update.ndim == 3 else as_rows(update)
                        of_pieces = self._numbers_of_pieces(numbers, scales)
                    with _ON_DEVICE if piece is None else piece.loaded(WEIGHTS) as states:
                        if batches:
                            self._write_state(operands, own_group.view, cache, states or operands.states, batches)
                        backend.apply(update, *of_pieces)
                    del of_pieces
            del backend, operands, update, numbers, batches

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
        """Return the mask of the step, int32 on the device; None if everything is stepped.

        Its shape is (), or (n,) with one flag for each matrix that this rank has whole, each AdamW parameter, each unit
        or each piece of a `Sharded` bucket; pieces and units of all ranks have flags. Where a flag is 0, weights and
        state keep their bits.
        """
        if not self.is_guarded:
            apply_mask = None  # the group propagates gradients that are not finite
        elif apply_mask is not None:
            apply_mask = apply_mask.to(self.bucket.device, non_blocking=True)
        if self._context.is_single_rank:
            return apply_mask
        pieces: Sequence[Piece] = self.active.members
        if isinstance(self.bucket, Sharded):
            pieces = self.bucket.shards
        elif self.units is not None:
            pieces = self.units.all
        # (n,) int32: 1 if enough ranks have a gradient for the parameter to be stepped (`consensus.py`).
        present = self._context.consensus.step_mask(self.number, self.bucket, pieces)
        if present is None or apply_mask is None:
            return apply_mask if present is None else present
        return present * apply_mask

    def _backend(self, active: Operands, group: Group, cache: BucketCache, mask: Tensor | None) -> UpdateBackend:
        """Return the element-wise passes over operands whose state is on the device; the mask is () or (matrices,).

        Group and cache are the bucket's own, or with offload made for the operands, which have another view than the
        parameters.
        """
        bucket = self.bucket
        backend: UpdateBackend
        if bucket.kernels == "torch":
            flags = [] if mask is None or mask.ndim == 0 else mask.tolist()
            present = None if all(flags) else _present(active, flags)
            backend = TorchBackend(bucket, group, active, cache, present)
        else:
            hyperparameters = self._context.hyperparameters_of(bucket.group, bucket.device)
            backend = TritonBackend(bucket, group, active, cache, hyperparameters, mask)
        rule = self._rule
        if rule.gradient_stage is None and rule.constrain is None and rule.drift is None:
            return backend
        return StagedBackend(backend, bucket, group, active, cache, self._stage_options(), mask)

    def _stage_options(self) -> StageOptions:
        """Return the numbers that stages read: with kernels on the device, where captured steps find new ones."""
        if self.bucket.kernels == "torch":
            return self.group.stage_options
        hyperparameters = self._context.hyperparameters_of(self.bucket.group, self.bucket.device)
        return hyperparameters.stage_options(self.group)

    def _step_adamw(self, active: Operands, cache: BucketCache, mask: Tensor | None) -> None:
        """Step AdamW parameters, or a piece of them, whose state is on the device; the mask is () or (members,)."""
        bucket, group = self.bucket, self.group
        if bucket.kernels == "triton":
            hyperparameters = self._context.hyperparameters_of(bucket.group, bucket.device)
            step_adamw_triton(bucket, group, active, cache, hyperparameters, mask)
            return
        if mask is not None and mask.ndim and not bool(mask.all()):
            active = _unmasked(active, mask)
        step_adamw(bucket, group, active)

    def _step_adamw_pieces(self, offload: Offload, active: Operands, mask: Tensor | None) -> None:
        """Step AdamW parameters with state in host memory; the mask is () or (members,)."""
        # Each piece is updated while the next is loaded and the one before is stored.
        for piece in offload.pieces(self.number):
            own_mask = mask if mask is None or mask.ndim == 0 else mask[piece.members]
            with piece.loaded(DIRECTIONS):
                self._step_adamw(piece.operands(active), piece.cache, own_mask)

    def _unit_vectors(self) -> list[dict[str, list[Tensor]]]:
        """Return for each kind by name the vectors of all units, each (1, m or 1, n or 1), as views of the state."""
        units = self.units
        assert units is not None

        def make() -> list[dict[str, list[Tensor]]]:
            specs = self._rule.vector_state
            vectors: list[dict[str, list[Tensor]]] = [{spec.name: [] for spec in specs} for _ in units.kinds]
            for unit in units.all:
                param = self.group.params[unit.index]
                for spec in specs:
                    blocks = vectors_of(spec, self._context.state[param][spec.name], param.shape, self.group.view)
                    for of_kind, matrix in zip(vectors, unit.matrices, strict=True):
                        of_kind[spec.name].append(take_matrices(blocks, (matrix,)))
            return vectors

        return self.cache.cached("vectors", None, make)

    def _read_state(
        self, operands: Operands, view: View, cache: BucketCache, states: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return copies, (b, m, n) by name, of state that stages on whole matrices need, in the order of directions.

        If they read weights, these are there under `WEIGHT`, with the bits of their masters.
        """
        batches: dict[str, Tensor] = {}
        for spec in self._rule.sent_state:
            tensors = [state[spec.name] for state in states] if spec.name != WEIGHT else []
            if spec.name == WEIGHT:
                masters = map(master_of, states)
                tensors = [wide_weight(p, m) for p, m in zip(operands.params, masters, strict=True)]
            batches[spec.name] = read_matrices(operands, view, cache, tensors)
        return batches

    def _advanced(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batches of state, without the weights, which stages only read."""
        return {name: batch for name, batch in batches.items() if name != WEIGHT}

    def _write_state(
        self,
        operands: Operands,
        view: View,
        cache: BucketCache,
        states: Sequence[Mapping[str, Tensor]],
        batches: Mapping[str, Tensor],
    ) -> None:
        """Store batches from `_read_state` that owners advanced: (b, m, n), or for pieces (units, *piece shape)."""
        # A loop in `run` would leave a name for a batch behind, which would keep it until the weights have arrived.
        for name, batch in batches.items():
            write_matrices(operands, view, cache, [state[name] for state in states], batch)

    def _matrix_state(
        self,
        members: Sequence[Piece],
        batches: Mapping[str, Tensor],
        vectors: Mapping[str, Sequence[Tensor]],
        kind: int = 0,
    ) -> MatrixState:
        """Return the state of a batch of matrices.

        Args:
            members: the matrices, in order.
            batches: by name state (b, m, n) of the parameter's shape.
            vectors: by name vectors of the batch, each (matrices, m or 1, n or 1).
            kind: the index of the matrices' kind in a unit.
        """
        addresses: dict[str, Tensor] = {}
        if self.bucket.kernels == "triton":
            for name in self._rule.vectors_of_kernels:
                names = (member.name for member in members)
                addresses[name] = self.cache.vector_table(self.bucket, name, vectors[name], names, kind)
        return MatrixState(batches, vectors, addresses)

    def _compute_units(
        self, directions: Tensor, batches: Mapping[str, Tensor], scales: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, list[list[Tensor]], dict[str, Tensor]]:
        """Return updates, numbers and advanced state of the units that this rank owns.

        Updates and state are (owned, *unit shape); for each kind there are the rule's numbers, or its factors alone,
        each (owned, m or 1, n or 1).

        Args:
            directions: (owned, *unit shape) contiguous.
            batches: by name state that stages on whole matrices need, each (owned, *unit shape), or nothing.
            scales: (units of all ranks, kinds).
            mask: () or (units of all ranks,) int32; where it is zero, state keeps its bits. None for nowhere.
        """
        bucket, units = self.bucket, self.units
        assert units is not None
        owned = units.local_slice
        own_batches: list[dict[str, Tensor]] = [{}] * len(units.kinds)  # for each kind (owned, m, n) by name
        if batches:
            split = {n: split_units(batch.view(len(batch), *units.shape), units) for n, batch in batches.items()}
            own_batches = [
                {name: blocks[number].flatten(1, 2).contiguous() for name, blocks in split.items()}
                for number, _ in enumerate(units.kinds)
            ]
        directions = directions.view(len(directions), *units.shape)
        scales, mask = scales[owned], None if mask is None else mask[owned]
        updates, numbers = [], []
        # A batch is the matrices of one kind, one from each owned unit.
        for number, (kind, block) in enumerate(zip(units.kinds, split_units(directions, units), strict=True)):
            matrices = block.flatten(1, 2)  # (owned, g, r, n) -> (owned, m, n)
            if bucket.kernels == "torch":
                # Strides may change the last bit of a product, and they differ between layouts: a copy has the same
                # strides in all of them.
                matrices = matrices.contiguous()
            factor = scales[:, number].view(-1, 1, 1)
            if len(matrices):
                members = units.local_matrices[number]
                state = NO_STATE
                if self._rule.stages:
                    of_kind = self._unit_vectors()[number] if self._rule.vector_state else {}
                    own_vectors = {name: vectors[owned] for name, vectors in of_kind.items()}
                    state = self._matrix_state(members, own_batches[number], own_vectors, number)
                update, of_matrices = self.compute_update(members, matrices, kind.form, factor, state, mask, number)
            else:
                # This rank owns no unit. The result is a new tensor, because a view would keep the directions alive.
                update = torch.empty_like(matrices, dtype=update_dtype(kind.form, bucket.dtype))
                of_matrices = [factor]
                if self._rule.numbers:
                    shapes = [vector_shape(shape, *kind.shape) for shape in self._rule.numbers]
                    of_matrices = [scales.new_empty((0, *shape)) for shape in shapes]
            updates.append(update)
            numbers.append(of_matrices)
        advanced: dict[str, Tensor] = {}
        if batches:
            names = self._advanced(own_batches[0])
            advanced = {name: join_units([own[name] for own in own_batches], units) for name in names}
        return join_units(updates, units), numbers, advanced

    def _numbers_of_pieces(self, numbers: Sequence[Sequence[Tensor]], scales: Tensor) -> list[Tensor]:
        """Return the numbers of this rank's pieces, (b, rows or 1, columns or 1) each, for `UpdateBackend.apply`.

        Args:
            numbers: for each kind the rule's numbers, each (b, m or 1, n or 1); empty if the scales are the only ones.
            scales: for each matrix (matrices, 1), or (units of all ranks, kinds).
        """
        units, transport = self.units, self.transport
        if isinstance(transport, Shard) and units is not None:
            scales = scales[units.local_slice]
        columns = scales.view(*scales.shape, 1, 1).unbind(1)  # for each kind (b, 1, 1)
        of_pieces: list[Tensor] = []
        # One number after the other, each of all kinds.
        for factors in zip(*numbers, strict=True) if any(numbers) else [columns]:
            if self.group.scale_decay:
                # The pass that writes weights wants factors of updates, then factors of decay: (2b, ...).
                factors = tuple(torch.cat([f, scale.expand_as(f)]) for f, scale in zip(factors, columns, strict=True))
            if units is None or (len(factors) == 1 and factors[0].shape[1:] == (1, 1)):
                of_pieces.append(factors[0])  # one number for each matrix
                continue
            piece = transport.bucket.exchange.piece if isinstance(transport, Gather) else None
            of_pieces.append(factors_of_pieces(factors, units, piece))
        return of_pieces

    def compute_update(
        self,
        members: Sequence[Piece],
        directions: Tensor,
        form: Form | None,
        scales: Tensor,
        state: MatrixState,
        mask: Tensor | None,
        kind: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return updates (b, m, n) in `update_dtype`, and the numbers (b, m or 1, n or 1) that they are written with.

        These are the factors of updates, which contain everything but the learning rate, or the factors of weights and
        of updates, which contain it, too.

        Args:
            members: the matrices, in order, for telemetry and errors.
            directions: (b, m, n), of matrices of one kind.
            form: how they are orthogonalised; None for the function that the user gave as the group's orthogonalizer.
            scales: (b, 1, 1), the factor from `adjust_lr` times the matrix' entry in `lr_multipliers`.
            state: the state of these matrices, which is advanced in place.
            mask: () or (b,) int32 on the device; where it is zero, state keeps its bits. None for nowhere.
            kind: the index of the matrices' kind in a unit.
        """
        rule, group, bucket = self._rule, self.group, self.bucket
        options = self._stage_options() if rule.stages else _NO_OPTIONS
        prepared = directions
        if rule.before:
            # No stage before the polar step has factors.
            prepared, _ = apply_stages(rule.before, directions, scales, state, options, mask, self.ranges)
        with self.ranges["orthogonalize"]:
            if rule.polar is None:
                polar = orthogonalized(prepared, form, bucket, group)
            else:
                polar = rule.polar.apply(prepared, lambda x: orthogonalized(x, form, bucket, group))
        del prepared
        update, factors = polar, scales
        if rule.after:
            # Before a stage that constrains weights, factors are of the update alone.
            base = scales if rule.constrain is None else torch.ones_like(scales)
            update, factors = apply_stages(rule.after, polar, base, state, options, mask, self.ranges)
        if self._is_sampled:
            values = measure(directions, polar, update, factors)
            self._context.measured[self.number][kind] = list(members), values, mask
        if rule.constrain is None:
            return update, [factors]
        # The update is rounded with its factors, in every layout, so that all constrain the same bits.
        if rule.factors is not None:
            update = (update * factors).to(update.dtype)
        with self.ranges[rule.constrain.label]:
            return update, list(constrained(rule.constrain, update, scales, state, options, mask))


def orthogonalized(directions: Tensor, form: Form | None, bucket: Bucket, group: Group) -> Tensor:
    """Return the polar factors (b, m, n) of a bucket's directions, in `update_dtype`.

    A form makes a new tensor. A user's function returns a tensor of the user's, which nothing may change in place.
    """
    if form is not None:
        return apply_form(directions, form, bucket.kernels)
    assert callable(group.orthogonalizer)
    return apply_function(directions, group.orthogonalizer, bucket.name)


def _present(active: Operands, flags: Sequence[int]) -> list[bool]:
    """Return for each member whether all of its matrices are stepped, given a flag for each matrix."""
    # A list of all flags of a member is made first: `all` alone would stop at a zero, and the next member would read
    # the flags that were left.
    of_matrices = iter(flags)
    return [all([*islice(of_matrices, member.batch_size)]) for member in active.members]


def _unmasked(active: Operands, mask: Tensor) -> Operands:
    """Return the operands whose flag in the mask, (members,), is not zero; the host waits for the device."""
    rows = zip(active.gradients, mask.tolist(), strict=True)
    return active.present([gradient if flag else None for gradient, flag in rows])


def run_overlapping(
    steps: Sequence[Iterator[None]], schedule: Schedule | None = None, local: Iterable[Iterator[None]] = ()
) -> None:
    """Run generators that yield twice, each time while a message is under way, so that others compute in that time.

    Args:
        steps: generators with messages; all ranks of a process group run the same ones in the same order.
        schedule: positions in `steps`, in the order in which these generators continue. An entry None stands for all of
            `local`. By default a generator starts before the work of the one before it, and is finished after the work
            of the next one.
        local: generators without messages, run one after the other.
    """
    for number in prefetch_one_schedule(len(steps)) if schedule is None else schedule:
        if number is not None:
            next(steps[number], None)
            continue
        for step in local:
            for _ in step:
                pass  # a generator whose transport sends nothing may yield, with nothing to wait for
