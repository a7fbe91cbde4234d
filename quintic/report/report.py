"""A training run as one HTML page that a person without background can read.

Here: what the page of one run says, from the records of `metrics`. Not here: several runs side by side (`comparison`,
whose `write_comparison` is at hand here too), drawings (`figures`), tables and styles (`page`,
``report_template.html``). A page is one file without scripts: it can be mailed, printed and opened offline.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from quintic.report.comparison import write_comparison
from quintic.report.figures import MAX_POINTS, Bar, Curve, Reference, bar_chart, line_chart, share_bar, upper_edge
from quintic.report.history import RunHistory
from quintic.report.page import (
    axis_tabs,
    date,
    duration,
    finite,
    large_number,
    number_table,
    render_page,
    section,
    settings_table,
    write_text_atomically,
)
from quintic.report.tasks import tasks_section

__all__ = ["REPORT_FILE", "write_comparison", "write_report"]

REPORT_FILE = "report.html"
"""The name of the page in a run's folder."""

_MAX_TABLE_ROWS = 40
_MAX_SPIKES = 10
_PHASES = (
    ("data", "waiting for data"),
    ("forward_backward", "forward and backward pass (predicting, and computing the gradients)"),
    ("optimizer", "optimizer (changing the weights)"),
)
_LABELS = {
    "matrix_parameters": "of these in weight matrices",
    "flops_per_token": "arithmetic operations per token",
    "memory_gb": "memory (GB)",
}
_SETUP_TABLES = (
    ("Model", "model"),
    ("Data", "data"),
    ("Machine", "machine"),
    ("Versions", "versions"),
    ("Git checkout", "git"),
)
_BITS_PER_BYTE = (
    "Bits per byte says how well the model predicts text that it was not trained on. Reading on, it gives each "
    "possible next piece of text a probability; what it expected costs few bits, a surprise costs many. A file holds "
    "8 bits for each byte (an English letter is one byte), so 8 would mean that nothing was predicted. Lower is "
    "better. It is also the size to which the model could compress the text, which is why compressors are a fair "
    "ruler for it."
)

Records = Sequence[Mapping[str, Any]]


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run's folder, from its ``metrics.jsonl``; finished or not.

    Args:
        run_dir: the folder of the run.

    Returns:
        The path of the page, which replaces an older one in one move.

    Raises:
        ConfigError: if the folder holds no log, or one without any step.
        DataError: if the log is damaged.
    """
    folder = Path(run_dir)
    history = RunHistory.load(folder)
    title = str(history.run.get("name") or folder.resolve().name)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="status">{escape(_status(history))}</p>',
        _headline(history),
        _facts(history),
        _learning(history),
        tasks_section(history.core),
        _settings_over_time(history),
        _layers(history),
        _speed(history),
        _samples(history),
        _setup(history),
    ]
    path = folder / REPORT_FILE
    write_text_atomically(path, render_page(f"{title}: training report", "\n".join(body)))
    return path


def _status(history: RunHistory) -> str:
    last = (history.train or history.evals)[-1]["step"]
    total = history.run.get("total_steps")
    parts = [f"Started {date(str(history.run['time']))}"] if history.run.get("time") else []
    if history.final:
        parts.append(f"finished after {int(history.final.get('step', last)):,} steps")
    else:
        parts.append(f"not finished: step {last:,}" + (f" of {total:,}" if total else ""))
    if history.resumed_at:
        parts.append("continued from step " + ", ".join(f"{step:,}" for step in history.resumed_at))
    return (text := "; ".join(parts))[0].upper() + text[1:] + "."


def _headline(history: RunHistory) -> str:
    """The one figure, in large, beside the two references."""
    bpb = _newest(history, "bpb")
    baselines = history.final.get("baselines") or {}
    xz, bigram = finite(baselines.get("xz_bpb")), finite(baselines.get("bigram_bpb"))
    when = "" if history.final else " so far"
    if bpb is None:
        why = "the last validation result was not a finite number" if history.evals else "no validation result yet"
        big = f'<div class="big">–<small>bits per byte: {why}</small></div>'
    else:
        big = f'<div class="big">{bpb:.3f}<small>bits per byte on the validation text{when}</small></div>'
    bars = [Bar(label="this model", value=bpb, text=f"{bpb:.3f}", color=0)] if bpb is not None else []
    text = "The validation text was held back from training: the model has never seen it. "
    if bpb is not None and xz is not None:
        text += (
            f"<code>xz -9</code>, a strong general-purpose compressor, needs {xz:.2f} bits for each byte of the same "
            f"text, this model {bpb:.2f}. "
        )
        bars.append(Bar(label="xz -9 (compressor)", value=xz, text=f"{xz:.3f}", color=1))
    if bpb is not None and bigram is not None:
        text += f"A byte bigram, which guesses each byte from the one before it, needs {bigram:.2f}. "
        bars.append(Bar(label="byte bigram", value=bigram, text=f"{bigram:.3f}", color=2))
    if num_bytes := finite(baselines.get("bytes")):
        text += f"The text has {large_number(num_bytes)} bytes."
    if not baselines and not history.final:
        text += "Two references (<code>xz -9</code> and a byte bigram) are added when the run ends."
    chart = bar_chart(bars, title="Bits per byte") if len(bars) > 1 else ""
    return (
        f'<section class="headline"><div>{big}</div><div><p>{text}</p>{chart}</div>'
        f'<details class="wide"><summary>What is bits per byte?</summary><p>{_BITS_PER_BYTE}</p></details></section>'
    )


def _facts(history: RunHistory) -> str:
    last = (history.train or history.evals)[-1]
    seconds = finite(history.final.get("seconds")) or finite(last.get("seconds"))
    parameters, tokens = finite((history.run.get("model") or {}).get("parameters")), finite(last.get("tokens"))
    loss = _newest(history, "loss")
    facts = [
        (f"{loss:.3f}" if loss is not None else None, "validation loss (nats per token)"),
        (large_number(parameters) if parameters else None, "parameters (numbers that were learnt)"),
        (large_number(tokens) if tokens else None, "tokens read"),
        (duration(seconds) if seconds else None, "of training"),
        (_cell(history.newest("flops"), "{:.3g}".format), "floating-point operations"),
        (_cell(history.newest("peak_memory_bytes"), _gibibytes), "of memory at most"),
        ((history.run.get("machine") or {}).get("device"), "trained on this device"),
    ]
    items = "".join(
        f"<li><b>{escape(str(value))}</b><span>{escape(text)}</span></li>"
        for value, text in facts
        if value and value != "–"
    )
    return f'<section><ul class="facts">{items}</ul></section>' if items else ""


def _learning(history: RunHistory) -> str:
    """Loss and bits per byte over steps, tokens and time."""
    baselines = history.final.get("baselines") or {}
    named = (("xz -9", "xz_bpb"), ("byte bigram", "bigram_bpb"))
    references = [
        Reference(label=f"{label}: {value:.2f}", y=value)
        for label, key in named
        if (value := finite(baselines.get(key))) is not None
    ]
    records = [*history.train, *history.evals]
    cuts = {field: upper_edge(_points(records, field)) for field in ("loss", "bpb")}

    def draw(x: str, x_label: str, divisor: float) -> str:
        charts = []
        for field, title, unit in (("bpb", "Bits per byte", "bits per byte"), ("loss", "Loss", "nats per token")):
            curves = [
                _curve("on the training text", history.train, x, field, divisor=divisor, style="noisy", color=1),
                _curve("on the validation text", history.evals, x, field, divisor=divisor, style="points"),
            ]
            lines = references if field == "bpb" else []
            limits = (None, cuts[field])
            charts.append(
                line_chart(curves, title=title, x_label=x_label, y_label=unit, references=lines, y_limits=limits)
            )
        return "".join(charts)

    notes = ["Both say how surprised the model is by text: lower is better."]
    if any(cut is not None for cut in cuts.values()):
        notes.append("The first steps, where the model knows nothing yet, reach beyond the top edge.")
    if len(history.train) > MAX_POINTS:
        notes.append("The line of the training text is an average over neighbouring steps, the band their range.")
    lost = [r["step"] for r in records if "loss" in r and finite(r["loss"]) is None]
    warning = ""
    if lost:
        warning = (
            f"<p><b>The loss was not a finite number in {len(lost):,} "
            f"{'record' if len(lost) == 1 else 'records'}, first at step {min(lost):,}.</b> Training has become "
            f"unstable there; a lower learning rate usually helps. The curves have gaps at these steps.</p>"
        )
    if history.spikes:
        warning += f"<p><b>{_spikes(history)}</b></p>"
    least = history.newest("least_loss")
    if least is not None:
        notes.append(f"Averaged over some ten steps, the least loss on the training text was {least:.4f}.")
    rows = [
        [f"{r['step']:,}", *(_cell(r.get(key), form) for key, form in _EVAL_COLUMNS)] for r in _thinned(history.evals)
    ]
    header = ["step", "tokens", "time", "loss", "bits per byte"]
    table = f"<details><summary>Validation results as a table</summary>{number_table(header, rows)}</details>"
    charts = axis_tabs(draw, records, name="learning")
    return section("How it learnt", f"<p>{' '.join(notes)}</p>", warning, charts, table if rows else "")


def _spikes(history: RunHistory) -> str:
    """Say at which steps the loss jumped, and what was done about it."""
    done = {
        "skip": "the updates of these steps were left out",
        "rollback": "the run went back to its last checkpoint and on with other text",
    }
    steps = [f"{record['step']:,} ({record['spike'] or 0:.1f})" for record in history.spikes]
    listed = ", ".join(steps[:_MAX_SPIKES]) + (" and others" if len(steps) > _MAX_SPIKES else "")
    action = done.get(history.spikes[-1].get("on_spike") or "")
    return (
        f"The loss jumped at step {listed}: in parentheses, how many standard deviations above the average before it"
        f"{f'; {action}' if action else ''}."
    )


_EVAL_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("tokens", large_number),
    ("seconds", duration),
    ("loss", "{:.4f}".format),
    ("bpb", "{:.4f}".format),
)


def _settings_over_time(history: RunHistory) -> str:
    """Learning rates and weight decay relative to their peaks (they differ by orders of magnitude), and momentum."""
    steps = _steps(history.train)
    series = _by_kind(history.train, "lr")
    series["weight decay"] = (steps, [finite(record.get("weight_decay")) for record in history.train])
    # Groups that follow the same schedule share a line; drawn one over another, all but the last would be hidden.
    shapes: list[tuple[list[str], list[float], list[float | None]]] = []
    for name, (x, values) in series.items():
        peak = max((value for value in values if value is not None), default=0.0)
        if peak <= 0:
            continue
        shape = [None if value is None else 100 * value / peak for value in values]
        label = f"{name} (peak {peak:.3g})"
        same = next((names for names, other_x, y in shapes if other_x == x and _is_close(shape, y)), None)
        if same is None:
            shapes.append(([label], x, shape))
        else:
            same.append(label)
    curves = [Curve(label=", ".join(names), x=x, y=y, color=i) for i, (names, x, y) in enumerate(shapes)]
    momentum = Curve(label="momentum", x=steps, y=[finite(r.get("momentum")) for r in history.train], color=3)
    unit, title = "percent of the peak", "Learning rates, in percent of their peaks"
    chart = line_chart(curves, title=title, x_label="training steps", y_label=unit, y_limits=(0.0, None))
    if any(value is not None for value in momentum.y):
        unit = "share that is kept"
        chart += line_chart([momentum], title="Momentum", x_label="training steps", y_label=unit)
    text = (
        "<p>The learning rate sets how large the changes of one step are, the weight decay how strongly large weights "
        "are pulled back to zero. Momentum is the share of the earlier gradients that each step keeps, so that noise "
        "averages out.</p>"
    )
    return section("Learning rates and momentum", text, f'<div class="grid2">{chart}</div>') if curves else ""


def _is_close(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    """Whether two curves in percent differ by less than the width of a line."""
    pairs = zip(first, second, strict=True)
    return all(a == b or (a is not None and b is not None and abs(a - b) < 0.1) for a, b in pairs)


def _layers(history: RunHistory) -> str:
    """Typical sizes of gradients and updates per kind of layer."""
    charts = []
    for field, title in (("grad_rms", "Gradients"), ("update_rms", "Changes of the weights in one step")):
        curves = [
            Curve(label=name, x=x, y=y, color=index)
            for index, (name, (x, y)) in enumerate(_by_kind(history.train, field).items())
        ]
        if curves:
            charts.append(
                line_chart(curves, title=title, x_label="training steps", y_label="RMS over the weights", log_y=True)
            )
    norms = [record for record in history.train if finite(record.get("grad_norm")) is not None]
    if norms:
        curve = _curve("all weights together", norms, "step", "grad_norm", divisor=1, color=4)
        label = "Euclidean norm"
        charts.append(
            line_chart([curve], title="Norm of the gradient", x_label="training steps", y_label=label, log_y=True)
        )
    text = (
        "<p>The typical size (root mean square, RMS) over all weights of a kind of layer. Smooth curves that move "
        "slowly are healthy; a sudden jump shows where training became unstable. The axis is logarithmic: equal "
        "distances are equal factors.</p>"
    )
    return (
        section("Gradients and changes, layer by layer", text, f'<div class="grid2">{"".join(charts)}</div>')
        if charts
        else ""
    )


def _speed(history: RunHistory) -> str:
    """Tokens per second, and where the time of a step goes."""
    speeds = [finite(record.get("tokens_per_second")) for record in history.train]
    known = [speed for speed in speeds if speed is not None]
    parts = []
    if known:
        label = f"measured (half of the steps were faster than {large_number(statistics.median(known))})"
        curve = Curve(label=label, x=_steps(history.train), y=speeds, style="noisy", color=2)
        units = ("training steps", "tokens per second")
        chart = line_chart([curve], title="Tokens per second", x_label=units[0], y_label=units[1], y_limits=(0.0, None))
        parts.append(chart)
    shares = _time_shares(history)
    if shares:
        bars = [
            Bar(label=label, value=share, text=f"{100 * share:.1f} %", color=index)
            for index, (label, share) in enumerate(shares)
        ]
        times = [sum(r["times_ms"].values()) for r in history.train if _is_timed(r)]
        typical = f"<p>A typical step took {statistics.median(times):.3g} milliseconds.</p>" if times else ""
        parts.append(f"<div>{share_bar(bars, title='Where the time of a step goes')}{typical}{_steady(history)}</div>")
    return section("Speed", f'<div class="grid2">{"".join(parts)}</div>') if parts else ""


def _steady(history: RunHistory) -> str:
    """The speed after the first ten steps, against that of plain matrix products, and what the start took."""
    final = history.final
    speed, mfu = finite(final.get("tokens_per_second")), finite(final.get("mfu"))
    rate = finite((history.run.get("machine") or {}).get("matrix_flops_per_second"))
    if speed is None or mfu is None or rate is None:
        return ""
    device = "this machine" if history.run.get("ranks", 1) == 1 else "each device"
    extra, compiled = finite(final.get("first_step_extra_seconds")), finite(final.get("compile_seconds"))
    start = f" The first step took {duration(extra)} more than others" if extra is not None else ""
    start += f"; compiling took {duration(compiled)}." if start and compiled else "." if start else ""
    return (
        f"<p>Without the first ten steps: {large_number(speed)} tokens per second, {100 * mfu:.1f} % of the "
        f"{rate / 1e12:.3g} trillion operations per second at which {device} multiplied two large matrices when "
        f"the run began (model FLOPs utilisation).{start}</p>"
    )


def _time_shares(history: RunHistory) -> list[tuple[str, float]]:
    """Shares of the phases of a step; from the final record, else from the steps so far."""
    breakdown = history.final.get("breakdown") or {}
    shares = {name: finite(breakdown.get(f"{name}_frac")) for name, _ in _PHASES}
    if not any(shares.values()):
        timed = [record["times_ms"] for record in history.train if _is_timed(record)]
        sums = {name: sum(times.get(name) or 0.0 for times in timed) for name, _ in _PHASES}
        total = sum(sums.values())
        if total <= 0:
            return []
        shares = {name: value / total for name, value in sums.items()}
    found = [(label, share) for name, label in _PHASES if (share := shares[name]) is not None]
    rest = 1.0 - sum(share for _, share in found)
    return [*found, ("everything else", rest)] if rest > 0.002 else found


def _is_timed(record: Mapping[str, Any]) -> bool:
    times = record.get("times_ms")
    return isinstance(times, Mapping) and all(finite(value) is not None for value in times.values())


def _samples(history: RunHistory) -> str:
    if not history.samples:
        return ""
    blocks = "".join(
        f"<pre><b>{escape(str(sample.get('prompt', '')))}</b>{escape(str(sample.get('text', '')))}</pre>"
        for sample in history.samples
    )
    text = "<p>The beginning in colour was given; the model wrote the rest, one token after the other.</p>"
    return section("What it writes", text, blocks)


def _setup(history: RunHistory) -> str:
    """Configuration, data, machine, and how to run it again."""
    run = history.run
    tables = [
        f"<h3>{title}</h3>{settings_table({_LABELS.get(name, name): value for name, value in run[key].items()})}"
        for title, key in _SETUP_TABLES
        if isinstance(run.get(key), Mapping) and run[key]
    ]
    columns = "".join(f"<div>{table}</div>" for table in tables)
    facts = section("Model, data and machine", f'<div class="grid2">{columns}</div>' if columns else "")
    settings = settings_table(run.get("config") or {})
    config = section(
        "Configuration", f"<details><summary>All settings</summary>{settings}</details>" if settings else ""
    )
    commands = dict.fromkeys(str(run[key]) for key in ("command", "repeat") if run.get(key))
    command = "".join(f"<pre>{escape(text)}</pre>" for text in commands)
    text = (
        "<p>The same command on the same data trains this model again; another machine rounds a little differently.</p>"
    )
    if len(commands) > 1:
        text += (
            "<p>The first is what was typed. The second has everything written out that was chosen for it, sizes and "
            "precision too: it makes the same run wherever it is typed.</p>"
        )
    return facts + config + (section("How to reproduce it", text, command) if command else "")


def _curve(label: str, records: Records, x: str, y: str, *, divisor: float, **look: Any) -> Curve:
    """One field of the records over another; records without the field x are left out."""
    points = [(value / divisor, finite(r.get(y))) for r in records if (value := finite(r.get(x))) is not None]
    return Curve(label=label, x=[x for x, _ in points], y=[y for _, y in points], **look)


def _points(records: Records, field: str) -> list[tuple[float, float]]:
    """(step, value) of the finite values of a field."""
    return [(float(r["step"]), value) for r in records if (value := finite(r.get(field))) is not None]


def _steps(records: Records) -> list[float]:
    return [float(record["step"]) for record in records]


def _by_kind(records: Records, field: str) -> dict[str, tuple[list[float], list[float | None]]]:
    """The entries of a field that holds a mapping, as (steps, values) per key; steps without the field left out."""
    series: dict[str, tuple[list[float], list[float | None]]] = {}
    for record in records:
        entries = record.get(field)
        for name, value in entries.items() if isinstance(entries, Mapping) else ():
            steps, values = series.setdefault(str(name), ([], []))
            steps.append(float(record["step"]))
            values.append(finite(value))
    return series


def _newest(history: RunHistory, field: str) -> float | None:
    """The final value of a field, or that of the last evaluation; None if not finite, never an older one."""
    records = [record for record in (*history.evals, history.final) if field in record]
    return finite(records[-1][field]) if records else None


def _thinned(records: Records) -> Records:
    """So many records that a table stays readable, the last one among them."""
    stride = -(-len(records) // _MAX_TABLE_ROWS)
    return records[::-1][:: max(1, stride)][::-1]


def _gibibytes(value: float) -> str:
    return f"{value / 2**30:.3g} GiB"


def _cell(value: Any, form: Callable[[float], str]) -> str:
    number = finite(value)
    return "–" if number is None else form(number)
