"""Where the cases of triton_*.py run: in Triton's interpreter on CPUs, or on a CUDA device."""

import pytest
import torch

from quintic.kernels.dispatch import triton_is_interpreted

DEVICE = "cpu" if triton_is_interpreted() else "cuda"
# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


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
