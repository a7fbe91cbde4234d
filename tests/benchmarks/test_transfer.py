"""The widths and the best rates of `benchmarks.training.transfer`, whose runs take minutes."""

import math
import re
from pathlib import Path

import pytest

from benchmarks import train_throughput
from benchmarks.training import transfer, transfer_page
from benchmarks.training.workers import with_values
from quintic.train.config import Config
from quintic.train.recipe import model_config


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


def test_the_figures_can_be_read_on_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = {
        "study": "width",
        "label": "width 64",
        "rates": [0.01, 0.02],
        "losses": {"0.01": {"1": 4.0}, "0.02": {"1": 3.5}},
    }
    transfer_page.draw(tmp_path / "transfer.svg", {"lines": [line]})
    row = {"contestant": "quintic", "evaluations": [[50, 1.5], [100, 1.25]]}
    train_throughput.draw(tmp_path / "throughput.svg", [row])
    for path in tmp_path.glob("*.svg"):
        drawing = path.read_text("utf-8")
        # Nothing is filled with white behind the curves, and no text is black.
        assert "#ffffff" not in drawing
        assert "#7b818b" in drawing
        assert not re.search(r"<text[^>]*(fill: #000000|style=\"(?!.*fill))", drawing)
