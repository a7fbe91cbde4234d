"""lm-evaluation-harness on an exported model: its scores are those of the model. Skipped where it is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cache import copy_modules_to
from test_generate import generate, model_of

from quintic.data.dataset import Dataset
from quintic.eval.export import export_hf

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

ITEMS: list[dict[str, Any]] = [
    {"question": "def model", "choices": ["step", "loss batch", "rows"], "answer": 1},
    {"question": "batch = weight", "choices": ["token", "epoch epoch epoch", "cache"], "answer": 0},
    {"question": "return", "choices": ["state", "gradient", "model rows"], "answer": 2},
]


def test_its_scores_are_those_of_the_model(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    copy_modules_to(tmp_path / "modules", monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    tokenizer = tiny_dataset.tokenizer
    model = model_of("SL", vocab_size=tiny_dataset.vocab_size, bos_id=tiny_dataset.bos_id)
    folder = export_hf(model, tokenizer, tmp_path / "model")
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "own.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    texts = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
    }
    for name, own in (("choices", choices), ("texts", texts)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},trust_remote_code=True,add_bos_token=True",
        tasks=["choices", "texts"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
    )
    for sample in found["samples"]["choices"]:
        item = ITEMS[sample["doc_id"]]
        context = [tokenizer.bos_id, *tokenizer.encode(item["question"])]
        for choice, ((likelihood, _),) in zip(item["choices"], sample["resps"], strict=True):
            whole = [tokenizer.bos_id, *tokenizer.encode(f"{item['question']} {choice}")]
            with torch.no_grad():
                logs = model(torch.tensor([whole]))[0].double().log_softmax(-1)
            expected = sum(float(logs[i - 1, whole[i]]) for i in range(len(context), len(whole)))
            assert likelihood == pytest.approx(expected, rel=1e-4)
    for sample in found["samples"]["texts"]:
        prompt = [tokenizer.bos_id, *tokenizer.encode(ITEMS[sample["doc_id"]]["question"])]
        expected_text = tokenizer.decode(generate(model, prompt, max_tokens=8, temperature=0))
        assert sample["resps"][0][0] == expected_text.split("\n\n")[0]
