"""Launch configurations of Triton kernels: those shipped, what a search may try instead, and which one is in use.

A launch asks for its own, `SYMMETRIC.on(device)`: what an earlier `quintic.kernels.tune` found for this kind of device
(`configuration_cache.py`), else the shipped one. No search starts by itself.

A configuration decides how long a kernel takes and no bit of its result; that all layouts of an optimizer give the same
weights rests on it. What would change bits is a constant of its kernel: tiles that are mirrored (symmetric.py), sums by
blocks (normalize.py). `tuning.py` compares the bits of every candidate before it takes one.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from quintic.kernels.configuration_cache import DeviceKey, device_key, read_configurations

__all__ = [
    "ADAMW",
    "MOMENTUM",
    "RELU2_LARGE",
    "RELU2_POINTERS",
    "RELU2_SMALL",
    "SYMMETRIC",
    "TUNABLES",
    "WEIGHTS",
    "Configuration",
    "PassConfiguration",
    "Relu2Configuration",
    "SymmetricConfiguration",
    "Tunable",
    "candidates_by_name",
    "forget_tuned",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Launch parameters of a kernel."""

    num_warps: int

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True, kw_only=True, slots=True)
class PassConfiguration(Configuration):
    """Of a pass over memory."""

    block: int
    """Entries per program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricConfiguration(Configuration):
    """Of `symmetric.py`."""

    num_stages: int
    block_k: int
    """Terms of a sum that are loaded together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu2Configuration(Configuration):
    """Of the product in `relu2.py`."""

    num_stages: int
    block_m: int
    block_n: int
    inner_bytes: int
    """Bytes of a row that are loaded together."""
    group: int
    """Tiles that programs go down before they go right."""


C = TypeVar("C", bound=Configuration)


class Tunable(Generic[C]):
    """The configurations of one kernel.

    Args:
        name: for users and for the cache.
        shipped: what runs where nothing else is known.
        candidates: what a search may take instead, the most promising first, as changes to `shipped`.
        architectures: compute capability -> changes to `shipped` that are shipped for it.
    """

    def __init__(
        self,
        name: str,
        shipped: C,
        candidates: Sequence[Mapping[str, int]],
        architectures: Mapping[tuple[int, int], Mapping[str, int]] | None = None,
    ) -> None:
        self.name = name
        self._shipped = shipped
        self._architectures = {
            capability: replace(shipped, **changes) for capability, changes in (architectures or {}).items()
        }
        tried = (replace(shipped, **changes) for changes in candidates)
        self.known: tuple[C, ...] = tuple(dict.fromkeys((shipped, *self._architectures.values(), *tried)))
        self._in_use: dict[torch.device, C] = {}

    def on(self, device: torch.device) -> C:
        """Return the configuration for launches on a device: a look into a table after the first call."""
        found = self._in_use.get(device)
        if found is None:
            found = self._in_use[device] = self._tuned(device) or self.shipped(device)
        return found

    def shipped(self, device: torch.device) -> C:
        """Return what runs on a device that was not tuned."""
        if device.type != "cuda" or not self._architectures:
            return self._shipped
        return self._architectures.get(torch.cuda.get_device_capability(device), self._shipped)

    def is_tuned(self, device: torch.device) -> bool:
        """Return whether another configuration than the shipped one is in use."""
        return self.on(device) != self.shipped(device)

    def candidates(self, device: torch.device) -> list[C]:
        """Return all known configurations but the shipped one, what is in use first."""
        in_use, shipped = self.on(device), self.shipped(device)
        return sorted((known for known in self.known if known != shipped), key=lambda known: known != in_use)

    @contextlib.contextmanager
    def using(self, configuration: C, device: torch.device) -> Iterator[None]:
        """Launch with a configuration on a device, in all threads, until the block ends."""
        before = self.on(device)
        self._in_use[device] = configuration
        try:
            yield
        finally:
            self._in_use[device] = before

    def forget(self) -> None:
        """Look for a tuned configuration again at the next launch."""
        self._in_use.clear()

    def _tuned(self, device: torch.device) -> C | None:
        if device.type != "cuda":
            return None
        stored = _tuned_configurations(device_key(device)).get(self.name)
        return next((known for known in self.known if asdict(known) == stored), None)


# Entries of a pass are computed each by itself: any division among programs gives the same bits.
_PASSES = [
    {"num_warps": 4},
    {"block": 1024, "num_warps": 4},
    {"block": 1024},
    {"block": 4096},
    {"block": 4096, "num_warps": 16},
]

# H200, 2026-11: 4.4 TB/s and more (docs/LOG.md).
MOMENTUM = Tunable("momentum", PassConfiguration(block=2048, num_warps=8), _PASSES)
WEIGHTS = Tunable("weights", PassConfiguration(block=2048, num_warps=8), _PASSES)

# Its block is in tables that are made before a launch.
ADAMW = Tunable("adamw", Configuration(num_warps=8), [{"num_warps": 4}, {"num_warps": 2}, {"num_warps": 16}])

# Candidates fit into the 227 KB of shared memory of a Hopper GPU, those of kernels for all GPUs mostly into the 99 KB
# that every one has since Ampere. A search passes over what does not fit.
SYMMETRIC = Tunable(
    "symmetric",
    # H200, 2026-11: within 5 % of the fastest of six settings for batches of 768 to 2048 (docs/LOG.md).
    SymmetricConfiguration(block_k=32, num_warps=8, num_stages=5),
    [
        {"block_k": 64, "num_stages": 3},
        {"num_warps": 4, "num_stages": 4},
        {"num_stages": 4},
        {"block_k": 64, "num_stages": 4},
        {"num_warps": 4, "num_stages": 3},
        {"num_stages": 3},
        {"block_k": 64, "num_warps": 4, "num_stages": 3},
        {"block_k": 64, "num_stages": 2},
    ],
)

RELU2_LARGE = Tunable(
    "relu2_large",
    Relu2Configuration(block_m=128, block_n=256, inner_bytes=128, group=8, num_warps=8, num_stages=3),
    [
        {"inner_bytes": 64, "num_stages": 6},
        {"group": 16},
        {"group": 4},
        {"inner_bytes": 64, "num_stages": 5},
    ],
)

RELU2_SMALL = Tunable(
    "relu2_small",
    Relu2Configuration(block_m=128, block_n=128, inner_bytes=128, group=8, num_warps=8, num_stages=3),
    [
        {"num_stages": 4},
        {"num_stages": 5},
        {"num_warps": 4, "num_stages": 4},
        {"group": 16},
        {"group": 4},
    ],
)

RELU2_POINTERS = Tunable(
    "relu2_pointers",
    # Without descriptors; within the shared memory that every GPU has.
    Relu2Configuration(block_m=128, block_n=128, inner_bytes=64, group=8, num_warps=8, num_stages=3),
    [
        {"num_stages": 4},
        {"num_warps": 4, "num_stages": 4},
        {"inner_bytes": 128},
        {"num_warps": 4},
        {"inner_bytes": 128, "num_stages": 2},
        {"num_stages": 2},
        {"group": 16},
        {"group": 4},
    ],
)

TUNABLES: dict[str, Tunable[Any]] = {
    tunable.name: tunable for tunable in (MOMENTUM, WEIGHTS, ADAMW, SYMMETRIC, RELU2_LARGE, RELU2_SMALL, RELU2_POINTERS)
}
"""All of them, in the order of a search: first what compiles fast."""


def candidates_by_name() -> dict[str, list[dict[str, int]]]:
    """Return every configuration that a cache may name, of every kernel."""
    return {name: [asdict(known) for known in tunable.known] for name, tunable in TUNABLES.items()}


@functools.cache
def _tuned_configurations(key: DeviceKey) -> dict[str, dict[str, int]]:
    return read_configurations(key, candidates_by_name())


def forget_tuned() -> None:
    """Read the cache again at the next launch."""
    _tuned_configurations.cache_clear()
    for tunable in TUNABLES.values():
        tunable.forget()
