"""`quintic eval --core`: the tasks that are in a folder, those that are not, and their mean."""

import json
import re
from pathlib import Path

import pytest
from tiny_runs import error_of

from quintic.cli import main

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


def test_eval_answers_the_tasks_of_core(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    item = {"query": "def model", "choices": ["step", "loss batch", "zyx"], "gold": 2}
    (tmp_path / "core").mkdir()
    for name in ("copa", "piqa"):
        (tmp_path / "core" / f"{name}.jsonl").write_text((json.dumps(item) + "\n") * 12)
    options = ["eval", "--runs-dir", str(trained.parent), "--tokens", "256", "--core", str(tmp_path / "core")]
    assert main([*options, "--core-items", "3"]) == 0
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(copa|piqa) +3 +0\.0000 +(-\d\.\d{4})$", printed, re.MULTILINE))
    assert rows == {
        "copa": "-1.0000",
        "piqa": "-1.0000",
    }  # the unlikely one is never chosen
    assert "longer than the model's rows, so that their beginning was lost: " in printed  # ten examples in 32 tokens
    assert "missing: hellaswag_zeroshot, jeopardy, " in printed
    assert printed.splitlines()[-1] == (
        "mean over 2 of the 22 tasks of CORE: -1.0000 (standard error over items unknown, as these items are too few "
        "to tell)"
    )
    assert error_of(capsys, *options, "--core-items", "0") == "--core-items 0: must be at least 1"
    missing = str(tmp_path / "absent")
    assert error_of(capsys, "eval", "--runs-dir", str(trained.parent), "--core", missing).startswith(
        f"{missing}: holds no task of CORE; give a folder with files such as arc_easy.jsonl"
    )
