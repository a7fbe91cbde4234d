"""The tokenizer: exact bytes both ways, files of other makers, agreement with transformers."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from durability import disk_events, durable_names
from hub_server import use_endpoint
from hypothesis import given
from hypothesis import strategies as st
from text_samples import make_text

import quintic.errors
from quintic.data.tokenizer import BOS, Tokenizer, byte_alphabet
from quintic.errors import DataError

ROOT = Path(quintic.errors.__file__).parents[1]
Text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([make_text(seed, 2000) for seed in range(20)], 380)


@pytest.mark.parametrize("kind", [ValueError, MemoryError, BaseException])
def test_any_error_in_training_is_raised(kind: type[BaseException]) -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise kind("from the library")  # whose panics are no `Exception`

    with pytest.raises(kind, match="from the library"):
        Tokenizer.train(texts(), 300)


@given(Text)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.bos_id not in ids


@given(st.lists(Text, max_size=5))
def test_a_batch_is_each_text_encoded(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("text", [BOS, f"a{BOS}b", f"{BOS}{BOS}", f" {BOS}\n", "<|endoftext|>"])
def test_special_tokens_in_text_are_text(tokenizer: Tokenizer, text: str) -> None:
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert tokenizer.bos_id not in ids
        assert tokenizer.decode(ids) == text


def test_specials_are_skipped_when_decoding(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.bos_id, *tokenizer.encode("rows"), tokenizer.bos_id]
    assert tokenizer.decode(ids) == "rows"
    assert tokenizer.token_bytes()[tokenizer.bos_id] == 0


def test_half_a_character_is_replaced_in_text_and_kept_in_bytes(tokenizer: Tokenizer) -> None:
    symbols = byte_alphabet()
    half = json.loads(tokenizer.definition)["model"]["vocab"][symbols[0xE6]]
    assert tokenizer.decode([half]) == "\ufffd"
    assert tokenizer.decode_bytes([half]) == b"\xe6"


def test_vocabulary_size_counts_every_id(tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes()
    assert tokenizer.vocab_size == 380 == len(table)
    assert table.dtype == np.int32
    assert (table > 0).sum() == 379


def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="token id 380 is outside the vocabulary of 380"):
        tokenizer.decode([380])


def test_only_the_bytes_when_that_is_asked() -> None:
    tokenizer = Tokenizer.train([make_text(0, 100)], 257)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("é")) == 2


def test_a_vocabulary_the_text_does_not_support_is_smaller() -> None:
    tokenizer = Tokenizer.train(["ab ab ab"], 4096)
    assert 257 < tokenizer.vocab_size < 270


def test_digits_stay_in_groups_of_two() -> None:
    tokenizer = Tokenizer.train(["1234567890 " * 380], 400)
    assert max(len(tokenizer.decode([index])) for index in tokenizer.encode("12345678901234567890")) <= 2


def test_save_and_load_keep_everything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path / "tokenizer.json", tmp_path):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert (loaded.bos_id, loaded.vocab_size) == (tokenizer.bos_id, tokenizer.vocab_size)
        assert loaded.encode(make_text(99, 50)) == tokenizer.encode(make_text(99, 50))


def test_a_saved_tokenizer_survives_a_crash(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = disk_events(monkeypatch)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert durable_names(events) == ["tokenizer.json"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_encodes_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path / "tokenizer.json")
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in (make_text(7, 300), "  two  spaces\n\n\tTabs 1234, it's é漢🙂"):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == text
    assert other.convert_tokens_to_ids(BOS) == tokenizer.bos_id


def test_another_vocabulary_has_another_fingerprint(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train([make_text(0, 2000)], 300).fingerprint() != tokenizer.fingerprint()


def foreign(tmp_path: Path, *, specials: list[str], **changes: object) -> Path:
    """Write a tokenizer.json as another maker might."""
    fields = json.loads(Tokenizer.train([make_text(0, 2000)], 300).definition)
    vocab = fields["model"]["vocab"]
    fields["model"]["vocab"] = {token: index - 1 for token, index in vocab.items() if token != BOS}
    fields["added_tokens"] = [
        {"id": 299 + place, "content": content, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for place, content in enumerate(specials)
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fields | changes), encoding="utf-8")
    return path


def test_endoftext_starts_documents_where_there_is_no_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(foreign(tmp_path, specials=["<|other|>", "<|endoftext|>"]))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (300, 301)
    assert tokenizer.token_bytes()[[299, 300]].tolist() == [0, 0]
    assert 300 not in tokenizer.encode("a<|endoftext|>")


def test_a_document_start_is_added_where_there_is_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(foreign(tmp_path, specials=[]))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (299, 300)
    tokenizer.save(tmp_path / "again.json")
    assert Tokenizer.load(tmp_path / "again.json").fingerprint() == tokenizer.fingerprint()


def test_what_changes_text_is_dropped_on_loading(tmp_path: Path) -> None:
    path = foreign(
        tmp_path,
        specials=[],
        normalizer={"type": "NFKC"},
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("ﬁve e\u0301 words")) == "ﬁve e\u0301 words"


def test_gpt2_files_in_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = json.loads(tokenizer.definition)["model"]
    vocab = {token: index - 1 for token, index in model["vocab"].items() if token != BOS}
    vocab["<|endoftext|>"] = len(vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "encoder.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.bos_id == 379
    assert loaded.vocab_size == 380
    assert loaded.decode(loaded.encode("naïve rows\n 漢")) == "naïve rows\n 漢"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "none.json: no such tokenizer; give a tokenizer.json, a folder with one, or 'gpt2'"),
        ("broken.json", b"{", "broken.json: not a tokenizer.json"),
        ("latin.json", b"\xff", "latin.json: not a tokenizer.json .not UTF-8 at byte offset 0"),
        ("list.json", b"[]", "list.json: not a tokenizer.json"),
        ("ranks.tiktoken", b"", "ranks.tiktoken: cannot be read alone.*encoder.json and vocab.bpe"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path / name)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer.json in it, and no encoder.json with vocab.bpe"):
        Tokenizer.load(tmp_path)


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nx y\n")
    with pytest.raises(DataError, match=r"encoder.json and vocab.bpe do not fit together"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece tokenizer that is not byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "BPE tokenizer that is not byte-level BPE"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "ByteLevel"}},
            "lacks 255 of the 256 bytes",
        ),
        (
            {
                "model": {"type": "BPE", "vocab": dict.fromkeys(byte_alphabet(), 0), "merges": [["no", "such"]]},
                "decoder": {"type": "ByteLevel"},
            },
            "not a usable tokenizer.json",
        ),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path, fields: object, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(DataError, match=f"other.json: .*{message}"):
        Tokenizer.load(path)


def test_a_pre_tokenizer_that_drops_text_is_refused(tmp_path: Path) -> None:
    stages = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}
    for stage in stages["pretokenizers"][1:]:
        stage |= {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    with pytest.raises(DataError, match="its pre-tokenizer WhitespaceSplit removes what it splits at"):
        Tokenizer.load(foreign(tmp_path, specials=[], pre_tokenizer=stages))


def test_a_folder_that_cannot_be_written_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json: cannot be written"):
        tokenizer.save(tmp_path / "none" / "tokenizer.json")


def test_gpt2_without_network_says_so(tmp_path: Path, closed_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_endpoint(closed_endpoint, monkeypatch)
    with pytest.raises(DataError, match=r"hf:openai-community/gpt2: tokenizer.json cannot be downloaded.*network"):
        Tokenizer.load("gpt2", cache_dir=tmp_path)


def with_changes(tokenizer: Tokenizer, **changes: object) -> str:
    return json.dumps(json.loads(tokenizer.definition) | changes)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("more", [{}, {"single_word": True}, {"normalized": True}])
def test_added_tokens_leave_the_spaces_around_them(
    tokenizer: Tokenizer, flags: dict[str, bool], more: dict[str, bool]
) -> None:
    fields = json.loads(tokenizer.definition)
    every = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    fields["added_tokens"].append({"id": 999, "content": "<think>", **every, **flags, **more})
    changed = Tokenizer(json.dumps(fields))
    for text in ("first   <think>   second", "<think>", " <think>\n", "a<think>b <think><think>\t"):
        ids = changed.encode(text)
        assert changed.decode(ids) == text
        assert changed.token_bytes()[ids].sum() == len(text.encode())
    assert 380 in changed.encode("x <think> y")  # the library numbers added tokens without gaps


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "NFC"},
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ],
)
def test_a_normalizer_changes_no_text(tokenizer: Tokenizer, normalizer: dict[str, object]) -> None:
    changed = Tokenizer(with_changes(tokenizer, normalizer=normalizer))
    text = "  Ein E\u0301tat, ﬁne ² \u212b  "
    ids = changed.encode(text)
    assert changed.decode(ids) == text
    assert changed.token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize(
    "stage",
    [
        {"type": "Split", "pattern": {"String": "secret"}, "behavior": "Removed", "invert": False},
        {"type": "Punctuation", "behavior": "Removed"},
        {"type": "CharDelimiterSplit", "delimiter": "|"},
        {"type": "Whitespace"},
        {"type": "BertPreTokenizer"},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_pre_tokenizer_that_removes_any_text_is_named(
    tokenizer: Tokenizer, stage: dict[str, object], nested: bool
) -> None:
    fields = json.loads(tokenizer.definition)
    first = {"type": "Sequence", "pretokenizers": [stage]} if nested else stage
    fields["pre_tokenizer"]["pretokenizers"].insert(0, first)
    with pytest.raises(DataError, match=f"its pre-tokenizer {stage['type']} removes what it splits at"):
        Tokenizer(json.dumps(fields))


def test_a_tokenizer_that_loses_some_text_says_which(tokenizer: Tokenizer) -> None:
    # A vocabulary whose end-of-word mark makes all words unknown.
    fields = json.loads(tokenizer.definition)
    fields["model"]["end_of_word_suffix"] = "</w>"
    with pytest.raises(DataError, match=r"loses text: 'Text.*' comes back as '"):
        Tokenizer(json.dumps(fields))


CTRL_C = """
import random, sys
from pathlib import Path
from quintic.data.tokenizer import Tokenizer
texts = ["".join(random.Random(0).choices("ACGT", k=400_000))]
print("begun", flush=True)
Tokenizer.train(texts, 20_000)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal of POSIX")
def test_ctrl_c_stops_the_making_of_a_tokenizer() -> None:
    process = subprocess.Popen([sys.executable, "-c", CTRL_C], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        with pytest.raises(subprocess.TimeoutExpired):  # busy with the first merges
            process.wait(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)  # all merges take two minutes
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 130)
    assert errors.rstrip().endswith(b"KeyboardInterrupt")
