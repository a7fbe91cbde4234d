"""A speedrun's model in transformers: the logits and tokens of ours, whatever features it has, and with padding."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quintic.data.tokenizer import Tokenizer
from quintic.eval.export import export_hf
from quintic.eval.generate import generate_tokens
from quintic.eval.row_models import BatchedSpeedrun
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.speedrun.presets import BYTES_BOS, switches, without
from quintic.speedrun.shards import byte_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_module_cache")

SIZES = SpeedrunConfig(
    vocab_size=264,
    num_layers=7,
    width=32,
    num_heads=4,
    head_dim=8,
    bos_id=BYTES_BOS,
    bigram_rows=37,
    bigram_sign_rows=5,
    gate_channels=6,
)
# What a trained model does, and not how it is trained.
FEATURES = sorted({*switches()} - {"multi-token", "prefix-tokens", "tied", "fp8-head", "fp8-mlp", "fp8-mlp-backward"})


def model_of(sizes: SpeedrunConfig = SIZES, dtype: torch.dtype = torch.float32) -> BatchedSpeedrun:
    """A model whose parameters are all away from where they start, after one growth of its windows."""
    model = SpeedrunGPT(sizes, dtype=dtype)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator))
    model.rotary.set_windows(4, 9)
    model.rotary.set_windows(5, 13)
    return BatchedSpeedrun(model, vocab_size=257, seq_len=100).eval()


def exported(model: BatchedSpeedrun, folder: Path, **options: Any) -> Any:
    export_hf(model, byte_tokenizer(), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def rows_of_documents() -> torch.Tensor:
    inputs = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(2))
    for row, start in ((0, 0), (1, 0), (1, 17), (1, 18), (2, 30)):  # several documents, and a row that begins in one
        inputs[row, start] = BYTES_BOS
    return inputs


@torch.no_grad()
@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_logits_are_ours(feature: str | None, tmp_path: Path) -> None:
    model = model_of(SIZES if feature is None else without(SIZES, [feature]))
    found = exported(model, tmp_path / "model")(rows_of_documents()).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model(rows_of_documents()), rtol=1e-5, atol=1e-5)


class Switch:
    """True or false as a condition, and neither a number nor an index."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __bool__(self) -> bool:
        return self.on


@torch.no_grad()
def test_features_of_layers_are_only_conditions(tmp_path: Path) -> None:
    # The compiler of PyTorch 2.11 refuses bools as indices and in sums.
    ours = model_of(replace(SIZES))  # of its own, to be changed below
    theirs, inputs = exported(ours, tmp_path / "model"), rows_of_documents()
    for model, layers in ((ours, ours.model), (theirs, theirs)):
        expected, plans = model(inputs), layers.sizes.layers
        switched = [field.name for field in fields(plans[0]) if isinstance(getattr(plans[0], field.name), bool)]
        vars(layers.sizes)["layers"] = tuple(
            replace(plan, **{name: Switch(getattr(plan, name)) for name in switched}) for plan in plans
        )
        found = model(inputs)
        assert torch.equal(found if model is ours else found.logits, expected if model is ours else expected.logits)


@torch.no_grad()
def test_losses_and_chosen_logits(tmp_path: Path) -> None:
    model, inputs = model_of(), rows_of_documents()
    theirs = exported(model, tmp_path / "model")
    logits = theirs(inputs).logits
    torch.testing.assert_close(theirs(inputs, logits_to_keep=3).logits, logits[:, -3:])
    losses = F.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
    torch.testing.assert_close(theirs(inputs, labels=inputs).loss, losses)


@torch.no_grad()
def test_generation_is_ours_with_padding_on_the_left(tmp_path: Path) -> None:
    model = model_of()
    theirs = exported(model, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    texts = ["import os", "d", "", "the longest of these prompts"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    made = theirs.generate(**batch, max_new_tokens=15, do_sample=False)[:, batch["input_ids"].shape[1] :]
    prompts = [[BYTES_BOS, *text.encode()] for text in texts]
    ended = [row[: row.index(BYTES_BOS)] if BYTES_BOS in row else row for row in made.tolist()]
    assert ended == [list(generate_tokens(model, prompt, max_tokens=15, temperature=0)) for prompt in prompts]
    padded = F.pad(torch.tensor([[5, 6, 7]]), (2, 0), value=9)  # a text without a document start sees no padding
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    found = theirs(padded, attention_mask=mask).logits[:, 2:]
    torch.testing.assert_close(found, model(torch.tensor([[5, 6, 7]])), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_in_bfloat16_keeps_its_scalars_and_its_frequencies(tmp_path: Path) -> None:
    model = model_of(dtype=torch.bfloat16)
    theirs = exported(model, tmp_path / "model")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.residual_scales, model.model.residual_scales)
    assert theirs.residual_scales.dtype == torch.float32
    assert theirs.config.frequencies == model.model.rotary.frequencies.tolist()
    inputs = rows_of_documents()
    found, expected = theirs(inputs).logits, model(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    again = load_file(tmp_path / "model" / "model.safetensors")
    assert again["head.weight"].shape == again["embedding.weight"].shape == (257, 32)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    theirs = exported(model_of(), tmp_path / "model")
    with pytest.raises(ValueError, match="keeps no cache: pass use_cache=False"):
        theirs.generate(torch.tensor([[BYTES_BOS, 5]]), max_new_tokens=3, use_cache=True)
    with pytest.raises(ValueError, match="resize_token_embeddings: a speedrun's model has more tables"):
        theirs.resize_token_embeddings(300)


def test_the_code_stands_alone_and_an_export_replaces_an_export(tmp_path: Path) -> None:
    exported(model_of(), tmp_path / "model")
    exported(model_of(), tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.py"))
    assert [file.stem for file in files] == ["functions", "modeling_speedrun", "speedrun_layers", "speedrun_sizes"]
    for code in (file.read_text() for file in files):
        assert "import quintic" not in code
        assert "from quintic" not in code
    model = (tmp_path / "model" / "modeling_speedrun.py").read_text()
    assert all(f"\nfrom .{file.stem} import" in model for file in files if file.stem != "modeling_speedrun")
    assert Tokenizer.load(tmp_path / "model" / "tokenizer.json").bos_id == BYTES_BOS
    assert not any(name.startswith("quintic") and "modeling" in name for name in sys.modules)
