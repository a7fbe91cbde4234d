"""Batches: their shape and content, exact resumption, ranks, and the thread behind them."""

import contextlib
import gc
import json
import shutil
import subprocess
import sys
import threading
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import make_text

import quintic.errors
from quintic.data.dataset import Dataset
from quintic.data.loader import Batch, Loader, validation_rows
from quintic.data.preparation import prepare
from quintic.errors import DataError

ROOT = Path(quintic.errors.__file__).parents[1]


def equal(left: Batch, right: Batch) -> bool:
    pairs = ((left.inputs, right.inputs), (left.targets, right.targets))
    pairs += ((left.document_starts, right.document_starts),)
    return left.epoch == right.epoch and all(torch.equal(first, second) for first, second in pairs)


def load(dataset: Dataset, **changes: Any) -> Loader:
    options = {"rows": 3, "seq_len": 32, "buffer_documents": 50, "prefetch": 0} | changes
    return Loader(dataset, options.pop("split", "train"), **options)


def sections_of(batch: Batch) -> list[list[int]]:
    """The documents of a batch, each with its bos and without what only the targets hold."""
    flat = batch.inputs.reshape(-1).tolist()
    starts = batch.document_starts.tolist()
    return [flat[start:end] for start, end in pairwise(starts)]


def test_shapes_and_content(dataset: Dataset) -> None:
    split = dataset.split("train")
    texts = [split.document(index)[1:].tolist() for index in range(split.num_documents)]
    joined = "\n".join(" ".join(map(str, ["", *text, ""])) for text in texts)
    with load(dataset) as loader:
        for batch in islice(loader, 20):
            assert batch.inputs.shape == batch.targets.shape == (3, 32)
            assert batch.inputs.dtype == batch.targets.dtype == torch.int64
            assert batch.document_starts.dtype == torch.int32
            assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
            assert (batch.inputs[:, 0] == dataset.bos_id).all()
            starts = batch.document_starts
            assert (starts[0], starts[-1]) == (0, 3 * 32)
            is_bos = batch.inputs.reshape(-1) == dataset.bos_id
            assert torch.equal(is_bos.nonzero().reshape(-1).int(), starts[:-1])
            for piece in sections_of(batch):
                assert " ".join(map(str, ["", *piece[1:], ""])) in joined


def test_every_text_token_is_served_once_per_epoch(dataset: Dataset) -> None:
    split = dataset.split("train")
    with load(dataset) as loader:
        count = np.zeros(dataset.vocab_size, dtype=np.int64)
        served = 0
        while (batch := next(loader)).epoch == 0:
            tokens = torch.cat([batch.inputs[:, :1], batch.targets], dim=1)
            count += np.bincount(tokens.reshape(-1).numpy(), minlength=dataset.vocab_size)
            served += tokens.numel()
            position = loader.state_dict()["position"]
    stored = np.bincount(
        np.concatenate([split.document(index) for index in range(split.num_documents)]), minlength=dataset.vocab_size
    )
    count[dataset.bos_id] = stored[dataset.bos_id] = 0
    assert (count <= stored).all()
    assert count.sum() > 0.9 * stored.sum()
    assert 0 < position["cropped"] < 0.1 * position["served"]
    assert served > 10_000


def test_a_document_end_is_a_target_only_where_the_document_ends(dataset: Dataset) -> None:
    split = dataset.split("train")
    ends = {tuple(split.document(index)[-4:].tolist()) for index in range(split.num_documents)}
    found = 0
    with load(dataset, seq_len=64) as loader:
        for batch in islice(loader, 300):
            for row, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
                for place, target in enumerate(targets):
                    if target == dataset.bos_id and place >= 3:
                        before = row[place - 3 : place + 1]
                        if dataset.bos_id not in before:
                            found += 1
                            assert tuple(before) in ends
    assert found > 20


@settings(max_examples=25)
@given(
    st.integers(0, 60),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_saved_state_resumes_exactly(
    dataset: Dataset, before: int, world_size: int, prefetch: int, buffer: int, prepared: bool
) -> None:
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size}
        options |= {"prefetch": prefetch, "buffer_documents": buffer}
        with load(dataset, **options) as loader, load(dataset, **options) as other:
            for _ in range(before):
                next(loader)
            if prepared:  # a batch that was not taken does not count
                loader.prepare_next()
            state = json.loads(json.dumps(loader.state_dict()))
            next(other)  # what it did before does not matter
            if prepared:
                other.prepare_next()
            other.load_state_dict(state)
            assert other.state_dict() == state
            for _ in range(4):
                assert equal(next(loader), next(other))
            assert loader.state_dict() == other.state_dict()


def test_epochs_and_seeds_differ(dataset: Dataset) -> None:
    def first(loader: Loader) -> list[int]:
        with loader:
            return next(loader).inputs.reshape(-1).tolist()

    with load(dataset) as loader:
        start = next(loader)
        again = next(batch for batch in loader if batch.epoch == 1)
    assert not torch.equal(start.inputs, again.inputs)
    assert first(load(dataset, seed=1)) != first(load(dataset, seed=2))
    assert first(load(dataset, seed=-1)) == first(load(dataset, seed=-1))
    assert first(load(dataset, rank=0, world_size=2)) != first(load(dataset, rank=1, world_size=2))


def test_a_batch_is_not_one_document(tmp_path: Path) -> None:
    # Pieces of equal length must leave the buffer as they were shuffled.
    source = tmp_path / "text"
    source.mkdir()
    for letter in "abcdefghijklmnop":
        (source / f"{letter}.txt").write_text(letter * 20_000)
    dataset = prepare(str(source), data_dir=tmp_path, vocab_size=257, val_frac=0.01)
    with load(dataset, rows=16, buffer_documents=1000) as loader:
        kinds = [len(set(batch.inputs[:, 1].tolist())) for batch in islice(loader, 20)]
    assert min(kinds) >= 6


@pytest.mark.parametrize(
    ("changes", "name", "saved", "here"),
    [
        ({"seq_len": 16}, "seq_len", 32, 16),
        ({"seed": 7}, "seed", 1337, 7),
        ({"split": "val"}, "split", "train", "val"),
        ({"buffer_documents": 9}, "buffer_documents", 50, 9),
    ],
)
def test_a_state_of_another_setting_is_refused(
    dataset: Dataset, changes: dict[str, Any], name: str, saved: object, here: object
) -> None:
    with load(dataset) as loader, load(dataset, **changes) as other:
        with pytest.raises(DataError, match=f"made with {name} {saved!r}, this run has {here!r}"):
            other.load_state_dict(loader.state_dict())
        next(other)


def test_a_state_of_another_dataset_is_refused(dataset: Dataset) -> None:
    with (
        load(dataset) as loader,
        pytest.raises(DataError, match=f"made with dataset 'another', this run has '{dataset.key}'"),
    ):
        loader.load_state_dict(loader.state_dict() | {"dataset": "another"})


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 40), st.sampled_from([0, 2]))
def test_ranks_deal_out_the_rows_of_one_stream(
    dataset: Dataset, world_size: int, rows: int, other_size: int, before: int, prefetch: int
) -> None:
    """However many ranks, the same rows in the same order; a position saved by some is that of any others."""
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(load(dataset, rows=1))
        ranks = [
            stack.enter_context(load(dataset, rows=rows, rank=rank, world_size=world_size, prefetch=prefetch))
            for rank in range(world_size)
        ]
        for _ in range(before):
            batches = [next(rank) for rank in ranks]
            expected = [next(whole) for _ in range(world_size * rows)]
            assert torch.equal(torch.cat([b.inputs for b in batches]), torch.cat([b.inputs for b in expected]))
            assert torch.equal(torch.cat([b.targets for b in batches]), torch.cat([b.targets for b in expected]))
            assert {batch.epoch for batch in batches} == {expected[0].epoch}
        states = [rank.state_dict() for rank in ranks]
        assert all(state == whole.state_dict() for state in states)
        others = [
            stack.enter_context(load(dataset, rows=rows, rank=rank, world_size=other_size))
            for rank in range(other_size)
        ]
        for other in others:
            other.load_state_dict(states[0])
        found = torch.cat([next(other).inputs for other in others])
        assert torch.equal(found, torch.cat([next(whole).inputs for _ in range(other_size * rows)]))


def test_a_damaged_state_is_refused(dataset: Dataset) -> None:
    with load(dataset) as loader:
        next(loader)
        good = loader.state_dict()
        position = good["position"]
        for bad, message in [
            ({}, "made with version None, this run has 2"),
            ({**good, "position": None}, "position is damaged"),
            ({**good, "position": {}}, "damaged or belongs to other text .KeyError"),
            ({**good, "position": position | {"waiting": ["x"]}}, "damaged or belongs to other text .TypeError"),
            *(
                ({**good, "position": position | change}, f"damaged or belongs to other text .ValueError: {reason}")
                for change, reason in (
                    ({"epoch": -1}, "a number is out of range"),
                    ({"epoch": 2**64}, "a number is out of range"),
                    ({"next_place": -5}, "a number is out of range"),
                    ({"waiting": [-1]}, "a number is out of range"),
                    ({"served": -(10**6)}, "a number is out of range"),
                    ({"cropped": -1}, "a number is out of range"),
                    ({"next_place": 10**9}, "it lies beyond the end of the text"),
                    ({"waiting": [10**9]}, "it lies beyond the end of the text"),
                )
            ),
        ]:
            with pytest.raises(DataError, match=message):
                loader.load_state_dict(bad)


def test_the_number_of_rows_may_change_on_resuming(dataset: Dataset) -> None:
    with load(dataset, rows=2) as loader, load(dataset, rows=4) as other:
        next(loader)
        other.load_state_dict(loader.state_dict())
        two = torch.cat([next(loader).inputs, next(loader).inputs])
        assert torch.equal(next(other).inputs, two)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_too_little_text_for_a_batch(dataset: Dataset, prefetch: int) -> None:
    expected = r"too little text for one batch: the train split has [\d,]+ tokens, 5000 rows of 101 need about 505,000"
    with pytest.raises(DataError, match=expected + "; lower --seq-len or --rows, or give more text"):
        load(dataset, rows=5000, seq_len=100, prefetch=prefetch)
    with pytest.raises(DataError, match=r"rows of 101 on 4 ranks need about"):
        load(dataset, rows=1000, seq_len=100, world_size=4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_id_outside_of_the_vocabulary_is_named(dataset: Dataset, tmp_path: Path, prefetch: int) -> None:
    folder = Path(shutil.copytree(dataset.path, tmp_path / "copy"))
    for path in folder.glob("*.bin"):
        np.full(path.stat().st_size // 2, dataset.vocab_size, dtype="<u2").tofile(path)
    changed = Dataset.open(folder)
    expected = r"copy: token id 400 is outside of the vocabulary of 400; .* with: quintic prepare .* --verify$"
    with load(changed, prefetch=prefetch) as loader, pytest.raises(DataError, match=expected):
        next(loader)
    with pytest.raises(DataError, match=expected):
        list(validation_rows(changed, rows=2, seq_len=32))


def test_a_source_that_fills_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("too few words")
    (tmp_path / "large.txt").write_text(make_text(1, 50_000))
    (tmp_path / "held.txt").write_text(make_text(2, 1000))
    spec = f"{tmp_path}/small.txt=1 {tmp_path}/large.txt=1"
    dataset = prepare(spec, data_dir=tmp_path, vocab_size=300, val_data=str(tmp_path / "held.txt"), max_bytes=10**6)
    with pytest.raises(DataError, match=f"too little text: {tmp_path}/small.txt does not fill one row of 101 tokens"):
        load(dataset, rows=1, seq_len=100)


def prefetching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("quintic-prefetch")}


def test_the_thread_ends_with_the_loader(dataset: Dataset) -> None:
    before = prefetching()
    loader = load(dataset, prefetch=1)
    assert prefetching() == before  # not before the first batch
    next(loader)
    assert len(prefetching() - before) == 1
    loader.close()
    loader.close()
    assert prefetching() == before
    forgotten = load(dataset, prefetch=1)
    next(forgotten)
    (thread,) = prefetching() - before
    del forgotten
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_process_ends_without_closing(dataset: Dataset) -> None:
    code = f"""
from quintic.data.loader import Loader
from quintic.data.dataset import Dataset
loader = Loader(Dataset.open({str(dataset.path)!r}), "train", rows=3, seq_len=32)
next(loader)
print("end")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert (run.stdout, run.stderr) == ("end\n", "")


def test_validation_batches_are_fixed(dataset: Dataset) -> None:
    whole, again = (list(validation_rows(dataset, rows=2, seq_len=32)) for _ in range(2))
    assert sum(batch.inputs.numel() for batch in whole) > 0.9 * dataset.split("val").num_tokens
    assert all(equal(*pair) for pair in zip(whole, again, strict=True))
    first = dataset.split("val").document(0).tolist()  # in stored order
    assert whole[0].inputs.flatten().tolist()[: len(first)][:32] == first[:32]


def test_validation_batches_name_the_document_of_each_input(dataset: Dataset) -> None:
    split = dataset.split("val")
    seen: dict[int, list[int]] = {}
    for batch in validation_rows(dataset, rows=2, seq_len=32):
        assert batch.documents is not None
        assert batch.documents.shape == batch.inputs.shape
        for tokens, numbers in zip(batch.inputs.tolist(), batch.documents.tolist(), strict=True):
            for token, number in zip(tokens, numbers, strict=True):
                seen.setdefault(number, []).append(token)
    assert max(seen) < split.num_documents
    assert len(seen) > 2
    for number, tokens in seen.items():
        own = set(split.document(number).tolist())
        assert set(tokens) <= own
    with load(dataset) as loader:
        assert next(loader).documents is None  # training has no use for them


def test_validation_is_limited(dataset: Dataset) -> None:
    whole = list(validation_rows(dataset, rows=2, seq_len=32))
    for max_tokens, expected in ((1, 1), (64, 1), (200, 3), (10**9, len(whole))):
        batches = list(validation_rows(dataset, rows=2, seq_len=32, max_tokens=max_tokens))
        assert len(batches) == expected
        assert all(equal(*pair) for pair in zip(batches, whole, strict=False))


def test_too_little_validation_text(dataset: Dataset) -> None:
    with pytest.raises(
        DataError,
        match=r"too little text for one batch: the val split has .* or raise --val-frac",
    ):
        list(validation_rows(dataset, rows=1000, seq_len=1000))


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu(dataset: Dataset) -> None:
    with load(dataset, prefetch=2) as plain, load(dataset, prefetch=2, device="cuda") as loader:
        for _ in range(50):
            expected, batch = next(plain), next(loader)
            assert batch.inputs.device.type == batch.targets.device.type == "cuda"
            assert batch.document_starts.device.type == "cpu"
            assert torch.equal(batch.inputs.cpu(), expected.inputs)
            assert torch.equal(batch.targets.cpu(), expected.targets)
