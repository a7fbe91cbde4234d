"""Scores a model by its bits per byte of text, with the standard error over documents.

A loss in nats per token depends on the tokenizer. Divided by the number of bytes it does not, so that models with
different vocabularies can be compared with each other and with file compressors.

`document_sums` sums losses over batches, `score_from_sums` turns the sums into a `Score`. Ranks that score different
batches add up their sums in between.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintic.data.loader import Batch

__all__ = ["Score", "bits_per_byte", "document_groups", "document_sums", "score_from_sums"]

# Most groups of documents that a log keeps: enough for a standard error, and a few kilobytes.
_MOST_GROUPS = 256


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss of a model on some text."""

    loss: float  # nats per token, without special tokens
    bpb: float  # bits per byte
    num_tokens: int
    num_bytes: int
    bpb_stderr: float | None = None  # standard error of `bpb` over documents; None for a single document


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Return total nats over bytes, in bits."""
    return nats / (math.log(2) * num_bytes)


@torch.no_grad()
def document_sums(
    model: Callable[..., Tensor],
    batches: Iterable[Batch],
    token_bytes: npt.NDArray[np.int32],
    device: torch.device,
    *,
    num_documents: int = 0,
) -> Tensor:
    """Return the total nats, bytes and tokens of each document: (D, 3) float64.

    The function does not communicate. Ranks that score different batches of one text pass the same `num_documents`, add
    up their sums, and pass the total to `score_from_sums`.

    Args:
        model: called as `model(inputs, targets, document_starts=..., reduction="none")` for (B, T) losses in nats.
        batches: batches on any device. Without `documents`, all of a batch counts as document 0.
        token_bytes: (vocab_size,) number of bytes of each token; tokens of 0 bytes (document starts) are not scored.
        device: device of the model and of the result.
        num_documents: lower bound of D, which grows with the indices of documents in the batches.
    """
    lengths = torch.as_tensor(token_bytes, dtype=torch.int64, device=device)
    sums = torch.zeros((num_documents, 3), dtype=torch.float64, device=device)
    for batch in batches:
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        documents = torch.zeros(targets.shape, dtype=torch.int64) if batch.documents is None else batch.documents
        # Grow to the largest index of a document.
        missing = int(documents.max()) + 1 - len(sums)
        if missing > 0:
            sums = torch.cat([sums, sums.new_zeros(missing, 3)])
        losses = model(inputs, targets, document_starts=batch.document_starts.to(device), reduction="none")
        target_bytes = lengths[targets]
        counted = target_bytes > 0
        # In float64, so that the sums hardly depend on how the text is divided into batches.
        added = torch.stack([losses.double().where(counted, 0.0), target_bytes.double(), counted.double()], dim=-1)
        sums.index_add_(0, documents.to(device).flatten(), added.flatten(0, 1))
    return sums


def document_groups(sums: Tensor) -> dict[str, list[float]]:
    """Return the nats and bytes of a text's documents, by which two runs can be compared document by document.

    If there are many documents, groups of neighbours are summed. `sums` are as for `score_from_sums`.
    """
    scored = sums[sums[:, 2] > 0].cpu()
    count = min(len(scored), _MOST_GROUPS)
    groups = torch.arange(len(scored)) * count // max(1, len(scored))
    nats, num_bytes, _ = torch.zeros((count, 3), dtype=scored.dtype).index_add_(0, groups, scored).unbind(dim=1)
    return {
        "document_nats": [round(value, 4) for value in nats.tolist()],
        "document_bytes": [int(value) for value in num_bytes.tolist()],
    }


def score_from_sums(sums: Tensor) -> Score:
    """Return the score of a text from the sums of its documents.

    The standard error of R = nats / bytes is that of a ratio of sums over D documents drawn at random:
    sqrt(D / (D - 1) sum (nats_d - R bytes_d)^2) / sum bytes (Cochran, Sampling Techniques, 3rd ed., section 6.3).

    Args:
        sums: (D, 3) from `document_sums`, summed over all ranks; documents without text are ignored.

    Raises:
        ValueError: no document has text.
    """
    # Documents without scored tokens are left out.
    nats_D, bytes_D, tokens_D = sums[sums[:, 2] > 0].cpu().unbind(dim=1)
    nats, num_bytes, num_tokens = (float(column.sum()) for column in (nats_D, bytes_D, tokens_D))
    if num_bytes == 0:
        raise ValueError("nothing to score: the batches hold no text")
    error = None
    if len(nats_D) > 1:
        scatter = float((nats_D - nats / num_bytes * bytes_D).square().sum())
        error = bits_per_byte(math.sqrt(len(nats_D) / (len(nats_D) - 1) * scatter), num_bytes)
    return Score(
        loss=nats / num_tokens,
        bpb=bits_per_byte(nats, num_bytes),
        num_tokens=int(num_tokens),
        num_bytes=int(num_bytes),
        bpb_stderr=error,
    )
