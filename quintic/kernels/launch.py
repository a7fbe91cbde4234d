"""Launches Triton and Gluon kernels with less work on the host than `kernel[grid](...)`.

For every launch Triton looks up the compiled variant that fits the arguments, which takes 40 to 60 microseconds. A step
of many small matrices is bound by its launches. So this module caches the compiled kernel, under all properties of the
arguments that select a variant, and calls it directly.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.jit import triton

__all__ = ["launch", "variants"]

# (kernel's id, device, variants of the arguments, options) -> (compiled kernel, constants in the signature's order).
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton or Gluon kernel on the device of its first argument, on that device's current stream.

    Args:
        kernel: a function decorated with `triton.jit` or `gluon.jit`.
        grid: number of programs along one to three dimensions.
        args: the kernel's leading arguments, those that are no constants: tensors, tensor descriptors, Python numbers
            or None. The first must be a tensor or a descriptor. The layout of a descriptor must follow from its dtype
            and its block shape, because the cache key contains only these.
        options: the kernel's constants (`tl.constexpr`), and options of the compiler such as `num_warps`, by name.
    """
    first = args[0]
    first = first if isinstance(first, Tensor) else first.base
    if first.is_meta:
        return  # the plan counts the memory that a launch needs, with tensors that have none
    device = first.device
    if device.type != "cuda":  # the interpreter
        kernel[grid](*args, **options)
    elif device.index == torch.cuda.current_device():
        _launch_here(kernel, grid, device.index, args, options)
    else:
        with torch.cuda.device(device):
            _launch_here(kernel, grid, device.index, args, options)


def _launch_here(
    kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    # By id, because hashing a kernel hashes its source code. A kernel that was compiled is never collected, so its id
    # is not given to another one.
    key = (id(kernel), device, *variants(args), *options.items())
    launchable = _compiled.get(key)
    if launchable is None or _is_watched():
        # The first launch of a variant, or a profiler listens: go through Triton.
        _check_descriptors(args)
        compiled = kernel[grid](*args, **options)
        if isinstance(kernel, triton.JITFunction) and torch.version.hip is None:
            names = kernel.arg_names[len(args) :]
            # A constant among `args` would be missing in the key, which has only types and alignment of `args`.
            if len(names) != len(kernel.constexprs):
                raise TypeError(f"{kernel.arg_names}: give the constants, and nothing else, by name")
            _compiled[key] = compiled, tuple(options[name] for name in names)
        return
    compiled, constants = launchable
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    # The signature of Triton's C launcher. The three Nones are the metadata of the launch and the two hooks that would
    # receive it.
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


def _is_watched() -> bool:
    """Return whether a profiler or another tool has hooked into Triton's launches."""
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def variants(args: Iterable[Any]) -> list[Any]:
    """Return a cache key for each argument: two values that Triton would compile differently have different keys."""
    keys: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            # Triton makes a 1 a constant, assumes alignment for multiples of 16, and types an integer as int32, int64
            # or uint64, the first that holds it.
            keys.append(1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        elif kind is float:
            keys.append(float)
        elif isinstance(arg, Tensor):
            keys.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif kind is bool or arg is None:
            keys.append((kind, arg))
        else:
            # A tensor descriptor.
            base = arg.base
            keys.append((base.dtype, base.data_ptr() % 16 == 0, tuple(arg.block_shape)))
    return keys


def _check_descriptors(args: tuple[Any, ...]) -> None:
    """Run the checks of tensor descriptors, which `hopper_tiles.blocks_of` skips, before a kernel is compiled."""
    for arg in args:
        if hasattr(arg, "block_shape"):
            arg.__post_init__()
