"""Launches kernels again at little cost to the host.

`kernel[grid](...)` asks Triton every time which of the compiled variants fits, 40 to 60 microseconds, and a step of
many small matrices is launches. Here the answer is kept under what it depends on, and the compiled kernel is called
directly.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quintic.kernels.jit import triton

__all__ = ["launch", "variants"]

# (kernel, device, variants of the arguments, options) -> compiled kernel, its constants in the order of the signature.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton or Gluon kernel on the device of its first argument, on that device's current stream.

    Args:
        kernel: decorated with `triton.jit` or `gluon.jit`.
        grid: programs along one to three dimensions.
        args: of the kernel's first parameters: tensors, descriptors of tensors, Python's numbers, None. The first is a
            tensor or a descriptor; the layout of a descriptor must follow from its dtype and its block.
        options: all other parameters, constants, by name; and options of the compiler, such as `num_warps`.
    """
    first = args[0]
    device = (first if isinstance(first, Tensor) else first.base).device
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
    # Kernels are compared by address: they hash their source. Those that are compiled for are never collected.
    key = (id(kernel), device, *variants(args), *options.items())
    launchable = _compiled.get(key)
    if launchable is None or _is_watched():
        _check_descriptors(args)
        compiled = kernel[grid](*args, **options)
        if isinstance(kernel, triton.JITFunction) and torch.version.hip is None:
            names = kernel.arg_names[len(args) :]
            if len(names) != len(kernel.constexprs):  # one of `args` is a constant, whose value is not in the key
                raise TypeError(f"{kernel.arg_names}: give the constants, and nothing else, by name")
            _compiled[key] = compiled, tuple(options[name] for name in names)
        return
    compiled, constants = launchable
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    # The three Nones: no hooks of Triton's, and no metadata for them.
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


def _is_watched() -> bool:
    """Return whether launches are reported to a hook of Triton's, such as a profiler's."""
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def variants(args: Iterable[Any]) -> list[Any]:
    """Return a key for each argument; keys of two values differ if Triton compiles them differently."""
    keys: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            # A one is a constant, multiples of 16 promise alignment, and large numbers need wider types.
            keys.append(1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        elif kind is float:
            keys.append(float)
        elif isinstance(arg, Tensor):
            keys.append((arg.dtype, arg.data_ptr() % 16 == 0))
        elif kind is bool or arg is None:
            keys.append((kind, arg))
        else:
            base = arg.base
            keys.append((base.dtype, base.data_ptr() % 16 == 0, tuple(arg.block_shape)))
    return keys


def _check_descriptors(args: tuple[Any, ...]) -> None:
    """Check descriptors that were made unchecked (`hopper.blocks_of`), before a kernel is compiled for them."""
    for arg in args:
        if hasattr(arg, "block_shape"):
            arg.__post_init__()
