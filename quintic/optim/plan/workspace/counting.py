"""Counts the bytes that code on tensors allocates, by running it on the meta device, where tensors have no memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Footprint", "count_bytes"]

# The getters of these properties, as modes see them.
_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class Footprint(NamedTuple):
    """Bytes that a computation allocates, its operands not counted."""

    peak: int
    """The most at one time."""
    kept: int
    """The bytes that its result keeps alive afterwards."""


def count_bytes(run: Callable[[], object], operands: Iterable[Tensor], device_type: str) -> Footprint:
    """Return the bytes that `run` allocates on a device of a type, which this machine need not have.

    Work memory of the libraries that PyTorch calls is not counted.

    Args:
        run: computes something from the operands; new tensors that it returns are kept.
        operands: tensors on the meta device.
        device_type: as the tensors report it to the code, which may do something else on other devices.
    """
    with torch.no_grad(), _Reporting(torch.device(device_type)), _Counting(operands, device_type) as counting:
        result = run()
        kept = counting.live_bytes()
    del result
    return Footprint(counting.peak, kept)


class _Reporting(TorchFunctionMode):
    """Makes tensors on the meta device report another device, and new tensors on that device meta tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _DEVICE:
            return self._device
        if func == _IS_CUDA:
            return self._device.type == "cuda"
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = "meta"
        return func(*args, **options)


class _Counting(TorchDispatchMode):
    """Adds up the storages of new tensors, for as long as they live."""

    def __init__(self, operands: Iterable[Tensor], device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._is_cpu = device_type == "cpu"
        self._operands = {operand.untyped_storage()._cdata for operand in operands}
        # Address of a storage -> a weak reference to it, and its size.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports the compiler, which takes a second

    def live_bytes(self) -> int:
        """Return the bytes of the storages that live."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        results = func(*args, **options)
        widened = self._widened_bytes(func, args, options)
        is_known = not widened
        for result in results if isinstance(results, list | tuple) else (results,):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                key, known = storage._cdata, self._storages.get(storage._cdata)
                if key not in self._operands and (known is None or known[0].expired()):
                    self._storages[key] = StorageWeakRef(storage), storage.nbytes()
                    is_known = False
        # Most operations make views, or write to existing tensors.
        if not is_known:
            self.peak = max(self.peak, self.live_bytes() + widened)
        return results

    def _widened_bytes(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> int:
        """Return the bytes of copies that CPUs make of operands and results in another dtype; GPUs make none."""
        if not self._is_cpu or func._schema.name in ("aten::copy_", "aten::_to_copy"):
            return 0
        operands = (*args, options.get("out"))
        tensors = [one for one in operands if isinstance(one, Tensor) and one.is_floating_point()]
        dtypes = {tensor.dtype for tensor in tensors} | ({options["dtype"]} if options.get("dtype") else set())
        if len(dtypes) < 2:
            return 0
        width = max(dtype.itemsize for dtype in dtypes)
        return sum(tensor.numel() * width for tensor in tensors if tensor.itemsize < width)
