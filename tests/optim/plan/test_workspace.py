"""Planned memory against what is allocated: never below it, and little above."""

import collections
import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from allocated import peak_bytes
from hypothesis import given
from hypothesis import strategies as st
from newer import check_gluon
from torch import nn

from quintic import Experts, Heads, Matrix, Muon, Rows
from quintic.kernels.products.choose_products import choose_products
from quintic.optim.numeric.sums import sums
from quintic.optim.plan.kinds import direction_dtype
from quintic.optim.plan.plan import SMALL_BYTES
from quintic.optim.plan.workspace.matrices import (
    WorkspaceSpec,
    _constrain_footprint,
    directions_bytes,
    polar_footprint,
    stages_footprint,
)
from quintic.optim.polar.cpu_orthogonalize import _batch_keeps_bits
from quintic.optim.polar.forms import resolve
from quintic.optim.polar.matrix_stages import MatrixState, apply_stages, constrained
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.polar.program import products_of, run_products, run_queue
from quintic.optim.rules.library.adamuon import ADAMUON
from quintic.optim.rules.library.muon_plus import MUON_PLUS, NANOCHAT
from quintic.optim.rules.library.muoneq import MUONEQ
from quintic.optim.rules.library.muown import MUOWN
from quintic.optim.rules.stages import WEIGHT, MatrixStage, StageOptions, StateSpec
from quintic.optim.rules.table import MUON, NORMUON, RULES
from quintic.optim.rules.update import momentum_
from quintic.simulate.simulate import simulate_plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(64, 64), (64, 256), (256, 64), (33, 70)]


# -- orthogonalisation in plain PyTorch ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["polar_express", "gram"])
@pytest.mark.parametrize(
    ("compute_dtype", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.usefixtures("same_threads")
def test_what_plain_products_allocate(method, compute_dtype, dtype, shape, batch):
    # A batch is compared with single matrices once for each number of threads, which takes memory: here, now.
    torch.set_num_threads(1)
    _batch_keeps_bits.cache_clear()
    form = resolve(method, *shape, compute_dtype=compute_dtype, device_type="cpu", dtype=dtype)
    x = torch.randn(batch, *shape).to(direction_dtype(form, dtype))
    peak = peak_bytes(lambda: apply_form(x, form, "torch"))
    planned = polar_footprint(form, batch, *shape, WorkspaceSpec(dtype, CPU, "torch", MUON))
    # Of one bfloat16 matrix copies may be made that seldom are.
    copied = 100_000 if compute_dtype == torch.bfloat16 else 0
    assert peak <= planned.peak <= 1.2 * peak + copied + 256
    assert planned.kept == x.numel() * compute_dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_svd_allocates(dtype, shape):
    form = resolve("svd", *shape, device_type="cpu", dtype=dtype)
    x = torch.randn(3, *shape, dtype=dtype)
    assert (
        peak_bytes(lambda: apply_form(x, form))
        <= polar_footprint(form, 3, *shape, WorkspaceSpec(dtype, CPU, "torch", MUON)).peak
    )


# -- orthogonalisation with kernels ----------------------------------------------------------------------------------


def without_multiplying(a, b, *, symmetric, dtype=None, **factors):
    """A product that allocates what kernels do: its result."""
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


def on_gpu(method, shape, worst_case=False):
    form = resolve(method, *shape, compute_dtype=torch.float16, device_type="cuda")
    return (
        form,
        products_of(tuple(form.segments), form.coefficients, 1.0),
        WorkspaceSpec(torch.bfloat16, CUDA, "triton", MUON, worst_case),
    )


@pytest.mark.parametrize("method", ["polar_express", "gram"])
@pytest.mark.parametrize("shape", [(260, 300), (264, 1400), (1400, 264), (100, 300)], ids=str)
def test_products_one_by_one(method, shape):
    # Too small, or too many, for the queue. Sides that are no multiples of 8 are padded.
    pytest.importorskip("triton")
    form, program, spec = on_gpu(method, shape)
    m, n = (-(-side // 8) * 8 for side in shape)
    batch = 2 if min(shape) < 256 else int(5e10 // (min(m, n) ** 2 * max(m, n))) + 1
    sizes = []

    def run(batch):
        padded = None if (m, n) == shape else torch.empty(batch, m, n, dtype=torch.bfloat16)
        x = [torch.empty(batch, m, n, dtype=torch.float16)]
        result = run_products(program, x, without_multiplying)
        result = result if padded is None else result[:, : shape[0], : shape[1]].contiguous()
        sizes.append(result.untyped_storage().nbytes())
        return result

    # Memory that is never written to costs nothing.
    peak = peak_bytes(lambda: run(batch))
    planned = polar_footprint(form, batch, *shape, spec)
    assert peak <= planned.peak <= 1.25 * peak
    assert planned.kept == sizes[0]


@pytest.mark.parametrize("method", ["polar_express", "gram"])
@pytest.mark.parametrize("shape", [(256, 256), (264, 1400), (1400, 264)], ids=str)
def test_the_queue(method, shape, monkeypatch):
    check_gluon()
    import quintic.kernels.products.hopper_program as hopper_program

    monkeypatch.setattr(hopper_program, "run_program", lambda *tensors: None)
    form, program, spec = on_gpu(method, shape)
    run_queue(program, torch.empty(2, 1, *shape, dtype=torch.float16))  # makes the tables
    sizes = []

    def run():
        result = run_queue(program, torch.empty(2, 3, *shape, dtype=torch.float16))
        sizes.append(result.untyped_storage().nbytes())

    peak = peak_bytes(run)
    planned = polar_footprint(form, 3, *shape, spec)
    assert peak <= planned.peak <= 1.25 * peak
    assert planned.kept == sizes[0]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of any compute capability, as far as choices are concerned."""
    pytest.importorskip("triton")
    found = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found.capability)
    return found


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (2048, 2048), (260, 512), (248, 512)], ids=str)
@pytest.mark.parametrize("batch", [1, 5, 6, 28, 111])
def test_bounds_are_of_the_kernels_that_are_chosen(gpu, capability, shape, batch):
    gpu.capability = capability
    form, _, spec = on_gpu("polar_express", shape)
    chosen = choose_products(torch.Size((batch, *shape)), torch.float16, CUDA)
    planned = polar_footprint.__wrapped__(form, batch, *shape, spec)
    size = 2 * batch * shape[0] * shape[1]
    assert planned.kept == (2 * size if chosen == "queue" else size)
    anywhere = polar_footprint(form, batch, *shape, spec._replace(worst_case=True))
    assert planned.peak <= anywhere.peak
    assert planned.kept <= anywhere.kept


@given(
    method=st.sampled_from(["polar_express", "gram", "newton_schulz"]),
    m=st.integers(1, 3000),
    n=st.integers(1, 3000),
    eights=st.booleans(),
    batch=st.integers(1, 300),
    kernels=st.sampled_from(["torch", "triton"]),
)
def test_bounds_for_any_device_grow_with_the_number_of_matrices(method, m, n, eights, batch, kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    m, n = (8 * m, 8 * n) if eights else (m, n)
    form = resolve(method, m, n, compute_dtype=torch.float16, device_type="cuda")
    spec = WorkspaceSpec(torch.bfloat16, CUDA, kernels, MUON, worst_case=True)
    fewer, more = (polar_footprint(form, count, m, n, spec) for count in (batch, batch + 1))
    assert fewer.peak <= more.peak
    assert fewer.kept <= more.kept
    exact = polar_footprint(form, batch, m, n, spec._replace(worst_case=False))
    assert exact.peak <= fewer.peak
    assert exact.kept <= fewer.kept


# -- stages of a rule ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decorrelated(MatrixStage):
    """A stage as a new rule may bring it: products, temporary tensors of several sizes, an average."""

    label = "decorrelate"
    state = (StateSpec("mean", "average", "param"),)

    def apply(self, matrices, state, options):
        wide = matrices.to(state["mean"].dtype)
        gram = wide @ wide.mT  # (b, m, m)
        mixed = (gram / sums(gram.square(), -1).sqrt()) @ wide
        state["mean"].lerp_(mixed.square(), 1 - options.normalize_beta)
        return torch.where(state["mean"] > 0, mixed * state["mean"].rsqrt(), mixed), None


@pytest.mark.parametrize("given", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("state_dtype", [None, "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "stages",
    [
        NORMUON.after,
        ADAMUON.before,
        ADAMUON.after,
        (Decorrelated(),),
        MUONEQ.before,
        MUON_PLUS.after,
        NANOCHAT.after,
        MUOWN.before,
    ],
)
def test_what_stages_allocate(stages, shape, state_dtype, given):
    # No stage says what it needs.
    count, spec = 3, WorkspaceSpec(torch.float32, CPU, "torch", MUON, state_dtype=state_dtype)
    matrices, scales = torch.randn(count, *shape).to(given), torch.ones(count, 1, 1)
    specs = [one for stage in stages for one in stage.state]
    batches = {
        one.name: torch.zeros(count, *shape, dtype=one.dtype_for(torch.float32, spec.state_dtype))
        for one in specs
        if one.shape == "param"
    }
    if any(stage.reads_weights for stage in stages):
        batches[WEIGHT] = torch.randn(count, *shape)
    vectors = {one.name: [torch.zeros(count, *one.vector_shape(*shape))] for one in specs if one.is_vector}
    mask, options = torch.ones(count, dtype=torch.int32), StageOptions(normalize_beta=0.9)

    def run():
        return apply_stages(
            stages, matrices, scales, MatrixState(batches, vectors), options, mask, collections.defaultdict(nullcontext)
        )

    peak, planned = peak_bytes(run), count * stages_footprint(stages, *shape, given, spec).peak
    # A number of Python's is a tensor for a moment.
    assert peak <= planned + 16 <= 1.1 * peak + 1024


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.constrain is not None))
def test_what_stages_on_weights_allocate(name, shape):
    count, stage = 3, RULES[name].constrain
    updates, weights, scales = torch.randn(count, *shape), torch.randn(count, *shape), torch.ones(count, 1, 1)
    vectors = {one.name: [torch.ones(count, *one.vector_shape(*shape))] for one in stage.state}
    mask = torch.ones(count, dtype=torch.int32)

    def run():
        return constrained(stage, updates, scales, MatrixState({WEIGHT: weights}, vectors), StageOptions(), mask)

    spec = WorkspaceSpec(torch.float32, CPU, "torch", RULES[name])
    peak, planned = peak_bytes(run), count * _constrain_footprint(stage, *shape, torch.float32, spec).peak
    assert peak <= planned <= 1.1 * peak + 1024


def test_stages_are_counted_as_the_device_of_the_plan_runs_them():
    # On GPUs squares are a new tensor. A kernel has sums of 6 segments for each of the 3072 neurons, and the factors.
    on_cpu = WorkspaceSpec(torch.float32, CPU, "torch", NORMUON)
    on_gpu = on_cpu._replace(device=CUDA)
    widened, squared = (
        stages_footprint(NORMUON.after, 768, 3072, torch.float16, spec).peak for spec in (on_cpu, on_gpu)
    )
    assert widened < 4 * 768 * 3072 * 1.01
    assert squared > 2 * 4 * 768 * 3072
    pytest.importorskip("triton")
    of_kernel = stages_footprint(NORMUON.after, 768, 3072, torch.float16, on_gpu._replace(kernels="triton")).peak
    assert of_kernel == 4 * 3072 * (6 + 1)


# -- the first pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_what_plain_directions_allocate(dtype, state, direction, nesterov):
    gradient, momentum = torch.randn(300, 400).to(dtype), torch.zeros(300, 400, dtype=state)

    def run():
        out = [torch.empty(300, 400, dtype=direction)]
        return momentum_([momentum], [gradient], mu=0.9, nesterov=nesterov, out=out)

    peak = peak_bytes(run)
    spec = WorkspaceSpec(dtype, CPU, "torch", MUON, state_dtype="bf16" if state == torch.bfloat16 else None)
    planned = directions_bytes(gradient.numel(), direction, spec)
    # Without looking ahead nothing is new but what is widened.
    assert peak <= planned == peak + (0 if nesterov else 4 * gradient.numel())


# -- whole steps -----------------------------------------------------------------------------------------------------


def several(shape, dtype):
    return {"params": [nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(6)]}


def transposed(shape, dtype):
    return {"params": [nn.Parameter(torch.randn(shape[::-1]).to(dtype).T) for _ in range(6)]}


def bank(shape, dtype):
    return {"params": [nn.Parameter(torch.randn((6, *shape)).to(dtype))], "view": Experts()}


def rows(shape, dtype):
    return {"params": [nn.Parameter(torch.randn(6 * shape[0], shape[1]).to(dtype))], "view": Rows(shape[0])}


def heads(shape, dtype):
    return {"params": [nn.Parameter(torch.randn(3 * shape[0], shape[1]).to(dtype)) for _ in range(2)], "view": Heads(3)}


def doubled(x):
    return 2 * x


OPTIONS = [
    {},
    {"normalize": "neuron"},
    {"compute_dtype": torch.float32, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"compute_dtype": torch.float16},
    {"orthogonalizer": "gram", "compute_dtype": torch.float32, "max_workspace_bytes": 400_000},
    {"orthogonalizer": "gram", "compute_dtype": torch.float16, "max_workspace_bytes": 400_000, "normalize": "neuron"},
    {"master": "fp32", "cautious": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"master": "mantissa", "cautious": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"master": "8bit"},
    {"master": "8bit", "cautious": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"cautious": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"scale_decay": True, "weight_decay": 0.1, "normalize": "neuron"},
    {"master": "mantissa", "cautious": "strict", "scale_decay": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    {"orthogonalizer": doubled},
    {"state_dtype": "bf16"},
    {"state_dtype": "bf16", "compute_dtype": torch.float32},
    {"normalize": "element"},
    {"normalize": "element", "compute_dtype": torch.float32, "state_dtype": "bf16", "max_workspace_bytes": 400_000},
]
CASES = [
    (dtype, options)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for options in OPTIONS
    if "master" not in options or dtype == torch.bfloat16
]


PARAMS = [
    pytest.param(params_of, shape, marks=[pytest.mark.slow] if shape[0] > 48 and params_of in (bank, rows) else [])
    for params_of in (several, transposed, bank, rows, heads)
    for shape in ((48, 48), (160, 32))
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
@pytest.mark.parametrize(("params_of", "shape"), PARAMS)
def test_what_a_step_allocates(params_of, shape, dtype, options):
    group = params_of(shape, dtype)
    optimizer = Muon([group], kernels="torch", **options)
    for param in group["params"]:
        param.grad = torch.randn_like(param)
    optimizer.step()
    peak, planned = peak_bytes(optimizer.step), optimizer.plan().peak_workspace_bytes
    assert peak <= planned
    if len(group["params"]) == 6 and not callable(options.get("orthogonalizer")):
        # Else what the second pass may need of one parameter decides, whatever it does.
        assert planned <= 1.25 * peak + 2**14


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "bf16", "master": "mantissa"},
        {"master": "8bit"},
        {"compute_dtype": torch.float32, "max_workspace_bytes": 400_000},
    ],
    ids=["float32", "narrow", "byte", "limited"],
)
@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"muon", "normuon", "adamuon"}))
def test_what_a_step_of_every_rule_allocates(rule, options):
    group = several((160, 32), torch.bfloat16 if "master" in options else torch.float32)
    optimizer = Muon([group], kernels="torch", update_rule=rule, weight_decay=0.1, **options)
    for param in group["params"]:
        param.grad = torch.randn_like(param)
    optimizer.step()
    peak, planned = peak_bytes(optimizer.step), optimizer.plan().peak_workspace_bytes
    assert peak <= planned <= 1.5 * peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("limit", [None, 400_000])
@pytest.mark.parametrize("shape", [(160, 32), (400, 400)], ids=str)
def test_what_state_of_8_bits_allocates(shape, limit, algorithm, dtype):
    masters = {"master": "8bit"} if dtype == torch.bfloat16 else {}
    for make in (several, rows)[: 2 if algorithm == "muon" else 1]:
        group = make(shape, dtype)
        optimizer = Muon(
            [{**group, "algorithm": algorithm}],
            kernels="torch",
            state_dtype="int8",
            max_workspace_bytes=limit,
            orthogonalizer=doubled,
            **masters,
        )
        for param in group["params"]:
            param.grad = torch.randn_like(param)
        optimizer.step()
        peak, planned = peak_bytes(optimizer.step), optimizer.plan().peak_workspace_bytes
        assert peak <= planned <= 8 * peak


def test_what_adamw_allocates_for_parameters_with_gaps():
    """PyTorch's fused update, which allocates nothing, would write into these."""
    param, without = nn.Parameter(torch.randn(300, 200)[:, ::2]), nn.Parameter(torch.randn(300, 100))
    param.grad, without.grad = torch.randn(300, 200)[:, ::2], torch.randn(300, 100)
    optimizer = Muon([{"params": [param, without], "algorithm": "adamw"}])
    optimizer.step()
    peak, planned = peak_bytes(optimizer.step), optimizer.plan().peak_workspace_bytes
    assert 0.8 * planned <= peak <= planned
    assert [bucket.workspace_bytes for bucket in optimizer.plan()] == [planned, 64]


@pytest.mark.parametrize(("compute_dtype", "copies"), [(torch.float32, 1), (torch.float16, 0)], ids=str)
def test_transposed_matrices_are_put_in_order_for_wide_products_on_gpus(gpu, compute_dtype, copies):
    def planned(shape, **options):
        params = [nn.Parameter(torch.empty(shape, device="meta")) for _ in range(3)]
        optimizer = Muon([{"params": params, **options}], compute_dtype=compute_dtype)
        return int(simulate_plan(optimizer, (1,), ("dp",)).workspace_bytes)

    rows, columns = planned((512, 256)), planned((256, 512), view=Matrix(transposed=True))
    assert columns == rows + copies * 3 * 512 * 256 * 4


def test_small_tensors_are_planned_for_on_gpus():
    plan = Muon([nn.Parameter(torch.randn(4, 4))]).plan()
    [bucket] = plan
    assert plan.peak_workspace_bytes == bucket.workspace_bytes
    on_gpu = dataclasses.replace(plan, buckets=(dataclasses.replace(bucket, device=CUDA),))
    assert on_gpu.peak_workspace_bytes == bucket.workspace_bytes + SMALL_BYTES
