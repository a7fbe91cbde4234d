"""Compare what is decided for weights without an example and with one, over the models of installed libraries.

    python -m benchmarks.roles --out FOLDER --libraries transformers timm --part built

A third of the model families of each library, chosen by a hash of their names, is `held-out`: judgments and the
forward pass are made from the others, the `built` ones. FOLDER/NAME.rows.jsonl keeps each class, and what it has is not
tried again; the tables and what differs are in FOLDER/NAME.json and FOLDER/NAME.md. `judgments.tsv` says what is right.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import add_options, git_commit, read_rows, recorded_command, versions, write_result
from benchmarks.roles import judgments, page
from benchmarks.roles.compare import is_held_out
from benchmarks.roles.pool import Worker, sweep

LIBRARIES = {
    "transformers": ("transformers",),
    "timm": ("timm",),
    "diffusers": ("diffusers",),
    "fla": ("flash-linear-attention", "fla-core"),
    "other": ("torch-geometric", "torchvision", "stable-baselines3", "torchaudio", "speechbrain"),
}
"""The distributions of each part, whose versions are told."""

PARTS = ("built", "held-out")


def main() -> int:
    options = arguments()
    rows_file = options.out / f"{options.name}.rows.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    for library in options.libraries:
        collect(library, options, rows_file)
    result = result_of(read_rows(rows_file), options)
    write_result(options.out / options.name, result, page.page(result))
    print(page.page(result).partition("\n## ")[0])
    for library, found in result["failures"].items():
        for one in found:
            print(f"{library}: {len(one['classes'])} x {one['stage']}: {one['error']}")
    return 0


def collect(library: str, options: argparse.Namespace, rows_file: Path) -> None:
    """Try the classes of a library that the file does not have yet, and append what became of them."""
    worker = Worker(f"benchmarks.roles.{library}_models", options.out / f"{options.name}.log", options.limit)
    families = worker.families()
    kept = [row for row in read_rows(rows_file) if "lines" in row or not options.again or row["library"] != library]
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    known = {row["class"] for row in kept if row["library"] == library}
    wanted = [
        name
        for name, family in families.items()
        if name not in known
        and options.part in ("all", PARTS[is_held_out(family)])
        and (not options.only or any(word in name for word in options.only))
    ]
    begun = time.monotonic()
    with rows_file.open("a", encoding="utf-8") as file, contextlib.closing(sweep(worker, wanted)) as found:
        for number, row in enumerate(found, start=1):
            row |= {"library": library, "family": families[row["class"]]}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if number % 50 == 0:
                print(f"{library}: {number} of {len(wanted)} in {time.monotonic() - begun:.0f} s", flush=True)


def result_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the counts and lines of each library and part, and the errors of what did not run."""
    made = judgments.read()
    libraries: dict[str, Any] = {}
    failed: dict[str, Any] = {}
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        libraries[library] = {}
        for part in PARTS:
            shown = [row for row in own if PARTS[is_held_out(row["family"])] == part]
            if shown and options.part in ("all", part):
                libraries[library][part] = page.summary(library, shown, made)
        failed[library] = page.failures(
            [row for row in own if options.part in ("all", PARTS[is_held_out(row["family"])])]
        )
    held_out = {
        library: sorted({row["class"] for row in rows if row["library"] == library and is_held_out(row["family"])})
        for library in libraries
    }
    return {
        "command": recorded_command("benchmarks.roles", sys.argv[1:], {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "versions": versions(*itertools.chain(*LIBRARIES.values())),
        "note": options.note,
        "held_out": held_out,
        "libraries": libraries,
        "failures": failed,
    }


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "roles")
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--part", choices=[*PARTS, "all"], default="built")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="classes with one of these in their names"
    )
    parser.add_argument("--note", default="", help="a line of the page, for what is special about this run")
    parser.add_argument("--again", action="store_true", help="try classes again that did not run")
    parser.add_argument("--limit", type=float, default=20, help="seconds for one class")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
