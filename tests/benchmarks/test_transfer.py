"""The grid, the best rates and the page of `benchmarks.training.transfer`, whose runs take minutes."""

import math
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import transfer, transfer_page
from benchmarks.training.workers import Runs, with_values
from quintic.train.config import Config
from quintic.train.recipe import model_config


def options(*words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["transfer", "--out", "folder", *words])
    parsed = transfer.arguments()
    parsed.depth, parsed.head_dim = 6, 64
    return parsed


@pytest.mark.parametrize(("width", "depth", "head_dim"), [(256, 6, 64), (512, 6, 64), (32, 3, 32), (1024, 6, 128)])
def test_widths_are_the_model_s(width: int, depth: int, head_dim: int) -> None:
    ratio = transfer.aspect_ratio(width, depth, head_dim)
    config = with_values(Config(), {"aspect_ratio": ratio, "depth": depth, "head_dim": head_dim})
    assert model_config(config, vocab_size=300, bos_id=0).width == width


@pytest.mark.parametrize(("width", "depth", "head_dim"), [(100, 2, 64), (64, 65, 64)])
def test_a_width_that_no_model_has_is_refused(width: int, depth: int, head_dim: int) -> None:
    with pytest.raises(SystemExit, match=f"--widths {width}"):
        transfer.aspect_ratio(width, depth, head_dim)


def parabola(rate: float, best: float) -> float:
    return 3 + math.log(rate / best) ** 2


@pytest.mark.parametrize("best", [0.021, 0.03, 0.055])
def test_the_best_rate_is_the_vertex_of_a_parabola(best: float) -> None:
    losses = {rate: parabola(rate, best) for rate in (0.01, 0.02, 0.03, 0.08, 0.1)}
    assert transfer_page.vertex(losses) == pytest.approx(best)
    assert transfer_page.vertex({**losses, 0.5: math.inf}) == pytest.approx(best)


def test_a_best_rate_at_the_end_of_the_grid_is_no_vertex() -> None:
    rates = (0.01, 0.02, 0.04)
    assert transfer_page.vertex({rate: parabola(rate, 0.001) for rate in rates}) == 0.0
    assert transfer_page.vertex({rate: parabola(rate, 1.0) for rate in rates}) == math.inf
    assert transfer_page.vertex({0.01: 4.0, 0.02: 3.0, 0.04: math.inf}) == 0.02
    assert transfer_page.rate_shown(0.0, rates) == "< 0.01"
    assert transfer_page.rate_shown(math.inf, rates) == "> 0.04"


class FakePool:
    """Answers at once; `cut` after a number of jobs."""

    def __init__(self, number: int) -> None:
        self.left, self.jobs = number, []

    def submit(self, job: Any) -> "Future[dict[str, Any]]":
        done: Future[dict[str, Any]] = Future()
        made = job()
        self.jobs.append(made)
        self.left -= 1
        computing = {"machine": {"device": "CPU"}, "versions": {"torch": "2"}}
        if self.left < 0:
            done.set_result({"cut": "not started: the time was over"})
        elif made["config"] == "bad":
            done.set_result({"failed": "it broke"})
        else:
            done.set_result({"loss": made["config"], "seconds": time.time(), **computing})
        return done


def test_runs_are_kept_and_not_made_again(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    jobs = [({"rate": rate}, {"config": loss}) for rate, loss in ((1, 3.5), (2, None), (3, "bad"), (4, 3.0))]
    runs = Runs(log, {"depth": 2})
    runs.train(FakePool(3), jobs)  # type: ignore[arg-type]
    assert [row["loss"] for row in runs.rows.values()] == [3.5, None]
    assert runs.failures == ["rate=3: it broke"]
    assert runs.row({"rate": 4}) is None
    again, pool = Runs(log, {"depth": 2}), FakePool(9)
    assert again.computing == {"machine": {"device": "CPU"}, "versions": {"torch": "2"}}
    again.train(pool, jobs[3:] + jobs[:2])  # type: ignore[arg-type]
    assert [job["config"] for job in pool.jobs] == [3.0]
    assert Runs(log, {"depth": 3}).rows == {}


def test_losses_are_found_by_rate_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = options("--warmups", "0.02", "--rates", "0.1", "0.2", "--side-rates", "0.1", monkeypatch=monkeypatch)
    lines = {line.study: line for line in transfer.lines_of(parsed)}
    runs, base = Runs(tmp_path / "runs.jsonl", {}), Config()
    cell = {**lines["width"].values, "muon_lr": 0.1, "seed": 2}
    middle = next(line for line in transfer.lines_of(parsed) if line.label == "width 128")
    cell = transfer.with_defaults({**middle.values, "muon_lr": 0.1, "seed": 2}, base)
    runs.train(FakePool(1), [(cell, {"config": 3.0})])  # type: ignore[arg-type]
    assert transfer.losses_by_rate(middle, [1, 2], runs, base) == {"0.1": {"2": 3.0}}
    assert transfer.losses_by_rate(lines["warm-up"], [1, 2], runs, base) == {"0.1": {"2": 3.0}}  # the default's share
    assert transfer.losses_by_rate(lines["AdamW, width"], [1, 2], runs, base) == {}
