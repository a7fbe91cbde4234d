"""Settings, statistics and page of `benchmarks.rules`, whose runs take minutes; and one job of each kind."""

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_runs import tiny_config

from benchmarks.rules import candidates, evidence, run
from benchmarks.rules.__main__ import SIZES
from benchmarks.rules.page import Study, page
from benchmarks.training.workers import with_values
from quintic.commands.presets import preset
from quintic.data.dataset import Dataset
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.normuon import NeuronSecondMoment
from quintic.optim.rules.library.two_rate import TwoRateMomentum
from quintic.optim.rules.table import RULES
from quintic.train.saved_config import to_dict


@pytest.mark.parametrize("name", candidates.names_of_all())
def test_every_candidate_has_settings_that_are_tried(name: str) -> None:
    found = candidates.candidate(name)
    assert next(iter(found.settings)) == ""
    assert len(found.settings) >= (1 if name == "adamw" else 2)
    assert len({(setting.rule, str(setting.values)) for setting in found.settings.values()}) == len(found.settings)
    if name in RULES:
        assert found.settings[""].rule == RULES[name]
    for size, (name, changes) in SIZES.items():
        base = with_values(preset(name), changes)
        for label in found.settings:
            values = found.values(label, found.center(base), 2.0, base)
            config = with_values(base, values)
            assert config.optim.embedding_lr == 2 * base.optim.embedding_lr, size
            assert getattr(config.optim, found.rate_option) == found.center(base)


def test_a_pair_has_the_stages_of_both() -> None:
    rule = candidates.combined("two_rate+muoneq+normuon")
    assert isinstance(rule.direction, TwoRateMomentum)
    assert (rule.before, rule.after) == ((Equalize(),), (NeuronSecondMoment(),))
    assert rule.title == "two-rate momentum + MuonEq + NorMuon"
    small = candidates.candidate("muown+normuon")
    assert small.is_small
    assert small.settings[""].rule.constrain == RULES["muown"].constrain
    with pytest.raises(SystemExit, match="--rules muon\\+mine: 'mine' is no rule; choose muon, normuon"):
        candidates.combined("muon+mine")
    with pytest.raises(SystemExit, match="two of its rules have a stage 'direction'"):
        candidates.combined("two_rate+muown")


@pytest.mark.parametrize("best", [0.003, 0.009, 0.02, 0.033, 0.1])
def test_the_grid_grows_and_narrows_to_the_best_rate(best: float) -> None:
    losses: dict[float, float] = {}
    while rates := candidates.next_rates(losses, 0.02):
        assert not losses.keys() & {*rates}
        losses |= {rate: math.log(rate / best) ** 2 for rate in rates}
    found = min(losses, key=lambda rate: losses[rate])
    assert 0.7 < found / best < 1.42
    assert len(losses) <= 6


def test_a_rate_that_diverges_is_no_neighbour_to_go_to() -> None:
    assert candidates.next_rates({0.01: 3.1, 0.02: 3.0, 0.04: math.inf}, 0.02) == [0.0141]
    assert candidates.next_rates({0.01: math.inf, 0.02: math.inf, 0.04: math.inf}, 0.02) == [0.005]


def test_factors_of_adamw_s_rates_go_on_while_the_best_is_at_an_end() -> None:
    assert candidates.next_factors({1.0: 3.0}) == [0.5, 2.0]
    assert candidates.next_factors({0.5: 3.1, 1.0: 3.0, 2.0: 3.2}) == []
    assert candidates.next_factors({0.5: 3.1, 1.0: 3.0, 2.0: 2.9}) == [4.0]
    assert candidates.next_factors({0.5: 5, 1.0: 4, 2.0: 3, 4.0: 2, 8.0: 1}) == []


# Two-sided, from tables of Student's distribution.
@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [(1.0, 1, 0.5), (12.706, 1, 0.05), (4.303, 2, 0.05), (3.182, 3, 0.05), (-2.776, 4, 0.05), (2.365, 7, 0.05),
     (3.499, 7, 0.01), (2.228, 10, 0.05), (0.0, 5, 1.0), (5.041, 7, 0.0015), (8.610, 4, 0.001)],
)  # fmt: skip
def test_tails_of_student_s_distribution(t: float, freedom: int, tail: float) -> None:
    assert evidence.t_tail(t, freedom) == pytest.approx(tail, rel=5e-3)


def test_differences_are_of_equal_seeds() -> None:
    found = evidence.paired({1: 3.0, 2: 3.5, 4: 9.0}, {1: 3.1, 2: 3.4, 3: 0.0})
    assert found == (pytest.approx(0.0), pytest.approx(0.1), 2)
    assert evidence.p_value(found) == pytest.approx(1.0)
    assert evidence.paired({1: 3.0}, {2: 3.0}) is None
    alone = evidence.paired({1: 3.0}, {1: 3.5})
    assert alone is not None
    assert math.isnan(evidence.p_value(alone))
    assert evidence.p_value(evidence.Mean(-0.1, 0.0, 3)) == 0.0
    diverged = evidence.Mean.of([3.0, math.inf])
    assert diverged.mean == math.inf
    assert math.isnan(evidence.p_value(diverged))


def test_steps_to_a_loss() -> None:
    curve = [[80, 3.2], [90, 3.1], [100, 3.0]]
    assert evidence.steps_to(curve, 3.05) == pytest.approx(95)
    assert evidence.steps_to(curve, 3.0) == pytest.approx(100)
    assert evidence.steps_to(curve, 2.9) is None
    assert evidence.steps_to(curve, 3.3) == 80
    assert evidence.steps_to([], 3.3) is None
    # Falls by 0.1 with each doubling.
    losses = {50: 3.1, 100: 3.0, 200: 2.9}
    assert evidence.equal_length(losses, 3.0) == pytest.approx(100)
    assert evidence.equal_length(losses, 2.95) == pytest.approx(100 * math.sqrt(2))
    assert evidence.equal_length(losses, 2.9) == pytest.approx(200)
    assert evidence.equal_length(losses, 3.1) == pytest.approx(50)
    # Beyond the lengths there is nothing to go by.
    assert evidence.equal_length(losses, 2.899) == math.inf
    assert evidence.equal_length(losses, 3.101) == 0.0
    assert evidence.equal_length(losses, math.inf) == 0.0
    assert math.isnan(evidence.equal_length({50: 3.1, 100: 3.0, 200: 3.0}, 3.05))


def row(rule: str, seed: int, loss: float | None, *, rate: float = 0.02, aux: float = 1.0, steps: int = 100) -> Any:
    cell = {"rule": rule, "setting": "", "rate": rate, "aux": aux, "seed": seed, "steps": steps}
    end = 9.0 if loss is None else loss
    return {
        "cell": cell,
        "loss": loss,
        "seconds": 2.0,
        "losses": [[0.8 * steps, end + 0.2], [0.9 * steps, end + 0.1], [steps, end]],
    }


def test_a_rule_that_diverged_is_worse() -> None:
    rows = [*rows_of_a_study(), row("aurora", 101, 3.0), row("aurora", 1, None), row("aurora", 2, 3.0)]
    text = page(result_of(rows, ["muon", "normuon", "aurora"]))
    assert "- Worse than Muon (p < 0.05 each): Aurora." in text
    assert "| Aurora | 2 | inf | +inf | - |" in text


def rows_of_a_study() -> list[Any]:
    rows = [row("muon", 101, 3.0), row("muon", 101, 3.2, rate=0.04), row("muon", 101, None, rate=0.08)]
    rows += [row("normuon", 101, 2.9), row("normuon", 101, 2.8, aux=2.0), row("muown", 101, 3.5)]
    for seed, noise in enumerate((0.0, 0.01, -0.01), 1):
        rows += [row("muon", seed, 3.0 + noise, steps=100)]
        rows += [row("muon", seed, 3.1 + noise, steps=50), row("muon", seed, 2.9 + noise, steps=200)]
        rows += [row("normuon", seed, 2.95 + 1.1 * noise), row("muown", seed, 3.3 - noise)]
    rows.append(row("normuon", 1, 2.0, aux=2.0))  # the time was over after one of three seeds
    timed = row("normuon", 0, None)
    rows.append({"cell": {**timed["cell"], "part": "time"}, "loss": None, "optimizer_ms": 2.5, "step_ms": 30.25,
                 "state_bytes": 4.0625, "seconds": 1.0})  # fmt: skip
    return rows


def test_the_table_has_the_best_setting_that_has_its_seeds() -> None:
    study = Study(rows_of_a_study(), ["muon", "normuon", "muown"], [101], 100)
    assert study.best("muon") == {"setting": "", "rate": 0.02, "aux": 1.0}
    assert study.best("normuon") == {"setting": "", "rate": 0.02, "aux": 2.0}
    assert study.compared("normuon")[0]["aux"] == 1.0
    assert study.losses("normuon") == {1: 2.95, 2: pytest.approx(2.961), 3: pytest.approx(2.939)}
    assert study.by_rate("muon", 1.0) == {0.02: 3.0, 0.04: 3.2, 0.08: math.inf}
    assert study.by_aux("normuon", {"setting": "", "rate": 0.02}) == {1.0: 2.9, 2.0: 2.8}
    assert study.ranked(["muon", "normuon", "muown"]) == ["normuon", "muon", "muown"]
    assert study.near_best(["normuon", "muown"]) == ["normuon"]
    mean, reached, number = study.crossings("normuon")
    assert mean is not None
    assert (mean.mean, reached, number) == (pytest.approx(95, abs=0.1), 3, 3)
    assert study.equal_lengths("normuon") == pytest.approx([100 / math.sqrt(2)] * 3, rel=1e-2)
    assert study.equal_lengths("muown") == [math.inf] * 3


def test_seeds_beyond_muon_s_lengths_are_counted_and_not_averaged() -> None:
    rows = [*rows_of_a_study(), row("aurora", 101, 2.9)]
    rows += [row("aurora", seed, loss) for seed, loss in ((1, 2.85), (2, 3.25), (3, 2.95))]
    study = Study(rows, ["muon", "aurora"], [101], 100)
    assert study.equal_lengths("aurora") == [0.0, math.inf, pytest.approx(75.8, abs=0.1)]
    text = page(result_of(rows, ["muon", "normuon", "aurora"]))
    [line] = [line for line in text.splitlines() if line.startswith("| **Aurora** |")]
    assert line.split(" | ")[6] == "< 50 (1 of 3), > 200 (1 of 3)"
    assert (
        "Muon's mean loss over 3 seeds: 3.1000 with 50 steps, 3.0000 with 100 steps, 2.9000 with 200 steps.\n" in text
    )


def test_there_is_no_equal_length_where_muon_gains_nothing_by_more_steps() -> None:
    rows = rows_of_a_study()
    for one in rows:
        cell = one["cell"]
        if (cell["rule"], cell["steps"], cell["seed"]) == ("muon", 200, 2):
            one["loss"] = 3.02
    assert len(Study(rows, ["muon"], [101], 100).equal_lengths("normuon")) == 2
    text = page(result_of(rows, ["muon", "normuon"]))
    assert "It falls from each to the next with 2 of them only, and the others have no equal length.\n" in text
    for one in rows:
        if one["cell"]["rule"] == "muon" and one["cell"]["steps"] == 200:
            one["loss"] = 3.2
    text = page(result_of(rows, ["muon", "normuon"]))
    assert "With none of them does it fall from each to the next, so there is no equal length. More steps make" in text
    assert "| 95.0 ± 0.1 | - | 2.50 |" in text


def test_a_search_is_over_when_rates_and_settings_were_tried() -> None:
    rows = [row("muon", 101, loss, rate=rate) for rate, loss in ((0.01, 3.2), (0.02, 3.0), (0.04, 3.1))]
    assert not Study(rows, ["muon"], [101], 100).is_searched("muon")
    rows.append(row("muon", 101, 3.05, rate=0.0283))
    low = row("muon", 101, 3.3)
    rows.append({**low, "cell": {**low["cell"], "setting": "momentum 0.95"}})
    assert Study(rows, ["muon"], [101], 100).is_searched("muon")
    assert not Study(rows[:-1], ["muon"], [101], 100).is_searched("muon")


def result_of(rows: list[Any], rules: list[str]) -> Mapping[str, Any]:
    return {
        "command": "python -m benchmarks.rules", "commit": "abc", "seconds": 1.0, "size": "tiny", "load": 3.0,
        "machine": {"device": "CPU", "cpu": "a processor", "cores": 2, "dtype": "float32", "attention": "sdpa"},
        "versions": {"python": "3.12", "torch": "2.13"}, "devices": ["cpu"], "at_once": 2, "steps": 100,
        "batch_tokens": 512, "model": {"depth": 1, "aspect_ratio": 16, "head_dim": 32, "seq_len": 64},
        "data": {"source": "python", "train_tokens": 1000, "val_tokens": 10},
        "rules": rules,
        "tuning_seeds": [101], "first_seeds": 3, "failures": [], "rows": rows,
    }  # fmt: skip


def test_the_page_tells_wins_and_misses() -> None:
    text = page(result_of(rows_of_a_study(), ["muon", "normuon", "muown", "adamw"]))
    assert (
        "| **NorMuon** | 3 | 2.9500 | -0.0500 ± 0.0006 | < 0.001 | 95.0 ± 0.1 | 70.7 ± 0.3 | 2.50 | 30.2 | 4.06 |"
        in text
    )
    assert "| Muown | 3 | 3.3000 | +0.3000 ± 0.0115 | 0.001 | - (0 of 3) | > 200 (3 of 3) |" in text
    assert "for every run (51,200 tokens, 51.2 passes over the text)." in text
    assert "23 runs, 45 seconds one after the other." in text
    assert "- Better than Muon (p < 0.05 each): NorMuon." in text
    assert "- Worse than Muon (p < 0.05 each): Muown." in text
    assert "Not complete" in text
    assert "- fewer than 3 seeds: adamw\n" in text
    assert "a better one may exist: muon, normuon, muown, adamw\n" in text
    assert "busy with other work: a load of 3.0 on each core" in text
    assert "- Muon: 0.02: 3.0000, 0.04: 3.2000, 0.08: inf; the best rate is the end of what was tried" in text


def job(dataset: Dataset, tmp_path: Any, **changed: Any) -> dict[str, Any]:
    config = tiny_config(
        dataset, tmp_path, device="cpu", dtype="float32", compile=False, threads=1, rms_every=0, eval_every=1
    )
    return {
        "config": to_dict(config), "data": str(dataset.path), "deadline": time.time() + 100, "timed_steps": 0,
        "eval_from": 3, "candidate": "muon", "setting": "", **changed,
    }  # fmt: skip


def test_jobs_train_and_time_with_their_rule(tiny_dataset: Dataset, tmp_path: Any) -> None:
    threads = torch.get_num_threads()
    try:
        losses = {}
        for name, label in (("muon", ""), ("two_rate", ""), ("two_rate", "rates 0.8, 0.95"), ("muown+normuon", "")):
            result = run.train(job(tiny_dataset, tmp_path, candidate=name, setting=label))
            assert [step for step, _ in result["losses"]] == [3, 4, 5, 6]
            assert result["losses"][-1][1] == result["loss"]
            losses[name, label] = result["loss"]
        assert len({*losses.values()}) == len(losses)
        timed = run.train(job(tiny_dataset, tmp_path, candidate="two_rate", timed_steps=2))
        assert timed["state_bytes"] == 8.0
        assert 0 < timed["optimizer_ms"] < timed["step_ms"]
        assert "cut" in run.train(job(tiny_dataset, tmp_path, deadline=0.0, timed_steps=2))
    finally:
        torch.set_num_threads(threads)
