"""What a model scores: bits per byte of validation text.

A loss in nats per token depends on the tokenizer; divided by the bytes those tokens stand for it does not, so models
with different vocabularies can be compared with each other and with a file compressor.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quintic.data.loader import Batch

__all__ = ["Score", "bits_per_byte", "score"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss of a model on some text."""

    loss: float
    """Nats per token, special tokens left out."""
    bpb: float
    """Bits per byte."""
    num_tokens: int
    num_bytes: int


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Return total nats over bytes, in bits."""
    return nats / (math.log(2) * num_bytes)


@torch.no_grad()
def score(
    model: Callable[..., torch.Tensor],
    batches: Iterable[Batch],
    token_bytes: npt.NDArray[np.int32],
    device: torch.device,
) -> Score:
    """Return loss and bits per byte of `model` over `batches`.

    Args:
        model: called as `model(inputs, targets, document_starts=..., reduction="none")` for (B, T) losses in nats.
        batches: on any device.
        token_bytes: (vocab_size,) UTF-8 bytes of each token; tokens of 0 bytes (document starts) do not count.
        device: of the model.

    Raises:
        ValueError: no batch, or none with a token that counts.
    """
    lengths = torch.as_tensor(token_bytes, dtype=torch.int64, device=device)
    nats, num_bytes, num_tokens = 0.0, 0, 0
    for batch in batches:
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        losses = model(inputs, targets, document_starts=batch.document_starts.to(device), reduction="none")
        target_bytes = lengths[targets]
        counted = target_bytes > 0
        # Double precision, one number per batch: the sum does not depend on how many batches there are.
        nats += float((losses.double() * counted).sum())
        num_bytes += int(target_bytes.sum())
        num_tokens += int(counted.sum())
    if num_bytes == 0:
        raise ValueError("nothing to score: the batches hold no text")
    return Score(loss=nats / num_tokens, bpb=bits_per_byte(nats, num_bytes), num_tokens=num_tokens, num_bytes=num_bytes)
