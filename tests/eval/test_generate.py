"""Generation: the cache changes nothing, the draws follow the probabilities, the seed decides."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintic.data.dataset import Dataset
from quintic.eval.generate import _draw, default_prompts, generate_tokens, sample_text
from quintic.model.gpt import GPT, GPTConfig

VOCAB, BOS = 61, 0


def generate(model: GPT, prompt: list[int], *, seed: int = 0, **options: Any) -> list[int]:
    return list(generate_tokens(model, prompt, seed=seed, **options))


def model_of(pattern: str = "SL", *, kv_heads: int = 1, vocab_size: int = VOCAB, bos_id: int = BOS) -> GPT:
    """A model with random weights everywhere, so that nothing is hidden behind a zero."""
    sizes = GPTConfig(
        vocab_size=vocab_size,
        depth=3,
        width=32,
        head_dim=16,
        num_kv_heads=kv_heads,
        seq_len=16,
        bos_id=bos_id,
        window_pattern=pattern,
    )
    model = GPT(sizes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * (0.5 if param.ndim == 2 else 1))
    return model.eval()


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, with everything computed anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        token = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if token == model.config.bos_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
@pytest.mark.parametrize(("pattern", "kv_heads"), [("S", 2), ("L", 2), ("SL", 1)])
def test_the_cache_changes_nothing(pattern: str, kv_heads: int, length: int) -> None:
    # Windows of 4 and 16 positions; prompts shorter and longer than both.
    model = model_of(pattern, kv_heads=kv_heads)
    prompt = [BOS, *torch.randint(1, VOCAB, (length - 1,)).tolist()]
    expected = greedy(model, prompt, 24)
    assert generate(model, prompt, max_tokens=24, temperature=0) == expected
    assert len(set(expected)) > 2  # not the same token for ever


def test_a_prompt_need_not_begin_a_document() -> None:
    model = model_of()
    prompts = [[7, 8, 9], [BOS, 3], [5]]
    for prompt in prompts:
        assert generate(model, prompt, max_tokens=12, temperature=0) == greedy(model, prompt, 12)


def test_the_cache_refuses_what_does_not_fit() -> None:
    model = model_of()
    cache = model.new_cache(4)
    assert generate(model, [BOS, 4], max_tokens=0) == []
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.int64), cache=cache)
        with pytest.raises(ValueError, match=r"3 \+ 2 tokens do not fit into a cache of 4 positions"):
            model(torch.ones(1, 2, dtype=torch.int64), cache=cache)


def test_generation_ends_where_the_model_starts_a_document() -> None:
    model = model_of()
    free = generate(model, [5, 6, 7], max_tokens=30, temperature=0)
    assert len(free) == 30
    other = model_of(bos_id=free[10])
    # The same weights; only what counts as the start of a document differs.
    expected = greedy(other, [5, 6, 7], 30)
    assert len(expected) < 30
    assert generate(other, [5, 6, 7], max_tokens=30, temperature=0) == expected


def test_seeds_decide() -> None:
    model = model_of()
    first, again, other = (generate(model, [BOS], max_tokens=40, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    torch.manual_seed(99)  # PyTorch's own generator has no say
    state = torch.random.get_rng_state()
    assert generate(model, [BOS], max_tokens=40, temperature=1.0, seed=1) == first
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-320])
def test_a_temperature_near_zero_draws_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([-20.0, 3.5, 14.9, 14.8])
    assert _draw(logits, temperature, None, None, torch.Generator().manual_seed(1)) == 2


def test_draws_follow_the_probabilities() -> None:
    model = model_of()
    with torch.no_grad():
        logits = model(torch.tensor([[BOS, 3]]))[0, -1].double()
    for temperature, top_k, top_p in (
        (1.0, None, None),
        (2.0, 5, None),
        (0.5, 1000, None),
        (3.0, None, 0.5),
        (3.0, 9, 0.7),
        (1.0, None, 1.0),
        (1.0, None, 1e-9),
    ):
        kept = logits / temperature
        if top_k is not None and top_k < VOCAB:
            kept = kept.masked_fill(kept < kept.topk(top_k).values[-1], float("-inf"))
        expected = kept.softmax(0)
        if top_p is not None:
            nucleus = []
            for token in expected.argsort(descending=True).tolist():
                nucleus.append(token)
                if float(expected[nucleus].sum()) >= top_p:
                    break
            expected = torch.zeros_like(expected).scatter(0, torch.tensor(nucleus), expected[nucleus])
            expected /= expected.sum()
        generator = torch.Generator().manual_seed(0)
        drawn = [_draw(logits.float(), temperature, top_k, top_p, generator) for _ in range(4000)]
        shares = torch.tensor(drawn).bincount(minlength=VOCAB) / 4000
        assert (shares - expected).abs().max() < 5 * (0.25 / 4000) ** 0.5  # five standard deviations
        assert (shares[expected == 0] == 0).all()
        # `generate` draws its first token just so.
        first = _draw(logits.float(), temperature, top_k, top_p, torch.Generator().manual_seed(7))
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        made = generate(model, [BOS, 3], max_tokens=1, seed=7, **options)
        assert made == ([] if first == BOS else [first])


def test_top_1_is_greedy() -> None:
    model = model_of()
    assert generate(model, [BOS], max_tokens=20, top_k=1, seed=3) == generate(
        model, [BOS], max_tokens=20, temperature=0
    )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1], {"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        ([1], {"temperature": float("nan")}, "temperature=nan: must be at least 0"),
        ([1], {"temperature": float("inf")}, "temperature=inf: must be at least 0 and finite"),
        ([1], {"top_k": 0}, "top_k=0: must be at least 1"),
        ([1], {"top_p": 0.0}, "top_p=0.0: must be above 0"),
        ([1], {"top_p": 1.1}, "top_p=1.1: must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_asked_for(prompt: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model_of(), prompt, max_tokens=1, **options)


def test_samples_are_the_decoded_continuations(tiny_dataset: Dataset) -> None:
    tokenizer = tiny_dataset.tokenizer
    model = model_of(vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    samples = sample_text(model, tokenizer, ("def model", "", "résumé"), max_tokens=12, temperature=1.0, seed=4)
    assert [sample["prompt"] for sample in samples] == ["def model", "", "résumé"]
    for number, sample in enumerate(samples):
        start = [tokenizer.bos_id, *tokenizer.encode(sample["prompt"])]
        made = generate(model, start, max_tokens=12, temperature=1.0, seed=4 + number)
        assert sample["text"] == tokenizer.decode(made)
    assert samples[1]["text"]
    largest = sample_text(model, tokenizer, ("a", "b", "c"), max_tokens=12, temperature=1.0, seed=2**63 - 1)
    assert largest[1:] == sample_text(model, tokenizer, ("b", "c"), max_tokens=12, temperature=1.0, seed=0)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=f"^seed={seed}: must be at least 0 and below 2\\^63$"):
            sample_text(model, tokenizer, (), max_tokens=1, seed=seed)


def test_samples_are_written_as_they_grow(tiny_dataset: Dataset) -> None:
    tokenizer = tiny_dataset.tokenizer
    model = model_of(vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    prompts = ("def model", "", "résumé", "x")
    pieces: list[str] = []
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 4}
    samples = sample_text(model, tokenizer, prompts, **options, write=pieces.append)
    assert samples == sample_text(model, tokenizer, prompts, **options)
    assert "".join(pieces) == "".join(f"{sample['prompt']}{sample['text']}\n\n" for sample in samples)
    # The first text token by token, and the others when it is their turn.
    first = samples[0]["text"]
    assert pieces[0] == "def model"
    assert len(pieces) > 5
    end = next(index for index, piece in enumerate(pieces) if piece.endswith("\n\n"))
    assert "".join(pieces[1 : end + 1]) == f"{first}\n\n"
    assert all(pieces)


def test_characters_are_written_whole(tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_dataset.tokenizer
    text = "é\U0001f642"
    tokens = [
        token for byte in text.encode() for token in range(256) if tokenizer.decode_bytes([token]) == bytes([byte])
    ]
    assert tokenizer.decode_bytes(tokens) == text.encode()  # a byte each
    texts = {"a": tokens, "b": [], "c": [*tokens, tokens[0]]}  # the last one ends in the middle of a character

    def generate(model: GPT, prompt: list[int], *, max_tokens: int, **_: Any) -> Iterator[int]:
        return iter(texts[tokenizer.decode(prompt[1:])] if max_tokens else [])

    monkeypatch.setattr("quintic.eval.generate.generate_tokens", generate)
    pieces: list[str] = []
    samples = sample_text(model_of(), tokenizer, ("a", "b", "c"), max_tokens=9, write=pieces.append)
    assert pieces == ["a", "é", "\U0001f642", "\n\n", "b", "\n\n", "c", "é", "\U0001f642", "\ufffd", "\n\n"]
    assert [sample["text"] for sample in samples] == [text, "", f"{text}\ufffd"]


def test_prompts_suit_the_data() -> None:
    assert default_prompts("python") == ("import os\n", "class Reader:\n")
    assert default_prompts("my/texts") == ("", "")  # two documents, as people write them there
    assert "The capital of France is" in default_prompts("hf:owner/name")
    assert not any(prompt.endswith(" ") for data in ("python", "text", "hf:o/n") for prompt in default_prompts(data))
