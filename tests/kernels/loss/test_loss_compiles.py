"""The kernels of rows.py and fp8_rows.py compile for Hopper, on a machine without a GPU."""

import pytest

pytest.importorskip("triton")

import compiling

from quintic.kernels.loss import fp8_rows, rows

pytestmark = compiling.MARKS

TYPES = {
    **dict.fromkeys(("weights", "scale", "losses", "factors"), "*fp32"),
    **dict.fromkeys(("cap", "span", "steepness", "offset", "slope"), "fp32"),
    "targets": "*i64",
}


@pytest.mark.parametrize("logits", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize(("capped", "one_pass"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("gradient", [True, False])
def test_rows_compile(logits, capped, one_pass, gradient):
    # Several weighted targets, and the single one that most calls have.
    for num_targets in (3, 1):
        constants = {
            **{"WEIGHTED": num_targets > 1, "CAPPED": capped, "ONE_PASS": one_pass},
            **{"GRADIENT": gradient, "APPROXIMATE": True, "TARGETS": 4 if num_targets > 1 else 1},
            "BLOCK": rows._ROW_BLOCK,
            **({"num_targets": 1, "weights_column": 0, "weights_row": 0} if num_targets == 1 else {}),
        }
        compiled = compiling.compile_kernel(rows._row_kernel, constants, TYPES | {"logits": logits}, rows._ROW_WARPS)
        # Registers spilt to memory would be read back for every block of a row.
        assert compiling.spilt_bytes(compiled) == 0


@pytest.mark.parametrize("logits", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize(("capped", "one_pass"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("kept", [13, 0])
def test_rows_with_gradients_in_8_bits_compile(logits, capped, one_pass, kept):
    constants = {
        **{"WEIGHTED": True, "CAPPED": capped, "ONE_PASS": one_pass, "KEPT": kept},
        **{"TARGETS": 4, "VECTOR": fp8_rows._VECTOR},
    }
    types = TYPES | {"logits": logits, "out": "*u8"}
    aligned = ("logits", "out", "columns")
    compiled = compiling.compile_kernel(fp8_rows._fp8_kernel, constants, types, fp8_rows._WARPS, aligned=aligned)
    assert compiling.spilt_bytes(compiled) == 0
    # Two programs share a multiprocessor of Hopper while a row of GPT-2's vocabulary waits in each.
    assert compiled.metadata.shared <= 227 * 1024 // 2
    # Eight logits are read, and eight gradients written, at once.
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v2.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize(("x", "out"), [("*bf16", "*bf16"), ("*fp32", "*fp32"), ("*fp16", "*fp16")])
def test_scaled_rows_compile(x, out):
    block_rows, block_columns = rows._SCALE_BLOCK
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "x_column": 1}
    compiling.compile_kernel(rows._scale_rows_kernel, constants, TYPES | {"x": x, "out": out}, num_warps=4)
