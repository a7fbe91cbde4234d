import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quintic
from quintic.optim.numeric.precision import store_
from quintic.optim.rules import update as update_module
from quintic.optim.rules.update import (
    adamw_,
    adjust_lr_factor,
    decay_and_step_,
    momentum_,
    neuron_factors_,
    second_moment_shape,
)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_momentum_is_an_average_and_leaves_the_gradient_alone(nesterov, dtype):
    momentum, mu = torch.zeros(4, 5), 0.9
    expected = np.zeros((4, 5))
    for _ in range(5):
        gradient = torch.randn(4, 5).to(dtype)
        before = gradient.clone()
        (direction,) = momentum_([momentum], [gradient], mu=mu, nesterov=nesterov)
        g = before.double().numpy()
        expected = expected + (1 - mu) * (g - expected)
        look_ahead = (1 - mu) * g + mu * expected if nesterov else expected
        np.testing.assert_allclose(momentum.numpy(), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(direction.numpy(), look_ahead, rtol=1e-5, atol=1e-6)
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("nesterov", [True, False])
def test_directions_never_alias_the_momentum(nesterov):
    momentum = torch.zeros(3, 3)
    (direction,) = momentum_([momentum], [torch.ones(3, 3)], mu=0.5, nesterov=nesterov)
    direction.zero_()
    assert torch.equal(momentum, torch.full((3, 3), 0.5))


@pytest.mark.parametrize(
    ("scale", "m", "n", "expected"),
    [
        ("spectral", 8, 2, 2.0),
        ("spectral", 2, 8, 1.0),
        ("match_rms_adamw", 100, 25, 2.0),
        ("match_rms_adamw", 25, 100, 2.0),
        ("unit_rms", 8, 2, 2.0),
        ("unit_rms", 2, 8, 0.5),
        (None, 8, 2, 1.0),
        (lambda m, n: m + n, 8, 2, 10.0),
    ],
)
def test_lr_factors(scale, m, n, expected):
    assert adjust_lr_factor(scale, m, n) == pytest.approx(expected)


def test_match_rms_gives_the_update_rms_of_adamw():
    """An orthogonal (m, n) matrix times the factor has entries of RMS 0.2, which is AdamW's usual size."""
    q, _ = torch.linalg.qr(torch.randn(300, 70, dtype=torch.float64))
    assert float((q * adjust_lr_factor("match_rms_adamw", 300, 70)).square().mean().sqrt()) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("spectral_norm", "unit_rms"), ("rms_norm", "match_rms_adamw"), ("original", "spectral")]
)
def test_scales_of_other_libraries_are_named(theirs, ours):
    with pytest.raises(ValueError, match=f"adjust_lr='{theirs}': choose .*; .* '{theirs}' is '{ours}' here"):
        adjust_lr_factor(theirs, 2, 1)


def test_unknown_adjust_lr_is_named():
    with pytest.raises(ValueError, match="adjust_lr='moonlight'"):
        adjust_lr_factor("moonlight", 1, 1)


def neuron_normalized(updates, *, beta, axis):
    """NorMuon's last update of a series in float64 NumPy; axis 1 has a second moment per row, axis 0 one per column."""
    second = 0.0
    for u in updates:
        second = beta * second + (1 - beta) * np.mean(u**2, axis=axis, keepdims=True)
    scaled = updates[-1] / np.sqrt(second)
    return scaled * np.linalg.norm(updates[-1]) / np.linalg.norm(scaled)


def ours_normalized(updates, *, beta, dtype=torch.float64):
    m, n = updates[0].shape
    second = torch.zeros(1, *second_moment_shape(m, n), dtype=dtype)
    for u in updates:
        update = torch.as_tensor(u, dtype=dtype)[None]
        before = update.clone()
        out = update * neuron_factors_(update, second, beta=beta)
        assert torch.equal(update, before)
    return out[0].numpy()


@pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 6), (5, 5), (1, 4), (4, 1), (5, 4), (4, 5)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_neuron_normalisation_equals_the_reference(m, n, dtype, rtol):
    updates = np.random.default_rng(0).standard_normal((4, m, n))
    expected = neuron_normalized(updates, beta=0.8, axis=1 if m >= n else 0)
    np.testing.assert_allclose(ours_normalized(updates, beta=0.8, dtype=dtype), expected, rtol=rtol, atol=rtol / 100)


def test_neurons_are_rows_as_in_the_paper_but_columns_of_wide_matrices():
    """The paper's algorithm 1 always takes rows. It leaves a wide polar factor as it is, whose rows have norm one."""
    gradients = np.random.default_rng(0).standard_normal((4, 12, 5))
    u, _, vh = np.linalg.svd(gradients, full_matrices=False)
    tall = u @ vh
    ours, by_rows = ours_normalized(tall, beta=0.8), neuron_normalized(tall, beta=0.8, axis=1)
    np.testing.assert_allclose(ours, by_rows, rtol=1e-12)
    assert np.abs(ours - tall[-1]).max() > 0.05

    wide = tall.swapaxes(1, 2)
    by_rows = neuron_normalized(wide, beta=0.8, axis=1)
    np.testing.assert_allclose(by_rows, wide[-1], rtol=1e-12)
    np.testing.assert_allclose(ours_normalized(wide, beta=0.8), ours.T, rtol=1e-12)


@pytest.mark.parametrize(("shape", "axis"), [((12, 5), 1), ((5, 12), 0)])
def test_a_first_step_gives_all_neurons_one_size(shape, axis):
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = quintic.Muon([weight], lr=1.0, adjust_lr=None, normalize="neuron", orthogonalizer="svd")
    weight.grad = torch.randn(shape, dtype=torch.float64)
    optimizer.step()
    step = -weight.detach().numpy()
    sizes = np.sqrt(np.mean(step**2, axis=axis))
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-9)
    other = np.sqrt(np.mean(step**2, axis=1 - axis))
    assert other.max() > 1.1 * other.min()
    assert np.linalg.norm(step) == pytest.approx(math.sqrt(5))  # as the polar factor has


@given(m=st.integers(1, 9), n=st.integers(1, 9), beta=st.floats(0, 0.99))
def test_neuron_normalisation_keeps_the_norm(m, n, beta):
    update = torch.randn(2, m, n)
    out = update * neuron_factors_(update, torch.zeros(2, *second_moment_shape(m, n)), beta=beta)
    torch.testing.assert_close(out.flatten(1).norm(dim=1), update.flatten(1).norm(dim=1), rtol=1e-4, atol=1e-5)


def test_second_moments_below_the_floor_count_as_the_floor():
    rms = torch.tensor([1.0, 2e-5, 1e-6, 0.0], dtype=torch.float64)
    update = rms[None, :, None].expand(1, 4, 3)
    factors = neuron_factors_(update, torch.zeros(1, 4, 1, dtype=torch.float64), beta=0.0).flatten()
    torch.testing.assert_close(factors / factors[0], torch.tensor([1.0, 5e4, 1e5, 1e5], dtype=torch.float64))


@pytest.mark.parametrize("before", [1e-8, 1e8])
def test_an_update_keeps_its_norm_whatever_the_second_moments_were(before):
    update = torch.randn(2, 5, 3, dtype=torch.float64)
    out = update * neuron_factors_(update, torch.full((2, 5, 1), before, dtype=torch.float64), beta=0.999)
    torch.testing.assert_close(out.flatten(1).norm(dim=1), update.flatten(1).norm(dim=1))


def test_neuron_factors_of_zero_are_finite():
    factors = neuron_factors_(torch.zeros(1, 3, 2), torch.zeros(1, 3, 1), beta=0.9)
    assert torch.isfinite(factors).all()


@pytest.mark.parametrize("cautious", [False, True, "strict"])
@pytest.mark.parametrize("wd", [0.0, 0.3])
def test_apply_decays_and_steps(cautious, wd):
    weight, update = torch.randn(50, 40), torch.randn(50, 40)
    weight[0], update[1] = 0.0, 0.0
    w, u = weight.double().numpy().copy(), update.double().numpy()
    mask = oracle.agreement(u, w, cautious)
    expected = w - 0.1 * wd * mask * w - 0.1 * 2.0 * u
    decay_and_step_([weight], [None], [update], [2.0], lr=0.1, weight_decay=wd, cautious=cautious)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("coupling", "decay"), [("lr", 0.1 * 0.3), ("lr_squared", 0.1**2 * 0.3)])
def test_decay_goes_with_the_learning_rate_or_its_square(coupling, decay):
    weight = torch.randn(20, 10, dtype=torch.float64)
    expected = weight * (1 - decay)
    options = {"lr": 0.1, "weight_decay": 0.3, "decay_coupling": coupling, "cautious": False}
    decay_and_step_([weight], [None], [torch.zeros_like(weight)], [7.0], **options)
    torch.testing.assert_close(weight, expected)


def test_apply_rounds_low_precision_weights_once():
    weight = torch.randn(400).bfloat16()
    update = torch.randn(400)
    exact = weight.float() - 0.01 * (3.0 * update + 0.1 * weight.float())
    decay_and_step_([weight], [None], [update], [3.0], lr=0.01, weight_decay=0.1, cautious=False)
    assert torch.equal(weight, exact.bfloat16())


@pytest.mark.parametrize("eps", [1e-8, 0.5])
@pytest.mark.parametrize("cautious", [False, True])
def test_adamw_equals_the_reference(cautious, eps):
    weight = torch.randn(7, 3)
    reference = oracle.AdamWTensor(weight.numpy())
    exp_avg, exp_avg_sq, step = torch.zeros(7, 3), torch.zeros(7, 3), torch.zeros(())
    for _ in range(6):
        gradient = torch.randn(7, 3)
        options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": eps}
        adamw_(weight, None, gradient, exp_avg, exp_avg_sq, step, weight_decay=0.2, cautious=cautious, **options)
        expected = reference.step(gradient.numpy(), wd=0.2, cautious=cautious, **options)
        np.testing.assert_allclose(weight.numpy(), expected, rtol=2e-5, atol=2e-6)
    assert float(step) == 6


def test_adamw_keeps_float32_state_for_low_precision_weights():
    weight = torch.ones(3).bfloat16()
    exp_avg = torch.zeros(3)
    adamw_(
        weight,
        None,
        torch.full((3,), 1e-3).bfloat16(),
        exp_avg,
        torch.zeros(3),
        torch.zeros(()),
        lr=0.5,
        betas=(0.9, 0.99),
        eps=0.0,
        weight_decay=0.0,
        cautious=False,
    )
    assert float(exp_avg[0]) == pytest.approx(0.1 * float(torch.tensor(1e-3).bfloat16()), rel=1e-6)
    assert torch.equal(weight, torch.full((3,), 0.5).bfloat16())  # the first step is lr times the sign
    assert math.isfinite(float(weight[0]))


@given(st.integers(0, 2**31), st.booleans())
def test_adamw_steps_a_scalar_as_a_vector_of_one_entry(seed, cautious):
    """A rank that owns it has it as a run of memory."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    weight, gradients = torch.randn((), generator=generator), torch.randn(3, generator=generator)
    for shape in ((), (1,)):
        param = weight.reshape(shape).clone()
        state = [torch.zeros(shape), torch.zeros(shape), torch.zeros(())]
        for gradient in gradients:
            options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "cautious": cautious}
            adamw_(param, None, gradient.reshape(shape), *state, **options)
        found.append((param.item(), state[0].item(), state[1].item()))
    assert found[0] == found[1]


def test_signs_of_small_float16_numbers_are_compared():
    """Their product is zero in float16, which would agree in sign with everything."""
    weight = torch.full((2, 2), -1e-4, dtype=torch.float16)
    update = torch.full((2, 2), 1e-4, dtype=torch.float16)
    expected = weight - update.float() * 0.1
    decay_and_step_([weight], [None], [update], [1.0], lr=0.1, weight_decay=5.0, cautious=True)
    torch.testing.assert_close(weight, expected.half(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("piece", [1, 7, 24, 60, 100])
@pytest.mark.parametrize("master", [None, torch.float32, torch.uint16, torch.uint8], ids=str)
@pytest.mark.parametrize("cautious", [False, True])
def test_large_tensors_in_pieces_have_the_same_bits(piece, master, cautious, monkeypatch):
    shapes = [(6, 20), (3, 1, 5, 8), (2, 4, 5, 3), (120,), (), (0, 4)]
    factors = [torch.rand(6, 1), torch.rand(3, 1, 1, 8), torch.rand(1, 1, 1, 1), 0.3, torch.rand(()), torch.rand(1, 4)]

    def run():
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        gradients = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        momenta = [torch.randn(shape, generator=generator) for shape in shapes]
        momenta[0] = momenta[0].T.contiguous().T
        out = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        momentum_(momenta, gradients, mu=0.9, nesterov=True, out=out)
        weights, masters = values, [None] * len(values)
        if master is not None:
            weights = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
            masters = [torch.zeros(shape, dtype=master) for shape in shapes]
            for weight, low, value in zip(weights, masters, values, strict=True):
                store_(weight, low, value)
        decay_and_step_(weights, masters, out, factors, lr=0.1, weight_decay=0.2, cautious=cautious)
        return [*momenta, *out, *weights, *(low for low in masters if low is not None)]

    expected = run()
    monkeypatch.setattr(update_module, "CPU_PIECE", piece)
    for found, whole in zip(run(), expected, strict=True):
        assert torch.equal(found, whole)


@pytest.mark.parametrize("shape", [(1, 1, 64, 32), (1, 1, 32, 64), (8, 1, 16, 16), (4, 2, 16, 16)])
def test_pieces_are_no_larger_than_they_may_be(shape, monkeypatch):
    monkeypatch.setattr(update_module, "CPU_PIECE", 200)
    tensor = torch.arange(math.prod(shape)).view(shape)
    pieces = [piece for (piece,) in update_module.in_pieces([tensor], entries=200)]
    assert max(piece.numel() for piece in pieces) <= 200
    assert sorted(torch.cat([piece.flatten() for piece in pieces]).tolist()) == list(range(tensor.numel()))
    assert len(pieces) <= 2 * tensor.numel() / 200
