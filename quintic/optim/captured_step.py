"""Steps of an optimizer as CUDA graphs: one launch instead of hundreds, for hosts that are slower than their device.

A graph replays fixed kernels on fixed addresses, so a call does one of three things:

    eager      the first two calls with a set of due groups, and after a change of options or addresses
    capture    record the step as a graph, and replay it
    replay     copy gradients that have moved to the captured addresses, upload hyperparameters, replay

Hyperparameters such as the learning rate are read from device memory at each replay. Step counts, `last_step` and
tables whose touched rows are sent (`comms="sharded_sparse"`) stay on the host and follow after each replay.
"""

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
from quintic.optim.numeric.dynamo import disable_dynamo
from quintic.optim.numeric.int8_state import GROUP
from quintic.optim.state.placement import shares_groups
from quintic.optim.step.reduction import Averages
from quintic.optim.step.runner import StepOutcome

__all__ = ["CapturedStep"]

# Calls that step as usual before a capture: they allocate everything that a capture must find allocated.
_EAGER_STEPS = 2

# Keys of groups that may change between replays: options that a replay reads from device memory or does not need,
# parameters, which are compared by their addresses, and the rates from which schedulers compute `lr`.
_NOT_CAPTURED = {*(OPTIONS.keys() - options_affecting("graph")), "params", "param_names", "initial_lr", "swa_lr"}

# For each group whether it is stepped.
_Due = tuple[bool, ...]


class _Recorded(NamedTuple):
    """A CUDA graph, and the tensors that it was captured with."""

    graph: Any
    # (name, parameter, gradient) for all gradients that it reads.
    gradients: list[tuple[str, Tensor, Tensor | None]]
    # By group the averages that clipping had made, which it reads, too.
    averages: dict[int, Averages]
    # The outcome of the step, on the device; every replay writes it again.
    outcome: StepOutcome


class CapturedStep:
    """`optimizer.step()` as a CUDA graph, collectives included, with the same bits.

    >>> step = CapturedStep(optimizer)                                                              # doctest: +SKIP
    >>> for batch in batches:                                                                       # doctest: +SKIP
    ...     model(batch).backward()
    ...     step()                       # in place of optimizer.step()
    ...     optimizer.zero_grad(set_to_none=False)

    The first two calls step as usual; the third captures, and replays as all later ones do. With `step_every`, each set
    of groups that are stepped in one call has its own two usual steps and its own graph, for example one for odd and
    one for even steps. Tables with `comms="sharded_sparse"`, whose touched rows are sent, are stepped after each
    replay, as usual. Learning rate, decay, momentum, betas and eps may change between calls; after a change of any
    other option, or if weights or state were replaced by other tensors, two calls step as usual again. A gradient at
    another address than the captured one is copied to it, which `zero_grad(set_to_none=False)` avoids. If the optimizer
    averages gradients, `clip_grad_norm_` averages them before the step: then calls replay if the captured call came
    after a clipping, too, and otherwise step as usual.

    With several ranks all of them must call it, like `step`, and equally often: NCCL runs a collective as a graph on
    all ranks or on none. Close it (or leave its `with` block) before `torch.distributed.destroy_process_group`, which
    otherwise waits for the graph forever. Until then each graph keeps the temporary memory of a step, and the captured
    gradients.

    Args:
        optimizer: the optimizer; all its parameters must be on one CUDA device.

    Raises:
        ValueError: parameters are on other devices, or an option needs the host at each step (`telemetry_every`,
            `on_nonfinite="raise"`, `offload`, plain PyTorch kernels, `on_nonfinite="skip"` with
            `comms="sharded_sparse"`), or it has `release_gradients`, or ranks share groups of 8-bit state, or
            `step_every` would need more than eight graphs, or the optimizer has step hooks; the message names the
            reason.
    """

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._check()
        # By set of due groups: its graph, and the number of its usual steps so far.
        self._graphs: dict[_Due, _Recorded] = {}
        self._num_eager: Counter[_Due] = Counter()
        # The options and addresses that all graphs were captured with.
        self._captured: object = None

    def __enter__(self) -> "CapturedStep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the graphs and their memory; the next two calls step as usual again."""
        # A graph must not be freed while it runs.
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
            RuntimeError: a parameter has a gradient now but had none when the step was captured, or vice versa, or its
                gradient has other placements; nothing was changed.
        """
        # Another option, or another tensor for weights or state, makes all graphs useless.
        optimizer, fingerprint = self._optimizer, self._fingerprint()
        if fingerprint != self._captured:
            self.close()
            self._captured = fingerprint
        plans = optimizer._plans
        plans.planned()
        # Two steps: `inside` the graph, and `outside` it for sparse tables. For each group, 0 means that it is due in
        # this step; the groups of the other step count as not due.
        steps_waited = plans.steps_waited()
        sparse = self._sparse_groups()
        inside = [pending or int(number in sparse) for number, pending in enumerate(steps_waited)]
        outside = [pending or int(number not in sparse) for number, pending in enumerate(steps_waited)]
        due = tuple(pending == 0 for pending in steps_waited)
        # Averages of clipping, which the graph must have been captured with or without.
        averages = {number: one for number, one in plans.reduction.valid().items() if inside[number] == 0}
        recorded = self._graphs.get(due)
        is_other = recorded is not None and recorded.averages.keys() != averages.keys()
        if 0 not in inside or self._num_eager[due] < _EAGER_STEPS or is_other:
            optimizer.step()
            self._num_eager[due] += 1
            return
        # Capture, or bring everything that a replay reads to the captured addresses.
        if recorded is None:
            recorded = self._graphs[due] = self._capture(inside, averages)
        else:
            _bring_gradients(recorded.gradients)
            for number, of_group in averages.items():
                _bring_averages(recorded.averages[number], of_group)
            optimizer.upload_hyperparameters()
        recorded.graph.replay()
        # The sparse tables, then the host's record of both.
        outcome = recorded.outcome
        if 0 in outside:
            outcome = outcome._replace(counts=[*outcome.counts, *self._step_groups(outside).counts])
        optimizer._record_step(outcome, steps_waited, is_replayed=True)
        plans.rows.check(wait=False)

    def _capture(self, steps_waited: Sequence[int], averages: dict[int, Averages]) -> _Recorded:
        """Capture a step of the groups with 0 in `steps_waited`; capturing records the step and does not make it."""
        self._check()
        optimizer = self._optimizer
        gradients = [(name, param, param.grad) for name, param in self._read(steps_waited)]
        optimizer.upload_hyperparameters()

        def work() -> StepOutcome:
            outcome = self._step_groups(steps_waited)
            optimizer._step_history.count_skips(outcome)
            return outcome

        graph, outcome = capture(work)
        return _Recorded(graph, gradients, averages, outcome)

    def _step_groups(self, steps_waited: Sequence[int]) -> StepOutcome:
        """Step the groups with 0 in `steps_waited`, without any record of it on the host."""
        plans = self._optimizer._plans
        runner = plans.connected()
        if not runner.context.is_single_rank:
            runner.consensus.check_partial(steps_waited)
        plans.use_state()
        outcome = runner.step(steps_waited, self._optimizer._step_history.num_steps)
        list(runner.consensus.any_present())  # a CUDA graph must wait for all counts that it has started, needed or not
        return outcome

    def _read(self, steps_waited: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) for the gradients that a step reads, with the gradients of tied copies."""
        for group in self._optimizer._plans.current_groups():
            if steps_waited[group.number] == 0:
                yield from zip(group.param_names, group.params, strict=True)
        for tie in self._optimizer._plans.planned().ties:
            if steps_waited[tie.head_group] == 0:
                yield tie.copy_name, tie.copy

    def _sparse_groups(self) -> set[int]:
        """Return the numbers of groups with a table whose touched rows are sent, not all of its rows."""
        self._optimizer._plans.planned()
        return {table.group for table in self._optimizer._plans.rows.tables.values()}

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _fingerprint(self) -> object:
        """Return the values that a graph depends on: options, and the addresses of weights and state."""
        # Options that are equal but not the same object need no new capture.
        options = [
            {key: value for key, value in group.items() if key not in _NOT_CAPTURED}
            for group in self._optimizer.param_groups
        ]
        # A graph reads a learning rate that is a tensor at its address, so it must remain the same tensor.
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
        """Raise a ValueError if the optimizer cannot be captured; repeated before each capture, as options change."""
        groups, sparse = self._optimizer.param_groups, self._sparse_groups()
        for number, group in enumerate(groups):
            reason = _host_option(group, is_sparse=number in sparse)
            if reason is not None:
                raise ValueError(f"{reason}: step with optimizer.step(), or without this option")
        if self._optimizer._plans.release_gradients:
            raise ValueError(
                "release_gradients frees the gradients, and a replay reads their memory: step with optimizer.step(), "
                "or without this option"
            )
        # The set of due groups repeats after the least common multiple of all `step_every`.
        num_graphs = math.lcm(*(int(group["step_every"]) for group in groups))
        if num_graphs > MOST_GRAPHS:
            raise ValueError(
                f"step_every of the groups repeats after {num_graphs} steps, and each of these steps needs a CUDA "
                f"graph, of which there may be {MOST_GRAPHS}: choose values of step_every with more divisors in common"
            )
        # Hooks are Python code, which a replay does not run.
        hooks = self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks
        if hooks:
            raise ValueError("a captured step runs no step hooks, and the optimizer has some: remove them")
        _check_groups_of_8(self._optimizer)
        _check_devices(self._optimizer, self._params())


def _bring_gradients(captured: Sequence[tuple[str, Tensor, Tensor | None]]) -> None:
    """Copy gradients that are at other addresses than the captured ones to these; check all before copying any."""
    moved: list[tuple[Tensor, Tensor]] = []  # (captured, current)
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
        placements = [getattr(one, "placements", None) for one in (gradient, target)]
        if placements[0] != placements[1]:
            raise RuntimeError(
                f"{name}: its gradient has placements {placements[0]} now and had {placements[1]} when the "
                f"step was captured, and a replay would mistake one for the other; redistribute it before the step, on "
                f"all ranks, or close() the captured step on all ranks"
            )
        if local_tensor(gradient).data_ptr() != local_tensor(target).data_ptr():
            moved.append((local_tensor(target), local_tensor(gradient)))
    if moved:
        torch._foreach_copy_([target for target, _ in moved], [source for _, source in moved])


def _bring_averages(captured: Averages, averages: Averages) -> None:
    """Copy averages to the captured ones, except those in `p.grad`, which `_bring_gradients` brings."""
    targets, sources = [], []
    for param, average in averages.items():
        if average is not None and average is not param.grad:
            target = captured[param]
            assert target is not None
            targets.append(target)
            sources.append(average)
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_groups_of_8(optimizer: Muon) -> None:
    for group in optimizer._plans.current_groups():
        for index, (name, param) in enumerate(zip(group.param_names, group.params, strict=True)):
            if index not in group.idle and shares_groups(param, group):
                raise ValueError(
                    f"{name}: its columns are cut between ranks inside of {GROUP} neighbours, which state_dtype='int8' "
                    f"stores together, by way of memory that each step allocates; step as usual, or use "
                    f"state_dtype='bf16' for this group"
                )


def _check_devices(optimizer: Muon, params: Iterable[Tensor]) -> None:
    devices = {param.device for param in params}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"a CUDA graph needs all parameters on one CUDA device, these are on {names or 'none'}")
    # Triton's kernels read hyperparameters from device memory, plain PyTorch bakes them into the graph.
    for bucket in optimizer.plan():
        if bucket.kernels == "torch":
            raise ValueError(
                f"{bucket.name}: plain PyTorch kernels read hyperparameters on the host, which a replay does not; "
                f"leave kernels='auto' and dtypes that Triton's kernels know"
            )


def _host_option(group: Mapping[str, Any], *, is_sparse: bool) -> str | None:
    """Return why a group cannot be captured: an option that needs the host at each step. None if it can."""
    if group["telemetry_every"] is not None:
        return "telemetry_every counts on the host"
    if group["on_nonfinite"] == "raise":
        return "on_nonfinite='raise' waits for the device"
    if group["offload"]:
        return "offload copies state from the host"
    if is_sparse and group["on_nonfinite"] != "propagate":
        return "comms='sharded_sparse' is stepped after the graph, which on_nonfinite='skip' would have to stop as well"
    return None
