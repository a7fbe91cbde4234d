"""Bits per byte, against a computation by hand in double precision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintic.data.loader import Batch
from quintic.eval.score import Score, bits_per_byte, document_groups, document_sums, score_from_sums

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


def batch(inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Batch:
    starts = torch.tensor([0, inputs.numel()], dtype=torch.int32)
    return Batch(inputs=inputs, targets=targets, document_starts=starts, epoch=0, documents=documents)


def random_batch(rows: int = 6, length: int = 9, num_documents: int = 5) -> Batch:
    tokens = torch.randint(0, len(TOKEN_BYTES), (rows, length + 1))
    return batch(tokens[:, :-1], tokens[:, 1:], torch.randint(num_documents, (rows, length)))


def score(batches: list[Batch]) -> Score:
    return score_from_sums(document_sums(Fake(), batches, TOKEN_BYTES, CPU))


def test_sums_are_those_of_numpy() -> None:
    made = [random_batch(), random_batch(3, 20)]
    result = score(made)
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
    result = score([batch(inputs, targets)])
    assert (result.num_tokens, result.num_bytes) == (1, 7)
    assert result.loss == pytest.approx(0.1 + 1.7 * 4 + 0.02)


def test_the_split_into_batches_does_not_matter() -> None:
    whole = random_batch(12)
    assert whole.documents is not None
    rows = [batch(whole.inputs[i : i + 1], whole.targets[i : i + 1], whole.documents[i : i + 1]) for i in range(12)]
    one, many = (score(made) for made in ([whole], rows))
    assert (one.num_tokens, one.num_bytes) == (many.num_tokens, many.num_bytes)
    assert many.bpb == pytest.approx(one.bpb, rel=1e-12)
    assert many.bpb_stderr == pytest.approx(one.bpb_stderr, rel=1e-12)


def test_sums_of_ranks_add_up_to_the_score_of_all() -> None:
    made = [random_batch() for _ in range(5)]
    parts = [document_sums(Fake(), made[rank::2], TOKEN_BYTES, CPU, num_documents=9) for rank in range(2)]
    assert [part.shape for part in parts] == [(9, 3)] * 2
    both, whole = score_from_sums(parts[0] + parts[1]), score(made)
    assert (both.num_tokens, both.num_bytes) == (whole.num_tokens, whole.num_bytes)
    assert (both.loss, both.bpb, both.bpb_stderr) == pytest.approx((whole.loss, whole.bpb, whole.bpb_stderr))


def test_the_standard_error_is_the_spread_over_documents() -> None:
    # Documents drawn at random from one population: the ratio's own spread over many draws is its standard error.
    generator = np.random.default_rng(0)
    errors, ratios = [], []
    for _ in range(400):
        lengths = generator.integers(5, 60, 50)
        rates = generator.normal(1.0, 0.3, 50)  # each document has a rate of its own: its bytes are not independent
        sums = torch.tensor(np.stack([lengths * rates, lengths, lengths], axis=1))
        result = score_from_sums(sums)
        ratios.append(result.bpb)
        errors.append(result.bpb_stderr)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)


def test_the_standard_error_against_the_formula() -> None:
    made = random_batch()
    assert made.documents is not None
    nats, sizes = np.zeros(5), np.zeros(5)
    rows = zip(made.inputs.flatten(), made.targets.flatten(), made.documents.flatten(), strict=True)
    for token, target, document in ((int(a), int(b), int(c)) for a, b, c in rows):
        if target:
            nats[document] += Fake().loss(token, target)
            sizes[document] += TOKEN_BYTES[target]
    rest = nats - nats.sum() / sizes.sum() * sizes
    expected = math.sqrt(5 / 4 * (rest**2).sum()) / sizes.sum() / math.log(2)
    assert score([made]).bpb_stderr == pytest.approx(expected, rel=1e-6)


def test_one_document_has_no_standard_error() -> None:
    for documents in (None, torch.full((6, 9), 3)):
        made = random_batch()
        assert score([batch(made.inputs, made.targets, documents)]).bpb_stderr is None
    # Documents of which nothing is scored do not count as documents.
    assert score_from_sums(torch.tensor([[0.0, 0, 0], [3, 5, 2], [0, 0, 0]]).double()).bpb_stderr is None


def test_nothing_to_score() -> None:
    only_starts = batch(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]))
    for made in ([], [only_starts]):
        with pytest.raises(ValueError, match="nothing to score: the batches hold no text"):
            score(made)


def test_a_byte_at_a_loss_of_ln_2_costs_one_bit() -> None:
    assert bits_per_byte(math.log(2), 1) == 1.0
    assert bits_per_byte(8 * math.log(2), 4) == 2.0


def test_groups_of_documents_hold_the_sums_of_all() -> None:
    # (documents, nats, bytes and tokens); one without scored tokens is left out.
    sums = torch.tensor([[3.0, 10, 2], [0.0, 0, 0], [1.5, 4, 1]], dtype=torch.float64)
    assert document_groups(sums) == {"document_nats": [3.0, 1.5], "document_bytes": [10, 4]}
    many = torch.rand((1000, 3), dtype=torch.float64).mul(100).ceil()
    groups = document_groups(many)
    assert len(groups["document_nats"]) == len(groups["document_bytes"]) == 256
    assert sum(groups["document_nats"]) == pytest.approx(float(many[:, 0].sum()))
    assert groups["document_bytes"][0] == many[:4, 1].sum()  # neighbours
    assert sum(groups["document_bytes"]) == many[:, 1].sum()
