"""Launching compiled kernels again: the same variant that Triton would choose, on the device of the arguments."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
from triton import language as tl

from quintic.kernels import launch as launching
from quintic.kernels.launch import launch, variants

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 15, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 16]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.builds(
        lambda dtype, start: torch.empty(64, dtype=dtype)[start:],
        st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.float64]),
        st.integers(0, 8),
    ),
)


@functools.cache
def specialization():
    """Return the function by which Triton chooses the variant of a kernel, for one argument: moved in 3.6."""
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    if hasattr(triton.runtime.jit, "create_specialize_impl"):
        specialize = triton.runtime.jit.create_specialize_impl(backend.get_arg_specialization)
    else:
        specialize = functools.partial(triton.runtime.jit.native_specialize_impl, backend)
    return lambda value: specialize(value, False, True, True)


@given(NUMBERS, NUMBERS)
def test_what_triton_compiles_differently_is_told_apart(first, second):
    specialized = specialization()
    if specialized(first) != specialized(second):
        assert variants((first,)) != variants((second,))


class Compiled:
    """Stands for a compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.run = mock.Mock()


class Kernel:
    """Stands for Triton's kernels, and counts what it is asked to choose."""

    arg_names = ("x", "numel", "scale", "BLOCK", "FLAG")
    constexprs = (3, 4)

    def __init__(self):
        self.calls, self.compiled = [], []

    def __getitem__(self, grid):
        def call(*args, **options):
            self.calls.append((grid, args, options))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return call


@pytest.fixture
def on_a_device(monkeypatch):
    """Pretend that tensors are on a CUDA device, and that `Kernel` is one of Triton's."""
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)


def descriptor(tensor, block=(1, 64)):
    base = SimpleNamespace(dtype=tensor.dtype, data_ptr=tensor.data_ptr, device=torch.device("cuda", 0), is_meta=False)
    return SimpleNamespace(base=base, block_shape=list(block), __post_init__=mock.Mock())


def test_the_second_launch_asks_triton_nothing(on_a_device):
    kernel = Kernel()
    x, y = (descriptor(torch.empty(64)) for _ in range(2))
    launch(kernel, (3,), x, 40, 0.5, FLAG=True, BLOCK=64, num_warps=4)
    launch(kernel, (5, 2), y, 56, 0.25, FLAG=True, BLOCK=64, num_warps=4)
    assert kernel.calls == [((3,), (x, 40, 0.5), {"FLAG": True, "BLOCK": 64, "num_warps": 4})]
    kernel.compiled[0].run.assert_called_once_with(
        5, 2, 1, "stream 0", "function", "metadata", None, None, None, y, 56, 0.25, 64, True
    )
    assert x.__post_init__.called
    assert not y.__post_init__.called


@pytest.mark.parametrize(
    "other",
    [
        {"numel": 48},
        {"numel": 1},
        {"numel": 2**31},
        {"scale": None},
        {"block": (1, 32)},
        {"dtype": torch.bfloat16},
        {"start": 1},
        {"BLOCK": 128},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_other_variants_are_chosen_by_triton(on_a_device, other):
    kernel = Kernel()

    def run(numel=40, scale=0.5, block=(1, 64), dtype=torch.float32, start=0, BLOCK=64, num_warps=4):
        x = descriptor(torch.empty(65, dtype=dtype)[start:], block)
        launch(kernel, (1,), x, numel, scale, BLOCK=BLOCK, FLAG=False, num_warps=num_warps)

    run()
    run(**other)
    assert len(kernel.calls) == 2
    run()
    run(**other)
    assert [compiled.run.call_count for compiled in kernel.compiled] == [1, 1]


def test_constants_are_given_by_name(on_a_device):
    with pytest.raises(TypeError, match=r"'BLOCK', 'FLAG'.*by name"):
        launch(Kernel(), (1,), descriptor(torch.empty(4)), 2, 0.5, 64, FLAG=False)


def test_two_kernels_are_two(on_a_device):
    kernels = [Kernel(), Kernel()]
    for _ in range(2):
        for kernel in kernels:
            launch(kernel, (1,), descriptor(torch.empty(4)), 2, 0.5, BLOCK=1, FLAG=False)
    assert [len(kernel.calls) for kernel in kernels] == [1, 1]


def test_a_profiler_hears_of_every_launch(on_a_device, monkeypatch):
    kernel = Kernel()
    for hooked in (False, False, True, True, False):
        hook = SimpleNamespace(calls=[print] if hooked else [])
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        launch(kernel, (1,), descriptor(torch.empty(4)), 2, 0.5, BLOCK=1, FLAG=False)
    assert len(kernel.calls) == 3


@triton.jit
def _scaled_kernel(x, out, numel, stride, scale, BLOCK: tl.constexpr, ADD: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place * stride, mask=place < numel)
    tl.store(out + place, values * scale + ADD, mask=place < numel)


def scaled(x, stride, scale, add):
    out = x.new_zeros(-(-len(x) // stride))
    launch(_scaled_kernel, (triton.cdiv(len(out), 32),), x, out, len(out), stride, scale, BLOCK=32, ADD=add)
    return out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device():
    for start in (0, 1, 4):
        for size in (1, 16, 100, 1024):
            for stride in (1, 3, 16):
                for scale in (2.0, 1.0, 0.5):
                    for add in (0, 3):
                        x = torch.randn(size + start, device="cuda")[start:]
                        assert torch.equal(scaled(x, stride, scale, add), x[::stride] * scale + add)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_another_device_than_the_current_one():
    for _ in range(2):
        for device in (1, 0):
            x = torch.arange(100.0, device=torch.device("cuda", device))
            assert torch.equal(scaled(x, 1, 2.0, 0), x * 2)
    assert torch.cuda.current_device() == 0
