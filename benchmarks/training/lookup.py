"""What lookup layers (L3) bring: loss against steps, tokens and time with and without them, at equal data, some seeds.

    python -m benchmarks.training.lookup --out FOLDER --depth 6 --l3-layers 2,5

Runs of one seed see the same batches; model and data are those of `bare_runs.py`. FOLDER/NAME.md has the tables,
FOLDER/NAME.json the curves. There, too: how long the lookup of one layer takes by itself, and how many rows of a table
a step touches; `--tiles 32,32,64,256,8 64,64,64,128,8` only times it with other constants of the kernels. Whether
`comms="sharded_sparse"` would pay for such a table is what `benchmarks.sparse_rows` measures, given its rows, its
columns and these touched rows. On a CPU `--depth 2 --width 128 --steps 20 --rows 4 --seq-len 128 --vocab-size 1024
--seeds 1` tries the script. The same comparison on other text, by the whole harness: `benchmarks.train_throughput` with
`--variant l3 "--l3-layers 2,5"`.
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
    print_table,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import synchronize, time_steps
from benchmarks.training.bare_runs import Outcome, Task, build, steady, train, word_tokens
from quintic.kernels.lookup import segments
from quintic.kernels.lookup.lookup import lookup, plan_lookup
from quintic.model.allocation import allocate_rows
from quintic.model.gpt import GPT

MODULE = "benchmarks.training.lookup"
SAMPLE_ROWS = 100
HEADS = ("model", "parameters", "FLOPs per token", "step (ms)", "last loss, mean", "by seed", "difference, same seed")
CURVE_HEADS = ("step", "million tokens", "without", "seconds", "with", "seconds")
NOTES = """\
Depth {depth}, width {width}, rows of {seq_len} tokens, {rows} rows a step, {steps} steps, a vocabulary of
{vocab_size:,}; losses of held-back text. {embeddings:,} rows in a table, {mean_rows:.1f} of them for a token of the
text on average; one step touches {touched:.1%} of them. One layer's lookup in {positions:,} positions: plan
{plan_ms:.2f} ms, forward {forward_ms:.2f} ms, forward and backward {both_ms:.2f} ms."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    on_gpu = torch.cuda.is_available()
    task = Task(
        word_tokens(options.vocab_size, options.tokens),
        *(options.vocab_size, options.depth, options.width or 64 * options.depth, options.head_dim),
        *(options.seq_len, options.rows, options.steps),
        torch.device("cuda" if on_gpu else "cpu"),
        on_gpu,
    )
    result: dict[str, Any] = {
        "command": recorded_command(MODULE, words, {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "machine": device_name(on_gpu),
        "versions": versions(),
        "rows": [],
    }
    if options.tiles:
        return time_tiles(task, options)
    for seed in options.seeds:
        for name, model_options in (("without", {}), ("with", lookups_of(options))):
            config = task.config(seed, **model_options)
            model = build(task, config)
            if name == "with":
                result["facts"] = allocate(task, model, seed) | time_lookup(task, model, seed)
            found = train(task, config, model, eval_every=options.eval_every or max(1, options.steps // 6))
            result["rows"].append({"model": name, "seed": seed, **summary(found)})
            print(f"{name:8} seed {seed:<3} loss {result['rows'][-1]['evaluations'][-1][1]:.4f}", flush=True)
            result["facts"] = {**result.get("facts", {}), **sizes(task)}
            write_result(options.out / options.name, result, page(result))
    print_table(HEADS, lines(result["rows"]))
    print_table(CURVE_HEADS, curves(result["rows"], task.rows * task.seq_len))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "lookup")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=0, help="0: 64 x depth")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--l3-layers", default="", help="as for quintic train; by default one in the middle")
    parser.add_argument("--l3-embeddings", type=int, default=0)
    parser.add_argument("--l3-d-up", type=int, default=0)
    parser.add_argument("--l3-k-max", type=int, default=512)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=0, help="0: six times a run")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="of text, at most")
    parser.add_argument("--tiles", nargs="+", default=[], help="positions,rows,chunk,columns,warps of the kernels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    return parser.parse_args(words)


def lookups_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the options ask for."""
    layers = options.l3_layers or str(max(0, options.depth // 2 - 1))
    names = ("l3_embeddings", "l3_d_up", "l3_k_max")
    return {"l3_layers": layers, "l3_tied": not options.untied, **{name: getattr(options, name) for name in names}}


def allocate(task: Task, model: GPT, seed: int) -> dict[str, Any]:
    """Allocate the tables as `quintic train` does, from rows of the training text, and return what came of it."""
    batches, rows = task.batches(seed), []
    while len(rows) < SAMPLE_ROWS:
        rows += next(batches)[0].unbind()
    rows = rows[:SAMPLE_ROWS]
    config = model.config
    shares = torch.from_numpy(
        allocate_rows(
            rows, vocab_size=config.vocab_size, total=config.l3_embeddings, most=config.l3_k_max, bos_id=config.bos_id
        )
    )
    mean_rows = float(shares[torch.stack(rows)].double().mean())
    model.allocate_lookups(shares, mean_rows=mean_rows)
    touched = int(shares[next(task.batches(seed))[0].unique()].sum())
    return {"mean_rows": mean_rows, "touched": touched / config.l3_embeddings, "embeddings": config.l3_embeddings}


def time_lookup(task: Task, model: GPT, seed: int) -> dict[str, float]:
    """Return milliseconds of one layer's lookup in the positions of a step."""
    on_gpu = task.device.type == "cuda"
    inputs = next(task.batches(seed))[0].to(task.device)
    layer, offsets = next(iter(model.lookups.values())), model.lookup_offsets
    x = torch.randn(*inputs.shape, task.width, device=task.device, dtype=model.compute_dtype, requires_grad=True)
    plan = plan_lookup(inputs, offsets, len(layer.keys))
    grad = torch.randn_like(x)

    def read(*, backward: bool) -> None:
        out = lookup(x, layer.keys, layer.values, offsets, plan)
        if backward:
            out.backward(grad)

    def median(step: Any) -> float:
        step()
        synchronize(on_gpu)
        return statistics.median(time_steps(step, lambda index: None, 5, on_gpu)[0])

    times = {
        "positions": inputs.numel(),
        "plan_ms": median(lambda: plan_lookup(inputs, offsets, len(layer.keys))),
        "forward_ms": median(lambda: read(backward=False)),
        "both_ms": median(lambda: read(backward=True)),
    }
    model.zero_grad()
    return times


def time_tiles(task: Task, options: argparse.Namespace) -> int:
    """Print how long the lookup takes with several constants of its kernels."""
    model = build(task, task.config(options.seeds[0], **lookups_of(options)))
    allocate(task, model, options.seeds[0])
    rows = []
    for tiles in options.tiles:
        for name, value in zip(("_POSITIONS", "_ROWS", "_CHUNK", "_COLUMNS", "_WARPS"), tiles.split(","), strict=True):
            setattr(segments, name, int(value))
        times = time_lookup(task, model, options.seeds[0])
        rows.append([tiles, *(f"{times[name]:.3f}" for name in ("plan_ms", "forward_ms", "both_ms"))])
    print_table(("tiles", "plan (ms)", "forward (ms)", "forward and backward (ms)"), rows)
    return 0


def sizes(task: Task) -> dict[str, int]:
    names = ("depth", "width", "seq_len", "rows", "steps", "vocab_size")
    return {name: getattr(task, name) for name in names}


def summary(found: Outcome) -> dict[str, Any]:
    """Return what is kept of a run."""
    step_ms = statistics.median(steady(found.step_ms))
    # What was compiled in the first steps is no part of the time: each step counts as the median one.
    evaluations = [(step, loss, step * step_ms / 1000) for step, loss, _ in found.evaluations]
    rest = {"parameters": found.parameters, "flops_per_token": found.flops_per_token, "losses": found.losses}
    return {"step_ms": step_ms, "evaluations": evaluations, **rest}


def lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the table of both models, of the seeds that both have."""
    found = {name: {row["seed"]: row for row in rows if row["model"] == name} for name in ("without", "with")}
    seeds = sorted(set(found["without"]) & set(found["with"]))
    if not seeds:
        return []
    losses = {name: [runs[seed]["evaluations"][-1][1] for seed in seeds] for name, runs in found.items()}
    apart = [less - more for less, more in zip(losses["with"], losses["without"], strict=True)]
    return [
        [
            name,
            f"{runs[seeds[0]]['parameters']:,}",
            f"{runs[seeds[0]]['flops_per_token']:.3g}",
            f"{statistics.median(runs[seed]['step_ms'] for seed in seeds):.1f}",
            f"{statistics.mean(losses[name]):.4f}",
            ", ".join(f"{loss:.4f}" for loss in losses[name]),
            "-" if name == "without" else f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})",
        ]
        for name, runs in found.items()
    ]


def curves(rows: Sequence[Mapping[str, Any]], batch_tokens: int) -> list[list[str]]:
    """Return mean losses over the seeds at each evaluation, with the training time until then."""
    by_name: dict[str, dict[int, list[tuple[float, float]]]] = {"without": {}, "with": {}}
    for row in rows:
        for step, loss, seconds in row["evaluations"]:
            by_name[row["model"]].setdefault(step, []).append((loss, seconds))
    found = []
    for step in sorted(set(by_name["without"]) & set(by_name["with"])):
        line = [f"{step:,}", f"{step * batch_tokens / 1e6:.1f}"]
        for runs in by_name.values():
            losses, seconds = zip(*runs[step], strict=True)
            line += [f"{statistics.mean(losses):.4f}", f"{statistics.mean(seconds):.1f}"]
        found.append(line)
    return found


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    facts = made_by(result["command"], result["commit"], result["versions"])
    text = ["# Lookup layers", "", f"{result['machine']}. {facts}.", ""]
    if "touched" in result["facts"]:
        text += [NOTES.format(**result["facts"]), ""]
    batch_tokens = result["facts"]["rows"] * result["facts"]["seq_len"]
    text += [*table(HEADS, lines(result["rows"])), "", *table(CURVE_HEADS, curves(result["rows"], batch_tokens))]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
