"""Every kernel compiles for Hopper, on a machine without a GPU: the interpreter forgives what the compiler does not."""

import pytest

triton = pytest.importorskip("triton")

import compiling  # noqa: E402
import triton.language as tl  # noqa: E402

from quintic.kernels import adamw, matrix_update, normalize, symmetric  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted in this process"),
]

# Types of what a kernel gets besides integers and constants.
POINTERS = {
    "addresses": "*i64",
    "numels": "*i64",
    "tensor_of_program": "*i32",
    "tile_of_program": "*i32",
    "go": "*i32",
    "exponents": "*i32",
    "hyperparameters": "*fp64",
    "directions": "*bf16",
    "updates": "*fp16",
    **dict.fromkeys(("factors", "corrections", "sums"), "*fp32"),
    **dict.fromkeys(("norm", "alpha", "beta", "diagonal"), "fp32"),
}

# Weights and what a kernel's MASTER is for them: none, float32, the mantissa of bfloat16.
PRECISIONS = [
    *[(weight, master) for weight in (tl.float32, tl.bfloat16, tl.float16) for master in (0, 1)],
    (tl.bfloat16, 2),
]


def compile_kernel(kernel, constants, num_warps=8, num_stages=3, **types):
    compiling.compile_kernel(kernel, constants, POINTERS | types, num_warps, num_stages)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("weight", "master"), PRECISIONS, ids=str)
@pytest.mark.parametrize(("contiguous", "grouped"), [(True, False), (False, True), (False, False)])
def test_matrices(weight, master, contiguous, grouped):
    where = {"CONTIGUOUS": contiguous, "GROUPED": grouped, "ALIGNED": contiguous, "GUARDED": grouped, "BLOCK": 2048}
    compile_kernel(matrix_update._momentum_kernel, {"MU": 2, "GRADIENT": weight, "NESTEROV": contiguous, **where})
    options = {"LR": 0, "WEIGHT_DECAY": 1, "CAUTIOUS": grouped, "SQUARED": contiguous}
    layout = {"UPDATE_CONTIGUOUS": contiguous, "PER_MATRIX": contiguous}
    compile_kernel(matrix_update._apply_kernel, {"WEIGHT": weight, "MASTER": master, **options, **layout, **where})


@pytest.mark.parametrize(("weight", "master"), PRECISIONS, ids=str)
@pytest.mark.parametrize("alone", [True, False])
def test_adamw(weight, master, alone):
    indices = {"LR": 0, "WEIGHT_DECAY": 1, "BETA1": 3, "BETA2": 4, "EPS": 5}
    flags = {"ALONE": alone, "CAUTIOUS": alone, "SQUARED": alone, "GUARDED": not alone, "ALIGNED": alone}
    dtypes = {"WEIGHT": weight, "GRADIENT": weight, "MASTER": master}
    compile_kernel(adamw._adamw_kernel, {**indices, **flags, **dtypes, "BLOCK": 1024})


@pytest.mark.parametrize(("given", "made"), [("*bf16", "*fp16"), ("*fp32", "*bf16"), ("*fp32", "*fp32")])
def test_normalisation(given, made):
    block, combine, num_warps = normalize._BLOCK, normalize._COMBINE_BLOCK, normalize._NUM_WARPS
    compile_kernel(normalize._tile_kernel, {"BLOCK": block}, num_warps, x=given)
    compile_kernel(normalize._combine_kernel, {"BLOCK": combine}, num_warps=4)
    for combined in (True, False):
        constants = {"BLOCK": block, "COMBINE": combine, "COMBINED": combined}
        compile_kernel(normalize._scale_kernel, constants, num_warps, x=given, out=made)


@pytest.mark.parametrize("dtype", ["*fp16", "*bf16"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("add", [True, False])
def test_symmetric_products(dtype, even, add):
    constants = {"ADD": add, "EVEN_SIDE": even, "EVEN_INNER": even, "BLOCK": 128, "BLOCK_K": 32}
    types = dict.fromkeys(("a", "b", "c", "out"), dtype)
    compile_kernel(symmetric._symmetric_kernel, constants, num_stages=5, **types)
