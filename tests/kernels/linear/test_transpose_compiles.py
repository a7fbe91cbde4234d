"""The transposing kernel compiles for Hopper, on a machine without a GPU."""

import pytest

pytest.importorskip("triton")

import compiling

from quintic.kernels.linear import transpose

pytestmark = compiling.MARKS

BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*fp8e4nv": 1, "*fp8e5": 1, "*u8": 1, "*i16": 2, "*i64": 8}


def compile_transpose(x, out, add=False, largest=0.0):
    constants = {
        "ADD": add,
        "LARGEST": largest,
        "ROWS_FIRST": add,
        "BLOCK_M": transpose._ROW_BYTES // BYTES[out],
        "BLOCK_N": transpose._ROW_BYTES // BYTES[x],
    }
    types = {"x": x, "out": out, "x_row": "i64"}
    return compiling.compile_kernel(transpose._transpose_kernel, constants, types, num_warps=transpose._NUM_WARPS)


@pytest.mark.parametrize("dtype", ["*u8", "*i16", "*i64"])
def test_moves_compile(dtype):
    compile_transpose(dtype, dtype)


@pytest.mark.parametrize("x", ["*fp32", "*bf16", "*fp16", "*fp8e4nv", "*fp8e5"])
@pytest.mark.parametrize(("out", "largest"), [("*fp32", 0.0), ("*bf16", 0.0), ("*fp8e4nv", 448.0), ("*fp8e5", 57344.0)])
def test_conversions_compile(x, out, largest):
    compile_transpose(x, out, largest=largest)


@pytest.mark.parametrize("x", ["*fp32", "*bf16"])
@pytest.mark.parametrize("out", ["*fp32", "*fp16"])
def test_sums_compile(x, out):
    compile_transpose(x, out, add=True)
