"""Options that others override: said in a line. Those without any effect are in `tests/test_cli_mistakes.py`."""

from pathlib import Path

import pytest
from tiny_runs import tiny_options

from quintic.cli import main
from quintic.commands import compare as comparison
from quintic.commands.options import training_options
from quintic.data.dataset import Dataset

pytestmark = pytest.mark.usefixtures("same_threads", "elsewhere")


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ("--tokenizer gpt2 --vocab-size 300", ["--vocab-size has no effect with --tokenizer"]),
        ("--warmup-steps 3 --warmup-frac 0.3", ["--warmup-frac has no effect with --warmup-steps"]),
        ("--recipe nanochat --warmup-frac 0.3", ["--warmup-frac has no effect with --warmup-steps"]),
        ("--adamw-lr 0.1", ["--adamw-lr has no effect with --optimizer muon"]),
        (
            "--optimizer adamw --muon-lr 0.1 --normalize neuron --adamw-lr 0.1",
            ["--muon-lr has no effect with --optimizer adamw", "--normalize has no effect with --optimizer adamw"],
        ),
        ("--update-rule muown --normalize neuron", ["--normalize has no effect with --update-rule"]),
        ("--optimizer adamw --update-rule muown", ["--update-rule has no effect with --optimizer adamw"]),
        ("--recipe nanochat --update-rule muown", []),
        ("--vocab-size 300 --warmup-frac 0.3 --muon-lr 0.1", []),
        ("--warmup-steps 3 --warmup-frac 0.02 --optimizer adamw --muon-lr 0.03", []),  # the defaults, written out
    ],
)
def test_an_option_that_another_overrides_is_told(
    given: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--preset", "cpu", *given.split()]
    assert list(training_options(arguments, "train").notes) == notes
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[: len(notes)] == notes


def test_a_run_tells_what_was_overridden(
    tiny_dataset: Dataset, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    options = tiny_options(tiny_dataset, elsewhere, steps=1, eval_every=0, parallel="ddp", adamw_lr=0.5)
    assert main(["train", *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "--adamw-lr has no effect with --optimizer muon" in printed
    assert "--parallel ddp has no effect on one rank; torchrun starts several" in printed


@pytest.mark.parametrize(("every", "is_told"), [("50", True), ("0", True), ("25", False)])
def test_a_comparison_tells_how_often_it_evaluates(
    every: str,
    is_told: bool,
    tiny_dataset: Dataset,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Path,
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda *args, **options: "compared")
    options = tiny_options(tiny_dataset, elsewhere, muon_lr=0.5, adamw_lr=0.5)
    assert main(["compare", *options, "--eval-every", every]) == 0
    told = [f"--eval-every {every} has no effect: a comparison evaluates every 25 steps"] if is_told else []
    assert capsys.readouterr().out.splitlines() == [*told, "compared"]
