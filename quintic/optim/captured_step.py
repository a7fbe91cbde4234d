"""Steps of an optimizer as a CUDA graph: one launch instead of hundreds, where the host is slower than the device."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from quintic.optim.muon import Muon
from quintic.optim.rules.device_memory import HYPERPARAMETERS
from quintic.optim.rules.opaque import opaque

__all__ = ["CapturedStep"]

_EAGER_STEPS = 2

# What a replay reads from device memory, and what says nothing about a step.
_NOT_CAPTURED = {*HYPERPARAMETERS, "betas", "params", "param_names", "pending_steps", "initial_lr", "swa_lr"}


class CapturedStep:
    """`optimizer.step()` as a CUDA graph, collectives included. The bits are those of `optimizer.step()`.

    >>> step = CapturedStep(optimizer)                                                              # doctest: +SKIP
    >>> for batch in batches:                                                                       # doctest: +SKIP
    ...     model(batch).backward()
    ...     step()                       # in place of optimizer.step()
    ...     optimizer.zero_grad(set_to_none=False)

    The first two calls step as usual; the third captures, and replays as all later ones do. Learning rate, decay,
    momentum, betas and eps may change between calls; with any other option, with other weights or state in place of
    those captured, two calls step as usual again. A gradient that is somewhere else than when it was captured is
    copied there: `zero_grad(set_to_none=False)` leaves them where they are.

    With several ranks all of them must call it, as `step`, and make other calls as often as the others do: NCCL runs a
    collective as a graph on all ranks or on none. Close it (or leave its `with` block) before
    `torch.distributed.destroy_process_group`, which otherwise waits for the graph for ever. Until then it keeps the
    temporary memory of a step, and the captured gradients.

    Args:
        optimizer: all of whose parameters are on one CUDA device.

    Raises:
        ValueError: parameters are elsewhere, or an option is one that the host must act on at each step (`step_every`,
            `telemetry_every`, `on_nonfinite="raise"`, `offload`, `comms="sharded_sparse"`, plain PyTorch kernels), or
            the optimizer has step hooks; the message names it.
    """

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self._check()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor | None] = []
        self._captured: object = None
        self._num_eager = 0
        self._kept_bytes = 0

    def __enter__(self) -> "CapturedStep":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Free the graph and its memory; the next calls begin anew."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph, self._gradients, self._num_eager = None, [], 0

    @opaque
    @torch.no_grad()
    def __call__(self) -> None:
        """Make one step. All ranks that share parameters must call it.

        Raises:
            RuntimeError: a parameter has a gradient now that had none when the step was captured, or the other way
                round, or one with other placements; nothing was changed.
        """
        found = self._fingerprint()
        # Other ranks write to memory that is another one where it had to become larger.
        moved = self._graph is not None and self._kept_bytes != self._optimizer.current.communicators.kept_bytes
        if found != self._captured or moved:
            self.close()
            self._captured = found
        if self._graph is None and self._num_eager < _EAGER_STEPS:
            self._optimizer.step()
            self._num_eager += 1
            return
        if self._graph is None:
            self._capture()
        else:
            self._bring_gradients()
            self._optimizer.upload_hyperparameters()
        assert self._graph is not None
        self._graph.replay()
        self._optimizer.current.communicators.mark_end()

    def _capture(self) -> None:
        self._check()
        self._gradients = [param.grad for param in self._params()]
        self._optimizer.upload_hyperparameters()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, as NCCL's watchdog, ask for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._optimizer.step()
        self._graph, self._kept_bytes = graph, self._optimizer.current.communicators.kept_bytes

    def _bring_gradients(self) -> None:
        """Copy gradients that are somewhere else than those captured."""
        moved: list[tuple[Tensor, Tensor]] = []
        for param, captured in zip(self._params(), self._gradients, strict=True):
            gradient = param.grad
            if gradient is captured:
                continue
            if gradient is None or captured is None:
                name = self._name_of(param)
                raise RuntimeError(
                    f"{name}: its gradient is {'missing' if gradient is None else 'there'} now and was "
                    f"{'there' if gradient is None else 'missing'} when the step was captured; step with "
                    f"optimizer.step() where parameters take turns, or close() the captured step on all ranks"
                )
            cuts = [getattr(one, "placements", None) for one in (gradient, captured)]
            if cuts[0] != cuts[1]:
                raise RuntimeError(
                    f"{self._name_of(param)}: its gradient has placements {cuts[0]} now and had {cuts[1]} when the "
                    f"step was captured, which would take it for that; redistribute it before the step, on all ranks, "
                    f"or close() the captured step on all ranks"
                )
            if _local(gradient).data_ptr() != _local(captured).data_ptr():
                moved.append((_local(captured), _local(gradient)))
        if moved:
            torch._foreach_copy_([target for target, _ in moved], [source for _, source in moved])

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _name_of(self, wanted: Tensor) -> str:
        names = [str(name) for group in self._optimizer.param_groups for name in group["param_names"]]
        return next(name for name, param in zip(names, self._params(), strict=True) if param is wanted)

    def _fingerprint(self) -> object:
        """Return what must not change: options, and where weights and state are."""
        options = [
            {key: value for key, value in group.items() if key not in _NOT_CAPTURED}
            for group in self._optimizer.param_groups
        ]
        # A learning rate that is a tensor is read where it is.
        live = [id(group[key]) for group in self._optimizer.param_groups for key in ("lr",) if _is_tensor(group[key])]
        state = self._optimizer.state
        places = [
            _local(tensor).data_ptr()
            for param in self._params()
            for tensor in (param, *state[param].values())
            if _is_tensor(tensor)
        ]
        return options, live, places

    def _check(self) -> None:
        for group in self._optimizer.param_groups:
            reason = _obstacle(group)
            if reason is not None:
                raise ValueError(f"{reason}: step with optimizer.step(), or without this option")
        devices = {param.device for param in self._params()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"a CUDA graph needs all parameters on one CUDA device, these are on {found or 'none'}")
        hooks = self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks
        if hooks:
            raise ValueError("a captured step runs no step hooks, and the optimizer has some: remove them")
        for bucket in self._optimizer.plan():
            if bucket.kernels == "torch":
                raise ValueError(
                    f"{bucket.name}: plain PyTorch kernels read hyperparameters on the host, which a replay does not; "
                    f"leave kernels='auto' and dtypes that Triton's kernels know"
                )


def _obstacle(group: Mapping[str, Any]) -> str | None:
    """Return the option with which the host decides what a step does, or None."""
    if group["step_every"] > 1:
        return "step_every counts on the host"
    if group["telemetry_every"] is not None:
        return "telemetry_every counts on the host"
    if group["on_nonfinite"] == "raise":
        return "on_nonfinite='raise' waits for the device"
    if group["offload"]:
        return "offload copies state from the host"
    if group["comms"] == "sharded_sparse":
        return "comms='sharded_sparse' sends messages of other sizes at each step"
    return None


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _local(tensor: Any) -> Tensor:
    from quintic.optim.layout.layouts import local_tensor

    return local_tensor(tensor)
