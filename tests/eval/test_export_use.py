"""What people do with an export in transformers: new tokens, fine-tuning in little memory, adapters, pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import load
from test_generate import model_of
from torch import Tensor, nn

from quintic.data.dataset import Dataset
from quintic.eval.export import export_hf
from quintic.model.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_module_cache")


@pytest.fixture
def folder(tiny_dataset: Dataset, tmp_path: Path) -> Path:
    """The export of a model with random weights and value embeddings."""
    model = model_of("SSL", vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    assert model.value_embeddings
    return export_hf(model, tiny_dataset.tokenizer, tmp_path / "model")


def tokens_of(dataset: Dataset, rows: int = 2, length: int = 12) -> Tensor:
    ids = torch.randint(dataset.vocab_size, (rows, length))
    ids[:, 0] = dataset.bos_id
    return ids


def tables_of(model: Any) -> dict[str, nn.Module]:
    """All modules with an entry for each token."""
    return {"embedding": model.embedding, "head": model.head, **dict(model.value_embeddings.items())}


@torch.no_grad()
def test_new_tokens_change_nothing_for_the_old_ones(folder: Path, tiny_dataset: Dataset, tmp_path: Path) -> None:
    model, size = load(folder), tiny_dataset.vocab_size
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]}) == 2
    ids = tokens_of(tiny_dataset)
    before = {name: table.weight.clone() for name, table in tables_of(model).items()}
    logits = model(ids).logits
    returned = model.resize_token_embeddings(len(tokenizer))
    assert returned is model.get_input_embeddings() is model.embedding
    assert model.config.vocab_size == len(tokenizer) == size + 2
    torch.testing.assert_close(model(ids).logits[..., :size], logits, rtol=0, atol=1e-6)
    for name, table in tables_of(model).items():
        assert len(table.weight) == size + 2, name
        assert torch.equal(table.weight[:size], before[name]), name
    for name, table in model.value_embeddings.items():
        torch.testing.assert_close(table.weight[size:], before[name].mean(0).expand(2, -1))
    assert model.head.out_features == size + 2
    # The new tokens can be read, generated from with a cache, saved and loaded.
    new = torch.tensor([[tiny_dataset.bos_id, size, 5, size + 1]])
    made = [model.generate(new, max_new_tokens=8, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert made[0].tolist() == made[1].tolist()
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again(new).logits, model(new).logits)
    # Fewer again, and a multiple of 64.
    again.resize_token_embeddings(size)
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=1e-6)
    again.resize_token_embeddings(size, pad_to_multiple_of=64)
    assert {len(table.weight) % 64 for table in tables_of(again).values()} == {0}


def test_new_tokens_learn(folder: Path, tiny_dataset: Dataset) -> None:
    model, size = load(folder).train(), tiny_dataset.vocab_size
    model.embedding.weight.requires_grad_(False)
    model.value_embeddings["0"].weight.requires_grad_(False)
    model.resize_token_embeddings(size + 1)
    assert not model.value_embeddings["0"].weight.requires_grad  # what was frozen stays so
    ids = torch.tensor([[tiny_dataset.bos_id, size, 5, size]])
    model(ids, labels=ids).loss.backward()
    others = [table for name, table in model.value_embeddings.items() if name != "0"]
    assert others
    for table in (*others, model.head):
        assert table.weight.grad[size].abs().sum() > 0


@torch.no_grad()
def test_new_tokens_have_no_rows_in_lookup_layers(tiny_dataset: Dataset, tmp_path: Path) -> None:
    size = tiny_dataset.vocab_size
    model = GPT(
        GPTConfig(
            vocab_size=size, depth=2, width=32, head_dim=16, num_kv_heads=2, seq_len=16, bos_id=tiny_dataset.bos_id,
            l3_layers=(0,), l3_embeddings=2 * size, l3_d_up=24,
        )
    )  # fmt: skip
    model.init_weights()
    model.allocate_lookups(torch.full((size,), 2), mean_rows=2.0)
    exported = load(export_hf(model, tiny_dataset.tokenizer, tmp_path / "model"))
    ids = tokens_of(tiny_dataset)
    logits = exported(ids).logits
    exported.resize_token_embeddings(size + 3)
    assert exported.lookup_offsets.tolist() == [*range(0, 2 * size, 2), *[2 * size] * 4]
    torch.testing.assert_close(exported(ids).logits[..., :size], logits, rtol=0, atol=1e-6)
    assert exported(torch.tensor([[size, 5, size + 2]])).logits.isfinite().all()
    exported.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").lookup_offsets, exported.lookup_offsets)
    exported.resize_token_embeddings(size - 3)
    assert exported.lookup_offsets.tolist() == [*range(0, 2 * size - 5, 2)]


def test_a_model_from_its_configuration_is_untied_unless_asked(folder: Path, tmp_path: Path) -> None:
    for tied in (False, True):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        config.tie_word_embeddings = tied
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        ids = torch.tensor([[1, 2, 3, 4]])
        model(ids, labels=ids).loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        model.resize_token_embeddings(config.vocab_size + 5)
        model.save_pretrained(tmp_path / f"{tied}")
        for one in (model, load(tmp_path / f"{tied}")):
            assert (one.head.weight is one.embedding.weight) == tied
            assert one.head.weight.shape == one.embedding.weight.shape
        assert torch.equal(load(tmp_path / f"{tied}")(ids).logits, model.eval()(ids).logits)


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_computes_blocks_twice_and_the_same(
    use_reentrant: bool, folder: Path, tiny_dataset: Dataset
) -> None:
    model, ids = load(folder).train(), tokens_of(tiny_dataset)
    calls = []
    model.blocks[1].mlp.up.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients(**options: Any) -> dict[str, Tensor]:
        calls.clear()
        model.zero_grad()
        output = model(ids, labels=ids, **options)
        output.loss.backward()
        assert (output.past_key_values is None) or not model.is_gradient_checkpointing
        return {name: param.grad.clone() for name, param in model.named_parameters()}

    expected = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    found = gradients(use_cache=True)  # which would be filled twice
    assert len(calls) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0, msg=name)
    model.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == 1


@torch.no_grad()
def test_a_pipeline_generates_what_the_model_does(folder: Path) -> None:
    write = transformers.pipeline("text-generation", model=str(folder), trust_remote_code=True)
    text = write("def model", max_new_tokens=6, do_sample=False)[0]["generated_text"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    made = load(folder).generate(**tokenizer("def model", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert text == tokenizer.decode(made[0], skip_special_tokens=True)


@torch.no_grad()
def test_hidden_states_and_tuples_can_be_asked_for(folder: Path, tiny_dataset: Dataset) -> None:
    model, ids = load(folder), tokens_of(tiny_dataset)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    softcap = model.config.softcap
    torch.testing.assert_close(softcap * torch.tanh(model.head(output.hidden_states[-1]) / softcap), output.logits)
    assert model(ids).hidden_states is None
    (logits,) = model(ids, return_dict=False)
    assert torch.equal(logits, output.logits)


@torch.no_grad()
def test_what_cannot_be_asked_for_is_said(folder: Path, tiny_dataset: Dataset) -> None:
    model, ids = load(folder), tokens_of(tiny_dataset, rows=1, length=3)
    with pytest.raises(ValueError, match="give input_ids: value embeddings are looked up by token"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="must be a DynamicCache: leave cache_implementation out"):
        model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="static")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", ["all-linear", ["query", "value"]])
def test_adapters_of_peft_train_save_and_merge(
    targets: str | list[str], folder: Path, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False)
    model, ids = peft.get_peft_model(load(folder), config), tokens_of(tiny_dataset)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    trained = {name: param.grad is not None for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    assert all(trained.values())
    assert all("lora" in name for name in trained)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    logits = model(ids).logits
    assert not torch.allclose(logits, load(folder)(ids).logits)
    torch.testing.assert_close(again(ids).logits, logits)
    torch.testing.assert_close(again.merge_and_unload()(ids).logits, logits, rtol=1e-4, atol=1e-4)
