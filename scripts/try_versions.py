"""Run the optimizer's quick tests under other versions of PyTorch, and print a table of what came out.

    python3 scripts/try_versions.py 2.8 2.14.1            an environment for each, made for this and removed again
    python3 scripts/try_versions.py --keep 2.8            ... and kept, so that the next call need not download it
    python3 scripts/try_versions.py 2.8 -- -x -k clip     with options for pytest

An environment has PyTorch with what it brings, such as its Triton, and what the tests need, but no package of the
training harness; pip downloads up to 5 GB for one, from where its own configuration says. What pytest says is kept
beside the environments, in build/versions. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The optimizer's own, of `pytest -m "not slow"`.
TESTS = (
    "tests/optim",
    "tests/grouping",
    "tests/interchange",
    "tests/kernels",
    "tests/integrations",
    "tests/distributed",
)

# What they need, whatever version of each pyproject.toml asks for.
PACKAGES = ("hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist")

FACTS = """
import importlib.util, json, platform, torch
triton = __import__("triton").__version__ if importlib.util.find_spec("triton") else "none"
print(json.dumps({"torch": torch.__version__, "triton": triton, "python": platform.python_version()}))
"""

COLUMNS = ("PyTorch", "Triton", "Python", "passed", "failed", "skipped", "seconds")


class TrialError(Exception):
    """The tests could not be run; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row of the table."""

    torch: str
    triton: str
    python: str
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def row(self) -> str:
        """The row in Markdown."""
        cells = (self.torch, self.triton, self.python, self.passed, self.failed, self.skipped, round(self.seconds))
        return " | ".join(["", *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells), ""]).strip()


def say(line: str) -> None:
    """Print one line on standard error, at once: the table alone goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def requirements(version: str) -> list[str]:
    """Return what pip installs for a version of PyTorch: "2.8" is the newest 2.8.x."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise TrialError(f"{version}: give versions of PyTorch as 2.8 or 2.8.0")
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    needs = {re.split(r"[<>=~! ;\[]", need, maxsplit=1)[0]: need for need in (*optional["train"], *optional["dev"])}
    torch = f"torch=={version}.*" if version.count(".") == 1 else f"torch=={version}"
    return [torch, *(needs[name] for name in PACKAGES)]


def python_of(environment: Path) -> Path:
    """Return the Python of a virtual environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def prepare(environment: Path, version: str) -> None:
    """Make a virtual environment with a version of PyTorch, or see that the one that is there has it."""
    python = python_of(environment)
    if not python.exists():
        venv.create(environment, symlinks=os.name == "posix", with_pip=True)
    say(f"Installing PyTorch {version} into {environment} ...")
    command = [str(python), "-m", "pip", "install", "--no-compile", "--quiet", *requirements(version)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
        raise TrialError(f"PyTorch {version} could not be installed into {environment}: pip's words are above")


def run_tests(python: Path, log: Path, options: Sequence[str]) -> Outcome:
    """Run the optimizer's tests under a Python; what pytest says goes into `log`."""
    # Not the packages of the environment that this was started from; the checkout is used where it stands.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    facts = subprocess.run([python, "-c", FACTS], env=environment, capture_output=True, text=True)
    if facts.returncode:
        raise TrialError(f"{python} cannot import PyTorch:\n{facts.stderr.rstrip()}")
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", "--continue-on-collection-errors", f"--junitxml={report}", *options]
    if not any(Path(ROOT, option.partition("::")[0]).exists() for option in options):
        command += TESTS
    say(f"Testing; what pytest says: {log}")
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    seconds = time.monotonic() - begun
    if status.returncode not in (0, 1) or not report.is_file():  # 1: tests failed; others: pytest could not run them
        raise TrialError(f"pytest stopped with status {status.returncode}, see {log}")
    passed, failed, skipped = counts(report)
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            say(line)
    return Outcome(**json.loads(facts.stdout), passed=passed, failed=failed, skipped=skipped, seconds=seconds)


def counts(report: Path) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed (or could not be collected) and were skipped."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests under each version and print the table; return 1 if any failed."""
    parser = argparse.ArgumentParser(description="Run the optimizer's quick tests under other versions of PyTorch.")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of PyTorch: 2.8 for the newest 2.8.x, or 2.8.0")
    parser.add_argument("--keep", action="store_true", help="keep the environments for the next call")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "versions", help="of the environments (default: build/versions)"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    outcomes = []
    try:
        for version in options.versions:
            requirements(version)  # all are read before the first is downloaded
        options.folder.mkdir(parents=True, exist_ok=True)
        for version in options.versions:
            environment = options.folder.resolve() / f"torch-{version}"
            was_there = environment.exists()
            try:
                prepare(environment, version)
                log = environment.with_name(f"{environment.name}.log")
                outcomes.append(run_tests(python_of(environment), log, given[split + 1 :]))
            finally:
                if not (options.keep or was_there):
                    shutil.rmtree(environment, ignore_errors=True)
    except TrialError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("Stopped.")
        return 130
    finally:
        if outcomes:
            print(
                f"| {' | '.join(COLUMNS)} |",
                f"|{'---|' * len(COLUMNS)}",
                *(outcome.row for outcome in outcomes),
                sep="\n",
            )
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
