"""The exported folder in transformers: the same logits and tokens as here, with padding, documents and a cache."""

import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from test_generate import model_of

from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.eval.export import export_hf
from quintic.eval.generate import generate_tokens
from quintic.model.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_module_cache")


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.fixture
def pair(request: pytest.FixtureRequest, tiny_dataset: Dataset, tmp_path: Path) -> tuple[GPT, Any]:
    """A model with random weights, and what transformers makes of its export; windows of 4 and 16 positions."""
    pattern, kv_heads = getattr(request, "param", ("SSL", 1))
    size, bos_id = tiny_dataset.vocab_size, tiny_dataset.bos_id
    model = model_of(pattern, kv_heads=kv_heads, vocab_size=size, bos_id=bos_id)
    export_hf(model, tiny_dataset.tokenizer, tmp_path / "model")
    return model, load(tmp_path / "model")


def texts_of(model: GPT, lengths: tuple[int, ...]) -> list[list[int]]:
    bos_id, size = model.config.bos_id, model.config.vocab_size
    return [[bos_id, *(1 + torch.randint(size - 1, (length - 1,))).tolist()] for length in lengths]


@torch.no_grad()
@pytest.mark.parametrize("pair", [("SSL", 1), ("L", 2), ("S", 1)], indirect=True)
def test_logits_are_ours(pair: tuple[GPT, Any]) -> None:
    model, exported = pair
    inputs = torch.randint(1, model.config.vocab_size, (3, 40))
    for row, start in ((0, 0), (1, 0), (1, 17), (1, 18), (2, 30)):  # several documents in a row, and a row without one
        inputs[row, start] = model.config.bos_id
    found = exported(inputs).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model(inputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exported(inputs, logits_to_keep=3).logits, found[:, -3:])
    losses = F.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    torch.testing.assert_close(exported(inputs, labels=inputs).loss, losses)


@torch.no_grad()
def test_logits_in_bfloat16_are_ours(tiny_dataset: Dataset, pair: tuple[GPT, Any], tmp_path: Path) -> None:
    model, _ = pair
    low = GPT(model.config, compute_dtype=torch.bfloat16)
    low.load_state_dict(model.state_dict())
    inputs = torch.tensor(texts_of(model, (25, 25)))
    found = load(tmp_path / "model", dtype=torch.bfloat16)(inputs).logits
    torch.testing.assert_close(found, low(inputs), rtol=0.05, atol=0.3)
    assert (found.argmax(-1) == low(inputs).argmax(-1)).float().mean() > 0.8


@torch.no_grad()
@pytest.mark.parametrize("pair", [("SSL", 1), ("L", 2)], indirect=True)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_is_ours_with_padding_on_the_left(pair: tuple[GPT, Any], use_cache: bool) -> None:
    model, exported = pair
    bos_id, prompts = model.config.bos_id, texts_of(model, (1, 7, 18, 2))
    longest = max(map(len, prompts))
    inputs = torch.tensor([[bos_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = exported.generate(
        inputs, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=use_cache, pad_token_id=bos_id
    )[:, longest:]
    expected = [list(generate_tokens(model, prompt, max_tokens=20, temperature=0)) for prompt in prompts]
    ended = [row[: row.index(bos_id)] if bos_id in row else row for row in made.tolist()]
    assert ended == expected
    assert len({tuple(row) for row in expected}) == len(prompts)


@torch.no_grad()
def test_a_prompt_without_a_document_start_sees_no_padding(pair: tuple[GPT, Any]) -> None:
    model, exported = pair
    inputs = torch.tensor([[5, 6, 7, 8]])
    padded = F.pad(inputs, (3, 0), value=9)
    mask = F.pad(torch.ones_like(inputs), (3, 0))
    torch.testing.assert_close(exported(padded, attention_mask=mask).logits[:, 3:], model(inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_in_pieces_gives_the_logits_of_the_whole(pair: tuple[GPT, Any]) -> None:
    model, exported = pair
    inputs = torch.randint(1, model.config.vocab_size, (2, 30))
    inputs[0, 12] = inputs[1, 0] = model.config.bos_id  # also documents that begin in a later piece
    cache, pieces = None, []
    for start, end in ((0, 5), (5, 6), (6, 20), (20, 21), (21, 30)):
        out = exported(inputs[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beams_carry_their_cache_along(pair: tuple[GPT, Any]) -> None:
    _, exported = pair
    inputs = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "attention_mask": torch.ones_like(inputs)}
    with_cache, without = (exported.generate(inputs, use_cache=use_cache, **options) for use_cache in (True, False))
    assert with_cache.tolist() == without.tolist()


def test_the_tokenizer_is_ours(pair: tuple[GPT, Any], tiny_dataset: Dataset, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    ours = tiny_dataset.tokenizer
    for text in ("def model(step):\n\treturn 12345", "résumé \U0001f642  spaces ", "<|bos|> is text", ""):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text)
        assert tokenizer(text)["input_ids"] == [ours.bos_id, *ids]
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == ours.bos_id
    assert len(tokenizer) == ours.vocab_size


@pytest.mark.usefixtures("pair")
def test_the_lines_of_the_guide_run_and_ask_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*args: Any) -> str:
        pytest.fail("transformers asked whether to run the code")

    guide = Path(__file__).parents[2] / "docs" / "how-to" / "train" / "export.md"
    lines = re.search(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.chdir(tmp_path)
    exec(lines[1], {})
    assert "The capital of France is" in capsys.readouterr().out


def test_the_code_stands_alone(pair: tuple[GPT, Any], tmp_path: Path) -> None:
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "functions.py", "generation_config.json", "model.safetensors", "modeling_quintic.py",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for code in (path.read_text() for path in (tmp_path / "model").glob("*.py")):
        assert "import quintic" not in code
        assert "from quintic" not in code
    assert type(pair[1]).__module__.startswith("transformers_modules.")


def test_a_saved_and_loaded_export_is_the_same(pair: tuple[GPT, Any], tmp_path: Path) -> None:
    _, exported = pair
    exported.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    weights = exported.state_dict()
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())


def test_an_export_replaces_an_export_and_nothing_else(tiny_dataset: Dataset, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": tiny_dataset.vocab_size, "bos_id": tiny_dataset.bos_id}
    first, second = model_of("L", **sizes), model_of("SSL", **sizes)
    for model in (first, second):
        assert export_hf(model, tiny_dataset.tokenizer, tmp_path / "out") == tmp_path / "out"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["windows"] == [4, 4, 16]
    (tmp_path / "other").mkdir()
    export_hf(first, tiny_dataset.tokenizer, tmp_path / "other")  # an empty folder is free
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    for name in ("mine", "file"):
        with pytest.raises(ConfigError, match=f"--out .*{name}: holds something other than an export; name a new"):
            export_hf(first, tiny_dataset.tokenizer, tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "other", "out"]


@torch.no_grad()
def test_gates_of_another_variant_come_along(tiny_dataset: Dataset, tmp_path: Path) -> None:
    sizes = {"vocab_size": tiny_dataset.vocab_size, "bos_id": tiny_dataset.bos_id, "seq_len": 16, "head_dim": 16}
    model = GPT(GPTConfig.from_depth(2, **sizes, aspect_ratio=16, variant="nanochat"))
    model.init_weights()
    for param in model.parameters():
        param.copy_(torch.randn_like(param) * (0.5 if param.ndim == 2 else 1))
    inputs = torch.randint(1, 12, (2, 10))
    exported = load(export_hf(model, tiny_dataset.tokenizer, tmp_path / "model"))
    torch.testing.assert_close(exported(inputs).logits, model(inputs), rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_lookup_layers_come_along(tied: bool, tiny_dataset: Dataset, tmp_path: Path) -> None:
    size = tiny_dataset.vocab_size
    sizes = GPTConfig(
        vocab_size=size, depth=3, width=32, head_dim=16, num_kv_heads=2, seq_len=16, bos_id=tiny_dataset.bos_id,
        l3_layers=(0, 2), l3_embeddings=3 * size, l3_d_up=24, l3_tied=tied,
    )  # fmt: skip
    model = GPT(sizes)
    model.init_weights()
    for param in model.parameters():
        param.copy_(torch.randn_like(param) * (0.5 if param.ndim == 2 else 1))
    rows = torch.ones(size, dtype=torch.int64)
    rows[5:9] += size // 2  # some tokens have many rows, most have one
    rows[4] += 3 * size - int(rows.sum())
    model.allocate_lookups(rows, mean_rows=2.0)
    exported = load(export_hf(model, tiny_dataset.tokenizer, tmp_path / "model"))
    inputs = torch.randint(1, 12, (2, 24))
    torch.testing.assert_close(exported(inputs).logits, model(inputs), rtol=1e-3, atol=1e-3)
    made = exported.generate(inputs[:, :5], max_new_tokens=9, do_sample=False, attention_mask=torch.ones(2, 5))
    prompts = inputs[:, :5].tolist()
    expected = [list(generate_tokens(model, prompt, max_tokens=9, temperature=0)) for prompt in prompts]
    assert [row[: len(other)] for row, other in zip(made[:, 5:].tolist(), expected, strict=True)] == expected


def test_the_exported_code_knows_every_size() -> None:
    # A field that is added to `GPTConfig` belongs here once `modeling_quintic.py` does what it says.
    assert {field.name for field in dataclasses.fields(GPTConfig)} == {
        "vocab_size", "depth", "width", "head_dim", "num_kv_heads", "seq_len", "bos_id", "window_pattern",
        "short_window", "softcap", "rotary_base", "variant", "l3_layers", "l3_embeddings",
        "l3_d_up", "l3_k_max", "l3_tied",
    }  # fmt: skip


def test_a_full_disk_is_named_and_nothing_is_left(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    model = model_of("L", vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors") as caught:
        export_hf(model, tiny_dataset.tokenizer, tmp_path / "model")
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
