"""The kernels for Hopper compile, on a machine without a GPU, for the arguments that they are launched with."""

import functools
from types import SimpleNamespace

import pytest
import torch
from newer import check_gluon

check_gluon()

import compiling  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

from quintic.kernels.products import hopper, hopper_program  # noqa: E402
from quintic.optim.polar.coefficients import polar_express_coefficients  # noqa: E402
from quintic.optim.polar.program import products_of, run_products, run_queue  # noqa: E402

pytestmark = compiling.MARKS

# What a multiprocessor has.
SHARED_MEMORY = 232_448
# Bytes of registers kept in memory, per thread: bookkeeping of tiles may be, of which there is much; an eighth of a
# tile's sums would be as many.
MAX_SPILLS = 128
MULTIPROCESSORS = 132

# Wide or tall matrices, with fewer tiles than there are multiprocessors or more, and the dtype of the result.
CASES = [
    ((2, 264, 520), torch.float16, torch.bfloat16),
    ((2, 520, 264), torch.float16, None),
    ((60, 264, 520), torch.bfloat16, None),
    ((60, 520, 264), torch.bfloat16, None),
]


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **named):
            options = {name: named.pop(name) for name in list(named) if name not in self.kernel.arg_names}
            names = [name for name in self.kernel.arg_names if name not in named]
            types = {name: mangle_type(value) for name, value in zip(names, args, strict=True)}
            self.launches.append(SimpleNamespace(grid=grid, types=types, constants=named, options=options))

        return launch

    def compile(self):
        for launch in self.launches:
            compile_launch(
                self.kernel, *(tuple(part.items()) for part in (launch.constants, launch.types, launch.options))
            )


@functools.cache
def compile_launch(kernel, constants, types, options):
    compiled = compiling.compile_kernel(kernel, dict(constants), dict(types), **dict(options))
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "wgmma" in compiled.asm["ptx"]
    assert compiling.spilt_bytes(compiled) <= MAX_SPILLS
    # What the assembler complains of where products cannot run in the background.
    assert "serialized" not in compiled.log


@pytest.fixture
def recorded(monkeypatch):
    """Keep the launches of both kernels, as if there were a GPU."""
    for module, name in ((hopper, "_product_kernel"), (hopper_program, "_program_kernel")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
        monkeypatch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
    return SimpleNamespace(product=hopper._product_kernel, program=hopper_program._program_kernel)


def some_program():
    return products_of(((0, 2), (2, 3)), polar_express_coefficients(3), 128.0)


@pytest.mark.parametrize(("shape", "dtype", "result"), CASES, ids=str)
def test_single_products_compile(recorded, shape, dtype, result):
    run_products(some_program(), [torch.zeros(shape, dtype=dtype)], hopper.hopper_multiply, result)
    launches = recorded.product.launches
    assert len(launches) == len(some_program().products)
    for launch in launches:
        assert launch.constants["HALVES"] == (1 if shape[0] > 2 else 2)
        assert launch.grid[0] <= MULTIPROCESSORS
    recorded.product.compile()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [200, 40_000])
def test_products_with_relu2_compile(recorded, dtype, rows):
    """The two of an MLP: (rows, k) times the transpose of (n, k), and (rows, k) times (k, n) with its result as c."""
    x, weight = torch.zeros((1, rows, 264), dtype=dtype), torch.zeros((1, 520, 264), dtype=dtype)
    out = hopper.hopper_multiply(x, weight.mT, symmetric=False, epilogue="relu2")
    hopper.hopper_multiply(x, weight.mT.contiguous(), symmetric=False, c=out, epilogue="relu2_backward")
    constants = [launch.constants for launch in recorded.product.launches]
    assert [(each["B_TRANSPOSED"], each["EPILOGUE"]) for each in constants] == [
        (True, "relu2"), (False, "relu2_backward")
    ]  # fmt: skip
    assert {each["HALVES"] for each in constants} == {2 if rows == 200 else 1}
    recorded.product.compile()


@pytest.mark.parametrize(("shape", "dtype", "result"), CASES, ids=str)
def test_programs_compile(recorded, shape, dtype, result):
    run_queue(some_program(), torch.zeros((2, *shape), dtype=dtype), result)
    [launch] = recorded.program.launches
    assert launch.constants == {"WIDE": shape[1] <= shape[2], "HALVES": 1 if shape[0] > 2 else 2}
    # Programs wait for each other: all of them must be running.
    assert launch.grid[0] <= MULTIPROCESSORS
    assert launch.options["launch_cooperative_grid"]
    recorded.program.compile()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_batch_of_one_may_have_any_stride(recorded, symmetric):
    """The copy engine wants multiples of 16 bytes, and a contiguous tensor's stride that is never taken may be odd."""
    x = torch.zeros(264, 520, 1, dtype=torch.float16).permute(2, 0, 1)
    assert x.is_contiguous()
    assert x.stride(0) == 1
    for a, b in ((x, x.mT), (x.mT, x)):
        hopper.hopper_multiply(a, b, symmetric=symmetric)
    assert len(recorded.product.launches) == 2
