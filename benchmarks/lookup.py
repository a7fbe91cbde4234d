"""The time of one L3 layer's lookup, and the number of its tables' rows that a step touches.

    python -m benchmarks.lookup --out FOLDER

Tokens follow Zipf's law; rows are allocated to them as `quintic train` does. FOLDER/NAME.md has the table and
FOLDER/NAME.json all times. `--tiles 32,32,64,256,8 64,64,64,128,8` compares other constants of the kernels. What lookup
layers bring to the loss is measured by `benchmarks.training.variants`; whether `comms="sharded_sparse"` would pay for
such a table by `benchmarks.sparse_rows`, given its rows, its columns and the touched rows.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.results import (
    add_options,
    device_name,
    git_commit,
    made_by,
    percentiles,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import synchronize, time_steps
from quintic.kernels.lookup import segments
from quintic.kernels.lookup.lookup import lookup, plan_lookup
from quintic.model.allocation import allocate_rows

SAMPLE_ROWS = 100
CONSTANTS = ("_POSITIONS", "_ROWS", "_CHUNK", "_COLUMNS", "_WARPS")
HEADS = ("tiles", "plan (ms)", "forward (ms)", "forward and backward (ms)")
NOTES = """\
{positions:,} positions of width {width}, a vocabulary of {vocab_size:,}, a tied table of {embeddings:,} rows,
{mean_rows:.1f} of them for a token on average; one step touches {touched:.1%} of them. Median, tenth to ninetieth
percentile of {steps} times. Tiles: positions, rows, channels at a time, columns, warps."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    on_gpu = torch.cuda.is_available()
    tokens = zipf_tokens(options, torch.Generator().manual_seed(1))
    shares = torch.from_numpy(
        allocate_rows(
            list(tokens[:SAMPLE_ROWS]),
            vocab_size=options.vocab_size,
            total=options.embeddings,
            most=options.k_max,
            bos_id=0,
        )
    )
    inputs = tokens[SAMPLE_ROWS:]
    facts = {
        **{name: getattr(options, name) for name in ("width", "vocab_size", "embeddings", "steps")},
        "positions": inputs.numel(),
        "mean_rows": float(shares[inputs].double().mean()),
        "touched": int(shares[inputs.unique()].sum()) / options.embeddings,
    }
    rows = []
    for tiles in options.tiles or [",".join(str(getattr(segments, name)) for name in CONSTANTS)]:
        for name, value in zip(CONSTANTS, tiles.split(","), strict=True):
            setattr(segments, name, int(value))
        rows.append({"tiles": tiles, **times(inputs, shares, options, on_gpu)})
    result = {
        "command": recorded_command("benchmarks.lookup", words, {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "machine": device_name(on_gpu),
        "versions": versions(),
        "facts": facts,
        "rows": rows,
    }
    write_result(options.out / options.name, result, page(result))
    print(page(result))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "lookup")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--embeddings", type=int, default=286_000, help="rows of the tables")
    parser.add_argument("--k-max", type=int, default=512, help="rows of a token, at most")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32, help="of tokens")
    parser.add_argument("--steps", type=int, default=20, help="timed")
    parser.add_argument("--tiles", nargs="+", default=[], help="positions,rows,chunk,columns,warps of the kernels")
    return parser.parse_args(words)


def zipf_tokens(options: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Return (SAMPLE_ROWS + rows, seq_len) int64 tokens, the n-th of the vocabulary as frequent as 1 / (n + 1)."""
    frequency = 1 / torch.arange(1, options.vocab_size + 1, dtype=torch.float64)
    count = (SAMPLE_ROWS + options.rows) * options.seq_len
    drawn = torch.multinomial(frequency, count, replacement=True, generator=generator)
    return drawn.view(-1, options.seq_len)


def times(
    inputs: torch.Tensor, shares: torch.Tensor, options: argparse.Namespace, on_gpu: bool
) -> dict[str, dict[str, float]]:
    """Return milliseconds of the lookup's parts."""
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    inputs = inputs.to(device)
    offsets = torch.cat([torch.zeros(1), shares.cumsum(0)]).to(device, torch.int32)
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(*inputs.shape, options.width, device=device, dtype=dtype, generator=generator).requires_grad_()
    keys = torch.randn(options.embeddings, options.width, device=device, generator=generator).requires_grad_()
    plan = plan_lookup(inputs, offsets, len(keys))
    grad = torch.randn(x.shape, device=device, dtype=dtype, generator=generator)

    def measured(step: Any) -> dict[str, float]:
        step()
        synchronize(on_gpu)
        return percentiles(time_steps(step, lambda index: None, options.steps, on_gpu)[0])

    return {
        "plan_ms": measured(lambda: plan_lookup(inputs, offsets, len(keys))),
        "forward_ms": measured(lambda: lookup(x, keys, None, offsets, plan)),
        "both_ms": measured(lambda: lookup(x, keys, None, offsets, plan).backward(grad)),
    }


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = []
    for row in result["rows"]:
        cells = [
            "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**row[name]) for name in ("plan_ms", "forward_ms", "both_ms")
        ]
        lines.append((row["tiles"], *cells))
    made = made_by(result["command"], result["commit"], result["versions"])
    text = [f"# Lookup of an L3 layer, {result['machine']}", "", f"{made}.", "", NOTES.format(**result["facts"]), ""]
    return "\n".join([*text, *table(HEADS, lines)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
