"""The table of clients: what it says of results, and two rows run on the CPU."""

import json
from argparse import Namespace

import pytest

from benchmarks import clients

PLAIN = {"is_plain": True, "losses": [[4.0, 2.0, 1.0]]}


def result(*losses, is_plain=False, **more):
    common = {"library": "torch", "version": "2", "what": "loop", "example": "x", "layout": "DDP", "ranks": 2}
    return {**common, "is_plain": is_plain, "losses": [list(one) for one in losses], **more}


def test_losses_are_compared_with_the_plain_loop():
    same = clients.judged(result((4.0, 2.0, 1.0), is_plain=True), PLAIN)
    assert same == {"loss": "4.000 to 1.000", "plain": "same bits"}
    assert clients.judged(result((4.0, 2.002, 1.0), is_plain=True), PLAIN)["plain"] == "1e-03"
    assert "plain" not in clients.judged(result((4.0, 2.0, 1.0)), PLAIN)
    assert "plain" not in clients.judged(PLAIN, PLAIN)


def test_resumed_losses_are_compared_with_the_end_of_the_whole_run():
    whole = (4.0, 3.0, 2.0, 1.0)
    assert clients.judged(result(whole, whole), PLAIN)["resumed"] == "same bits"
    assert clients.judged(result(whole, (2.0, 1.0)), PLAIN)["resumed"] == "same bits"
    assert clients.judged(result(whole, (4.0, 3.0), (2.0, 1.1)), PLAIN)["resumed"] == "1e-01"
    assert clients.judged(result(whole, (*whole, 1.0)), PLAIN)["resumed"] == "5 steps beside 4"


def test_the_error_is_that_of_the_example_and_not_of_torchrun():
    stderr = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3, in main
[rank1]: ValueError: weight: no such layout
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert clients.last_error(stderr) == "ValueError: weight: no such layout"
    assert clients.last_error("killed\n") == "no error was told"


def test_the_page_has_a_line_for_every_row():
    missing = result(missing=["trl"])
    del missing["losses"]
    failed = {**missing, "error": "ValueError: a | b"}
    del failed["missing"]
    results = [{**result(), **PLAIN}, missing, failed]
    text = clients.page(results, Namespace(ranks=2, commit="abc"))
    lines = [line for line in text.splitlines() if line.startswith("| torch")]
    assert len(lines) == 3
    assert {line.count("|") for line in lines} == {9}
    assert "not installed: trl" in lines[1]
    assert "ValueError: a / b" in lines[2]


@pytest.mark.slow
def test_rows_run_on_this_machine(tmp_path):
    assert clients.main(["--ranks", "2", "--only", "ddp", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "clients.json").read_text("utf-8"))
    assert [(found["example"], found["ranks"]) for found in results] == [("plain", 1), ("ddp", 2)]
    plain, ddp = (found["losses"][0] for found in results)
    assert ddp == pytest.approx(plain, rel=1e-3)
    page = (tmp_path / "clients.md").read_text("utf-8")
    assert str(tmp_path) not in page
    assert "| ddp.py | DDP | 2 |" in page
