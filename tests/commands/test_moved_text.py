"""Runs whose text was moved, changed or lost since they began."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import error_of, tiny_options

from quintic.cli import main
from quintic.commands.options import read_command, training_options
from quintic.commands.plan import planned_vocabulary
from quintic.commands.text import prepared
from quintic.data.dataset import Dataset
from quintic.report.history import RunHistory

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


def test_a_run_goes_on_although_its_text_was_moved(
    tiny_dataset: Dataset, tiny_text: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    text, data = elsewhere / "text", elsewhere / "data"
    shutil.copytree(tiny_text, text)
    shutil.copytree(tiny_dataset.path, data / tiny_dataset.path.name)
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run", steps=2, eval_every=0, save_every=1)
    assert main(["train", *options, "--data", "text", "--data-dir", "data"]) == 0
    again = ["train", "--resume", "--resume-step", "1"]
    (text / "more.txt").write_text("new words\n" * 50)  # after the run began: not its text
    capsys.readouterr()
    assert main(again) == 0
    told = f"Continuing with the text as it was prepared in {data / tiny_dataset.path.name}\n"
    assert capsys.readouterr().out.startswith(told)
    (text / "more.txt").unlink()
    text.rename(elsewhere / "moved")
    assert main(again) == 0
    # The prepared text, too, under another name and in another folder.
    data.rename(elsewhere / "other")
    (elsewhere / "other" / tiny_dataset.path.name).rename(elsewhere / "other" / f"any-{tiny_dataset.key}")
    assert main([*again, "--data-dir", "other"]) == 0
    resumed = RunHistory.load(elsewhere / "runs" / "run").resumed
    assert [record["step"] for record in resumed] == [1, 1, 1]
    (elsewhere / "other").rename(elsewhere / "lost")
    message = error_of(capsys, *again)
    assert message.startswith(f"'{text}': no such file or folder; a text source is a path, 'python' or 'hf:")
    assert (
        "to resume run, give the place of its text with --data, or the folder of its prepared text with --data-dir"
        in message
    )
    assert not data.exists()
    assert main([*again, "--data", "moved"]) == 0
    (elsewhere / "moved" / "more.txt").write_text("new words\n" * 50)
    assert "was trained on other text" in error_of(capsys, *again, "--data", "moved")


def test_a_run_whose_prepared_text_is_damaged_makes_it_again(
    tiny_dataset: Dataset, tiny_text: Path, elsewhere: Path
) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run", steps=1, eval_every=0)
    assert main(["train", *options, "--data-dir", "data"]) == 0
    (shard,) = (elsewhere / "data").glob("text-*/train_00000.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    assert main(["train", "--resume", "--resume-step", "1"]) == 0
    assert shard.read_bytes() == content


def test_prepared_text_is_known_by_its_whole_path(tiny_text: Path, elsewhere: Path) -> None:
    shutil.copytree(tiny_text, elsewhere / "text")
    options = ["--data", "text", "--vocab-size", "300"]
    made = prepared(read_command("prepare", options))
    config = training_options(["--preset", "cpu", *options], "plan").config
    assert planned_vocabulary(config.data) == (made.vocab_size, f"read from {made.path}")


def test_a_model_whose_text_is_gone_and_has_changed_is_still_used(
    tiny_dataset: Dataset, tiny_text: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    shutil.copytree(tiny_text, elsewhere / "text")
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run", steps=1, eval_every=0)
    assert main(["train", *options, "--data", "text", "--data-dir", "data"]) == 0
    sample = ["sample", "--tokens", "8", "--prompts", "def"]
    capsys.readouterr()
    assert main(sample) == 0
    written = capsys.readouterr().out
    assert main(["export", "--out", "before"]) == 0
    (elsewhere / "text" / "more.txt").write_text("new words\n" * 50)
    shutil.rmtree(elsewhere / "data")
    capsys.readouterr()
    assert main(sample) == 0
    assert capsys.readouterr().out == written
    assert main(["export", "--out", "after"]) == 0
    assert {path.name: path.read_bytes() for path in (elsewhere / "after").iterdir()} == {
        path.name: path.read_bytes() for path in (elsewhere / "before").iterdir()
    }
    capsys.readouterr()
    assert main(["eval", "--data", str(elsewhere / "text" / "more.txt")]) == 0
    assert "(no byte-bigram model: the run's training text is missing)" in capsys.readouterr().out
    (elsewhere / "core").mkdir()
    item = {"query": "def model", "choices": ["step", "loss"], "gold": 0}
    (elsewhere / "core" / "copa.jsonl").write_text((json.dumps(item) + "\n") * 12)
    assert main(["eval", "--core", "core", "--core-items", "2"]) == 0
    printed = capsys.readouterr()
    assert "The validation text is not scored: " in printed.err
    assert "mean over 1 of the 22 tasks of CORE" in printed.out
    assert error_of(capsys, "eval").endswith("; or score other text with --data, or tasks with --core")


def test_a_resumed_run_of_before_keeps_its_tokenizer_from_then_on(tiny_dataset: Dataset, elsewhere: Path) -> None:
    options = tiny_options(tiny_dataset, elsewhere / "runs", run="run", steps=1, eval_every=0)
    assert main(["train", *options]) == 0
    kept = elsewhere / "runs" / "run" / "tokenizer.json"
    content = kept.read_bytes()
    assert content == (tiny_dataset.path / "tokenizer.json").read_bytes()
    kept.unlink()
    assert main(["train", "--resume", "--resume-step", "1"]) == 0
    assert kept.read_bytes() == content
