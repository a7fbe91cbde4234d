"""The table of clients: what it says of results, and two rows run on the CPU."""

import json

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
