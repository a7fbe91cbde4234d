"""Steps that end in time are let alone; one that does not ends the process, with a message."""

import subprocess
import sys
import time

import torch

from quintic.optim.comms.lost_ranks import LostRanks, timeout_of


def test_steps_are_overdue_one_by_one():
    marks, told = torch.zeros(1, dtype=torch.int32), []
    lost = LostRanks(marks, 100.0, "waits", told.append)
    now = time.monotonic()
    assert not lost.is_overdue(now + 1e6)  # nothing was started
    assert [lost.expect(), lost.expect()] == [1, 2]
    assert not lost.is_overdue(now + 99)
    assert lost.is_overdue(now + 1e6)
    marks[0] = 1
    assert lost.is_overdue(now + 1e6)
    marks[0] = 2
    assert not lost.is_overdue(now + 1e6)
    assert lost.expect() == 3
    assert not lost.is_overdue(time.monotonic() + 99)
    assert not told


def test_a_thread_looks_as_long_as_something_is_to_come():
    marks, told = torch.zeros(1, dtype=torch.int32), []
    lost = LostRanks(marks, 0.05, "waits", told.append, pause=0.01)
    for number in (1, 2):
        assert lost.expect() == number
        deadline = time.monotonic() + 10
        while len(told) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told
        marks[0] = number
        while lost._is_watched and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not lost._is_watched
        told[:] = ["waits"] * number


def test_a_process_that_waits_is_ended():
    code = (
        "import time, torch; from quintic.optim.comms import lost_ranks; lost_ranks._GRACE_SECONDS = 0.0;"
        "lost_ranks.LostRanks(torch.zeros(1, dtype=torch.int32), 0.1, 'waits for rank 3', pause=0.05).expect();"
        "time.sleep(60)"
    )
    start = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert found.returncode < 0
    assert "quintic: waits for rank 3" in found.stderr
    assert time.monotonic() - start < 40


def test_without_a_time_out_it_is_ten_minutes():
    assert timeout_of(object(), torch.device("cpu")) == 600
