"""`quintic rates`: its laws, its bytes, and mistakes."""

import math
import re
from pathlib import Path

import pytest

from quintic.cli import main
from quintic.commands.rates import start_of
from quintic.simulate.options import RatesOptions

GIB = 2**30
GPT2 = {"matrices": 84_934_656, "others": 39_505_152}


def printed_by(capsys, *arguments):
    assert main(["rates", *arguments]) == 0
    return capsys.readouterr().out


def cells(text, name):
    line = next(line for line in text.splitlines() if re.match(re.escape(name) + r"  ", line))
    return re.split(r" {2,}", line)


def test_tokens_of_the_harness_model_begin_with_its_batch_and_decay():
    reference = start_of(RatesOptions(model="gpt2"), 10**8).scale.reference_tokens
    start = start_of(RatesOptions(model="gpt2", tokens=reference), 10**8)
    assert start.scale.batch_tokens == 2**19
    assert start.weight_decay == pytest.approx(0.2)


@pytest.mark.parametrize("factor", [0.01, 0.3, 8, 1000])
def test_batch_and_decay_follow_the_tokens(factor):
    reference = start_of(RatesOptions(model="gpt2"), 10**8).scale.reference_tokens
    tokens = int(factor * reference)
    start = start_of(RatesOptions(model="gpt2", tokens=tokens), 10**8)
    assert abs(math.log2(start.scale.batch_tokens / (2**19 * factor**0.383))) <= 0.5
    assert start.scale.steps == round(tokens / start.scale.batch_tokens)
    assert start.weight_decay == pytest.approx(0.2 * math.sqrt(start.scale.batch_tokens / 2**19) / factor, rel=1e-6)


def test_a_given_batch_decides_about_steps_and_decay():
    few, many = (start_of(RatesOptions(model="gpt2", tokens=1e9, batch_tokens=n), 10**8) for n in (10**5, 4 * 10**5))
    assert (few.scale.steps, many.scale.steps) == (10_000, 2_500)
    assert many.weight_decay == pytest.approx(2 * few.weight_decay)


def test_the_other_decay_has_the_product_of_adamw():
    start = start_of(RatesOptions(model="gpt2", adamw_lr=6e-4, adamw_weight_decay=0.1), 10**8)
    assert start.same_product * 0.02 == pytest.approx(6e-4 * 0.1)


@pytest.mark.parametrize(
    ("option", "of_matrices", "of_others"),
    [
        ("defaults", 4, 8),
        ('state_dtype="bf16"', 2, 4),
        ('master="mantissa"', 6, 10),
        ('master="mantissa", state_dtype="bf16"', 4, 6),
        ('master="8bit"', 5, 9),
        ('master="8bit", state_dtype="bf16"', 3, 5),
        ('master="fp32"', 8, 12),
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_bytes_of_state(option, of_matrices, of_others, ranks, capsys):
    found = cells(printed_by(capsys, "--model", "gpt2", "--ranks", str(ranks)), option)
    state = (of_matrices * GPT2["matrices"] + of_others * GPT2["others"]) / ranks / GIB
    weights = 4 * sum(GPT2.values()) / ranks / GIB
    assert [float(cell) for cell in found[1:3]] == [2 + of_matrices, 2 + of_others]
    assert [float(cell) for cell in found[3:]] == pytest.approx([state, state + weights], abs=0.006)


def test_every_line_says_its_reason(capsys):
    text = printed_by(capsys, "--model", "llama-3-8b", "--tokens", "1e12", "--batch-tokens", "4000000")
    assert cells(text, "tokens")[1:] == ["1,000,000,000,000", "yours, 125 a parameter"]
    assert cells(text, "batch")[1:] == ["4,000,000", "2,000,000 to 8,000,000", "yours"]
    assert cells(text, "steps")[1:] == ["250,000"]
    assert cells(text, "lr")[1:3] == ["0.02", "0.01 to 0.04"]
    assert max(map(len, text.splitlines())) <= 140


def test_the_manual_shows_what_the_command_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "choose-settings.md").read_text("utf-8")
    shown = re.search(r"```text\n\$ quintic rates (.*)\n((?:.*\n)*?)```", page)
    assert printed_by(capsys, *shown[1].split()) == shown[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3-8b"], "--model lama-3-8b: unknown; did you mean llama-3-8b?"),
        (["--model", "gpt2", "--tokens", "0"], "--tokens 0.0: must be at least 1 and finite"),
        (["--model", "gpt2", "--tokens", "nan"], "--tokens nan: must be at least 1 and finite"),
        (["--model", "gpt2", "--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--model", "gpt2", "--adamw-lr", "-1"], "--adamw-lr -1.0: must be at least 0 and finite"),
        ([], "--model"),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["rates", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
