"""Steps of an optimizer as CUDA graphs: one launch instead of hundreds, where the host is slower than the device."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.graphs import capture
from quintic.optim.groups.options import OPTIONS, options_affecting
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.layout.tables import MOST_GRAPHS
from quintic.optim.muon import Muon
from quintic.optim.rules.dynamo import disable_dynamo
from quintic.optim.step.averaging import GroupAverages
from quintic.optim.step.runner import StepOutcome

__all__ = ["CapturedStep"]

_EAGER_STEPS = 2

# Keys of groups that may change between replays: options that a replay reads from device memory or does not need,
# parameters, which are compared by their addresses, and the rates from which schedulers compute `lr`.
_NOT_CAPTURED = {*(OPTIONS.keys() - options_affecting("graph")), "params", "param_names", "initial_lr", "swa_lr"}

_Due = tuple[bool, ...]
"""The groups that a step has."""


class _Recorded(NamedTuple):
    """A CUDA graph, and what it was captured with."""

    graph: Any
    gradients: list[tuple[str, Tensor, Tensor | None]]
    """Names and parameters whose gradients it reads, and these."""
    precomputed: dict[int, GroupAverages]
    """The averages of gradients that clipping had made, which it reads as well, by group."""
    outcome: StepOutcome
    """The outcome of a replay."""


class CapturedStep:
    """`optimizer.step()` as a CUDA graph, collectives included. The bits are those of `optimizer.step()`.

    >>> step = CapturedStep(optimizer)                                                              # doctest: +SKIP
    >>> for batch in batches:                                                                       # doctest: +SKIP
    ...     model(batch).backward()
    ...     step()                       # in place of optimizer.step()
    ...     optimizer.zero_grad(set_to_none=False)

    The first two calls step as usual; the third captures, and replays as all later ones do. Where groups have
    `step_every`, this holds for each set of groups that are stepped together: there is one graph for odd and one for
    even steps, or as many as it takes until the sets come again. Tables of which touched rows alone travel
    (`comms="sharded_sparse"`) are stepped after each replay, as usual. Learning rate, decay, momentum, betas and eps
    may change between calls; with any other option, with other weights or state in place of those captured, two calls
    step as usual again. A gradient that is somewhere else than when it was captured is copied there:
    `zero_grad(set_to_none=False)` leaves them where they are. Where the optimizer averages gradients, `clip_grad_norm_`
    does so before the step: calls after it are replays if the captured one came after it, too, and else step as usual.

    With several ranks all of them must call it, as `step`, and make other calls as often as the others do: NCCL runs a
    collective as a graph on all ranks or on none. Close it (or leave its `with` block) before
    `torch.distributed.destroy_process_group`, which otherwise waits for the graph for ever. Until then each graph keeps
    the temporary memory of a step, and the captured gradients.

    Args:
        optimizer: all of whose parameters are on one CUDA device.

    Raises:
        ValueError: parameters are elsewhere, or an option is one that the host must act on at each step
            (`telemetry_every`, `on_nonfinite="raise"`, `offload`, plain PyTorch kernels, `on_nonfinite="skip"` of
            tables whose touched rows travel), or `step_every` would need more than eight graphs, or the optimizer has
            step hooks; the message names it.
    """

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._check()
        self._graphs: dict[_Due, _Recorded] = {}
        self._num_eager: Counter[_Due] = Counter()
        self._captured: object = None

    def __enter__(self) -> "CapturedStep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the graphs and their memory; the next calls begin anew."""
        if self._graphs and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for recorded in self._graphs.values():
            recorded.graph.reset()
        self._graphs.clear()
        self._num_eager.clear()

    @disable_dynamo
    @torch.no_grad()
    def __call__(self) -> None:
        """Make one step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: a parameter has a gradient now that had none when the step was captured, or the other way
                round, or one with other placements; nothing was changed.
        """
        optimizer, fingerprint = self._optimizer, self._fingerprint()
        if fingerprint != self._captured:
            self.close()
            self._captured = fingerprint
        plans = optimizer._plans
        plans.planned()
        steps_until_due = plans.steps_until_due()
        # What a CUDA graph can hold, and the sparse rest: in each the other's groups wait.
        sparse = self._sparse_groups()
        inside = [pending or int(number in sparse) for number, pending in enumerate(steps_until_due)]
        outside = [pending or int(number not in sparse) for number, pending in enumerate(steps_until_due)]
        due = tuple(pending == 0 for pending in steps_until_due)
        precomputed = {number: one for number, one in plans.precomputed.fresh().items() if inside[number] == 0}
        recorded = self._graphs.get(due)
        is_other = recorded is not None and recorded.precomputed.keys() != precomputed.keys()
        if 0 not in inside or self._num_eager[due] < _EAGER_STEPS or is_other:
            optimizer.step()
            self._num_eager[due] += 1
            return
        if recorded is None:
            recorded = self._graphs[due] = self._capture(inside, precomputed)
        else:
            _bring_gradients(recorded.gradients)
            for number, averages in precomputed.items():
                recorded.precomputed[number].copy_from(averages)
            optimizer.upload_hyperparameters()
        recorded.graph.replay()
        outcome = recorded.outcome
        if 0 in outside:
            outcome = outcome._replace(counts=[*outcome.counts, *self._step_groups(outside).counts])
        optimizer._record_step(outcome, steps_until_due, is_replayed=True)
        plans.rows.check(wait=False)

    def _capture(self, steps_until_due: Sequence[int], precomputed: dict[int, GroupAverages]) -> _Recorded:
        """Capture a step of some groups, which is not made yet."""
        self._check()
        optimizer = self._optimizer
        gradients = [(name, param, param.grad) for name, param in self._read(steps_until_due)]
        optimizer.upload_hyperparameters()

        def work() -> StepOutcome:
            outcome = self._step_groups(steps_until_due)
            optimizer._step_history.count_skips(outcome)
            return outcome

        graph, outcome = capture(work)
        return _Recorded(graph, gradients, precomputed, outcome)

    def _step_groups(self, steps_until_due: Sequence[int]) -> StepOutcome:
        """Step the groups that wait for 0 more steps, without any record of it on the host."""
        plans = self._optimizer._plans
        runner = plans.connected()
        if not runner.context.is_single_rank:
            runner.consensus.check_partial(steps_until_due)
        plans.use_state()
        outcome = runner.step(steps_until_due, self._optimizer._step_history.num_steps)
        for _ in runner.consensus.any_present():
            pass  # a CUDA graph must wait for all counts of gradients that it has started, needed or not
        return outcome

    def _read(self, steps_until_due: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters whose gradients a step reads, with their names."""
        for group in self._optimizer._plans.current_groups():
            if steps_until_due[group.number] == 0:
                yield from zip(group.param_names, group.params, strict=True)
        for tie in self._optimizer._plans.planned().ties:
            if steps_until_due[tie.head_group] == 0:
                yield tie.copy_name, tie.copy

    def _sparse_groups(self) -> set[int]:
        """Return the numbers of groups with a table whose touched rows are sent, and no others."""
        self._optimizer._plans.planned()
        return {table.group for table in self._optimizer._plans.rows.tables.values()}

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _fingerprint(self) -> object:
        """Return the values that must not change: options, and the places of weights and state."""
        options = [
            {key: value for key, value in group.items() if key not in _NOT_CAPTURED}
            for group in self._optimizer.param_groups
        ]
        # A learning rate that is a tensor is read where it is.
        live = [id(group["lr"]) for group in self._optimizer.param_groups if isinstance(group["lr"], Tensor)]
        state = self._optimizer.state
        places = [
            local_tensor(tensor).data_ptr()
            for param in self._params()
            for tensor in (param, *state.get(param, {}).values())
            if isinstance(tensor, Tensor)
        ]
        return options, live, places

    def _check(self) -> None:
        groups, sparse = self._optimizer.param_groups, self._sparse_groups()
        for number, group in enumerate(groups):
            reason = _obstacle(group, is_sparse=number in sparse)
            if reason is not None:
                raise ValueError(f"{reason}: step with optimizer.step(), or without this option")
        num_graphs = math.lcm(*(int(group["step_every"]) for group in groups))
        if num_graphs > MOST_GRAPHS:
            raise ValueError(
                f"step_every of the groups comes to the same set of groups after {num_graphs} steps, and each set "
                f"needs a graph, of which there may be {MOST_GRAPHS}: choose numbers with more divisors in common"
            )
        hooks = self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks
        if hooks:
            raise ValueError("a captured step runs no step hooks, and the optimizer has some: remove them")
        _check_devices(self._optimizer, self._params())


def _bring_gradients(captured: Sequence[tuple[str, Tensor, Tensor | None]]) -> None:
    """Copy gradients that are somewhere else than those captured."""
    moved: list[tuple[Tensor, Tensor]] = []
    for name, param, target in captured:
        gradient = param.grad
        if gradient is target:
            continue
        if gradient is None or target is None:
            raise RuntimeError(
                f"{name}: its gradient is {'missing' if gradient is None else 'there'} now and was "
                f"{'there' if gradient is None else 'missing'} when the step was captured; step with "
                f"optimizer.step() where parameters take turns, or close() the captured step on all ranks"
            )
        cuts = [getattr(one, "placements", None) for one in (gradient, target)]
        if cuts[0] != cuts[1]:
            raise RuntimeError(
                f"{name}: its gradient has placements {cuts[0]} now and had {cuts[1]} when the "
                f"step was captured, which would take it for that; redistribute it before the step, on all ranks, "
                f"or close() the captured step on all ranks"
            )
        if local_tensor(gradient).data_ptr() != local_tensor(target).data_ptr():
            moved.append((local_tensor(target), local_tensor(gradient)))
    if moved:
        torch._foreach_copy_([target for target, _ in moved], [source for _, source in moved])


def _check_devices(optimizer: Muon, params: Iterable[Tensor]) -> None:
    devices = {param.device for param in params}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"a CUDA graph needs all parameters on one CUDA device, these are on {names or 'none'}")
    for bucket in optimizer.plan():
        if bucket.kernels == "torch":
            raise ValueError(
                f"{bucket.name}: plain PyTorch kernels read hyperparameters on the host, which a replay does not; "
                f"leave kernels='auto' and dtypes that Triton's kernels know"
            )


def _obstacle(group: Mapping[str, Any], *, is_sparse: bool) -> str | None:
    """Return the option with which the host decides what a step does, or None."""
    if group["telemetry_every"] is not None:
        return "telemetry_every counts on the host"
    if group["on_nonfinite"] == "raise":
        return "on_nonfinite='raise' waits for the device"
    if group["offload"]:
        return "offload copies state from the host"
    if is_sparse and group["on_nonfinite"] != "propagate":
        return "comms='sharded_sparse' is stepped after the graph, which on_nonfinite='skip' would have to stop as well"
    return None
