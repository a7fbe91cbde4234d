"""Tables of a sweep."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.common.results import made_by, table
from benchmarks.roles.judgments import VERDICTS, Judgment, judged, verdict
from quintic.grouping.doubts import EXCHANGED, PERHAPS_FUSED, UNTAKEN

NOTES = """\
Weights of at least two dimensions, without an example (decided by *names*, types and sizes) and with one. Models are
made from default configurations, narrower and with fewer layers, in evaluation mode and without data.

- **held-out**: families that were looked at only after the forward pass was final; the JSON file names their classes.
- **algorithm, view, undecided**: in what the two differ. Each such weight was judged, by the model's source where its
  purpose was in doubt (`benchmarks/roles/judgments.tsv`); where two answers are defensible, both count as right. Of
  those on which both agree, heads, weights of few rows and doubted ones were judged as well; the rest counts as right.
- **not seen**: the pass did not use the weight, as a vision tower without images, or its use says nothing.
- **to AdamW, to Muon**: wrong ones, by what they get. **view**: Muon, but with other matrices than it should be.
- **seconds**: for one call of `quintic.trace`, on a machine with other work.
"""

SIDES = ("names", "example")
UNSEEN = ("", "unknown")


def kind_of(line: dict[str, Any]) -> str:
    """Return in what the two sides differ: `same`, `undecided`, `algorithm` or `view`."""
    one, other = line["names"], line["example"]
    if one == other:
        return "same"
    if "undecided" in (one, other):
        return "undecided"
    return "algorithm" if "AdamW" in (one, other) else "view"


def summary(library: str, rows: Sequence[dict[str, Any]], judgments: Sequence[Judgment]) -> dict[str, Any]:
    """Return the counts of some classes of a library, and the lines that differ or are judged wrong."""
    ran = [row for row in rows if "lines" in row]
    counts: Counter[str] = Counter()
    sides: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    doubts: Counter[str] = Counter()
    alarmed: set[str] = set()
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in ran:
        for line in row["lines"]:
            kind, number = kind_of(line), line["count"]
            counts["weights"] += number
            counts[kind] += number
            counts["not seen"] += number * (line["role"] in UNSEEN)
            found = judged(judgments, library, row["class"], line)
            verdicts = {side: verdict(line[side], line, found) for side in SIDES}
            for side in SIDES:
                sides[side][verdicts[side]] += number
            is_doubted = any(doubt in line["why_names"] for doubt in (PERHAPS_FUSED, UNTAKEN, EXCHANGED))
            if verdicts["names"] in ("to AdamW", "to Muon", "view"):
                doubts["wrong"] += number
                doubts["wrong, doubted"] += number * is_doubted
            elif verdicts["names"] == "right" and is_doubted:
                doubts["right, doubted"] += number
                alarmed.add(row["class"])
            if line["role"] in UNSEEN and verdicts["example"] not in ("right", "not judged"):
                sides["example"]["not seen"] += number
            if kind == "same" and set(verdicts.values()) == {"right"}:
                continue
            key = (row["family"], line["weight"], line["names"].split(":")[0], line["example"].split(":")[0])
            one = merged.setdefault(
                key, {**line, "family": row["family"], "count": 0, "classes": [], **_sides(verdicts)}
            )
            one["count"] += number
            one["classes"].append(row["class"])
            one["judgment"] = found.why if found else ""
    seconds = sorted(row["seconds"] for row in ran)
    return {
        "tried": len(rows),
        "ran": len(ran),
        **{name: counts[name] for name in ("weights", "same", "algorithm", "view", "undecided", "not seen")},
        "verdicts": {side: {name: sides[side][name] for name in (*VERDICTS, "not seen")} for side in SIDES},
        "doubts": {name: doubts[name] for name in ("wrong", "wrong, doubted", "right, doubted")},
        "classes, doubted though right": len(alarmed),
        "seconds": _spread(seconds),
        "lines": sorted(merged.values(), key=lambda one: -one["count"]),
    }


def failures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last errors of the classes that did not run, those of one kind together, the most frequent first."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if "errors" in row:
            last = row["errors"][-1]
            found[last["stage"], last["error"]].append(row["class"])
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [{"stage": stage, "error": error, "classes": names} for (stage, error), names in ordered]


def page(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    lines = ["# What the forward pass says of weights", ""]
    lines += [made_by(result["command"], result["commit"], result["versions"]), ""]
    lines += [*NOTES.splitlines(), *filter(None, [result.get("note")]), ""]
    heads = ["library", "part", "classes", "ran", "weights", "same", "algorithm", "view", "undecided", "not seen"]
    heads += ["seconds: median, 90 %, most"]
    parts = [(library, part, one) for library, found in result["libraries"].items() for part, one in found.items()]
    lines += table(heads, [_cells(library, part, one) for library, part, one in parts])
    lines += [""]
    rows = [
        [library, part, side, *(f"{one['verdicts'][side][name]:,}" for name in (*VERDICTS, "not seen"))]
        for library, part, one in parts
        for side in SIDES
    ]
    lines += table(["library", "part", "decided by", *VERDICTS, "wrong where not seen"], rows)
    lines += ["", "Doubts that `explain(model)` has without an example, which `param_groups` warns of:", ""]
    heads = [
        "library",
        "part",
        "wrong by names",
        "of these doubted",
        "silent",
        "right, but doubted",
        "classes with such",
    ]
    lines += table(heads, [_doubt_cells(library, part, one) for library, part, one in parts])
    for library, part, one in parts:
        if one["lines"]:
            lines += ["", f"## {library}, {part}", ""]
            heads = ["family", "weight", "count", "names", "with the example", "right", "judgment"]
            lines += table(heads, [_line_cells(line) for line in one["lines"]])
    return "\n".join(lines) + "\n"


def _cells(library: str, part: str, one: dict[str, Any]) -> list[str]:
    names = ("tried", "ran", "weights", "same", "algorithm", "view", "undecided", "not seen")
    seconds = one["seconds"]
    times = ", ".join(f"{seconds[name]:.2f}" for name in ("median", "p90", "most")) if seconds else "-"
    return [library, part, *(f"{one[name]:,}" for name in names), times]


def _doubt_cells(library: str, part: str, one: dict[str, Any]) -> list[str]:
    wrong, known, right = one["doubts"].values()
    classes = f"{one['classes, doubted though right']} of {one['ran']}"
    return [library, part, *(f"{number:,}" for number in (wrong, known, wrong - known, right)), classes]


def _line_cells(line: dict[str, Any]) -> list[str]:
    sides = [side for side in SIDES if line[f"verdict_{side}"] == "right"]
    right = "not judged" if line["verdict_names"] == "not judged" else " and ".join(sides) or "neither"
    texts = [line[side].partition(":")[0] for side in SIDES]
    return [
        line["family"],
        f"`{line['weight']}`",
        str(line["count"]),
        *texts,
        right,
        line["judgment"].replace("|", "/"),
    ]


def _sides(verdicts: dict[str, str]) -> dict[str, str]:
    return {f"verdict_{side}": found for side, found in verdicts.items()}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    nineties = statistics.quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {"median": statistics.median(seconds), "p90": nineties, "most": seconds[-1]}
