"""QK-clip as part of `Muon.step`: after the update, on the full-precision weights, only where it was asked for."""

import pytest
import torch
from torch import nn

import quintic
from quintic import Muon, QKClip


class Attention(nn.Module):
    def __init__(self, dtype=torch.float32, norm=False):
        super().__init__()
        self.q_proj = nn.Linear(16, 16, dtype=dtype)
        self.k_proj = nn.Linear(16, 16, dtype=dtype)
        self.o_proj = nn.Linear(16, 16, dtype=dtype)
        if norm:
            self.q_norm = nn.RMSNorm(4)


def stepped(dtype=torch.float32, maxima=None, norm=False, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Attention(dtype, norm)})
    optimizer = Muon(quintic.param_groups(model), lr=0.01, qk_clip=QKClip(threshold=10.0), **options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(dtype)
    optimizer.step(qk_logits=None if maxima is None else {"attn": torch.as_tensor(maxima)})
    return model, optimizer


def test_heads_above_the_threshold_are_scaled_after_the_update():
    maxima = [40.0, 5.0, 10.0, 160.0]
    plain, _ = stepped()
    clipped, optimizer = stepped(maxima=maxima)
    factors = torch.tensor([0.5, 1.0, 1.0, 0.25]).repeat_interleave(4)
    for name in ("q_proj", "k_proj"):
        before, after = getattr(plain["attn"], name), getattr(clipped["attn"], name)
        torch.testing.assert_close(after.weight, before.weight * factors[:, None])
        torch.testing.assert_close(after.bias, before.bias * factors)
        assert torch.equal(after.weight[4:12], before.weight[4:12])
    assert torch.equal(clipped["attn"].o_proj.weight, plain["attn"].o_proj.weight)
    assert optimizer.last_step().qk_layers == 1
    assert "1 attention layer watched by QK-clip" in str(optimizer.last_step())


@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_masters_are_scaled_in_full_precision(master):
    """A factor of 0.9975 is lost in bfloat16, and would be undone by the master."""
    maxima = [10.05, 1.0, 1.0, 1.0]
    plain, first = stepped(torch.bfloat16, master=master)
    clipped, second = stepped(torch.bfloat16, maxima, master=master)
    from quintic.optim.numeric.precision import full_precision
    from quintic.optim.state.state import master_of

    before, after = (
        full_precision(model["attn"].q_proj.weight.detach(), master_of(optimizer.state[model["attn"].q_proj.weight]))
        for model, optimizer in ((plain, first), (clipped, second))
    )
    factor = (10.0 / 10.05) ** 0.5
    tolerance = {"rtol": 2.0**-16, "atol": 0.0} if master == "8bit" else {}
    torch.testing.assert_close(after[:4], before[:4] * factor, **tolerance)
    assert torch.equal(after[4:], before[4:])


def test_float64_weights_are_scaled_in_float64():
    maxima = torch.tensor([10.05, 1.0, 37.7, 1 / 3], dtype=torch.float64)
    factors = (10.0 / maxima.clamp(min=10.0)).sqrt().repeat_interleave(4)
    plain, _ = stepped(torch.float64)
    clipped, _ = stepped(torch.float64, maxima)
    for name in ("q_proj", "k_proj"):
        before, after = getattr(plain["attn"], name).weight, getattr(clipped["attn"], name).weight
        torch.testing.assert_close(after, before * factors[:, None], rtol=1e-15, atol=0)
    # Maxima of another dtype give the factors of their values.
    rounded, _ = stepped(torch.float64, maxima.float())
    factors = (10.0 / maxima.float().double().clamp(min=10.0)).sqrt().repeat_interleave(4)
    before, after = plain["attn"].q_proj.weight, rounded["attn"].q_proj.weight
    torch.testing.assert_close(after, before * factors[:, None], rtol=1e-15, atol=0)


def test_float32_weights_do_not_depend_on_the_dtype_of_the_maxima():
    found = [stepped(maxima=torch.tensor([10.05, 1.0, 37.7, 11.3]).to(dtype))[0] for dtype in (None, torch.float64)]
    assert all(map(torch.equal, *(model.parameters() for model in found)))


def test_a_skipped_step_clips_nothing():
    model, optimizer = stepped(on_nonfinite="skip")
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    optimizer.step(qk_logits={"attn": torch.full((4,), 1000.0)})
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"attn.*q_norm"):
        stepped(maxima=[40.0] * 4, norm=True)
    with pytest.raises(ValueError, match="no QK-clip was asked for"):
        Muon([nn.Parameter(torch.ones(4, 4))]).step(qk_logits={"attn": torch.ones(4)})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([torch.ones(4)], "qk_logits is a list: give a mapping"),
        (torch.ones(4), "qk_logits is a Tensor: give a mapping"),
        ([], "qk_logits is a list: give a mapping"),
        ({"attn": [1.0] * 4}, r"qk_logits\['attn'\] is a list: give a tensor"),
        ({"attn": None}, r"qk_logits\['attn'\] is a NoneType: give a tensor"),
    ],
)
def test_what_is_no_mapping_to_tensors_is_named(logits, message):
    model, optimizer = stepped()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=message):
        optimizer.step(qk_logits=logits)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="no QK-clip was asked for"):
        Muon([nn.Parameter(torch.ones(4, 4))]).step(qk_logits=logits)


def test_a_mistake_in_the_layer_changes_nothing():
    model, optimizer = stepped()
    before = [param.detach().clone() for param in model.parameters()]
    for wrong in ({"elsewhere": torch.ones(4)}, {"attn": torch.ones(3)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            optimizer.step(qk_logits=wrong)
    optimizer.step(qk_logits={"attn": torch.ones(4)})
    with pytest.raises(ValueError, match="attn"):
        optimizer.step(qk_logits={"attn": torch.ones(2)})
    model, optimizer = stepped()
    with pytest.raises(ValueError, match="elsewhere"):
        optimizer.step(qk_logits={"elsewhere": torch.ones(4)})
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
