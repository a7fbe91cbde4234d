"""The defaults that a machine and a text get: they must train the text that is there, on a GPU as on a CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from quintic.cli import main
from quintic.commands.inputs import check_options, check_text
from quintic.commands.options import training_options
from quintic.commands.presets import PRESETS, preset
from quintic.data.dataset import Dataset, DocumentSplit
from quintic.data.loader import Loader
from quintic.data.preparation import prepare
from quintic.errors import DataError
from quintic.report.history import METRICS_FILE, read_metrics
from quintic.train.distributed import micro_batch_rows
from quintic.train.saved_config import with_options
from quintic.train.schedule import reading_lines


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let options be read as on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture(scope="module")
def python_text(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The text of this Python installation, prepared as the defaults of a GPU without --data ask for."""
    data = preset("gpu-small").data
    folder = tmp_path_factory.mktemp("python")
    return prepare(data.data, data_dir=folder, vocab_size=data.vocab_size, val_frac=data.val_frac)


@pytest.mark.parametrize("command", ["train", "compare", "plan"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "gpu-small"),
        (["--depth", "6"], "gpu-small"),
        (["--data", "python"], "gpu-small"),
        (["--data=python"], "gpu-small"),
        (["--data", "texts"], "gpu"),
        (["--data=hf:owner/name"], "gpu"),
        (["--data", "texts", "--preset", "gpu-small"], "gpu-small"),
        (["--preset", "gpu"], "gpu"),
        (["--device", "cpu"], "cpu"),
        (["--device", "cpu", "--data", "texts"], "cpu"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_device_and_text_decide_the_defaults(command: str, options: list[str], expected: str) -> None:
    start = training_options([command, *options][1:], command)
    assert start.preset == expected
    sizes = dataclasses.replace(preset(expected).model, depth=start.config.model.depth)
    assert start.config.model == sizes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_data_has_text_enough_for_its_defaults(ranks: int, python_text: Dataset) -> None:
    config = training_options([], "train").config
    check_text(config, python_text)
    rows = micro_batch_rows(config, ranks)
    assert config.schedule.batch_tokens is not None
    assert rows * config.model.seq_len * ranks <= config.schedule.batch_tokens
    with Loader(python_text, "train", rows=rows, seq_len=config.model.seq_len, world_size=ranks) as loader:
        assert next(loader).inputs.numel() == rows * config.model.seq_len
    assert config.schedule.steps is not None
    run_tokens = config.schedule.steps * config.schedule.batch_tokens
    passes, *warnings = reading_lines(run_tokens, python_text.split("train").num_tokens)
    assert warnings == []
    assert 1 < float(passes.split()[0]) < 6


@pytest.mark.slow
def test_the_defaults_of_a_gpu_start(python_text: Dataset, tmp_path: Path) -> None:
    """One step on a whole batch, by a single layer: a CPU stands in for the GPU."""
    options = ["--preset", "gpu-small", "--device", "cpu", "--depth", "1", "--steps", "1", "--sample-tokens", "4"]
    folders = ["--data-dir", str(python_text.path.parent), "--runs-dir", str(tmp_path), "--name", "run"]
    assert main(["train", *options, "--eval-every", "0", "--eval-tokens", "1", *folders]) == 0
    (step,) = (record for record in read_metrics(tmp_path / "run" / METRICS_FILE) if record["kind"] == "train")
    assert step["tokens"] == preset("gpu-small").schedule.batch_tokens


def test_plan_names_the_same_sizes(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    assert main(["plan", "--preset", "gpu-small"]) == 0
    small = capsys.readouterr().out
    assert "Model: depth 8, width 512" in small
    assert "Length: 500 steps" in small
    assert "Precision: bfloat16 activations" in small
    assert main(["plan", "--preset", "gpu"]) == 0
    assert "Model: depth 12, width 768" in capsys.readouterr().out


def test_plan_says_how_often_prepared_text_is_read(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    settings = tiny_dataset.manifest["settings"]
    text = ["--data", tiny_dataset.manifest["source"]["spec"], "--data-dir", str(tiny_dataset.path.parent)]
    options = ["--vocab-size", str(settings["vocab_size"]), "--val-frac", str(settings["val_frac"]), "--depth", "1"]
    tokens = tiny_dataset.split("train").num_tokens
    for steps, warned in ((tokens * 7 // 4096, False), (tokens * 9 // 4096 + 1, True)):
        assert main(["plan", *text, *options, "--steps", str(steps)]) == 0
        printed = capsys.readouterr().out
        assert f"Reading: {steps * 4096 / tokens:.1f} times through the text" in printed
        assert ("Warning: this run reads its text" in printed) is warned


def test_a_horizon_of_many_passes_is_said_with_its_number() -> None:
    assert reading_lines(8_000, 1_000) == ["8.0 times through the text"]
    passes, warning = reading_lines(8_100_000, 1_000)
    assert passes == "8100.0 times through the text"
    assert "reads its text 8,100.0 times" in warning
    assert "--steps" in warning
    assert "--data" in warning


def test_too_little_text_for_a_large_model_names_the_preset_for_it(
    python_text: Dataset, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = dataclasses.replace(preset("gpu"), data=preset("gpu-small").data)
    rows = dataclasses.replace(large, schedule=dataclasses.replace(large.schedule, rows=512))
    with pytest.raises(DataError, match=r"too little text .*--preset gpu-small"):
        check_text(rows, python_text, "gpu")
    # Where it would not help: the preset is chosen already, or has too little text, too.
    with pytest.raises(DataError, match=r"too little text .* give more text$"):
        check_text(rows, python_text, "gpu-small")
    monkeypatch.setattr(DocumentSplit, "num_tokens", 8 * 2049 - 1)
    with pytest.raises(DataError, match=r"too little text .* give more text$"):
        check_text(rows, python_text, "gpu")


def test_a_run_of_days_is_announced_before_its_text_is_prepared(
    capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    # The run itself does not come about: its text does not exist.
    assert main(["train", "--preset", "gpu", "--device", "cpu", "--data", "missing.txt"]) == 2
    printed = capsys.readouterr()
    assert "missing.txt" in printed.err
    (line,) = (line for line in printed.out.splitlines() if line.startswith("Duration: at least "))
    assert " d" in line.replace("\xa0", " ").partition(",")[0]
    assert "--preset cpu trains a small model in minutes" in line
    assert main(["train", "--device", "cpu", "--data", "missing.txt"]) == 2
    assert "Duration" not in capsys.readouterr().out


def test_options_of_every_preset_can_be_checked(elsewhere: Path) -> None:
    for name in PRESETS:
        check_options(with_options(preset(name), device="cpu"))
