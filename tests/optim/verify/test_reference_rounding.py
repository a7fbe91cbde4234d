"""The reference's bounds for the rounding of its own numbers (the steps are tested in test_reference_step.py)."""

import itertools

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.rules import update
from quintic.optim.verify import matrix_step, reference
from quintic.optim.verify.matrix_step import perturbed

PATTERNS = [0, 1, 2]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_shaken_direction_is_a_neighbour(dtype, pattern):
    direction = torch.randn(1, 61, 40).to(dtype)
    found = perturbed(direction, direction.abs(), pattern)
    assert found.dtype == dtype
    relative = (found.double() - direction.double()).abs() / direction.double().abs()
    assert relative.max() <= 1.5 * torch.finfo(dtype).eps
    share = float((found != direction).double().mean())
    assert share == pytest.approx(
        1 / 31 if dtype == torch.bfloat16 else 1, abs=0.01 if dtype == torch.bfloat16 else 0.4
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_rows_columns_and_all_of_small_matrices_entries_are_moved_both_ways(pattern):
    ones = torch.ones(1, 8, 6)
    moves = (perturbed(ones, ones, pattern) - 1).sign()[0]
    assert all(1 <= int((line > 0).sum()) < len(line) for line in (*moves, *moves.T))


def test_what_cancels_is_moved_by_a_rounding_of_its_terms():
    first = torch.randn(40, 30)
    second = -first * (1 + 1e-3 * torch.rand(40, 30))
    moved = (perturbed(first + second, first.abs() + second.abs()).double() - (first + second).double()).abs()
    expected = torch.finfo(torch.float32).eps * (first.abs() + second.abs()).double()
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=0.0)


def test_patterns_differ():
    ones = torch.ones(1, 30, 20)
    found = [perturbed(ones, ones, pattern) for pattern in PATTERNS]
    assert all((a != b).any() for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("state_dtype", [None, "bf16", "int8"])
@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_a_last_bit_of_float32_is_explained_in_every_form_of_weights(monkeypatch, master, state_dtype):
    """As where kernels contract products and sums: few values differ, and some of these are stored as neighbours."""
    store_ = update.store_

    def store_shaken_(weight, kept, value):
        odd = torch.arange(value.numel()).view(value.shape) % 2 == 1
        store_(weight, kept, value.copy_(torch.nextafter(value, torch.where(odd, torch.inf, -torch.inf))))

    def shaken(function):
        def call(*args, **options):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(update, "store_", store_shaken_)
                return function(*args, **options)

        return call

    torch.manual_seed(0)
    shapes = {"matrix": (64, 128), "table": (64, 64), "gain": (64,)}
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in shapes.items()})
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, param)], "algorithm": "muon" if name == "matrix" else "adamw"}
        for name, param in named.items()
    ]
    # A rate at which one unit of 24 bits is much of a step.
    optimizer = quintic.Muon(groups, lr=1e-4, adamw_lr=1e-4, master=master, state_dtype=state_dtype)
    for _ in range(2):
        for param in named.values():
            param.grad = torch.randn_like(param)
        optimizer.step()
    monkeypatch.setattr(reference, "adamw_", shaken(reference.adamw_))
    monkeypatch.setattr(matrix_step, "decay_and_step_", shaken(matrix_step.decay_and_step_))
    report = quintic.verify(model, optimizer)
    assert report.ok, str(report)
    # A step that is left out is no rounding.
    monkeypatch.setattr(reference, "adamw_", lambda *_, **__: None)
    monkeypatch.setattr(matrix_step, "decay_and_step_", lambda *_, **__: None)
    wrong = {(one.name, one.tensor) for one in quintic.verify(model, optimizer).wrong}
    assert {("matrix", "weight"), ("table", "weight")} <= wrong
