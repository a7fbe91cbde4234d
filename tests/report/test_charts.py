"""Charts: lines where their values are, curves that differ without colour, axes labelled to their ends."""

import html
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from quintic.report.charts import Chart, Curve, Point, upper_edge
from quintic.report.formatting import date, duration, format_si, humanize, large_number, value_text
from quintic.report.page import TEMPLATES

WIDTH, HEIGHT = 332, 192


def curve(y: Sequence[float], x: Sequence[float] = (), label: str = "a", **look: Any) -> Curve:
    """A curve over 0, 1, 2, ... or given places."""
    return Curve(label=label, points=[Point(*place) for place in zip(x or range(len(y)), y, strict=True)], **look)


def drawn(*curves: Curve, title: str = "t", x_label: str = "x", **options: Any) -> str:
    chart = Chart(curves, title=title, x_label=x_label, **options)
    return str(TEMPLATES.get_template("chart.html").module.figure(chart))


def paths(figure: str, kind: str) -> list[str]:
    """The paths of a class in the drawing, without those of the legend."""
    return re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', figure.partition("<ul")[0])


def points(figure: str, kind: str) -> list[tuple[float, float]]:
    """The corners of the only line of a class."""
    [line] = paths(figure, kind)
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", line)]


def labels(figure: str, anchor: str) -> list[str]:
    return re.findall(rf'<text x="[^"]*" y="[^"]*" text-anchor="{anchor}">([^<]*)</text>', figure)


def x_labels(figure: str) -> list[str]:
    return [*labels(figure, "middle"), labels(figure, "end")[-1]]


def y_labels(figure: str) -> list[str]:
    return labels(figure, "end")[:-1]


def titles(figure: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", figure)


def test_a_line_is_drawn_where_its_values_are() -> None:
    figure = drawn(curve([0.0, 5.0, 10.0], [0, 50, 100]), low=0.0)
    assert points(figure, "sparse c0") == [(0, HEIGHT), (WIDTH / 2, HEIGHT / 2), (WIDTH, 0)]
    assert x_labels(figure) == ["0", "50", "100"]
    assert y_labels(figure) == ["0", "2", "4", "6", "8", "10"]


def test_texts_are_texts_and_escaped() -> None:
    figure = drawn(curve([1.0, 2.0]), title='<b> "t"', x_label="$x$ <i> & あ", unit="<u>")
    assert ">$x$ &lt;i&gt; &amp; あ</text>" in figure
    assert 'aria-label="&lt;b&gt; &#34;t&#34;, by $x$ &lt;i&gt; &amp; あ"' in figure
    assert '<span class="unit">&lt;u&gt;</span>' in figure


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (57, ["0", "20", "40", "57"]),
        (60, ["0", "20", "40", "60"]),
        (3, ["0", "1", "2", "3"]),
        (1, ["0", "1"]),
        (16.3556, ["0", "5", "10", "16.36"]),
        (245_760, ["0", "100K", "200K", "246K"]),
    ],
)
def test_the_x_axis_is_labelled_to_its_end(last: float, expected: list[str]) -> None:
    figure = drawn(curve([1.0, 2.0, 3.0], [0, last / 2 if last > 3 else last, last]))
    assert x_labels(figure) == expected
    assert points(figure, "sparse c0")[-1][0] == WIDTH


@pytest.mark.parametrize(
    ("low", "high", "log_y", "expected"),
    [
        (1.95, 3.66, False, ["1.5", "2", "2.5", "3", "3.5", "4"]),
        (2.0, 2.0, False, ["1.9", "1.95", "2", "2.05", "2.1"]),
        (0.0, 0.0, False, ["-0.05", "0", "0.05"]),
        (3e-7, 2e-2, True, ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1"]),
        (0.23, 0.7, True, ["0.2", "0.3", "0.4", "0.5", "0.6", "0.7"]),
        (0.42, 0.61, True, ["0.4", "0.5", "0.6", "0.7"]),
        (0.05, 1.5, True, ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
    ],
)
def test_the_y_axis_goes_from_one_label_to_another(low: float, high: float, log_y: bool, expected: list[str]) -> None:
    assert y_labels(drawn(curve([low, high]), log_y=log_y)) == expected


SPANS = (0, 0.01, 0.2, 0.9, 1.7, 4, 11, 30)


@pytest.mark.parametrize("exponents", list(itertools.product((-9, -3.3, 0.1), SPANS)))
def test_curves_fill_most_of_a_log_axis(exponents: tuple[float, float]) -> None:
    low, high = 10.0 ** exponents[0], 10.0 ** sum(exponents)
    figure = drawn(curve([low, high]), log_y=True)
    (_, bottom), (_, top) = points(figure, "sparse c0")
    assert 0 <= top <= bottom <= HEIGHT
    assert 2 <= len(y_labels(figure)) <= 9
    # Over more than half of a power of ten no half of the chart is empty.
    assert exponents[1] < 0.5 or bottom - top > 0.6 * HEIGHT


def test_a_log_axis_skips_what_it_cannot_show() -> None:
    assert titles(drawn(curve([1e-4, 0.0, -1.0, 1e-2]), log_y=True)) == ["0: 0.0001", "3: 0.01"]


def test_curves_can_be_told_apart_without_colour() -> None:
    curves = [curve([0.0, float(i)], label=str(i), look=i) for i in range(36)]
    legend = drawn(*curves).partition("<ul")[2]
    keys = re.findall(r'stroke-dasharray="([^"]*)".*?class="mark[^>]* d="([^"]*)"', legend)
    assert len(set(keys)) == len(keys) == 36
    # The lines themselves have them, too.
    drawing = drawn(*curves[:3]).partition("<ul")[0]
    assert len(set(re.findall(r'<path class="sparse c\d" stroke-dasharray="([^"]*)"', drawing))) == 3
    assert len(set(re.findall(r'<path transform="[^"]*" d="([^"]*)"', drawing))) == 3


def test_few_points_are_marks_and_a_thin_line() -> None:
    figure = drawn(curve([3.0, 2.0, 1.0], [0, 25, 50]))
    assert (len(paths(figure, "sparse c0")), len(paths(figure, "line c0")), len(titles(figure))) == (1, 0, 3)
    # Of many points, a line that has its own dashes and a few marks, but not each.
    figure = drawn(curve([float(i) for i in range(60)]), curve([float(i) for i in range(60)], look=1))
    assert (len(paths(figure, "line c0")), len(paths(figure, "sparse c0"))) == (1, 0)
    assert len(titles(figure)) == 12
    # A line that is alone, or of single steps, needs no marks.
    for plain in (curve([float(i) for i in range(60)], label=""), curve([float(i) for i in range(60)], noisy=True)):
        assert titles(drawn(plain)) == []


def test_values_at_points_are_in_a_table() -> None:
    many = curve([step / 100 for step in range(1, 101)], range(1, 101), label="every step", noisy=True)
    few = Curve(label="some steps", points=[Point(50, 2.0, 1.5, 2.5), Point(100, math.nan)], look=1)
    chart = Chart([many, few], title="t", x_label="steps")
    assert chart.rows[0] == ["5", "0.05", ""]
    assert chart.rows[9] == ["50", "0.5", "2 (1.5 to 2.5)"]
    assert chart.rows[-1] == ["100", "1", "–"]
    assert len(chart.rows) == 20
    figure = drawn(many, few, x_label="steps")
    header = re.findall("<th[^>]*>([^<]*)</th>", figure.partition("<tbody>")[0])
    assert header == ["steps", "every step", "some steps"]
    assert "<summary>Values</summary>" in figure


def test_references_are_in_the_legend_and_in_view() -> None:
    figure = drawn(curve([2.0, 4.0]), references={"far <": 9.0, "near": 3.0})
    legend = figure.partition("<ul")[2].partition("</ul>")[0]
    assert [html.unescape(text) for text in re.findall(r"</svg>([^<]*)</li>", legend)] == ["a", "far <", "near"]
    assert len(set(re.findall(r'stroke-dasharray="([^"]*)"', legend))) == 3
    heights = [float(path.split()[1].removesuffix("h332")) for path in paths(figure, "reference")]
    assert heights == [HEIGHT / 8, 7 * HEIGHT / 8]  # from 2 to 10


def test_marks_say_what_they_stand_for() -> None:
    marks = Curve(label="a", points=[Point(0, 2.0, 1.5, 2.5), Point(1, 3.0), Point(2, 4.0, 3.0, 5.0)])
    assert titles(drawn(marks)) == ["0: 2 (1.5 to 2.5)", "1: 3", "2: 4 (3 to 5)"]
    # Marks beyond an edge are not drawn, and the line is cut off by the inner drawing.
    figure = drawn(curve([9000.0, 3.0, 4.0]), high=4.0)
    assert titles(figure) == ["1: 3", "2: 4"]
    assert f'height="{HEIGHT}" viewBox="-8 0 {WIDTH + 16} {HEIGHT}">' in figure
    assert Chart([curve([9000.0, 3.0, 4.0])], title="", high=4.0).is_cut
    assert not Chart([curve([2.0, 3.0, 4.0])], title="").is_cut
    assert not Chart([curve([2.0, 3.0, 4.0])], title="", high=1.0).is_cut  # an edge of other records' values


def test_many_points_are_averages_and_their_range() -> None:
    figure = drawn(curve([float(step % 2) for step in range(1000)], noisy=True))
    assert x_labels(figure) == ["0", "500", "997"]
    # Groups of five have three or two ones.
    assert {round(1 - y / HEIGHT, 1) for _, y in points(figure, "line c0")} == {0.4, 0.6}
    assert {y for _, y in points(figure, "band c0")} == {0, HEIGHT}


def test_bars_of_several_curves_stand_beside_each_other() -> None:
    spread = [Point(0, 2.0, 1.0, 3.0), Point(1, 3.0, 2.0, 4.0)]
    figure = drawn(*(Curve(label=name, points=spread, look=i) for i, name in enumerate("ab")))
    assert re.findall(r'class="error c(\d)" transform="translate\((-?\d+)\)"', figure) == [("0", "-2"), ("1", "2")]
    assert [path.count("M") for kind in (0, 1) for path in paths(figure, f"error c{kind}")] == [2, 2]


def test_gaps_stay_gaps() -> None:
    figure = drawn(curve([1.0, 2.0, math.nan, 2.0, math.nan, *[1.0] * 50], noisy=True))
    [line] = paths(figure, "line c0")
    assert line.count("M") == 3
    assert titles(figure) == ["3: 2"]  # a single point has no line to be seen by


def test_nothing_to_draw_says_so() -> None:
    figure = drawn(curve([math.nan, math.nan]), curve([]))
    assert "Nothing was measured yet." in figure
    assert "<svg" not in figure


def test_upper_edge_cuts_only_a_steep_start() -> None:
    def edge(*losses: float | None) -> float | None:
        return upper_edge(
            [{"step": step, "loss": loss} for step, loss in zip((1, 50, 100), losses, strict=False)], "loss"
        )

    assert edge(10.0, 4.0, 3.0) == 4.0
    assert edge(10.0, None, 3.0) == 3.0
    assert edge(4.1, 4.0, 3.0) is None
    assert edge() is None
    # The whole range of several runs counts.
    assert upper_edge([{"step": 1, "loss": 9.0}, {"step": 50, "loss": 2.0, "loss_range": (1.0, 4.0)}], "loss") == 4.0


def test_numbers_as_people_write_them() -> None:
    numbers = (0, 0.25, 950, 1500, 2e6, 3.25e9, 1e-4, 2.5e-7)
    assert [format_si(n) for n in numbers] == ["0", "0.25", "950", "1.5K", "2M", "3.25B", "10⁻⁴", "2.5·10⁻⁷"]
    words = [duration(s).replace("\u00a0", " ") for s in (0, 0.1234, 59.2, 59.7, 200, 3600, 7500, 273600)]
    assert words == ["0 s", "0.123 s", "59.2 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h"]
    counts = [large_number(n).replace("\u00a0", " ") for n in (950, 12_300, 124_439_808, 2.5e9, 1.474e18)]
    assert counts == ["950", "12,300", "124.4 million", "2.5 billion", "1.47 × 10¹⁸"]
    assert date("2026-03-04T12:30:00") == "2026-03-04 at 12:30"
    assert date("yesterday") == "yesterday"
    values = (True, None, 12_345, 4096, 2.5, [1, "a"], {})
    assert [value_text(value) for value in values] == ["yes", "–", "12,345", "4096", "2.5", '[1, "a"]', "{}"]
    assert humanize("parameters_value_embeddings") == "parameters in value embeddings"
