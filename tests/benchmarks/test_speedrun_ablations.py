"""The speedrun's ablations: what the table says of runs, and that runs are made, kept and not made again."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import read_rows
from benchmarks.speedrun.ablations import WHOLE, main, parse, table_rows, the_track
from quintic.speedrun.stages import SPEEDRUN

OPTIONS = ["--preset", "speedrun-tiny", "--shards", "python", "--steps", "8"]


def row(without: str, seed: int, loss: float, seconds: float) -> dict[str, Any]:
    return {"without": without, "seed": seed, "loss": loss, "stage_ms": [1000 * seconds], "seconds": seconds}


def test_differences_are_those_of_the_same_seed() -> None:
    rows = [
        *(row(WHOLE, 1, 4.0, 10.0), row("skip", 1, 4.1, 9.0)),
        *(row(WHOLE, 2, 5.0, 10.0), row("skip", 2, 5.3, 9.5)),
        *(row("smear", 2, 5.5, 10.0), row("yarn", 3, 9.0, 10.0)),  # no run with all features to compare the last with
    ]
    found = {cells[0]: cells for cells in table_rows(rows)}
    assert list(found) == [WHOLE, "smear", "skip", "yarn"]  # the dearest in loss first
    assert found["skip"][1:] == ["4.1000, 5.3000", "+0.2000", "9250.0", "9.25", "-7.5 %"]
    assert found["smear"][2] == "+0.5000"
    assert (found["yarn"][2], found[WHOLE][2]) == ("-", "-")


def test_a_share_divides_batches_alone() -> None:
    options = parse(["--shards", "s", "--out", "o", "--steps", "120", "--share", "4"])
    track = the_track(options)
    assert [track.at(step).batch_tokens for step in track.starts] == [32_768, 65_536, 98_304, 98_304]
    assert track.at(100).windows == SPEEDRUN.scaled(120).at(100).windows
    assert track.eval_every == track.steps == 120


@pytest.mark.slow
def test_runs_are_kept_and_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--out", str(tmp_path), "--commit", "c", "--jobs", "2"]
    assert main([*options, "--only", "smear"]) == 0
    rows = read_rows(tmp_path / "ablations.jsonl")
    assert {(one["without"], one["seed"]) for one in rows} == {(WHOLE, 1337), ("smear", 1337)}
    assert all(len(one["stage_ms"]) == 4 and one["loss"] < 6 for one in rows)
    capsys.readouterr()
    assert main([*options, "--only", "smear", "skip"]) == 0
    assert read_rows(tmp_path / "ablations.jsonl")[:2] == rows
    assert capsys.readouterr().out.startswith('{"without": "skip"')
    assert "| skip | " in (tmp_path / "ablations.md").read_text("utf-8")
