r"""Figures as inline SVG, drawn by hand so that they follow the page: its fonts, its width, its light or dark colours.

Here: line charts and bars as strings of HTML; colours come from the CSS variables of ``report_template.html``
(``--c0`` to ``--c5``, ``--ink``, ``--grid``). Not here: what is drawn and what it means (`report`).

    +--------------------------------+
    | y label                        |
    |   4 |- - - - - - - reference - |
    |   2 | \__________ line         |      the legend is HTML under the drawing, so that it wraps on a phone
    |   0 +--------------------------|
    |       0     500     1K   x label
    +--------------------------------+
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

__all__ = [
    "MAX_POINTS",
    "Bar",
    "Curve",
    "Reference",
    "bar_chart",
    "format_si",
    "line_chart",
    "nice_ticks",
    "share_bar",
    "upper_edge",
]

MAX_POINTS = 200
"""Of a curve with more points, neighbours are averaged."""

# The drawing's own units; text of 13 units stays legible when a phone shrinks the drawing to some 340 pixels.
_WIDTH, _HEIGHT = 400, 264
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_LABEL_HEIGHT = 15
_NUM_COLORS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        x: positions, ascending.
        y: values; None (missing or not finite) leaves a gap.
        style: "line" as it is; "noisy" averages neighbours and shades their range; "points" marks each value.
        color: which colour of the palette.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Literal["line", "noisy", "points"] = "line"
    color: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A horizontal dashed line with its label on it, at the side where the curves are not."""

    label: str
    y: float
    side: Literal["left", "right"] = "right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar of a bar chart, or one part of a share bar."""

    label: str
    value: float
    text: str
    color: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """Data ranges and their mapping to the drawing's units; y is in log10 where ``log_y``."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_y: bool
    x_ticks: Sequence[float]
    y_ticks: Sequence[tuple[float, str]]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * _PLOT_WIDTH

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log_y:
            value = math.log10(value)
        return _TOP + (high - value) / (high - low) * _PLOT_HEIGHT


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    references: Sequence[Reference] = (),
    log_y: bool = False,
    y_limits: tuple[float | None, float | None] = (None, None),
) -> str:
    """Draw lines over a common x axis.

    Args:
        curves: the lines; those without a drawable value are left out.
        title: stands above the drawing and names it for screen readers.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        references: horizontal lines, always inside the drawn range.
        log_y: logarithmic y axis; values that are not positive leave gaps.
        y_limits: lowest and highest y drawn, None for what the data need; lines are clipped there.

    Returns:
        A ``<figure>``; a sentence in the place of the drawing if there is nothing to draw.
    """
    drawn = [_drawable(curve, log_y) for curve in curves]
    drawn = [curve for curve in drawn if any(value is not None for value in curve.y)]
    caption = f"<figcaption>{escape(title)}</figcaption>"
    if not drawn:
        return f'<figure>{caption}<p class="empty">Nothing was measured yet.</p></figure>'
    axes = _make_axes(drawn, references, log_y, y_limits)
    # The inner drawing clips the lines at the edges; a little wider than the plot, so that the last mark stays whole.
    area = f"{_LEFT - 4} {_TOP} {_PLOT_WIDTH + 8} {_PLOT_HEIGHT}"
    x, y, width, height = area.split()
    lines = "".join(_draw_curve(curve, axes) for curve in drawn)
    plot = f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{area}">{lines}</svg>'
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        _draw_frame(axes, x_label, y_label),
        plot,
        _draw_references(references, axes),
        "</svg>",
    ]
    legend = "".join(
        f'<li><span class="key c{curve.color % _NUM_COLORS}"></span>{escape(curve.label)}</li>' for curve in drawn
    )
    return f'<figure>{caption}{"".join(parts)}<ul class="legend">{legend}</ul></figure>'


def bar_chart(bars: Sequence[Bar], *, title: str) -> str:
    """Draw horizontal bars from zero, each with its label and text; values are not negative."""
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    rows = "".join(
        f'<li><span class="bar-label">{escape(bar.label)}</span><span class="track"><span class="bar '
        f'c{bar.color % _NUM_COLORS}" style="width:{100 * bar.value / longest:.2f}%"></span></span>'
        f'<span class="bar-text">{escape(bar.text)}</span></li>'
        for bar in bars
    )
    return f'<ul class="bars" aria-label="{escape(title)}">{rows}</ul>'


def share_bar(parts: Sequence[Bar], *, title: str) -> str:
    """Draw one bar divided into parts, with a legend; each part's value is its share of the sum."""
    total = sum(part.value for part in parts) or 1.0
    pieces = "".join(
        f'<span class="bar c{part.color % _NUM_COLORS}" style="width:{100 * part.value / total:.2f}%"></span>'
        for part in parts
    )
    legend = "".join(
        f'<li><span class="key c{part.color % _NUM_COLORS}"></span>{escape(part.label)}: '
        f"<b>{escape(part.text)}</b></li>"
        for part in parts
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="share" role="img" '
        f'aria-label="{escape(title)}">{pieces}</div><ul class="legend tall">{legend}</ul></figure>'
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], about ``count`` of them."""
    raw = (high - low) / count
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Rounding removes the dirt of the multiplication: 0.1 * 3 is 0.30000000000000004.
    return [round(index * step, 12) for index in range(first, last + 1)]


def format_si(value: float) -> str:
    """A short number: 1.5K for 1,500, 2M for two million, 3B for three (American) billion."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}" if abs(value) < 1000 * limit else f"{value / limit:,.0f}{suffix}"
    return f"{value:.4g}"


def upper_edge(points: Sequence[tuple[float, float]]) -> float | None:
    """Where to cut a learning curve, given as (step, value): the first steps would squeeze the rest into a flat line.

    Returns:
        The highest value after the first twentieth; None where the values before it are not much higher.
    """
    last = max((step for step, _ in points), default=0.0)
    late = [value for step, value in points if step > 0.05 * last]
    if not late:
        return None
    edge = max(late)
    return edge if max(value for _, value in points) > edge + 0.3 * (edge - min(late)) else None


def _drawable(curve: Curve, log_y: bool) -> Curve:
    """The curve with None for what cannot be drawn."""
    y = [v if v is not None and math.isfinite(v) and (v > 0 or not log_y) else None for v in curve.y]
    return Curve(label=curve.label, x=curve.x, y=y, style=curve.style, color=curve.color)


def _make_axes(
    curves: Sequence[Curve],
    references: Sequence[Reference],
    log_y: bool,
    y_limits: tuple[float | None, float | None],
) -> _Axes:
    """Ranges that show all curves and references, with a little air, and the ticks of y."""
    xs = [x for curve in curves for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    ys = [y for curve in curves for y in curve.y if y is not None]
    low, high = min(ys), max(ys)
    low = low if y_limits[0] is None else y_limits[0]
    high = high if y_limits[1] is None else y_limits[1]
    low = min([low, *(reference.y for reference in references)])
    high = max([high, *(reference.y for reference in references)])
    if log_y:
        low, high = math.log10(low), math.log10(high)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    y_range = (low if low == y_limits[0] else low - air, high + air)
    x_range = (0.0 if min(xs) >= 0 else min(xs), max(xs))
    if x_range[0] == x_range[1]:
        x_range = (x_range[0], x_range[0] + 1)
    x_ticks = nice_ticks(*x_range, 4)
    if all(x == int(x) for x in xs):  # there is no half step
        x_ticks = [tick for tick in x_ticks if tick == int(tick)]
    y_ticks = _log_ticks(*y_range) if log_y else [(tick, _tick_text(tick)) for tick in nice_ticks(*y_range)]
    return _Axes(x_range=x_range, y_range=y_range, log_y=log_y, x_ticks=x_ticks, y_ticks=y_ticks)


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks between 10**low and 10**high: powers of ten, with 2 and 5 times them where those are few."""
    factors = (1, 2, 5) if high - low < 2 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [f * 10.0**p for p in powers for f in factors if low <= math.log10(f * 10.0**p) <= high]
    if len(values) < 2:  # less than an octave is shown: round numbers inside it
        values = [tick for tick in nice_ticks(10.0**low, 10.0**high, 4) if tick > 0]
    stride = math.ceil(len(values) / 7)
    return [(value, _tick_text(value)) for value in values[::stride]]


def _tick_text(value: float) -> str:
    if value != 0 and abs(value) < 1e-3:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        mantissa = f"{value / 10.0**exponent:.3g}"
        power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return power if mantissa == "1" else f"{mantissa}·{power}"
    return format_si(value)


def _draw_frame(axes: _Axes, x_label: str, y_label: str) -> str:
    """Grid lines, tick texts and axis labels."""
    bottom = _TOP + _PLOT_HEIGHT
    parts = [f'<text class="label" x="4" y="14">{escape(y_label)}</text>']
    for value, text in axes.y_ticks:
        y = axes.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_PLOT_WIDTH}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
    for value in axes.x_ticks:
        x = axes.x(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
        # The outermost texts lean inwards: they must not leave the drawing.
        anchor = "end" if x > _WIDTH - _RIGHT - 16 else "middle"
        x = min(x + 8, _WIDTH - 2) if anchor == "end" else x
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{format_si(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}h{_PLOT_WIDTH}"/>')
    center = _LEFT + _PLOT_WIDTH / 2
    parts.append(
        f'<text class="label" x="{center:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return "".join(parts)


def _draw_references(references: Sequence[Reference], axes: _Axes) -> str:
    """Dashed lines; a label stands above its line, or under it where the next line is too close above."""
    parts: list[str] = []
    above = -math.inf
    for reference in sorted(references, key=lambda r: -r.y):
        y = axes.y(reference.y)
        under = y - above < _LABEL_HEIGHT + 3
        text_y = y + 13 if under else y - 5
        at_right = reference.side == "right"
        text_x, anchor = (_WIDTH - _RIGHT - 2, "end") if at_right else (_LEFT + 5, "start")
        parts.append(f'<path class="reference" d="M{_LEFT} {y:.1f}h{_PLOT_WIDTH}"/>')
        parts.append(
            f'<text class="on-plot" x="{text_x}" y="{text_y:.1f}" text-anchor="{anchor}">'
            f"{escape(reference.label)}</text>"
        )
        above = y + _LABEL_HEIGHT if under else y
    return "".join(parts)


def _draw_curve(curve: Curve, axes: _Axes) -> str:
    """The curve's line, with the range of its neighbours or a mark at each value, as its style says."""
    color = f"c{curve.color % _NUM_COLORS}"
    points = list(zip(curve.x, curve.y, strict=True))
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    parts: list[str] = []
    for run in _unbroken(groups):
        xs = [axes.x(sum(x for x, _ in group) / len(group)) for group in run]
        values = [[y for _, y in group if y is not None] for group in run]
        means = [axes.y(sum(ys) / len(ys)) for ys in values]
        if curve.style == "noisy" and size > 1:
            edge = [f"{x:.1f} {axes.y(max(ys)):.1f}" for x, ys in zip(xs, values, strict=True)]
            edge += [f"{x:.1f} {axes.y(min(ys)):.1f}" for x, ys in reversed(list(zip(xs, values, strict=True)))]
            parts.append(f'<path class="band {color}" d="M{"L".join(edge)}Z"/>')
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, means, strict=True))
        parts.append(f'<path class="line {color}" d="M{line}"/>')
        if len(run) == 1:  # a line of one point cannot be seen
            parts.append(f'<circle class="{color}" cx="{xs[0]:.1f}" cy="{means[0]:.1f}" r="2.6"/>')
    if curve.style == "points":
        for x, y in points:
            if y is not None and len(points) <= MAX_POINTS:
                place = f'cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}"'
                parts.append(f'<circle class="{color}" {place} r="2.6"><title>{y:.4g}</title></circle>')
    return "".join(parts)


def _unbroken(
    groups: Sequence[Sequence[tuple[float, float | None]]],
) -> list[list[Sequence[tuple[float, float | None]]]]:
    """Split the groups of points where one has no value at all."""
    runs: list[list[Sequence[tuple[float, float | None]]]] = [[]]
    for group in groups:
        if any(y is not None for _, y in group):
            runs[-1].append(group)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
