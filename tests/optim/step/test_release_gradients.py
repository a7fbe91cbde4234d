"""`release_gradients` on one device: when gradients are freed, and what the option does not go with."""

import copy
import pickle
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from allocated import peak_bytes
from torch import nn

import quintic
from quintic import CapturedStep, Muon
from quintic.optim.rules import device

SHAPES = {"a": (8, 6), "b": (12, 6), "c": (10, 4), "bias": (7,)}


def params_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        f"{key}{n}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for key, shape in SHAPES.items()
        for n in range(2)
    }


def groups_of(params):
    matrices = [(name, param) for name, param in params.items() if param.ndim > 1]
    others = [(name, param) for name, param in params.items() if param.ndim == 1]
    return [{"params": matrices}, {"params": others, "algorithm": "adamw"}]


def give(params, alive=None, step=0):
    """Set gradients, the same for the same step; keep weak references to the memory of float32 ones."""
    for number, (name, param) in enumerate(params.items()):
        generator = np.random.default_rng([step, number])
        # The storage of a tensor refers to the array that it is made of, so the array lives as long as it.
        array = generator.standard_normal(param.shape).astype(np.float32)
        if alive is not None:
            alive[name] = weakref.ref(array)
        param.grad = torch.from_numpy(array).to(param.dtype)


def names_of(alive):
    return {name for name, ref in alive.items() if ref() is not None}


class Probe:
    """An orthogonalizer that notes which gradients are in memory when it computes a bucket."""

    def __init__(self):
        self.alive = {}
        self.seen = {}

    def __call__(self, matrices):
        (key,) = (key for key, shape in SHAPES.items() if sorted(shape) == sorted(matrices.shape[1:]))
        self.seen[key] = names_of(self.alive)
        return matrices


def both(names):
    return {f"{name}{n}" for name in names for n in range(2)}


@pytest.mark.parametrize(
    "options", [{}, {"offload": True}, {"update_rule": "two_rate"}, {"normalize": "element"}], ids=str
)
@pytest.mark.parametrize("clip", [False, True])
def test_each_gradient_is_freed_before_its_matrices_are_orthogonalised(options, clip):
    probe = Probe()
    params = params_of()
    optimizer = Muon(groups_of(params), orthogonalizer=probe, release_gradients=True, **options)
    for step in range(3):
        give(params, probe.alive, step)
        if clip:
            quintic.clip_grad_norm_(optimizer, 0.5, scope="all")
        probe.seen.clear()
        optimizer.step()
        # In the order of the buckets, in which AdamW's comes first or last.
        order = list(probe.seen)
        assert sorted(order) == ["a", "b", "c"]
        for place, key in enumerate(order):
            assert probe.seen[key] - both(["bias"]) == both(order[place + 1 :])
        assert not names_of(probe.alive)
        assert all(param.grad is None for param in params.values())


def test_without_the_option_all_gradients_stay():
    probe = Probe()
    params = params_of()
    optimizer = Muon(groups_of(params), orthogonalizer=probe)
    give(params, probe.alive)
    optimizer.step()
    assert set(map(frozenset, probe.seen.values())) == {frozenset(params)}
    assert names_of(probe.alive) == set(params)


def test_a_bank_in_several_buckets_is_freed_with_the_last_of_them():
    alive, seen = {}, []
    bank = nn.Parameter(torch.randn(4, 8, 6))

    def orthogonalizer(matrices):
        seen.append(bool(names_of(alive)))
        return matrices

    groups = [{"params": [("bank", bank)], "view": quintic.Experts()}]
    optimizer = Muon(groups, orthogonalizer=orthogonalizer, max_workspace_bytes=1, release_gradients=True)
    assert len(optimizer.plan().buckets) == 4
    give({"bank": bank}, alive)
    optimizer.step()
    assert seen == [True, True, True, False]
    assert bank.grad is None


def freed_in_turn(buckets):
    """Return the most bytes beyond all gradients, by playing the step: every gradient of a list, freed when read."""
    ordered = sorted(buckets, key=lambda bucket: bucket.workspace_bytes)
    left = {name: None for bucket in ordered for name in bucket.names}
    freed = most = 0
    for number, bucket in enumerate(ordered):
        most = max(most, bucket.workspace_bytes - freed)
        for name in bucket.names:
            if not any(name in later.names for later in ordered[number + 1 :]) and name in left:
                del left[name]
                freed += PARAM_BYTES[name]
    assert not left
    return most


PARAM_BYTES = {f"{key}{n}": 4 * torch.Size(shape).numel() for key, shape in SHAPES.items() for n in range(2)}


@pytest.mark.parametrize("limit", [None, 1], ids=["whole", "single"])
def test_the_plan_counts_the_memory_of_freed_gradients(limit):
    params = params_of()
    options = {"kernels": "torch", "max_workspace_bytes": limit}
    kept, released = (Muon(groups_of(params), release_gradients=on, **options).plan() for on in (False, True))
    assert released.buckets == kept.buckets
    assert released.peak_workspace_bytes == freed_in_turn(kept.buckets) < kept.peak_workspace_bytes
    assert "beyond the gradients, which it frees" in str(released)
    assert "beyond" not in str(kept)


def test_the_plan_does_not_count_on_gradients_that_a_step_keeps():
    params = params_of()
    for more in ({"step_every": 2}, {}):
        groups = groups_of(params)
        groups[0] |= more
        plans = [Muon(groups, kernels="torch", release_gradients=on).plan() for on in (False, True)]
        released, kept = (plan.peak_workspace_bytes for plan in reversed(plans))
        assert (released < kept) == (not more)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no gradients of another dtype")
def test_the_plan_does_not_count_on_gradients_that_are_smaller_than_their_weights():
    params = params_of()
    params["a0"].grad_dtype = torch.bfloat16
    plans = [Muon(groups_of(params), kernels="torch", release_gradients=on).plan() for on in (False, True)]
    assert plans[0].peak_workspace_bytes == plans[1].peak_workspace_bytes


def test_buckets_that_are_left_out_keep_no_gradients():
    params = [nn.Parameter(torch.ones(200, 200)) for _ in range(6)]
    table = nn.Parameter(torch.ones(8000, 64))
    groups = [{"params": params}, {"params": [table], "algorithm": "adamw", "on_nonfinite": "skip"}]
    optimizer = Muon(groups, kernels="torch", max_workspace_bytes=500_000, release_gradients=True)
    everything = [*params, table]

    def step(value):
        for param in everything:
            param.grad = torch.full_like(param, value if param is table else 1.0)
        optimizer.step()

    step(1.0)
    gradients = sum(param.nbytes for param in everything)
    assert peak_bytes(lambda: step(torch.inf)) <= gradients + optimizer.plan().peak_workspace_bytes


def test_a_bank_in_several_buckets_counts_as_freed_with_the_last_of_them():
    bank, single = nn.Parameter(torch.randn(4, 64, 48)), nn.Parameter(torch.randn(16, 24))
    groups = [{"params": [("bank", bank)], "view": quintic.Experts()}, {"params": [("single", single)]}]
    options = {"kernels": "torch", "max_workspace_bytes": 1}
    [*_, last] = sorted(Muon(groups, **options).plan(), key=lambda bucket: bucket.workspace_bytes)
    plan = Muon(groups, release_gradients=True, **options).plan()
    # The bank's last matrix still has all of its gradient beside it.
    assert plan.peak_workspace_bytes == last.workspace_bytes - 4 * single.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [None, 60_000], ids=["whole", "limited"])
def test_a_step_allocates_no_more_than_planned_beyond_its_gradients(limit, dtype):
    shapes = [(48, 48)] * 5 + [(160, 32)] * 4 + [(300, 40)]
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    groups = [{"params": params[:-1]}, {"params": params[-1:], "algorithm": "adamw"}]
    optimizer = Muon(groups, kernels="torch", max_workspace_bytes=limit, release_gradients=True)

    def step():
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    step()
    gradients = sum(param.nbytes for param in params)
    # Gradients are counted in the peak because they are made in the call.
    assert peak_bytes(step) <= gradients + optimizer.plan().peak_workspace_bytes


def test_one_tensor_as_the_gradient_of_several_parameters():
    found = []
    for release_gradients in (False, True):
        params = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6, 4))]
        optimizer = Muon(params, release_gradients=release_gradients)
        shared = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        kept = shared.clone()
        params[0].grad = params[1].grad = shared
        params[2].grad = shared.view(6, 4)
        optimizer.step()
        assert torch.equal(shared, kept)
        found.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *found))


# -- the same steps ----------------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"on_nonfinite": "skip"},
    {"master": "mantissa", "normalize": "neuron"},
    {"update_rule": "hyperball"},
    {"offload": True, "max_workspace_bytes": 1000},
    {"telemetry_every": 2},
    {"step_every": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_bits(options):
    dtype = torch.bfloat16 if "master" in options else torch.float32
    found = []
    for release_gradients in (False, True):
        params = params_of(dtype)
        optimizer = Muon(groups_of(params), adamw_lr=0.01, release_gradients=release_gradients, **options)
        for step in range(5):
            give(params, step=step)
            if step == 2:
                params["b0"].grad = None
            if step == 3 and "on_nonfinite" in options:
                params["a1"].grad[0, 0] = torch.inf
            given = {name for name, param in params.items() if param.grad is not None}
            optimizer.step()
            # Groups that wait for their step keep their gradients, and a step that is skipped frees them.
            waits = "step_every" in options and step % 2 == 0
            left = {name for name, param in params.items() if param.grad is not None}
            assert left == (given if waits or not release_gradients else set())
        tensors = {name: [param.detach(), *optimizer.state[param].values()] for name, param in params.items()}
        found.append((tensors, str(optimizer.telemetry()), optimizer.last_step()))
    for name, tensors in found[0][0].items():
        assert all(map(torch.equal, tensors, found[1][0][name])), name
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("clip", [False, True])
def test_tied_copies(clip):
    found = []
    for release_gradients in (False, True):
        torch.manual_seed(0)
        head, copied = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 5))
        groups = [
            {"params": [("head", head)], "algorithm": "adamw"},
            {"params": [("copy", copied)], "algorithm": "adamw"},
        ]
        optimizer = Muon(groups, adamw_lr=0.1, release_gradients=release_gradients)
        optimizer.tie("head", "copy", transposed=True)
        for _ in range(3):
            head.grad, copied.grad = torch.randn(5, 8), torch.randn(8, 5)
            if clip:
                quintic.clip_grad_norm_(optimizer, 0.1, scope="all")
            optimizer.step()
            assert not release_gradients or head.grad is copied.grad is None
            optimizer.zero_grad()
        found.append(head.detach().clone())
        assert torch.equal(head, copied.mT)
    assert torch.equal(*found)


def test_an_error_leaves_all_gradients_for_another_try():
    params = params_of()
    optimizer = Muon(groups_of(params), on_nonfinite="raise", release_gradients=True)
    give(params)
    params["b1"].grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="b1"):
        optimizer.step()
    assert all(param.grad is not None for param in params.values())
    params["b1"].grad[0, 0] = 1.0
    optimizer.step()
    assert all(param.grad is None for param in params.values())


def test_a_scaler_that_skips_a_step_finds_no_gradients_after_it():
    params = params_of()
    optimizer = Muon(groups_of(params), comms="replicated", release_gradients=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: param.detach().clone() for name, param in params.items()}
    scaler.scale(sum((param * param).sum() for param in params.values())).backward()
    params["a0"].grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    assert all(param.grad is None for param in params.values())


def test_a_closure_makes_gradients_that_the_step_frees():
    params = params_of()
    optimizer = Muon(groups_of(params), release_gradients=True)

    def closure():
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params.values())
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert all(param.grad is None for param in params.values())


def test_a_second_step_finds_no_gradients():
    params = params_of()
    optimizer = Muon(groups_of(params), weight_decay=0.1, release_gradients=True)
    give(params)
    optimizer.step()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    assert optimizer.last_step().without_gradient == len(params)


def test_verify_leaves_gradients_and_the_option():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    optimizer = Muon(quintic.param_groups(model), release_gradients=True)
    model(torch.randn(3, 6)).sum().backward()
    before = {name: param.grad for name, param in model.named_parameters()}
    assert quintic.verify(model, optimizer).ok
    assert all(param.grad is before[name] for name, param in model.named_parameters())
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


# -- the option --------------------------------------------------------------------------------------------------------


def test_copies_have_the_option_and_state_dicts_do_not():
    params = params_of()
    optimizer = Muon(groups_of(params), release_gradients=True)
    assert "release_gradients" not in str(optimizer.state_dict())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = [param for group in twin.param_groups for param in group["params"]]
        for param in theirs:
            param.grad = torch.ones_like(param)
        twin.step()
        assert all(param.grad is None for param in theirs)
    other = Muon(groups_of(params_of()))
    other.load_state_dict(optimizer.state_dict())
    assert not other._plans.release_gradients


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_other_values_than_false_and_true_are_refused(value):
    with pytest.raises(ValueError, match=rf"release_gradients={value!r} must be False or True"):
        Muon([nn.Parameter(torch.randn(4, 6))], release_gradients=value)


@pytest.mark.parametrize(
    ("option", "value"), [("release_gradients", True), ("comm_order", ["0.0"]), ("compute_order", ["0.0"])]
)
def test_a_group_cannot_have_an_option_of_the_whole_optimizer(option, value):
    with pytest.raises(ValueError, match=rf"group 0: {option} is an option of the whole optimizer"):
        Muon([{"params": [nn.Parameter(torch.randn(4, 6))], option: value}])


def test_graphs_are_refused():
    params = params_of()
    optimizer = Muon(groups_of(params), release_gradients=True)
    with pytest.raises(ValueError, match="release_gradients frees the gradients"):
        CapturedStep(optimizer)
    give(params)
    with (
        mock.patch.object(device, "is_capturing", return_value=True),
        pytest.raises(RuntimeError, match="release_gradients frees the gradients"),
    ):
        optimizer.step()
    assert all(param.grad is not None for param in params.values())


# -- bytes -------------------------------------------------------------------------------------------------------------


def peaks(device_type):
    """The most bytes of a step above those before it, gradients included, with and without the option; and the plan."""
    found = []
    for release_gradients in (False, True):
        # On GPUs so large that the allocator's rounding, at most 2 MiB for a block, does not count.
        n = 256 if device_type == "cpu" else 2048
        shapes = [(n, n)] * 6 + [(n, 4 * n)] * 6 + [(16 * n * n,)]
        params = {f"p{i}": nn.Parameter(torch.randn(shape, device=device_type)) for i, shape in enumerate(shapes)}
        optimizer = Muon(
            groups_of(params), master=None, compute_dtype=torch.float32, release_gradients=release_gradients
        )

        def step(params=params, optimizer=optimizer):
            for param in params.values():
                param.grad = torch.randn(param.shape, device=device_type)
            optimizer.step()
            optimizer.zero_grad()

        step()
        found.append(peak_bytes(step, device_type))
    return found, list(optimizer.plan())


def predicted(buckets):
    """The difference of the two peaks: without the option all gradients are there beside the largest workspace."""
    gradients = {bucket: bucket.numel * bucket.dtype.itemsize for bucket in buckets}
    left, peak = sum(gradients.values()), 0
    for bucket in sorted(buckets, key=lambda bucket: bucket.workspace_bytes):
        peak = max(peak, left)
        left -= gradients[bucket]
        peak = max(peak, left + bucket.workspace_bytes)
    return sum(gradients.values()) + max(bucket.workspace_bytes for bucket in buckets) - peak


def check_peaks(device_type):
    (kept, released), buckets = peaks(device_type)
    expected = predicted(buckets)
    assert expected > 8 * 2**20
    assert kept - released == pytest.approx(expected, rel=0.15)


def test_a_step_needs_less_memory_by_the_predicted_amount():
    check_peaks("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_needs_less_memory_by_the_predicted_amount():
    check_peaks("cuda")
