"""The tables: what is compared, how a best rate is chosen, and the page."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.common.results import table
from benchmarks.training.baseline_page import computing
from benchmarks.training.quality_page import best_rate

OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}
MODES = {"full": "all weights", "lora": "LoRA"}
PACKAGES = ("transformers", "peft")


def cases() -> Iterator[dict[str, str]]:
    """Yield the cases to compare: pretraining, mode and optimizer."""
    for pretrained in OPTIMIZERS:
        for mode in MODES:
            for name in OPTIMIZERS:
                yield {"pretrained": pretrained, "mode": mode, "optimizer": name}


def _is_of(row: Mapping[str, Any], part: str, case: Mapping[str, Any]) -> bool:
    cell = row["cell"]
    return cell["part"] == part and all(cell[name] == value for name, value in case.items())


def search_means(rows: Any, case: Mapping[str, Any]) -> dict[float, float]:
    """Return rate -> mean loss of the search's seeds, of the rates with as many seeds as any."""
    losses: dict[float, list[float]] = {}
    for row in rows:
        if _is_of(row, "search", case):
            losses.setdefault(row["cell"]["rate"], []).append(math.inf if row["loss"] is None else row["loss"])
    most = max(map(len, losses.values()), default=0)
    return {rate: statistics.mean(found) for rate, found in sorted(losses.items()) if len(found) == most}


def best_base(rows: Iterable[Mapping[str, Any]], pretrained: str) -> Mapping[str, Any] | None:
    """Return the run that pretrained best with an optimizer; None if none ended with a finite loss."""
    found = [row for row in rows if row["loss"] is not None and _is_of(row, "pretrain", {"pretrained": pretrained})]
    return min(found, key=lambda row: row["loss"], default=None)


def finals(result: Mapping[str, Any], case: Mapping[str, str], value: str = "loss") -> dict[int, float]:
    """Return seed -> loss of a case at its best rate; infinite where it is not finite."""
    means = search_means(result["rows"], case)
    if not means:
        return {}
    rows = [row for row in result["rows"] if _is_of(row, "final", {**case, "rate": best_rate(means)})]
    return {row["cell"]["seed"]: math.inf if row[value] is None else row[value] for row in rows}


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    sizes, texts, versions = result["sizes"], result["texts"], result.get("versions", {})
    libraries = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    rows, tried = [], []
    for case in cases():
        if case["optimizer"] == "adamw":
            continue
        adamw, muon = finals(result, {**case, "optimizer": "adamw"}), finals(result, case)
        apart = [muon[seed] - adamw[seed] for seed in sorted(muon.keys() & adamw.keys())]
        apart = [value for value in apart if math.isfinite(value)]
        rows.append(
            [
                OPTIMIZERS[case["pretrained"]], MODES[case["mode"]], _spread(adamw.values()), _spread(muon.values()),
                _spread(apart, "+"), f"{sum(value < 0 for value in apart)} of {len(apart)}",
                *(_spread(finals(result, {**case, "optimizer": name}, "other").values()) for name in ("adamw", "muon")),
            ]
        )  # fmt: skip
    for case in cases():
        means = search_means(result["rows"], case)
        best = best_rate(means) if means else None
        shown = ", ".join(f"**{r:g}: {m:.4f}**" if r == best else f"{r:g}: {m:.4f}" for r, m in means.items())
        edge = "; the best is the end of the grid" if best in (min(means, default=0), max(means, default=0)) else ""
        tried.append(
            f"- Pretrained with {OPTIMIZERS[case['pretrained']]}, {MODES[case['mode']]}, "
            f"{OPTIMIZERS[case['optimizer']]}: {shown or 'not trained'}{edge}"
        )
    bases = [
        f"- {OPTIMIZERS[row['cell']['pretrained']]}, rate {row['cell']['rate']:g}: {row['loss']:.4f} on the first "
        f"text, {row['other']:.4f} on the second"
        for row in result["rows"]
        if row["cell"]["part"] == "pretrain" and row["loss"] is not None
    ]
    heads = ("pretrained with", "trained", "AdamW", "Muon", "Muon - AdamW, same seed", "Muon lower")
    lines = [
        "# Fine-tuning with Muon and with AdamW",
        "",
        f"`{result['command']}` at commit {result['commit']}. "
        f"{computing(result)}{', ' + libraries if libraries else ''}.",
        "",
        f"A Llama of {sizes['depth']} layers and width {sizes['width']} is pretrained with "
        f"{sizes['pretrain_steps']:,} steps of {sizes['rows'] * sizes['seq_len']:,} tokens "
        f"({texts['pretrain']['train_tokens']:,} tokens of text), then fine-tuned with {sizes['steps']:,} such steps "
        f"on another text ({texts['finetune']['train_tokens']:,}). Loss of held-out text in nats per token; median "
        f"(least to most) of {len(sizes['seeds'])} seeds, each optimizer at the best of its rates.",
        "",
        *table((*heads, "first text, AdamW", "first text, Muon"), rows),
        "",
        "First text: the loss, after fine-tuning, of the text of pretraining: how much was forgotten.",
        "",
        "## After pretraining",
        "",
        *bases,
        "",
        "The better of each was fine-tuned.",
        "",
        f"## Rates tried: mean loss of {len(sizes['search_seeds'])} other seeds",
        "",
        *tried,
    ]  # fmt: skip
    made, wanted = _counts(result)
    lines += ["", f"{made} runs."]
    if made < wanted:
        lines += ["", f"{wanted - made} of {wanted} runs were not trained: the time was over, or they failed."]
    lines += [f"- Failed: {failure}" for failure in result["failures"]]
    return "\n".join(lines) + "\n"


def _counts(result: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of runs that were made, and that the options ask for."""
    sizes, rows = result["sizes"], result["rows"]
    made, wanted = 0, 0
    for name in OPTIMIZERS:
        rates = sizes[f"pretrain_{name}_rates"]
        based = [row["cell"] for row in rows if _is_of(row, "pretrain", {"pretrained": name})]
        made += sum(cell["rate"] in rates for cell in based)
        wanted += len(rates)
    for case in cases():
        rates = sizes[f"{case['mode']}_rates"]
        searched = [row["cell"] for row in rows if _is_of(row, "search", case)]
        made += sum(cell["rate"] in rates and cell["seed"] in sizes["search_seeds"] for cell in searched)
        made += len(finals(result, case).keys() & set(sizes["seeds"]))
        wanted += len(rates) * len(sizes["search_seeds"]) + len(sizes["seeds"])
    return made, wanted


def _spread(values: Any, sign: str = "") -> str:
    found = sorted(values)
    if not found:
        return "-"
    return "{} ({} to {})".format(
        *(f"{value:{sign}.4f}" for value in (statistics.median(found), found[0], found[-1]))
    )  # fmt: skip
