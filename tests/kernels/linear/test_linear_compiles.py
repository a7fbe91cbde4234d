"""The kernels of mlp.py and fp8.py compile for Hopper, on a machine without a GPU."""

import pytest

pytest.importorskip("triton")

import compiling

from quintic.kernels.linear import fp8_quantize, relu2

pytestmark = compiling.MARKS

SCALARS = {"scale": "*fp32"}
SCALES = ("a_scale", "b_scale", "words_scale")
# The left operand, and what is written: the right one is e4m3.
FLOATS = {"forward in 8 bits": "e4m3", "backward in 8 bits": "e5m2"}
STRIDES = dict.fromkeys(("a_column", "b_column"), 1)


@pytest.mark.parametrize("result", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["forward", "backward", *FLOATS])
@pytest.mark.parametrize("tiling", ["_LARGE", "_SMALL", "_POINTERS"])
def test_products_compile(result, kind, tiling):
    compiled = compile_product(getattr(relu2, tiling), tiling != "_POINTERS", result, kind)
    # What a multiprocessor of Hopper has, and what other GPUs have.
    assert compiled.metadata.shared <= (101_376 if tiling == "_POINTERS" else 232_448)
    assert "wgmma" in compiled.asm["ptx"]
    assert tiling == "_POINTERS" or compiling.spilt_bytes(compiled) == 0
    for name, operand in FLOATS.items():
        product = f"wgmma.mma_async.sync.aligned.m64n256k32.f32.{operand}.e4m3"
        assert (product in compiled.asm["ptx"]) == (kind == name and tiling == "_LARGE")
        assert (f"cvt.rn.satfinite.{operand}x2.f32" in compiled.asm["ptx"]) == (kind == name)


def compile_product(tiling, descriptors, result, kind):
    """Backward in 16 bits, the second operand is stored the other way round, as it is in launches."""
    backward, fp8 = "backward" in kind, FLOATS.get(kind)
    transposed = kind == "backward"
    right = "fp8e4nv" if fp8 else result
    left = "fp8e5" if fp8 == "e5m2" else right
    block_m, block_n, block_k = tiling.block_m, tiling.block_n, tiling.inner_bytes // (1 if fp8 else 2)
    blocks = {
        "a": (left, [block_m, block_k]),
        "b": (right, [block_k, block_n] if transposed else [block_n, block_k]),
        "activation": (result, [block_m, block_n // 2]),
        "words": ("i16", [block_m, block_n // 4]) if fp8 else (result, [block_m, block_n // 2]),
        "out": (result, [block_m, block_n // 2]),
    }
    types = dict.fromkeys(SCALES, "*fp32")
    for name, (dtype, block) in blocks.items():
        types[name] = f"tensordesc<{dtype}{block}>".replace(" ", "") if descriptors else f"*{dtype}"
    flags = {"BACKWARD": backward, "TRANSPOSED": transposed, "DESCRIPTORS": descriptors, "WIDE": False}
    flags |= {"FP8": fp8, "LARGEST": 448.0, "NATIVE": True}
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": tiling.group}
    constants = {**flags, **sizes, **STRIDES, **({} if fp8 else dict.fromkeys(SCALES))}
    aligned = [] if descriptors else ["a", "b", "activation", "words", "out", "a_row", "b_row"]
    return compiling.compile_kernel(
        relu2._linear_kernel, constants, types, tiling.num_warps, tiling.num_stages, aligned
    )


@pytest.mark.parametrize("source", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.parametrize("made", ["*fp8e4nv", "*fp8e5"])
@pytest.mark.parametrize(("both", "block"), [(True, "_BOTH_BLOCK"), (False, "_ROWS_BLOCK")])
def test_quantising_compiles(source, made, both, block):
    block_rows, block_columns = getattr(fp8_quantize, block)
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns, "x_column": 1}
    constants = {"LARGEST": 448.0, "ROWS": True, "COLUMNS": both, "WIDE": not both}
    types = SCALARS | {"x": source, "by_rows": made, "by_columns": made}
    compiled = compiling.compile_kernel(fp8_quantize._quantize_kernel, constants | sizes | {"NATIVE": True}, types)
    # A tile of 128 x 128 wrote a kilobyte a thread, and took 15 times as long as its bytes.
    assert compiling.spilt_bytes(compiled) == 0
    assert "e5m2x2.f32" in compiled.asm["ptx"] if made == "*fp8e5" else "e4m3x2.f32" in compiled.asm["ptx"]
