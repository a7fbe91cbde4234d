"""Encoding a long text in parts: the ids of the whole text, wherever the parts are cut."""

import json
import random
import string
from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import make_text

from quintic.data import tokenizer as module
from quintic.data.tokenizer import Tokenizer

# As GPT-2, GPT-4 and Llama 3 split words; digits in threes from the right, which takes a look at all that follow;
# characters of any kind up to a line end.
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "threes": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+",
    "lines": r"[^\n]*\n|[^\n]+",
}
# Signs that decide where words end: spaces of several kinds, line ends, marks, digits of other scripts, a tool's token.
SIGNS = [
    *" \t\n\r'.,-_0123456789abcXYZ", "  ", "\r\n", "\n\n", "\u00a0", "\u2028", "\u3000", "é", "e\u0301", "ß",
    "漢字", "ไทย", "٣", "½", "🙂", "👩‍👩‍👧", "'ll", "'re", "don't", "<think>", "</think>", "<thi", "\x00", "\u200d",
]  # fmt: skip


def with_pattern(tokenizer: Tokenizer, pattern: str, *, added: tuple[str, ...] = ()) -> Tokenizer:
    fields = json.loads(tokenizer.definition)
    fields["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    fields["added_tokens"] += [{"id": 900 + i, "content": content, **flags} for i, content in enumerate(added)]
    return Tokenizer(json.dumps(fields))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    rng = random.Random(0)
    texts = [make_text(seed, 500) for seed in range(10)]
    texts += ["".join(rng.choices(SIGNS, k=2000)) for _ in range(10)]
    # Tokens that reach over line ends: where spaces are divided must show in the ids.
    texts += ["".join(rng.choices(" \n", k=300)) + "a" for _ in range(100)]
    own = Tokenizer.train(texts, 600)
    others = {name: with_pattern(own, pattern, added=("<think>", "</think>")) for name, pattern in PATTERNS.items()}
    return {"own": own, **others}


def cut_up(text: str, rng: random.Random, longest: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + rng.randint(1, longest)
        yield text[start:end]
        start = end


@pytest.mark.parametrize("name", ["own", *PATTERNS])
@given(
    signs=st.lists(st.sampled_from(SIGNS) | st.characters(exclude_categories=["Cs"]), max_size=300), seed=st.integers()
)
def test_random_text_is_encoded_whole(tokenizers: dict[str, Tokenizer], name: str, signs: list[str], seed: int) -> None:
    text, rng = "".join(signs), random.Random(seed)
    tokenizer = tokenizers[name]
    parts = tokenizer.encode_parts(cut_up(text, rng, rng.choice([1, 5, 40, 200])))
    assert list(chain.from_iterable(parts)) == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["own", *PATTERNS])
@pytest.mark.parametrize(
    "alphabet",
    ["ACGT", string.ascii_letters + string.digits + "+/", "กขคงจ", "a{};=.1", " \n", "漢字，。", "  \t \nab"],
)
def test_text_without_words(tokenizers: dict[str, Tokenizer], name: str, alphabet: str) -> None:
    rng = random.Random(len(alphabet))
    for weights in (None, [30, *[1] * (len(alphabet) - 1)]):
        text = "".join(rng.choices(alphabet, weights, k=20_000))
        parts = list(tokenizers[name].encode_parts(cut_up(text, rng, 3000)))
        assert list(chain.from_iterable(parts)) == tokenizers[name].encode(text)


def test_ordinary_text_is_given_out_as_it_comes(tokenizers: dict[str, Tokenizer]) -> None:
    text = make_text(3, 20_000)
    for tokenizer in tokenizers.values():
        given = 0
        for part in tokenizer.encode_parts(text[start : start + 5000] for start in range(0, len(text), 5000)):
            given = max(given, len(part))
        assert given < 8000


def test_a_word_without_end_is_cut_where_it_gets_too_long(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 1000)
    text = "".join(random.Random(0).choices("ACGT", k=10_000))
    parts = list(tokenizers["own"].encode_parts(text[start : start + 100] for start in range(0, len(text), 100)))
    assert len(parts) > 5
    assert max(len(part) for part in parts) <= 2000
    assert tokenizers["own"].decode(chain.from_iterable(parts)) == text


def test_no_text_has_no_ids(tokenizers: dict[str, Tokenizer]) -> None:
    assert list(chain.from_iterable(tokenizers["own"].encode_parts([]))) == []
