"""The page and the figure of `transfer.py`: losses by rate, and where the least one lies."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.figures import ON_ANY_PAGE
from benchmarks.common.results import table
from benchmarks.training.baseline_page import computing, text_facts

# Line and mark of each curve, told apart without their colours.
_STYLES = ("-o", "--s", ":^", "-.v", "-D", "--x", ":P", "-.*", "-<")

_NOTE = """\
Median loss (nats per token) of the held-back text at the end, least and most of the seeds in brackets; the best rate of
each line is bold. Between the rates: the vertex of the parabola through the three losses around a seed's best rate, by
the logarithm of the rate; median, least and most of the seeds. `< 0.01` and `> 0.08` say that a seed's best rate is the
first or the last of the grid."""


def losses_of(line: Mapping[str, Any]) -> dict[float, dict[int, float]]:
    """Return rate -> seed -> loss, infinite where it diverged."""
    return {
        float(rate): {int(seed): math.inf if loss is None else loss for seed, loss in by_seed.items()}
        for rate, by_seed in line["losses"].items()
    }


def medians(line: Mapping[str, Any]) -> dict[float, float]:
    """Return rate -> median loss, of the rates that have as many seeds as any."""
    losses = losses_of(line)
    most = max((len(by_seed) for by_seed in losses.values()), default=0)
    return {
        rate: statistics.median(by_seed.values()) for rate, by_seed in sorted(losses.items()) if len(by_seed) == most
    }


def vertex(losses: Mapping[float, float]) -> float:
    """Return the rate with the least loss, between the grid's by a parabola over the logarithm of the rate.

    Args:
        losses: by rate; at least one.

    Returns:
        0 if the least loss is that of the lowest rate, infinity if that of the highest.
    """
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    place = rates.index(best)
    if place in (0, len(rates) - 1):
        return 0.0 if place == 0 else math.inf
    left, right = rates[place - 1], rates[place + 1]
    if not (math.isfinite(losses[left]) and math.isfinite(losses[right])):
        return best
    a, b = math.log(left / best), math.log(right / best)
    rise_a, rise_b = losses[left] - losses[best], losses[right] - losses[best]
    # c1 x + c2 x^2 through (a, rise_a), (0, 0) and (b, rise_b); its vertex is -c1 / (2 c2).
    c2 = (rise_a / a - rise_b / b) / (a - b)
    if c2 <= 0:
        return best
    return best * math.exp(-(rise_a / a - c2 * a) / (2 * c2))


def vertices(line: Mapping[str, Any]) -> list[float]:
    """Return the best rate of every seed that has all rates."""
    losses = losses_of(line)
    seeds = sorted(set.intersection(*(set(losses.get(rate, {})) for rate in line["rates"])))
    return [vertex({rate: losses[rate][seed] for rate in losses}) for seed in seeds]


def rate_shown(rate: float, rates: Sequence[float]) -> str:
    """Return a rate with two digits, or that it lies beyond the grid."""
    if rate == 0.0:
        return f"< {min(rates):g}"
    return f"> {max(rates):g}" if math.isinf(rate) else f"{rate:.2g}"


def page(result: Mapping[str, Any], name: str) -> str:
    """Return the result as Markdown."""
    changed = ", ".join(f"`{key}` {value}" for key, value in result["changed"].items())
    lines = [
        "# The best learning rate by width, batch, warm-up and decay",
        "",
        f"`{result['command']}` at commit {result['commit']}. {computing(result)}.",
        "",
        f"Every run has {result['tokens']:,} tokens; {len(result['seeds'])} seeds. Other options are those of the "
        f"default run of a CPU{f', with {changed}' if changed else ''}. {text_facts(result['data'])}",
        "",
        _NOTE,
        "",
        f"![Loss by learning rate]({name}.svg)",
    ]
    for study in dict.fromkeys(line["study"] for line in result["lines"]):
        own = [line for line in result["lines"] if line["study"] == study]
        lines += ["", f"## {study[0].upper()}{study[1:]}", "", *_table(own)]
        if study in ("weight decay", "warm-up"):
            lines += ["", *_differences(own)]
    wanted = {
        _key(line, rate, seed): False for line in result["lines"] for rate in line["rates"] for seed in result["seeds"]
    }
    for line in result["lines"]:
        for rate, by_seed in losses_of(line).items():
            wanted |= {_key(line, rate, seed): True for seed in by_seed}
    missing = sum(not made for made in wanted.values())
    lines += ["", f"{len(wanted) - missing} runs were trained."]
    if missing:
        lines += [f"{missing} runs were not trained: the time was over, or they failed."]
    lines += [f"- Failed: {failure}" for failure in result["failures"]]
    return "\n".join(lines) + "\n"


def _key(line: Mapping[str, Any], rate: float, seed: int) -> tuple[Any, ...]:
    return (*sorted((key, str(value)) for key, value in line["values"].items()), rate, seed)


def _table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rates = sorted({rate for line in lines for rate in line["rates"]})
    has_vertex = len(rates) > 2
    rows = []
    for line in lines:
        losses, middle = losses_of(line), medians(line)
        best = min(middle, key=lambda rate: middle[rate], default=None)
        cells = []
        for rate in rates:
            found = sorted(losses.get(rate, {}).values())
            shown = f"{statistics.median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})" if found else "-"
            few = f", n={len(found)}" if 0 < len(found) < max(map(len, losses.values())) else ""
            cells.append(f"**{shown}**" if rate == best else shown + few)
        best_rates = sorted(vertices(line))
        between = "-"
        if best_rates:
            low, mid, high = (
                rate_shown(rate, line["rates"])
                for rate in (best_rates[0], statistics.median_low(best_rates), best_rates[-1])
            )
            between = f"{mid} ({low} to {high})"
        seeds = str(max(map(len, losses.values()), default=0))
        rows.append([line["label"], *cells, *([between] if has_vertex else []), seeds])
    heads = ["between the rates"] if has_vertex else []
    return table(("", *(f"rate {rate:g}" for rate in rates), *heads, "seeds"), rows)


def _differences(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of what each line loses against the first one, at the same rate and seed."""
    rates = sorted({rate for line in lines for rate in line["rates"]})
    first = losses_of(lines[0])
    rows = []
    for line in lines[1:]:
        losses, cells = losses_of(line), []
        for rate in rates:
            twins = losses.get(rate, {}).keys() & first.get(rate, {}).keys()
            apart = sorted(losses[rate][seed] - first[rate][seed] for seed in twins)
            apart = [value for value in apart if math.isfinite(value)]
            cells.append(
                f"{statistics.median(apart):+.3f} ({apart[0]:+.3f} to {apart[-1]:+.3f}), n={len(apart)}"
                if apart
                else "-"
            )
        rows.append([line["label"], *cells])
    return table((f"loss more than of {lines[0]['label']}, same seed", *(f"rate {rate:g}" for rate in rates)), rows)


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the losses against the rate, a panel for each study and a line for each of its settings."""
    import matplotlib
    from matplotlib import pyplot

    studies = list(dict.fromkeys(line["study"] for line in result["lines"] if line["losses"]))
    if not studies:
        return
    rows = -(-len(studies) // 2)
    with matplotlib.rc_context({**ON_ANY_PAGE, "svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 11}):
        figure, grid = pyplot.subplots(
            rows, min(2, len(studies)), figsize=(9, 3.6 * rows), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(studies) :]:
            axes.set_visible(False)
        for axes, study in zip(grid.flat, studies, strict=False):
            own = [line for line in result["lines"] if line["study"] == study]
            ticks: set[float] = set()
            for line, style in zip(own, _STYLES, strict=False):
                points = {rate: loss for rate, loss in medians(line).items() if math.isfinite(loss)}
                losses = losses_of(line)
                if not points:
                    continue
                below = [loss - min(losses[rate].values()) for rate, loss in points.items()]
                above = [max(filter(math.isfinite, losses[rate].values())) - loss for rate, loss in points.items()]
                axes.errorbar(
                    list(points), list(points.values()), (below, above), fmt=style, capsize=2, label=line["label"]
                )
                ticks |= set(points)
            axes.set_xscale("log")
            axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
            axes.minorticks_off()
            axes.set(xlabel="learning rate of the matrices", ylabel="loss (nats per token)")
            axes.set_title(study if "AdamW" in study else f"Muon, {study}", loc="left")
            axes.grid(alpha=0.3)
            axes.legend(handlelength=3.5)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
