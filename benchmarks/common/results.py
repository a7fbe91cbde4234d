"""Results: what made them, the spread of their times, and how they are read and written."""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------------ what made them


def git_commit() -> str:
    """Return the commit of this repository, "unknown" without git."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return "unknown"


def versions(*packages: str, nccl: bool = False) -> dict[str, str]:
    """Return the versions that a result depends on.

    Args:
        packages: that count besides Python, torch and Triton; those that are not installed are left out.
        nccl: whether NCCL's counts.
    """
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if nccl:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in ("triton", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def device_name(cuda: bool) -> str:
    """Return the name of the CUDA device, or "CPU"."""
    if not cuda:
        return "CPU"
    import torch

    return torch.cuda.get_device_name()


def processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def recorded_command(module: str, words: Sequence[str], names: Mapping[str, str]) -> str:
    """Return a command as others would type it.

    Args:
        module: that is run.
        words: after it on the command line.
        names: what stands for words that are folders of this machine; once for several in a row.
    """
    told: list[str] = []
    for word in words:
        if word not in names or told[-1:] != [names[word]]:
            told.append(names.get(word, word))
    return shlex.join(["python", "-m", module, *told])


def describe_error(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


# -------------------------------------------------------------------------------------------------------------- spread


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, least and number of some times."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "q1": q1, "q3": q3, "least": min(values), "n": len(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile, least and number of some times."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"median": tenths[4], "p10": tenths[0], "p90": tenths[8], "least": min(values), "n": len(values)}


# --------------------------------------------------------------------------------------------------- reading, writing


def add_options(parser: argparse.ArgumentParser, name: str | None) -> None:
    """Add the options that every benchmark has: where its results go, and which commit they are of.

    Args:
        parser: to add to.
        name: of the results' files by default; None if the benchmark chooses it.
    """
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default=name, help="of the results' files, without ending")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_result(path: Path, result: Any, page: str) -> None:
    """Write everything that was measured to PATH.json, and the page to PATH.md.

    Args:
        path: without ending; its folder is made.
        result: what JSON takes.
        page: Markdown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Path(f"{path}.md").write_text(page, encoding="utf-8")


def made_by(command: str, commit: str, found: Mapping[str, str]) -> str:
    """Return a line with the command, the commit and the versions of a result."""
    return f"`{command}` at commit {commit}; {', '.join(f'{name} {version}' for name, version in found.items())}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table and an empty line."""
    print("\n".join(table(heads, rows)) + "\n", flush=True)


def middle(row: Mapping[str, Any], name: str) -> str:
    """Return the median of a time with three digits, or a dash."""
    if name not in row:
        return "-"
    median = row[name]["median"]
    return f"{median:.0f}" if median >= 99.5 else f"{median:.1f}" if median >= 9.95 else f"{median:.2f}"


def number(row: Mapping[str, Any], name: str) -> str:
    """Return a whole number with thousands separated, or a dash."""
    return f"{row[name]:,.0f}" if name in row else "-"


def in_cell(text: str) -> str:
    """Return a message that fits a table's cell and names no folder of the machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "FOLDER", text).replace("|", "/").replace("\n", " ")[:160]
