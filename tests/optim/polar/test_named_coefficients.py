"""Named sets of coefficients, against figures written here from their sources, in float64."""

import copy
import re
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from torch import nn

import quintic
from quintic.optim.polar.forms import resolve
from quintic.optim.polar.named_coefficients import named_coefficients

MUON = (3.4445, -4.775, 2.0315)
CUBIC = [
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.431257, 0.0),
    (2.4418906, -1.276404, 0.0),
    (2.2230472, -0.963065, 0.0),
]
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]
GUARDED_CANS = [(a / 1.02, b / 1.02**3, c / 1.02**5) for a, b, c in CANS[:-1]] + CANS[-1:]
SETS = {
    "polar_express": oracle.PUBLISHED_POLAR_EXPRESS,
    "muon": [MUON] * 5,
    "moonlight": [MUON] * 5,
    "deepseek_v4": [MUON] * 8 + [(2.0, -1.5, 0.5)] * 2,
    "cubic": CUBIC,
    "cans": GUARDED_CANS,
}
NAMES = "'polar_express', 'muon', 'moonlight', 'deepseek_v4', 'cubic', 'cans'"
PAGE = Path(__file__).parents[3] / "docs/explanation/orthogonalization.md"


def composed(s, triples):
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


def square_layer(**options):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False)
    return layer, quintic.Muon([{"params": list(layer.named_parameters())}], **options)


def trained(layer, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        layer.weight.grad = torch.randn(4, 6, generator=generator)
        optimizer.step()
    return layer.weight.detach().clone()


# ------------------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("method", ["auto", "polar_express", "gram", "newton_schulz"])
@pytest.mark.parametrize("name", SETS)
def test_a_name_stands_for_the_published_polynomials(name, method, shape):
    if (name, method) == ("cubic", "newton_schulz"):
        pytest.skip("an error, which another test expects")
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = quintic.orthogonalize(x, method, coefficients=name, compute_dtype=torch.float64)
    expected = oracle.polynomial_polar(x.numpy(), SETS[name], 0.0 if method == "newton_schulz" else 0.02)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SETS)
def test_the_page_has_the_ranges_of_every_set(name):
    """The least and the largest image of [0.001, 1], divided by 1.02 first."""
    (row,) = re.findall(rf'^\| `"{name}"` \| \d.*$', PAGE.read_text("utf-8"), re.MULTILINE)
    cells = [cell.strip() for cell in row.split("|")][1:-1]
    found = composed(np.geomspace(1e-3, 1, 400_001) / 1.02, SETS[name])
    assert cells[1] == str(len(SETS[name]))
    assert cells[2] == f"{found.min():.2f} to {found.max():.2f}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["auto", "polar_express", "gram"])
@pytest.mark.parametrize("name", SETS)
def test_no_set_diverges_in_16_bits(name, method, dtype):
    """Small matrices of every rank: their singular values meet the ends of the intervals, and errors do not average."""
    largest = torch.linalg.matrix_norm(orthogonalized_levels(method, name, dtype), ord=2).max()
    limit = composed(np.linspace(0, 1, 10_001), SETS[name]).max()
    # The Gram form in bfloat16 is the standard form in all but some steps, where its errors are larger.
    assert largest < limit + (0.3 if method != "gram" else 1.0)


def test_cans_without_a_guard_diverges():
    """The reason why the named set has one."""
    assert torch.linalg.matrix_norm(orthogonalized_levels("auto", CANS, torch.bfloat16), ord=2).max() > 1e3


def orthogonalized_levels(method, coefficients, dtype):
    """Polar factors of 2,000 matrices (4, 8) of three levels of singular values, one of them 1."""
    generator = torch.Generator().manual_seed(1)
    u = torch.linalg.qr(torch.randn(2000, 4, 4, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(2000, 8, 4, generator=generator, dtype=torch.float64))[0]
    levels = 10 ** (-4 * torch.rand(2000, 3, generator=generator, dtype=torch.float64))
    levels[:, 0] = 1
    which = torch.randint(1, 3, (2000, 4), generator=generator)
    which[:, 0] = 0
    x = (u * levels.gather(1, which)[:, None]) @ v.mT
    return quintic.orthogonalize(x, method, coefficients=coefficients, compute_dtype=dtype).double()


# ---------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_its_own_number_of_steps_by_default(name):
    assert len(named_coefficients(name)) == len(SETS[name])
    assert resolve("auto", 4, 4, coefficients=name, device_type="cpu").coefficients == named_coefficients(name)


def test_computed_and_repeated_sets_have_any_number_of_steps():
    assert named_coefficients("muon", 3) == named_coefficients("moonlight", 3) == (MUON,) * 3
    for steps in (1, 4, 8):
        found = resolve("gram", 4, 4, steps=steps, coefficients="polar_express", device_type="cpu").coefficients
        assert found == resolve("gram", 4, 4, steps=steps, device_type="cpu").coefficients
        assert len(found) == steps


def test_fixed_sets_take_their_own_number_alone():
    assert named_coefficients("deepseek_v4", 10) == named_coefficients("deepseek_v4")
    for name, steps in {"deepseek_v4": 5, "cubic": 4, "cans": 6}.items():
        with pytest.raises(ValueError, match=f"^steps={steps}: coefficients='{name}' are made for {len(SETS[name])}"):
            quintic.orthogonalize(torch.eye(3), steps=steps, coefficients=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "deepseek"}, f"coefficients='deepseek': no set has this name; choose one of {NAMES}, or"),
        (
            {"coefficients": "deepseek_v4", "orthogonalizer_steps": 5},
            r"orthogonalizer_steps=5: coefficients='deepseek_v4' are made for 10 steps; give that, or None",
        ),
        ({"coefficients": "cubic", "orthogonalizer": "newton_schulz"}, "choose 'auto', 'polar_express' or 'gram'"),
        ({"coefficients": "muon", "orthogonalizer": "svd"}, "coefficients: 'svd' is exact and takes none"),
    ],
)
def test_errors_name_the_option_and_the_choices(options, message):
    with pytest.raises(ValueError, match=rf"^parameter group 0 \(weight\): .*{message}"):
        square_layer(**options)
    layer, optimizer = square_layer()
    optimizer.param_groups[0].update(options)
    layer.weight.grad = torch.ones(4, 6)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


# ---------------------------------------------------------------------------------------------- in the optimizer


def test_steps_with_a_name_are_steps_with_its_list():
    for name, triples in SETS.items():
        named = trained(*square_layer(coefficients=name, compute_dtype=torch.float64), 3)
        listed = trained(*square_layer(coefficients=triples, compute_dtype=torch.float64), 3)
        torch.testing.assert_close(named, listed, rtol=1e-5, atol=1e-7)
    assert not torch.equal(named, trained(*square_layer(compute_dtype=torch.float64), 3))


def test_the_plan_shows_the_name():
    assert "cubic" in str(square_layer(coefficients="cubic")[1].plan())
    assert str(resolve("gram", 8, 64, coefficients="cans", device_type="cpu")) == "gram fp16, cans"
    assert str(resolve("newton_schulz", 8, 64, device_type="cpu")) == "newton_schulz bf16"


def test_a_name_does_not_tell_forms_apart():
    muon, moonlight = (resolve("auto", 4, 4, coefficients=name, device_type="cpu") for name in ("muon", "moonlight"))
    assert (muon, hash(muon)) == (moonlight, hash(moonlight))


def test_checkpoints_have_the_name():
    layer, optimizer = square_layer(coefficients="deepseek_v4")
    trained(layer, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["coefficients"] == "deepseek_v4"
    assert saved["param_groups"][0]["orthogonalizer_steps"] is None
    twin, other = square_layer(orthogonalizer_steps=3)
    twin.load_state_dict(layer.state_dict())
    other.load_state_dict(saved)
    assert other.param_groups[0]["coefficients"] == "deepseek_v4"
    assert torch.equal(trained(layer, optimizer, 2, seed=1), trained(twin, other, 2, seed=1))


MUONS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize(
    ("options", "triple", "steps"),
    [
        ({"orthogonalizer": "newton_schulz"}, MUONS, 5),
        ({"orthogonalizer": "newton_schulz", "orthogonalizer_steps": 6}, MUONS, 6),
        ({"orthogonalizer": "newton_schulz", "coefficients": "moonlight"}, MUONS, 5),
        ({"orthogonalizer": "gram", "coefficients": (2.0, -1.5, 0.5), "orthogonalizer_steps": 7}, (2.0, -1.5, 0.5), 7),
        # Several polynomials, or none.
        ({"orthogonalizer_steps": 6}, MUONS, 6),
        ({"coefficients": "deepseek_v4"}, MUONS, 10),
        ({"orthogonalizer": "svd"}, MUONS, 5),
        ({"orthogonalizer": torch.sign}, MUONS, 5),
    ],
)
def test_exported_states_have_the_polynomial_of_all_steps(options, triple, steps):
    from quintic.interchange import export_torch_state

    layer, optimizer = square_layer(**options)
    trained(layer, optimizer, 1)
    group = export_torch_state(optimizer)["muon"]["param_groups"][0]
    assert (group["ns_coefficients"], group["ns_steps"]) == (triple, steps)
