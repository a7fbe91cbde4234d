"""The result as Markdown: losses with few bytes of state, and the memory and time of steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.results import in_cell, middle, number, table
from benchmarks.common.timing import MIB
from benchmarks.optimizer_step.contestants import SETS, WeightSet, describe
from benchmarks.rules.evidence import Mean, p_value, paired
from benchmarks.state_bytes.run import BASELINE, SETTINGS

LOSS_HEADS = ("setting", "matrices, bytes", "others, bytes", "n", "loss", f"less {BASELINE}", "p")
STEP_HEADS = ("optimizer", "bytes a weight", "state (MiB)", "peak (MiB)", "step (ms)", "device (ms)")

_NOTES = """\
**bytes**: of a weight and its state, without the gradient. **less float32**: difference to float32 weights and state of
the same seed, nats a token, mean and standard error. **p**: of a paired t-test, two-sided. **peak**: most memory over
weights and gradients in any step; on several ranks, of the one that needs most. **device**: a step on a busy device."""


def losses_of(rows: Sequence[Mapping[str, Any]], setting: str) -> dict[int, float]:
    """Return seed -> loss at the end, infinite for a run that diverged."""
    return {
        row["cell"]["seed"]: math.inf if row["loss"] is None else row["loss"]
        for row in rows
        if row["cell"]["setting"] == setting
    }


def mean_seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean time of runs."""
    return f"{Mean.of([row['training_seconds'] for row in rows]).mean:.0f}"


def loss_table(
    rows: Sequence[Mapping[str, Any]],
    head: str = "seconds",
    cell_of: Callable[[Sequence[Mapping[str, Any]]], str] = mean_seconds,
) -> list[str]:
    """Return the lines of the table of losses, in the order of `SETTINGS`.

    Args:
        rows: the runs.
        head: of the last column.
        cell_of: returns that column's cell, of a setting's runs.
    """
    baseline = losses_of(rows, BASELINE)
    lines = []
    for name in SETTINGS:
        found = [row for row in rows if row["cell"]["setting"] == name]
        if not found:
            continue
        losses = losses_of(rows, name)
        difference = paired(losses, baseline) if name != BASELINE else None
        sizes = [f"{found[0]['bytes'][kind]:.2f}" for kind in ("muon", "adamw")]
        mean = f"{Mean.of(list(losses.values())).mean:.4f}"
        lines.append([name, *sizes, str(len(losses)), mean, *_told(difference), cell_of(found)])
    return table((*LOSS_HEADS, head), lines)


def _told(difference: Mean | None) -> tuple[str, str]:
    """Return a difference with its standard error, and its p value, where there are any."""
    if difference is None:
        return "", ""
    p = p_value(difference)
    if math.isnan(p):
        return f"{difference.mean:+.4f}", "-"
    return f"{difference.mean:+.4f} ± {difference.error:.4f}", "< 0.001" if p < 0.001 else f"{p:.3f}"


def num_weights(shapes: WeightSet) -> int:
    """Return the number of weights of a set."""
    return sum(math.prod(shape) for shape in (*shapes.matrices, *shapes.others))


def step_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table for each set of weights and each layout, of rows of `benchmarks.optimizer_step`."""
    lines: list[str] = []
    for name, layout in dict.fromkeys((row["set"], row.get("layout", "")) for row in rows):
        found = [row for row in rows if (row["set"], row.get("layout", "")) == (name, layout)]
        ranks = found[0].get("ranks", 1)
        where = f", {layout} on {ranks} ranks" if layout else ""
        lines += ["", f"### {name}{where}: {describe(SETS[name])}", ""]
        lines += table(STEP_HEADS, [_step_cells(row, num_weights(SETS[name]) / ranks) for row in found])
    return lines


def _step_cells(row: Mapping[str, Any], weights: float) -> list[str]:
    if row.get("error"):
        return [row["contestant"], f"failed: {in_cell(row['error'])}", *[""] * (len(STEP_HEADS) - 2)]
    size = (row["weights_mib"] + row["state_mib"]) * MIB / weights
    memory = (number(row, "state_mib"), number(row, "whole_peak_mib" if "whole_peak_mib" in row else "peak_mib"))
    return [row["contestant"], f"{size:.2f}", *memory, middle(row, "step_ms"), middle(row, "device_ms")]


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    lines = ["# State of fewer bytes", "", f"`{result['command']}` at commit {result['commit']}.", "", _NOTES]
    for size, part in result["losses"].items():
        machine = part["computing"].get("machine", {})
        lines += ["", f"## Loss, {size}", "", f"{part['steps']} steps of {part['batch_tokens']:,} tokens.", ""]
        lines += [f"{name}: {value}." for name, value in machine.items() if name in ("device", "gpu", "cpu")]
        lines += ["", *loss_table(part["rows"])]
        lines += [f"- failed: {failure}" for failure in part["failures"]]
    steps = [row for rows in result["by_part"].values() for row in rows]
    if steps:
        lines += ["", "## Memory and time of a step", *step_tables(steps)]
    return "\n".join(lines) + "\n"
