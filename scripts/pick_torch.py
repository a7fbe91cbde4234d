"""The choice of the PyTorch for `.venv`, by the machine.

The ordinary package brings gigabytes of CUDA libraries, which are no use on a laptop, and a machine that
already holds a PyTorch should not get a second one. `look` collects the facts, `decide` is a pure function of
them; setup.py, beside this file, then does what was decided. Only the standard library is used.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# A question to an index that may be unreachable must not take minutes; downloads keep pip's own patience.
ASK = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--timeout=10", "--retries=1")


class Pip(Protocol):
    """Runs pip with these arguments, and these environment variables on top."""

    def __call__(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Return pip's output and its exit status."""
        ...


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A PyTorch that pip's configuration offers from this machine."""

    version: str
    cuda: bool  # it depends on NVIDIA's libraries
    origin: str  # for the user: where it comes from
    options: tuple[str, ...]  # pip options that choose exactly this origin
    environment: Mapping[str, str]  # and pip's environment variables to go with them


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the choice of PyTorch depends on."""

    system: str  # platform.system(): "Linux", "Darwin", "Windows"
    nvidia_gpu: bool
    floor: str  # the oldest PyTorch that pyproject.toml allows for what is set up
    host_torch: str | None = None  # PyTorch of the Python that runs this file, if it can be imported
    offers: tuple[Offer, ...] = ()  # best first


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def at_least(version: str, floor: str) -> bool:
    """Return whether `version` satisfies `>= floor`; "2.11.0a0" does not reach "2.11"."""
    ours, least = (list(release(text)) for text in (version, floor))
    length = max(len(ours), len(least))
    ours += [0] * (length - len(ours))
    least += [0] * (length - len(least))
    is_pre = re.match(r"[\d.]+(a|b|rc|\.?dev)\d", version) is not None
    return ours > least or (ours == least and not is_pre)


def torch_floor(pyproject: Mapping[str, Any], extras: Sequence[str]) -> str:
    """Return the oldest PyTorch that `pyproject` allows with these extras: training needs a newer one."""
    project = pyproject["project"]
    optional = project.get("optional-dependencies", {})
    needs = [*project["dependencies"], *(need for extra in extras for need in optional.get(extra, ()))]
    floors = [match[1] for need in needs if (match := re.match(r"torch\s*>=\s*([\d.]+)", need))]
    if not floors:
        raise ValueError("pyproject.toml: no line 'torch>=...' in the dependencies")
    return max(floors, key=release)


def has_nvidia_gpu() -> bool:
    """Return whether an NVIDIA driver or card shows itself."""
    traces = ("/proc/driver/nvidia", "/dev/nvidia0", "/usr/lib/wsl/lib/nvidia-smi")
    return shutil.which("nvidia-smi") is not None or any(os.path.exists(trace) for trace in traces)


def installed_torch(python: str | Path) -> str | None:
    """Return the version of PyTorch that `python` can really import, None if it cannot."""
    finds = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    imports = "import importlib.metadata as m, torch; print('torch', m.version('torch'))"
    if subprocess.run([python, "-P", "-c", finds], capture_output=True).returncode:
        return None  # a quick no; the import below takes seconds
    answer = subprocess.run([python, "-P", "-c", imports], capture_output=True, text=True)
    match = re.search(r"^torch (\S+)$", answer.stdout, re.MULTILINE)
    return match[1] if answer.returncode == 0 and match else None


def local_indexes(config: str) -> list[str]:
    """Return the package indexes that lie on this machine's disk, from the output of `pip config list`."""
    indexes = []
    for line in config.splitlines():
        key, _, setting = line.partition("=")
        if key.endswith(("index-url", "index_url")):
            urls = setting.strip("'\"").replace("\\n", " ").split()
            indexes += [url for url in urls if url.startswith("file:")]
    return list(dict.fromkeys(indexes))


def only_from(index: str, others: Sequence[str], empty: str) -> dict[str, str]:
    """Return the environment in which pip asks `index` and `others` alone.

    pip adds `--extra-index-url` and `--find-links` to those of its configuration files; variables replace
    them, and leave the rest of the configuration (proxy, certificates) in force. An empty one is ignored, so
    a folder that holds nothing stands for "none".
    """
    return {"PIP_EXTRA_INDEX_URL": " ".join(others) or index, "PIP_FIND_LINKS": empty, "PIP_NO_INDEX": "0"}


def ask_pip(
    pip: Pip, floor: str, origin: str, options: tuple[str, ...], environment: Mapping[str, str]
) -> Offer | None:
    """Return the PyTorch that pip would choose with these options, None if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        arguments = ("install", *ASK, *options, f"--report={report}", f"torch>={floor}")
        answer = pip(*arguments, environment=environment)
        if answer.returncode or not report.exists():
            return None
        chosen = json.loads(report.read_text("utf-8"))["install"]
    for package in (entry["metadata"] for entry in chosen):
        if package["name"] == "torch":
            needs = package.get("requires_dist", [])
            cuda = any(need.startswith(("nvidia-", "cuda-")) for need in needs)
            version = package["version"]
            return Offer(version=version, cuda=cuda, origin=origin, options=options, environment=environment)
    return None


def find_offers(pip: Pip, floor: str, empty: str) -> Iterator[Offer]:
    """Yield the sources in pip's configuration that need no network: find-links, then indexes on disk."""
    if offer := ask_pip(pip, floor, "pip's find-links", ("--no-index", "--no-deps"), {}):
        yield offer
    indexes = local_indexes(pip("config", "list").stdout)
    if indexes:
        options = (f"--index-url={indexes[0]}", "--no-deps")
        environment = only_from(indexes[0], indexes[1:], empty)
        if offer := ask_pip(pip, floor, "a package index on this disk", options, environment):
            yield offer


def look(pip: Pip, floor: str, empty: str) -> Facts:
    """Return the facts of this machine, as the running Python and `pip` see them; `empty` is an empty folder."""
    host = installed_torch(sys.executable)
    use_host = host is not None and at_least(host, floor)
    return Facts(
        system=platform.system(),
        nvidia_gpu=has_nvidia_gpu(),
        floor=floor,
        host_torch=host,
        offers=() if use_host else tuple(find_offers(pip, floor, empty)),
    )


# What may be tried, and in which order.

Source = Literal["host", "offer", "cpu-index", "index"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One way to get PyTorch."""

    source: Source
    offer: Offer | None = None
    warning: str = ""


NO_CPU_WHEELS = (
    f"Note: {CPU_INDEX} cannot be reached. The ordinary PyTorch works too, but brings several\n"
    "gigabytes of CUDA libraries that this machine has no GPU for."
)
NO_GPU_BUILD = "Note: this PyTorch is built without CUDA and will not use the GPU."


def decide(facts: Facts) -> tuple[Step, ...]:
    """Return the ways to get PyTorch, to be tried in order; the first that works is taken.

    1. The PyTorch of the Python that runs this file is used where it stands.
    2. What pip's configuration offers from this machine's disk, if it suits the hardware.
    3. On Linux without an NVIDIA GPU, PyTorch's own index of CPU wheels.
    4. What pip takes by itself. On a machine without a GPU this comes last, with a warning about its size.
    """
    if facts.host_torch is not None and at_least(facts.host_torch, facts.floor):
        return (Step(source="host"),)

    if facts.system != "Linux":
        # The wheels for macOS and Windows have no CUDA inside.
        return (*(Step(source="offer", offer=offer) for offer in facts.offers), Step(source="index"))

    if facts.nvidia_gpu:
        with_cuda = tuple(Step(source="offer", offer=offer) for offer in facts.offers if offer.cuda)
        without = (offer for offer in facts.offers if not offer.cuda)
        last = tuple(Step(source="offer", offer=offer, warning=NO_GPU_BUILD) for offer in without)
        return (*with_cuda, Step(source="index"), *last)

    small = tuple(Step(source="offer", offer=offer) for offer in facts.offers if not offer.cuda)
    with_cuda = tuple(Step(source="offer", offer=offer, warning=NO_CPU_WHEELS) for offer in facts.offers if offer.cuda)
    return (*small, Step(source="cpu-index"), *with_cuda, Step(source="index", warning=NO_CPU_WHEELS))
