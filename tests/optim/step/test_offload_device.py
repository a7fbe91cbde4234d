"""State in host memory of a CUDA device: pinned, freed, never waited for, and right however late its copies are."""

import copy

import pytest
import torch
from cuda_marks import ON_CUDA
from delayed_copies import SlowCopies
from torch import nn

import quintic
from quintic import Muon, QKClip, Rows
from quintic.optim.rules.rule import PARAM_SHAPED_STATE
from quintic.optim.step.offload import offload

pytestmark = ON_CUDA

OPTIONS = [
    {},
    {"normalize": "neuron", "weight_decay": 0.1, "adamw_weight_decay": 0.1, "cautious": True},
    {"on_nonfinite": "skip", "master": "mantissa"},
    {"master": "fp32"},
    {"state_dtype": "bf16", "master": "mantissa"},
    {"state_dtype": "bf16", "master": "8bit", "on_nonfinite": "skip"},
    {"state_dtype": "int8", "master": "8bit"},
    {"kernels": "torch", "master": "fp32"},
]


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = {f"w{i}": (128, 96) for i in range(6)} | {"bank": (8 * 64, 96), "table": (5000, 64), "bias": (160,)}
    return {name: nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for name, shape in shapes.items()}


def optimizer_of(params, **options):
    matrices = [(name, param) for name, param in params.items() if name.startswith("w")]
    vectors = [(name, params[name]) for name in ("table", "bias")]
    groups = [
        {"params": matrices},
        {"params": [("bank", params["bank"])], "view": Rows(64)},
        {"params": vectors, "algorithm": "adamw"},
    ]
    return Muon(groups, lr=0.02, max_workspace_bytes=2**20, **options)


def give_gradients(params, step):
    generator = torch.Generator(device="cuda").manual_seed(step)
    for param in params.values():
        param.grad = torch.randn(param.shape, device="cuda", generator=generator).to(param.dtype)


def state_of(params, optimizer):
    """All tensors of an optimizer, as they are read right now."""
    return {
        (name, key): value.to("cpu", copy=True)
        for name, param in params.items()
        for key, value in {"weight": param.detach(), **optimizer.state[param]}.items()
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.fixture(params=["loads", "stores", "computing", "nothing"])
def slow(request, monkeypatch):
    """Make one of the queues late, so that an event that is missing shows."""
    monkeypatch.setattr(offload, "Copies", lambda device: SlowCopies(device, request.param))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_do_not_depend_on_where_state_is_or_how_late_copies_are(options, slow):
    found = []
    for on in (False, True):
        params = model_of()
        optimizer = optimizer_of(params, offload=on, **options)
        for step in range(4):
            give_gradients(params, step)
            if step == 2 and "on_nonfinite" in options:
                params["w1"].grad[0] = torch.inf
            optimizer.step()
            if step == 1:
                found.append(state_of(params, optimizer))
        found.append(state_of(params, optimizer))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])


def test_state_is_pinned_and_the_device_has_none_of_it():
    params = model_of()
    give_gradients(params, 0)
    optimizer_of(params).step()  # what libraries allocate at the first use
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = optimizer_of(params, offload=True, master="fp32")
    state = [
        value for of_param in optimizer.state.values() for key, value in of_param.items() if key in PARAM_SHAPED_STATE
    ]
    assert all(value.is_cpu and value.is_pinned() for value in state)
    size = sum(value.nbytes for value in state)
    assert torch.cuda.memory_allocated() - before < 0.01 * size
    before = torch.cuda.memory_allocated()
    optimizer.step()
    buffers = optimizer.plan().offload_buffer_bytes
    # Besides tables of addresses and hyperparameters.
    assert buffers <= torch.cuda.memory_allocated() - before < buffers + 2**17
    optimizer.offload(False)
    assert torch.cuda.memory_allocated() - before >= size
    assert all(value.is_cuda for of_param in optimizer.state.values() for value in of_param.values())
    give_gradients(params, 1)
    optimizer.step()
    optimizer.offload(True)
    optimizer.offload(True)
    assert torch.cuda.memory_allocated() - before < 0.01 * size + 2**17


def test_a_step_never_waits_for_the_device():
    for options in OPTIONS[:4]:
        params = model_of()
        optimizer = optimizer_of(params, offload=True, **options)
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        for step in range(3):
            give_gradients(params, step)
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_the_host_runs_ahead_of_copies():
    params = model_of()
    optimizer = optimizer_of(params, offload=True)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(10**9)
    done.record()
    optimizer.step()
    assert not done.query()


def test_copies_and_pickles_are_pinned_again():
    params = model_of()
    optimizer = optimizer_of(params, offload=True)
    give_gradients(params, 0)
    optimizer.step()
    device_views, copied = copy.deepcopy((params, optimizer))
    assert all(
        value.is_pinned() for s in copied.state.values() for key, value in s.items() if key in PARAM_SHAPED_STATE
    )
    for each, its in ((params, optimizer), (device_views, copied)):
        give_gradients(each, 1)
        its.step()
    assert_same(state_of(params, optimizer), state_of(device_views, copied))
    copied.param_groups[0]["offload"] = False
    third, again = copy.deepcopy((device_views, copied))
    for each, its in ((params, optimizer), (third, again)):
        give_gradients(each, 2)
        its.step()
    assert_same(state_of(params, optimizer), state_of(third, again))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused():
    params = model_of()
    optimizer = optimizer_of(params, offload=True)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    match = r"host memory.*CUDA graph.*optimizer\.offload\(False\)"
    with pytest.raises(RuntimeError, match=match), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_qk_clip_scales_masters_in_host_memory(master, slow):
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        names = ["attn.q_proj.weight", "attn.k_proj.weight", "other"]
        params = {name: nn.Parameter(torch.randn(256, 128, device="cuda").bfloat16()) for name in names}
        optimizer = Muon(params.items(), lr=0.1, master=master, offload=on, qk_clip=QKClip(threshold=1.0))
        for step in range(3):
            give_gradients(params, step)
            optimizer.step(qk_logits={"attn": torch.tensor([0.5, 3.0], device="cuda")})
        found.append(state_of(params, optimizer))
    assert_same(*found)


def test_reference_and_verify_work_meanwhile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 96), nn.Linear(96, 64)).cuda().bfloat16()
    optimizer = Muon(quintic.param_groups(model), offload=True, master="mantissa")
    for _ in range(2):
        model(torch.randint(500, (64,), device="cuda")).float().square().mean().backward()
        assert quintic.verify(model, optimizer).ok
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.is_cpu for s in optimizer.state.values() for key, value in s.items() if key in PARAM_SHAPED_STATE)


def test_gradients_of_another_dtype():
    found = []
    for on in (False, True):
        params = model_of(torch.float32)
        optimizer = optimizer_of(params, offload=on)
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        found.append(state_of(params, optimizer))
    assert_same(*found)
