r"""The best learning rate by width and batch, and by warm-up and decay: a grid of runs, several seeds.

    python -m benchmarks.training.transfer --out FOLDER --widths 32 64 128 --batches 512 1024 2048 --tokens 163840 \
        --set depth=3 head_dim=32 seq_len=64 vocab_size=1024
    python -m benchmarks.training.transfer --out FOLDER --devices cuda:0 --at-once 20 --budget-seconds 500 \
        --widths 256 512 1024 --batches 8192 16384 32768 --tokens 4915200 --set depth=6

Every cell is a run of `quintic train` without samples, checkpoints and report, all of as many tokens. The width varies
at the middle one of the batches and the batch at the middle width (--product: every width with every batch); warm-up
and decay vary at the middle of both. One seed has the same initial weights and text under all settings of its width.

Each run is a line in FOLDER/NAME.jsonl; a second call trains only what is missing there. FOLDER/NAME.md, .json and .svg
have the tables and the figure. When the time is over, what did not run is said.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.results import add_options, git_commit, recorded_command, write_result
from benchmarks.training.transfer_page import draw, page
from benchmarks.training.workers import Pool, Runs, given_values, key_of, with_values
from quintic.commands.text import prepared
from quintic.train.config import Config
from quintic.train.saved_config import to_dict

MODULE = "benchmarks.training.transfer"


class Line(NamedTuple):
    """Runs that differ by rate and seed alone."""

    study: str
    label: str
    values: Mapping[str, Any]
    """Options of `quintic train`."""
    rates: tuple[float, ...]


def lines_of(options: argparse.Namespace) -> list[Line]:
    """Return all lines, those that matter most first; two studies may have the same runs."""
    widths, batches = options.widths, options.batches
    middle = {"width": widths[len(widths) // 2], "batch": batches[len(batches) // 2]}

    def line(study: str, label: str, *, rates: Sequence[float] | None = None, **changed: Any) -> Line:
        sizes = middle | {name: changed.pop(name) for name in ("width", "batch") if name in changed}
        values = {
            "optimizer": "muon",
            "aspect_ratio": aspect_ratio(sizes["width"], options.depth, options.head_dim),
            "batch_tokens": sizes["batch"],
            "steps": options.tokens // sizes["batch"],
            **changed,
        }
        return Line(study, label, values, tuple(rates or options.rates))

    lines = [line("width", f"width {width}", width=width) for width in widths]
    lines += [line("batch", f"batch {batch:,}", batch=batch) for batch in batches]
    lines += [
        line("weight decay", f"decay {decay:g}", rates=options.side_rates, weight_decay=decay)
        for decay in options.decays
    ]
    lines += [
        line("warm-up", f"warm-up {100 * frac:g} %", rates=options.side_rates, warmup_frac=frac)
        for frac in options.warmups
    ]
    if options.adamw_rates:
        lines += [
            line("AdamW, width", f"width {width}", rates=options.adamw_rates, width=width, optimizer="adamw")
            for width in widths
        ]
    if options.product:
        lines += [
            line("width and batch", f"width {width}, batch {batch:,}", width=width, batch=batch)
            for batch in batches
            for width in widths
        ]
    return lines


def aspect_ratio(width: int, depth: int, head_dim: int) -> int:
    """Return the --aspect-ratio that gives a width, which is rounded up to a multiple of the heads' size.

    Raises:
        SystemExit: none does.
    """
    ratio = width // depth
    if width % head_dim or ratio < 1 or -(-ratio * depth // head_dim) * head_dim != width:
        raise SystemExit(f"--widths {width}: not a width of depth {depth} with heads of {head_dim} channels")
    return ratio


def rate_option(line: Line) -> str:
    """Return the option that a line's rates belong to."""
    return "adamw_lr" if line.values["optimizer"] == "adamw" else "muon_lr"


def cells_of(lines: Sequence[Line], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the options of every run, each once: the seeds of one study before the next study."""
    cells: dict[str, dict[str, Any]] = {}
    for study in dict.fromkeys(line.study for line in lines):
        for seed in seeds:
            for line in lines:
                for rate in line.rates if line.study == study else ():
                    cell = {**line.values, rate_option(line): rate, "seed": seed}
                    cells.setdefault(key_of(cell), cell)
    return list(cells.values())


def with_defaults(cell: Mapping[str, Any], base: Config) -> dict[str, Any]:
    """Return a run's options with what is default there, so that equal runs of two studies are one."""
    return {"weight_decay": base.optim.weight_decay, "warmup_frac": base.schedule.warmup_frac, **cell}


def losses_by_rate(line: Line, seeds: Sequence[int], runs: Runs, base: Config) -> dict[str, dict[str, float | None]]:
    """Return rate -> seed -> loss of a line's runs that ended, as JSON has it; None where one diverged."""
    losses: dict[str, dict[str, float | None]] = {}
    for rate in line.rates:
        for seed in seeds:
            cell = {**line.values, rate_option(line): rate, "seed": seed}
            if (row := runs.row(with_defaults(cell, base))) is not None:
                losses.setdefault(f"{rate:g}", {})[str(seed)] = row["loss"]
    return losses


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train the grid and return everything."""
    start = time.time()
    changed = given_values(options.set)
    kind = "cuda" if options.devices[0].startswith("cuda") else "cpu"
    fixed = {"device": kind, "compile": False, "rms_every": 0, "save_every": 0, "threads": options.threads}
    base = with_values(Config(), {"data_dir": str(options.out / "data"), "eval_every": 0, **changed, **fixed})
    options.depth, options.head_dim = base.model.depth, base.model.head_dim
    lines = lines_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(options.out / f"{options.name}.jsonl", changed)
    dataset = prepared(base.data)
    end = start + options.budget_seconds
    jobs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for cell in cells_of(lines, options.seeds):
        whole = with_defaults(cell, base)
        job = {"config": to_dict(with_values(base, whole)), "data": str(dataset.path.resolve())}
        jobs.setdefault(key_of(whole), (whole, {**job, "deadline": end, "start_by": end}))
    pool = Pool(options.devices, options.at_once, options.threads)
    try:
        runs.train(pool, list(jobs.values()))
    finally:
        pool.close()
    return {
        "command": recorded_command(MODULE, sys.argv[1:], {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "seconds": time.time() - start,
        "devices": options.devices,
        "at_once": options.at_once,
        "changed": changed,
        "tokens": options.tokens,
        "seeds": options.seeds,
        "data": {key: value for key, value in dataset.summary().items() if key != "path"},
        **runs.computing,
        "failures": runs.failures,
        "lines": [
            {
                **line._asdict(),
                "values": with_defaults(line.values, base),
                "losses": losses_by_rate(line, options.seeds, runs, base),
            }
            for line in lines
        ],
    }


def main() -> int:
    options = arguments()
    if options.page is None:
        result, path = measure(options), options.out / options.name
    else:
        result, path = json.loads(options.page.read_text(encoding="utf-8")), options.page.with_suffix("")
    text = page(result, path.name)
    write_result(path, result, text)
    draw(Path(f"{path}.svg"), result)
    print("\n" + text)
    return 1 if result["failures"] or "were not trained" in text else 0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "transfer")
    parser.add_argument("--page", type=Path, help="train nothing: write page and figure of this .json beside it")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="cpu, or cuda:0 cuda:1 ...")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time on each device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="of all of it; runs beyond it are cut")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=655_360, help="of each run")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--batches", nargs="+", type=int, default=[1024, 2048, 4096], help="tokens of a step")
    parser.add_argument("--product", action="store_true", help="every width with every batch")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.02, 0.04, 0.08], help="of Muon")
    parser.add_argument("--side-rates", nargs="+", type=float, default=[0.02, 0.04, 0.08], help="for warm-up and decay")
    parser.add_argument("--warmups", nargs="*", type=float, default=[0.0, 0.02, 0.1, 0.2], help="shares of the steps")
    parser.add_argument("--decays", nargs="*", type=float, default=[0.0, 0.1, 0.3, 1.0])
    parser.add_argument("--adamw-rates", nargs="*", type=float, default=[0.001, 0.002, 0.004, 0.008])
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="for all runs: depth=3")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
