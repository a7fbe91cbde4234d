"""What the rules of the library promise of any matrix, and where they are Muon."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic.optim.rules.library.aurora import BalancedPolar
from quintic.optim.rules.library.ema_nesterov import Lookahead
from quintic.optim.rules.library.hyperball import Hyperball, without_scale
from quintic.optim.rules.library.muon_plus import Renormalize
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.radial import RadialBrake
from quintic.optim.rules.library.two_rate import TwoRateMomentum
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import StageOptions
from quintic.optim.rules.table import RULES

OPTIONS = StageOptions()
sides = st.integers(1, 9)
seeds = st.integers(0, 1000)
few = settings(deadline=None, max_examples=8)


def matrices_of(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trained(weight, gradients, **options):
    """Return the weight after a step for each of the gradients, and the optimizer."""
    param = nn.Parameter(weight.clone())
    optimizer = quintic.Muon([param], **{"lr": 0.1, "compute_dtype": weight.dtype, **options})
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach(), optimizer


def norm(matrix):
    return torch.linalg.matrix_norm(matrix)


@few
@given(m=sides, n=sides, count=st.integers(1, 3), seed=seeds, of=st.sampled_from(["rows", "columns"]))
def test_equalized_norms_are_equal_and_the_matrix_keeps_its_own(m, n, count, seed, of):
    given_matrices = matrices_of(count, m, n, seed=seed)
    result, factors = Equalize(of).apply(given_matrices, {}, OPTIONS)
    assert factors is None
    of_lines = result.norm(dim=-1 if of == "rows" else -2)
    torch.testing.assert_close(of_lines, of_lines.mean(dim=1, keepdim=True).expand_as(of_lines))
    torch.testing.assert_close(norm(result), norm(given_matrices))
    for number in range(count):
        assert torch.equal(Equalize(of).apply(given_matrices[number : number + 1], {}, OPTIONS)[0][0], result[number])


@few
@given(m=st.integers(2, 9), n=st.integers(2, 9), seed=seeds)
def test_both_equalizes_by_the_norms_before_the_change(m, n, seed):
    u = matrices_of(1, m, n, seed=seed, dtype=torch.float64)
    result, _ = Equalize("both").apply(u, {}, OPTIONS)
    by_norms = u / u.norm(dim=-1, keepdim=True) / u.norm(dim=-2, keepdim=True)
    torch.testing.assert_close(result, by_norms * norm(u) ** 2 / math.sqrt(m * n))


@pytest.mark.parametrize("name", ["muoneq", "nanochat"])
@few
@given(m=sides, n=sides, seed=seeds, data=st.data())
def test_the_sizes_of_rows_do_not_matter_to_muoneq(name, m, n, seed, data):
    powers = torch.tensor(data.draw(st.lists(st.integers(-20, 20), min_size=m, max_size=m)))
    weight, gradient = (matrices_of(m, n, seed=seed + number, dtype=torch.float64) for number in range(2))
    plain, _ = trained(weight, [gradient], update_rule=name)
    scaled, _ = trained(weight, [gradient * 2.0 ** powers[:, None]], update_rule=name)
    torch.testing.assert_close(scaled, plain, rtol=1e-9, atol=1e-9)


@few
@given(m=sides, n=sides, seed=seeds, to=st.sampled_from(["frobenius", "rows", "columns", "columns_rows"]))
def test_renormalized_updates_have_the_norm_of_an_orthogonal_matrix(m, n, seed, to):
    result, factors = Renormalize(to).apply(matrices_of(2, m, n, seed=seed), {}, OPTIONS)
    assert factors is None
    torch.testing.assert_close(norm(result), torch.full((2,), math.sqrt(min(m, n))))
    if to != "frobenius":
        of_lines = result.norm(dim=-2 if to == "columns" else -1)
        torch.testing.assert_close(of_lines, of_lines[:, :1].expand_as(of_lines))


@few
@given(m=sides, n=sides, seed=seeds, lr=st.sampled_from([1e-3, 0.1, 0.9]))
def test_hyperball_keeps_the_norm(m, n, seed, lr):
    weight = matrices_of(m, n, seed=seed)
    gradients = [matrices_of(m, n, seed=seed + number) for number in range(5)]
    stepped, optimizer = trained(weight, gradients, update_rule="hyperball", lr=lr, weight_decay=0.5)
    torch.testing.assert_close(norm(stepped), norm(weight), rtol=1e-5, atol=0)
    (state,) = optimizer.state.values()
    torch.testing.assert_close(state["radius"][0], norm(weight), rtol=1e-6, atol=0)


def test_hyperball_in_bfloat16_keeps_the_norm_of_the_first_step():
    """Rounding does not add up, because the norm is kept, and not measured anew."""
    weight = matrices_of(16, 8).bfloat16()
    gradients = [matrices_of(16, 8, seed=number).bfloat16() for number in range(1, 40)]
    stepped, _ = trained(weight, gradients, update_rule="hyperball", lr=0.02, compute_dtype=torch.float32)
    torch.testing.assert_close(norm(stepped.float()), norm(weight.float()), rtol=2e-3, atol=0)


@few
@given(m=sides, n=sides, seed=seeds, power=st.integers(-30, 30))
@pytest.mark.parametrize("name", ["hyperball", "relative_update"])
def test_steps_relative_to_the_weight_grow_with_it(name, m, n, seed, power):
    weight = matrices_of(m, n, seed=seed)
    gradients = [matrices_of(m, n, seed=seed + number) for number in range(3)]
    plain, _ = trained(weight, gradients, update_rule=name)
    scaled, _ = trained(weight * 2.0**power, gradients, update_rule=name)
    assert torch.equal(scaled, plain * 2.0**power)


@few
@given(m=sides, n=sides, seed=seeds, lr=st.sampled_from([1e-3, 0.3]))
def test_a_relative_update_is_as_long_as_the_rate_times_the_weight(m, n, seed, lr):
    weight, gradient = matrices_of(m, n, seed=seed), matrices_of(m, n, seed=seed + 1)
    stepped, _ = trained(weight, [gradient], update_rule="relative_update", lr=lr)
    torch.testing.assert_close(norm(stepped - weight), lr * norm(weight), rtol=1e-3, atol=0)


@few
@given(
    m=sides,
    n=sides,
    seed=seeds,
    outward=st.sampled_from([0.0, 0.25, 1.0]),
    inward=st.sampled_from([0.0, 0.5, 1.0]),
    decay=st.sampled_from([0.0, 4.0]),
)
def test_a_brake_lets_its_share_of_the_change_through(m, n, seed, outward, inward, decay):
    weight, gradient = matrices_of(m, n, seed=seed), matrices_of(m, n, seed=seed + 1)
    free, _ = trained(weight, [gradient], weight_decay=decay)
    rule = UpdateRule(title="brake", constrain=RadialBrake(outward, inward))
    braked, _ = trained(weight, [gradient], weight_decay=decay, update_rule=rule)
    change = norm(free) - norm(weight)
    share = outward if change > 0 else inward
    torch.testing.assert_close(norm(braked), norm(weight) + share * change, rtol=1e-5, atol=1e-6)
    # Only the length is changed.
    torch.testing.assert_close(braked / norm(braked), free / norm(free), rtol=1e-4, atol=1e-5)


@few
@given(m=sides, n=sides, seed=seeds, decay=st.sampled_from([0.0, 0.5]))
def test_rows_of_muown_have_the_norms_that_adam_gives_them(m, n, seed, decay):
    weight = matrices_of(m, n, seed=seed, dtype=torch.float64)
    gradients = [matrices_of(m, n, seed=seed + number, dtype=torch.float64) for number in range(4)]
    stepped, optimizer = trained(weight, gradients, update_rule="muown", weight_decay=decay)
    (state,) = optimizer.state.values()
    torch.testing.assert_close(stepped.norm(dim=1), state["row_magnitude"].abs(), rtol=1e-9, atol=1e-12)


@few
@example(m=4, seed=333, decay=0.0)  # a gradient of 0.001
@given(m=sides, seed=seeds, decay=st.sampled_from([0.0, 0.5]))
def test_a_column_has_no_directions_and_muown_is_adamw(m, seed, decay):
    weight, gradient = (matrices_of(m, 1, seed=seed + number, dtype=torch.float64) for number in range(2))
    stepped, _ = trained(weight, [gradient], update_rule="muown", weight_decay=decay)
    # Adam's first step is as long as its rate, but for eps; PyTorch's own AdamW decays before it.
    expected = (weight - 0.1 * gradient / (gradient.abs() + 1e-8)) * (1 - 0.1 * decay)
    torch.testing.assert_close(stepped, expected, rtol=1e-6, atol=1e-6)


def test_equal_rates_make_one_average_of_two():
    weight = matrices_of(6, 4, dtype=torch.float64)
    gradients = [matrices_of(6, 4, seed=number, dtype=torch.float64) for number in range(1, 5)]
    rule = UpdateRule(title="two equal rates", direction=TwoRateMomentum(fast=0.9, slow=0.9))
    for nesterov in (True, False):
        plain, _ = trained(weight, gradients, momentum=0.9, nesterov=nesterov)
        two, _ = trained(weight, gradients, momentum=0.9, nesterov=nesterov, update_rule=rule)
        torch.testing.assert_close(two, plain, rtol=1e-10, atol=1e-12)


def test_no_look_ahead_is_muon_bit_for_bit():
    weight, gradients = matrices_of(6, 4), [matrices_of(6, 4, seed=number) for number in range(1, 4)]
    rule = UpdateRule(title="no look-ahead", drift=Lookahead(ahead=0.0))
    options = {"weight_decay": 0.3, "cautious": True}
    plain, _ = trained(weight, gradients, **options)
    drifted, _ = trained(weight, gradients, update_rule=rule, **options)
    assert torch.equal(drifted, plain)


@few
@given(n=st.integers(1, 8), share=st.integers(2, 4), is_wide=st.booleans(), seed=seeds)
def test_aurora_balances_neurons(n, share, is_wide, seed):
    """The rows of tall matrices, and the columns of wide ones, are closer to one norm than those of Muon's update."""
    m = share * n + 8
    gradient = (
        matrices_of(m, n, seed=seed, dtype=torch.float64) * torch.linspace(0.2, 2, m, dtype=torch.float64)[:, None]
    )
    gradient = gradient.T.contiguous() if is_wide else gradient
    spreads = {}
    for rule in ("muon", "aurora"):
        stepped, _ = trained(torch.zeros_like(gradient), [gradient], update_rule=rule, orthogonalizer="svd", lr=1.0)
        of_neurons = stepped.norm(dim=0 if is_wide else 1)
        spreads[rule] = float(of_neurons.std() / of_neurons.mean())
    assert 0 < spreads["aurora"] < 0.5 * spreads["muon"]


def test_more_rounds_balance_better():
    gradient = matrices_of(24, 5, dtype=torch.float64) * torch.linspace(0.1, 3, 24, dtype=torch.float64)[:, None]
    spreads = []
    for rounds in (1, 2, 4, 8):
        rule = UpdateRule(title="Aurora", polar=BalancedPolar(num_rounds=rounds))
        stepped, _ = trained(torch.zeros_like(gradient), [gradient], update_rule=rule, orthogonalizer="svd")
        spreads.append(float(stepped.norm(dim=1).std() / stepped.norm(dim=1).mean()))
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 0.2 * spreads[0]


def test_square_matrices_are_muons_for_aurora_bit_for_bit():
    weight, gradients = matrices_of(6, 6), [matrices_of(6, 6, seed=number) for number in range(1, 4)]
    assert torch.equal(trained(weight, gradients, update_rule="aurora")[0], trained(weight, gradients)[0])


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"muown"}))
@settings(deadline=None, max_examples=6)
@given(power=st.integers(-40, 40), seed=seeds)
def test_the_size_of_the_gradients_counts_for_nothing(name, power, seed):
    # Muown's Adam has an epsilon.
    weight, gradients = matrices_of(5, 3, seed=seed), [matrices_of(5, 3, seed=seed + number) for number in range(1, 4)]
    plain, _ = trained(weight, gradients, update_rule=name)
    scaled, _ = trained(weight, [gradient * 2.0**power for gradient in gradients], update_rule=name)
    assert torch.equal(scaled, plain)


@few
@given(m=sides, n=sides, seed=seeds)
def test_a_hyperball_of_zeros_grows_to_its_radius_and_stays(m, n, seed):
    radius = math.sqrt(m / 3)
    param = nn.Parameter(torch.zeros(m, n, dtype=torch.float64))
    optimizer = quintic.Muon([param], lr=0.2, update_rule="hyperball", compute_dtype=torch.float64)
    lengths = []
    direction = matrices_of(m, n, seed=seed, dtype=torch.float64)
    for _ in range(8):
        param.grad = direction.clone()
        optimizer.step()
        lengths.append(float(norm(param.detach())))
    assert lengths[:4] == pytest.approx([0.2 * radius * number for number in range(1, 5)])
    assert lengths[5:] == pytest.approx([radius] * 3)


def test_a_rule_of_hyperball_alone_is_the_librarys():
    weight, gradient = matrices_of(4, 3), matrices_of(4, 3, seed=1)
    own = UpdateRule(title="Hyperball", constrain=Hyperball(), scale=without_scale)
    assert own == RULES["hyperball"]
    assert torch.equal(
        trained(weight, [gradient], update_rule=own)[0], trained(weight, [gradient], update_rule="hyperball")[0]
    )
