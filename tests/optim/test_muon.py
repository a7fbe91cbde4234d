import copy
import gc
import inspect
import io
import re
import weakref

import numpy as np
import oracle
import pytest
import torch
from torch import nn

import quintic
from quintic import Experts, Flatten, Heads, Matrix, Muon, Rows, Split

EXACT = {"compute_dtype": torch.float64}

VIEWS = [
    (Matrix(), (6, 4)),
    (Matrix(transposed=True), (4, 6)),
    (Heads(3), (6, 4)),
    (Heads(2, transposed=True), (5, 6)),
    (Split((1, 2, 3)), (6, 4)),
    (Heads(3, dim=1), (4, 6)),
    (Heads(2, transposed=True, dim=1), (6, 5)),
    (Split((2, 2, 2), groups=2), (12, 5)),  # interleaved per head
    (Split((4, 4, 2, 2), groups=2), (24, 5)),  # gated, per key/value head
    (Split((6, 2, 2), heads=(3, 1, 1)), (10, 4)),
    (Split((3, 2)), (2, 5, 4)),  # experts with fused gate and up
    (Split((1, 1), groups=3, transposed=True), (2, 4, 6)),
    (Experts(), (3, 2, 5)),
    (Experts(transposed=True), (3, 5, 2)),
    (Rows(2), (6, 4)),
    (Flatten(), (4, 2, 3, 3)),
    (Flatten(transposed=True, groups=2), (4, 2, 3, 3)),
]


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape).to(dtype))


def give_gradients(params, generator=None):
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def small_model():
    return nn.Sequential(
        nn.Embedding(11, 8),
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 8, bias=False),
        nn.LayerNorm(8),
        nn.Linear(8, 11),
    )


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=str)
@pytest.mark.parametrize("neuron", [False, True])
@pytest.mark.parametrize(("nesterov", "wd", "cautious"), [(True, 0.0, False), (True, 0.3, True), (False, 0.3, False)])
def test_trajectory_equals_the_matrices_one_by_one(view, shape, neuron, nesterov, wd, cautious):
    param = parameter(*shape)
    twins = [oracle.MuonMatrix(m.detach().numpy(), neuron=neuron) for batch in view.batches(param) for m in batch]
    optimizer = Muon(
        [{"params": [param], "view": view}],
        lr=0.05,
        momentum=0.8,
        nesterov=nesterov,
        weight_decay=wd,
        cautious=cautious,
        normalize="neuron" if neuron else None,
        normalize_beta=0.7,
        **EXACT,
    )
    for _ in range(4):
        give_gradients([param])
        gradients = [m for batch in view.batches(param.grad) for m in batch]
        before = param.grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, before)
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.step(gradient.numpy(), lr=0.05, mu=0.8, nesterov=nesterov, wd=wd, cautious=cautious, beta=0.7)
        found = [m.detach().numpy() for batch in view.batches(param) for m in batch]
        for matrix, twin in zip(found, twins, strict=True):
            np.testing.assert_allclose(matrix, twin.w, rtol=2e-4, atol=2e-5)


def test_buckets_of_many_parameters_equal_one_optimizer_each():
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4)]
    together = [parameter(*shape) for shape in shapes]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    one = Muon(together, lr=0.1)
    many = [Muon([p], lr=0.1) for p in alone]
    for _ in range(3):
        give_gradients(together)
        for p, q in zip(together, alone, strict=True):
            q.grad = p.grad.clone()
        one.step()
        for optimizer in many:
            optimizer.step()
    assert [bucket.num_matrices for bucket in one.plan()] == [3, 1, 1]
    for p, q in zip(together, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cautious", [False, True])
def test_adamw_group_equals_the_reference(dtype, cautious):
    param = parameter(4, 3, dtype=dtype)
    reference = oracle.AdamWTensor(param.detach().double().numpy())
    optimizer = Muon(
        [{"params": [param], "algorithm": "adamw"}],
        adamw_lr=0.01,
        weight_decay=0.2,
        adamw_weight_decay=0.2,
        cautious=cautious,
    )
    for _ in range(3):
        give_gradients([param])
        optimizer.step()
        expected = reference.step(
            param.grad.double().numpy(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, wd=0.2, cautious=cautious
        )
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        np.testing.assert_allclose(param.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_identity_orthogonaliser_is_momentum_sgd_to_the_bit():
    ours, theirs = parameter(6, 4), parameter(6, 4)
    theirs.data.copy_(ours)
    optimizer = Muon([ours], lr=0.5, momentum=0.0, nesterov=False, adjust_lr=None, orthogonalizer=lambda x: x)
    sgd = torch.optim.SGD([theirs], lr=0.5)
    for _ in range(3):
        give_gradients([ours])
        theirs.grad = ours.grad.clone()
        optimizer.step()
        sgd.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_lr_zero_moves_momentum_only(dtype, nesterov):
    """A cast that aliases the momentum would let the normalisation overwrite it."""
    param = parameter(5, 3, dtype=dtype)
    before, expected = param.detach().clone(), torch.zeros(5, 3)
    optimizer = Muon([param], lr=0.0, momentum=0.9, nesterov=nesterov)
    for _ in range(3):
        give_gradients([param])
        expected = expected.lerp(param.grad.float(), 1 - 0.9)
        optimizer.step()
    assert torch.equal(param, before)
    state = optimizer.state[param]["momentum_buffer"]
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e4, 1e20])
def test_the_first_step_does_not_depend_on_the_size_of_the_gradient(scale):
    first, second = parameter(6, 4), parameter(6, 4)
    second.data.copy_(first)
    give_gradients([first])
    second.grad = first.grad * scale
    Muon([first], lr=0.1, compute_dtype=torch.float32).step()
    Muon([second], lr=0.1, compute_dtype=torch.float32).step()
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [None, "neuron", "element"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (0, 4), (4, 0), (0, 1), (1, 0), (0, 0)])
def test_degenerate_shapes_step(shape, normalize):
    param = parameter(*shape)
    before = param.detach().clone()
    optimizer = Muon([param], lr=0.1, normalize=normalize, weight_decay=0.1)
    give_gradients([param])
    optimizer.step()
    assert torch.isfinite(param).all()
    assert param.numel() == 0 or not torch.equal(param, before)


def test_every_matrix_is_orthogonalised_every_step():
    calls = []

    def counting(x):
        calls.append(x.shape[0])
        return quintic.orthogonalize(x)

    params = [parameter(4, 4), parameter(4, 4), parameter(8, 2)]
    optimizer = Muon(params, orthogonalizer=counting)
    give_gradients(params)
    optimizer.step()
    assert sorted(calls) == [1, 2]


def as_array(x):
    return x.numpy()


@pytest.mark.parametrize(
    ("function", "error", "what"),
    [
        (lambda x: None, TypeError, r"\S*<lambda> returned None"),
        (as_array, TypeError, r"as_array returned a ndarray"),
        (lambda x: x > 0, TypeError, r"\S*<lambda> returned a tensor of torch\.bool"),
        (lambda x: x.mT, ValueError, r"\S*<lambda> returned a tensor of shape \(2, 3, 4\) on cpu"),
        (lambda x: x.to("meta"), ValueError, r"\S*<lambda> returned a tensor of shape \(2, 4, 3\) on meta"),
        (nn.Flatten(), ValueError, r"Flatten returned a tensor of shape \(2, 12\) on cpu"),
    ],
)
def test_a_function_that_returns_no_updates_is_named(function, error, what):
    params = [parameter(4, 3), parameter(4, 3)]
    optimizer = Muon([("first", params[0]), ("second", params[1])], orthogonalizer=function)
    give_gradients(params)
    before = [param.detach().clone() for param in params]
    for step, numbers in ((optimizer.step, "2"), (lambda: quintic.reference_step(optimizer), "1")):
        of_step = what.replace("(2,", f"({numbers},")
        with pytest.raises(error, match=rf"first\b.*: the orthogonalizer {of_step}; it must return a floating-point"):
            step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize(
    ("group", "shape", "gradient"),
    [
        ({"algorithm": "adamw"}, (4, 3), torch.randn(3, 4).T),
        ({}, (4, 3), torch.randn(3, 4).T),
        ({"view": Flatten()}, (4, 2, 3, 3), torch.randn(4, 3, 2, 3).permute(0, 2, 1, 3)),
    ],
)
def test_the_strides_of_the_gradient_do_not_matter(group, shape, gradient):
    """PyTorch's fused AdamW pairs entries by their place in memory."""
    first = parameter(*shape)
    second = nn.Parameter(first.detach().clone())
    first.grad, second.grad = gradient, gradient.contiguous()
    for param in (first, second):
        Muon([{"params": [param], **group}], lr=0.1, adamw_lr=0.1).step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_parameters_with_gaps_between_their_entries(algorithm):
    """PyTorch's fused AdamW writes to as much memory as there are entries, in the gaps, too."""
    memory = torch.randn(8, 9)
    before, whole = memory.clone(), nn.Parameter(memory[::2, ::3].clone())
    gaps = torch.ones(8, 9, dtype=torch.bool)
    gaps[::2, ::3] = False
    for param in (nn.Parameter(memory[::2, ::3]), whole):
        optimizer = Muon([{"params": [param], "algorithm": algorithm}], adamw_lr=0.1, compute_dtype=torch.float32)
        for step in range(3):
            param.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    torch.testing.assert_close(memory[::2, ::3], whole.detach())
    assert torch.equal(memory[gaps], before[gaps])


def test_workspace_bound_splits_buckets_and_changes_nothing():
    free = [parameter(16, 16) for _ in range(5)]
    bound = [nn.Parameter(p.detach().clone()) for p in free]
    of_two = Muon(free[:2]).plan().peak_workspace_bytes
    first, second = Muon(free), Muon(bound, max_workspace_bytes=of_two)
    assert [b.num_matrices for b in second.plan()] == [2, 2, 1]
    assert second.plan().peak_workspace_bytes == of_two
    assert [b.num_matrices for b in Muon(free, max_workspace_bytes=of_two - 1).plan()] == [1] * 5
    give_gradients(free)
    for p, q in zip(free, bound, strict=True):
        q.grad = p.grad.clone()
    first.step()
    second.step()
    assert all(torch.equal(p, q) for p, q in zip(free, bound, strict=True))


# -- a torch.optim.Optimizer -------------------------------------------------------------------------------------------


def test_parameters_without_gradient_keep_weights_and_state():
    params = [parameter(4, 4), parameter(4, 4), parameter(3)]
    optimizer = Muon(
        [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}], weight_decay=0.1, adamw_weight_decay=0.1
    )
    give_gradients(params)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = [p.detach().clone() for p in params]
    params[0].grad = params[2].grad = None
    optimizer.step()
    after = optimizer.state_dict()["state"]
    assert torch.equal(params[0], weights[0])
    assert torch.equal(params[2], weights[2])
    assert not torch.equal(params[1], weights[1])
    for key in (0, 2):
        for name, value in before[key].items():
            assert torch.equal(after[key][name], value)
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient


def test_all_parameters_have_state_once_it_is_asked_for():
    optimizer = Muon(quintic.param_groups(small_model()), normalize="neuron")
    names = {
        name: set(optimizer.state[param])
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }
    assert names["1.weight"] == {"momentum_buffer", "second_momentum_buffer"}
    assert names["0.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert len(names) == 8


def test_closure_is_called_with_gradients_enabled():
    param = parameter(3, 3)
    optimizer = Muon([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    loss = optimizer.step(closure)
    torch.testing.assert_close(loss.detach(), before.square().sum())
    assert not torch.equal(param, before)


def test_closure_may_return_nothing():
    """Training loops pass closures that only call backward, or skip a batch and leave no gradient."""
    param = parameter(3, 3)
    twin = nn.Parameter(param.detach().clone())
    optimizer, other = Muon([param]), Muon([twin])

    def closure():
        param.square().sum().backward()

    assert optimizer.step(closure) is None
    twin.square().sum().backward()
    other.step()
    assert torch.equal(param, twin)
    optimizer.zero_grad()
    assert optimizer.step(lambda: None) is None
    assert torch.equal(param, twin)


def test_copies_have_the_counts_of_steps():
    param = parameter(4, 4)
    optimizer = Muon([("weight", param)], on_nonfinite="skip")
    for bad in (False, True):
        param.grad = torch.full((4, 4), float("nan")) if bad else torch.randn(4, 4)
        optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.last_step() == optimizer.last_step()
    assert twin.last_step().skipped_steps == 1
    other = twin.param_groups[0]["params"][0]
    other.grad = torch.full((4, 4), float("nan"))
    twin.step()
    assert twin.last_step().skipped_steps == 2
    assert optimizer.last_step().skipped_steps == 1


def test_state_is_freed_with_the_optimizer():
    weight = parameter(6, 4)
    gc.collect()
    gc.disable()  # reference cycles would keep the state until the next collection
    try:
        for _ in range(2):  # imports during the first step may keep its frames
            optimizer = Muon([weight])
            give_gradients([weight])
            optimizer.step()
            buffer = weakref.ref(optimizer.state[weight]["momentum_buffer"])
            del optimizer
        assert buffer() is None
    finally:
        gc.enable()


def test_a_wrapper_with_copied_attributes_works_without_the_original():
    class Wrapper(Muon):
        def __init__(self, optimizer):
            vars(self).update(vars(optimizer))

    weight = parameter(6, 4)
    optimizer = Muon([weight])
    wrapper = Wrapper(optimizer)
    wrapper.found_inf = torch.ones(())
    assert optimizer.found_inf is wrapper.found_inf
    del wrapper.found_inf
    assert not hasattr(optimizer, "found_inf")
    give_gradients([weight])
    wrapper.step()
    assert optimizer.last_step() == wrapper.last_step()
    buffer = optimizer.state[weight]["momentum_buffer"]
    del optimizer
    gc.collect()
    assert wrapper.state[weight]["momentum_buffer"] is buffer
    assert wrapper.state_dict()["state"][0]["momentum_buffer"].equal(buffer)


def test_a_wrapper_that_borrows_the_class_gives_what_it_wraps():
    # Lightning wraps optimizers so: an instance of a class derived from theirs, without their attributes.
    class Wrapper:
        def __init__(self, optimizer):
            self._optimizer = optimizer
            self.__class__ = type("WrappedMuon", (Wrapper, type(optimizer)), {})

        def __getattr__(self, name):
            return getattr(self._optimizer, name)

    weight, bias = parameter(6, 4), parameter(6)
    groups = [{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}]
    optimizer = Muon(groups, lr=0.1, telemetry_every=1)
    wrapper = Wrapper(optimizer)
    give_gradients([weight, bias])
    wrapper._optimizer.step()
    assert isinstance(wrapper, Muon)
    assert wrapper.param_groups is optimizer.param_groups
    assert wrapper.state[weight]["momentum_buffer"] is optimizer.state[weight]["momentum_buffer"]
    assert wrapper.last_step() == optimizer.last_step()
    assert wrapper.telemetry() == optimizer.telemetry() != {}
    wrapper.zero_grad()
    assert weight.grad is None
    assert bias.grad is None
    with pytest.raises(AttributeError, match="has no attribute 'state'"):
        _ = Muon.__new__(Muon).state


def test_moving_the_weights_moves_nothing_else():
    """`param.data` may be replaced (model.to, quantisation): views are taken anew at every step."""
    param = parameter(4, 4)
    optimizer = Muon([param], lr=0.1)
    give_gradients([param])
    optimizer.step()
    param.data = param.data.clone()
    before = param.detach().clone()
    optimizer.step()
    assert not torch.equal(param, before)


def test_meta_parameters_can_be_planned():
    with torch.device("meta"):
        model = small_model()
    plan = Muon(quintic.param_groups(model)).plan()
    assert {bucket.shape for bucket in plan if bucket.algorithm == "muon"} == {(16, 8), (8, 16)}


def test_plan_reads_as_a_table():
    plan = Muon(quintic.param_groups(small_model())).plan()
    text = str(plan)
    assert "1 x 16x8" in text
    assert "1.weight" in text
    assert plan.flops == 2 * 5 * (4 * 8 * 8 * 16 + 2 * 8**3)


@pytest.mark.parametrize("offload", [False, True])
def test_the_table_of_a_plan_fits_the_terminal(monkeypatch, offload):
    blocks = nn.ModuleDict({"the_long_name_of_a_block": nn.ModuleList([small_model() for _ in range(12)])})
    plan = Muon(quintic.param_groups(blocks), offload=offload).plan()
    buckets = len(plan.buckets)
    for width in (76, 80, 100, 120, 160, 250):
        text = plan.to_table(width=width)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        headings = 1 if width >= 160 else 2
        assert len(lines) >= headings * (1 + buckets) + 1
        assert len([line for line in lines if " float32 " in line]) == buckets
        for word in ("method", "12 x 16x8", "first parameter", "work MiB", "(+11)", "weight", "of temporary memory"):
            assert word in text.replace("\n   ", ""), (word, width)
        if width == 250:
            assert text.count("the_long_name_of_a_block") == buckets
        assert ("host MiB" in text) is offload
        assert "other ranks" not in text.replace("\n   ", "")
    monkeypatch.setenv("COLUMNS", "80")
    assert str(plan) == plan.to_table(width=80) != plan.to_table(width=160)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal
    assert str(plan) == plan.to_table(width=160)


# -- saving and loading ------------------------------------------------------------------------------------------------


def trained(dtype=torch.float32, **options):
    torch.manual_seed(3)
    model = small_model().to(dtype)
    optimizer = Muon(quintic.param_groups(model), normalize="neuron", **options)
    for _ in range(2):
        give_gradients(model.parameters())
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_continues_to_the_bit(dtype):
    model, optimizer = trained(dtype)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    twin_model = copy.deepcopy(model)
    twin = Muon(quintic.param_groups(twin_model), normalize="neuron")
    twin.load_state_dict(state_dict=torch.load(buffer, weights_only=True))
    for _ in range(2):
        give_gradients(model.parameters())
        for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert value.dtype == torch.float32
            assert twin.state[q][name].dtype == torch.float32
            assert torch.equal(value, twin.state[q][name])


def test_loading_restores_hyperparameters_and_keeps_code():
    _, optimizer = trained(lr=0.5, orthogonalizer="newton_schulz")
    _, other = trained(lr=0.1)
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert group["lr"] == 0.5
    assert group["orthogonalizer"] == "auto"
    assert group["view"] == Matrix()
    assert saved["param_groups"][0]["view"] == "Matrix(transposed=False)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda s: s["param_groups"].pop(),
            "0.weight is not in the saved optimizer state, whose names are like 1.weight",
        ),
        (lambda s: s["state"].pop(0), "1.weight: the saved optimizer holds no state"),
        (lambda s: s["state"][0].pop("momentum_buffer"), r"1.weight: saved state has \['second_momentum_buffer'\]"),
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 3)),
            r"1.weight: saved momentum_buffer.*\(3, 3\)",
        ),
        (lambda s: s["param_groups"][0].update(view="Heads(num_heads=2)"), "saved with view=Heads"),
        (lambda s: s["param_groups"][0].update(algorithm="adamw"), "saved with algorithm=adamw"),
        (lambda s: s["param_groups"][0].update(param_names=["a", "b"]), "1.weight is not in the saved"),
    ],
)
def test_what_does_not_fit_changes_nothing(damage, message):
    _, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for value in state.values():
            value.add_(1)
    damage(saved)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()["state"]
    for key, state in before.items():
        for name, value in state.items():
            assert torch.equal(after[key][name], value)


# -- errors at construction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ({"algorithm": "sgd"}, {}, r"group0.param0.*unknown algorithm 'sgd'"),
        ({"params": [nn.Parameter(torch.ones(3))]}, {}, r"group0.param0: a 1-D parameter \(shape \(3,\)\)"),
        ({"view": Heads(4)}, {}, r"group0.param0: Heads\(num_heads=4"),
        ({"view": "matrix"}, {}, "group0.param0: view='matrix' is not a view"),
        ({"weight_dcay": 0.1}, {}, "unknown option 'weight_dcay'; did you mean 'weight_decay'"),
        ({"param_names": ["a", "b"]}, {}, "1 params but 2 param_names"),
        ({}, {"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
        ({}, {"momentum": 1.0}, r"momentum=1.0 must be a number in \[0, 1\)"),
        ({}, {"betas": (0.9,)}, "betas"),
        (
            {},
            {"betas": 0.9},
            r"group 0 \(group0.param0\): betas=0.9 must be two numbers in \[0, 1\), such as \(0.9, 0.95",
        ),
        ({}, {"betas": (0.9, "x")}, "betas="),
        ({}, {"normalize": "no rule"}, "normalize='no rule'"),
        ({}, {"adjust_lr": "moon"}, r"parameter group 0 \(group0.param0\): adjust_lr='moon': choose 'spectral'"),
        ({}, {"orthogonalizer": "qr"}, r"parameter group 0 \(group0.param0\): orthogonalizer='qr': choose one of"),
        ({}, {"orthogonalizer_steps": 0}, "orthogonalizer_steps=0 must be an integer of at least 1"),
        ({}, {"coefficients": [(1.0, 2.0)]}, r"parameter group 0 \(group0.param0\): coefficients="),
        ({}, {"orthogonalizer": "svd", "compute_dtype": torch.float16}, "compute_dtype=torch.float16"),
        ({}, {"max_workspace_bytes": -1}, "max_workspace_bytes=-1"),
        ({}, {"max_workspace_bytes": 0}, "max_workspace_bytes=0 must be a positive integer, or None"),
        ({}, {"max_workspace_bytes": 2e9}, "max_workspace_bytes=2000000000.0 must be a positive integer"),
        ({}, {"telemetry_every": 0}, "telemetry_every=0 must be an integer of at least 1, or None"),
        ({}, {"telemetry_every": True}, "telemetry_every=True"),
        ({}, {"step_every": 0}, "step_every=0 must be an integer of at least 1"),
        ({}, {"lr": "1e-3"}, "lr='1e-3' must be a number"),
        ({}, {"weight_decay": None}, "weight_decay=None must be a number"),
        ({}, {"eps": float("inf")}, "eps=inf must be a number"),
        ({}, {"lr": torch.tensor(-1.0)}, "lr=tensor"),
        ({}, {"nesterov": "no"}, "nesterov='no' must be False or True"),
        ({}, {"adjust_lr": lambda m, n: None}, r"group0.param0: adjust_lr\(6, 4\) returned None"),
        ({}, {"comms": "shared"}, "comms='shared' must be 'none' or 'averaged' or 'replicated' or 'sharded'"),
        ({}, {"master": "bf16"}, "master='bf16' must be None or 'fp32' or 'mantissa' or '8bit'"),
        ({}, {"offload": "cpu"}, "offload='cpu' must be False or True"),
        ({}, {"on_nonfinite": "stop"}, "on_nonfinite='stop' must be 'propagate' or"),
        ({}, {"decay_coupling": "step"}, "decay_coupling='step' must be"),
        ({}, {"kernels": "cuda"}, "kernels='cuda' must be"),
        ({}, {"kernels": "triton"}, "group0.param0: kernels='triton': the parameter is on 'cpu'"),
        ({}, {"lr_multipliers": [float("nan")]}, "lr_multipliers"),
        ({}, {"qk_clip": 100}, "qk_clip=100 must be None or a quintic.QKClip"),
    ],
)
def test_mistakes_are_named(group, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.ones(6, 4))], **group}], **options)


@pytest.mark.parametrize(("shape", "algorithm"), [((6, 1), "muon"), ((1, 6), "adamw"), ((1,), "adamw")])
def test_parameters_whose_entries_share_memory_are_refused(shape, algorithm):
    """AdamW stepped them as one entry, with whichever gradient came last."""
    param = nn.Parameter(torch.ones(shape).expand(*shape[:-1], 6) if shape[-1] == 1 else torch.ones(shape).expand(6, 6))
    with pytest.raises(ValueError, match=r"group0.param0: entries of this parameter .* share memory.*clone\(\) it"):
        Muon([{"params": [param], "algorithm": algorithm}])


def test_a_refused_group_is_not_added():
    optimizer = Muon([parameter(4, 4)])
    with pytest.raises(ValueError, match=r"group1\.param0"):
        optimizer.add_param_group({"params": [parameter(4)]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_named():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Muon(quintic.param_groups(embedding))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="weight: sparse gradients"):
        optimizer.step()


def test_converges_on_a_regression():
    torch.manual_seed(0)
    target = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = Muon(quintic.param_groups(model), lr=0.05, adamw_lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=150)
    x = torch.randn(256, 8)
    losses = []
    for _ in range(150):
        loss = (model(x) - x @ target.mT).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_every_option_is_documented_once_in_a_group_of_its_kind():
    documented: dict[str, list[str]] = {}
    for title, block in re.findall(r"^Args: (.+)\n((?: {4}.+\n)+)", inspect.getdoc(Muon), re.MULTILINE):
        documented[title] = re.findall(r"^ {4}(\w+): ", block, re.MULTILINE)
    names = [name for block in documented.values() for name in block]
    assert sorted(names) == sorted(set(inspect.signature(Muon).parameters))
    assert list(documented)[1:] == ["The update", "Precision", "Several ranks", "Safety", "Memory and speed"]
    assert {"comms", "process_group", "replicas"} <= set(documented["Several ranks"])
    assert {"master", "state_dtype"} <= set(documented["Precision"])
