"""Does --fp8 pay, and does the loss stay? A step with and without it at several widths, and losses over some steps.

    python -m benchmarks.training.fp8 --out FOLDER

One GPU. Every run of a width sees the same batches; model and data are those of `bare_runs.py`. FOLDER/NAME.md has the
table, FOLDER/NAME.json every step. On a CPU `--widths 128 --depth 1 --steps 4 --rows 2 --seq-len 32 --vocab-size 512`
tries the script, with products that are emulated.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.common.results import (
    add_options,
    device_name,
    git_commit,
    made_by,
    percentiles,
    print_table,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.training.bare_runs import Outcome, Task, build, steady, train, word_tokens

MODULE = "benchmarks.training.fp8"
HEADS = (
    "width",
    "products",
    "step (ms)",
    "times as fast",
    "tokens/s",
    "peak (GiB)",
    "last losses",
    "more than without",
)
NOTES = """\
Depth {depth}, rows of {seq_len} tokens, {rows} rows a step, a vocabulary of {vocab_size:,}, {steps} steps. Step:
forward, backward and optimizer; median, tenth to ninetieth percentile, the first steps left out. Last losses: the mean
over the last fifth of the steps; the runs of a width see the same batches."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    on_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "command": recorded_command(MODULE, words, {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "machine": device_name(on_gpu),
        "versions": versions(),
        "options": {name: value for name, value in vars(options).items() if isinstance(value, (int, float))},
        "rows": [],
    }
    tokens = word_tokens(options.vocab_size, options.tokens)
    for width in options.widths:
        sizes = (options.depth, width, options.head_dim, options.seq_len, options.rows, options.steps)
        task = Task(tokens, options.vocab_size, *sizes, torch.device("cuda" if on_gpu else "cpu"), on_gpu)
        for recipe in (None, *options.recipes):
            config = task.config(options.seed)
            try:
                found = train(task, config, build(task, config), fp8=recipe)
            except RuntimeError as error:
                print(f"width {width}, {recipe}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                continue
            result["rows"].append({"width": width, "recipe": recipe, **summary(found, task)})
            print(" | ".join(cells(result["rows"][-1], result["rows"])), flush=True)
            write_result(options.out / options.name, result, page(result))
    print_table(HEADS, (cells(row, result["rows"]) for row in result["rows"]))
    return int(len(result["rows"]) < len(options.widths) * (1 + len(options.recipes)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "fp8")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[768, 1280, 1536, 2048], help="multiples of --head-dim"
    )
    parser.add_argument("--recipes", nargs="+", choices=("tensorwise", "rowwise"), default=["tensorwise", "rowwise"])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of text, at most")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def summary(found: Outcome, task: Task) -> dict[str, Any]:
    """Return what is kept of a run."""
    last = found.losses[-max(1, len(found.losses) // 5) :]
    times = percentiles(steady(found.step_ms))
    return {
        "step_ms": times,
        "tokens_per_second": 1000 * task.rows * task.seq_len / times["median"],
        "peak_gib": found.peak_bytes / 2**30,
        "last_loss": statistics.mean(last),
        "losses": found.losses,
        "all_step_ms": found.step_ms,
    }


def cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row of the table, compared with the run of its width without 8-bit products."""
    plain = next((other for other in rows if other["width"] == row["width"] and other["recipe"] is None), None)
    times = row["step_ms"]
    compared = ["-", "-"]
    if plain is not None and row["recipe"] is not None:
        faster = plain["step_ms"]["median"] / times["median"]
        compared = [f"{faster:.3f}", f"{row['last_loss'] - plain['last_loss']:+.4f}"]
    return [
        f"{row['width']:,}",
        row["recipe"] or "16 bits",
        f"{times['median']:.1f} ({times['p10']:.1f} to {times['p90']:.1f})",
        compared[0],
        f"{row['tokens_per_second']:,.0f}",
        f"{row['peak_gib']:.1f}",
        f"{row['last_loss']:.4f}",
        compared[1],
    ]


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    facts = made_by(result["command"], result["commit"], result["versions"])
    lines = ["# Training with 8-bit products", "", f"{result['machine']}. {facts}.", ""]
    rows = [cells(row, result["rows"]) for row in result["rows"]]
    return "\n".join([*lines, NOTES.format(**result["options"]), "", *table(HEADS, rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
