import pytest
import torch

from quintic.optim.numeric import sums as module
from quintic.optim.numeric.sums import norms, sums


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 5, 8), (2, 7, 13), (1, 64, 100), (2, 0, 3)])
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("pairwise", [False, True])
def test_sums_and_norms(shape, dim, pairwise, monkeypatch):
    """On GPUs halves are added to each other, here too where `pairwise`."""
    x = torch.randn(shape, dtype=torch.float16)
    if pairwise:
        monkeypatch.setattr(module.torch.linalg, "vector_norm", None)
        x = x.as_subclass(OnCuda)
    before, exact = x.clone(), x.as_subclass(torch.Tensor).double()
    found = {"norms": norms(x, dim, torch.float32), "sums": sums(x.float(), dim)}
    expected = {"norms": exact.square().sum(dim, keepdim=True).sqrt(), "sums": exact.sum(dim, keepdim=True)}
    for name, value in found.items():
        value = value.as_subclass(torch.Tensor)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(x, before)


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
