"""Charts: lines where their values are, curves that differ without colour, axes labelled to their ends."""

import itertools
import math
import re
from typing import Any

import pytest

from quintic.report.charts import Chart, Curve, line_chart, upper_edge
from quintic.report.formatting import date, duration, format_si, humanize, large_number, value_text

LEFT, RIGHT, TOP, BOTTOM = 56, 388, 28, 220


def chart(*curves: Curve, **options: Any) -> Chart:
    return line_chart(curves, title="t", x_label="x", y_label="y", **options)


def points(drawn: Chart, color: str = "c0") -> list[tuple[float, float]]:
    """The corners of the line of a colour."""
    [line] = re.findall(
        rf'<path d="([^"]*)"[^>]*style="fill: none; [^"]*stroke: var\(--{color}\); stroke-width: 2\b', drawn.svg
    )
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", line)]


def labels(drawn: Chart) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawn.svg)


def test_a_line_is_drawn_where_its_values_are() -> None:
    drawn = chart(Curve(label="a", x=[0, 50, 100], y=[0.0, 5.0, 10.0]), y_limits=(0.0, None))
    assert points(drawn) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]
    assert labels(drawn) == ["0", "20", "40", "60", "80", "100", "x", *["0", "2", "4", "6", "8", "10"], "y"] or labels(
        drawn
    )


def test_texts_are_texts_and_escaped() -> None:
    drawn = line_chart([Curve(label="a", x=[0, 1], y=[1.0, 2.0])], title='<b> "t"', x_label="$x$ <i> & あ", y_label="y")
    assert "$x$ &lt;i&gt; &amp; あ" in labels(drawn)
    assert 'aria-label="&lt;b&gt; &quot;t&quot;, by $x$ &lt;i&gt; &amp; あ"' in drawn.svg
    assert "font-family" not in drawn.svg
    assert "<style" not in drawn.svg


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (57, ["0", "20", "40", "57"]),
        (60, ["0", "20", "40", "60"]),
        (3, ["0", "1", "2", "3"]),
        (1, ["0", "1"]),
        (16.3556, ["0", "5", "10", "16.4"]),
        (245_760, ["0", "100K", "200K", "246K"]),
    ],
)
def test_the_x_axis_is_labelled_to_its_end(last: float, expected: list[str]) -> None:
    drawn = chart(Curve(label="a", x=[0, last / 2 if last > 3 else last, last], y=[1.0, 2.0, 3.0]))
    found = labels(drawn)
    assert found[: found.index("x")] == expected
    assert points(drawn)[-1][0] == RIGHT


@pytest.mark.parametrize(
    ("low", "high", "log_y", "expected"),
    [
        (1.95, 3.66, False, ["1.5", "2", "2.5", "3", "3.5", "4"]),
        (2.0, 2.0, False, ["1.9", "1.95", "2", "2.05", "2.1"]),
        (0.0, 0.0, False, ["-0.06", "-0.04", "-0.02", "0", "0.02", "0.04", "0.06"]),
        (3e-7, 2e-2, True, ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1"]),
        (0.23, 0.7, True, ["0.2", "0.5", "1"]),
        (0.1, 1.0, True, ["0.1", "0.2", "0.5", "1"]),
    ],
)
def test_the_y_axis_goes_from_one_label_to_another(low: float, high: float, log_y: bool, expected: list[str]) -> None:
    drawn = chart(Curve(label="a", x=[0, 1], y=[low, high]), log_y=log_y)
    found = labels(drawn)
    assert found[found.index("x") + 1 : -1] == expected


@pytest.mark.parametrize("exponents", list(itertools.product((-9, -3.3, 0.1), (0, 0.01, 0.2, 0.9, 1.7, 4, 11))))
def test_a_log_axis_has_ends_around_its_values(exponents: tuple[float, float]) -> None:
    low, high = 10.0 ** exponents[0], 10.0 ** sum(exponents)
    drawn = chart(Curve(label="a", x=[0, 1], y=[low, high]), log_y=True)
    (_, bottom), (_, top) = points(drawn)
    assert TOP <= top <= bottom <= BOTTOM
    found = labels(drawn)
    assert 2 <= len(found[found.index("x") + 1 : -1]) <= 9


def test_a_log_axis_skips_what_it_cannot_show() -> None:
    drawn = chart(Curve(label="a", x=[1, 2, 3, 4], y=[1e-4, 0.0, -1.0, 1e-2]), log_y=True)
    assert re.findall(r"<title>([^<]*)</title>", drawn.svg) == ["0.0001", "0.01"]


def test_curves_can_be_told_apart_without_colour() -> None:
    curves = [Curve(label=str(i), x=[0, 1], y=[0.0, float(i)], look=i) for i in range(36)]
    looks = [(tuple(key.dashes), key.mark) for key in chart(*curves).legend]
    assert len(set(looks)) == 36
    assert all(mark for _, mark in looks)
    # The lines themselves have them, too.
    drawn = chart(*curves[:3])
    dashes = re.findall(r"stroke-dasharray: ([\d.,]+)[^\"]*stroke: var\(--c(\d)\)", drawn.svg)
    assert [color for _, color in dashes] == ["1", "2"]
    assert len({text for text, _ in dashes}) == 2
    assert len(set(re.findall(r'<path id="(m\w+)" d="[^"]*" style="stroke: var\(--c\d', drawn.svg))) == 3


def test_references_are_in_the_legend_and_in_view() -> None:
    drawn = chart(Curve(label="a", x=[0, 1], y=[2.0, 4.0]), references={"far <": 9.0, "near": 3.0})
    assert [(key.label, key.color) for key in drawn.legend] == [("a", "c0"), ("far <", "ink"), ("near", "ink")]
    assert len({tuple(key.dashes) for key in drawn.legend}) == 3
    heights = re.findall(r'd="M 56 ([\d.]+) L 388 \1 " [^>]*stroke: var\(--ink\)', drawn.svg)
    scale = (BOTTOM - TOP) / 8  # from 2 to 10
    assert [float(y) for y in heights] == [TOP + scale, TOP + 7 * scale]


def test_marks_say_what_they_stand_for() -> None:
    spread = [(1.5, 2.5), None, (3.0, 5.0)]
    drawn = chart(Curve(label="a", x=[0, 1, 2], y=[2.0, 3.0, 4.0], spread=spread, style="points"))
    assert re.findall(r"<title>([^<]*)</title>", drawn.svg) == ["2 (1.5 to 2.5)", "3", "4 (3 to 5)"]
    assert "clip-path" not in drawn.svg[drawn.svg.index('<g class="marks">') :]  # whole marks, at the edges too
    # Marks beyond an edge are not drawn, and do not give their titles to others.
    drawn = chart(Curve(label="a", x=[0, 1, 2], y=[9000.0, 3.0, 4.0], style="points"), y_limits=(None, 4.0))
    assert re.findall(r"<title>([^<]*)</title>", drawn.svg) == ["3", "4"]
    assert drawn.is_cut
    assert not chart(Curve(label="a", x=[0, 1, 2], y=[2.0, 3.0, 4.0])).is_cut


def test_many_points_are_averages_and_their_range() -> None:
    y = [float(step % 2) for step in range(1000)]
    drawn = chart(Curve(label="a", x=range(1000), y=y, style="noisy"))
    # Groups of five have three or two ones.
    scale = (BOTTOM - TOP) / 1.0
    assert labels(drawn)[:3] == ["0", "500", "999"]
    heights = {round((BOTTOM - y) / scale, 3) for _, y in points(drawn)}
    assert heights == {0.4, 0.6}
    band = max(re.findall(r'<path id="\w+" d="([^"]*)"', drawn.svg), key=len)
    assert {264 + float(y) for y in re.findall(r"[\d.]+ (-[\d.]+)", band)} == {TOP, BOTTOM}
    assert "fill: var(--c0); fill-opacity: 0.18" in drawn.svg


def test_bars_of_several_curves_stand_beside_each_other() -> None:
    spread = [(1.0, 3.0), (2.0, 4.0)]
    curves = [
        Curve(label=name, x=[0, 1], y=[2.0, 3.0], spread=spread, style="points", look=i) for i, name in enumerate("ab")
    ]
    bars = re.findall(r'd="M ([\d.]+) [\d.]+ L ([\d.]+) [^"]*"[^>]*stroke-opacity: 0.7', chart(*curves).svg)
    assert [(float(a), float(b)) for a, b in bars] == [(LEFT - 2, LEFT - 2), (LEFT + 2, LEFT + 2)]


def test_nothing_to_draw_says_so() -> None:
    drawn = chart(Curve(label="a", x=[0, 1], y=[None, math.nan]), Curve(label="b", x=[], y=[]))
    assert (drawn.svg, drawn.missing) == ("", "Nothing was measured yet.")


def test_upper_edge_cuts_only_a_steep_start() -> None:
    assert upper_edge([(1, 10.0), (50, 4.0), (100, 3.0)]) == 4.0
    assert upper_edge([(1, 4.1), (50, 4.0), (100, 3.0)]) is None
    assert upper_edge([]) is None


def test_numbers_as_people_write_them() -> None:
    numbers = (0, 0.25, 950, 1500, 2e6, 3.25e9, 1e-4, 2.5e-7)
    assert [format_si(n) for n in numbers] == ["0", "0.25", "950", "1.5K", "2M", "3.25B", "10⁻⁴", "2.5·10⁻⁷"]
    words = [duration(s).replace("\u00a0", " ") for s in (0, 0.1234, 59.2, 59.7, 200, 3600, 7500, 273600)]
    assert words == ["0 s", "0.123 s", "59.2 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h"]
    counts = [large_number(n).replace("\u00a0", " ") for n in (950, 12_300, 124_439_808, 2.5e9, 1.474e18)]
    assert counts == ["950", "12,300", "124.4 million", "2.5 billion", "1.47 × 10¹⁸"]
    assert date("2026-03-04T12:30:00") == "2026-03-04 at 12:30"
    assert date("yesterday") == "yesterday"
    values = (True, None, 12_345, 4096, 2.5, [1, "a"], {}, 10**400)
    assert [value_text(value) for value in values[:-1]] == ["yes", "–", "12,345", "4096", "2.5", '[1, "a"]', "{}"]
    assert value_text(values[-1]).startswith("10,000,000")
    assert humanize("parameters_value_embeddings") == "parameters in value embeddings"
