"""The harness itself: results by rank, every kind of failure, and no process left behind."""

import contextlib
import importlib.util
import os
import runpy
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, TIME_FACTOR, run, skip_without_gpus

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


def not_picklable(rank, world_size):
    return lambda: None


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


def test_exceptions_other_than_assertions_are_runtime_errors():
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: (?s:.)*ZeroDivisionError"):
        run(fail_on, 2, [0, 1], ZeroDivisionError())


def test_ranks_that_did_not_meet_try_again_with_other_arguments():
    for message, attempts in (("Gloo connectFullMesh failed with [...]", [0, 1]), ("another", [0])):
        made = []

        def make_args(made=made, message=message):
            made.append(len(made))
            return made[-1], message

        with contextlib.nullcontext() if len(attempts) > 1 else pytest.raises(RuntimeError, match="another"):
            assert harness.run_with(make_args, fail_to_meet, 1) == [1]
        assert made == attempts


def test_unpicklable_result_is_a_failure():
    with pytest.raises(RuntimeError, match=r"rank 0 of 1: (?s:.)*not_picklable"):
        run(not_picklable, 1)


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


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    skip_without_gpus(2)  # here: in the process below it would be an error
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import harness, test_harness
        if __name__ == "__main__":
            harness.run(test_harness.sleep_on, 2, [0, 1], 100, {str(tmp_path)!r}, timeout=100)
        """)
    )
    with started(script, tmp_path) as process:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        pids = [int(text) for text in wait_for(lambda: texts(files), 60 * TIME_FACTOR, process)]
    assert wait_for(lambda: not any(map(is_running, pids)), 20)


def test_a_process_that_dies_is_not_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import no_such_package\n")
    start = time.monotonic()
    with (
        started(script, tmp_path) as process,
        pytest.raises(AssertionError, match=r"(?s)ended with code 1: Traceback.*No module named 'no_such_package'"),
    ):
        wait_for(lambda: False, 60 * TIME_FACTOR, process)
    assert time.monotonic() - start < 30


def test_a_rank_that_cannot_import_the_function_says_so(tmp_path, monkeypatch):
    """A module that only this process knows."""
    (tmp_path / "only_here.py").write_text("def nothing(rank, world_size):\n    pass\n")
    spec = importlib.util.spec_from_file_location("only_here", tmp_path / "only_here.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "only_here", module)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank \d of 2: (?s:.)*No module named 'only_here'"):
        run(module.nothing, 2)
    assert time.monotonic() - start < 30 * TIME_FACTOR


def test_the_environment_says_where_ranks_are(monkeypatch):
    def found(device):
        monkeypatch.setenv("QUINTIC_TEST_DEVICE", device)
        monkeypatch.delenv("QUINTIC_TEST_RANKS_PER_GPU", raising=False)
        names = ("DEVICE", "ON_GPUS", "TIME_FACTOR", "_BACKEND")
        everything = runpy.run_path(harness.__file__)
        return [everything[name] for name in names]

    assert found("cpu") == ["cpu", False, 1.0, "gloo"]
    assert found("cuda") == ["cuda", True, 4.0, "cpu:gloo,cuda:nccl"]
    with pytest.raises(ValueError, match="QUINTIC_TEST_DEVICE='gpu': choose 'cpu' or 'cuda'"):
        found("gpu")


def test_too_few_gpus_skip_a_test_and_none_are_an_error(monkeypatch):
    monkeypatch.setattr(harness, "ON_GPUS", True)
    monkeypatch.setattr(harness, "RANKS_PER_GPU", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(pytest.skip.Exception, match="3 ranks need as many GPUs, and there are 2"):
        run(pid, 3)
    monkeypatch.setattr(harness, "RANKS_PER_GPU", 2)
    with pytest.raises(pytest.skip.Exception, match="5 ranks need a GPU for every 2, and there are 2"):
        run(pid, 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # A skip here would be no failure of this test.
    with pytest.raises((RuntimeError, pytest.skip.Exception), match="QUINTIC_TEST_DEVICE=cuda: PyTorch finds no GPU"):
        run(pid, 1)


@pytest.mark.parametrize(("count", "gpu", "host"), [(2, 1, None), (1, 0, "quintic-1")])
def test_a_rank_takes_its_gpu_before_the_group_and_waits_for_it_at_the_end(monkeypatch, tmp_path, count, gpu, host):
    calls = []
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that it is put back
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(harness, "ON_GPUS", True)
    monkeypatch.setattr(harness, "_BACKEND", "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: calls.append(("set_device", rank)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: calls.append((backend, options["rank"])))
    monkeypatch.setattr(harness.pickle, "loads", lambda job: (lambda *args: calls.append(args), ("base",)))
    harness._call(1, 2, str(tmp_path), 10.0, b"")
    assert calls == [("set_device", gpu), ("cpu:gloo,cuda:nccl", 1), (1, 2, "base"), "synchronize"]
    assert os.environ.get("NCCL_HOSTID") == host


def texts(files):
    found = [file.read_text() if file.exists() else "" for file in files]
    return found if all(found) else None


@contextlib.contextmanager
def started(script, folder):
    """A process that runs a script in a folder; killed at the end. What it writes to stderr is in the file `errors`."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with open(folder / "errors", "w", encoding="utf-8") as errors:
        process = subprocess.Popen([sys.executable, str(script)], cwd=folder, env=environment, stderr=errors)
    process.errors = folder / "errors"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition, seconds, process=None):
    """Wait until a condition holds; no longer than the process that should make it true lives."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"waited {seconds} s in vain"
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended with code {process.returncode}: {process.errors.read_text()}")
        time.sleep(0.02)
    return value
