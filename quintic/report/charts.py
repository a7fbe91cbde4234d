"""Line charts: `Chart` chooses the axes, and the macro of ``templates/chart.html`` draws the curves as SVG.

Curves differ in colour, dashes and marks, so that charts can be read without colours. A curve of few points has a mark
at each and a thin line between them, where nothing was measured; a long curve is drawn through averages of neighbours.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = ["Chart", "Curve", "Point", "curve_of", "curves_by_kind", "learning_panels", "some_of", "upper_edge"]

# A longer curve is drawn through averages of neighbours.
_MOST_POINTS = 200
# A longer curve is drawn without a mark for each point, and with a band in place of error bars.
_MOST_MARKS = 40
_MOST_ROWS = 20


class Point(NamedTuple):
    """A value and the ends of its error bar; NaN for missing values."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.y):
            return "–"
        return f"{self.y:.4g}" + (f" ({self.low:.4g} to {self.high:.4g})" if self.low < self.high else "")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: name in the legend; without one the curve has no entry.
        points: the values in the order of x; a point whose y is NaN leaves a gap.
        noisy: whether values scatter from one point to the next, so that averages are shown with their range.
        look: index of colour, dashes and mark, which ``templates/chart.html`` lists.
    """

    label: str
    points: Sequence[Point]
    noisy: bool = False
    look: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether each point has a mark."""
        return len(self.points) <= _MOST_MARKS

    @property
    def is_plain(self) -> bool:
        """Whether the line has neither dashes nor marks to tell it from others."""
        return self.noisy or not self.label

    @property
    def pieces(self) -> list[list[Point]]:
        """The points between two gaps."""
        pieces = itertools.groupby(self.points, key=lambda point: math.isfinite(point.y))
        return [list(piece) for is_known, piece in pieces if is_known]

    @property
    def values(self) -> list[float]:
        """The values without gaps."""
        return [point.y for point in self.points if math.isfinite(point.y)]

    @property
    def marked(self) -> list[Point]:
        """The points with a mark: all of a few, some of a dashed line, and single ones, which have no line."""
        if self.is_sparse:
            some = list(self.points)
        else:
            some = [] if self.is_plain else list(self.points[self.look % 6 :: len(self.points) // 6])
        return [point for piece in self.pieces for point in piece if len(piece) == 1 or point in some]

    @property
    def edged(self) -> list[Point]:
        """The points with an error bar, or the band's."""
        return [point for point in self.points if math.isfinite(point.low)]

    def thinned(self, x_unit: float, *, log_y: bool) -> "Curve":
        """Return the curve with at most `_MOST_POINTS` points, and gaps where a logarithmic axis has no place."""
        size = max(1, math.ceil(len(self.points) / _MOST_POINTS))
        points = []
        for start in range(0, len(self.points), size):
            group = self.points[start : start + size]
            known = [point for point in group if math.isfinite(point.y) and (point.y > 0 or not log_y)]
            y = sum(point.y for point in known) / len(known) if known else math.nan
            # The band spans the error bars of the neighbours, or their range.
            edges = [edge for point in known for edge in point[2:] if math.isfinite(edge)]
            edges += [point.y for point in known] if self.noisy and size > 1 else []
            x = sum(point.x for point in group) / len(group) / x_unit
            points.append(Point(x, y, min(edges, default=math.nan), max(edges, default=math.nan)))
        return replace(self, points=points)


class Chart:
    """Curves over a common x axis; both axes end at a labelled value. Without any curve nothing was measured yet.

    Args:
        curves: the lines; those without any finite value are left out.
        title: title above the drawing.
        unit: unit of the values, unless the title tells it.
        x_label: name of x, with its unit.
        x_unit: number by which the x of points is divided.
        references: dotted horizontal lines, name -> y; the axis always includes them.
        log_y: whether the y axis is logarithmic; values that are not positive leave gaps.
        low: lowest y of the axis, in place of the lowest value.
        high: highest y of the axis, at which lines are cut, in place of the highest value.
    """

    # In units of the drawing, with room for labels around it. Their text stays legible when a phone shrinks it.
    width = 332
    height = 192

    def __init__(
        self,
        curves: Iterable[Curve],
        *,
        title: str,
        unit: str = "",
        x_label: str = "training steps",
        x_unit: float = 1,
        references: Mapping[str, float] | None = None,
        log_y: bool = False,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        self.title, self.unit, self.x_label, self.log_y = title, unit, x_label, log_y
        self.references = references or {}
        self.curves = [curve for curve in (curve.thinned(x_unit, log_y=log_y) for curve in curves) if curve.values]
        if not self.curves:
            return
        ys = [y for curve in self.curves for point in curve.points for y in point[1:] if math.isfinite(y)]
        low = min(*self.references.values(), min(ys) if low is None else low, math.inf)
        # An edge below all points, of other records than are drawn, cuts nothing.
        high = max(*self.references.values(), max(ys) if high is None or high <= min(ys) else high, -math.inf)
        if high - low <= 1e-6 * abs(high):
            low, high = low - 0.05 * abs(low or 1), high + 0.05 * abs(high or 1)
        self.y_ticks = _log_ticks(low, high) if log_y else _ticks(low, high, 5)
        xs = [point.x for curve in self.curves for point in curve.points]
        last = max(xs) or 1.0
        x_ticks = _ticks(0.0, last, 4, least=1.0 if all(x == int(x) for x in xs) else 0.0)
        # The last label ends where the axis does, and so the one before it needs some distance.
        self.x_ticks = [*(tick for tick in x_ticks if tick < 0.82 * last), last]

    def x(self, value: float) -> float:
        """Return the distance from the left edge of the plot, where x is zero."""
        return round(self.width * value / self.x_ticks[-1], 1)

    def y(self, value: float) -> float:
        """Return the distance from the top edge of the plot."""
        transform = math.log if self.log_y else float
        low, high = transform(self.y_ticks[0]), transform(self.y_ticks[-1])
        return round(self.height * (high - transform(value)) / (high - low), 1)

    def is_inside(self, value: float) -> bool:
        """Return whether a value of y lies between the ends of the axis."""
        return self.y_ticks[0] <= value <= self.y_ticks[-1]

    @property
    def is_cut(self) -> bool:
        """Whether curves leave the plot."""
        return any(not self.is_inside(value) for curve in self.curves for value in curve.values)

    @property
    def rows(self) -> list[list[str]]:
        """A table of x and the values there; of a long curve some points, the last among them."""
        texts = [{point.x: str(point) for point in curve.points} for curve in self.curves]
        xs = sorted({point.x for curve in self.curves for point in some_of(curve.points, _MOST_ROWS)})
        return [[f"{x:,.6g}", *(of_curve.get(x, "") for of_curve in texts)] for x in xs]


def curve_of(records: Sequence[Mapping[str, Any]], x: str, y: str, **look: Any) -> Curve:
    """Return a curve of one field of a log's records over another.

    Records that lack one of them are skipped, and None, a number that was not finite, leaves a gap. Error bars are the
    values of the field with ``_range`` appended to y, or else reach as far as that with ``_stderr``.
    """
    points = []
    for record in records:
        if record.get(x) is not None and y in record:
            measured = (record[y], record.get(f"{y}_stderr"))
            value, error = (math.nan if number is None else number for number in measured)
            points.append(Point(record[x], value, *record.get(f"{y}_range", (value - error, value + error))))
    return Curve(points=points, **look)


def some_of(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most ``most`` items, evenly spaced, the last one among them."""
    # Counted from the end, so that the last one is included.
    return items[::-1][:: max(1, math.ceil(len(items) / most))][::-1]


def curves_by_kind(records: Sequence[Mapping[str, Any]], field: str) -> dict[str, Curve]:
    """Return a curve over steps for each entry of a field that holds a mapping."""
    rows = [{**(record.get(field) or {}), "step": record["step"]} for record in records]
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    return {name: curve_of(rows, "step", name, label=name, look=look) for look, name in enumerate(names)}


def learning_panels(
    titles: Mapping[str, str],
    lines: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]],
    references: Mapping[str, Mapping[str, float]],
) -> dict[str, list[Chart]]:
    """Return the charts of "loss" and "bpb" over steps, tokens and time: name of the x axis -> charts.

    Args:
        titles: title of the chart of each field, in their order.
        lines: for each line its records, and the further arguments of `curve_of`.
        references: horizontal lines of a field's chart.
    """
    records = [record for own, _ in lines for record in own]
    # Among several runs the slowest one decides.
    times = [record.get("seconds_range", [record.get("seconds")])[-1] or 0.0 for record in records]
    longest = max(times, default=0.0)
    size, unit = (3600, "hours") if longest >= 7200 else (60, "minutes") if longest >= 120 else (1, "seconds")
    axes = (
        ("by steps", "step", "training steps", 1),
        ("by tokens", "tokens", "tokens read (K thousand, M million, B billion)", 1),
        ("by time", "seconds", f"training time ({unit})", size),
    )
    return {
        tab: [
            Chart(
                [curve_of(own, x, field, **look) for own, look in lines],
                title=title,
                unit="nats per token" if field == "loss" else "",
                x_label=x_label,
                x_unit=x_unit,
                references=references.get(field),
                high=upper_edge(records, field),
            )
            for field, title in titles.items()
        ]
        for tab, x, x_label, x_unit in axes
    }


def upper_edge(records: Sequence[Mapping[str, Any]], field: str) -> float | None:
    """Return the y at which to cut the learning curves of a field, so that its first values do not flatten the rest.

    It is the highest value after the first twentieth of the steps; None if the values before are not much higher.
    """
    ranges = [(record["step"], record.get(f"{field}_range", [record.get(field)])) for record in records]
    points = [(step, value) for step, ends in ranges for value in ends if value is not None]
    last = max((step for step, _ in points), default=0.0)
    late = [value for step, value in points if step > 0.05 * last]
    if not late:
        return None
    edge = max(late)
    return edge if max(value for _, value in points) > edge + 0.3 * (edge - min(late)) else None


def _ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten around a range, in steps of at least ``least``."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most and step >= least:
            break
    return [float(f"{step * number:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return at most nine ticks around a range of positive values, as close to its ends as their number allows."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = math.ceil(len(powers) / 9)
    for factors in (range(1, 10), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{factor}e{power}") for power in powers[::stride] for factor in factors]
        ticks = [*ticks, 10.0 ** (powers[-1] + stride)]
        first = max(number for number, tick in enumerate(ticks) if tick <= low)
        last = min(number for number, tick in enumerate(ticks) if tick >= high)
        if last - first < 9:
            break
    return ticks[first : last + 1]
