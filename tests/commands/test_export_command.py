"""`quintic export`: the folder that a run becomes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import error_of

from quintic.cli import main
from quintic.train.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


def test_a_run_becomes_a_folder(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, folder in (
        ([mine.name], mine / "hf"),
        (["--run", mine.name, "--to", "hf", "--out", "a/folder"], Path("a/folder")),
        ([], mine / "hf"),  # the run started last; the earlier export is replaced
    ):
        assert main(["export", *options, "--runs-dir", str(mine.parent)]) == 0
        assert capsys.readouterr().out == f"{folder}\n"
        weights = load_file(folder / "model.safetensors")
        expected = load_file(checkpoints(mine)[0] / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert main(["eval", "--runs-dir", str(mine.parent), "--tokens", "256"]) == 0  # the run is none the worse


def test_mistakes_are_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_dir = str(mine.parent)
    message = error_of(capsys, "export", "absent", "--runs-dir", runs_dir)
    assert message == f"{mine.parent / 'absent'} is not a run: it has no config.json; check --run and --runs-dir"
    assert error_of(capsys, "export", "--to", "gguf", "--runs-dir", runs_dir).startswith("--to gguf: give hf")
    message = error_of(capsys, "export", "--runs-dir", runs_dir, "--out", str(mine))
    assert message == f"--out {mine}: holds something other than an export; name a new folder"
