"""The tables of the orthogonalisation benchmark, and what their columns say."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common.results import in_cell, made_by, table
from benchmarks.orthogonalize.contestants import of
from benchmarks.orthogonalize.shapes import CEILING, LIMITS, NOMINAL_TFLOPS, PEER_LIMIT, Shape, floor_ms

COLUMNS = """\
- **device**: CUDA events before and after one call, the device kept busy until the host is done: what the call costs in
  a training loop whose host runs ahead. Floors, ratios and limits are about this one.
- **idle**: the same, from an idle device: launches and the host's work included.
- **floor**: the fewest operations known for five quintic polynomials (symmetric products counted half; the best of the
  standard form, the Gram form, and the Gram form with one restart) at the rate of a bf16 product of 8192 x 8192 random
  matrices in the same run; in brackets at {nominal:.0f} TFLOP/s.
- **error**: relative Frobenius error against the contestant's own polynomials of the same bf16 input in float64; the
  larger one of the first and the last matrix of the batch.
- Medians; p10 to p90 in brackets. Inputs are random normal, several sets in turn."""

# Wrong results are not a way to be fast. Plain bf16 is at 2e-2.
LARGEST_ERROR = 0.1

Row = dict[str, Any]


def milliseconds(row: Row) -> float:
    """Return the time that a row is compared by: on a busy device, or on a CPU that of a call."""
    return float(row.get("device_ms", row["idle_ms"])["median"])


def is_valid(row: Row) -> bool:
    """Return whether a row has a time, and a result worth timing."""
    error = row.get("error_frobenius")
    return not row.get("error") and row.get("finite", True) and error is not None and error <= LARGEST_ERROR


class Summary:
    """The rows of each shape, and their best ones."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.rows = [row for row in rows if row["contestant"] != CEILING]
        ceilings = [row["tflops"] for row in rows if row["contestant"] == CEILING]
        self.ceilings = sorted(ceilings)
        self.tflops = statistics.median(ceilings) if ceilings else None

    def of_shape(self, shape: Shape) -> list[Row]:
        """Return its rows."""
        return [row for row in self.rows if row["shape"] == str(shape)]

    def quintic(self, shape: Shape) -> Row | None:
        """Return the row of Quintic's default."""
        own = (row for row in self.of_shape(shape) if row["contestant"] == "quintic" and not row.get("error"))
        return next(own, None)

    def best_peer(self, shape: Shape) -> Row | None:
        """Return the fastest row of another library whose result is right."""
        rows = [row for row in self.of_shape(shape) if of(row["contestant"]).is_peer and is_valid(row)]
        return min(rows, key=milliseconds, default=None)

    def multiples(self, shape: Shape) -> tuple[float | None, float | None]:
        """Return Quintic's time over the floor, at the measured and at the nominal rate."""
        row = self.quintic(shape)
        if row is None or row["device"] != "cuda":
            return None, None
        time_ms = milliseconds(row)
        measured = time_ms / floor_ms(shape, self.tflops) if self.tflops else None
        return measured, time_ms / floor_ms(shape, NOMINAL_TFLOPS)

    def ratio(self, shape: Shape) -> float | None:
        """Return Quintic's time over that of the fastest other library."""
        mine, best = self.quintic(shape), self.best_peer(shape)
        return milliseconds(mine) / milliseconds(best) if mine and best else None


def digits(value: float | None) -> str:
    """Return three digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.3g}"


def times(row: Row, name: str) -> str:
    """Return median and spread of one kind of time, or a dash."""
    if name not in row:
        return "-"
    found = row[name]
    return f"{digits(found['median'])} ({digits(found['p10'])} to {digits(found['p90'])})"


def error_text(row: Row | None) -> str:
    """Return the relative error of a row's result."""
    if row is None or row.get("error"):
        return "-"
    error = row.get("error_frobenius")
    return "**not finite**" if error is None else f"{error:.1e}" if error <= LARGEST_ERROR else f"**{error:.1e}**"


def main_table(summary: Summary, shapes: Sequence[Shape]) -> list[str]:
    """Return one line per shape."""
    heads = ("batch x m x n", "floor (ms)", "Quintic: device (ms)", "idle (ms)", "x floor", "best other: device (ms)")
    heads += ("which", "Quintic / best", "Quintic's error", "its error")

    def cells(shape: Shape) -> list[str]:
        mine, best = summary.quintic(shape), summary.best_peer(shape)
        measured, nominal = summary.multiples(shape)
        floors = [floor_ms(shape, rate) if rate else None for rate in (summary.tflops, NOMINAL_TFLOPS)]
        return [
            str(shape),
            f"{digits(floors[0])} ({digits(floors[1])})",
            times(mine, "device_ms") if mine else "-",
            times(mine, "idle_ms") if mine else "-",
            f"{digits(measured)} ({digits(nominal)})",
            digits(milliseconds(best)) if best else "-",
            best["contestant"] if best else "-",
            digits(summary.ratio(shape)),
            error_text(mine),
            error_text(best),
        ]

    return table(heads, map(cells, shapes))


def targets_table(summary: Summary, shapes: Sequence[Shape]) -> list[str]:
    """Return one line per shape that has a limit: kept or not, against the floor and against the fastest other."""
    heads = ("batch x m x n", "x floor", "limit", "", "x floor at nominal rate", "Quintic / best", "limit", "")
    rows, verdicts = [], []
    for shape in shapes:
        if shape not in LIMITS:
            continue
        (measured, nominal), ratio = summary.multiples(shape), summary.ratio(shape)
        found = [verdict(measured, LIMITS[shape]), verdict(ratio, PEER_LIMIT)]
        verdicts += found
        rows.append([str(shape), digits(measured), f"{LIMITS[shape]:g}", found[0], digits(nominal)])
        rows[-1] += [digits(ratio), f"{PEER_LIMIT:g}", found[1]]
    passed, missing = verdicts.count("pass"), verdicts.count("not measured")
    return [*table(heads, rows), "", f"{passed} of {len(verdicts)} limits kept, {missing} not measured."]


def verdict(value: float | None, limit: float) -> str:
    """Return whether a value keeps its limit."""
    return "not measured" if value is None else "pass" if value <= limit else "**miss**"


def details_table(summary: Summary, shape: Shape, jobs: Sequence[Row]) -> list[str]:
    """Return the lines of everyone for one shape, the fastest first; then what failed or was not measured."""
    heads = ("contestant", "device (ms)", "idle (ms)", "host (ms)", "error", "repeatable", "first call (s)")
    rows = summary.of_shape(shape)
    lines = [
        [
            row["contestant"],
            *(times(row, name) for name in ("device_ms", "idle_ms", "host_ms")),
            error_text(row),
            "yes" if row.get("repeatable") else "no",
            f"{row['first_s']:.1f}",
        ]
        for row in sorted((row for row in rows if not row.get("error")), key=milliseconds)
    ]
    missing = [(row["contestant"], in_cell(row["error"])) for row in rows if row.get("error")]
    known = {row["contestant"] for row in rows}
    missing += [
        (job["contestant"], "not measured: the time was over")
        for job in jobs
        if job["shape"] == str(shape) and job["contestant"] not in known
    ]
    return table(heads, [*lines, *([name, why, *[""] * 5] for name, why in missing)])


def page(
    rows: Iterable[Row], jobs: Sequence[Row], shapes: Sequence[Shape], command: str, commit: str, *, limits: bool
) -> str:
    """Return the result as Markdown; with `limits`, which of them are kept."""
    summary = Summary(rows)
    known = next((row for row in summary.rows if "versions" in row), None)
    found: dict[str, str] = {}
    for row in summary.rows:
        found |= row.get("versions", {})
    device = known["device_name"] if known else "an unknown device"
    rate = "not measured"
    if summary.tflops:
        low, high = summary.ceilings[0], summary.ceilings[-1]
        rate = f"{summary.tflops:.0f} TFLOP/s ({low:.0f} to {high:.0f}, once per library)"
    lines = [
        f"# Orthogonalisation alone, on one {device}",
        "",
        f"{made_by(command, commit, found)}. The product of 8192 x 8192 matrices: {rate}.",
        "",
        COLUMNS.format(nominal=NOMINAL_TFLOPS),
        "",
        *main_table(summary, shapes),
    ]
    if limits:
        lines += ["", "## Limits", "", *targets_table(summary, shapes)]
    lines += ["", "## Everyone"]
    for shape in shapes:
        lines += ["", f"### {shape}", "", *details_table(summary, shape, jobs)]
    return "\n".join(lines) + "\n"


def short_line(row: Row) -> str:
    """Return one row for the terminal."""
    if row["contestant"] == CEILING:
        return f"{CEILING} ({row['shape']}): {row['tflops']:.0f} TFLOP/s"
    start = f"{row['shape']:14} {row['contestant']:28}"
    if row.get("error"):
        return f"{start} failed: {row['error']}"
    parts = [f"{name[:-3]} {times(row, name)}" for name in ("device_ms", "idle_ms") if name in row]
    return f"{start} {', '.join(parts)} ms, error {error_text(row)}, first {row['first_s']:.1f} s"
