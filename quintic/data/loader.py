"""`Loader` makes batches for training: documents of a split, packed into rows, as tensors.

Chunks. A document of more than `row_tokens = seq_len + 1` tokens is served as chunks of at most `row_tokens`, each with
a bos at its beginning. So every row begins with a bos, and hardly any text is lost. The price is that the later chunks
look like the beginnings of documents. But a model only learns to predict real ends of documents: all chunks of a
document except the last fill a row exactly, so that none of them is followed by a bos within a row.

Order. Each epoch is a permutation of all chunks, drawn from the seed and the epoch. Chunks are permuted and not
documents, because otherwise the rows of one long document would be in one batch. They are packed into rows by best fit;
chunks that do not fill a row at the end of an epoch are dropped.

Ranks. All ranks pack the same rows, and each reads the tokens of its own rows only: of every w * B rows, rank r of w
has rows r * B to (r + 1) * B. So the text of a step does not depend on the number of ranks, and a saved position can be
resumed by any number of ranks.

Read next: `quintic.data.rows`, which makes chunks, order and rows.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintic.data.dataset import Dataset
from quintic.data.rows import MixedRows, Position
from quintic.data.source import SplitName
from quintic.errors import DataError

__all__ = ["Batch", "Loader", "Prefetcher", "batch_of", "numbered", "validation_rows"]

Result = TypeVar("Result")

_STATE_VERSION = 2
# Number of chunks in the buffer for validation.
_VALIDATION_BUFFER = 1000
# Padded batches have room for one document per this many tokens, and for 16 at least.
_TOKENS_PER_DOCUMENT, _FEWEST_STARTS = 256, 16


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens of packed documents, or one flat row (`quintic.speedrun.stream`)."""

    inputs: Tensor  # (B, T) int64, each row beginning with bos; (T,) for a flat row
    targets: Tensor  # the token after each input, same shape
    # (num_docs + 1,) int32: index in the flattened inputs of each document's first token; the last entry is the number
    # of inputs, which `padded` repeats. No document crosses the end of a row.
    document_starts: Tensor
    epoch: int = 0  # the epoch, from 0, of the first row of all ranks
    documents: Tensor | None = None  # (B, T) int64 on the CPU: index of each input's document, for scoring

    def pinned(self, device: torch.device, *, starts: bool = False) -> "Batch":
        """Return the batch with inputs and targets (and `document_starts`, with `starts`) in pinned memory.

        For other than CUDA devices the batch is returned as it is.
        """
        if device.type != "cuda":
            return self
        # In a new thread the current device is device 0; pinning memory would open a CUDA context on it.
        with torch.cuda.device(device):
            return self._with(Tensor.pin_memory, starts)

    def padded(self) -> "Batch":
        """Return the batch with document starts padded to a number that rarely changes, for compiled or captured code.

        The padding repeats the number of inputs: documents of no tokens.
        """
        starts, tokens = self.document_starts.numpy(), self.inputs.numel()
        room = max(_FEWEST_STARTS, tokens // _TOKENS_PER_DOCUMENT)
        while room < len(starts):
            room *= 2
        starts = np.pad(starts, (0, room - len(starts)), constant_values=tokens)
        return replace(self, document_starts=torch.from_numpy(starts))

    def to(self, device: torch.device, *, starts: bool = False) -> "Batch":
        """Return the batch with the same tensors on a device; copies from pinned memory are not waited for."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True), starts)

    def _with(self, change: Callable[[Tensor], Tensor], starts: bool) -> "Batch":
        places = change(self.document_starts) if starts else self.document_starts
        return replace(self, inputs=change(self.inputs), targets=change(self.targets), document_starts=places)


def batch_of(
    tokens: npt.NDArray[np.int64], bos_id: int, *, documents: npt.NDArray[np.int64] | None = None, epoch: int = 0
) -> Batch:
    """Return rows of tokens as a batch: of each row, all tokens but the last are inputs, all but the first targets.

    `tokens` are (B, T + 1) int64, and so are `documents`, the index of each token's document.

    numpy is used because it works in the calling thread, while PyTorch would start threads that compete with training.
    """
    inputs = np.ascontiguousarray(tokens[:, :-1])
    starts = np.append(np.flatnonzero(inputs == bos_id), inputs.size)
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])),
        document_starts=torch.from_numpy(starts.astype(np.int32)),
        epoch=epoch,
        documents=None if documents is None else torch.from_numpy(np.ascontiguousarray(documents[:, :-1])),
    )


def numbered(device: torch.device | str) -> torch.device:
    """Return a device with its index; "cuda" becomes this thread's current device."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


class Prefetcher(Generic[Result]):
    """Calls a function ahead of time; `get` returns the results one by one, or raises the function's exception."""

    def __init__(self, produce: Callable[[], Result], depth: int) -> None:
        """Start the thread, which produces `depth` results ahead; it ends with `close`, or with this object.

        `produce` must not hold a reference to the owner of this object, because then neither would ever be collected.
        """
        self._produce = produce
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quintic-prefetch")
        self._results = deque(self._thread.submit(produce) for _ in range(depth))

    def get(self) -> Result:
        """Return the next result; waits for it.

        Raises:
            BaseException: the function's exception, in its place in the order, and again on every later call.
        """
        result = self._results[0].result()
        self._results.popleft()
        self._results.append(self._thread.submit(self._produce))
        return result

    def close(self) -> None:
        """Stop the thread and wait for its end; results that were not taken are lost. May be called twice."""
        self._thread.shutdown(cancel_futures=True)


class Loader(Iterator[Batch]):
    """An endless iterator over the batches of one rank, made ahead in a background thread, with a resumable state.

    Use it in a `with` block, or call `close`; the thread also ends if the loader is collected. Whoever calls
    `prepare_next` while the device is busy finds the next batch on it.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: SplitName,
        *,
        rows: int,
        seq_len: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 1337,
        buffer_documents: int = 1000,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        """Check that there is text for a batch; the thread starts with the first batch.

        Args:
            dataset: the prepared text.
            split: `train` or `val`.
            rows: B, number of rows per batch of this rank.
            seq_len: T, number of inputs per row.
            rank: index of this process among the processes that divide the rows.
            world_size: number of these processes.
            seed: seed of the permutations.
            buffer_documents: number of chunks from which a row is filled; more chunks mean less cropping and a longer
                state.
            prefetch: number of batches made ahead; 0 makes each when it is needed, without a thread.
            device: device of inputs and targets; copies to a CUDA device go through pinned memory without waiting.

        Raises:
            DataError: the split has too little text for one batch on every rank.
        """
        self._stream = MixedRows(dataset, split, seq_len + 1, seed=seed, buffer_documents=buffer_documents)
        if sum(self._stream.num_tokens.values()) < rows * (seq_len + 1) * world_size:
            raise _too_little_text(split, self._stream, rows, seq_len, world_size)
        self._depth = prefetch
        self._device = numbered(device)
        self._identity = {
            "version": _STATE_VERSION,
            "dataset": dataset.key,
            "split": split,
            "seq_len": seq_len,
            "seed": seed,
            "shuffle": True,
            "buffer_documents": buffer_documents,
        }
        self._positions = self._stream.positions()
        # The thread holds no reference to this object, so that the loader can be collected, which ends the thread.
        self._make = functools.partial(
            _next_batch, self._stream, dataset.bos_id, self._device, rows=rows, rank=rank, world_size=world_size
        )
        self._prefetcher: Prefetcher[tuple[Batch, list[Position]]] | None = None
        self._next: tuple[Batch, list[Position]] | None = None

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            DataError: the text has an id outside of the vocabulary.
        """
        self.prepare_next()
        assert self._next is not None
        (batch, self._positions), self._next = self._next, None
        return batch

    def prepare_next(self) -> None:
        """Send the next batch to the device, and wake the thread to make another.

        The thread then keeps Python from the caller for a few milliseconds, which cost nothing while the device works.

        Raises:
            DataError: the text has an id outside of the vocabulary.
        """
        if self._next is not None:
            return
        if self._depth and self._prefetcher is None:
            self._prefetcher = Prefetcher(self._make, self._depth)
        batch, positions = self._prefetcher.get() if self._prefetcher is not None else self._make()
        self._next = batch.to(self._device), positions

    @property
    def epochs(self) -> dict[str, float]:
        """Number of times that each source was read: source -> tokens served or dropped / its number of tokens."""
        return {
            source: (position["served"] + position["cropped"]) / tokens
            for (source, tokens), position in zip(self._stream.num_tokens.items(), self._positions, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as JSON values; batches made ahead do not count."""
        if len(self._positions) == 1:
            return {**self._identity, "position": self._positions[0]}
        return {**self._identity, "positions": self._positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next batch begins with the rows that followed it.

        The number of rows per batch and the number of ranks may differ from the saved ones; all other settings that
        decide the order of the text must be the same.

        Raises:
            DataError: the state is damaged, or was saved with another dataset or setting, which the message names.
        """
        for name, value in self._identity.items():
            before = state.get(name)
            if before != value:
                raise DataError(
                    f"the saved data state was made with {name} {before!r}, this run has {value!r}; resume with the "
                    f"{name} of the saved run, or start a new one"
                )
        saved = state.get("positions", [state.get("position")])
        # The thread must not read the stream while it is restored.
        self.close()
        self._stream.restore(saved)
        self._positions = saved

    def close(self) -> None:
        """Stop the thread; batches made ahead are lost, so go on only after `load_state_dict`. May be called twice."""
        self._next = None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def validation_rows(dataset: Dataset, *, rows: int, seq_len: int, max_tokens: int | None = None) -> Iterator[Batch]:
    """Yield the batches of one pass over the validation split, in stored order, packed as for training, on the CPU.

    An incomplete batch at the end is left out. `max_tokens` limits the number of inputs, rounded down to whole batches
    but to one at least.

    Raises:
        DataError: there is too little text for one batch, or it has an id outside of the vocabulary.
    """
    wanted = None if max_tokens is None else max(1, max_tokens // (rows * seq_len))
    stream = MixedRows(dataset, "val", seq_len + 1, seed=None, buffer_documents=_VALIDATION_BUFFER)
    count = 0
    while (wanted is None or count < wanted) and (packed := stream.next_rows(rows)) is not None:
        tokens, documents, epoch = packed
        yield batch_of(tokens, dataset.bos_id, documents=documents, epoch=epoch)
        count += 1
    if not count:
        raise _too_little_text("val", stream, rows, seq_len, 1)


def _next_batch(
    stream: MixedRows, bos_id: int, device: torch.device, *, rows: int, rank: int, world_size: int
) -> tuple[Batch, list[Position]]:
    packed = stream.next_rows(rows, rank=rank, world_size=world_size)
    assert packed is not None  # shuffled rows do not end
    tokens, _, epoch = packed
    return batch_of(tokens, bos_id, epoch=epoch).pinned(device), stream.positions()


def _too_little_text(split: str, stream: MixedRows, rows: int, seq_len: int, world_size: int) -> DataError:
    tokens = sum(stream.num_tokens.values())
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    advice = "raise --val-frac or give more text" if split == "val" else "give more text"
    return DataError(
        f"too little text for one batch: the {split} split has {tokens:,} tokens, {rows} rows of {seq_len + 1}{ranks} "
        f"need about {rows * (seq_len + 1) * world_size:,}; lower --seq-len or --rows, or {advice}"
    )
