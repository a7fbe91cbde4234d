import pytest
import torch

from quintic.kernels import loss as loss_module
from quintic.kernels.loss import softcap_cross_entropy


def reference(x, weight, targets, softcap):
    logits = x.double() @ weight.double().mT
    logits = softcap * torch.tanh(logits / softcap)
    return torch.logsumexp(logits, dim=-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 64)])
@pytest.mark.parametrize("softcap", [1.5, 15.0])
def test_losses_equal_the_float64_reference(shape, softcap):
    x, weight = torch.randn(*shape, 12) * 4, torch.randn(50, 12)
    targets = torch.randint(50, shape)
    expected = reference(x, weight, targets, softcap)
    losses = softcap_cross_entropy(x, weight, targets, softcap=softcap, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    mean = softcap_cross_entropy(x, weight, targets, softcap=softcap)
    torch.testing.assert_close(mean.double(), expected.mean(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 3, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_autograd_in_float64(chunk_bytes, dtype, monkeypatch):
    """Chunks of one token, of three (which does not divide ten), and one for all."""
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", chunk_bytes)
    x = (torch.randn(2, 5, 12) * 3).to(dtype).requires_grad_()
    weight = torch.randn(50, 12, requires_grad=True)
    targets = torch.randint(50, (2, 5))
    (3 * softcap_cross_entropy(x, weight, targets, softcap=4.0)).backward()
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (3 * reference(exact_x, exact_weight, targets, 4.0).mean()).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for found, exact in ((x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert float((found.double() - exact).norm() / exact.norm()) < tolerance
    assert x.grad.dtype == dtype
    assert weight.grad.dtype == torch.float32


def test_extreme_logits_stay_finite():
    x = torch.full((2, 4), 1e4, requires_grad=True)
    loss = softcap_cross_entropy(x, torch.randn(9, 4).requires_grad_(), torch.tensor([0, 8]), softcap=15.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
