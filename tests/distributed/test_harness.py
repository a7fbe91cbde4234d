"""The harness itself: results by rank, every kind of failure, and no process left behind."""

import contextlib
import os
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, TIME_FACTOR, run

import quintic


def total(rank, world_size, base):
    value = torch.tensor([base + rank], device=DEVICE)
    dist.all_reduce(value)
    return rank, world_size, {"value": value}, torch.get_num_threads(), value.device.index


def pid(rank, world_size):
    return os.getpid()


def fail_on(rank, world_size, ranks, error):
    if rank in ranks:
        raise error
    dist.barrier()


def die_on(rank, world_size, doomed):
    if rank == doomed:
        os._exit(7)
    dist.barrier()


def sleep_on(rank, world_size, sleepers, seconds, folder=None):
    if folder is not None:
        (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    if rank in sleepers:
        time.sleep(seconds)


def reduce_without(rank, world_size, absent):
    value = torch.ones(1, device=DEVICE)
    dist.all_reduce(value)  # connects the ranks
    if rank != absent:
        dist.all_reduce(value)
        value.item()


def origin_of_quintic(rank, world_size):
    return quintic.__file__


def fail_to_meet(rank, world_size, attempt, message):
    if attempt == 0:
        raise RuntimeError(message)
    return attempt


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_are_in_rank_order(world_size):
    expected = sum(range(world_size)) + 10 * world_size
    results = run(total, world_size, 10)
    assert [rank for rank, *_ in results] == list(range(world_size))
    assert all(size == world_size and int(found["value"]) == expected for _, size, found, *_ in results)
    assert {threads for *_, threads, _ in results} == {1}
    gpus = [rank % torch.cuda.device_count() if ON_GPUS else None for rank in range(world_size)]
    assert [index for *_, index in results] == gpus
    assert {found["value"].device.type for _, _, found, *_ in results} == {"cpu"}


def test_ranks_have_the_package_that_the_tests_have():
    """It is loaded before they are forked, by a process that may look for it elsewhere."""
    assert run(origin_of_quintic, 2) == [quintic.__file__] * 2


def test_no_process_is_left_behind():
    pids = run(pid, 3)
    assert len(set(pids)) == 3
    assert not any(map(is_running, pids))


def test_failing_rank_is_named_with_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 1 of 3: Traceback(?s:.)*in fail_on(?s:.)*AssertionError: seven"):
        run(fail_on, 3, [1], AssertionError("seven"))


def test_ranks_that_did_not_meet_try_again_with_other_arguments():
    for message, attempts in (("Gloo connectFullMesh failed with [...]", [0, 1]), ("another", [0])):
        made = []

        def make_args(made=made, message=message):
            made.append(len(made))
            return made[-1], message

        with contextlib.nullcontext() if len(attempts) > 1 else pytest.raises(RuntimeError, match="another"):
            assert harness.run_with(make_args, fail_to_meet, 1) == [1]
        assert made == attempts


def test_dead_rank_is_named_with_its_exit_code():
    with pytest.raises(RuntimeError, match="rank 1 of 2: the process died with exit code 7"):
        run(die_on, 2, 1)


@pytest.mark.slow
def test_hang_ends_in_time_and_says_who_and_where():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] had not finished(?s:.)*rank 1 of 3: (?s:.)*in sleep_on"):
        run(sleep_on, 3, [1, 2], 60, timeout=8)
    assert time.monotonic() - start < 30 * TIME_FACTOR


@pytest.mark.slow
@pytest.mark.skipif(ON_GPUS, reason="NCCL's watchdog ends a process that waits in vain long after its time-out")
def test_waiting_in_vain_is_a_failure_of_the_collective():
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: (?s:.)*in reduce_without"):
        run(reduce_without, 2, 1, timeout=16)  # a quarter for the start of ranks, the server's included
