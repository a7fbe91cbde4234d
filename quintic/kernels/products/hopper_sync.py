"""Synchronisation between the programs of a grid, for the queue of `hopper_program.py`, in inline PTX.

Program B may read with its copy engine what program A has written with its own, if these happen in order:

    A   await_stores      its copies are in memory
    A   count_up          release: publishes the writes before it
    B   await_count       acquire: sees the count, and with it the writes
    B   let_copies_see    orders them before the copies that B starts

See PTX ISA, "Memory consistency model" and "Async proxy". Import this module only where Triton is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["await_count", "await_stores", "count_up", "let_copies_see"]


@gluon.jit
def _read(counter):
    # An acquire load at the scope of the GPU. Not pure: the compiler must not merge or hoist repeated reads.
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_count(counter, target):
    """Wait until a counter in global memory has reached its target."""
    seen = _read(counter)
    while seen < target:
        seen = _read(counter)


@gluon.jit
def count_up(counter):
    """Add one to a counter, as the first thread of a group of four warps; the group must have met at a barrier."""
    # Every thread runs the assembly, the predicate selects one. A release, so that the group's writes are seen first.
    # $0 is a dummy: inline assembly must return a value.
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
    """Order all writes that this thread has seen before the copies that it starts afterwards."""
    # The copy engine works through another proxy to memory, to which an acquire does not apply.
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_stores():
    """Wait until this thread's copies to memory are complete.

    `tma.store_wait` only waits until the copies have read their source in shared memory.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
