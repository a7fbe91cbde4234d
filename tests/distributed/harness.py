"""Run a function on several processes that form a group, and get every rank's result or traceback.

    def squares(rank, world_size, base):        # at module level, so that a process can import it
        value = torch.tensor([base + rank], device=DEVICE)
        dist.all_reduce(value)
        return int(value)

    assert run(squares, 4, 10) == [46] * 4

Every call has processes of its own, so no test inherits anything from another one. That is cheap where they are forked
from a server that has imported PyTorch already (Linux: tenths of a second); elsewhere each of them imports it anew.
A hang is a failure: when the time is over, or soon after a rank failed, all processes are killed, and they end by
themselves when the process that called `run` is gone.

Ranks are on the CPU and talk through gloo. With QUINTIC_TEST_DEVICE=cuda in the environment rank r is on GPU r, tensors
there go through NCCL, and a test that needs more GPUs than there are is skipped. Tests make tensors and meshes on
`DEVICE`, which then is the rank's own GPU.

QUINTIC_TEST_RANKS_PER_GPU=4 lets ranks share GPUs, up to so many: layouts of eight ranks on two GPUs. NCCL, which wants
a GPU for each rank of a host, is told that they are on several hosts, and sends through sockets between these.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from quintic import _MODULES

__all__ = ["DEVICE", "ON_GPUS", "RANKS_PER_GPU", "TIME_FACTOR", "run"]

Result = TypeVar("Result")

DEVICE = os.environ.get("QUINTIC_TEST_DEVICE", "cpu")
"""Type of the device that a rank's tensors and meshes are on: `"cpu"` or `"cuda"`."""

if DEVICE not in ("cpu", "cuda"):
    raise ValueError(f"QUINTIC_TEST_DEVICE={DEVICE!r}: choose 'cpu' or 'cuda'")

ON_GPUS = DEVICE == "cuda"

RANKS_PER_GPU = int(os.environ.get("QUINTIC_TEST_RANKS_PER_GPU", "1"))
"""Ranks that may share a GPU where there are not enough."""

TIME_FACTOR = (4.0 if RANKS_PER_GPU == 1 else 8.0) if ON_GPUS else 1.0
"""Factor on all time limits: on GPUs first steps compile kernels, and every process starts CUDA and NCCL."""

_BACKEND = "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"

# What the server imports before it forks: everything that is slow, and what PyTorch imports at the first use.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "pytest",
    # `import quintic` imports none of these before they are used, which each rank would do by itself.
    *sorted({f"quintic.{module}" for module in _MODULES.values()}),
    # The runs of tests/train.
    "quintic.train.loop",
)

# Collectives give up after this part of the time, so that a rank that waits in vain can still say where. On GPUs NCCL's
# watchdog ends the process, which takes it some seconds.
_GROUP_PART = 0.5 if ON_GPUS else 0.75

# Seconds for the stacks to be written once the time is over, and for other ranks to fail after the first one did.
_STACKS_TIME = 0.5
_GRACE_TIME = 2.0

# Seconds for a process to leave its group and end once all results are there.
_EXIT_TIME = 10.0


class _Failure(NamedTuple):
    """The message of a rank that raised, or the one made up for a rank that sends nothing."""

    text: str
    is_assertion: bool = False


def run(function: Callable[..., Result], world_size: int, *args: Any, timeout: float = 60.0) -> list[Result]:
    """Call `function(rank, world_size, *args)` on `world_size` new processes and return the results by rank.

    Each process is a member of the default group and computes with one thread. It stays in the group until all
    have returned, so none has to wait for the others at its end. Warnings that `quintic` causes are errors. On GPUs all
    work of the device is over when a function has returned.

    Args:
        function: at module level of an importable module; what it returns can be pickled (tensors are copied, and come
            back on the CPU).
        world_size: number of processes, >= 1.
        args: can be pickled; tensors should be on the CPU.
        timeout: seconds for everything on CPUs, the start of the processes included, `TIME_FACTOR` times that
            elsewhere; collectives give up somewhat earlier.

    Raises:
        pytest.skip.Exception: there are fewer GPUs than ranks; nothing was started.
        AssertionError: the first exception was one; the message holds all tracebacks in the order of arrival, and
            those of ranks that lost their peer come later.
        RuntimeError: the same for other exceptions, and for processes that died.
        TimeoutError: ranks were still running; the message names them and shows where they were.
    """
    return run_with(lambda: args, function, world_size, timeout=timeout)


def run_with(
    make_args: Callable[[], tuple[Any, ...]],
    function: Callable[..., Result],
    world_size: int,
    timeout: float = 60.0,
) -> list[Result]:
    """Do what `run` does, with arguments made for each attempt: a store has the addresses of an earlier one."""
    skip_without_gpus(world_size)
    try:
        return _run_once(function, world_size, make_args(), timeout * TIME_FACTOR)
    except RuntimeError as error:
        # On a busy machine gloo's ranks now and then do not meet, though nobody died.
        if "Gloo connectFullMesh failed" not in str(error):
            raise
    return _run_once(function, world_size, make_args(), timeout * TIME_FACTOR)


def _run_once(function: Callable[..., Result], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Result]:
    deadline = time.monotonic() + timeout
    context = _context()
    job = pickle.dumps((function, args))
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="quintic-ranks-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                connections.append(ours)
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, folder, timeout * _GROUP_PART, deadline, theirs, job),
                    name=f"rank{rank}",
                    daemon=True,
                )
                process.start()
                processes.append(process)
                theirs.close()  # so that a rank's death is the end of the connection
            answers = _answers(connections, deadline)
            return _results(answers, processes, Path(folder))
        finally:
            # A rank that has answered leaves when its connection is closed. One that has not is killed.
            for connection in connections:
                connection.close()
            _end(processes)


def skip_without_gpus(world_size: int) -> None:
    """Skip the test where there are fewer GPUs than its ranks need."""
    if not ON_GPUS:
        return
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("QUINTIC_TEST_DEVICE=cuda: PyTorch finds no GPU; unset it to run on the CPU")
    if world_size > count * RANKS_PER_GPU:
        text = "as many GPUs" if RANKS_PER_GPU == 1 else f"a GPU for every {RANKS_PER_GPU}"
        pytest.skip(f"{world_size} ranks need {text}, and there are {count}")


def _context() -> ForkServerContext | SpawnContext:
    # Processes that are forked after CUDA has started cannot use it: imports that ask for GPUs must not start it.
    if ON_GPUS:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # On other systems a process that has loaded the system's frameworks must not fork.
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _answers(connections: Sequence[Connection], deadline: float) -> dict[int, bytes | _Failure | None]:
    """Return the ranks' messages in the order of arrival; None for a rank that died, nothing for one that still runs.

    Returns when all ranks have answered, when the time is over, or shortly after the first failure.
    """
    pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    answers: dict[int, bytes | _Failure | None] = {}
    limit = deadline + _STACKS_TIME
    while pending:
        ready = wait(list(pending), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            answers[rank] = None
            # A process that was killed leaves an end, or a reset, or a part of a message.
            with contextlib.suppress(EOFError, OSError):
                answers[rank] = pickle.loads(connections[rank].recv_bytes())
            if not isinstance(answers[rank], bytes):
                limit = min(limit, time.monotonic() + _GRACE_TIME)
    return answers


def _results(answers: dict[int, bytes | _Failure | None], processes: Sequence[BaseProcess], folder: Path) -> list[Any]:
    """Return the results by rank, or raise what `run` says."""
    reports, kinds = [], []
    for rank, answer in answers.items():
        if answer is None:
            processes[rank].join(_EXIT_TIME)
            code, stack = processes[rank].exitcode, _stack(folder, rank)
            answer = _Failure(f"the process died with exit code {code} and sent nothing\n{stack}")
        if isinstance(answer, _Failure):
            kinds.append(AssertionError if answer.is_assertion else RuntimeError)
            reports.append(f"rank {rank} of {len(processes)}: {answer.text.strip()}")
    running = [rank for rank in range(len(processes)) if rank not in answers]
    if reports:
        if running:
            reports.append(f"ranks {running} had not finished and were killed")
        raise kinds[0]("\n\n".join(["", *reports]))
    if running:
        reports = [f"rank {rank} of {len(processes)}: {_stack(folder, rank)}" for rank in running]
        raise TimeoutError("\n\n".join([f"ranks {running} had not finished in time and were killed", *reports]))
    return [pickle.loads(answer) for _, answer in sorted(answers.items()) if isinstance(answer, bytes)]


def _stack(folder: Path, rank: int) -> str:
    """Return the stack of a rank when it died, or when the time was over."""
    path = folder / f"stack{rank}"
    return (path.read_text("utf-8", "replace").strip() if path.exists() else "") or "(no stack)"


def _end(processes: Sequence[BaseProcess]) -> None:
    """End all processes: those with an answer by themselves, the others by force."""
    until = time.monotonic() + _EXIT_TIME
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank_main(
    rank: int, world_size: int, folder: str, group_timeout: float, deadline: float, connection: Connection, job: bytes
) -> None:
    """A process's work: join the group, call the function, send its result or its traceback, wait for the end."""
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(connection, finished), daemon=True)
    watcher.start()
    with open(Path(folder) / f"stack{rank}", "w", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), file=stacks)
        try:
            result = _pickled(_call(rank, world_size, folder, group_timeout, job))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            connection.send_bytes(pickle.dumps(_Failure(text, isinstance(error, AssertionError))))
            sys.stdout.flush()
            # At once, without a farewell to the group: ranks that wait for this one then fail, and say where.
            os._exit(1)
        finished.set()
        connection.send_bytes(pickle.dumps(result))
        watcher.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    if ON_GPUS:
        # No farewell: it waits for NCCL, and forever if a captured graph still holds some of its work.
        sys.stdout.flush()
        os._exit(0)
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(rank: int, world_size: int, folder: str, group_timeout: float, job: bytes) -> Any:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"quintic\b")
    # Tests of ranks that lack gradients begin with some that all lack.
    warnings.filterwarnings("ignore", message="no parameter had a gradient in the first step")
    # The machine's own name need not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if ON_GPUS:
        count = torch.cuda.device_count()
        torch.cuda.set_device(rank % count)
        if world_size > count:
            torch.cuda.init()  # or meshes choose a GPU, and want as many ranks on each
            os.environ["NCCL_HOSTID"] = f"quintic-{rank // count}"
    dist.init_process_group(
        _BACKEND,
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    function, args = pickle.loads(job)
    result = function(rank, world_size, *args)
    if ON_GPUS:
        torch.cuda.synchronize()  # what failed on the device, or waits in vain there, is this rank's failure
    return result


def _pickled(result: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(result)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors of GPUs as tensors of the CPU: who unpickles them would use that rank's GPU."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter) and value.device.type == "cuda":
            return value.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _watch(connection: Connection, finished: threading.Event) -> None:
    """Wait until the other end is closed: all ranks are done, or nobody waits for this one any more."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    if not finished.is_set():
        os._exit(1)
