"""The tables of steps on several ranks, and what their columns say."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import in_cell, made_by, middle, number, table
from benchmarks.optimizer_step.contestants import SETS, describe
from benchmarks.optimizer_step.layouts.contestants import COMPARED_STEPS, LAYOUT_CONTESTANTS, LAYOUTS
from benchmarks.optimizer_step.layouts.targets import compute_ms, hidden, scaling, targets

# Tolerance on what the plan promises: the allocator rounds every block up.
WORKSPACE_TOLERANCE = 0.05

NOTES = f"""\
Layouts: **single**: every rank does all the work by itself, as one device would. **ddp**, **sharded**, **replicated**:
plain tensors; gradients that are the same on all ranks already (Quintic's `comms="averaged"`), or that the optimizer
averages, dividing state and work or not. **fsdp2**, **hsdp**: `DTensor`s cut along the first dimension, as by
`fully_shard`; hsdp has two copies if there are four ranks or more. **tp**: matrices cut along the second dimension,
the rest along the first.

Medians of n steps; of each step the time of the slowest rank.

- **differing**: entries of all weights whose bits are not those of one device after {COMPARED_STEPS} steps, on the
  worst rank. Every rank has gradients of its own; where the optimizer does not average them it is given their mean, as
  one device is: the sum in the order of the ranks in float32, divided and rounded once.
- **step**: the device idle before, so host included. **device**: the same with the device kept busy until the host is
  done, what a step costs in a training loop whose host runs ahead. **host**: wall clock of the call on the empty queue
  of an idle device. **replay**: a CUDA graph of the step with its collectives, idle before.
- **exchange**: the collectives of a step alone, all begun before any is waited for, with nothing computed. **compute**:
  the same step with nothing sent; what would be received is filled with what would be sent, and the time of the filling
  alone is taken off. Both with busy devices, on all ranks at the same time.
- **hidden**: device, over the larger of exchange and compute. One means that the rest is hidden entirely.
- **scaling**: one device's time to orthogonalise all matrices, over ranks times the time that the slowest rank needs
  for its own: efficiency of the work's division. Nothing but the orthogonalisation of random numbers, in the batches of
  the plan, on all ranks at the same time with busy devices.
- **quintic-repeat**: the same with `replicas="repeat"`, of which there is something to see with four ranks or more.
- **sent**: what leaves a rank in a step's collectives, at most. **state**: on a rank, at most.
- **peak**: most memory allocated over weights and gradients, with the first step. **temporary**: the same of a later
  step over state, too, and what Quintic's plan promises, of the rank where the former is largest; bold where any needs
  over {WORKSPACE_TOLERANCE:.0%} more than its plan.
- **first step**: wall clock; of Quintic after one device's steps in the same process. A star: compilers' caches were
  empty."""

HEADER = (
    *("optimizer", "differing", "step (ms)", "quartiles", "device (ms)", "host (ms)", "replay (ms)", "exchange (ms)"),
    *("compute (ms)", "hidden", "scaling", "sent (MiB)", "state (MiB)", "peak (MiB)", "temporary / planned (MiB)"),
    *("first step (s)", "syncs"),
)


def short_line(row: Mapping[str, Any]) -> str:
    """Return one row for the terminal."""
    start = f"{row['set']:10} {row['layout']:10} {row['contestant']:16} {row['seconds']:>5.0f} s "
    if row.get("error"):
        return f"{start} failed: {row['error']}"
    times = " ".join(f"{label} {middle(row, f'{label}_ms'):>6}" for label in ("step", "device", "host", "replay"))
    parts = f"exchange {middle(row, 'exchange_device_ms')} compute {middle(row, 'compute_device_ms')}"
    differing = f", {row['differing_entries']} differ" if "differing_entries" in row else ""
    why = "".join(f", {name}: {row[name]}" for name in ("parts_error", "graph_error") if name in row)
    return f"{start} {times} {parts} ms, first {row.get('first_step_s', 0):.1f} s{differing}{why}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row."""
    if row.get("error"):
        return [row["contestant"], f"failed: {in_cell(row['error'])}", *[""] * (len(HEADER) - 2)]
    step = row["step_ms"]
    return [
        row["contestant"] + ("" if row.get("finite", True) else " (**weights not finite**)"),
        differing_cell(row),
        middle(row, "step_ms"),
        f"{step['q1']:.3g} to {step['q3']:.3g} (n {step['n']})",
        middle(row, "device_ms"),
        middle(row, "host_ms"),
        replay_cell(row),
        exchange_cell(row),
        optional(compute_ms(row), ".3g"),
        optional(hidden(row), ".2f"),
        optional(scaling(row), ".0%"),
        number(row, "sent_mib"),
        number(row, "state_mib"),
        number(row, "peak_mib"),
        temporary(row),
        f"{row['first_step_s']:.1f}" + ("*" if row.get("caches") == "empty" else ""),
        {"none": "none", None: "-"}.get(row.get("syncs"), "**yes**"),
    ]


def optional(value: float | None, form: str) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else format(value, form)


def differing_cell(row: Mapping[str, Any]) -> str:
    """Return the numbers of entries and tensors, bold if any; a dash where there was nothing to compare with."""
    if "differing_entries" not in row:
        return "-"
    entries, tensors = row["differing_entries"], row["differing_tensors"]
    return f"**{entries:,} in {tensors}**" if entries else "0"


def replay_cell(row: Mapping[str, Any]) -> str:
    """Return the time of a replay, or why there is none."""
    if "graph_error" in row:
        return "no"
    ignored = " (**learning rate ignored**)" if row.get("replay_follows_lr") is False else ""
    return middle(row, "replay_ms") + ignored


def exchange_cell(row: Mapping[str, Any]) -> str:
    """Return the time of a step's collectives alone, with that of the least that the layout needs."""
    bare = middle(row, "bare_exchange_device_ms")
    return middle(row, "exchange_device_ms") + ("" if bare == "-" else f" (bare {bare})")


def temporary(row: Mapping[str, Any]) -> str:
    """Return measured and planned memory, bold where a rank needs more than it planned."""
    planned = row.get("planned_mib")
    if "temporary_mib" not in row:
        return f"- / {max(planned):,.0f}" if planned else "-"
    if not planned:
        return f"{max(row['temporary_mib']):,.0f}"
    pairs = list(zip(row["temporary_mib"], planned, strict=True))
    peak, promised = max(pairs)
    kept = f" + {max(row['kept_mib']):,.0f}" if "kept_mib" in row else ""
    text = f"{peak:,.0f} / {promised:,.0f}"
    return (f"**{text}**" if any(one > plan * (1 + WORKSPACE_TOLERANCE) for one, plan in pairs) else text) + kept


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one table for each set, dtype and layout, as markdown."""
    order = {contestant.name: index for index, contestant in enumerate(LAYOUT_CONTESTANTS)}
    lines: list[str] = []
    rows = [row for row in rows if "layout" in row]
    for name, dtype, ranks in sorted({(row["set"], row["dtype"], row["ranks"]) for row in rows}):
        of_set = [row for row in rows if (row["set"], row["dtype"], row["ranks"]) == (name, dtype, ranks)]
        lines += ["", f"## {name}, {dtype} weights, {ranks} ranks: {describe(SETS[name])}"]
        moved = [row["moved"] for row in of_set if "moved" in row]
        if moved:
            lines += ["", f"{min(moved):.0%} of one device's entries or more had changed when they were compared."]
        for layout in LAYOUTS:
            found = [row for row in of_set if row["layout"] == layout]
            found.sort(key=lambda row: order.get(row["contestant"], len(order)))
            if found:
                lines += ["", f"### {layout}", "", *table(HEADER, map(cells, found))]
    return "\n".join(lines)


def page(rows: Sequence[Mapping[str, Any]], command: str, commit: str) -> str:
    """Return the result as markdown."""
    known: Mapping[str, Any] = next((row for row in rows if "versions" in row), {})
    ranks = ", ".join(str(number) for number in sorted({row["ranks"] for row in rows if "ranks" in row}))
    lines = [
        f"# `optimizer.step()` in every layout, on {ranks} x {known.get('device', 'unknown device')}",
        "",
        f"{made_by(command, commit, known.get('versions', {}))}. Weight decay 0.1, random normal gradients.",
        "",
        NOTES,
        "",
        "## Targets",
        "",
        *(f"- {target}" for target in targets(rows)),
        tables(rows),
    ]
    names = ("parts_error", "graph_error", "syncs")
    refusals = [row for row in rows if any(row.get(name, "none") != "none" for name in names)]
    if refusals:
        lines += ["", "## What was not measured or captured and why, where synchronised", ""]
    for row in refusals:
        reasons = [row[name] for name in names if row.get(name, "none") != "none"]
        lines.append(f"- {row['contestant']}, {row['set']}, {row['layout']}: {in_cell('; '.join(reasons))}")
    return "\n".join(lines) + "\n"
