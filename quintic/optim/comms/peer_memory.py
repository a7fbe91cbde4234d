"""Memory of a GPU that other processes' GPUs of the same host write to.

CUDA's driver does all of it: memory is opened in other processes by its handle (`cuIpcGetMemHandle`), copies between
GPUs run on copy engines, and streams write and wait for flags (`cuStreamBatchMemOp`) with no kernel. Import this module
anywhere; without a GPU nothing of it can be made.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_values, group_ranks, host_name, this_rank
from quintic.optim.comms.lost_ranks import LostRanks, timeout_of

__all__ = ["MOST_MESSAGES", "PeerMemory"]

MOST_MESSAGES = 1024
"""How many messages may be numbered, from 0."""

_FLAG_BYTES = 4

# Flags that each rank sets on each other one: when it comes to the first, or the second, of two meetings, and for every
# message.
_MEETINGS = 2
_FLAGS = _MEETINGS + MOST_MESSAGES


class PeerMemory:
    """Memory on this rank's GPU that all ranks of a process group write to, and a stream that does so.

    All ranks must construct it, and `close` it before another one takes its place.

    Args:
        num_bytes: the same on all ranks.
        group: the process group, of ranks on one host.
        device: of this rank; every rank has one of its own.

    Raises:
        RuntimeError: on all ranks, if any rank cannot reach another one's memory or has too little; the message says
            which and why.
    """

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        ranks = group_ranks(group)
        self.num_bytes, self._group, self._device = num_bytes, group, device
        self._position = ranks.index(this_rank())
        self._driver: Any = None
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._stream = torch.cuda.Stream(device)
        self._here = torch.cuda.Event()
        seconds = timeout_of(group, device)
        self._marks = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        others = [rank for rank in ranks if rank != this_rank()]
        text = (
            f"rank {this_rank()} has waited {seconds:.0f} s, the time-out of its process group, for messages of ranks "
            f"{others}; the process ends, as it would had they been collectives"
        )
        self._lost = LostRanks(self._marks, seconds, text)
        self._bases: list[int] = [0] * len(ranks)
        """Where each rank's memory is in this process."""
        self._flags_start = -(-num_bytes // 16) * 16
        handle, error = b"", ""
        with torch.cuda.device(device):
            try:
                self._driver = _import_driver()
                handle = self._allocate(self._flags_start + _FLAGS * len(ranks) * _FLAG_BYTES)
            except RuntimeError as failure:
                error = str(failure)
            everyone = all_gather_values((host_name(), handle, error), group)
            self._raise_together([found[2] for found in everyone], ranks)
            try:
                self._open([found[:2] for found in everyone])
            except RuntimeError as failure:
                error = str(failure)
            self._raise_together(all_gather_values(error, group), ranks)
        self._others = [position for position in range(len(ranks)) if position != self._position]
        self._waits: dict[int, list[Any]] = {}

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of what is in this rank's memory from a byte on; a view of it."""
        found: Tensor = self._bytes[start : start + numel * dtype.itemsize].view(dtype)
        return found

    def follow(self) -> None:
        """Let the memory's stream wait for all that the current one was given so far."""
        self._here.record(torch.cuda.current_stream(self._index))
        self._stream.wait_event(self._here)

    def join(self) -> None:
        """Let the current stream wait for all that the memory's was given so far."""
        torch.cuda.current_stream(self._index).wait_stream(self._stream)

    def mark_end(self) -> None:
        """Say that the current stream was given all of a step: if it is not over in time, the process ends."""
        stream = torch.cuda.current_stream(self._index).cuda_stream
        address, number = self._marks.data_ptr(), self._lost.expect()
        self._checked(self._driver.cuStreamWriteValue32(stream, address, number & 0x7FFFFFFF, 0))

    def write(self, rank: int, start: int, first: int, num_bytes: int, send: Tensor) -> None:
        """Copy bytes of a contiguous tensor, from its byte `first` on, to byte `start` of a rank's memory.

        Ranks are given by their position in the process group. `send` must not be freed before the copy is over.
        """
        if num_bytes:
            target, source = self._bases[rank] + start, send.data_ptr() + first
            self._checked(self._driver.cuMemcpyDtoDAsync(target, source, num_bytes, self._stream.cuda_stream))

    def tell(self, rank: int, message: int) -> None:
        """Let a rank know that all that was written to it before is there: a message of this number."""
        self._set(rank, _MEETINGS + message)

    def meet(self, which: int) -> None:
        """Let the stream wait until all ranks' streams have come here. All ranks must call it, with 0 and 1 in turn.

        A rank sets the flags of a meeting only after the one before, and so after its peers cleared those of the last
        one of this kind.
        """
        for rank in self._others:
            self._set(rank, which)
        self._wait(self._stream, which)

    def arrival(self, message: int) -> Callable[[], None]:
        """Return what lets the current stream wait until a message is there.

        That is so when all ranks have told of it and this memory's stream has done what it was given so far. It must be
        called before the ranks meet next and send another message of this number.
        """
        event = self._stream.record_event()

        def wait() -> None:
            stream = torch.cuda.current_stream(self._index)
            stream.wait_event(event)
            self._wait(stream, _MEETINGS + message)

        return wait

    def reset(self) -> None:
        """Clear all flags. All ranks must call it."""
        torch.cuda.synchronize(self._device)
        all_gather_values(None, self._group)  # nobody sets any
        self._clear_flags()
        all_gather_values(None, self._group)

    def close(self) -> None:
        """Free the memory once all ranks are here. All ranks must call it; nothing can be done with it then."""
        torch.cuda.synchronize(self._device)
        all_gather_values(None, self._group)  # nobody writes any more
        self._close_others()
        all_gather_values(None, self._group)  # nobody has it open any more
        self._free()

    def __del__(self) -> None:
        """Free the memory where it was not closed; others may have it open, but do nothing with it."""
        if getattr(self, "_driver", None) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)
            self._close_others()
            self._free()

    def _allocate(self, num_bytes: int) -> bytes:
        """Allocate this rank's memory, its flags not set, and return what others open it by."""
        driver = self._driver
        error, address = driver.cuMemAlloc(num_bytes)
        if int(error):
            torch.cuda.empty_cache()
            [address] = self._checked(driver.cuMemAlloc(num_bytes))
        self._bases[self._position] = int(address)
        self._clear_flags()
        self._bytes = torch.as_tensor(_Memory(int(address), num_bytes), device=self._device)
        [handle] = self._checked(driver.cuIpcGetMemHandle(address))
        return bytes(handle.reserved)

    def _open(self, everyone: list[tuple[str, bytes]]) -> None:
        """Open the others' memory."""
        for rank, (host, reserved) in enumerate(everyone):
            if rank == self._position:
                continue
            if host != everyone[self._position][0]:
                raise RuntimeError("another rank is on another host")
            handle = self._driver.CUipcMemHandle()
            handle.reserved = reserved
            lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            [address] = self._checked(self._driver.cuIpcOpenMemHandle(handle, lazily.value))
            self._bases[rank] = int(address)

    def _flag(self, of_rank: int, set_by: int, number: int) -> int:
        """Return where on a rank the flag is that another rank sets."""
        return self._bases[of_rank] + self._flags_start + (number * len(self._bases) + set_by) * _FLAG_BYTES

    def _clear_flags(self) -> None:
        num_bytes = _FLAGS * len(self._bases) * _FLAG_BYTES
        start = self._bases[self._position] + self._flags_start
        self._checked(self._driver.cuMemsetD8(start, 0, num_bytes))
        torch.cuda.synchronize(self._device)

    def _set(self, rank: int, number: int) -> None:
        """Set this rank's flag on another one, when the stream has done what it was given so far."""
        # Whoever sees it sees all that was copied before: the default of `cuStreamWriteValue32`.
        flag = self._flag(rank, self._position, number)
        self._checked(self._driver.cuStreamWriteValue32(self._stream.cuda_stream, flag, 1, 0))

    def _wait(self, stream: torch.cuda.Stream, number: int) -> None:
        """Let a stream wait for all others' flags here, and clear them."""
        if number not in self._waits:
            flags = [self._flag(self._position, rank, number) for rank in self._others]
            self._waits[number] = [self._operation(kind, flag) for kind in ("wait", "clear") for flag in flags]
        waits = self._waits[number]
        self._checked(self._driver.cuStreamBatchMemOp(stream.cuda_stream, len(waits), waits, 0))

    def _operation(self, kind: str, address: int) -> Any:
        """Return what `cuStreamBatchMemOp` is told of a flag: to wait until it is set, or to clear it."""
        driver, found = self._driver, self._driver.CUstreamBatchMemOpParams()
        if kind == "wait":
            operation, value = found.waitValue, 1
            operation.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
            operation.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
        else:
            operation, value = found.writeValue, 0
            operation.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
            operation.flags = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT.value
        operation.address = driver.CUdeviceptr(address)
        operation.value = driver.cuuint32_t(value)
        return found

    def _raise_together(self, errors: list[str], ranks: tuple[int, ...]) -> None:
        for rank, error in zip(ranks, errors, strict=True):
            if error:
                self._close_others()
                self._free()
                raise RuntimeError(
                    f"transport='copy_engines': rank {rank} has no memory that it shares with ranks {list(ranks)}: "
                    f"{error}; they must be processes of one host, each with a GPU that reaches the others' "
                    f"memory (nvidia-smi topo -p2p w), or use transport='collectives'"
                )

    def _close_others(self) -> None:
        for rank, address in enumerate(self._bases):
            if rank != self._position and address:
                self._driver.cuIpcCloseMemHandle(address)
                self._bases[rank] = 0

    def _free(self) -> None:
        address, self._bases[self._position] = self._bases[self._position], 0
        if address:
            self._driver.cuMemFree(address)

    def _checked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a function of the driver returns besides its error.

        Raises:
            RuntimeError: there is one.
        """
        error, *values = result
        if int(error):
            _, text = self._driver.cuGetErrorString(error)
            raise RuntimeError(f"{error.name}: {(text or b'').decode()}")
        return tuple(values)


class _Memory:
    """Bytes at an address, as PyTorch takes them from other libraries."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _import_driver() -> Any:
    """Return CUDA's driver.

    Raises:
        RuntimeError: the package is missing.
    """
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeError(
            "transport='copy_engines' needs the package cuda-bindings, which comes with PyTorch for CUDA: "
            "pip install cuda-bindings, or use transport='collectives'"
        ) from error
