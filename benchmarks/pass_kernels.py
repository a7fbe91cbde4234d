"""Where does the time of a pass go? The kernels of forward and backward of one micro-batch, Quintic's and nanochat's.

    python -m benchmarks.pass_kernels --depth 12 --peers FOLDER --out FOLDER

Both models get the same random tokens in documents of 1,500. Matrices that start at zero get small random values:
products with zeros need less power, so that the clock, and every figure, would be higher than in training. A pass is
first timed without a profiler, the contestants in turns; then its kernels are recorded and grouped by name.

`--variant fa4 attention=fa4 --only quintic quintic-fa4` compares another attention, `--variant graph capture=1` a CUDA
graph of the pass, `--variant cat max_pointwise_cat_inputs=1` another setting of the compiler, by its name in
`torch._inductor.config`.
"""

import argparse
import ast
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common.results import (
    add_options,
    device_name,
    git_commit,
    made_by,
    middle,
    print_table,
    recorded_command,
    spread,
    table,
    versions,
    write_result,
)
from benchmarks.training.nanochat_loop import new_model
from quintic.kernels.attention.attention import fastest_attention, needs_document_starts
from quintic.kernels.graphs import capture
from quintic.model.gpt import GPT, GPTConfig
from quintic.train.recipe import build_model

MODULE = "benchmarks.pass_kernels"
DOCUMENT = 1500
HEADS = ("contestant", "kind", "kernels", "ms", "share of the pass")
# What a kernel does, by the first of these that its name matches.
KINDS = (
    ("attention, backward", r"(flash|fmha|attn|attention).*(bwd|backward)|(bwd|backward).*(flash|fmha|attn)"),
    ("attention, forward", r"flash|fmha|attn|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|wgmma|scaled_mm|matmul|^_linear_kernel"),
    ("embeddings, both passes", r"embedding|index_put|scatter|sort|radix"),
    # Of quintic.kernels.loss, and of nanochat's loss as inductor names it.
    ("loss", r"^_row_kernel|^_scale_rows|softmax|tanh|nll_loss"),
    ("fused element-wise work and sums", r"triton_|elementwise|reduce|vectorized"),
    ("copies", r"memcpy|memset|copy"),
)

Pass = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    inputs, targets, starts = batch(options)
    passes: dict[str, Pass] = {}
    flops: dict[str, float] = {}
    for name in options.only:
        build = nanochat_pass if name == "nanochat" else quintic_pass
        passes[name], per_token = build(options, name, inputs, targets, starts)
        flops[name] = per_token * inputs.numel()
        for _ in range(options.warm_up):
            passes[name]()
    torch.cuda.synchronize()
    times = timed(passes, options.passes)
    result: dict[str, Any] = {
        "command": recorded_command(MODULE, words, {str(options.out): "FOLDER", str(options.peers): "PEERS"}),
        "commit": options.commit or git_commit(),
        "machine": device_name(True),
        "versions": versions(),
        "depth": options.depth,
        "tokens": inputs.numel(),
        "rows": [
            {"contestant": name, "ms": spread(times[name]), "flops": flops[name], "kernels": recorded(one)}
            for name, one in passes.items()
        ],
    }
    write_result(options.out / options.name, result, page(result))
    print_table(HEADS, lines(result["rows"]))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "pass-kernels")
    parser.add_argument("--peers", type=Path, help="folder that holds nanochat's repository")
    parser.add_argument("--only", nargs="+", default=["quintic", "nanochat"], help="quintic, quintic-NAME, nanochat")
    parser.add_argument(
        "--variant", nargs="+", action="append", default=[], metavar=("NAME", "OPTION=VALUE"), help="for quintic-NAME"
    )
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--warm-up", type=int, default=20, help="passes before any is timed")
    parser.add_argument("--passes", type=int, default=40, help="that are timed, of each contestant")
    options = parser.parse_args(words)
    if "nanochat" in options.only and options.peers is None:
        parser.error("nanochat needs --peers, the folder that its repository is in")
    known = {"quintic", "nanochat", *(f"quintic-{name}" for name, *_ in options.variant)}
    if unknown := sorted({*options.only} - known):
        parser.error(f"--only {unknown[0]}: choose from {', '.join(sorted(known))}, or describe it with --variant")
    return options


def variant(options: argparse.Namespace, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a contestant changes: options of the model, and settings of the compiler."""
    words = next((words for own, *words in options.variant if name == f"quintic-{own}"), [])
    given = dict(word.split("=", 1) for word in words)
    model = {key: given.pop(key) for key in ("attention", "fp8", "capture") if key in given}
    return model, {key: ast.literal_eval(value) for key, value in given.items()}


def batch(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (B, T) inputs with a document's beginning (token 0) at each row's first token, targets, and starts."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.seq_len)
    inputs, targets = (torch.randint(1, options.vocab_size, shape, generator=generator) for _ in range(2))
    flat = inputs.view(-1)
    flat[:: options.seq_len] = 0
    flat[::DOCUMENT] = 0
    ends = torch.tensor([flat.numel()])
    starts = torch.cat([(flat == 0).nonzero().flatten(), ends]).int()
    return inputs.cuda(), targets.cuda(), starts.cuda()


def fill_zeros(model: torch.nn.Module) -> None:
    """Give matrices of zeros small values."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2 and not weight.any():
                weight.normal_(std=0.02)


def quintic_pass(options: argparse.Namespace, name: str, *tensors: torch.Tensor) -> tuple[Pass, float]:
    """Return Quintic's forward and backward, and its floating-point operations per token."""
    inputs, targets, starts = tensors
    sizes = GPTConfig.from_depth(options.depth, vocab_size=options.vocab_size, seq_len=options.seq_len, bos_id=0)
    changed, settings = variant(options, name)
    attention: Any = changed.get("attention") or fastest_attention(inputs.device, torch.bfloat16)[0]
    assert needs_document_starts(attention)
    model: GPT = build_model(sizes, device=inputs.device, dtype=torch.bfloat16, attention=attention, seed=0)
    fill_zeros(model)
    if "fp8" in changed:
        recipe: Any = changed["fp8"]
        model.use_fp8(recipe)
    # Only as options of `torch.compile`: models share compiled code, whatever the settings in its modules then are.
    compile_with = functools.partial(torch.compile, options=settings or None)
    with mock.patch.object(torch, "compile", compile_with):
        model.compile_parts()

    def one() -> None:
        model(inputs, targets, document_starts=starts).backward()

    if "capture" in changed:
        one()  # compiles, and makes the gradients that the graph adds to
        one = capture(one)[0].replay
    return one, model.flops_per_token()


def nanochat_pass(options: argparse.Namespace, name: str, *tensors: torch.Tensor) -> tuple[Pass, float]:
    """Return nanochat's forward and backward, and its floating-point operations per token."""
    inputs, targets, _ = tensors
    sys.path.insert(0, str(options.peers / "nanochat"))
    torch.set_float32_matmul_precision("high")
    model, _ = new_model(options.depth, options.vocab_size, options.seq_len, inputs.device)
    fill_zeros(model)
    compiled = torch.compile(model, dynamic=False)

    def one() -> None:
        compiled(inputs, targets).backward()

    return one, model.estimate_flops()


def timed(passes: dict[str, Pass], count: int, in_a_row: int = 5) -> dict[str, list[float]]:
    """Return milliseconds of passes, a few of each contestant in turns, so that all meet the same clock."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(-(-count // in_a_row)):
        for name, one in passes.items():
            one()
            for _ in range(in_a_row):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                one()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
    return times


def recorded(one: Pass, passes: int = 5) -> list[dict[str, Any]]:
    """Return name, number and milliseconds per pass of each kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            one()
        torch.cuda.synchronize()
    kernels = [
        {"name": event.key, "count": event.count / passes, "ms": event.self_device_time_total / 1000 / passes}
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def kind_of(name: str) -> str:
    """Return what a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "others")


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the lines of the table: for each contestant the pass, then its kinds of kernels."""
    result = []
    for row in rows:
        whole = sum(kernel["ms"] for kernel in row["kernels"])
        rate = row["flops"] / row["ms"]["median"] / 1e9
        result.append(
            [row["contestant"], f"a pass; {rate:.0f} TFLOP/s", f"{sum(k['count'] for k in row['kernels']):.0f}",
             middle(row, "ms"), f"{100 * whole / row['ms']['median']:.0f} % in kernels"]
        )  # fmt: skip
        kinds: dict[str, list[dict[str, Any]]] = {}
        for kernel in row["kernels"]:
            kinds.setdefault(kind_of(kernel["name"]), []).append(kernel)
        for kind, kernels in sorted(kinds.items(), key=lambda item: -sum(k["ms"] for k in item[1])):
            ms = sum(kernel["ms"] for kernel in kernels)
            count = sum(kernel["count"] for kernel in kernels)
            result.append([row["contestant"], kind, f"{count:.0f}", f"{ms:.2f}", f"{100 * ms / whole:.1f} %"])
    return result


def page(result: dict[str, Any]) -> str:
    """Return the page: kinds of kernels, then each contestant's longest ones."""
    text = [
        f"# Kernels of a pass, {result['machine']}", "",
        made_by(result["command"], result["commit"], result["versions"]) + ".", "",
        f"Forward and backward of {result['tokens']:,} random tokens at depth {result['depth']}, no optimizer.",
        "", *table(HEADS, lines(result["rows"])),
    ]  # fmt: skip
    for row in result["rows"]:
        kernels = [[f"`{k['name'][:100]}`", f"{k['count']:.0f}", f"{k['ms']:.3f}"] for k in row["kernels"][:40]]
        text += ["", f"## {row['contestant']}", "", *table(("kernel", "number", "ms"), kernels)]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
