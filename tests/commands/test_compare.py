"""The comparison: two runs that differ in the optimizer of the matrices alone."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_config

from quintic.commands import compare as module
from quintic.commands.compare import compare, variants
from quintic.commands.options import training_options
from quintic.data.dataset import Dataset
from quintic.errors import ConfigError
from quintic.report.history import RunHistory
from quintic.train.loop import train
from quintic.train.saved_config import changed_fields, load_config


def test_both_runs_start_alike_and_see_the_same_text(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_drawings: None
) -> None:
    found = compare(*variants(tiny_config(tiny_dataset, tmp_path, run="c")), tiny_dataset, command="quintic compare")
    adamw, muon = (load_config(tmp_path / f"c-{kind}" / "config.json") for kind in ("adamw", "muon"))
    assert changed_fields(adamw, muon).keys() == {"optim.optimizer", "run.run"}
    histories = [RunHistory.load(tmp_path / f"c-{kind}") for kind in ("adamw", "muon")]
    # The same weights and batch: the losses of the first step agree to the last bit, later ones do not.
    first, last = ([history.train[index]["loss"] for history in histories] for index in (0, -1))
    assert first[0] == first[1]
    assert last[0] != last[1]
    assert found.endswith(f"report: {tmp_path / 'c.html'}")
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "AdamW" in page
    assert "Muon" in page
    # One option per optimizer: the page tells what each run really used.
    rates = [max(record["lr"]["matrices"] for record in history.train) for history in histories]
    row = re.search(r"peak learning rate, matrices</th>\s*<td[^>]*>([^<]*)</td>\s*<td[^>]*>([^<]*)</td>", page)
    assert row is not None
    assert [float(row[1]), float(row[2])] == pytest.approx(rates, rel=1e-3)
    printed = capsys.readouterr().out
    assert printed.index("=== AdamW ===") < printed.index("=== Muon ===")


@pytest.mark.slow
def test_several_seeds_are_compared_by_their_medians(
    tiny_dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_dataset, tmp_path, run="c", steps=2)
    compare(*variants(config, seeds=2), tiny_dataset, command="quintic compare")
    first = config.run.seed
    losses = {}
    for kind in ("adamw", "muon"):
        folders = [tmp_path / f"c-{kind}-seed{seed}" for seed in (first, first + 1)]
        losses[kind] = [RunHistory.load(folder).final["loss"] for folder in folders]
        assert load_config(folders[1] / "config.json").run.seed == first + 1
        assert losses[kind][0] != losses[kind][1]
    page = (tmp_path / "c.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "Muon (median and range of 2 runs)" in page
    for low, high in map(sorted, losses.values()):
        assert f">{(low + high) / 2:.4f} ({low:.4f} to {high:.4f})<" in page
    printed = capsys.readouterr().out
    assert re.findall("=== (.*) ===", printed) == [
        f"{n}, seed {s}" for s in (first, first + 1) for n in ("AdamW", "Muon")
    ]


def test_seeds_are_an_option_of_the_command() -> None:
    assert training_options(["--seeds", "3"], "compare").seeds == 3
    assert training_options([], "compare").seeds == 1
    for wrong in ("0", "two", "-1", "1001"):
        with pytest.raises(ConfigError, match=f"--seeds {wrong}: needs a whole number of seeds from 1 to 1,000"):
            training_options(["--seeds", wrong], "compare")
    with pytest.raises(ConfigError, match="--seeds"):
        training_options(["--seeds", "3"], "train")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_both_names_are_checked_before_the_first_run(kind: str, tiny_dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / f"c-{kind}").mkdir()
    (tmp_path / f"c-{kind}" / "config.json").touch()
    with pytest.raises(ConfigError, match=f"c-{kind} exists: choose another --run"):
        variants(tiny_config(tiny_dataset, tmp_path, run="c"))
    assert [path.name for path in tmp_path.iterdir()] == [f"c-{kind}"]


@pytest.mark.slow
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any, *args: Any, **options: Any) -> Any:
        if config.optim.optimizer == "muon":
            raise ConfigError("no")
        return train(config, *args, **options)

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(ConfigError, match="no"):
        compare(*variants(tiny_config(tiny_dataset, tmp_path, run="c")), tiny_dataset, command="")
    assert [path.name for path in tmp_path.iterdir()] == ["c-adamw"]
