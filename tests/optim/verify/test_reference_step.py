"""The reference step against an independent one and against `Muon.step`, and `verify` on one device."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic import Experts, Flatten, Heads, Matrix, Muon, Rows, Split, reference_step, verify
from quintic.optim.step import bucket_step, operands, torch_backend

EXACT = {"orthogonalizer": "polar_express", "compute_dtype": torch.float64}
FLOAT32 = {"orthogonalizer": "polar_express", "compute_dtype": torch.float32}


VIEWS = {
    "matrix": ((6, 4), Matrix()),
    "row": ((1, 5), Matrix()),
    "nothing": ((0, 4), Matrix()),
    "transposed": ((5, 7), Matrix(transposed=True)),
    "heads": ((4, 6), Heads(3, dim=1)),
    "fused": ((12, 5), Split((2, 2, 2), groups=2)),
    "experts": ((3, 4, 6), Experts(transposed=True)),
    "bank": ((6, 4), Rows(2)),
    "filters": ((4, 3, 2, 2), Flatten()),
}


class Model(nn.Module):
    """Every view, matrices of one row and of none, a vector and a scalar."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, (shape, _) in VIEWS.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
        self.columns = nn.Parameter(torch.randn(7, 3, dtype=dtype).mT)
        self.vector = nn.Parameter(torch.randn(9, dtype=dtype))
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))

    def groups(self, **options):
        groups = [
            {"params": [getattr(self, name)], "param_names": [name], "view": view, **options}
            for name, (_, view) in VIEWS.items()
        ]
        groups.append({"params": [self.columns], "param_names": ["columns"], **options})
        adamw = {"params": [self.vector, self.scalar], "param_names": ["vector", "scalar"], "algorithm": "adamw"}
        return [*groups, {**adamw, **options}]


def give(model, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if name in without else gradient


def pair(dtype=torch.float32, group_options=None, **options):
    """Return two equal models with an optimizer each."""
    first, second = Model(dtype), Model(dtype)
    second.load_state_dict(first.state_dict())
    return [(model, Muon(model.groups(**(group_options or {})), lr=0.05, **options)) for model in (first, second)]


def everything(model, optimizer):
    state = {f"{name}.{key}": v for name, p in model.named_parameters() for key, v in optimizer.state[p].items()}
    return {key: value.detach().clone() for key, value in {**dict(model.named_parameters()), **state}.items()}


def differing(first, second, rtol=0.0, atol=0.0):
    """Return the names of the tensors that are not equal, or not close."""
    return [
        key
        for key, value in first.items()
        if not torch.allclose(value.double(), second[key].double(), rtol=rtol, atol=atol, equal_nan=True)
    ]


# -- reference_step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neuron", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (3, 8), (1, 5), (5, 1)])
def test_a_step_is_that_of_the_oracle(shape, neuron):
    param = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    options = {"momentum": 0.9, "weight_decay": 0.3, "cautious": True, **EXACT}
    optimizer = Muon([param], lr=0.1, normalize="neuron" if neuron else None, normalize_beta=0.7, **options)
    matrix = oracle.MuonMatrix(param.detach().numpy(), neuron=neuron)
    for _ in range(4):
        param.grad = torch.randn(shape, dtype=torch.float64)
        matrix.step(param.grad.numpy(), lr=0.1, mu=0.9, wd=0.3, cautious=True, beta=0.7)
        reference_step(optimizer)
    np.testing.assert_allclose(param.detach().numpy(), matrix.w, rtol=1e-9, atol=1e-9)


def test_vectors_are_those_of_the_oracle():
    param = nn.Parameter(torch.randn(7, dtype=torch.float64))
    optimizer = Muon(
        [{"params": [param], "algorithm": "adamw"}],
        adamw_lr=0.1,
        weight_decay=0.3,
        adamw_weight_decay=0.3,
        cautious=True,
    )
    vector = oracle.AdamWTensor(param.detach().numpy())
    for _ in range(4):
        param.grad = torch.randn(7, dtype=torch.float64)
        vector.step(param.grad.numpy(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, wd=0.3, cautious=True)
        reference_step(optimizer)
    np.testing.assert_allclose(param.detach().numpy(), vector.w, rtol=1e-12)


CASES = {
    "plain": (torch.float32, FLOAT32),
    "neuron": (torch.float32, {**FLOAT32, "normalize": "neuron", "nesterov": False}),
    "cautious": (
        torch.float32,
        {**FLOAT32, "weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": True, "adjust_lr": "unit_rms"},
    ),
    "scaled": (
        torch.float32,
        {**FLOAT32, "weight_decay": 3.0, "adamw_weight_decay": 3.0, "cautious": "strict", "scale_decay": True},
    ),
    "squared": (
        torch.float32,
        {"weight_decay": 0.3, "adamw_weight_decay": 0.3, "decay_coupling": "lr_squared", "momentum": 0.0},
    ),
    "bf16": (torch.bfloat16, {"weight_decay": 0.1, "adamw_weight_decay": 0.1}),
    "fp32": (torch.bfloat16, {"master": "fp32", "normalize": "neuron"}),
    "mantissa": (torch.bfloat16, {"master": "mantissa", "weight_decay": 0.1, "adamw_weight_decay": 0.1}),
    "8bit": (torch.bfloat16, {"master": "8bit", "weight_decay": 0.1, "adamw_weight_decay": 0.1}),
    "fp16": (torch.float16, {"master": "fp32", "compute_dtype": torch.float16}),
    "float64": (torch.float64, {"normalize": "neuron", "compute_dtype": torch.float64}),
    "svd": (torch.float32, {"orthogonalizer": "svd"}),
    "function": (torch.float32, {"orthogonalizer": lambda x: x / x.norm(dim=(-2, -1), keepdim=True)}),
}


@pytest.mark.parametrize("name", CASES)
def test_matrices_agree_with_step_to_the_last_bit(name):
    dtype, options = CASES[name]
    (model, optimizer), (other, reference) = pair(dtype, **options)
    for step in range(4):
        for one in (model, other):
            give(one, step, without=("heads", "vector") if step == 2 else ())
        optimizer.step()
        reference_step(reference)
    first, second = everything(model, optimizer), everything(other, reference)
    # PyTorch's fused AdamW for CPUs rounds in its own way.
    assert [key for key in differing(first, second) if not key.startswith(("vector", "scalar"))] == []
    assert differing(first, second, rtol=1e-5, atol=1e-7) == []


def test_every_matrix_of_a_bank_has_its_own_rate():
    params = [nn.Parameter(torch.ones(6, 4) + torch.eye(6, 4)) for _ in range(2)]
    for param, step in zip(params, (Muon.step, reference_step), strict=True):
        optimizer = Muon([{"params": [param], "view": Rows(2), "lr_multipliers": (0.0, 1.0, 3.0)}], **FLOAT32)
        before = param.detach().clone()
        param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        step(optimizer)
        assert torch.equal(param[:2], before[:2])
    assert torch.equal(params[0], params[1])


def test_groups_keep_their_cadence():
    (model, optimizer), (other, reference) = pair(group_options={"step_every": 3}, **FLOAT32)
    for step in range(5):
        give(model, step)
        give(other, step)
        optimizer.step()
        reference_step(reference)
        assert [g["pending_steps"] for g in reference.param_groups] == [
            g["pending_steps"] for g in optimizer.param_groups
        ]
    assert differing(everything(model, optimizer), everything(other, reference), rtol=1e-5, atol=1e-7) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(value):
    model = Model()
    give(model, 0)
    model.bank.grad[3, 1] = value
    optimizer = Muon(model.groups(), on_nonfinite="skip")
    before = everything(model, optimizer)
    reference_step(optimizer)
    assert differing(before, everything(model, optimizer)) == []
    optimizer = Muon(model.groups(), on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match="bank"):
        reference_step(optimizer)
    assert differing(before, everything(model, optimizer)) == []


def test_no_gradient_is_modified():
    model = Model()
    give(model, 0)
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    reference_step(Muon(model.groups(), normalize="neuron"))
    assert differing(before, {name: param.grad for name, param in model.named_parameters()}) == []


def test_what_the_reference_cannot_take_is_an_error():
    with pytest.raises(TypeError, match="SGD"):
        reference_step(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = Muon([{"params": [embedding.weight], "param_names": ["table"], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="table: sparse"):
        reference_step(optimizer)


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_right_step_is_said_to_be_right_and_undone(name):
    dtype, options = CASES[name]
    model = Model(dtype)
    optimizer = Muon(model.groups(), lr=0.05, **options)
    for step in range(2):
        give(model, step)
        before, said = everything(model, optimizer), str(optimizer.last_step())
        report = verify(model, optimizer)
        assert report.ok, str(report)
        assert str(report).startswith("the step is right: 12 parameters (18 matrices) on 1 rank agree")
        assert report.is_bitwise or report.worst.name in ("vector", "scalar")
        assert differing(before, everything(model, optimizer)) == []
        assert str(optimizer.last_step()) == said
        optimizer.step()


def test_training_goes_on_as_if_nothing_had_happened():
    calls = []
    group_options = {"step_every": 2}
    (model, optimizer), (other, untouched) = pair(
        group_options=group_options, telemetry_every=1, on_nonfinite="skip", **FLOAT32
    )
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
    other_scheduler = torch.optim.lr_scheduler.LinearLR(untouched, total_iters=9)
    for step in range(5):
        give(model, step)
        give(other, step)
        random = torch.get_rng_state()
        assert verify(model, optimizer).num_parameters == 12
        assert torch.equal(random, torch.get_rng_state())
        assert len(calls) == step
        for one, its_scheduler in ((optimizer, scheduler), (untouched, other_scheduler)):
            one.step()
            its_scheduler.step()
        assert str(optimizer.last_step()) == str(untouched.last_step())
        assert optimizer.telemetry() == untouched.telemetry()
    assert differing(everything(model, optimizer), everything(other, untouched)) == []
    assert len(calls) == 5


def test_random_gradients_stand_in_and_are_removed():
    model = Model()
    report = verify(model, Muon(model.groups()))
    assert report.ok
    assert report.num_parameters == 12
    assert all(param.grad is None for param in model.parameters())


def test_some_gradients_are_enough():
    model = Model()
    model.bank.grad = torch.randn(6, 4)
    report = verify(model, Muon(model.groups()))
    assert report.ok
    assert (report.num_parameters, report.num_matrices) == (1, 3)
    assert model.matrix.grad is None


def test_not_finite_on_both_sides_is_right():
    model = Model()
    give(model, 0)
    model.matrix.grad[0, 0] = float("nan")
    assert verify(model, Muon(model.groups())).ok


@given(factor=st.sampled_from([0.0, 0.97, 1.03, -1.0, float("nan")]), normalize=st.sampled_from([None, "neuron"]))
@settings(max_examples=10)
def test_a_wrong_factor_is_found(factor, normalize):
    model = Model()
    give(model, 0)
    optimizer = Muon(model.groups(), normalize=normalize, **FLOAT32)
    before = everything(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        right = operands.BucketCache.scales
        patch.setattr(operands.BucketCache, "scales", lambda *arguments: factor * right(*arguments))
        report = verify(model, optimizer)
    assert not report.ok
    assert {(wrong.name, wrong.tensor) for wrong in report.wrong} == {
        (name, "weight") for name in (*VIEWS, "columns") if name != "nothing"
    }
    assert differing(before, everything(model, optimizer)) == []


def test_the_matrix_that_is_wrong_is_named(monkeypatch):
    model = Model()
    give(model, 0)
    optimizer = Muon(model.groups(), **FLOAT32)
    right = bucket_step.orthogonalized

    def swapped(directions, form, bucket, *others):
        update = right(directions, form, bucket, *others)
        if bucket.members[0].name == "bank":
            update[1] = update[1].flip(0)
        return update

    monkeypatch.setattr(bucket_step, "orthogonalized", swapped)
    report = verify(model, optimizer)
    (wrong,) = report.wrong
    assert (wrong.name, wrong.tensor, wrong.matrix, wrong.num_matrices, wrong.ranks) == ("bank", "weight", 1, 3, (0,))
    assert wrong is report.worst
    assert wrong.relative > 0.1
    lines = str(report).splitlines()
    assert lines[0].startswith("THE STEP IS WRONG")
    assert lines[1].startswith("  bank, matrix 1 of 3, weight on rank 0: off by")


def test_wrong_state_is_found(monkeypatch):
    model = Model()
    give(model, 0)
    optimizer = Muon(model.groups(), **FLOAT32)
    right = torch_backend.momentum_

    def late(momenta, gradients, **options):
        found = right(momenta, gradients, **options)
        for momentum in momenta:
            momentum *= 1.001
        return found

    monkeypatch.setattr(torch_backend, "momentum_", late)
    report = verify(model, optimizer)
    assert {wrong.tensor for wrong in report.wrong} == {"momentum_buffer"}
    assert report.worst.relative == pytest.approx(1e-3, rel=1e-2)


def test_a_step_that_raises_leaves_everything_as_it_was():
    def broken(x):
        raise RuntimeError("no polar factor today")

    model = Model()
    optimizer = Muon(model.groups(), orthogonalizer=broken)
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="today"):
        verify(model, optimizer)
    assert differing(before, everything(model, optimizer)) == []
    assert all(param.grad is None for param in model.parameters())


def test_parameters_of_another_model_are_found():
    model = Model()
    report = verify(Model(), Muon(model.groups()))
    assert not report.ok
    assert not report.wrong
    others = len(list(model.parameters())) - 1
    expected = f": this parameter of the optimizer is none of the model's (and {others} more); make"
    assert str(report).count(expected) == str(report).count("none of the model's") == 1


def test_verify_needs_a_muon():
    model = Model()
    with pytest.raises(TypeError, match="AdamW"):
        verify(model, torch.optim.AdamW(model.parameters()))


def test_names_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight.grad = torch.randn(4, 4)
    report = quintic.verify(model, Muon(model.parameters()))
    assert report.worst.name == "0.weight"
