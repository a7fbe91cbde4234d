"""What the run computes on: device, precision, attention, and the facts of the machine for the record."""

import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quintic.errors import ConfigError
from quintic.kernels.attention.attention import AttentionName, choose_attention
from quintic.kernels.dispatch import cpu_multiplies_bfloat16
from quintic.train.config import RunConfig

__all__ = ["Hardware", "choose_hardware", "machine_facts", "package_versions"]

# The system kills a process that asks for more threads than it may have. A run that goes on with its own number of
# threads on a smaller machine is only slow.
_THREADS_PER_CPU = 4
_FEWEST_THREADS_BOUND = 64


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where and how a run computes."""

    device: torch.device
    dtype: torch.dtype
    """Of the activations; weights are float32."""
    attention: AttentionName
    compile: bool

    def __str__(self) -> str:
        """Return one line for people."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else _cpu_name()
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        compiled = ", compiled" if self.compile else ""
        return f"{name}{threads}, {str(self.dtype).removeprefix('torch.')}{compiled}, attention by {self.attention}"


def choose_hardware(run: RunConfig) -> Hardware:
    """Return what the options ask for, `auto` resolved.

    Raises:
        ConfigError: the machine does not have what was asked for.
    """
    cpus = os.cpu_count() or 1
    most_threads = max(_FEWEST_THREADS_BOUND, _THREADS_PER_CPU * cpus)
    if run.threads is not None and run.threads > most_threads:
        raise ConfigError(
            f"--threads {run.threads}: must be at most {most_threads} on this machine, whose {cpus} processors gain "
            "nothing from more"
        )
    has_gpu = torch.cuda.is_available()
    if run.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    device = torch.device("cuda" if run.device != "cpu" and has_gpu else "cpu")
    if run.dtype == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_multiplies_bfloat16()
        dtype = torch.bfloat16 if fast else torch.float32
    else:
        dtype = torch.bfloat16 if run.dtype == "bfloat16" else torch.float32
    try:
        attention = choose_attention(run.attention, device=device, dtype=dtype)
    except ValueError as error:
        # The library speaks of its argument, the user of the option.
        raise ConfigError(re.sub(r"attention='(\w+)'", r"--attention \1", str(error))) from None
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    compiled = device.type == "cuda" if run.compile is None else run.compile
    return Hardware(device=device, dtype=dtype, attention=attention, compile=compiled)


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    """Return device, processor, cores and memory, for the log."""
    on_gpu = hardware.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(hardware.device) if on_gpu else "CPU",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "dtype": str(hardware.dtype).removeprefix("torch."),
        "attention": hardware.attention,
        "compiled": hardware.compile,
        "system": platform.system(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for a result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("quintic", "triton", "numpy", "tokenizers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None  # not a POSIX system
