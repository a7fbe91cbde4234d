"""Calls a function on several processes that form a gloo group on this machine."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_on_ranks"]

# Collectives give up after this part of the time, so that a rank that waits in vain raises, and says where.
_GROUP_PART = 0.75

# Seconds for the other ranks to report after the first one has failed, and for a process to end.
_GRACE_TIME = 3.0

# Imported once, before processes are forked.
_SLOW_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")

_Checked = tuple[list[str], list[str]]


def run_on_ranks(function: Callable[..., _Checked], world_size: int, *args: Any, timeout: float) -> _Checked:
    """Call `function(rank, *args)` on new processes; return the checks of the first, and all findings.

    A rank that raises makes a finding of its traceback.

    Raises:
        RuntimeError: arguments cannot be sent to the processes, where these cannot be forked.
        TimeoutError: ranks were still running; they are ended.
    """
    has_cuda = torch.cuda.is_initialized()
    # A forked process has the rule, wherever it was defined, and all imports. CUDA does not survive a fork: there even
    # `Tensor.is_pinned`, which checkpoints call, raises an error.
    method = "fork" if sys.platform == "linux" and not has_cuda else "spawn"
    if method == "spawn":
        _check_pickles(function, args, has_cuda)
    else:
        for module in _SLOW_IMPORTS:
            import_module(module)
    context: Any = multiprocessing.get_context(method)
    deadline = time.monotonic() + timeout
    processes, connections = [], []
    with tempfile.TemporaryDirectory(prefix="quintic-testing-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                connections.append(ours)
                job = (rank, world_size, folder, timeout * _GROUP_PART, theirs, function, args)
                processes.append(context.Process(target=_rank_main, args=job, daemon=True))
                with warnings.catch_warnings():
                    # Threads of this process do not exist in the new one, which needs none of them.
                    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
                    processes[-1].start()
                theirs.close()
            answers = _answers(connections, deadline)
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(_GRACE_TIME)
                if process.is_alive():
                    process.kill()
                    process.join()
    if running := [rank for rank in range(world_size) if rank not in answers]:
        if any(found for _, found in answers.values()):
            return _together(answers)
        raise TimeoutError(f"ranks {running} had not finished after {timeout:g} s; a stage may wait for another rank")
    return _together(answers)


def _check_pickles(function: Callable[..., _Checked], args: tuple[Any, ...], has_cuda: bool) -> None:
    """Raise a RuntimeError if a process that is started anew could not read the function and its arguments."""
    try:
        sent = pickle.dumps((function, args))
        # A notebook or a prompt is a main module without a file.
        if b"__main__" in sent and not hasattr(sys.modules["__main__"], "__file__"):
            raise pickle.PicklingError("it is defined in a notebook or at a prompt")
    except Exception as error:
        reason = "this process has used CUDA" if has_cuda else "this system does not fork"
        otherwise = ", or check the rule before anything uses CUDA" if has_cuda else ""
        raise RuntimeError(
            f"{reason}, so others are started anew, and the rule cannot be sent to them ({error}); define its stages "
            f"as classes at the top level of a module that can be imported{otherwise}"
        ) from error


def _together(answers: dict[int, _Checked]) -> _Checked:
    findings = dict.fromkeys(line for _, found in answers.values() for line in found)
    return max((done for done, _ in answers.values()), key=len), list(findings)


def _answers(connections: list[Connection], deadline: float) -> dict[int, _Checked]:
    """Return the answers that have come until the deadline, or soon after a rank failed."""
    answers: dict[int, _Checked] = {}
    pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)
            # A process that was killed leaves an end, or a reset.
            answers[rank] = [], [f"rank {rank}: the process died"]
            with contextlib.suppress(EOFError, OSError):
                answers[rank] = pickle.loads(connections[rank].recv_bytes())
            if answers[rank][1]:
                deadline = min(deadline, time.monotonic() + _GRACE_TIME)
    return answers


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    connection: Connection,
    function: Callable[..., _Checked],
    args: tuple[Any, ...],
) -> None:
    """The work of a process: join the group, call the function, send its result, and wait until all have theirs."""
    # Threads that the parent computed with do not exist in a forked process.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # Tests may have made warnings of PyTorch errors.
    warnings.simplefilter("ignore")
    # The machine's own name need not lead anywhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        answer = function(rank, *args)
    except BaseException as error:
        answer = [], [f"rank {rank}: {''.join(traceback.format_exception(error))}"]
    connection.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # until the other end is closed
    # Without the parent's exit handlers, and without a farewell to ranks that may have failed.
    os._exit(0)
