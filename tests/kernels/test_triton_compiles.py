"""Every kernel compiles for Hopper, on a machine without a GPU: the interpreter forgives what the compiler does not."""

import pytest

triton = pytest.importorskip("triton")

import compiling  # noqa: E402
import triton.language as tl  # noqa: E402

from quintic.kernels import spans  # noqa: E402
from quintic.kernels.products import normalize, symmetric  # noqa: E402
from quintic.kernels.update import adamw, matrix_update, neuron, row_means, square_sums  # noqa: E402

pytestmark = compiling.MARKS

# Types of what a kernel gets besides integers and constants.
POINTERS = {
    "steps": "*i64",
    "addresses": "*i64",
    "numels": "*i64",
    "places": "*i64",
    "tensor_of_program": "*i32",
    "tile_of_program": "*i32",
    "apply_mask": "*i32",
    "exponents": "*i32",
    "hyperparameters": "*fp64",
    "directions": "*bf16",
    "updates": "*fp16",
    **dict.fromkeys(("factors", "corrections", "sums"), "*fp32"),
    **dict.fromkeys(("norm", "alpha", "beta", "diagonal"), "fp32"),
}

# Weights and what a kernel's MASTER is for them: none, float32, the mantissa of bfloat16, a byte of it.
PRECISIONS = [
    *[(weight, master) for weight in (tl.float32, tl.bfloat16, tl.float16) for master in (0, 1)],
    (tl.bfloat16, 2),
    (tl.bfloat16, 3),
]


def compile_kernel(kernel, constants, num_warps=8, num_stages=3, aligned=(), **types):
    return compiling.compile_kernel(kernel, constants, POINTERS | types, num_warps, num_stages, aligned)


@pytest.mark.parametrize(("weight", "master"), PRECISIONS, ids=str)
@pytest.mark.parametrize(("contiguous", "grouped"), [(True, False), (False, True), (False, False)])
def test_passes_over_matrices_compile(weight, master, contiguous, grouped):
    flags = {"CONTIGUOUS": contiguous, "GROUPED": grouped, "ALIGNED": contiguous, "HAS_MASK": grouped}
    where = flags | {"BLOCK": matrix_update._BLOCK}
    for momentum in (tl.float32, tl.bfloat16, tl.int8):
        constants = {"MU": 2, "GRADIENT": weight, "MOMENTUM": momentum, "NESTEROV": contiguous, **where}
        compile_kernel(matrix_update._momentum_kernel, constants, matrix_update._NUM_WARPS)
    cautious = "strict" if grouped else contiguous
    options = {"LR": 0, "WEIGHT_DECAY": 1, "CAUTIOUS": cautious, "SQUARED": contiguous, "SCALED": master != 1}
    layout = {"UPDATE_CONTIGUOUS": contiguous, "PER_MATRIX": contiguous, **where}
    constants = {"WEIGHT": weight, "MASTER": master, **options, **layout}
    compile_kernel(matrix_update._apply_kernel, constants, matrix_update._NUM_WARPS)


@pytest.mark.parametrize(("weight", "master"), PRECISIONS, ids=str)
@pytest.mark.parametrize("alone", [True, False])
def test_adamw_compiles(weight, master, alone):
    indices = {"LR": 0, "WEIGHT_DECAY": 1, "BETA1": 3, "BETA2": 4, "EPS": 5}
    flags = {
        "ONE_TENSOR": alone,
        "CAUTIOUS": "strict" if alone else False,
        "SQUARED": alone,
        "HAS_MASK": not alone,
        "ALIGNED": alone,
    }
    for moments in (tl.float32, tl.bfloat16, tl.int8):
        dtypes = {"WEIGHT": weight, "GRADIENT": weight, "MOMENTS": moments, "MASTER": master}
        constants = {**indices, **flags, **dtypes, "BLOCK": adamw._BLOCK}
        compiled = compile_kernel(adamw._adamw_kernel, constants, adamw._NUM_WARPS)
        # Of float32 weights and gradients nothing else is bfloat16: moments are rounded to the nearest, not cut off.
        rounds = "cvt.rn.bf16" in compiled.asm["ptx"]
        assert rounds == (moments == tl.bfloat16) or weight == tl.bfloat16


@pytest.mark.parametrize(("given", "made"), [("*bf16", "*fp16"), ("*fp32", "*bf16"), ("*fp32", "*fp32")])
def test_normalisation_compiles(given, made):
    block, combine, num_warps = normalize._BLOCK, normalize._COMBINE_BLOCK, normalize._NUM_WARPS
    compile_kernel(normalize._tile_kernel, {"BLOCK": block}, num_warps, x=given)
    compile_kernel(normalize._combine_kernel, {"BLOCK": combine}, num_warps=4)
    for combined in (True, False):
        constants = {"BLOCK": block, "COMBINE": combine, "COMBINED": combined}
        compile_kernel(normalize._scale_kernel, constants, num_warps, x=given, out=made)


@pytest.mark.parametrize("matrices", ["*bf16", "*fp16", "*fp32", "*fp64"])
@pytest.mark.parametrize("side_by_side", ["entry_stride", "row_stride"])
@pytest.mark.parametrize("aligned", [True, False])
def test_sums_of_squares_compile(matrices, side_by_side, aligned):
    compile_square_sums(matrices, {side_by_side: 1}, aligned)


def test_sums_of_one_entry_compile():
    compile_square_sums("*fp32", dict.fromkeys(("rows", "entries", "row_stride", "entry_stride"), 1), False)


def compile_square_sums(matrices, known, aligned):
    # A launch makes a constant of every one.
    flags = {"ENTRIES_FIRST": "entry_stride" in known, "LOG_LANES": square_sums._LOG_LANES, "BLOCK": square_sums._BLOCK}
    multiples = ("matrices", "sums", "rows", "entries", "segment", "matrix_stride", "row_stride", "entry_stride")
    multiples = [name for name in multiples if name not in known] if aligned else ["sums", "segment"]
    compile_kernel(square_sums._sum_kernel, flags | known, square_sums._NUM_WARPS, aligned=multiples, matrices=matrices)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("block", [neuron._MIN_FACTOR_BLOCK, neuron._MAX_FACTOR_BLOCK])
@pytest.mark.parametrize("known", [{}, {"neurons": 1, "segments": 1, "scale_stride": 1}], ids=["many", "one"])
def test_factors_of_neurons_compile(guarded, block, known):
    flags = {"HAS_MASK": guarded, "LOG_SEGMENTS": neuron._LOG_SEGMENTS, "LOG_BLOCK": block.bit_length() - 1}
    types = {"moments": "*i64", "scale": "*fp32", **dict.fromkeys(("entries", "rest", "eps"), "fp32")}
    compile_kernel(neuron._factor_kernel, flags | known, block // neuron._NEURONS_PER_WARP, **types)


@pytest.mark.parametrize("dtype", ["*fp16", "*bf16"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("add", [True, False])
def test_symmetric_products_compile(dtype, even, add):
    sizes = {"BLOCK": symmetric._BLOCK, "BLOCK_K": symmetric._BLOCK_K}
    # X times its transpose.
    strides = {"a_column": 1, "b_row": 1}
    constants = {"ADD": add, "EVEN_SIDE": even, "EVEN_INNER": even, **sizes, **strides}
    types = dict.fromkeys(("a", "b", "c", "out"), dtype)
    aligned = [*types, "a_batch", "a_row", "b_batch", "b_column"]
    compiled = compile_kernel(
        symmetric._symmetric_kernel, constants, symmetric._NUM_WARPS, symmetric._NUM_STAGES, aligned, **types
    )
    # Within the shared memory that every GPU has.
    assert compiled.metadata.shared <= 101_376


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_spans_compile(packs, aligned):
    for alone in (True, False):
        constants = {"ONE_TENSOR": alone, "DTYPE": tl.float32, "PACKS": packs, "ALIGNED": aligned, "BLOCK": 4096}
        compile_kernel(spans._copy_kernel, constants, num_warps=4, buffer="*bf16")


@pytest.mark.parametrize("dtype", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_means_compile(ranks, dtype):
    constants = {"RANKS": ranks, "BLOCK": 2048}
    compile_kernel(spans._mean_kernel, constants, num_warps=4, received=dtype, mean=dtype)


@pytest.mark.parametrize("dtype", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.parametrize(("rows", "columns"), [(2, 1024), (128, 16)])
def test_means_of_rows_compile(rows, columns, dtype):
    for ranks in (1, 2, 8):
        constants = {"RANKS": ranks, "ROWS": rows, "COLUMNS": columns}
        compile_kernel(row_means._rows_kernel, constants, num_warps=4, received=dtype, mean=dtype, places="*i32")


@pytest.mark.parametrize("guarded", [True, False])
def test_counts_of_steps_compile(guarded):
    constants = {"BETA1": 3, "BETA2": 4, "HAS_MASK": guarded, "BLOCK": adamw._COUNT_BLOCK}
    compile_kernel(adamw._count_kernel, constants, num_warps=4)
