"""The tensors that a checkpoint saves, by name, and copies of them in host memory."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quintic.optim.layout.layouts import local_tensor
from quintic.optim.muon import Muon

__all__ = ["copies_on_host", "optimizer_tensors"]


@torch.no_grad()
def copies_on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory and return the contiguous copies by name; `DTensor`s stay `DTensor`s.

    CUDA tensors are copied to page-locked memory, which takes copies at full speed and which PyTorch caches for the
    next checkpoint. Returns when the copies are complete. Not a collective: each rank copies its shards.

    Args:
        tensors: emptied while copying, so that tensors without another reference are freed early.
    """
    copies = {}
    on_gpu = False
    for name in list(tensors):
        tensor = tensors.pop(name).detach()
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.contiguous_format)
        # Asynchronous, so that copies of all tensors overlap; one synchronisation at the end.
        local_tensor(copy).copy_(local_tensor(tensor), non_blocking=True)
        on_gpu |= tensor.is_cuda
        copies[name] = copy
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return copies


def optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return optimizer state as "<parameter name>/<state name>" -> tensor, and the groups. All ranks must call it.

    The tensors are not copied, except that state sharded by `comms="sharded"` is gathered: in host memory, because the
    whole state may not fit on a GPU.
    """
    is_sharded = any(group.get("comms") == "sharded" for group in optimizer.param_groups)
    if isinstance(optimizer, Muon) and is_sharded and optimizer.param_groups[0]["params"][0].is_cuda:
        optimizer.offload(True)
        try:
            saved = optimizer.state_dict()
        finally:
            optimizer.offload(False)
    else:
        saved = optimizer.state_dict()
    tensors = {}
    for group in saved["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            for state_name, tensor in saved["state"].get(key, {}).items():  # frozen parameters have no state
                tensors[f"{name}/{state_name}"] = tensor
    return tensors, saved["param_groups"]
