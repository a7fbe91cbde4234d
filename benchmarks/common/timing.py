"""Times and memory of calls, on CUDA devices and CPUs."""

import time
import traceback
from collections.abc import Callable

MIB = 2**20


class Memory:
    """Device memory over what is allocated when this is made; all zeros on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.base = 0
        if cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes allocated since the last call, and start anew."""
        if not self.cuda:
            return 0
        import torch

        peak = torch.cuda.max_memory_allocated() - self.base
        torch.cuda.reset_peak_memory_stats()
        return peak


def synchronize(cuda: bool) -> None:
    """Wait for the device."""
    if cuda:
        import torch

        torch.cuda.synchronize()


def time_steps(
    step: Callable[[], None], before: Callable[[int], None], number: int, cuda: bool
) -> tuple[list[float], list[float]]:
    """Return milliseconds on the device (CPU: wall clock) and on the host of steps that start on an idle device."""
    import torch

    step_ms, host_ms = [], []
    for index in range(number):
        before(index)
        synchronize(cuda)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else None
        if events:
            events[0].record()
        start = time.perf_counter()
        step()
        host_ms.append(1000 * (time.perf_counter() - start))
        if events:
            events[1].record()
            torch.cuda.synchronize()
            step_ms.append(events[0].elapsed_time(events[1]))
    return step_ms or list(host_ms), host_ms


def time_device(step: Callable[[], None], before: Callable[[int], None], number: int, host_ms: float) -> list[float]:
    """Return milliseconds of steps whose kernels wait in the queue: the device sleeps while the host calls `step`."""
    import torch

    # At no more than 2 GHz, so at least half as long again as the host needs.
    cycles = int((1.5 * host_ms + 1) * 2e6)
    times = []
    for index in range(number):
        before(index)
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def find_sync(step: Callable[[], None], before: Callable[[int], None]) -> str:
    """Return "none", or what PyTorch says of the first wait of the host for the device."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(2):
            before(index)
            step()
    except RuntimeError as error:
        traceback.print_exc()
        return str(error).strip().splitlines()[0][:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return "none"
