"""The kernels of lookups compile for Hopper, on a machine without a GPU."""

import pytest

pytest.importorskip("triton")

import compiling

from quintic.kernels.lookup import segments

pytestmark = compiling.MARKS

NARROW = ("offsets", "tokens", "starts", "owners")
POINTERS = {**dict.fromkeys(("lse", "delta"), "*fp32"), **dict.fromkeys(NARROW, "*i32"), "order": "*i64"}
SIZES = {"POSITIONS": segments._POSITIONS, "ROWS": segments._ROWS, "CHUNK": segments._CHUNK}
DTYPES = [("*bf16", "*fp32"), ("*bf16", "*bf16"), ("*fp16", "*fp32"), ("*fp32", "*fp32")]


def compile_for(kernel, activations, tables, columns, **constants):
    types = {
        **POINTERS,
        **dict.fromkeys(("x", "grad", "out"), activations),
        **dict.fromkeys(("keys", "values", "grad_keys", "grad_values"), tables),
    }
    sizes = {**SIZES, "CHUNK": min(segments._CHUNK, columns), "COLUMNS": columns}
    aligned = [name for name, kind in types.items() if kind.startswith("*") and name in kernel.arg_names] + ["width"]
    return compiling.compile_kernel(kernel, {**constants, **sizes}, types, segments._WARPS, 3, aligned)


@pytest.mark.parametrize(("activations", "tables"), DTYPES)
@pytest.mark.parametrize("columns", [segments._COLUMNS, 16])
def test_lookups_compile(activations, tables, columns):
    for backward in (False, True):
        compiled = compile_for(segments._positions_kernel, activations, tables, columns, BACKWARD=backward)
        # Registers spilt to memory are read back in every turn of the loop over rows. Exact products of float32 need
        # too many whatever the tile, but no model has them on a GPU.
        assert compiling.spilt_bytes(compiled) == 0 or activations == "*fp32"
    for tied in (False, True):
        compiled = compile_for(segments._tables_kernel, activations, tables, columns, TIED=tied)
        assert compiling.spilt_bytes(compiled) == 0 or activations == "*fp32"


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("columns", [segments._MANY_COLUMNS, 16])
def test_sums_of_rows_compile(dtype, columns):
    types = {"table": dtype, "rows": "*i32", "order": "*i64", "grad": dtype}
    sizes = {"POSITIONS": segments._FEW_POSITIONS, "COLUMNS": columns}
    compiled = compiling.compile_kernel(segments._add_kernel, sizes, types, segments._FEW_WARPS, 3, [*types, "width"])
    assert compiling.spilt_bytes(compiled) == 0
