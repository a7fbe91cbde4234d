"""Skips what needs a later PyTorch or Triton than this one, and says which."""

import pytest
import torch

from quintic.versions import GLUON_NEEDS, gluon_is_known, release

__all__ = ["check_gluon", "needs_torch", "torch_muon"]


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one, that uses what PyTorch has from a version on."""
    reason = f"{what} needs PyTorch {version}, this is {torch.__version__}"
    return pytest.mark.skipif(release(torch.__version__) < release(version), reason=reason)


def torch_muon() -> type[torch.optim.Optimizer]:
    """Return PyTorch's own Muon, or skip the test that asks for it."""
    if release(torch.__version__) < (2, 9):
        pytest.skip(f"torch.optim.Muon needs PyTorch 2.9, this is {torch.__version__}")
    return torch.optim.Muon


def check_gluon() -> None:
    """Skip a test, or a file, of kernels in Gluon where there is none that they know."""
    triton = pytest.importorskip("triton")
    if not gluon_is_known():
        first, last = GLUON_NEEDS
        reason = f"kernels in Gluon need Triton {first} to {last}, this is {triton.__version__}"
        pytest.skip(reason, allow_module_level=True)
