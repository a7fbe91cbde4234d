"""`write_report` makes the page of a training run, for readers without background knowledge.

It takes the content from the records of the run's log (`history`); the text is in ``templates/run.html``. A page is one
file without scripts, which can be mailed, printed and opened offline. `comparison` makes pages of several runs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintic.durable import json_object
from quintic.report.charts import MAX_POINTS, Chart, Curve, curve_of, line_chart, upper_edge
from quintic.report.formatting import date, duration, finite, flatten, humanize, large_number, or_dash, value_text
from quintic.report.history import SOURCE_FILE, RunHistory
from quintic.report.page import learning_axes, write_page
from quintic.report.speed import about_speed
from quintic.report.tasks import about_tasks

__all__ = ["write_report"]

_REPORT_FILE = "report.html"
_MAX_TABLE_ROWS = 40
_MAX_SPIKES = 10
_SETUP_TABLES = (
    ("Model", "model"),
    ("Data", "data"),
    ("Machine", "machine"),
    ("Versions", "versions"),
    ("Git checkout", "git"),
)
_ON_SPIKE = {
    "skip": "; the updates of these steps were left out",
    "rollback": "; the run went back to its last checkpoint and on with other text",
}

Records = Sequence[Mapping[str, Any]]


def write_report(run_dir: str | Path, out: Path | None = None) -> Path:
    """Write the page of a run, finished or not, from its ``metrics.jsonl``, and return its path.

    An older page is replaced by one rename. If matplotlib cannot be loaded, the page has no charts, and a line on
    standard error tells so.

    Args:
        run_dir: the folder of the run.
        out: the file to write; by default ``report.html`` in that folder.

    Raises:
        ConfigError: the folder holds no log, or a log without any step, or the page cannot be written.
        DataError: the log is damaged.
    """
    folder = Path(run_dir)
    history = RunHistory.load(folder)
    run, path = history.run, out or folder / _REPORT_FILE
    name = str(run.get("name") or folder.resolve().name)
    tables = [(title, run[key]) for title, key in _SETUP_TABLES if isinstance(run.get(key), Mapping) and run[key]]
    if len(history.final.get("epochs") or {}) > 1:
        tables.insert(1, ("Times that each text was read", history.final["epochs"]))
    for step, changed in history.changes:
        tables.append((f"Machine from step {step:,} on", {name: new for name, (_, new) in changed.items()}))
    git = run.get("git") or {}
    write_page(
        path,
        "run.html",
        title=f"{name}: training report",
        name=name,
        status=_status(history),
        finished=bool(history.final),
        evaluated=bool(history.evals),
        loss=_newest(history, "loss"),
        **_headline(history),
        facts=_facts(history),
        learning=_learning(history),
        tasks=about_tasks(history.core),
        rates=_rates(history),
        layers=_layers(history),
        speed=about_speed(history),
        samples=[{key: str(sample.get(key, "")) for key in ("prompt", "text")} for sample in history.samples],
        setup=[(title, [(humanize(key), value) for key, value in flatten(values)]) for title, values in tables],
        config=list(flatten(run.get("config") or {})),
        typed=run.get("command"),
        continued=[(record["step"], record["command"]) for record in history.resumed if record.get("command")],
        changes=_changes(history),
        repeat=history.repeat,
        ranks=history.ranks,
        sources=_sources(folder),
        commit=str(git.get("commit") or ""),
        dirty=bool(git.get("dirty")),
    )
    return path


def _sources(folder: Path) -> list[tuple[str, list[tuple[str, Any]], str]]:
    """Return the source code of the run and of each resumed section: (title, facts, diff to the commit)."""
    sources = []
    name = Path(SOURCE_FILE)
    for path in sorted(folder.glob(f"{name.stem}*{name.suffix}"), key=lambda path: (path.name != name.name, path.name)):
        facts = json_object(path)
        facts.pop("files", None)
        step = path.stem.rpartition("-")[2].lstrip("0")
        title = f"Source from step {step} on" if path.name != SOURCE_FILE else "Source"
        diff = path.with_suffix(".diff")
        try:
            text = diff.read_text(encoding="utf-8", errors="replace") if facts.get("diff_bytes") else ""
        except OSError:
            text = f"{diff.name} is gone."
        sources.append((title, [(humanize(key), value) for key, value in facts.items()], text))
    return sources


def _status(history: RunHistory) -> str:
    last = (history.train or history.evals)[-1]["step"]
    total = history.total_steps
    parts = [f"Started {date(str(history.run['time']))}"] if history.run.get("time") else []
    # In a speedrun the entry is the name of the run.
    options = (history.run.get("config") or {}).get("run")
    if isinstance(options, Mapping) and (source := options.get("init_from")) is not None:
        parts.append(f"from the weights of {source}")
    if history.final:
        parts.append(f"finished after {int(history.final.get('step', last)):,} steps")
    else:
        parts.append(f"not finished: step {last:,}" + (f" of {total:,}" if total else ""))
    if history.resumed_at:
        parts.append("continued from step " + ", ".join(f"{step:,}" for step in history.resumed_at))
    parts += [f"from step {step:,} on with {changes}" for step, changes in _changes(history)]
    for record in history.lengthened:
        lengths = f"from {record.get('steps_before') or 0:,} to {record['total_steps']:,} steps"
        parts.append(f"made longer after step {record['step']:,}, {lengths}")
    return (text := "; ".join(parts))[0].upper() + text[1:] + "."


def _changes(history: RunHistory) -> list[tuple[int, str]]:
    """Return each resumption with other settings: its step, and the settings in words."""
    return [
        (
            step,
            ", ".join(
                f"{humanize(name)} {value_text(new)} (before: {value_text(old)})" for name, (old, new) in of.items()
            ),
        )
        for step, of in history.changes
    ]


def _headline(history: RunHistory) -> dict[str, Any]:
    """Return bits per byte with its standard error, and the two reference values."""
    baselines = history.final.get("baselines") or {}
    bpb, xz, bigram = _newest(history, "bpb"), finite(baselines.get("xz_bpb")), finite(baselines.get("bigram_bpb"))
    error = finite(history.evals[-1].get("bpb_stderr")) if history.evals and bpb is not None else None
    bars = []
    if bpb is not None:
        low, high = bpb - (error or 0), bpb + (error or 0)
        bars.append(("this model", f"{bpb:.3f}" + (f" ± {error:.3f}" if error is not None else ""), bpb, low, high))
    named = (("xz -9 (compressor)", xz), ("byte bigram", bigram))
    bars += [(label, f"{value:.3f}", value, 0, 0) for label, value in named if bpb is not None and value is not None]
    return {
        "bpb": bpb,
        "bpb_stderr": error,
        "xz": xz,
        "bigram": bigram,
        "num_bytes": finite(baselines.get("bytes")),
        "comparison": bars,
    }


def _facts(history: RunHistory) -> list[tuple[str, str]]:
    last = (history.train or history.evals)[-1]
    model, machine = history.run.get("model") or {}, history.run.get("machine") or {}
    trained_on = "trained on this device" if history.ranks == 1 else f"trained on {history.ranks:,} of this device"
    least = history.least if len(history.evals) > 1 else None
    tokens, per_parameter, of = finite(last.get("tokens")), finite(model.get("parameters")), ""
    scaling = [finite(model.get(f"parameters_{part}")) for part in ("blocks", "head")]
    # The parameters that --tokens-per-param counts.
    if all(scaling):
        per_parameter, of = sum(filter(None, scaling)), " of matrices and head"
    facts: list[tuple[Any, Callable[[Any], str], str]] = [
        (_newest(history, "loss"), "{:.3f}".format, "validation loss (nats per token)"),
        (finite(model.get("parameters")), large_number, "parameters (numbers that were learnt)"),
        (tokens, large_number, "tokens read"),
        (tokens and per_parameter and tokens / per_parameter, "{:.3g}".format, f"tokens read per parameter{of}"),
        (least and least["bpb"], "{:.4f}".format, f"bits per byte at the least, at step {(least or last)['step']:,}"),
        (finite(history.final.get("seconds")) or finite(last.get("seconds")), duration, "of training"),
        (history.newest("flops"), large_number, "floating-point operations"),
        (history.newest("peak_memory_bytes"), lambda value: f"{value / 2**30:.3g}\u00a0GiB", "of memory at most"),
        (machine.get("device"), str, trained_on),
    ]
    return [(form(value), words) for value, form, words in facts if value]


def _learning(history: RunHistory) -> dict[str, Any]:
    """Return charts of loss and bits per byte over steps, tokens and time, and remarks about them."""
    baselines = history.final.get("baselines") or {}
    named = (("xz -9", baselines.get("xz_bpb")), ("byte bigram", baselines.get("bigram_bpb")))
    references = {f"{label}: {value:.2f}": value for label, bpb in named if (value := finite(bpb)) is not None}
    records = [*history.train, *history.evals]
    cuts = {field: upper_edge(_points(records, field)) for field in ("loss", "bpb")}

    def draw(field: str, title: str, unit: str, x: str, x_label: str, divisor: float) -> Chart:
        curves = [
            curve_of(history.train, x, field, divisor=divisor, label="on the training text", style="noisy", look=1),
            curve_of(history.evals, x, field, divisor=divisor, label="on the validation text", style="points"),
        ]
        lines, limits = references if field == "bpb" else None, (None, cuts[field])
        return line_chart(curves, title=title, x_label=x_label, y_label=unit, references=lines, y_limits=limits)

    charts = (("bpb", "Bits per byte", "bits per byte"), ("loss", "Loss", "nats per token"))
    steps = [f"{record['step']:,} ({record['spike'] or 0:.1f})" for record in history.spikes]
    panels = {tab: [draw(*chart, *axis) for chart in charts] for tab, axis in learning_axes(records).items()}
    return {
        "panels": panels,
        "is_cut": any(chart.is_cut for chart in panels["by steps"]),
        "is_thinned": len(history.train) > MAX_POINTS,
        "is_both": bool(_points(history.train, "loss") and _points(history.evals, "loss")),
        "has_errors": bool(_points(history.evals, "bpb_stderr")),
        "further_targets": _further_targets(history),
        "least": history.newest("least_loss"),
        "lost": [record["step"] for record in records if "loss" in record and finite(record["loss"]) is None],
        "spikes": ", ".join(steps[:_MAX_SPIKES]) + (" and others" if len(steps) > _MAX_SPIKES else ""),
        "on_spike": _ON_SPIKE.get(history.spikes[-1].get("on_spike") or "", "") if history.spikes else "",
        "rows": [_row(record) for record in _thinned(history.evals)],
    }


def _further_targets(history: RunHistory) -> str:
    """Return the targets other than the next token that a speedrun's training loss includes, in words."""
    model = history.run.get("model") or {}
    words = {
        "multi_token": "the tokens after the next one",
        "prefix_tokens": "the longest token that the next begins with",
    }
    return " and ".join(text for feature, text in words.items() if model.get(feature))


def _row(record: Mapping[str, Any]) -> list[str]:
    forms: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("tokens", large_number),
        ("seconds", duration),
        ("loss", "{:.4f}".format),
        ("bpb", "{:.4f}".format),
        ("bpb_stderr", "±\u00a0{:.4f}".format),
    )
    step, *texts, bpb, error = [f"{record['step']:,}"] + [or_dash(form)(record.get(key)) for key, form in forms]
    return [step, *texts, bpb if error == "–" else f"{bpb} {error}"]


def _rates(history: RunHistory) -> list[Chart]:
    """Return charts of learning rates and weight decay relative to their peaks, and of momentum."""
    steps = [float(record["step"]) for record in history.train]
    series = _by_kind(history.train, "lr")
    series["weight decay"] = (steps, [finite(record.get("weight_decay")) for record in history.train])
    # Groups with the same schedule are drawn as one line, since the last of several equal lines would hide the others.
    curves: list[Curve] = []
    entries: list[tuple[str, int]] = []
    for name, (x, values) in series.items():
        peak = max((value for value in values if value is not None), default=0.0)
        if peak <= 0:
            continue
        shape = [None if value is None else 100 * value / peak for value in values]
        # An earlier curve with the same shape, or a new one.
        same = next((i for i, curve in enumerate(curves) if curve.x == x and _is_close(shape, curve.y)), len(curves))
        if same == len(curves):
            curves.append(Curve(label=name, x=x, y=shape, look=same))
        entries.append((f"{name} (peak {peak:.3g})", same))
    if not curves:
        return []
    title = "Learning rates and weight decay, in percent of their peaks"
    chart = line_chart(curves, title=title, y_label="percent of the peak", y_limits=(0.0, None))
    keys = [dataclasses.replace(chart.legend[same], label=label) for label, same in entries if chart.legend]
    momentum = curve_of(history.train, "step", "momentum", label="momentum", look=3)
    charts = [dataclasses.replace(chart, legend=keys)]
    if any(value is not None for value in momentum.y):
        charts.append(line_chart([momentum], title="Momentum", y_label="share of earlier gradients that is kept"))
    return charts


def _is_close(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    """Return whether two curves, in percent, differ by less than the width of a line."""
    pairs = zip(first, second, strict=True)
    return all(a == b or (a is not None and b is not None and abs(a - b) < 0.1) for a, b in pairs)


def _layers(history: RunHistory) -> list[Chart]:
    """Return charts of the RMS of gradients and updates by kind of layer, and of the norm of the whole gradient."""
    charts = []
    fields = (
        ("grad_rms", "Gradients", "RMS (nats per token, per weight)"),
        ("update_rms", "Changes of the weights in one step", "RMS of the change (no unit)"),
    )
    for field, title, unit in fields:
        series = _by_kind(history.train, field).items()
        curves = [Curve(label=name, x=x, y=y, look=index) for index, (name, (x, y)) in enumerate(series)]
        if curves:
            charts.append(line_chart(curves, title=title, y_label=unit, log_y=True))
    norms = [record for record in history.train if finite(record.get("grad_norm")) is not None]
    if norms:
        curve = curve_of(norms, "step", "grad_norm", label="all weights together", look=4)
        title, unit = "Norm of the gradient of all weights together", "Euclidean norm (nats per token, per weight)"
        charts.append(line_chart([curve], title=title, y_label=unit, log_y=True))
    return charts


def _points(records: Records, field: str) -> list[tuple[float, float]]:
    """Return (step, value) of the finite values of a field."""
    return [(float(r["step"]), value) for r in records if (value := finite(r.get(field))) is not None]


def _by_kind(records: Records, field: str) -> dict[str, tuple[list[float], list[float | None]]]:
    """Return the entries of a field that holds a mapping: key -> (steps, values), without steps that lack the field."""
    series: dict[str, tuple[list[float], list[float | None]]] = {}
    for record in records:
        entries = record.get(field)
        for name, value in entries.items() if isinstance(entries, Mapping) else ():
            steps, values = series.setdefault(str(name), ([], []))
            steps.append(float(record["step"]))
            values.append(finite(value))
    return series


def _newest(history: RunHistory, field: str) -> float | None:
    """Return the field's value in the final record or else the last evaluation; None if that value is not finite."""
    records = [record for record in (*history.evals, history.final) if field in record]
    return finite(records[-1][field]) if records else None


def _thinned(records: Records) -> Records:
    """Return evenly spaced records including the last one, few enough for a readable table."""
    # Counted from the end, so that the last record is included.
    stride = -(-len(records) // _MAX_TABLE_ROWS)
    return records[::-1][:: max(1, stride)][::-1]
