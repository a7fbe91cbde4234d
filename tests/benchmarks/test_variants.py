"""The table of `benchmarks.training.variants`."""

from benchmarks.training.variants import lines_of


def row(variant, seed, loss):
    speed = {"tokens_per_second": 5000.0 * seed, "peak_memory_bytes": None}
    return {"variant": variant, "seed": seed, "loss": loss, "bpb": loss / 2, **speed}


def test_seeds_are_compared_with_their_twins():
    rows = [
        row("wide", 1, 3.0),
        row("wide", 2, 3.2),
        row("narrow", 2, 3.1),
        row("narrow", 1, 3.05),
        row("narrow", 3, 9.0),
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of(rows, ["wide", "narrow"])]
    assert lines[2] == ["wide", "3.1000", "3.0000, 3.2000", "1.5500", "-", "7,500", "-"]
    apart = "-0.0250 (-0.1000 to +0.0500)"
    assert lines[3] == ["narrow", "3.0750", "3.0500, 3.1000", "1.5375", apart, "7,500", "-"]


def test_without_twins_there_is_no_table():
    rows = [row("wide", 1, 3.0), row("narrow", 2, 3.0)]
    assert lines_of(rows, ["wide", "narrow"]) == ["No seed was trained with all variants."]
