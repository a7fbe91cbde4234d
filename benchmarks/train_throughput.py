"""Tokens per second of whole training runs: `quintic train` and nanochat's training loop, on the same text.

    python -m benchmarks.train_throughput --data english.parquet --peers FOLDER --out FOLDER

Each contestant is a command of its own, under torchrun where there are several GPUs; what it prints or logs is read.
FOLDER/NAME.md holds the table, FOLDER/NAME.json all steps. With --eval-every both curves of bits per byte are there,
and FOLDER/NAME.svg draws them. See `benchmarks/training/nanochat_loop.py` for what is nanochat's and what is not.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.figures import ON_ANY_PAGE
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

MODULE = "benchmarks.train_throughput"
CONTESTANTS = "quintic, quintic-NAME, nanochat, nanochat-fp8 (its own products with 8 bits)"
HEADS = (
    *("contestant", "tokens/s", "step (ms)", "optimizer (ms)", "waiting for data (ms)", "MFU", "peak (GiB)"),
    *("first step (s)", "bits per byte"),
)
NOTES = """\
Depth {depth}, rows of {seq_len} tokens, {batch_tokens:,} tokens a step in micro-batches of {rows} rows, {steps} steps,
of which the first {skip} are not counted; median, and tenth to ninetieth percentile. MFU: floating-point operations per
token (6 for each weight of a product, 12 x width x window for each attention) times tokens per second, over {peak:.0f}
TFLOP/s for each GPU, the vendor's dense figure for bfloat16. First step: by the trainer's own clock, compilation
included; {cache}. nanochat sees across document boundaries, Quintic does not. Bits per byte: of the same validation
rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    result: dict[str, Any] = {
        "command": recorded_command(MODULE, words, names(options)),
        "commit": options.commit or git_commit(),
        "machine": f"{options.ranks}x {device_name(torch.cuda.is_available())}",
        "versions": versions(nccl=options.ranks > 1 and torch.cuda.is_available()),
        "options": {name: value for name, value in vars(options).items() if isinstance(value, (int, float))},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            run = run_quintic if name.startswith("quintic") else run_nanochat
            try:
                row = summary(list(run(options, Path(folder), name)), options)
            except subprocess.CalledProcessError as error:
                row = {"error": (error.stderr or "").strip().splitlines()[-1:] or [str(error)]}
            result["rows"].append({"contestant": name, **row})
            write_result(options.out / options.name, result, page(result, options))
            if options.eval_every:
                draw(options.out / f"{options.name}.svg", result["rows"])
    print_table(HEADS, map(cells, result["rows"]))
    return int(any("error" in row for row in result["rows"]))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "train-throughput")
    parser.add_argument("--data", required=True, help="text, as for quintic train")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where prepared text is kept")
    parser.add_argument("--peers", type=Path, help="folder that holds nanochat's repository")
    parser.add_argument("--only", nargs="+", default=["quintic", "nanochat"], help=CONTESTANTS)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=2**19)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between scores of validation rows; 0 for none")
    parser.add_argument("--eval-tokens", type=int, default=2**20)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--val-frac", type=float, default=0.01, help="share of the text to score on")
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--cold", action="store_true", help="say that nothing was compiled before")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"), help="more for quintic-NAME"
    )
    options = parser.parse_args(words)
    if not 0 <= options.skip < options.steps:
        parser.error(f"--skip {options.skip}: must be below --steps {options.steps}")
    if any(name.startswith("nanochat") for name in options.only) and options.peers is None:
        parser.error("nanochat needs --peers, the folder that its repository is in")
    return options


def names(options: argparse.Namespace) -> dict[str, str]:
    """Return this machine's folders and their stand-ins in the recorded command."""
    return {str(options.out): "FOLDER", str(options.peers): "PEERS", str(options.data_dir): "DATA"}


def launched(options: argparse.Namespace, module: str) -> list[str]:
    """Return the beginning of a command that runs a module on every GPU."""
    if options.ranks == 1:
        return [sys.executable, "-m", module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    return [*torchrun, "-m", module]


def shared_words(options: argparse.Namespace) -> list[str]:
    """Return the options that both contestants have."""
    shared = ("depth", "rows", "seq_len", "batch_tokens", "steps", "eval_every", "eval_tokens")
    return [word for name in shared for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def text_words(options: argparse.Namespace) -> list[str]:
    """Return the options of quintic that name the text."""
    names = ("data", "data_dir", "vocab_size", "val_frac")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def run_quintic(options: argparse.Namespace, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of `quintic train`."""
    more = dict(options.variant).get(name.removeprefix("quintic-"), "")
    words = ["--runs-dir", str(folder), "--name" if options.ranks > 1 else "--run", name, "--save-every", "0"]
    words += ["--sample-tokens", "1", "--rms-every", "0", *shlex.split(more)]
    command = [*launched(options, "quintic"), "train", *text_words(options), *shared_words(options), *words]
    subprocess.run(command, check=True, capture_output=True, text=True)
    for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            times = record["times_ms"]
            seconds = options.batch_tokens / record["tokens_per_second"]
            yield {"optimizer_ms": times["optimizer"], "data_ms": times["data"], **record, "seconds": seconds}
        elif record["kind"] == "run":
            yield {"kind": "facts", **{key: record["model"][key] for key in ("parameters", "flops_per_token")}}
        else:
            yield record


def run_nanochat(options: argparse.Namespace, folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of nanochat's loop, after preparing the text."""
    prepare = [sys.executable, "-m", "quintic", "prepare", *text_words(options)]
    prepared = subprocess.run(prepare, check=True, capture_output=True, text=True).stdout
    dataset = prepared.strip().splitlines()[-1].removeprefix("ready: ")
    words = ["--peer", str(options.peers / "nanochat"), "--dataset", dataset, *shared_words(options)]
    if name == "nanochat-fp8":
        words.append("--fp8")
    command = [*launched(options, "benchmarks.training.nanochat_loop"), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def summary(records: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the summary of a contestant's records."""
    steps = [record for record in records if record["kind"] == "train"]
    counted = steps[options.skip :]
    known: dict[str, Any] = {key: value for record in records for key, value in record.items()}
    speed = percentiles([options.batch_tokens / step["seconds"] for step in counted])
    peak = known.get("peak_bytes", known.get("peak_memory_bytes"))
    row = {
        "tokens_per_second": speed,
        "step_ms": percentiles([1000 * step["seconds"] for step in counted]),
        "optimizer_ms": percentiles([step["optimizer_ms"] for step in counted]),
        "mfu": speed["median"] * known["flops_per_token"] / (options.peak_tflops * 1e12 * options.ranks),
        "parameters": known["parameters"],
        "flops_per_token": known["flops_per_token"],
        "peak_gib": None if peak is None else peak / 2**30,
        "first_step_seconds": steps[0]["seconds"],
        "losses": [step["loss"] for step in steps],
        "evaluations": [[r["step"], r["bpb"]] for r in records if r["kind"] == "eval"],
        "measured_at": time.strftime("%Y-%m-%d"),
    }
    if "data_ms" in steps[0]:
        row["data_ms"] = percentiles([step["data_ms"] for step in counted])
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """Return a contestant's line of the table."""
    if "error" in row:
        return [row["contestant"], *["-"] * (len(HEADS) - 2), "; ".join(row["error"])[:200]]

    def spread(name: str, digits: int) -> str:
        if name not in row:
            return "-"
        values = (row[name][end] for end in ("median", "p10", "p90"))
        return "{0:,.{3}f} ({1:,.{3}f} to {2:,.{3}f})".format(*values, digits)

    scores = [f"{bpb:.4f} ({step} steps)" for step, bpb in row["evaluations"][-1:]]
    return [
        row["contestant"],
        *(spread(name, digits) for name, digits in (("tokens_per_second", 0), ("step_ms", 1), ("optimizer_ms", 2))),
        spread("data_ms", 2),
        f"{row['mfu']:.1%}",
        "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}",
        f"{row['first_step_seconds']:.1f}",
        *(scores or ["-"]),
    ]


def page(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    cache = "nothing was compiled before" if options.cold else "code may have been compiled before"
    notes = NOTES.format(peak=options.peak_tflops, cache=cache, **result["options"])
    rows = [row for row in result["rows"] if "error" not in row]
    made = made_by(result["command"], result["commit"], result["versions"])
    lines = [
        f"# Training throughput, {result['machine']}",
        "",
        made,
        "",
        notes,
        "",
        *table(HEADS, map(cells, result["rows"])),
    ]
    for peer in (row for row in rows if row["contestant"].startswith("nanochat")):
        for row in rows:
            if row is not peer:
                ratio = row["tokens_per_second"]["median"] / peer["tokens_per_second"]["median"]
                lines += ["", f"{row['contestant']}: {ratio:.3f} times the tokens per second of {peer['contestant']}."]
    if any(row["evaluations"] for row in rows):
        steps = sorted({step for row in rows for step, _ in row["evaluations"]})
        heads = ["bits per byte after step", *map(str, steps)]
        curves = [(row["contestant"], dict(row["evaluations"])) for row in rows]
        scores = [[name, *(f"{curve[step]:.4f}" if step in curve else "-" for step in steps)] for name, curve in curves]
        lines += ["", *table(heads, scores), "", f"![Both curves]({options.name}.svg)"]
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the validation curves."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context(ON_ANY_PAGE):
        _, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for row, style in zip([row for row in rows if "error" not in row], ("-o", "--s", ":^", "-.v"), strict=False):
            points = [(step, bpb) for step, bpb in row["evaluations"] if step > 0]
            axes.plot(*zip(*points, strict=True), style, label=row["contestant"])
        axes.set(xlabel="steps", ylabel="validation loss (bits per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        pyplot.savefig(path)
        pyplot.close()


if __name__ == "__main__":
    raise SystemExit(main())
