"""`line_chart` draws line charts by matplotlib, as SVG that adopts the fonts, width and colours of its page.

Text stays text, colours are variables of ``templates/page.html``, and each curve has its own dashes and marks, so that
charts can be read without colours. The legend is HTML, which wraps on a phone. `report` and `comparison` choose the
content of charts.
"""

import functools
import io
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from quintic.launch import hint, install_command
from quintic.report.formatting import finite, format_si
from quintic.report.svg import COLORS, GRID, INK, MARKS, SOFT, inline

__all__ = ["MAX_POINTS", "Chart", "Curve", "LegendEntry", "curve_of", "line_chart", "upper_edge"]

MAX_POINTS = 200
"""Largest number of points of a curve; in longer curves neighbours are averaged."""

# Sizes in units of the drawing. Text of 13 units stays legible when a phone shrinks the drawing to about 340 pixels.
_WIDTH, _HEIGHT = 400, 264
_LEFT, _BOTTOM, _PLOT_WIDTH, _PLOT_HEIGHT = 56, 44, 332, 192
# With more points a band is drawn in place of error bars.
_MOST_ERROR_BARS = 40

_DASHES: list[tuple[float, ...]] = [(), (7, 3), (2, 2), (9, 3, 2, 3), (4, 2), (9, 3, 2, 3, 2, 3)]
_DOTS: list[tuple[float, ...]] = [(1, 2), (1, 5), (5, 2, 1, 2)]
# Marks by matplotlib's names, and as a path around (15, 6) for the legend.
_MARKS = {
    "o": "M12 6a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "s": "M12.3 3.3h5.4v5.4h-5.4z",
    "^": "M15 2.2l3.8 6.8h-7.6z",
    "D": "M15 2l4 4l-4 4l-4-4z",
    "v": "M15 9.8l3.8-6.8h-7.6z",
    "P": "M14 2h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: name in the legend.
        x: positions, ascending.
        y: values; None (missing or not finite) leaves a gap.
        spread: ends of each value's error bar, or None; empty for no error bars.
        style: "line" draws the values; "noisy" averages neighbours and shades their range; "points" marks each value.
        look: index of colour, dashes and mark; curves with different indices can be distinguished.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[tuple[float, float] | None] = ()
    style: Literal["line", "noisy", "points"] = "line"
    look: int = 0

    @property
    def dashes(self) -> tuple[float, ...]:
        """Lengths of dashes and gaps; after six curves colours and marks repeat, with other dashes."""
        return () if self.style == "noisy" else _DASHES[(self.look + self.look // len(COLORS)) % len(_DASHES)]

    @property
    def mark(self) -> str:
        """Matplotlib's name of the mark."""
        return list(_MARKS)[self.look % len(_MARKS)]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """An entry of a legend: a curve's name, and its colour, dashes and mark for the legend's SVG."""

    label: str
    color: str
    dashes: Sequence[float]
    mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawing with its legend; ``is_cut`` tells whether curves leave it, ``missing`` why there is no drawing."""

    title: str
    svg: str = ""
    legend: Sequence[LegendEntry] = ()
    is_cut: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    """The points of a curve, NaN for gaps, and the edges of its band or error bars, NaN for none."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    y_label: str,
    x_label: str = "training steps",
    references: Mapping[str, float] | None = None,
    log_y: bool = False,
    y_limits: tuple[float | None, float | None] = (None, None),
) -> Chart:
    """Return a chart of lines over a common x axis; both axes end at a labelled value.

    Args:
        curves: the lines; a curve without any finite value is left out.
        title: title above the drawing, and its name for screen readers.
        y_label: name of y, with its unit.
        x_label: name of x, with its unit.
        references: dotted horizontal lines, name -> y; the axis always includes them.
        log_y: whether the y axis is logarithmic; values that are not positive leave gaps.
        y_limits: lowest and highest y of the axis, at which lines are clipped; None to follow the data.
    """
    drawn = [(curve, _thinned_points(curve, log_y)) for curve in curves]
    drawn = [(curve, line) for curve, line in drawn if any(map(math.isfinite, line.y))]
    if not drawn:
        return Chart(title=title, missing="Nothing was measured yet.")
    if (matplotlib := _load_matplotlib()) is None:
        return Chart(title=title, missing="Not drawn: matplotlib could not be loaded.")
    references = references or {}
    file = io.StringIO()
    titles: list[str] = []
    with _quiet(), matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": title + x_label, "text.parse_math": False, "font.size": 13}
        )
        # matplotlib has 72 units per inch. Without pyplot, no global state of the process is touched.
        figure = matplotlib.figure.Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        figure.patch.set_visible(False)
        canvas = matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
        box = (_LEFT / _WIDTH, _BOTTOM / _HEIGHT, _PLOT_WIDTH / _WIDTH, _PLOT_HEIGHT / _HEIGHT)
        axes = figure.add_axes(box, facecolor="none")
        xs = [x for curve, _ in drawn for x in curve.x]
        _draw_frame(axes, xs, [line for _, line in drawn], list(references.values()), y_limits, log_y)
        axes.set_xlabel(x_label, color=INK)
        figure.text(4 / _WIDTH, 1 - 15 / _HEIGHT, y_label, color=INK)
        for y, dots in zip(references.values(), _DOTS, strict=False):
            axes.axhline(y, color=INK, linewidth=1.5, linestyle=(0, dots))
        # Error bars of several curves are shifted so that they do not overlap.
        barred = [curve for curve, _ in drawn if curve.spread]
        for curve, line in drawn:
            place = barred.index(curve) - (len(barred) - 1) / 2 if curve.spread else 0.0
            titles += _draw_curve(axes, curve, line, alone=len(drawn) == 1, shift=4 * place / _PLOT_WIDTH)
        # The range after drawing, to find out whether curves leave it.
        low, high = axes.get_ylim()
        canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    keys = [
        LegendEntry(c.label, f"c{c.look % len(COLORS)}", c.dashes, "" if c.style == "noisy" else _MARKS[c.mark])
        for c, _ in drawn
    ]
    keys += [
        LegendEntry(label, "ink", [1.5 * dot for dot in dots]) for label, dots in zip(references, _DOTS, strict=False)
    ]
    is_cut = any(y < low or y > high for _, line in drawn for y in line.y)
    return Chart(title=title, svg=inline(file.getvalue(), f"{title}, by {x_label}", titles), legend=keys, is_cut=is_cut)


def curve_of(records: Sequence[Mapping[str, Any]], x: str, y: str, *, divisor: float = 1, **look: Any) -> Curve:
    """Return a curve of one field of a log's records over another, with standard errors; records without x are skipped.

    Args:
        records: records in the order of x.
        x: name of a field.
        y: name of a field; its standard error is the field with ``_stderr`` appended, if it exists.
        divisor: number by which x is divided.
        **look: other arguments of `Curve`.
    """
    points = [
        (value / divisor, finite(record.get(y)), finite(record.get(f"{y}_stderr")))
        for record in records
        if (value := finite(record.get(x))) is not None
    ]
    spread = [None if y is None or error is None else (y - error, y + error) for _, y, error in points]
    has_spread = any(edges is not None for edges in spread)
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    return Curve(x=xs, y=ys, spread=spread if has_spread else (), **look)


def upper_edge(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the y at which to cut a learning curve of (step, value), so that its first values do not flatten the rest.

    It is the highest value after the first twentieth of the steps; None if the values before are not much higher.
    """
    last = max((step for step, _ in points), default=0.0)
    late = [value for step, value in points if step > 0.05 * last]
    if not late:
        return None
    edge = max(late)
    return edge if max(value for _, value in points) > edge + 0.3 * (edge - min(late)) else None


def _thinned_points(curve: Curve, log_y: bool) -> _Line:
    """Return the curve with at most `MAX_POINTS` points, which are averages of neighbours."""
    size = max(1, math.ceil(len(curve.x) / MAX_POINTS))
    spread = curve.spread or [None] * len(curve.x)
    line = _Line()
    for start in range(0, len(curve.x), size):
        # Average the finite values of `size` neighbours; the band spans their range.
        group = slice(start, start + size)
        points = [
            (value, edges or (value, value))
            for y, edges in zip(curve.y[group], spread[group], strict=True)
            if (value := finite(y)) is not None and (value > 0 or not log_y)
        ]
        has_edges = points and (any(spread[group]) or (curve.style == "noisy" and size > 1))
        line.x.append(sum(curve.x[group]) / len(curve.x[group]))
        line.y.append(sum(y for y, _ in points) / len(points) if points else math.nan)
        line.low.append(min(low for _, (low, _) in points) if has_edges else math.nan)
        line.high.append(max(high for _, (_, high) in points) if has_edges else math.nan)
    return line


@functools.cache
def _load_matplotlib() -> Any:
    """Return matplotlib; if it cannot be loaded, print why and return None, since a report without charts is useful."""
    try:
        with _quiet():
            import matplotlib
            import matplotlib.backends.backend_svg
            import matplotlib.figure
            import matplotlib.ticker
    except Exception as error:
        print(
            f"The report has no charts: matplotlib could not be loaded ({type(error).__name__}: {error}). Install it "
            f"with: {install_command('train')}; then draw the page again with: {hint('report')}",
            file=sys.stderr,
        )
        return None
    return matplotlib


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide matplotlib's messages about its list of fonts, its cache folder, and characters that a font lacks."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _draw_frame(
    axes: Any,
    xs: Sequence[float],
    lines: Sequence[_Line],
    references: Sequence[float],
    y_limits: tuple[float | None, float | None],
    log_y: bool,
) -> None:
    """Set the ranges of the axes, from one tick to another, and draw grid lines and labels."""
    ticker = _load_matplotlib().ticker
    first = min(0.0, min(xs))
    last = max(xs) if max(xs) > first else first + 1
    locator = ticker.MaxNLocator(4, steps=[1, 2, 5, 10], integer=all(x == int(x) for x in xs))
    # The last label is right-aligned at the end of the axis, so the label before it needs some distance.
    inner = [tick for tick in locator.tick_values(first, last) if first <= tick < last - 0.18 * (last - first)]
    x_ticks = [*inner, last]

    # The y range: data and error bars, the given limits, and always the references.
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if math.isfinite(y) and (y > 0 or not log_y)]
    low, high = (limit(ys) if given is None else given for limit, given in zip((min, max), y_limits, strict=True))
    low, high = min([low, *references]), max([high, *references])
    if high - low <= 1e-6 * abs(high):
        low, high = low - 0.05 * abs(low or 1), high + 0.05 * abs(high or 1)
    if log_y:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [factor * 10.0**power for power in powers for factor in ((1, 2, 5) if high < 100 * low else (1,))]
    else:
        ticks = [float(f"{tick:.12g}") for tick in ticker.MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)]
    # From the last tick below the data to the first tick above it.
    bottom = max((tick for tick in ticks if tick <= low), default=ticks[0])
    top = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    y_ticks = [tick for tick in ticks if bottom <= tick <= top]
    # A range of many powers of ten would have too many ticks.
    if (stride := math.ceil(len(y_ticks) / 8)) > 1:
        y_ticks = y_ticks[::stride]
        top = max(top, y_ticks[-1])

    axes.set_yscale("log" if log_y else "linear")
    axes.set_xlim(first, last)
    axes.set_ylim(bottom, top)
    axes.minorticks_off()
    axes.set_xticks(x_ticks, [format_si(tick if tick >= 1000 else float(f"{tick:.3g}")) for tick in x_ticks])
    axes.set_yticks(y_ticks, [format_si(tick) for tick in y_ticks])
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.tick_params(axis="x", length=4, color=SOFT, labelcolor=SOFT)
    axes.tick_params(axis="y", length=0, labelcolor=SOFT)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)


def _draw_curve(axes: Any, curve: Curve, line: _Line, *, alone: bool, shift: float) -> list[str]:
    """Draw a curve and return the titles of its marks; ``shift`` moves error bars right by a fraction of the width."""
    color = COLORS[curve.look % len(COLORS)]
    if curve.spread and len(line.x) <= _MOST_ERROR_BARS:
        # One path with gaps takes less space than an element for each bar.
        left, right = axes.get_xlim()
        xs = [x + shift * (right - left) for x in line.x for x in (x, x, math.nan)]
        ys = [y for edges in zip(line.low, line.high, strict=True) for y in (*edges, math.nan)]
        axes.plot(xs, ys, color=color, linewidth=1.2, alpha=0.7)
    elif any(map(math.isfinite, line.low)):
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    style: Any = "-" if alone or not curve.dashes else (0, [length / 2 for length in curve.dashes])  # in line widths
    axes.plot(line.x, line.y, color=color, linewidth=2, linestyle=style)
    low, high = axes.get_ylim()
    marked = [i for i, y in enumerate(line.y) if low <= y <= high]
    if curve.style != "points" or len(marked) > MAX_POINTS / 2:
        is_gap = [not math.isfinite(y) for y in (math.nan, *line.y, math.nan)]
        # Single points between gaps need a mark to be visible; lines get a few marks to be distinguished by.
        every = 0 if curve.style == "noisy" or alone else max(1, len(line.x) // 6)
        marked = [i for i in marked if (every and i % every == curve.look % every) or (is_gap[i] and is_gap[i + 2])]
    if not marked:
        return []
    xs, ys = [line.x[i] for i in marked], [line.y[i] for i in marked]
    axes.plot(xs, ys, curve.mark, color=color, markersize=5.5, clip_on=False, gid=MARKS)
    edges = [f" ({line.low[i]:.4g} to {line.high[i]:.4g})" if line.low[i] < line.high[i] else "" for i in marked]
    return [f"{y:.4g}{some}" for y, some in zip(ys, edges, strict=True)]
