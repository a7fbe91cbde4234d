"""Where state lies: in device memory, or in host memory where a group has `offload=True`.

State of a parameter's shape (`sharded.CUT_KEYS`) moves: momentum, moments, masters. It is pinned where there is CUDA,
so that the host need not wait for copies. What is small stays on the device. `offload.py` brings the rest there.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quintic.optim.layouts import local_tensor
from quintic.optim.sharded import CUT_KEYS

__all__ = ["place_state", "state_on_device"]


def place_state(
    groups: Iterable[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Tensor]], *, force: bool = False
) -> None:
    """Move state to where its group says, one tensor at a time; waits for the device where something moves.

    Args:
        groups: parameter groups.
        state: of their parameters; changed.
        force: also bring state to the device that is not pinned, and so was not put on the host by this function.
    """
    for group in groups:
        for param in group["params"]:
            of_param, device = state[param], local_tensor(param).device
            for key in of_param.keys() & set(CUT_KEYS):
                value = of_param[key]
                of_param[key] = _on_host(value, device) if group["offload"] else _on_device(value, device, force)


def _on_host(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or a `DTensor`, in host memory that `device` can reach while both work on."""
    local, pins = local_tensor(value), device.type == "cuda"
    if local.device.type == "meta" or (local.device.type == "cpu" and (not pins or local.is_pinned())):
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=pins)
    local_tensor(host).copy_(local)
    return host


def _on_device(value: Tensor, device: torch.device, force: bool) -> Tensor:
    local = local_tensor(value)
    if local.device == device or not (force or local.is_pinned()):
        return value
    found = torch.empty_like(value, device=device)
    local_tensor(found).copy_(local, non_blocking=True)
    return found


@contextmanager
def state_on_device(param: Tensor, state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Give a parameter's state on its device, and write what was in host memory back at the end; waits for the device.

    Args:
        param: the parameter.
        state: its own, as `optimizer.state` gives it.
    """
    device = local_tensor(param).device
    here = {key: _on_device(value, device, force=True) for key, value in state.items()}
    yield here
    for key, value in here.items():
        if value is not state[key]:
            local_tensor(state[key]).copy_(local_tensor(value))
