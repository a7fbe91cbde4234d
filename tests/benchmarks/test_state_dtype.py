"""The table of `benchmarks.training.state_dtype`."""

from benchmarks.training.state_dtype import lines_of


def row(state, seed, loss):
    return {"state": state, "seed": seed, "loss": loss, "bpb": loss / 2, "seconds": 10.0}


def test_seeds_are_compared_with_their_twins():
    rows = [row("None", 1, 3.0), row("None", 2, 3.2), row("bf16", 2, 3.1), row("bf16", 1, 3.05), row("bf16", 3, 9.0)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of(rows)]
    assert lines[2] == ["float32", "3.1000", "3.0000, 3.2000", "1.5500", "-", "10"]
    assert lines[3] == ["bfloat16", "3.0750", "3.0500, 3.1000", "1.5375", "-0.0250 (-0.1000 to +0.0500)", "10"]


def test_without_twins_there_is_no_table():
    assert lines_of([row("None", 1, 3.0), row("bf16", 2, 3.0)]) == ["No seed was trained with both."]
