"""Build the wheel and the sdist of a release, and check them: `make release`.

Checks first, and builds nothing if one fails: no uncommitted changes, one version in pyproject.toml,
quintic/__init__.py and CITATION.cff, and that version with a date in CHANGELOG.md. Then builds both files into dist/,
installs the wheel beside PyTorch into an empty folder, and makes one step with it there. `--draft` leaves out what only
a release needs, the clean tree and the date.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

# A user's first step, with what was installed and not with the checkout.
_STEP = """\
import sys, torch, quintic
assert quintic.__file__.startswith(sys.argv[1]), quintic.__file__
assert quintic.__version__ == sys.argv[2], quintic.__version__
model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02)
before = model[1].weight.detach().clone()
model(torch.arange(8)).square().sum().backward()
optimizer.step()
assert not torch.equal(before, model[1].weight)
"""


def problems(*, draft: bool) -> list[str]:
    """Return what stands against a release, a sentence each."""
    found = []
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    places = {"quintic/__init__.py": r'^__version__ = "([^"]+)"', "CITATION.cff": r"^version: (\S+)"}
    for place, pattern in places.items():
        match = re.search(pattern, (ROOT / place).read_text("utf-8"), re.MULTILINE)
        if match is None or match[1] != version:
            found.append(f"{place} has version {match and match[1]}, pyproject.toml has {version}")
    heading = re.search(
        rf"^## {re.escape(version)} \((.+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    if heading is None:
        found.append(f"CHANGELOG.md has no part `## {version} (DATE)`")
    elif not draft and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        found.append(f"CHANGELOG.md: write the date in place of `{heading[1]}` behind {version}")
    if not draft and (changed := _output("git", "status", "--porcelain")):
        found.append(f"uncommitted changes:\n{changed}")
    return found


def build() -> tuple[Path, Path]:
    """Return the wheel and the sdist, built anew in dist/."""
    DIST.mkdir(exist_ok=True)
    for old in [*DIST.glob("quintic-*.whl"), *DIST.glob("quintic-*.tar.gz")]:
        old.unlink()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(DIST)], cwd=ROOT, check=True)
    (wheel,), (sdist,) = DIST.glob("quintic-*.whl"), DIST.glob("quintic-*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Make a step with the installed wheel, and look into the sdist.

    Raises:
        SystemExit: something is missing.
    """
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder).resolve() / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
        subprocess.run([*pip, str(wheel)], check=True)
        # The folder of the wheel comes before this checkout, which an editable install has on the path.
        program = f"import sys; sys.path.insert(0, sys.argv[1])\n{_STEP}"
        done = subprocess.run([sys.executable, "-P", "-c", program, str(target), version], cwd=folder, check=False)
        if done.returncode:
            raise SystemExit("a step with the installed wheel failed")
    with tarfile.open(sdist) as archive:
        names = {Path(name).relative_to(f"quintic-{version}").as_posix() for name in archive.getnames()}
    if missing := sorted({"pyproject.toml", "LICENSE", "README.md", "quintic/__init__.py"} - names):
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Check, build, check what was built; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--draft", action="store_true", help="a build to look at: no date, and changes may be uncommitted"
    )
    options = parser.parse_args()
    if found := problems(draft=options.draft):
        print("\n".join(f"- {problem}" for problem in found), file=sys.stderr)
        return 1
    wheel, sdist = build()
    check(wheel, sdist)
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1024:,.0f} KiB")
    if not options.draft:
        print(f"Now: git tag v{wheel.name.split('-')[1]}, push the tag, and upload both files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
