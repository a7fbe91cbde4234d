"""Collectives of the optimizer, watched: which of them run when, and what memory they read and write meanwhile.

`logged` notes every collective. `delayed` lets a message arrive as late as it may, which is when somebody waits for it:
until then what is received is garbage. Memory that is freed, or written to, before that, gives wrong numbers on a real
network, if only now and then; here it is noted.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quintic.optim.comms import collectives as comms

__all__ = ["Call", "delayed", "logged"]

# Who calls them is a file of the library, and not PyTorch itself.
_CALLER = "quintic.optim.comms.collectives"


class Call(NamedTuple):
    """One collective."""

    kind: str
    group: str
    """Name of the process group."""
    is_async: bool
    received: Tensor
    sent: Tensor


@contextmanager
def _replaced(replacement: Callable[[Call, Callable[..., Any], Sequence[Any], dict[str, Any]], Any]) -> Iterator[None]:
    """Let `replacement(call, original, args, options)` be called in place of every collective of the library."""

    def replacing(kind: str, original: Callable[..., Any], sent_place: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"] != _CALLER:
                return original(*args, **options)
            group = options.get("group") or dist.group.WORLD
            found = Call(kind, group.group_name, options.get("async_op", False), args[0], args[sent_place])
            return replacement(found, original, args, options)

        return call

    with ExitStack() as stack:
        for kind, sent_place in (("all_reduce", 0), ("broadcast", 0), ("all_to_all_single", 1)):
            stack.enter_context(mock.patch.object(dist, kind, replacing(kind, getattr(dist, kind), sent_place)))
        gather = replacing("all_gather", comms._all_gather, 1)
        stack.enter_context(mock.patch.object(comms, "_all_gather", gather))
        yield


@contextmanager
def logged(note: Callable[[Call], None]) -> Iterator[None]:
    """Let `note` be called before every collective."""

    def noting(call: Call, original: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        note(call)
        return original(*args, **options)

    with _replaced(noting):
        yield


class _Memory:
    """The place of a tensor on the CPU, without keeping its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """Return the tensor; None if its memory was freed."""
        if self._storage.expired():
            return None
        dtype, *view = self._view
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *view)


class _Arriving:
    """A message whose content has arrived here, and is not where it belongs until somebody waits for it."""

    def __init__(self, call: Call, content: Tensor, problems: list[str]) -> None:
        self._title = f"{call.kind} of {call.sent.numel()} entries"
        self._content, self._problems = content, problems
        self._received, self._sent = _Memory(call.received), _Memory(call.sent)
        is_apart = call.received.untyped_storage().data_ptr() != call.sent.untyped_storage().data_ptr()
        self._before = call.sent.clone() if is_apart else None
        if is_apart:
            # Not a part of what is received that was there before, and is right.
            _bytes(call.received).fill_(255)

    def wait(self) -> None:
        sent, received = self._sent.tensor(), self._received.tensor()
        if sent is None or received is None:
            self._problems.append(f"{self._title}: memory freed before it was waited for")
        elif self._before is not None and not torch.equal(_bytes(sent), _bytes(self._before)):
            self._problems.append(f"{self._title}: what is sent was changed before it was waited for")
        if received is not None:
            received.copy_(self._content)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def delayed() -> Iterator[list[str]]:
    """Let every message arrive when it is waited for; yield what was wrong with memory until then. For CPUs.

    What a rank sends is taken when it starts to send, and checked to be still the same when it waits.
    """
    problems: list[str] = []

    def delaying(call: Call, original: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        if not call.is_async:
            return original(*args, **options)
        content = call.received.clone()
        sent = [] if call.received is call.sent else [call.sent.clone()]
        rest = args[1 + len(sent) :]
        original(content, *sent, *rest, **{**options, "async_op": False})
        return _Arriving(call, content, problems)

    with _replaced(delaying):
        yield problems
