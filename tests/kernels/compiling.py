"""Compiles one Triton kernel for Hopper, on a machine without a GPU."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, constants, types, num_warps=8, num_stages=3):
    """Compile a jitted function.

    Args:
        kernel: what `triton.jit` returned.
        constants: values of its constexpr arguments.
        types: Triton's type names of the others, as in "*fp16"; "i32" for those not named.
        num_warps: as for a launch.
        num_stages: as for a launch.
    """
    names = kernel.arg_names
    assert set(constants) <= set(names)
    signature = {name: types.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": num_stages})
    assert compiled.asm["cubin"]
    return compiled
