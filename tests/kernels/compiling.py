"""Compiles one Triton kernel for Hopper, on a machine without a GPU."""

import contextlib
import io
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from quintic.versions import release

HOPPER = GPUTarget("cuda", 90, 32)

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted in this process"),
    pytest.mark.usefixtures("own_triton_cache"),
]
"""Marks of a file of tests that compile kernels."""


def compile_kernel(kernel, constants, types, num_warps=8, num_stages=3, aligned=(), **options):
    """Compile a jitted function, of Triton or Gluon.

    Args:
        kernel: what `triton.jit` or `gluon.jit` returned.
        constants: values of its constexpr arguments.
        types: Triton's type names of the others, as in "*fp16"; "i32" for those not named.
        num_warps: as for a launch.
        num_stages: as for a launch; Gluon has none.
        aligned: arguments that are multiples of 16; without them, nothing is copied asynchronously in stages, nor
            several entries at once.
        options: other options of the compiler.

    Returns:
        What Triton made, with what the assembler said of it as `log`, which is empty if it was in Triton's cache.
    """
    names = kernel.arg_names
    assert set(constants) <= set(names)
    signature = {name: types.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    options["num_warps"] = num_warps
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    if kernel.is_gluon():
        source = GluonASTSource(kernel, signature, values, attributes)
    else:
        source = ASTSource(kernel, signature, values, attributes)
        options["num_stages"] = num_stages
    with _assembler_log() as log:
        compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    compiled.log = log.getvalue()
    return compiled


def spilt_bytes(compiled):
    """Return the bytes that a thread spills to memory for want of registers; PTX does not tell."""
    if release(triton.__version__) < (3, 5):
        pytest.skip(f"what the assembler says needs Triton 3.5, this is {triton.__version__}")
    [spilt] = re.findall(r"(\d+) bytes spill stores", compiled.log)
    return int(spilt)


@contextlib.contextmanager
def _assembler_log():
    """Collect what the assembler says of the kernels compiled meanwhile; nothing of those from the cache."""
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        yield log
