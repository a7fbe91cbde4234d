"""Several sources with weights, and validation text of one's own: shares, epochs, resuming, and layouts of ranks."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from text_samples import act_after, data_error_of, make_text

from quintic.data import preparation
from quintic.data.dataset import Dataset
from quintic.data.loader import Batch, Loader, validation_rows
from quintic.data.open_source import parse_mixture
from quintic.data.preparation import prepare
from quintic.data.tokenizer import Tokenizer


def folder(path: Path, mark: str, documents: int, seed: int) -> Path:
    """Write documents that all begin with a mark."""
    path.mkdir(parents=True)
    for number in range(documents):
        (path / f"{number:03d}.txt").write_text(f"{mark} {make_text(seed + number, 300)}")
    return path


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("sources")
    sizes = {"large": 120, "small": 12, "held": 30}
    return {name: str(folder(root / name, name.upper(), n, 1000 * n)) for name, n in sizes.items()}


OPTIONS = {"vocab_size": 400, "val_frac": 0.25, "shard_tokens": 9000}


@pytest.fixture(scope="module")
def mixed(specs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    spec = f"{specs['large']}=0.5 {specs['small']}=1.5"
    return prepare(spec, data_dir=tmp_path_factory.mktemp("mixed"), **OPTIONS)


def marks(dataset: Dataset, name: str) -> list[str]:
    """The source of each document, by its first word."""
    split = dataset.split(name)
    return [
        dataset.tokenizer.decode(split.document(number).tolist()).split()[0] for number in range(split.num_documents)
    ]


def sources_of(batches: list[Batch], dataset: Dataset, name: str = "val") -> Counter[str]:
    """The tokens of each source in batches, by the numbers of their documents."""
    every = marks(dataset, name)
    return Counter(every[int(number)] for batch in batches for number in batch.documents.flatten())


def test_the_manifest_says_which_documents_are_of_which_source(mixed: Dataset, specs: dict[str, str]) -> None:
    for name in ("train", "val"):
        shares = mixed.source_ranges(name)
        assert [(share.source, share.weight) for share in shares] == [(specs["large"], 0.25), (specs["small"], 0.75)]
        found = marks(mixed, name)
        assert found == [
            mark for share, mark in zip(shares, ("LARGE", "SMALL"), strict=True) for _ in range(share.first, share.last)
        ]
        assert shares[-1].last == mixed.split(name).num_documents
        assert len(set(found)) == 2  # both sides have some of each
    mixed.verify()


def test_the_tokens_of_training_have_the_shares(mixed: Dataset, specs: dict[str, str]) -> None:
    loader = Loader(mixed, "train", rows=4, seq_len=64, prefetch=0)
    count = 100
    for _ in range(count):
        next(loader)
    served = [position["served"] for position in loader._positions]
    assert served == [count * 65, 3 * count * 65]  # 400 rows, a quarter and three quarters
    tokens = [
        sum(len(mixed.split("train").document(n)) for n in range(s.first, s.last)) for s in mixed.source_ranges("train")
    ]
    epochs = loader.epochs
    assert list(epochs) == [specs["large"], specs["small"]]
    assert epochs[specs["small"]] > 4 > 1 > epochs[specs["large"]] > 0
    for number, source in enumerate(epochs):
        assert epochs[source] == pytest.approx(served[number] / tokens[number], rel=0.15)


def test_each_source_has_an_order_of_its_own(specs: dict[str, str], tmp_path: Path) -> None:
    # Two sources of the same texts but for a letter that no text has, their rows in turn.
    spec = " ".join(f"{folder(tmp_path / mark, mark, 40, 7)}=1" for mark in "XY")
    dataset = prepare(spec, data_dir=tmp_path / "data", val_data=specs["held"], vocab_size=400)
    with Loader(dataset, "train", rows=8, seq_len=64, prefetch=0) as loader:
        rows = next(loader).inputs.tolist()
    texts = [dataset.tokenizer.decode(row).replace("X", "").replace("Y", "") for row in rows]
    assert texts[0::2] != texts[1::2]


def test_the_tokenizer_learns_from_each_source_by_its_weight(
    specs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: train(seen.extend(texts) or seen, size))
    monkeypatch.setattr(preparation, "_SAMPLE_BYTES", 60_000)
    spec = " ".join(f"{folder(tmp_path / mark, mark, 60, 7)}={weight}" for mark, weight in (("X", 3), ("Y", 1)))
    prepare(spec, data_dir=tmp_path / "data", val_data=specs["held"], vocab_size=400)
    of_x, of_y = (sum(len(text) for text in seen if text.startswith(mark)) for mark in "XY")
    assert 2 < of_x / of_y < 4.5


def test_each_source_is_served_whole_and_in_turn(mixed: Dataset) -> None:
    batches = list(validation_rows(mixed, rows=2, seq_len=32))
    first = sources_of(batches[:8], mixed)
    assert first["SMALL"] > 2 * first["LARGE"] > 0  # while both last
    everything = sources_of(batches, mixed)
    assert everything["LARGE"] > everything["SMALL"]  # then what is left
    assert sum(everything.values()) > 0.9 * mixed.split("val").num_tokens


def rows_of(loader: Loader, count: int) -> list[torch.Tensor]:
    return [torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1) for batch in itertools.islice(loader, count)]


def test_ranks_share_the_rows_of_one(mixed: Dataset) -> None:
    one = rows_of(Loader(mixed, "train", rows=6, seq_len=48, prefetch=0), 20)
    parts = [
        rows_of(Loader(mixed, "train", rows=2, seq_len=48, rank=rank, world_size=3, prefetch=0), 20)
        for rank in range(3)
    ]
    for step, whole in enumerate(one):
        assert torch.equal(whole, torch.cat([part[step] for part in parts]))


@pytest.mark.parametrize("before", [0, 1, 7, 40])
def test_a_loader_goes_on_where_it_stopped(mixed: Dataset, before: int) -> None:
    whole = Loader(mixed, "train", rows=3, seq_len=48, prefetch=2)
    rows_of(whole, before)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = torch.cat(rows_of(whole, 10))
    # With other ranks and rows than before: 3 rows a step on one rank, then 5 on each of 3 ranks.
    ranks = [Loader(mixed, "train", rows=5, seq_len=48, rank=rank, world_size=3, prefetch=0) for rank in range(3)]
    for loader in ranks:
        loader.load_state_dict(state)
    resumed = [torch.cat([rows_of(loader, 1)[0] for loader in ranks]) for _ in range(2)]
    assert torch.equal(torch.cat(resumed), expected)
    whole.close()


def test_a_state_of_other_text_is_refused(mixed: Dataset) -> None:
    loader = Loader(mixed, "train", rows=3, seq_len=48, prefetch=0)
    state = loader.state_dict()
    fewer = {**state, "positions": state["positions"][:1]}
    assert "has 1 sources, the text has 2" in data_error_of(lambda: loader.load_state_dict(fewer))
    damaged = {**state, "positions": [1, 2]}
    assert "position is damaged" in data_error_of(lambda: loader.load_state_dict(damaged))
    del state["positions"]
    assert "has 1 sources, the text has 2" in data_error_of(lambda: loader.load_state_dict(state))


def test_validation_text_of_ones_own(specs: dict[str, str], tmp_path: Path) -> None:
    for spec in (specs["large"], f"{specs['large']}=1 {specs['small']}=2"):
        dataset = prepare(spec, data_dir=tmp_path, val_data=specs["held"], **OPTIONS)
        train = Counter(marks(dataset, "train"))
        assert train == ({"LARGE": 120, "SMALL": 12} if " " in spec else {"LARGE": 120})
        assert Counter(marks(dataset, "val")) == {"HELD": 30}
        assert [share.source for share in dataset.source_ranges("val")] == [specs["held"]]
        assert set(sources_of(validation_rows(dataset, rows=2, seq_len=32), dataset)) == {"HELD"}
        assert len(dataset.source_ranges("train")) == len(train)
        with Loader(dataset, "train", rows=2, seq_len=32, prefetch=0) as loader:
            next(loader)
            assert len(loader.epochs) == len(train)
        assert dataset.manifest["command"].endswith(f"--val-data {specs['held']}")


def test_validation_text_that_cannot_be_is_refused(specs: dict[str, str], tmp_path: Path) -> None:
    def refused(spec: str, val_data: str) -> str:
        return data_error_of(lambda: prepare(spec, data_dir=tmp_path / "data", val_data=val_data, **OPTIONS))

    large, small, held = specs["large"], specs["small"], specs["held"]
    mixture = f"{large}=1 {small}=2"
    for spec in (small, mixture):
        assert refused(spec, small).startswith(f"--val-data {small}: is also trained on (--data), so its loss")
    assert refused(large, mixture) == f"--val-data {mixture!r}: takes one source; put several into one folder"
    (tmp_path / "empty.txt").touch()
    empty = f"--val-data {tmp_path / 'empty.txt'}: there is no text in it; give a source with text"
    assert refused(large, str(tmp_path / "empty.txt")) == empty
    assert data_error_of(lambda: prepare(held, data_dir=tmp_path, val_data="none.txt", **OPTIONS)).startswith(
        "'none.txt': "
    )
    assert not list((tmp_path / "data").glob("[!.]*/manifest.json"))


def test_one_document_will_do_where_validation_text_is_given(specs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(make_text(1, 500))
    dataset = prepare(str(tmp_path / "one.txt"), data_dir=tmp_path, val_data=specs["held"], **OPTIONS)
    assert dataset.split("train").num_documents == 1


def test_weights_make_another_dataset_and_sources_alone_do_not(specs: dict[str, str], tmp_path: Path) -> None:
    large, small = specs["large"], specs["small"]
    keys = [
        prepare(spec, data_dir=tmp_path, **OPTIONS).key
        for spec in (f"{large}=1 {small}=3", f"{large}=2 {small}=6", f"{large}=3 {small}=1", large)
    ]
    assert keys[0] == keys[1]  # the same shares
    assert len(set(keys)) == 3


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_mixture_goes_on_after_a_stop_in_any_source(
    specs: dict[str, str], mixed: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 3000)
    spec = f"{specs['large']}=0.5 {specs['small']}=1.5"
    total = mixed.split("train").num_bytes + mixed.split("val").num_bytes
    for place in (0.3, 0.9, 0.97):
        with monkeypatch.context() as patch:
            act_after(patch, int(place * total), interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare(spec, data_dir=tmp_path / str(place), **OPTIONS)
        with monkeypatch.context() as patch:
            encoded = act_after(patch, 10**9, interrupt)
            dataset = prepare(spec, data_dir=tmp_path / str(place), **OPTIONS)
        assert sum(encoded) < total - 0.5 * place * total
        assert dataset.key == mixed.key
        assert dataset.manifest["splits"] == mixed.manifest["splits"]
        assert dataset.manifest["sources"] == mixed.manifest["sources"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.txt=0.7 b", "'b' has no weight; write SOURCE=WEIGHT"),
        ("a.txt=0.7 b=x", "'b' has no weight"),
        ("a.txt=0.7 b=0", "'b' has no weight"),
        ("a.txt=0.7 b=-1", "'b' has no weight"),
        ("a.txt=inf b=1", "'a.txt' has no weight"),
        ("a.txt=nan b=1", "'a.txt' has no weight"),
        ("a.txt=1 a.txt=2", "a.txt is given twice"),
        ("a.txt=1 =2", "'2' has no weight"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_named(spec: str, expected: str) -> None:
    assert data_error_of(lambda: parse_mixture(spec)).startswith(f"--data {spec!r}: {expected}")


@pytest.mark.parametrize("spec", ["a.txt b.txt", "a.txt=0.7", "my notes/"])
def test_what_may_be_meant_as_a_mixture_is_told_how_to_write_one(spec: str, tmp_path: Path) -> None:
    said = data_error_of(lambda: prepare(spec, data_dir=tmp_path, **OPTIONS))
    assert said.startswith(f"{spec!r}: no such file or folder; ")
    assert said.endswith("; `quintic train` and `prepare` take several as one value, 'SOURCE=WEIGHT SOURCE=WEIGHT'")


def test_a_single_source_is_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my notes=2 more=1").mkdir()
    for spec in ("python", "a.txt", "a.txt=0.7", "my notes/", "hf:owner/name", "", "my notes=2 more=1"):
        assert parse_mixture(spec) is None
    assert parse_mixture("hf:a/b=1 c=d.txt=2e-1") == [("hf:a/b", 1.0), ("c=d.txt", 0.2)]
