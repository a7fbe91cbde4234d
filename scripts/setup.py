"""Set up `.venv`, the virtual environment every `make` target runs in.

    python3 scripts/setup.py train          what `make train` needs
    python3 scripts/setup.py train dev      the same, with the tools of `make test` and `make lint`

Which PyTorch that is, pick_torch.py decides. What is here: making `.venv`, installing into it, and remembering
what was done. Only the standard library is used, because nothing else is installed yet.

A finished setup is remembered in `.venv`: the next call installs nothing. A changed `pyproject.toml` is
applied to the `.venv` that is there; a setup that was stopped half way is started afresh.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pick_torch import CPU_INDEX, Step, ask_pip, at_least, decide, installed_torch, look, only_from, torch_floor

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

# Says that .venv is ours, whether it is complete, and what it was made from.
RECORD = VENV / ".quintic-setup"


class SetupError(Exception):
    """The setup cannot go on; the message is for the user."""


def say(line: str) -> None:
    """Print one line, at once."""
    print(line, flush=True)


def pip(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `.venv`'s pip and return what it said, both streams in one."""
    settings = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    process_environment = {**os.environ, **settings, **(environment or {})}
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REPORT"):
        process_environment.pop(name, None)
    return subprocess.run(
        [VENV_PYTHON, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=process_environment,
        # pip keeps our lock: if we are killed and it lives on, the next setup waits for its end.
        pass_fds=() if _lock is None else (_lock,),
    )


# pip would compile 12,000 files, of which a run reads a tenth: half a minute. Python does that when it reads them.
INSTALL = ("install", "--no-compile")

# In pip's output: there is no way to an index (with --no-index: it is empty).
UNREACHABLE = re.compile("NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|from versions: none")


def hint(output: str) -> str:
    """Return advice on a failure of pip, from its output."""
    if "No space left on device" in output:
        return "The disk is full: free some space (pip's downloads: `pip cache purge`), then run make again."
    if UNREACHABLE.search(output):
        return "pip could not reach a package index: check the network or the proxy, then run make again."
    return "pip's own words are above. When that is repaired, run make again."


def check_pip(answer: subprocess.CompletedProcess[str]) -> None:
    """Raise SetupError with pip's full output if it failed."""
    if answer.returncode:
        raise SetupError(f"{answer.stdout.rstrip()}\n\n{hint(answer.stdout)}")


def install_torch(steps: Sequence[Step], floor: str, empty: str) -> str:
    """Install PyTorch into `.venv` by the first of `steps` that works; return its version."""
    answer: subprocess.CompletedProcess[str] | None = None
    for step in steps:
        offer = step.offer
        if step.source == "host":
            share_packages()
            version = installed_torch(VENV_PYTHON)
            if version is None:
                raise SetupError(f"PyTorch of {sys.executable} does not work from .venv; name another PYTHON.")
            say(f"Using PyTorch {version} of {sys.prefix}")
            return version
        if step.source == "cpu-index":
            offer = ask_pip(pip, floor, CPU_INDEX, (f"--index-url={CPU_INDEX}",), only_from(CPU_INDEX, (), empty))
            if offer is None:
                continue
        if step.warning:
            say(step.warning)
        if offer is not None:
            kind = " with CUDA" if offer.cuda else ""
            say(f"Installing PyTorch {offer.version}{kind} from {offer.origin} ...")
            options = (*offer.options, "--no-deps", f"torch=={offer.version}")
            answer = pip(*INSTALL, *options, environment=offer.environment)
        else:
            say("Installing PyTorch from the package index ...")
            answer = pip(*INSTALL, f"torch>={floor}")
        if answer.returncode == 0:
            return in_venv("import importlib.metadata as m; print(m.version('torch'))")
        if step.source != "index" or not UNREACHABLE.search(answer.stdout):
            break  # something else is wrong, and a larger download would not repair it
    assert answer is not None, "the last step always asks pip"
    check_pip(answer)
    raise AssertionError("unreachable")


def package_folders() -> list[str]:
    """Return the folders of the running Python's installed packages, in its own order."""
    pythons_own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    pythons_own.add(sysconfig.get_config_var("DESTSHARED"))
    pythons_own.add(str(Path(__file__).resolve().parent))  # Python puts a script's own folder in front
    return [path for path in sys.path if path not in pythons_own and os.path.isdir(path)]


def in_venv(code: str) -> str:
    """Return the output of `code` under `.venv`'s Python, which keeps the bytecode of the modules it imports."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    answer = subprocess.run([VENV_PYTHON, "-P", "-c", code], capture_output=True, text=True, env=environment)
    if answer.returncode:
        raise SetupError(f"{answer.stderr.rstrip()}\n\n.venv does not work: `make clean`, then make again.")
    return answer.stdout.strip()


def site_packages() -> Path:
    """Return the folder of `.venv`'s own packages."""
    return Path(in_venv("import sysconfig; print(sysconfig.get_path('purelib'))"))


def share_packages() -> None:
    """Let `.venv` see the packages of the Python that runs this file, after its own.

    `--system-site-packages` would do for a system Python, but shows the wrong folder when that Python is a
    virtual environment itself. A `.pth` file serves both; its name makes it the last one read.
    """
    if sys.version_info < (3, 12):
        # The old setuptools that comes with a new environment would hide a newer one that PyTorch needs.
        pip("uninstall", "--yes", "setuptools")
    (site_packages() / "zz_shared_packages.pth").write_text("\n".join(package_folders()) + "\n", "utf-8")


def requirements(pyproject: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """Return everything that Quintic with `extras` needs to run."""
    project = pyproject["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(need for extra in extras for need in optional[extra])]


def all_present(needs: Sequence[str], empty: str) -> bool:
    """Return whether `.venv` already has everything in `needs`, dependencies included."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        arguments = ("install", "--dry-run", "--quiet", "--no-index", f"--report={report}", *needs)
        answer = pip(*arguments, environment={"PIP_FIND_LINKS": empty})
        return answer.returncode == 0 and not json.loads(report.read_text("utf-8"))["install"]


def install_quintic(pyproject: Mapping[str, Any], extras: Sequence[str], torch: str, empty: str) -> None:
    """Install this checkout, editable, and what `extras` need; PyTorch stays as it is."""
    if os.name == "posix" and all_present(requirements(pyproject, extras), empty):
        say("Everything Quintic needs is there already: linking this checkout, nothing to download")
        link_checkout(pyproject)
        return
    say(f"Installing Quintic and what it needs ({', '.join(extras)}) ...")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(f"torch=={torch}\n", "utf-8")
        check_pip(pip(*INSTALL, f"--constraint={constraints}", "--editable", f"{ROOT}[{','.join(extras)}]"))


def link_checkout(pyproject: Mapping[str, Any]) -> None:
    """Do what `pip install --editable` does, without a build tool and thus without the network."""
    project = pyproject["project"]
    pip("uninstall", "--yes", project["name"])
    packages = site_packages()
    info = packages / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    metadata = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    metadata += [f"Requires-Dist: {need}" for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        metadata += [f"Provides-Extra: {extra}"]
        metadata += [f'Requires-Dist: {need}; extra == "{extra}"' for need in needs]
    files = {
        packages / f"_{project['name']}.pth": str(ROOT),
        info / "METADATA": "\n".join(metadata),
        info / "INSTALLER": "quintic",
        info / "entry_points.txt": "\n".join(
            ["[console_scripts]", *(f"{name} = {target}" for name, target in project["scripts"].items())]
        ),
    }
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        # Through sh, because a `#!` line can hold neither a long path nor a space.
        files[VENV_PYTHON.parent / name] = "\n".join(
            [
                "#!/bin/sh",
                f"""'''exec' "{VENV_PYTHON}" "$0" "$@" """.rstrip(),
                "' '''",
                "import sys",
                "",
                f"from {module} import {function}",
                "",
                f"sys.exit({function}())",
            ]
        )
    for path, text in files.items():
        path.write_text(text + "\n", "utf-8")
    for name in project["scripts"]:
        (VENV_PYTHON.parent / name).chmod(0o755)
    listed = [f"{os.path.relpath(path, packages)},," for path in (*files, info / "RECORD")]
    (info / "RECORD").write_text("\n".join(listed) + "\n", "utf-8")


# ----------------------------------------------------------------- remember, repair, one at a time

_lock: int | None = None  # the file descriptor of the lock, once held


def take_lock() -> None:
    """Wait until no other setup of this checkout runs. The lock ends with the process."""
    global _lock
    if os.name != "posix":
        return
    import fcntl

    descriptor = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Another setup of this checkout is running; waiting for it ...")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return  # a file system without locks
    _lock = descriptor


def fingerprint() -> str:
    """Return a hash of what the contents of `.venv` depend on."""
    sources = [ROOT / "pyproject.toml", Path(__file__), Path(__file__).with_name("pick_torch.py")]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


def read_record() -> dict[str, str]:
    """Return the recorded inputs of `.venv`; empty if the record is missing or not readable."""
    try:
        record = json.loads(RECORD.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(state: Literal["building", "complete"], torch_folder: str = "") -> None:
    """Write the record in one piece."""
    record = {
        "state": state,
        "checkout": str(ROOT),
        "python": sys.executable,
        "prefix": sys.prefix,
        "torch": torch_folder,
    }
    draft = RECORD.with_name(RECORD.name + ".draft")
    draft.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    os.replace(draft, RECORD)


def is_usable(record: Mapping[str, str], exact: bool) -> bool:
    """Return whether `.venv` is complete and was made here, by this Python if `exact`."""
    return (
        record.get("state") == "complete"
        and record.get("checkout") == str(ROOT)
        and VENV_PYTHON.exists()
        and os.path.isdir(record.get("torch", ""))
        and (not exact or record.get("prefix") == sys.prefix)
    )


def stamp(extra: str) -> Path:
    """Return the file that says which setup last installed `extra`."""
    return VENV / f".quintic-{extra}"


def is_current(extras: Sequence[str]) -> bool:
    """Return whether every one of `extras` is installed as pyproject.toml now has it."""
    wanted = fingerprint()
    stamps = [stamp(extra) for extra in extras]
    return all(path.is_file() and path.read_text("utf-8").strip() == wanted for path in stamps)


def start_afresh() -> None:
    """Leave `.venv` as an empty folder with nothing but the record in it."""
    if VENV.exists() and any(VENV.iterdir()) and not RECORD.exists():
        raise SetupError(
            f"{VENV} was not made by this script, so it is left alone.\n"
            "Move it away or delete it, then run make again.\n"
            "(To use the packages of a virtual environment: make PYTHON=path/to/it/bin/python)"
        )
    VENV.mkdir(exist_ok=True)
    write_record("building")
    for entry in VENV.iterdir():
        if entry == RECORD:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def build(extras: Sequence[str], exact: bool) -> None:
    """Make `.venv` ready for `extras`, from what is there or from nothing."""
    begun = time.monotonic()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    floor = torch_floor(pyproject, extras)
    before = read_record()
    torch = installed_torch(VENV_PYTHON) if is_usable(before, exact) else None
    is_update = torch is not None and at_least(torch, floor)
    with tempfile.TemporaryDirectory() as empty:
        if is_update:
            say("Bringing .venv up to date")
            write_record("building")
        else:
            start_afresh()
            say(f"Setting up .venv with Python {platform.python_version()} (once; later runs reuse it)")
            try:
                venv.create(VENV, symlinks=os.name == "posix", with_pip=True)
            except (subprocess.CalledProcessError, ModuleNotFoundError) as error:
                raise SetupError(
                    f"{sys.executable} cannot make a virtual environment ({error}).\n"
                    "On Debian and Ubuntu: sudo apt install python3-venv"
                ) from error
            facts = look(pip, floor, empty)
            steps = decide(facts)
            if facts.host_torch is not None and steps[0].source != "host":
                say(f"PyTorch {facts.host_torch} of {sys.prefix} is left alone: {floor} or newer is needed")
            torch = install_torch(steps, floor, empty)
        assert torch is not None
        try:
            install_quintic(pyproject, extras, torch, empty)
        except SetupError:
            if is_update:  # pip failed in good order: what was there is still there
                write_record("complete", before["torch"])
            raise
    # What every run reads is compiled here, also where the environment says that nobody should keep bytecode.
    code = (
        "import importlib.metadata as m, os, quintic, torch._dynamo; "
        "print(m.version('torch'), os.path.dirname(torch.__file__))"
    )
    found, folder = in_venv(code).split(" ", 1)
    if found != torch:
        raise SetupError(f"PyTorch {torch} was replaced by {found}; this must not happen, please report it.")
    for extra in extras:
        stamp(extra).write_text(fingerprint() + "\n", "utf-8")
    write_record("complete", folder)
    say(f"Ready: PyTorch {torch} ({time.monotonic() - begun:.0f} s)")


def leave_venv(record: Mapping[str, str]) -> None:
    """Start again under the Python that made `.venv`, if this is `.venv`'s own."""
    if not VENV.exists() or Path(sys.prefix).resolve() != VENV.resolve():
        return
    base = str(getattr(sys, "_base_executable", ""))
    for python in (record.get("python", ""), base):
        if python and os.path.exists(python) and VENV not in Path(python).parents:
            sys.stdout.flush()
            os.execv(python, [python, *sys.argv])
    raise SetupError(".venv is active in this shell and incomplete: run `deactivate`, then make again.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up `.venv`; return the exit status."""
    parser = argparse.ArgumentParser(description="Set up .venv for the extras of pyproject.toml named here.")
    parser.add_argument("extras", nargs="+", metavar="EXTRA", help="for example: train dev")
    parser.add_argument("--exact", action="store_true", help="make .venv anew if another Python made it")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that pip is stopped with us
    try:
        record = read_record()
        # Under .venv's own Python (the user activated it) "another Python" has no meaning.
        exact = options.exact and Path(sys.prefix) != VENV
        if is_usable(record, exact) and is_current(options.extras):
            return 0
        leave_venv(record)
        take_lock()
        if not (is_usable(read_record(), exact) and is_current(options.extras)):
            build(options.extras, exact)
        return 0
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print("\nStopped. The next make starts the setup afresh.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
