"""The README's chart and table: what they show follows from the results."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.readme import chart, curves, figures
from benchmarks.training.quality_page import steps_to_reach

ROOT = Path(__file__).resolve().parents[2]


def run_of(optimizer: str, seed: int, values: list[float], seconds: float) -> dict[str, Any]:
    curve = [[20.0 * (i + 1), value] for i, value in enumerate(values)]
    times = [seconds * (i + 1) / len(values) for i in range(len(values))]
    return {"optimizer": optimizer, "seed": seed, "curve": curve, "curve_seconds": times}


RUNS = [
    run_of("adamw", 1, [3.0, 2.0, 1.6, 1.4], 8.0),
    run_of("adamw", 2, [3.2, 2.2, 1.7, 1.5], 8.0),
    run_of("adamw", 3, [3.1, 2.1, 1.8, 1.6], 8.0),
    run_of("muon", 1, [2.6, 1.6, 1.4, 1.2], 10.0),
    run_of("muon", 2, [2.6, 1.8, 1.2, 1.1], 10.0),
    run_of("muon", 3, [2.8, 1.7, 1.5, 1.3], 10.0),
]


def test_the_share_is_that_of_a_straight_line_between_evaluations() -> None:
    # AdamW's seeds end at a median of 1.5 after 80 steps and 8 seconds; Muon's steps take 1.25 times as long.
    expected = [50 / 80, 50 / 80, 60 / 80]
    assert chart.shares(curves.curves_in({"runs": RUNS}), "steps") == pytest.approx(expected)
    assert chart.shares(curves.curves_in({"runs": RUNS}), "seconds") == pytest.approx(
        [1.25 * share for share in expected]
    )


def test_a_curve_that_never_gets_there_has_no_share() -> None:
    assert steps_to_reach([(1, 3.0), (2, 2.0)], 1.5) is None
    assert steps_to_reach([(1, 3.0), (2, 2.0)], 3.5) == 1
    never = run_of("muon", 4, [3.0, 2.9, 2.8, 2.7], 10.0)
    assert len(chart.shares(curves.curves_in({"runs": [*RUNS, never]}), "steps")) == 3


def test_runs_with_other_evaluations_are_refused() -> None:
    with pytest.raises(ValueError, match="after the same steps"):
        chart.curves_of([RUNS[0], run_of("adamw", 4, [3.0, 2.0], 8.0)])


@pytest.mark.parametrize("theme", chart.THEMES)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_the_drawing_is_text_in_the_colours_of_its_theme(theme: str, is_narrow: bool) -> None:
    drawn = chart.draw(curves.curves_in({"runs": RUNS}), theme, is_narrow=is_narrow)
    assert drawn == chart.draw(curves.curves_in({"runs": RUNS}), theme, is_narrow=is_narrow)
    root = ElementTree.fromstring(drawn)
    width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    assert (width < height) == is_narrow
    words = " ".join(root.itertext())
    for word in ("AdamW 1.50", "Muon 1.20", "62 % of AdamW's steps", "78 % of AdamW's seconds", "bits per byte"):
        assert word in words
    assert chart.THEMES[theme]["muon"] in drawn


def timed(contestant: str, ms: float, **row: Any) -> dict[str, Any]:
    times = {"median": ms, "q1": ms, "q3": ms, "least": ms, "n": 30}
    return {"set": "gpt124m", "contestant": contestant, "step_ms": times, **row}


RESULT = {
    "curves": {"runs": RUNS},
    "one": {"rows": [timed("torch-muon", 22.8), timed("quintic", 3.1), timed("nanochat", 4.9), {"error": "no"}]},
    "layouts": {
        "rows": [
            timed("quintic", 4.2, layout="fsdp2", differing_entries=0),
            timed("quintic", 2.6, layout="ddp", differing_entries=0),
            timed("dion-muon", 7.9, layout="fsdp2"),
        ]
    },
}


ONE_GPU = "**3.10 ms**; nanochat 4.90, torch.optim.Muon 22.8"


LINKS = dict.fromkeys(RESULT, "result.md")


def test_the_table_has_a_row_for_each_claim_with_the_page_of_its_part() -> None:
    assert figures.rows(RESULT, LINKS | {"curves": "curves.md"}) == [
        ("[Weights under DDP, FSDP2, against one device's](result.md)", "the same bits"),
        ("[Steps until Muon reaches AdamW's final loss](curves.md)", "62 % (62 to 75, 3 seeds)"),
        ("[Seconds until Muon reaches AdamW's final loss](curves.md)", "78 % (78 to 94, 3 seeds)"),
        (
            "[`optimizer.step()`, one GPU, 124M parameters](result.md)",
            ONE_GPU,
        ),
        ("[`optimizer.step()`, two GPUs, FSDP2, 124M parameters](result.md)", "**4.20 ms**; dion 7.90"),
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_table_takes_the_place_of_the_one_before(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    once = figures.in_page(text, RESULT, LINKS)
    assert "nanochat 4.90" in once
    assert figures.in_page(once, RESULT, LINKS) == once
    begin, _, rest = once.partition("<!-- figures")
    assert text.startswith(begin)
    assert text.endswith(rest.rpartition("end of figures -->")[2])


def test_a_page_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        figures.in_page("# A page", RESULT, LINKS)
