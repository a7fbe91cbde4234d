"""Bits per byte, against a computation by hand in double precision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintic.data.dataset import Dataset
from quintic.data.loader import Batch, validation_rows
from quintic.eval.score import bits_per_byte, score

CPU = torch.device("cpu")
TOKEN_BYTES = np.array([0, 1, 2, 3, 7], dtype=np.int32)  # token 0 starts a document


class Fake:
    """A model whose loss of a target depends on target and input in a known way."""

    def __call__(self, inputs: Tensor, targets: Tensor, *, document_starts: Tensor, reduction: str) -> Tensor:
        assert reduction == "none"
        assert document_starts.dtype == torch.int32
        return self.loss(inputs, targets).float()

    def loss(self, inputs: Any, targets: Any) -> Any:
        return 0.1 + 1.7 * targets + 0.01 * inputs


def batch(inputs: Tensor, targets: Tensor) -> Batch:
    starts = torch.tensor([0, inputs.numel()], dtype=torch.int32)
    return Batch(inputs=inputs, targets=targets, document_starts=starts, epoch=0)


def random_batch(rows: int = 6, length: int = 9) -> Batch:
    tokens = torch.randint(0, len(TOKEN_BYTES), (rows, length + 1))
    return batch(tokens[:, :-1], tokens[:, 1:])


def test_against_numpy() -> None:
    made = [random_batch(), random_batch(3, 20)]
    result = score(Fake(), made, TOKEN_BYTES, CPU)
    inputs = np.concatenate([b.inputs.numpy().ravel() for b in made]).astype(np.float64)
    targets = np.concatenate([b.targets.numpy().ravel() for b in made])
    counted = targets != 0
    nats = Fake().loss(inputs, targets)[counted].sum()
    num_bytes = TOKEN_BYTES[targets].sum()
    assert result.num_tokens == counted.sum()
    assert result.num_bytes == num_bytes
    assert result.loss == pytest.approx(nats / counted.sum(), rel=1e-7)
    assert result.bpb == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-7)


def test_document_starts_do_not_count_as_targets() -> None:
    inputs, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4, 0]])
    result = score(Fake(), [batch(inputs, targets)], TOKEN_BYTES, CPU)
    assert (result.num_tokens, result.num_bytes) == (1, 7)
    assert result.loss == pytest.approx(0.1 + 1.7 * 4 + 0.02)


def test_the_split_into_batches_does_not_matter() -> None:
    whole = random_batch(12)
    rows = [batch(whole.inputs[i : i + 1], whole.targets[i : i + 1]) for i in range(12)]
    one, many = (score(Fake(), made, TOKEN_BYTES, CPU) for made in ([whole], rows))
    assert (one.num_tokens, one.num_bytes) == (many.num_tokens, many.num_bytes)
    assert many.bpb == pytest.approx(one.bpb, rel=1e-12)


def test_nothing_to_score() -> None:
    only_starts = batch(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]))
    for made in ([], [only_starts]):
        with pytest.raises(ValueError, match="nothing to score: the batches hold no text"):
            score(Fake(), made, TOKEN_BYTES, CPU)


def test_a_byte_at_a_loss_of_ln_2_costs_one_bit() -> None:
    assert bits_per_byte(math.log(2), 1) == 1.0
    assert bits_per_byte(8 * math.log(2), 4) == 2.0


def test_a_model_that_knows_nothing_needs_the_bits_of_a_uniform_token(tiny_dataset: Dataset) -> None:
    batches = validation_rows(tiny_dataset, rows=4, seq_len=32)
    uniform = math.log(tiny_dataset.vocab_size)

    def model(inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return torch.full(targets.shape, uniform)

    result = score(model, batches, tiny_dataset.tokenizer.token_bytes(), CPU)
    text = b"".join(tiny_dataset.tokenizer.decode_bytes(b.targets.reshape(-1).tolist()) for b in batches)
    assert result.num_bytes == len(text)
    assert result.bpb == pytest.approx(result.num_tokens * math.log2(tiny_dataset.vocab_size) / len(text), rel=1e-6)
