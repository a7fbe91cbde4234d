"""The file that keeps what `quintic.kernels.tune` found, one for each kind of device.

    {"format": 1, "made_with": {"device": ..., "capability": ..., ...}, "configurations": {"symmetric": {...}, ...}}

A file counts for the device and the versions that it was made with, and for the same source of the kernels, because
that is what its bits were compared for. Whoever reads it gets no error from it, but a warning where it does not count.
"""

import functools
import hashlib
import importlib
import json
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quintic.durable import write_atomically
from quintic.errors import ConfigError
from quintic.kernels.dispatch import cache_folder

__all__ = ["DeviceKey", "cache_file", "check_writable", "device_key", "read_configurations", "write_configurations"]

_FORMAT = 1

_Configurations = Mapping[str, Mapping[str, int]]
_Candidates = Mapping[str, Sequence[Mapping[str, int]]]


class DeviceKey(NamedTuple):
    """What a result holds for."""

    device: str
    capability: str
    torch: str
    triton: str
    kernels: str
    """Digest of the kernels' source."""


def device_key(device: torch.device) -> DeviceKey:
    """Return what results on a CUDA device hold for."""
    major, minor = torch.cuda.get_device_capability(device)
    triton: str = importlib.import_module("triton").__version__
    return DeviceKey(
        torch.cuda.get_device_name(device), f"{major}.{minor}", str(torch.__version__), triton, _source_digest()
    )


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_file(key: DeviceKey) -> Path | None:
    """Return the file for a kind of device, which may not exist; None where no folder is known for it."""
    folder = cache_folder()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{key.device} sm{key.capability}".lower()).strip("-")
    return None if folder is None else folder / f"kernels-{slug}.json"


def read_configurations(key: DeviceKey, candidates: _Candidates) -> dict[str, dict[str, int]]:
    """Return the configurations found for a kind of device, by kernel; none, with a warning, of a file to be ignored.

    Args:
        key: of the device.
        candidates: the configurations that each kernel may have.
    """
    path = cache_file(key)
    if path is None:
        return {}
    try:
        return _read(path, key, candidates)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
    warnings.warn(
        f"{path}: {reason}. It is ignored, and kernels run as shipped: delete it, or run quintic.kernels.tune() again",
        stacklevel=2,
    )
    return {}


def write_configurations(key: DeviceKey, configurations: _Configurations, candidates: _Candidates) -> Path:
    """Write configurations beside those of other kernels that the file has, all at once; return its path.

    Of two that write at the same time the last one wins.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = check_writable(key)
    try:
        others = _read(path, key, candidates)
    except (OSError, ValueError, RecursionError):
        others = {}
    content = {"format": _FORMAT, "made_with": key._asdict(), "configurations": {**others, **configurations}}
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise _not_writable(path, error) from None
    return path


def check_writable(key: DeviceKey) -> Path:
    """Return the file for a kind of device, whose folder exists then.

    Raises:
        ConfigError: it cannot be written.
    """
    path = cache_file(key)
    if path is None:
        raise ConfigError("there is no home folder for the results: name a folder in QUINTIC_CACHE")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise _not_writable(path, error) from None


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): name another folder in QUINTIC_CACHE")


def _read(path: Path, key: DeviceKey, candidates: _Candidates) -> dict[str, dict[str, int]]:
    """Return the configurations of a file; ValueError says why it does not count."""
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError("not readable as JSON") from None
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError("not a file of kernel configurations")
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']!r}, and not {_FORMAT}")
    made_with, configurations = content.get("made_with"), content.get("configurations")
    if not isinstance(made_with, dict) or not isinstance(configurations, dict):
        raise ValueError("parts of it are missing")
    for name, value in key._asdict().items():
        if made_with.get(name) != value:
            raise ValueError(f"made with {name} {made_with.get(name)!r}, and not {value!r}")
    for name, configuration in configurations.items():
        if configuration not in candidates.get(name, ()):
            raise ValueError(f"{name}: {configuration} is no configuration that a search would have written")
    return configurations
