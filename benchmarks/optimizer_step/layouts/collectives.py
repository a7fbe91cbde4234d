"""The collectives of a step alone, and a step without them: what a step must take at least.

Optimizers call collectives as attributes of `torch.distributed`. These are replaced for the time of one step: by ones
that note what they are given (`recorded`), to run the same collectives again with nothing computed (`run_alone`); or by
ones that send nothing and fill what would be received with entries of what would be sent (`without_sending`), since
products of zeros are faster than products of numbers. What the filling takes can be measured, too: it is `run_alone`
under `without_sending`.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of one name or the other in different versions of PyTorch.
ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")

NAMES = tuple(
    name
    for name in (
        *(*ALL_GATHER, "all_to_all_single", "reduce_scatter_tensor", "all_reduce", "broadcast"),
        *("all_gather", "all_to_all"),  # of lists of tensors
    )
    if hasattr(dist, name)
)


@dataclass(frozen=True)
class Blank:
    """A tensor of which only this is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """Return one with zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as this rank calls it."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that leave this rank: the fewest with which the collective can be made."""
        group = self.arguments.get("group")
        num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        inputs, _ = _split(self.name, self.arguments)
        size = sum(math.prod(blank.shape) * blank.dtype.itemsize for blank in inputs)
        if self.name == "all_to_all_single":
            splits = self.arguments.get("input_split_sizes")
            return size - (splits[rank] * inputs[0].dtype.itemsize if splits else size // num_ranks)
        if self.name == "all_to_all":
            return size - math.prod(inputs[rank].shape) * inputs[rank].dtype.itemsize
        if self.name == "all_reduce":
            return 2 * size * (num_ranks - 1) // num_ranks
        if self.name == "reduce_scatter_tensor":
            return size * (num_ranks - 1) // num_ranks
        if self.name == "broadcast":
            return size * (num_ranks - 1) if self.arguments.get("src") == dist.get_rank() else 0
        return size * (num_ranks - 1)


def _split(name: str, arguments: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors that a collective sends, and those that it fills."""
    tensors = [value for value in arguments.values() if isinstance(value, (Tensor, Blank, list))]
    tensors = [value for value in tensors if not isinstance(value, list) or _holds_tensors(value)]
    if name in ("all_reduce", "broadcast"):
        return tensors[:1], tensors[:1]
    received, sent = tensors[:2]
    return (sent if isinstance(sent, list) else [sent]), (received if isinstance(received, list) else [received])


def _holds_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], (Tensor, Blank))


def _mapped(kind: type, change: Callable[[Any], Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with all tensors, or blanks, changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, list) and _holds_tensors(value):
            return [change(one) for one in value]
        return change(value) if isinstance(value, kind) else value

    return {name: changed(value) for name, value in arguments.items()}


class Done:
    """A collective that is over."""

    def wait(self) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> "Done":
        """Return a handle to wait for, too."""
        return self


@contextlib.contextmanager
def _replaced(make: Callable[[str, Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace the collectives by what is made of a name and the original."""
    places: list[tuple[Any, str, str]] = [(dist, name, name) for name in NAMES]
    comms = sys.modules.get("quintic.optim.comms.collectives")
    if hasattr(comms, "_all_gather"):  # it chose one when it was imported
        places.append((comms, "_all_gather", next(name for name in ALL_GATHER if name in NAMES)))
    originals = [getattr(module, attribute) for module, attribute, _ in places]
    try:
        for (module, attribute, name), original in zip(places, originals, strict=True):
            setattr(module, attribute, make(name, original))
        yield
    finally:
        for (module, attribute, _), original in zip(places, originals, strict=True):
            setattr(module, attribute, original)


def recorded(step: Callable[[], None]) -> list[Collective]:
    """Make a step and return its collectives in order. All ranks must call it."""
    found: list[Collective] = []

    def make(name: str, original: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def noting(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            blank = _mapped(Tensor, lambda x: Blank(tuple(x.shape), x.dtype, x.device), arguments)
            found.append(Collective(name, blank))
            return original(*args, **kwargs)

        return noting

    with _replaced(make):
        step()
    return found


def run_alone(sent: Sequence[Collective]) -> Callable[[], None]:
    """Return a function that sends in order, all begun before anything is waited for. All ranks must call it."""
    calls = [(one.name, _mapped(Blank, Blank.tensor, one.arguments) | {"async_op": True}) for one in sent]

    def run() -> None:
        works = [getattr(dist, name)(**arguments) for name, arguments in calls]
        for work in works:
            work.wait()

    return run


@contextlib.contextmanager
def without_sending() -> Iterator[None]:
    """Let collectives send nothing while this is entered: this rank calls them alone."""

    def make(name: str, original: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def filling(*args: Any, **kwargs: Any) -> Done:
            arguments = signature.bind(*args, **kwargs).arguments
            sent, received = _split(name, arguments)
            if name == "all_reduce":
                if arguments.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                    sent[0].mul_(dist.get_world_size(arguments.get("group")))
            elif name == "broadcast":
                if arguments.get("src") != dist.get_rank():
                    sent[0].zero_()
            else:
                for number, tensor in enumerate(received):
                    _fill(tensor, sent[number % len(sent)])
            return Done()

        return filling

    with _replaced(make):
        yield


def _fill(received: Tensor, sent: Tensor) -> None:
    target, source = received.view(-1), sent.detach().reshape(-1)
    if not source.numel():
        target.zero_()
        return
    for part in target.split(source.numel()):
        part.copy_(source[: part.numel()])


def reduce_scatter_and_all_gather(numel: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Return a function that averages so many entries over all ranks, each getting a part, and gathers the parts.

    In one piece, by PyTorch's own collectives: what any optimizer must send that averages gradients and divides the
    work. All ranks must call it.
    """
    num_ranks = dist.get_world_size()
    part = torch.zeros(-(-numel // num_ranks), dtype=dtype, device=device)
    whole = torch.zeros(part.numel() * num_ranks, dtype=dtype, device=device)
    gather = getattr(dist, next(name for name in ALL_GATHER if name in NAMES))
    average = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM

    def run() -> None:
        dist.reduce_scatter_tensor(part, whole, op=average)
        gather(whole, part)

    return run
