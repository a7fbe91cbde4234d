"""The forward pass of a model on a GPU: kernels are not launched, and memory and random state stay."""

import pytest
import torch
from torch import nn

import quintic

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@triton.jit
def _double(source, target, size, BLOCK: triton.language.constexpr):
    places = triton.language.arange(0, BLOCK)
    values = triton.language.load(source + places, mask=places < size)
    triton.language.store(target + places, 2 * values, mask=places < size)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(9, width)
        self.a, self.b, self.fc = nn.Linear(width, 4 * width), nn.Linear(2 * width, width), nn.Linear(width, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        one, two = self.a(self.table(ids)).chunk(2, -1)
        hidden = (one.sigmoid() * two).contiguous()
        doubled = torch.empty_like(hidden)
        _double[(1,)](hidden, doubled, hidden.numel(), BLOCK=1024)
        return self.fc(self.b(nn.functional.dropout(doubled, 0.1, True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_gpu(dtype):
    model = Net(1024).to("cuda", dtype)
    ids = torch.zeros(2, 5, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    state, before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    roles = quintic.trace(model, ids)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert {name: role.kind for name, role in roles.items() if len(role.shape) > 1} == {
        "table.weight": "table",
        "a.weight": "matrix",
        "b.weight": "matrix",
        "fc.weight": "head",
    }
    assert roles["a.weight"].view == quintic.Split((2048, 2048))
    model(ids)  # and the kernel can be launched as before
