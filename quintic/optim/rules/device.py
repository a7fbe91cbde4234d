"""Small tensors that a step keeps on the device: hyperparameters, tables of addresses, constants.

Nothing here waits for the device, except `HostCopy.read`: the host's values go through pinned memory. During the
capture of a CUDA graph nothing is uploaded that a replay must not repeat.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quintic.optim.rules.stages import StageOptions

__all__ = [
    "HYPERPARAMETERS",
    "DeviceHyperparameters",
    "HostCopy",
    "host_tensor",
    "is_capturing",
    "refuse_capture",
    "upload",
]

HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta1", "beta2", "eps")
"""The order of the values in device memory; `betas` are two of them."""


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(params: Iterable[Tensor], *, releases_gradients: bool) -> None:
    """Raise a RuntimeError if a CUDA graph is being captured on the device of one of the parameters.

    Args:
        params: the parameters of a group with `step_every` > 1, or of an optimizer that releases gradients.
        releases_gradients: whether it does.
    """
    if not any(is_capturing(param.device) for param in params):
        return
    if releases_gradients:
        raise RuntimeError(
            "release_gradients frees the gradients, and a replay of a CUDA graph reads their memory: make the "
            "optimizer without this option to capture its steps"
        )
    raise RuntimeError("step_every counts on the host, which a CUDA graph does not: use quintic.CapturedStep")


def host_tensor(values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on the CPU, also if `torch.set_default_device` chose another device."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on a device, without waiting for the device."""
    if device.type != "cuda":
        return values.to(device)
    # The caching host allocator keeps the pinned block until the copy has happened.
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of a small tensor to the host, made by the current stream."""

    def __init__(self, source: Tensor) -> None:
        # Keep the source: its memory may belong to another stream, which could reuse it before the copy is made.
        self._source = self._copy = source
        self._event: Any = None
        if source.is_cuda:
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._event = torch.cuda.current_stream(source.device).record_event()

    @property
    def is_there(self) -> bool:
        """Whether the copy has arrived, so that `read` does not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Any:
        """Return the values as Python numbers; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class DeviceHyperparameters:
    """The hyperparameters of one group as a float64 tensor on one device, at an address that never changes."""

    def __init__(self, device: torch.device) -> None:
        # (6,), in the order of `HYPERPARAMETERS`, and the numbers that were uploaded last.
        self.values = torch.zeros(len(HYPERPARAMETERS), dtype=torch.float64, device=device)
        self._of_stages = self.values[:3].unbind()
        self._uploaded: tuple[float, ...] | None = None
        # The object that these values were read from; set and compared by the owner.
        self.is_of: object = None
        # Whether a value is a tensor on the device, which may change there unnoticed.
        self.is_live = False

    def stage_options(self, group: Any) -> StageOptions:
        """Return the numbers that stages read, as 0-d float64 tensors on the device where schedules change them.

        `group` is the parameter group, for the numbers that a captured step contains.
        """
        lr, weight_decay, momentum = self._of_stages
        return StageOptions(lr, weight_decay, momentum, group.nesterov, float(group.normalize_beta), "triton")

    def update(self, hyperparameters: Sequence[float | Tensor], lr_ratio: float) -> None:
        """Update the values on the device, given in the order of `HYPERPARAMETERS`; the first is multiplied by a ratio.

        A value that is itself a tensor on the device is copied on the device, also within a captured graph.
        """
        # Numbers of the host: uploaded only if one has changed. A live value is 0 among them.
        live = [isinstance(value, Tensor) and value.device == self.values.device for value in hyperparameters]
        self.is_live = any(live)
        lr, *others = (0.0 if is_live else float(value) for value, is_live in zip(hyperparameters, live, strict=True))
        numbers = (lr * lr_ratio, *others)
        if numbers != self._uploaded:
            if is_capturing(self.values.device):
                raise RuntimeError(
                    "hyperparameters changed since the last step, and a CUDA graph is being captured: make one step, "
                    "or call optimizer.upload_hyperparameters(), before the capture"
                )
            self.values.copy_(upload(host_tensor(numbers, torch.float64), self.values.device))
            self._uploaded = numbers
        # Live values: copied in every step, and by every replay of a graph.
        for index, (value, is_live) in enumerate(zip(hyperparameters, live, strict=True)):
            if is_live and isinstance(value, Tensor):
                self.values[index].copy_(value)
        if live[0] and lr_ratio != 1:
            self.values[0].mul_(lr_ratio)
