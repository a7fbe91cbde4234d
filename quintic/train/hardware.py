"""The hardware of a run: choosing device, precision and attention, and measuring and describing the machine."""

import ctypes
import os
import platform
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quintic.errors import ConfigError
from quintic.kernels.attention.attention import AttentionName, choose_attention
from quintic.kernels.dispatch import cpu_multiplies_bfloat16
from quintic.kernels.graphs import CapturedPasses
from quintic.kernels.linear.fp8_quantize import obstacle_to_fp8
from quintic.limits import in_options
from quintic.model.fp8 import Fp8Recipe
from quintic.train.config import RunConfig

__all__ = [
    "Hardware",
    "Stopwatch",
    "check_memory",
    "choose_hardware",
    "compile_seconds",
    "machine_facts",
    "matrix_rate",
    "multiplies_fp8",
    "peak_memory_bytes",
]

# Size of the square matrices whose product measures the matrix rate: large enough for full speed, quick to multiply.
_PRODUCT_SIDES = {"cuda": 8192, "cpu": 1024}
_PRODUCT_SECONDS = 0.1

# The compute capabilities from which tensor cores multiply 8-bit floats, with a scale per tensor or per row.
_FP8_CAPABILITY: dict[Fp8Recipe, tuple[int, int]] = {"auto": (8, 9), "tensorwise": (8, 9), "rowwise": (9, 0)}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device, precision and implementations of a run."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of the activations; weights are float32."""
    attention: AttentionName
    compile: bool
    fp8: Fp8Recipe | None = None
    """Scaling of the 8-bit products of linear layers in training; None to multiply in `dtype`."""
    without_fp8: str = ""
    """The reason why `--fp8` has no effect; "" if it has one or was not given."""

    def __str__(self) -> str:
        """Describe the hardware in one line for the user."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else _cpu_name()
        count = torch.get_num_threads()
        threads = f", {count} {'thread' if count == 1 else 'threads'}" if self.device.type == "cpu" else ""
        compiled = ", compiled" if self.compile else ""
        dtype = str(self.dtype).removeprefix("torch.")
        fp8 = f" with 8-bit products ({self.fp8})" if self.fp8 else ""
        fp8 = f" (--fp8 has no effect: {self.without_fp8})" if self.without_fp8 else fp8
        return f"{name}{threads}, {dtype}{fp8}{compiled}, attention by {self.attention}"

    def options(self) -> dict[str, Any]:
        """Return these choices as options of `quintic train`, `auto` resolved."""
        return {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "compile": self.compile,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
        }


def choose_hardware(run: RunConfig, *, local_ranks: int = 1) -> Hardware:
    """Return the hardware that the options ask for, with `auto` resolved, for each of the ranks on this host.

    Also sets the number of threads, and on a CPU lets this process keep freed memory for reuse.

    Raises:
        ConfigError: this machine lacks the requested device or attention or has fewer GPUs than ranks, or the options
            exclude each other.
    """
    has_gpu = torch.cuda.is_available()
    if run.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    device = torch.device("cuda" if run.device != "cpu" and has_gpu else "cpu")
    if device.type == "cuda" and local_ranks > torch.cuda.device_count():
        here = f"{torch.cuda.device_count()} {'GPU' if torch.cuda.device_count() == 1 else 'GPUs'}"
        raise ConfigError(
            f"--nproc-per-node {local_ranks}: this host has {here}, and each process needs one; start fewer, or use "
            "--device cpu"
        )
    # Precision: bfloat16 only if the device multiplies it fast.
    narrow = run.dtype == "bfloat16"
    if run.dtype == "auto":
        narrow = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bfloat16()
    dtype = torch.bfloat16 if narrow else torch.float32
    try:
        attention = choose_attention(run.attention, device=device, dtype=dtype)
    except ValueError as error:
        raise ConfigError(in_options(error)) from None
    # Side effects on this process.
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    if device.type == "cpu":
        _keep_freed_memory()
    # Compiling pays on GPUs; on a CPU it takes longer than it saves in short runs.
    compiled = device.type == "cuda" if run.compile is None else run.compile
    # 8 bits: an option that the GPU cannot honour has no effect, so that a configuration works on any machine.
    if run.fp8 and run.parallel == "tp":
        raise ConfigError("--fp8 does not work with --parallel tp: leave --fp8 out, or choose another --parallel")
    fp8 = run.fp8_recipe if run.fp8 and multiplies_fp8(device, run.fp8_recipe) else None
    needed = ".".join(map(str, _FP8_CAPABILITY[run.fp8_recipe]))
    obstacle = f"it needs a GPU of compute capability {needed}" if run.fp8 and fp8 is None else ""
    return Hardware(device=device, dtype=dtype, attention=attention, compile=compiled, fp8=fp8, without_fp8=obstacle)


def multiplies_fp8(device: torch.device, recipe: Fp8Recipe = "auto") -> bool:
    """Return whether a device multiplies 8-bit floats with the scales of `recipe`."""
    if obstacle_to_fp8(device) is not None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY[recipe]


class Stopwatch:
    """Measures time between marks in a device's work without stopping it: on a GPU, by events in the stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []  # events on a GPU, else times in seconds

    def mark(self) -> None:
        """Mark the moment at which the device finishes all work launched so far."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive marks, after waiting for the device to reach the last one."""
        if not self._on_gpu:
            return [end - start for start, end in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._marks)]


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    """Return device, processor, cores and memory for the log."""
    on_gpu, memory = hardware.device.type == "cuda", _host_memory_bytes()
    return {
        "device": torch.cuda.get_device_name(hardware.device) if on_gpu else "CPU",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": None if memory is None else round(memory / 2**30, 1),
        "dtype": str(hardware.dtype).removeprefix("torch."),
        "fp8": hardware.fp8,
        "attention": hardware.attention,
        "compiled": hardware.compile,
        "system": platform.system(),
    }


def matrix_rate(hardware: Hardware) -> float:
    """Measure the floating-point operations per second of a large square product in the run's precision.

    Takes about a tenth of a second. On a CUDA device the result depends on the clocks at this moment.
    """
    device = hardware.device
    side = _PRODUCT_SIDES[device.type]
    # Random entries, because products of constants need less power and run faster. A separate generator leaves the
    # global one as it is.
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(side, side, generator=generator).to(device, hardware.dtype)
    seconds: list[float] = []
    # At least 3 products, then until the time is up, at most 50.
    torch.mm(matrix, matrix)  # warm-up: chooses and loads the kernel
    began = time.perf_counter()
    while len(seconds) < 3 or (time.perf_counter() - began < _PRODUCT_SECONDS and len(seconds) < 50):
        stopwatch = Stopwatch(device)
        stopwatch.mark()
        torch.mm(matrix, matrix)
        stopwatch.mark()
        seconds += stopwatch.seconds()
    return float(2 * side**3 / min(seconds))  # the minimum, because other processes only make a product slower


def compile_seconds() -> float:
    """Return the seconds that torch.compile has spent in this process so far."""
    from torch._dynamo.utils import cumulative_time_spent_ns  # no public API tells this

    names = ("entire_frame_compile", "entire_backward_compile")
    return sum(cumulative_time_spent_ns.get(name, 0) for name in names) / 1e9


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system; other C libraries are left alone.

    The system would clear every returned page again for the next layer's tensors, which took 11 % of a step of the
    default run on two cores.
    """
    if platform.libc_ver()[0] == "glibc":
        c_library = ctypes.CDLL(None)
        c_library.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: the heap serves allocations of up to 32 MiB, the maximum
        c_library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap never shrinks


def peak_memory_bytes(device: torch.device, passes: CapturedPasses | None = None) -> int | None:
    """Return the peak memory so far: of tensors on a CUDA device, of the process on a CPU; None if unknown.

    With captured passes: since the last capture.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + (0 if passes is None else passes.idle_bytes)
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    # In bytes on macOS, in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def check_memory(needed: int, device: torch.device) -> None:
    """Check that the bytes that a model needs fit a device, before the system kills processes.

    Args:
        needed: bytes of the weights; for training, of the gradients as well.
        device: the device that will hold them.

    Raises:
        ConfigError: the CUDA device, or this machine, has less memory.
    """
    on_gpu = device.type == "cuda"
    available = torch.cuda.get_device_properties(device).total_memory if on_gpu else _host_memory_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"the model takes {needed / 2**30:.3g} GiB of memory or more, but there are only "
            f"{available / 2**30:.3g} GiB ({device.type}); use a larger machine, or train a model with a lower --depth "
            "(quintic plan shows the memory of a run)"
        )


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system, or one without these values
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
