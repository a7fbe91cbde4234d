"""Where the cases of triton_*.py run: in Triton's interpreter on CPUs, or on a CUDA device."""

import pytest
import torch
from torch import nn

from quintic import Heads, Muon
from quintic.kernels.dispatch import triton_is_interpreted

DEVICE = "cpu" if triton_is_interpreted() else "cuda"
# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def assert_host_memory_changes_no_bit(*shapes, **options):
    """Take steps of two matrices of three heads, and of AdamW for further shapes, with and without offload."""
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
        groups = [{"params": params[:2], "view": Heads(3)}, {"params": params[2:], "algorithm": "adamw"}]
        limits = {"offload": offload, "max_workspace_bytes": 8000, "compute_dtype": torch.float32}
        optimizer = Muon([group for group in groups if group["params"]], kernels="triton", **limits, **options)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape).to(DEVICE)
            optimizer.step()
        found.append([t.cpu() for p in params for t in (p.detach(), *optimizer.state[p].values())])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that is new have values that no result has: NaN, and in 8 bits 0x7F."""

    def poisoning(function):
        def poisoned(*args, **kwargs):
            out = function(*args, **kwargs)
            if out.element_size() == 1 and out.dtype != torch.bool:
                out.view(torch.uint8).fill_(0x7F)
            elif out.is_floating_point():
                out.fill_(float("nan"))
            return out

        return poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
