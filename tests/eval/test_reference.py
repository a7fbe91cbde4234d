"""Reference scores: of exactly the text that a model is scored on."""

from typing import Any

import pytest

from quintic.data.dataset import Dataset
from quintic.data.loader import validation_rows
from quintic.eval import reference
from quintic.eval.baselines import compression_baselines
from quintic.eval.reference import reference_scores


def test_the_text_is_that_of_the_targets(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = validation_rows(tiny_dataset, rows=3, seq_len=40, max_tokens=600)
    seen: list[Any] = []

    def recorded(val_text: bytes, train_text: Any) -> Any:
        pieces = list(train_text)
        seen.extend((val_text, b"".join(pieces)))
        return compression_baselines(val_text, pieces)

    monkeypatch.setattr(reference, "compression_baselines", recorded)
    scores = reference_scores(tiny_dataset, batches)
    val_text, train_text = seen
    tokenizer, split = tiny_dataset.tokenizer, tiny_dataset.split("train")
    targets = [token for batch in batches for row in batch.targets.tolist() for token in row]
    assert val_text == tokenizer.decode_bytes(targets)
    assert scores["bytes"] == len(val_text) == sum(tokenizer.token_bytes()[targets])
    documents = [tokenizer.decode_bytes(split.document(index).tolist()) for index in range(split.num_documents)]
    assert train_text == b"".join(documents)
    assert len(train_text) == split.num_bytes
    assert scores == compression_baselines(val_text, documents)
    # The text repeats a dozen words: both methods must see that.
    assert 0 < scores["xz_bpb"] < 4
    assert 0 < scores["bigram_bpb"] < 4


def test_only_so_much_training_text_is_read(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_TRAIN_BYTES", 1)
    pieces = list(reference._train_text(tiny_dataset))
    first = tiny_dataset.split("train").document(0).tolist()
    assert pieces == [tiny_dataset.tokenizer.decode_bytes(first)]
