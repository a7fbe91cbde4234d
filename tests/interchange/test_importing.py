import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from newer import torch_muon
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

import quintic
from quintic import Experts, Flatten, Heads, Matrix, Muon, Rows, Split
from quintic.interchange import export_torch_state, import_state, import_torch_state

CONVENTIONS = {"orthogonalizer": "newton_schulz", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def model_of(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.Linear(9, 6, bias=False), nn.Linear(6, 7)).to(dtype)


def theirs(model, named=True):
    """PyTorch's two optimizers over the parameters as Quintic divides them."""
    groups = {group["algorithm"]: group for group in quintic.param_groups(model)}

    def params(algorithm):
        group = groups[algorithm]
        return list(zip(group["param_names"], group["params"], strict=True)) if named else group["params"]

    muon = torch_muon()(params("muon"), lr=0.02, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(params("adamw"), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    return muon, adamw


def ours(model):
    return Muon(quintic.param_groups(model), adamw_lr=0.01, **CONVENTIONS)


def step(model, *optimizers, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    for optimizer in optimizers:
        optimizer.step()


def values(optimizer):
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def fill(optimizer):
    """Give the state values that no import would write."""
    for state in optimizer.state.values():
        for value in state.values():
            value.copy_(torch.rand(value.shape) + 1)
    return values(optimizer)


def assert_close(first, second):
    # Both orthogonalise in bfloat16, with the normalisation in different precision.
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-2)


@pytest.mark.parametrize("named", [True, False])
def test_training_begun_with_pytorch_continues_with_quintic(named):
    first = model_of()
    muon, adamw = theirs(first, named)
    for seed in range(5):
        step(first, muon, adamw, seed=seed)
    second = copy.deepcopy(first)
    optimizer = ours(second)
    import_torch_state(optimizer, adamw.state_dict(), muon.state_dict())
    for seed in range(5, 8):
        step(first, muon, adamw, seed=seed)
        step(second, optimizer, seed=seed)
    assert_close(first, second)


def test_training_begun_with_quintic_continues_with_pytorch():
    first = model_of()
    optimizer = ours(first)
    for seed in range(5):
        step(first, optimizer, seed=seed)
    second = copy.deepcopy(first)
    muon, adamw = theirs(second)
    exported = export_torch_state(optimizer)
    muon.load_state_dict(exported["muon"])
    adamw.load_state_dict(exported["adamw"])
    for seed in range(5, 8):
        step(first, optimizer, seed=seed)
        step(second, muon, adamw, seed=seed)
    assert_close(first, second)


def test_exporting_and_importing_gives_the_state_back():
    model = model_of()
    optimizer = ours(model)
    step(model, optimizer, seed=0)
    twin = ours(copy.deepcopy(model))
    exported = export_torch_state(optimizer)
    import_torch_state(twin, exported["muon"], exported["adamw"])
    for group, twin_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for p, q in zip(group["params"], twin_group["params"], strict=True):
            for key, value in optimizer.state[p].items():
                assert torch.equal(value, twin.state[q][key])


def test_float32_momentum_stays_float32():
    model = model_of(torch.bfloat16)
    muon, adamw = theirs(model)
    step(model, muon, adamw, seed=0)
    optimizer = ours(model)
    import_torch_state(optimizer, muon.state_dict(), adamw.state_dict())
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


def test_state_saved_under_the_names_of_the_model_finds_its_parameters():
    model = model_of()
    muon, adamw = theirs(model, named=False)
    step(model, muon, adamw, seed=0)
    optimizer, by_position = ours(model), ours(model)
    model_of_matrices = nn.ModuleDict({"1": nn.Linear(6, 9, bias=False), "2": nn.Linear(9, 6, bias=False)})
    for name, module in model_of_matrices.items():
        module.weight = model[int(name)].weight
    saved = get_optimizer_state_dict(model_of_matrices, muon)
    assert list(saved["state"]) == ["1.weight", "2.weight"]
    assert import_state(optimizer, saved, source="torch") == ["1.weight", "2.weight"]
    import_torch_state(by_position, muon.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(values(optimizer), values(by_position), strict=True))


def test_names_given_go_before_names_saved():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    muon = torch_muon()(list(model.named_parameters()))
    step(model, muon, seed=0)
    optimizer = ours(model)
    assert import_state(optimizer, muon.state_dict(), source="torch", names=["1.weight", None]) == ["1.weight"]
    first, second = (optimizer.state[module.weight]["momentum_buffer"] for module in model)
    assert torch.equal(second, muon.state[model[0].weight]["momentum_buffer"])
    assert not first.any()


def test_a_parameter_that_was_never_stepped_keeps_its_state():
    model = model_of()
    muon = torch_muon()([model[1].weight, model[2].weight])
    frozen = nn.Parameter(torch.zeros(3, 3))
    muon.add_param_group({"params": [frozen]})
    model[1].weight.grad = torch.ones(9, 6)
    muon.step()
    optimizer = ours(model)
    before = fill(optimizer)
    names = ["1.weight", "2.weight", "frozen"]
    assert import_state(optimizer, muon.state_dict(), source="torch", names=names) == ["1.weight"]
    changed = [not torch.equal(a, b) for a, b in zip(before, values(optimizer), strict=True)]
    assert changed.count(True) == 1


def test_state_saved_before_the_first_step_changes_nothing():
    model = model_of()
    muon, adamw = theirs(model, named=False)
    optimizer = ours(model)
    before = fill(optimizer)
    assert import_torch_state(optimizer, muon.state_dict(), adamw.state_dict()) == []
    assert all(torch.equal(a, b) for a, b in zip(before, values(optimizer), strict=True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "other"), "^other: .* not a parameter of this"),
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "0.weight"), "^0.weight: has two saved states"),
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(2, 2)),
            r"^1.weight: saved .*shape \(2, 2\).*\(9, 6\)",
        ),
        (lambda s: s["state"][0].update(sum=torch.zeros(2)), "^1.weight: its state .*neither"),
        (lambda s: (s["param_groups"][0].pop("param_names"), s["param_groups"][0]["params"].append(9)), "3 parameters"),
        (lambda s: s["param_groups"][0]["params"].append(9), "2 names for 3 saved parameters"),
        (lambda s: s.pop("param_groups"), r"has 'state' and 'param_groups', the saved one has \['state'\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(damage, message):
    model = model_of()
    muon, adamw = theirs(model)
    step(model, muon, adamw, seed=0)
    saved = copy.deepcopy(muon.state_dict())
    damage(saved)
    optimizer = ours(model)
    before = fill(optimizer)
    with pytest.raises(ValueError, match=message):
        import_torch_state(optimizer, adamw.state_dict(), saved)
    assert all(torch.equal(a, b) for a, b in zip(before, values(optimizer), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "optax"}, "source='optax': choose one of 'torch', 'keller_jordan'"),
        ({"source": "torch", "second_moments": "keep"}, "second_moments='keep': choose"),
        ({"source": "torch", "names": ["1.weight", "0.weight"]}, "^0.weight: .*state of muon, this .* with adamw"),
        ({"source": "nanochat"}, "nanochat has no parameter names: pass names, one for each of its 2"),
        ({"source": "nanochat", "names": ["1.weight"]}, "1 names for 2 saved parameters"),
        ({"source": "nanochat", "names": ["1.weight", "2.bias"]}, "^2.bias: .* whose names are like 1.weight"),
    ],
)
def test_what_cannot_be_asked_for_is_an_error(options, message):
    model = model_of()
    muon, _ = theirs(model, named=False)
    step(model, muon, seed=0)
    optimizer = ours(model)
    with pytest.raises(ValueError, match=message):
        import_state(optimizer, muon.state_dict(), **options)
    assert not any(value.any() for value in values(optimizer))


@pytest.mark.parametrize("source", ["torch", "keller_jordan", "keller_jordan_2024", "dion", "nanochat"])
def test_state_of_quintic_is_no_other_library_s(source):
    """Its names are those of other libraries: as a sum the momentum was taken for a twentieth of what it was."""
    model = model_of()
    optimizer = ours(model)
    step(model, optimizer, seed=0)
    before, pieces = values(optimizer), get_optimizer_state_dict(model, optimizer)
    for saved in (optimizer.state_dict(), pieces):
        with pytest.raises(ValueError, match=rf"is quintic\.Muon's own, not of source='{source}'.*load_state_dict"):
            import_state(optimizer, saved, source=source)
        with pytest.raises(ValueError, match=r"is quintic\.Muon's own"):
            import_torch_state(optimizer, saved)
    assert all(map(torch.equal, values(optimizer), before))
    optimizer.load_state_dict(optimizer.state_dict())


def test_state_dicts_of_several_ranks_belong_to_one_optimizer():
    model = model_of()
    muon, adamw = theirs(model, named=False)
    step(model, muon, adamw, seed=0)
    for saved, source, message in [
        ([], "torch", "0 state dicts"),
        ([muon.state_dict()] * 2, "torch", "2 state dicts with source='torch'"),
        ([muon.state_dict(), adamw.state_dict()], "nanochat", "state dict 1 has other parameters"),
    ]:
        with pytest.raises(ValueError, match=message):
            import_state(ours(model), saved, source=source)


def test_distributed_state_is_not_mixed_with_plain_state():
    model = model_of()
    muon, _ = theirs(model)
    step(model, muon, seed=0)
    saved = muon.state_dict()
    optimizer = ours(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = saved["state"][1]["momentum_buffer"]
        saved["state"][1]["momentum_buffer"] = distribute_tensor(whole, mesh, [Replicate()])
        with pytest.raises(ValueError, match=r"2.weight: saved momentum_buffer is a DTensor, this .* plain tensor"):
            import_torch_state(optimizer, saved)
        assert not any(value.any() for value in values(optimizer))
        # As a model of DTensors would have it.
        optimizer.state[model[2].weight]["momentum_buffer"] = distribute_tensor(torch.zeros(6, 9), mesh, [Replicate()])
        import_torch_state(optimizer, saved)
        assert torch.equal(optimizer.state[model[2].weight]["momentum_buffer"].full_tensor(), whole)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------- second moments


def with_second_moments(view, shape, means, *, mode="exact", normalize="neuron"):
    """The second moments of a parameter after importing dion's, with those before."""
    param = nn.Parameter(torch.zeros(shape))
    group = {"params": [param], "param_names": ["matrices"], "view": view}
    optimizer = Muon([group], normalize=normalize)
    before = fill(optimizer)
    saved = {"momentum": torch.ones(shape), "variance_neuron": means}
    state = {
        "state": {"matrices": saved},
        "param_groups": [{"params": ["matrices"], "algorithm": "normuon", "mu": 0.5}],
    }
    try:
        import_state(optimizer, state, source="dion", second_moments=mode)
    except ValueError:
        assert all(torch.equal(a, b) for a, b in zip(before, values(optimizer), strict=True))
        raise
    return before[-1], optimizer.state[param].get("second_momentum_buffer")


def neurons_of(view, shape):
    """For each of the parameter's entries the number of its neuron, counted along the state's buffer."""
    numbers, count = torch.empty(shape, dtype=torch.int64), 0
    batches = []
    for b, m, n in view.shapes(shape):
        neurons = torch.arange(b * max(m, n)).view((b, m, 1) if m >= n else (b, 1, n)) + count
        batches.append(neurons.expand(b, m, n))
        count += b * max(m, n)
    view.write_(numbers, batches)
    return numbers, count


@st.composite
def views_and_shapes(draw):
    size = st.integers(1, 6)
    m, n, parts, transposed = draw(size), draw(size), draw(size), draw(st.booleans())
    kind = draw(st.sampled_from(["matrix", "heads", "inputs", "split", "interleaved", "rows", "experts", "flatten"]))
    if kind == "matrix":
        view, shape = Matrix(transposed), (m, n)
    elif kind == "heads":
        view, shape = Heads(parts, transposed), (n, m * parts) if transposed else (m * parts, n)
    elif kind == "inputs":
        view, shape = Heads(parts, transposed, dim=1), (n * parts, m) if transposed else (m, n * parts)
    elif kind in ("split", "interleaved"):
        sizes, groups = (m, parts), 2 if kind == "interleaved" else 1
        rows = sum(sizes) * groups
        view, shape = Split(sizes, transposed, groups), (n, rows) if transposed else (rows, n)
    elif kind == "rows":
        view, shape = Rows(m, transposed), (m * parts, n)
    elif kind == "experts":
        view, shape = Experts(transposed), (parts, m, n)
    else:
        view, shape = Flatten(transposed), (m, n, parts, 2)
    return view, shape


@given(views_and_shapes())
def test_second_moments_are_means_of_the_saved_ones_and_exact_if_nothing_is_lost(case):
    view, shape = case
    means = torch.rand(*shape[:-1], 1)
    numbers, count = neurons_of(view, shape)
    spread = means.expand(shape)
    expected = torch.stack([spread[numbers == number].mean() for number in range(count)])
    _, found = with_second_moments(view, shape, means, mode="average")
    torch.testing.assert_close(found, expected)
    # What dion averaged over together belongs to one neuron of Quintic.
    if (numbers == numbers[..., :1]).all():
        _, exact = with_second_moments(view, shape, means)
        assert torch.equal(exact, found)
    else:
        with pytest.raises(ValueError, match=r"^matrices: .* pass second_moments='average'"):
            with_second_moments(view, shape, means)


def test_equal_second_moments_stay_what_they_are():
    means = torch.rand(7, 1)
    _, found = with_second_moments(Matrix(), (7, 7), means)
    assert torch.equal(found, means[:, 0])


def test_dropped_second_moments_leave_those_there_are():
    before, after = with_second_moments(Matrix(), (4, 3), torch.rand(4, 1), mode="drop")
    assert torch.equal(before, after)
    with_second_moments(Matrix(), (4, 3), torch.rand(4, 1), mode="drop", normalize=None)


def test_second_moments_of_no_rows_are_none():
    with_second_moments(Matrix(), (0, 3), torch.rand(0, 1))


@pytest.mark.parametrize(
    ("means", "normalize", "message"),
    [
        (torch.rand(4, 1), None, "construct it with normalize='neuron'"),
        (torch.rand(3, 1), "neuron", r"shape \(3, 1\), which is no mean .* \(4, 3\)"),
        (torch.rand(4), "neuron", r"shape \(4,\), which is no mean"),
    ],
)
def test_second_moments_that_do_not_fit_are_an_error(means, normalize, message):
    with pytest.raises(ValueError, match=f"^matrices: .*{message}"):
        with_second_moments(Matrix(), (4, 3), means, normalize=normalize)
