"""The rows of the README's table, made from what was measured."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.results import middle, table
from benchmarks.readme import chart, curves

__all__ = ["ON_TWO", "STEPS", "in_page", "rows", "table_of"]

STEPS: Mapping[str, Sequence[str]] = {
    "training": [
        *("benchmarks.end_to_end", "--ranks", "2", "--budget", "60"),
        *("--only", "torch-adamw", "quintic"),
    ],
    "one": [
        *("benchmarks.optimizer_step", "--set", "gpt124m", "qwen1.7b", "--dtype", "bf16"),
        *("--only", "quintic", "torch-adamw", "torch-muon", "nanochat", "dion-muon"),
    ],
    "layouts": [
        "benchmarks.optimizer_step",
        *("--set", "gpt124m", "qwen1.7b", "--dtype", "bf16", "--layout", "ddp", "fsdp2", "sharded", "--ranks", "2"),
        *("--only", "quintic", "dion-muon", "nanochat"),
    ],
}
"""Benchmarks and their arguments, by the name of the result."""

ON_TWO = ("training", "layouts")
"""Results that need two GPUs."""

SETS = {"gpt124m": "124M parameters", "qwen1.7b": "1.7B parameters"}
LAYOUTS = {"ddp": "DDP", "fsdp2": "FSDP2", "sharded": "ZeRO-1"}
NAMES = {
    "torch-adamw": "fused AdamW",
    "torch-muon": "torch.optim.Muon",
    "dion-muon": "dion",
    "nanochat": "nanochat",
}

# The command writes what stands between these lines of a page.
_BEGIN, _END = "<!-- figures: python -m benchmarks.readme -->", "<!-- end of figures -->"


def rows(result: Mapping[str, Any], links: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (claim, figure) for everything that a result holds; `links` has each part's page, for the first cell."""
    found: list[tuple[str, str]] = []

    def add(part: str, claim: str, figure: str) -> None:
        found.append((f"[{claim}]({links[part]})" if part in links else claim, figure))

    layouts = _measured(result.get("layouts"))
    if layouts:
        own = [row for row in layouts if row["contestant"] == "quintic"]
        differing = sum(row["differing_entries"] for row in own)
        names = ", ".join(LAYOUTS[name] for name in LAYOUTS if any(row["layout"] == name for row in own))
        add(
            "layouts",
            f"Weights under {names}, against one device's",
            "the same bits" if not differing else f"{differing} entries differ",
        )
    if "curves" in result:
        drawn = curves.curves_in(result["curves"])
        for name in ("steps", "seconds"):
            found_shares = chart.shares(drawn, name)
            if found_shares:
                middle_share, least, most = (100 * f(found_shares) for f in (statistics.median, min, max))
                add(
                    "curves",
                    f"{name.capitalize()} until Muon reaches AdamW's final loss",
                    f"{middle_share:.0f} % ({least:.0f} to {most:.0f}, {len(found_shares)} seeds)",
                )
    steps = {row["contestant"]: row["step_ms"]["median"] for row in _measured(result.get("training"))}
    if steps.keys() >= {"quintic", "torch-adamw"}:
        ratio = steps["quintic"] / steps["torch-adamw"]
        size = result["training"]["parameters"] / 1e6
        add(
            "training",
            f"A whole training step, two GPUs, FSDP2, {size:.0f}M parameters",
            f"{ratio:.2f} times that with fused AdamW",
        )
    for name, text in SETS.items():
        one = _by_name(_measured(result.get("one")), name)
        if "quintic" in one:
            add("one", f"`optimizer.step()`, one GPU, {text}", _beside(one))
    for name, text in SETS.items():
        for layout in ("fsdp2", "sharded"):
            one = _by_name([row for row in layouts if row["layout"] == layout], name)
            if "quintic" in one:
                add("layouts", f"`optimizer.step()`, two GPUs, {LAYOUTS[layout]}, {text}", _beside(one))
    return found


def table_of(found: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines of the table."""
    return table(("what was measured", "figure"), found)


def in_page(text: str, result: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """Return a page's text with the table of a result between its two marks.

    Args:
        text: the page.
        result: what was measured.
        links: from the page to those of the result's parts.

    Raises:
        ValueError: the marks are missing.
    """
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"the page has no lines {_BEGIN!r} and {_END!r} for the table")
    lines = "\n".join(table_of(rows(result, links)))
    return re.sub(
        f"(?<={re.escape(_BEGIN)}\n).*?(?={re.escape(_END)})", lambda _: f"\n{lines}\n\n", text, flags=re.DOTALL
    )


def _measured(result: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the rows that have a time."""
    return [row for row in (result or {}).get("rows", []) if "step_ms" in row]


def _by_name(measured: Sequence[Mapping[str, Any]], weights: str) -> dict[str, Mapping[str, Any]]:
    return {row["contestant"]: row for row in measured if row["set"] == weights}


def _beside(one: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Quintic's time beside the others', fastest first; bold where no other Muon is faster."""
    others = sorted((row for name, row in one.items() if name != "quintic"), key=lambda row: row["step_ms"]["median"])
    told = [f"{NAMES[row['contestant']]} {middle(row, 'step_ms')}" for row in others]
    own = f"{middle(one['quintic'], 'step_ms')} ms"
    muons = [row["step_ms"]["median"] for row in others if row["contestant"] != "torch-adamw"]
    is_first = all(one["quintic"]["step_ms"]["median"] <= other for other in muons)
    return (f"**{own}**" if is_first else own) + (f"; {', '.join(told)}" if told else "")
