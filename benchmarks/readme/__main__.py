"""Measure what the README claims, and write its chart and its table of figures.

    python -m benchmarks.readme --out FOLDER --devices cuda:0 cuda:1 --peers FOLDER_OF_OTHER_LIBRARIES
    python -m benchmarks.readme --out FOLDER --write NAME NAME

The first command trains the harness' default model with AdamW and with Muon (`curves.py`), times `optimizer.step()` on
one device and in several layouts beside other libraries (`benchmarks.optimizer_step`), and whole training steps beside
AdamW's (`benchmarks.end_to_end`, which needs transformers). It keeps all of it in FOLDER/NAME.json and FOLDER/NAME.md;
what FOLDER has already is not measured again. `--write` measures nothing: it puts the chart into docs/assets, and the
table into README.md and docs/index.md, from the files it names. Where two have the same part, the later one's counts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import REPOSITORY, add_options, git_commit, made_by, recorded_command, write_result
from benchmarks.readme import chart, curves, figures
from benchmarks.training.workers import given_values

ASSETS = REPOSITORY / "docs" / "assets"
CHART = "muon-and-adamw"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "index.md")


def main() -> int:
    options = arguments()
    if options.write:
        write([options.out / name for name in options.write])
        return 0
    path = options.out / options.name
    result = measure(options, path.with_suffix(".json"))
    write_result(path, result, page(result))
    print(page(result))
    return 0


def measure(options: argparse.Namespace, kept: Path) -> dict[str, Any]:
    """Return all results, of which those in the file `kept` are not measured again."""
    result: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    named = {str(options.out): "FOLDER", str(options.peers): "PEERS"}
    result |= {
        "command": recorded_command("benchmarks.readme", sys.argv[1:], named),
        "commit": options.commit or git_commit(),
    }
    is_cuda = options.devices[0].startswith("cuda")
    if "curves" not in result and "curves" in options.only:
        changed = given_values(options.set)
        result["curves"] = curves.measure_curves(options.out, options.devices, options.seeds, changed)
        write_result(kept.with_suffix(""), result, page(result))
    shared = ["--peers", str(options.peers)] if options.peers else []
    shared += ["--commit", result["commit"]]
    for name, (benchmark, *words) in figures.STEPS.items():
        too_few = name in figures.ON_TWO and len(options.devices) < 2
        if name in result or name not in options.only or not is_cuda or too_few:
            continue
        folder = options.out / name
        command = [sys.executable, "-m", benchmark, "--out", str(folder), "--name", name, *words, *shared]
        if benchmark == "benchmarks.optimizer_step":
            command += ["--time-limit", str(options.step_seconds)]
        done = subprocess.run(command, cwd=REPOSITORY, check=False)
        found = folder / f"{name}.json"
        if done.returncode and not found.exists():
            raise SystemExit(f"{name}: {benchmark} ended with {done.returncode}")
        result[name] = json.loads(found.read_text("utf-8"))
        write_result(kept.with_suffix(""), result, page(result))
    return result


def page(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    lines = ["# What the README shows", ""]
    if "curves" in result:
        lines += [made_by(result["command"], result["commit"], result["curves"]["versions"]), ""]
        machine = result["curves"]["machine"]
        lines += [f"{machine['device']}, preset `{result['curves']['preset']}`.", ""]
        lines += [*curves.page(result["curves"]), ""]
    rows = figures.rows(result, {})
    if rows:
        lines += figures.table_of(rows)
    return "\n".join(lines).rstrip() + "\n"


def write(paths: Sequence[Path]) -> None:
    """Write the chart, and the table into the README and the manual's first page, from results without their suffix."""
    result: dict[str, Any] = {}
    pages: dict[str, Path] = {}
    for path in paths:
        parts = json.loads(path.with_suffix(".json").read_text("utf-8"))
        result |= parts
        pages |= dict.fromkeys(parts, path.with_suffix(".md").resolve())
    ASSETS.mkdir(exist_ok=True)
    drawn = curves.curves_in(result["curves"])
    for theme in chart.THEMES:
        (ASSETS / f"{CHART}-{theme}.svg").write_text(chart.draw(drawn, theme), "utf-8")
        (ASSETS / f"{CHART}-narrow-{theme}.svg").write_text(chart.draw(drawn, theme, is_narrow=True), "utf-8")
    for page in PAGES:
        links = {part: os.path.relpath(path, page.parent) for part, path in pages.items()}
        page.write_text(figures.in_page(page.read_text("utf-8"), result, links), "utf-8")


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "readme")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="cpu, or cuda:0 cuda:1 ...")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parts = ["curves", *figures.STEPS]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts, help="measure these, all by default")
    parser.add_argument("--peers", type=Path, help="folder with the packages of other libraries")
    parser.add_argument(
        "--step-seconds", type=float, default=600, help="start no row of a table after this many seconds"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="of the runs: depth=1 steps=10")
    parser.add_argument(
        "--write", nargs="+", metavar="NAME", help="measure nothing: write chart and table from these of FOLDER"
    )
    options = parser.parse_args()
    for name in options.write or ():
        if not (options.out / f"{name}.json").exists():
            parser.error(f"{options.out / name}.json does not exist: measure first, without --write")
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers {options.peers}: no such folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
