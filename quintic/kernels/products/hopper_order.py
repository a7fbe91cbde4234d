"""Order between the programs of a grid, for the queue of `hopper_program.py`: counters, and copies in flight.

What one program's copy engine has written another's may read once the first has waited for its stores, counted up, and
the second has seen the count. PTX ISA, "Memory consistency model" and "Async proxy".

Import this module only where Triton is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["await_count", "await_stores", "count_up", "let_copies_see"]


@gluon.jit
def _read(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_count(counter, target):
    """Wait until a counter has reached its target."""
    seen = _read(counter)
    while seen < target:
        seen = _read(counter)


@gluon.jit
def count_up(counter):
    """Add one to a counter, after all earlier work of the group of four warps."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.s32 [$1], 1;
            mov.u32 $0, 0;
        }
        """,
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def let_copies_see():
    """Order writes that this thread has seen before the copies that follow."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_stores():
    """Wait until the copies to memory are complete; `tma.store_wait` only waits until they have been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
