"""The page of `baseline.py`: what AdamW reaches when it is searched for as well as Muon, and when Muon is there."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.common.results import table
from benchmarks.training.quality_page import steps_to_reach

_LABELS = {"adamw": "AdamW", "muon": "Muon"}
_PARTS = ("random", "variations", "whole", "again", "final")


class Finals(NamedTuple):
    """The seeds of one setting that ended."""

    label: str
    setting: Mapping[str, float | None]
    curves: dict[int, list[tuple[int, float]]]
    """By seed: steps and bits per byte."""
    diverged: int

    @property
    def last(self) -> list[float]:
        """Return the last bits per byte of each seed; infinite where it diverged."""
        return [curve[-1][1] for curve in self.curves.values()] + [math.inf] * self.diverged


def finals(result: Mapping[str, Any], name: str, which: str) -> Finals:
    """Return the seeds of an optimizer's best or default setting."""
    setting = result["best"][name]["setting"] if which == "best" else result["defaults"][name]
    runs = [r for r in result["runs"] if (r["optimizer"], r["part"], r["setting"]) == (name, "final", setting)]
    ended = [run for run in runs if run.get("bpb") is not None]
    curves = {run["seed"]: [(int(step), float(bpb)) for step, bpb in run["curve"]] for run in ended}
    diverged = sum("bpb" in run and run["bpb"] is None for run in runs)
    label = f"{_LABELS[name]}, {'searched' if which == 'best' else 'default'}"
    return Finals(label, setting, dict(sorted(curves.items())), diverged)


def shares(runs: Finals, bpb: float) -> list[float]:
    """Return the share of its steps that each seed needs to a figure, in percent; infinite where it is not reached."""
    needed = []
    for curve in runs.curves.values():
        steps = steps_to_reach(curve, bpb)
        needed.append(math.inf if steps is None else 100 * steps / curve[-1][0])
    return needed + [math.inf] * runs.diverged


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    adamw, muon = ([finals(result, name, which) for which in ("best", "default")] for name in ("adamw", "muon"))
    # Where the search found nothing better, the best setting is the default one.
    rows = [*adamw, *muon] if adamw[0].setting != adamw[1].setting else [adamw[1], *muon]
    rows = rows if muon[0].setting != muon[1].setting else [row for row in rows if row is not muon[0]]
    lines = ["# AdamW at its best, and Muon", "", *_facts(result), ""]
    lines += table(
        ("validation bits per byte at the end", "seeds", "median", "least", "most"),
        [[row.label, str(len(row.last)), *_spread(row.last, 4)] for row in rows],
    )
    targets = []
    for row in [row for row in rows if row in adamw and row.curves]:
        targets += [
            (f"median of {row.label}", statistics.median(row.last)),
            (f"best seed of {row.label}", min(row.last)),
        ]
    lines += ["", "Share of its steps (%) after which Muon has AdamW's last bits per byte:", ""]
    lines += table(
        ("to reach", "bits per byte", "by", "median", "least", "most", "each seed"),
        [
            [target, f"{bpb:.4f}", row.label, *_spread(needed := shares(row, bpb), 1), ", ".join(map(_percent, needed))]
            for target, bpb in targets
            if math.isfinite(bpb)
            for row in rows
            if row in muon and row.last
        ],
    )
    lines += [
        "",
        "Steps are linear between evaluations. The rates fall to zero over the last 40 % of each run, so a Muon run "
        "that is planned for fewer steps would be there sooner.",
        "",
        "## Settings",
        "",
        *(f"- {row.label}: `{_options(row.setting)}`" for row in rows),
        "",
        *_search(result),
    ]
    return "\n".join(lines) + "\n"


def computing(result: Mapping[str, Any]) -> str:
    """Return the machine, the runs at a time and the versions of a result with `machine`, `versions`, `devices`."""
    machine, versions = result.get("machine"), result.get("versions")
    if machine is None or versions is None:
        return "no run ended"
    runs = "run" if result["at_once"] == 1 else "runs"
    where = machine["cpu"] if machine["device"] == "CPU" else f"{len(result['devices'])} x {machine['device']}"
    return (
        f"{where}, {machine['cores']} cores, {machine['dtype']}, attention by {machine['attention']}, "
        f"{result['at_once']} {runs} at a time on each device; Python {versions['python']}, torch {versions['torch']}"
    )


def text_facts(data: Mapping[str, Any]) -> str:
    """Describe the training text and its size."""
    text = f"The text is `{data['source']}`"
    if data["source"].startswith("python"):
        text += " as it is in this version of Python; in another one it differs, and with it every figure"
    return f"{text}; {data['train_tokens']:,} tokens to train on, {data['val_tokens']:,} to validate."


def _facts(result: Mapping[str, Any]) -> list[str]:
    changed = "".join(f", `{name}` {value}" for name, value in result["changed"].items())
    return [
        f"`{result['command']}` at commit {result['commit']}: {result['seconds']:.0f} seconds. {computing(result)}.",
        "",
        f"The default model of a CPU and its default run{changed}; weights and batches of a seed are the same under "
        f"all settings. {text_facts(result['data'])}",
    ]


def _search(result: Mapping[str, Any]) -> list[str]:
    lines = ["## Search", ""]
    rows = []
    for name, label in _LABELS.items():
        for part in _PARTS:
            runs = [run for run in result["runs"] if (run["optimizer"], run["part"]) == (name, part)]
            kinds = [
                sum(run.get("bpb") is not None for run in runs),
                sum("bpb" in run and run["bpb"] is None for run in runs),
                sum("cut" in run for run in runs),
                sum("failed" in run for run in runs),
            ]
            rows.append([label, part, *map(str, kinds)])
    lines += table(("optimizer", "part", "ended", "diverged", "cut for time", "failed"), rows)
    sizes = result["sizes"]
    lines += [
        "",
        f"{sizes['trials']} settings at random (the default among them) and {sizes['variations']} variations of the "
        f"best at half the length with one seed; the default and the best {sizes['whole']} of both at full length; the "
        f"best {sizes['again']} of these with two more seeds. The seeds of the table above are others. "
        f"{result['planned']} runs were planned, {sum('bpb' in run for run in result['runs'])} made.",
        "",
    ]
    for name, label in _LABELS.items():
        best, space = result["best"][name], result["spaces"][name]
        ranges = ", ".join(f"`{option}` {_range(values)}" for option, values in space.items())
        edges = [option for option, value in best["setting"].items() if _at_edge(option, value, space[option])]
        at_edge = f" At the edge of its range: {', '.join(f'`{option}`' for option in edges)}." if edges else ""
        lines.append(f"- {label}: {ranges}. Chosen by {best['chosen_by']}.{at_edge}")
    for name, label in _LABELS.items():
        lines += ["", f"### The settings of {label} that came to full length", "", *_trials(result, name)]
    wrong = [run for run in result["runs"] if "failed" in run]
    if wrong:
        lines += ["", "### Failed", ""]
        lines += [f"- {_LABELS[r['optimizer']]}, {r['part']}, seed {r['seed']}: {r['failed']}" for r in wrong]
    return lines


def _trials(result: Mapping[str, Any], name: str) -> list[str]:
    groups: dict[str, list[float]] = {}
    for run in result["runs"]:
        if run["optimizer"] == name and run["part"] in ("whole", "again") and "bpb" in run:
            bpb = math.inf if run["bpb"] is None else run["bpb"]
            groups.setdefault(_options(run["setting"]), []).append(bpb)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), statistics.mean(item[1])))
    rows = [[f"`{setting}`", str(len(values)), f"{statistics.mean(values):.4f}"] for setting, values in ordered]
    return table(("setting", "seeds", "mean bits per byte"), rows)


def _options(setting: Mapping[str, float | None]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {_number(value)}" for name, value in setting.items())


def _number(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"


def _range(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"{_number(values['least'])} to {_number(values['most'])}"
    return " | ".join(map(_number, values))


def _at_edge(option: str, value: Any, values: Any) -> bool:
    """Return whether better values may lie beyond those tried; there is nothing beyond no clipping and no decay."""
    if isinstance(values, Mapping):
        return bool(value < 1.1 * values["least"] or 1.1 * value > values["most"])
    return bool(value == values[-1] or (value == values[0] and option in ("beta1", "beta2", "warmup_frac")))


def _spread(values: Sequence[float], digits: int) -> list[str]:
    if not values:
        return ["-"] * 3
    return [_figure(of(values), digits) for of in (statistics.median, min, max)]


def _figure(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "never"


def _percent(value: float) -> str:
    return _figure(value, 1)


__all__ = ["Finals", "computing", "finals", "page", "shares", "text_facts"]
