"""Options of a group beyond the rule: cadence, multipliers, decay tied to the schedule, and what the last step says."""

import numpy as np
import oracle
import pytest
import torch
from torch import nn

from quintic import Experts, Heads, Muon, Rows, Split
from quintic.optim.step.operands import BucketCache
from quintic.optim.step.torch_backend import TorchBackend

EXACT = {"compute_dtype": torch.float64}


def stepped(optimizer, params, gradients):
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()


# -- step_every --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_group_with_a_cadence_steps_on_the_sum_of_its_gradients(set_to_none):
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
    twin = nn.Parameter(vector.detach().clone())
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw", "step_every": 3}], adamw_lr=0.1)
    reference = torch.optim.AdamW([twin], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    total = torch.zeros(3)
    for step in range(1, 10):
        before_matrix, before_vector = matrix.detach().clone(), vector.detach().clone()
        optimizer.zero_grad(set_to_none)
        inputs = torch.randn(5, 3)
        ((inputs + vector) @ matrix.T).square().mean().backward()
        total += vector.grad - (0 if step % 3 == 1 else total)  # the gradient holds the sum since the last step
        optimizer.step()
        assert not torch.equal(matrix, before_matrix)
        if step % 3:
            assert torch.equal(vector, before_vector)
            assert optimizer.last_step().waiting == 1
        else:
            twin.grad = vector.grad.clone()
            reference.step()
            assert torch.equal(vector, twin)
            total.zero_()


def test_the_place_in_the_cadence_is_saved():
    param = nn.Parameter(torch.randn(3))
    groups = [{"params": [param], "algorithm": "adamw", "step_every": 2}]
    first, second = Muon(groups), Muon([dict(group) for group in groups])
    stepped(first, [param], [torch.randn(3)])
    second.load_state_dict(first.state_dict())
    before = param.detach().clone()
    stepped(second, [param], [torch.randn(3)])
    assert not torch.equal(param, before)


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_cadence_is_a_positive_integer(value):
    with pytest.raises(ValueError, match="step_every"):
        Muon([nn.Parameter(torch.ones(2, 2))], step_every=value)


# -- lr_multipliers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (Rows(4), (16, 6)),
        (Experts(), (4, 3, 6)),
        (Heads(4), (8, 5)),
        (Split((4, 4, 4, 4)), (16, 6)),
        (Split((2, 4, 2, 8)), (16, 6)),
    ],
    ids=str,
)
@pytest.mark.parametrize("workspace", [None, 2000])
def test_each_matrix_of_a_bank_has_its_own_multiplier(view, shape, workspace):
    multipliers = (1.0, 2.0, 0.5, 0.0)
    param = nn.Parameter(torch.randn(shape))
    twins = [oracle.MuonMatrix(matrix.numpy()) for batch in view.batches(param.detach()) for matrix in batch]
    options = {"lr_multipliers": multipliers, "max_workspace_bytes": workspace, "adjust_lr": None}
    optimizer = Muon([{"params": [param], "view": view}], lr=0.1, **options, **EXACT)
    for _ in range(3):
        stepped(optimizer, [param], [torch.randn(shape)])
        gradients = [matrix for batch in view.batches(param.grad) for matrix in batch]
        for twin, gradient, multiplier in zip(twins, gradients, multipliers, strict=True):
            twin.step(gradient.numpy(), lr=0.1, scale=multiplier)
    found = [matrix.numpy() for batch in view.batches(param.detach()) for matrix in batch]
    for matrix, twin in zip(found, twins, strict=True):
        np.testing.assert_allclose(matrix, twin.w, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("option", "value"), [("lr_multipliers", (2.0, 0.5)), ("adjust_lr", "spectral")])
def test_a_changed_scale_counts_at_the_next_step(option, value):
    """The step of an optimizer that had it from the start: momentum and weights do not remember scales."""
    param, other = (nn.Parameter(torch.ones(8, 3)) for _ in range(2))
    optimizer, expected = (
        Muon([{"params": [each], "view": Rows(4), **options}])
        for each, options in ((param, {"adjust_lr": None}), (other, {"adjust_lr": None, option: value}))
    )
    for step in range(2):
        gradient = torch.randn(8, 3)
        if step:
            optimizer.param_groups[0][option] = value
            other.data.copy_(param)
        stepped(optimizer, [param], [gradient])
        stepped(expected, [other], [gradient])
        assert torch.equal(param, other) == (step == 1)


def test_a_wrong_number_of_multipliers_is_named():
    with pytest.raises(ValueError, match="bank: lr_multipliers are 2, the matrices 3"):
        Muon([{"params": [("bank", nn.Parameter(torch.ones(6, 4)))], "view": Rows(2), "lr_multipliers": (1, 2)}])


# -- weight decay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_decay_can_be_tied_to_the_square_of_the_learning_rate(algorithm, cautious):
    param = nn.Parameter(torch.randn(6, 4))
    options = {
        "cautious": cautious,
        "weight_decay": 3.0,
        "adamw_weight_decay": 3.0,
        "decay_coupling": "lr_squared",
        "lr": 0.1,
    }
    optimizer = Muon([{"params": [param], "algorithm": algorithm, **options}], **EXACT)
    if algorithm == "muon":
        twin = oracle.MuonMatrix(param.detach().numpy())
    else:
        twin = oracle.AdamWTensor(param.detach().numpy())
    for lr in (0.1, 0.05, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        stepped(optimizer, [param], [torch.randn(6, 4)])
        gradient = param.grad.numpy()
        if algorithm == "muon":
            twin.step(gradient, lr=lr, wd=3.0 * lr, cautious=cautious)
        else:
            twin.step(gradient, lr=lr, betas=(0.9, 0.95), eps=1e-8, wd=3.0 * lr, cautious=cautious)
        np.testing.assert_allclose(param.detach().numpy(), twin.w, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("neuron", [False, True])
@pytest.mark.parametrize("cautious", [False, True, "strict"])
@pytest.mark.parametrize("coupling", ["lr", "lr_squared"])
@pytest.mark.parametrize(
    ("view", "shape"),
    [(Rows(8), (32, 3)), (Heads(4), (24, 5)), (Split((9, 5, 4, 2)), (20, 3)), (Experts(transposed=True), (4, 3, 8))],
    ids=str,
)
def test_decay_can_have_the_scale_and_the_multiplier_of_each_matrix(view, shape, coupling, cautious, neuron):
    multipliers = (1.0, 2.0, 0.5, 0.0)
    param = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    param.data[..., 0] = 0.0
    twins = [
        oracle.MuonMatrix(matrix.numpy(), neuron=neuron) for batch in view.batches(param.detach()) for matrix in batch
    ]
    options = {"lr_multipliers": multipliers, "weight_decay": 1.2, "decay_coupling": coupling, "cautious": cautious}
    normalize = "neuron" if neuron else None
    optimizer = Muon([{"params": [param], "view": view}], scale_decay=True, normalize=normalize, **options, **EXACT)
    for lr in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        stepped(optimizer, [param], [torch.randn(shape, dtype=torch.float64)])
        gradients = [matrix for batch in view.batches(param.grad) for matrix in batch]
        for twin, gradient, multiplier in zip(twins, gradients, multipliers, strict=True):
            own = multiplier * max(1.0, gradient.shape[0] / gradient.shape[1]) ** 0.5
            wd = 1.2 * (lr if coupling == "lr_squared" else 1.0)
            twin.step(gradient.numpy(), lr=lr, wd=wd, cautious=cautious, scale=own, decay_scale=own)
    found = [matrix.numpy() for batch in view.batches(param.detach()) for matrix in batch]
    for matrix, twin in zip(found, twins, strict=True):
        np.testing.assert_allclose(matrix, twin.w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("scaled", "second"), [(False, 0.988), (True, 0.976)])
def test_decay_of_the_second_matrix_of_an_uneven_bank(scaled, second):
    """The speedrun's constants: lr^2 times decay, and that twice for the matrix with twice the rate."""
    param = nn.Parameter(torch.ones(8, 4, dtype=torch.float64))
    bank = {"params": [param], "view": Rows(4), "lr_multipliers": (1.0, 2.0)}
    options = {"weight_decay": 1.2, "decay_coupling": "lr_squared", "scale_decay": scaled, "cautious": True}
    stepped(Muon([bank], lr=0.1, **options), [param], [torch.zeros_like(param)])
    torch.testing.assert_close(param.detach()[:, 0], torch.tensor([0.988] * 4 + [second] * 4).double())


@pytest.mark.parametrize("cautious", [True, "strict"])
@pytest.mark.parametrize("coupling", ["lr", "lr_squared"])
def test_rows_that_were_never_touched_decay_or_do_not(cautious, coupling):
    table = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    table.data[3] = 0.0
    start, twin = table.detach().clone(), oracle.AdamWTensor(table.detach().numpy())
    group = {"params": [table], "algorithm": "adamw", "cautious": cautious, "weight_decay": 3.0, "lr": 0.1}
    optimizer = Muon([{**group, "decay_coupling": coupling}], **EXACT)
    for lr in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        gradient = torch.randn(6, 4, dtype=torch.float64)
        gradient[:2] = 0.0
        stepped(optimizer, [table], [gradient])
        wd = 3.0 * (lr if coupling == "lr_squared" else 1.0)
        twin.step(gradient.numpy(), lr=lr, betas=(0.9, 0.95), eps=1e-8, wd=wd, cautious=cautious)
        np.testing.assert_allclose(table.detach().numpy(), twin.w, rtol=1e-9, atol=1e-12)
    assert torch.equal(table[:2], start[:2]) == (cautious == "strict")


# -- last_step ---------------------------------------------------------------------------------------------------------


def test_the_last_step_says_what_was_done():
    matrices = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    heads, vectors = nn.Parameter(torch.randn(6, 4)), [nn.Parameter(torch.randn(4)) for _ in range(3)]
    groups = [
        {"params": matrices, "orthogonalizer": "newton_schulz"},
        {"params": [heads], "view": Heads(3), "orthogonalizer": "svd"},
        {"params": vectors, "algorithm": "adamw"},
    ]
    optimizer = Muon(groups)
    assert optimizer.last_step().num_matrices == 0
    everything = [*matrices, heads, *vectors]
    stepped(optimizer, everything, [torch.randn_like(p) for p in everything])
    report = optimizer.last_step()
    assert report.num_matrices == 5
    assert sorted(report.matrices.values()) == [2, 3]
    assert report.adamw_parameters == 3
    assert report.without_gradient == 0
    assert "5 matrices orthogonalised" in str(report)
    matrices[0].grad = heads.grad = vectors[1].grad = None
    optimizer.step()
    report = optimizer.last_step()
    assert (report.num_matrices, report.adamw_parameters, report.without_gradient) == (1, 2, 3)


def test_a_split_parameter_without_gradient_counts_once():
    param, other = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.ones(2, 2))
    other.grad = torch.ones(2, 2)
    optimizer = Muon([{"params": [param], "view": Split((2, 4))}, {"params": [other]}])
    optimizer.step()
    assert optimizer.last_step().without_gradient == 1


# -- workspace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"cautious": True}, {"master": "fp32"}, {"master": "mantissa", "cautious": True}, {"master": "8bit"}]
)
@pytest.mark.parametrize("shape", [(1000,), (50, 20)])
def test_adamw_in_pieces_is_adamw(options, shape):
    start = torch.randn(shape).bfloat16()
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        Muon(
            [{"params": [p], "algorithm": "adamw"}],
            adamw_lr=0.01,
            weight_decay=0.1,
            adamw_weight_decay=0.1,
            max_workspace_bytes=bound,
            **options,
        )
        for p, bound in zip(params, (None, 5000), strict=True)
    ]
    assert optimizers[1].plan().peak_workspace_bytes <= 5000
    for _ in range(3):
        gradient = torch.randn(shape).bfloat16()
        for param, optimizer in zip(params, optimizers, strict=True):
            stepped(optimizer, [param], [gradient.clone()])
    assert torch.equal(*params)
    assert float(optimizers[1].state[params[1]]["step"]) == 3


# -- options that the plan depends on ----------------------------------------------------------------------------------


def test_a_changed_orthogonaliser_counts_at_the_next_step():
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([param], orthogonalizer="newton_schulz")
    stepped(optimizer, [param], [torch.randn(6, 4)])
    assert list(optimizer.last_step().matrices) == ["newton_schulz bf16"]
    optimizer.param_groups[0].update(orthogonalizer="svd", max_workspace_bytes=None)
    stepped(optimizer, [param], [torch.randn(6, 4)])
    assert list(optimizer.last_step().matrices) == ["svd fp32"]


@torch.no_grad()
def test_members_that_stay_have_as_many_directions_as_matrices():
    params = [nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(2, 4, 5))]
    optimizer = Muon([{"params": params, "view": Experts()}], kernels="torch")
    for param in params:
        param.grad = torch.randn_like(param)
    [bucket] = optimizer.plan()
    group = optimizer._plans.current_groups()[0]
    active = BucketCache().operands(bucket, group, optimizer.state)
    before = [param.detach().clone() for param in params]
    passes = TorchBackend(bucket, group, active, BucketCache(), [False, True])
    directions = passes.directions()
    assert directions.shape == (5, 4, 5)
    assert not directions[:3].any()
    assert directions[3:].any()
    assert not optimizer.state[params[0]]["momentum_buffer"].any()
    passes.apply(directions, torch.ones(5, 1, 1))
    assert [torch.equal(param, kept) for param, kept in zip(params, before, strict=True)] == [True, False]


@pytest.mark.parametrize("option", ["lr_multipliers", "coefficients"])
def test_a_number_for_several_is_named(option):
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=rf"parameter group 0 .*: {option}=3( must be|: give) "):
        Muon([("weight", weight)], **{option: 3})
