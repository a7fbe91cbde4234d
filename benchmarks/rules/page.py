"""What the runs say: the best setting of each candidate, its differences to Muon, and the page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.results import table
from benchmarks.rules.candidates import ADAMW_NAME, BASELINE, candidate, next_rates
from benchmarks.rules.evidence import Mean, equal_length, p_value, paired, steps_to
from benchmarks.training.baseline_page import computing, text_facts

Row = Mapping[str, Any]
_SETTING = ("setting", "rate", "aux")

_NOTE = """\
**loss**: of held-back text at the end, in nats per token; inf if a run diverged. **less Muon**: mean difference of
the runs of equal seed, and its standard error; negative is better than Muon. **p**: paired two-sided t-test,
Student's distribution with n - 1 degrees of freedom. **steps to Muon's loss**: where the run's curve crosses the
final loss of Muon's run of that seed, between evaluations by a line, in % of the steps (in brackets how many do, if
not all). The rates fall to zero at the end of every run, so a curve that ends a little lower crosses late. **equal
length**: Muon was also trained with fewer and with more steps, each with its whole schedule. A rule that ends where
Muon would after 1 / 0.95 of the steps has 95 here, seed by seed: it needs 95 % of Muon's steps. Nothing is
extrapolated: < 80 (1 of 3) says that with one of three seeds the rule ends lower than Muon does with 1 / 0.8 of the
steps, the most that were tried, and > 125 that it ends higher than Muon with 1 / 1.25 of them, the fewest. There is no
mean then, and - where no seed has a length. **ms**: medians of steps timed alone on a device. **bytes**: state for each
weight of the matrices."""


class Study:
    """The rows of a study, and the choices that follow from them.

    Args:
        rows: of the .jsonl file; read anew at each question.
        names: the candidates.
        tuning_seeds: by which settings are chosen.
        steps: of the runs that are compared.
    """

    def __init__(self, rows: Iterable[Row], names: Sequence[str], tuning_seeds: Sequence[int], steps: int) -> None:
        self.rows, self.names, self.tuning_seeds, self.steps = rows, list(names), list(tuning_seeds), steps

    def _losses(self, name: str, steps: int) -> dict[tuple[Any, ...], dict[int, Row]]:
        """Return setting -> seed -> run of a candidate."""
        found: dict[tuple[Any, ...], dict[int, Row]] = {}
        for row in self.rows:
            cell = row["cell"]
            if (cell["rule"], cell["steps"]) == (name, steps) and _is_run(row):
                found.setdefault(tuple(cell[key] for key in _SETTING), {})[cell["seed"]] = row
        return found

    def tuned(self, name: str) -> dict[tuple[Any, ...], float]:
        """Return (setting, rate, aux) -> mean loss of the tuning seeds, of the settings that were tried with all."""
        found = {}
        for setting, rows in self._losses(name, self.steps).items():
            if all(seed in rows for seed in self.tuning_seeds):
                found[setting] = Mean.of([_loss(rows[seed]) for seed in self.tuning_seeds]).mean
        return found

    def by_rate(self, name: str, aux: float) -> dict[float, float]:
        """Return rate -> mean loss of the tuning seeds, of the library's setting."""
        return {key[1]: loss for key, loss in self.tuned(name).items() if (key[0], key[2]) == ("", aux)}

    def by_aux(self, name: str, setting: Mapping[str, Any]) -> dict[float, float]:
        """Return factor on AdamW's rates -> mean loss of the tuning seeds, all else as in a setting."""
        wanted = (setting["setting"], setting["rate"])
        return {key[2]: loss for key, loss in self.tuned(name).items() if key[:2] == wanted}

    def is_searched(self, name: str) -> bool:
        """Return whether a candidate's grid of rates came to its end, and all of its settings were tried."""
        tuned = self.tuned(name)
        grids = [self.by_rate(name, aux) for aux in {key[2] for key in tuned}]
        rates = max(grids, key=len, default={})
        return {key[0] for key in tuned} >= {*candidate(name).settings} and not next_rates(rates, 1.0)

    def best(self, name: str) -> dict[str, Any] | None:
        """Return the setting with the least loss of the tuning seeds; None if none ended."""
        found = {key: loss for key, loss in self.tuned(name).items() if math.isfinite(loss)}
        if not found:
            return None
        key = min(found, key=lambda setting: found[setting])
        return dict(zip(_SETTING, key, strict=True))

    def compared(self, name: str, steps: int = 0) -> tuple[dict[str, Any], dict[int, Row]]:
        """Return the setting of the table, and seed -> run.

        It is the best one that was trained with at least half as many seeds of the table as any: the last choice may
        have had no time.
        """
        tuned = self.tuned(name)
        runs = {
            key: {seed: row for seed, row in rows.items() if seed not in self.tuning_seeds}
            for key, rows in self._losses(name, steps or self.steps).items()
        }
        most = max(map(len, runs.values()), default=0)
        enough = [key for key, rows in runs.items() if rows and 2 * len(rows) >= most]
        if not enough:
            return {}, {}
        key = min(enough, key=lambda key: tuned.get(key, math.inf))
        return dict(zip(_SETTING, key, strict=True)), runs[key]

    def losses(self, name: str) -> dict[int, float]:
        """Return seed -> final loss of the table's setting."""
        return {seed: _loss(row) for seed, row in self.compared(name)[1].items()}

    def ranked(self, names: Sequence[str], *, with_adamw: bool = False) -> list[str]:
        """Return candidates by their mean difference to Muon, the best first; AdamW is none unless asked for."""
        baseline = self.losses(BASELINE)
        found = {
            name: difference.mean
            for name in names
            if (with_adamw or name != ADAMW_NAME) and (difference := paired(self.losses(name), baseline)) is not None
        }
        return sorted(found, key=lambda name: found[name])

    def near_best(self, names: Sequence[str]) -> list[str]:
        """Return the best candidate, and those whose paired difference to it is within two standard errors."""
        ranked = self.ranked([BASELINE, *names])
        if not ranked:
            return []
        best = self.losses(ranked[0])
        near = []
        for name in ranked:
            difference = paired(self.losses(name), best)
            if name == ranked[0] or (difference is not None and difference.mean <= 2 * difference.error):
                near.append(name)
        return near

    def crossings(self, name: str) -> tuple[Mean | None, int, int]:
        """Return where curves reach Muon's final loss, in % of the steps, how many do, and how many there are."""
        _, rows = self.compared(name)
        baseline = self.losses(BASELINE)
        seeds = sorted(rows.keys() & baseline.keys())
        found = [steps_to(rows[seed]["losses"], baseline[seed]) for seed in seeds]
        reached = [100 * step / self.steps for step in found if step is not None]
        return Mean.of(reached) if reached else None, len(reached), len(seeds)

    def lengths(self) -> dict[int, dict[int, float]]:
        """Return seed -> number of steps -> final loss of Muon, of the seeds that have all lengths."""
        lengths = {row["cell"]["steps"] for row in self.rows if row["cell"]["rule"] == BASELINE and _is_run(row)}
        runs = {steps: self.compared(BASELINE, steps)[1] for steps in sorted(lengths)}
        seeds = set.intersection(*({*rows} for rows in runs.values())) if len(runs) > 2 else set()
        return {seed: {steps: _loss(rows[seed]) for steps, rows in runs.items()} for seed in sorted(seeds)}

    def equal_lengths(self, name: str) -> list[float]:
        """Return the % of Muon's steps that a rule needs for the same loss, by seed.

        Infinite and 0 beyond the lengths that Muon was trained with. A seed is left out if Muon's own loss does not
        fall from each length to the next.
        """
        losses = self.losses(name)
        found = [equal_length(muon, losses[seed]) for seed, muon in self.lengths().items() if seed in losses]
        return [100 * self.steps / length if length else math.inf for length in found if not math.isnan(length)]

    def times(self, name: str) -> Row | None:
        """Return the times and the bytes of a candidate; None if it was not timed."""
        found = (row for row in self.rows if row["cell"].get("part") == "time" and row["cell"]["rule"] == name)
        return next(found, None)


def _is_run(row: Row) -> bool:
    return "part" not in row["cell"]


def _loss(row: Row) -> float:
    return math.inf if row["loss"] is None else float(row["loss"])


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    study = Study(result["rows"], result["rules"], result["tuning_seeds"], result["steps"])
    names = [name for name in result["rules"] if name != BASELINE]
    ranked = study.ranked(result["rules"], with_adamw=True)
    near = study.near_best(names)
    lines = [
        f"# Update rules, {result['size']}",
        "",
        f"`{result['command']}` at commit {result['commit']}: {result['seconds']:.0f} seconds. {computing(result)}.",
        "",
        _facts(result),
        "",
        *table(
            ("rule", "n", "loss", "less Muon", "p", "steps to Muon's loss, %", "equal length, %", "optimizer, ms",
             "step, ms", "bytes", "setting: rate; AdamW's x"),
            [_cells(study, name, name in near) for name in ranked],
        ),
        "",
        "Bold: the best, and what is within two standard errors of it, by the paired difference.",
        "",
        *_lengths(study),
        *_verdict(study, names, near),
        "",
        _NOTE,
        "",
        *_busy(result),
        "## Settings tried",
        "",
        f"Loss at the end with seed {', '.join(map(str, result['tuning_seeds']))}, the best first.",
        "",
        *[_tried(study, name) for name in result["rules"]],
    ]  # fmt: skip
    few = [name for name in result["rules"] if len(study.losses(name)) < result["first_seeds"]]
    cut = [name for name in result["rules"] if not study.is_searched(name)]
    if few or cut or result["failures"]:
        lines += ["", "## Not complete", "", "The time was over, or runs failed:", ""]
    if few:
        lines += [f"- fewer than {result['first_seeds']} seeds: {', '.join(few)}"]
    if cut:
        lines += [f"- the search of rates and settings was cut, so a better one may exist: {', '.join(cut)}"]
    lines += [f"- failed: {failure}" for failure in result["failures"]]
    return "\n".join(lines) + "\n"


def _facts(result: Mapping[str, Any]) -> str:
    model = result["model"]
    width = -(-model["aspect_ratio"] * model["depth"] // model["head_dim"]) * model["head_dim"]
    tokens = result["steps"] * result["batch_tokens"]
    passes = tokens / result["data"]["train_tokens"]
    often = f", {passes:.1f} passes over the text" if passes > 1 else ""
    return (
        f"A GPT of depth {model['depth']} and width {width}, {result['steps']} steps of "
        f"{result['batch_tokens']:,} tokens for every run ({tokens:,} tokens{often}). {text_facts(result['data'])} "
        "Under one seed all have the same initial weights, and the same batches in the same order. "
        f"{len(result['rows'])} runs, {sum(row['seconds'] for row in result['rows']):,.0f} seconds one after the other."
    )


def _cells(study: Study, name: str, is_near: bool) -> list[str]:
    setting, _ = study.compared(name)
    losses = study.losses(name)
    difference = paired(losses, study.losses(BASELINE)) if name != BASELINE else None
    crossing, reached, number = study.crossings(name)
    times = study.times(name)
    steps, length = "100", "100"
    if name != BASELINE:
        steps = f"{_shown(crossing, '.1f')}{'' if reached == number else f' ({reached} of {number})'}"
        length = _length(study, name)
    return [
        f"**{candidate(name).title}**" if is_near else candidate(name).title,
        str(len(losses)),
        f"{Mean.of(list(losses.values())).mean:.4f}",
        "" if difference is None else _shown(difference, "+.4f"),
        "" if difference is None else _p(difference),
        steps,
        length,
        f"{times['optimizer_ms']:.2f}" if times else "-",
        f"{times['step_ms']:.1f}" if times else "-",
        f"{times['state_bytes']:.2f}" if times else "-",
        f"{setting['setting'] + ': ' if setting['setting'] else ''}{setting['rate']:g}; x {setting['aux']:g}",
    ]


def _length(study: Study, name: str) -> str:
    """Return a rule's equal length: the mean, or how many seeds lie beyond the lengths of Muon's runs."""
    found = study.equal_lengths(name)
    beyond = {"<": found.count(0.0), ">": found.count(math.inf)}
    if not any(beyond.values()):
        return _shown(Mean.of(found) if found else None, ".1f")
    lengths = next(iter(study.lengths().values()))
    ends = {"<": 100 * study.steps / max(lengths), ">": 100 * study.steps / min(lengths)}
    return ", ".join(f"{sign} {ends[sign]:.0f} ({n} of {len(found)})" for sign, n in beyond.items() if n)


def _lengths(study: Study) -> list[str]:
    """Say how Muon's own loss follows from the number of steps."""
    seeds = study.lengths()
    if not seeds:
        return []
    steps = sorted(next(iter(seeds.values())))
    means = {n: Mean.of([losses[n] for losses in seeds.values()]).mean for n in steps}
    fall = sum(not math.isnan(equal_length(losses, 0.0)) for losses in seeds.values())
    text = f"Muon's mean loss over {len(seeds)} seeds: {', '.join(f'{means[n]:.4f} with {n} steps' for n in steps)}."
    if fall == 0:
        text += " With none of them does it fall from each to the next, so there is no equal length."
    elif fall < len(seeds):
        text += f" It falls from each to the next with {fall} of them only, and the others have no equal length."
    if means[steps[-1]] >= means[study.steps]:
        text += (
            " More steps make Muon no better here, as where a text is seen so often that it is learnt by heart. A rule "
            "may be better because it does less of that, or because it learns faster; these runs cannot tell which."
        )
    return [text, ""]


def _shown(mean: Mean | None, form: str) -> str:
    if mean is None:
        return "-"
    return f"{mean.mean:{form}}" + (f" ± {mean.error:{form.lstrip('+')}}" if math.isfinite(mean.error) else "")


def _p(difference: Mean) -> str:
    p = p_value(difference)
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _verdict(study: Study, names: Sequence[str], near: Sequence[str]) -> list[str]:
    """Say in words what won and what lost."""
    baseline = study.losses(BASELINE)
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "open": []}
    compared = [(name, d) for name in names if (d := paired(study.losses(name), baseline)) is not None]
    for name, difference in compared:
        sure = p_value(difference) < 0.05 or difference.mean == math.inf  # diverged
        kind = "open" if not sure else "better" if difference.mean < 0 else "worse"
        kinds[kind].append(candidate(name).title)
    if not compared:
        return ["Nothing was compared."]
    strict = [candidate(name).title for name, d in compared if d.mean < 0 and p_value(d) < 0.05 / len(compared)]
    return [
        f"- Better than Muon (p < 0.05 each): {_listed(kinds['better'])}.",
        f"- Of these at p < 0.05 / {len(compared)}, which allows for so many comparisons: {_listed(strict)}.",
        f"- No difference to Muon that these seeds could show: {_listed(kinds['open'])}.",
        f"- Worse than Muon (p < 0.05 each): {_listed(kinds['worse'])}.",
        f"- Within two standard errors of the best: {_listed([candidate(name).title for name in near])}.",
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _busy(result: Mapping[str, Any]) -> list[str]:
    load = result["load"]
    if result["devices"] != ["cpu"] or load < 0.25:
        return []
    return [
        f"The machine was busy with other work: a load of {load:.1f} on each core before the first run. Times are too "
        "long and scatter; losses do not depend on it.",
        "",
    ]


def _tried(study: Study, name: str) -> str:
    tuned = sorted(study.tuned(name).items(), key=lambda item: item[1])
    rates = [rate for (_, rate, _), _ in tuned]
    texts = [
        f"{label + ' ' if label else ''}{rate:g}{f' x {aux:g}' if aux != 1 else ''}: {loss:.4f}"
        for (label, rate, aux), loss in tuned
    ]
    edge = ""
    if len(set(rates)) > 1 and rates[0] in (min(rates), max(rates)):
        edge = "; the best rate is the end of what was tried"
    return f"- {candidate(name).title}: {', '.join(texts) or 'not tried'}{edge}"
