"""Time `optimizer.step()` on a CPU for nanoGPTs of four sizes, Quintic and its peers in turn in one process.

    python -m benchmarks.cpu_step --out benchmarks/results/NAME [--threads 2] [--isa AVX512_CORE]

Float32 weights and random normal gradients; nanoGPT's own names and shapes, with its query, key and value weights in
one matrix for everybody. A round gives each optimizer one step, in an order that changes from round to
round, so that what else happens on the machine meets all alike. What is not installed is left out by name. `--isa`
hides newer instructions from oneDNN (bfloat16 products are AVX512_BF16's or AMX's) and from Quintic. Writes NAME.json
and NAME.md. Nothing else should run meanwhile.
"""

import argparse
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.results import (
    git_commit,
    made_by,
    processor,
    recorded_command,
    spread,
    table,
    versions,
    write_result,
)

# (layers, width), with a vocabulary of 65 characters and a context of 256, as in nanoGPT's Shakespeare example.
SIZES = {"0.13M": (2, 64), "2.4M": (4, 224), "10.8M": (6, 384), "28M": (9, 512)}
LR, ADAMW_LR, WEIGHT_DECAY = 0.02, 0.001, 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result files, without ending; printed alone by default")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="+", help="names of optimizers, or parts of them")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=15, help="for the timed rounds of each size")
    parser.add_argument("--isa", help="newest instructions that oneDNN may use, see its ONEDNN_MAX_CPU_ISA")
    options = parser.parse_args()
    if options.isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.isa  # read when torch is first imported
    import torch

    torch.set_num_threads(options.threads)
    tables = {size: measure(size, options.only, options.seconds) for size in options.sizes}
    result = {
        "command": recorded_command("benchmarks.cpu_step", sys.argv[1:], {}),
        "commit": git_commit(),
        "machine": {
            "cpu": with_instructions(processor()),
            "threads": options.threads,
            "isa": options.isa,
            "system": platform.system(),
        },
        "versions": versions("pytorch_optimizer"),
        "sizes": tables,
    }
    page = describe(result)
    print(page)
    if options.out:
        write_result(options.out, result, page)
    return 0


# -- the model and the optimizers ------------------------------------------------------------------------------------


def nano_gpt(layers: int, width: int) -> Any:
    """Return nanoGPT's parameters under its names, with gradients; it has no forward pass."""
    import torch
    from torch import nn

    def block() -> nn.Module:
        return nn.ModuleDict(
            {
                "ln_1": nn.LayerNorm(width, bias=False),
                "attn": nn.ModuleDict({"c_attn": linear(width, 3 * width), "c_proj": linear(width, width)}),
                "ln_2": nn.LayerNorm(width, bias=False),
                "mlp": nn.ModuleDict({"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width)}),
            }
        )

    def linear(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=False)

    model = nn.ModuleDict(
        {
            "transformer": nn.ModuleDict(
                {
                    "wte": nn.Embedding(65, width),
                    "wpe": nn.Embedding(256, width),
                    "h": nn.ModuleList(block() for _ in range(layers)),
                    "ln_f": nn.LayerNorm(width, bias=False),
                }
            ),
            "lm_head": linear(width, 65),
        }
    )
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator) / 1000
    return model


def halves(model: Any) -> tuple[list[Any], list[Any]]:
    """Return the hidden matrices, and the rest."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if ".h." in name and param.ndim == 2]
    return matrices, [param for name, param in named if ".h." not in name or param.ndim != 2]


def quintic_muon(model: Any) -> list[Any]:
    import quintic

    rates = {"lr": LR, "adamw_lr": ADAMW_LR, "weight_decay": WEIGHT_DECAY, "adamw_weight_decay": WEIGHT_DECAY}
    # One matrix, as the others take it; without the rule it is that, too, with a warning.
    rule = quintic.Rule("*.c_attn.weight", "muon", quintic.Matrix())
    return [quintic.Muon(quintic.param_groups(model, rules=[rule]), **rates)]


def torch_muon(model: Any) -> list[Any]:
    import torch

    matrices, others = halves(model)
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=WEIGHT_DECAY)
    return [muon, torch.optim.AdamW(others, lr=ADAMW_LR, weight_decay=WEIGHT_DECAY, fused=True)]


def pytorch_optimizer_muon(model: Any) -> list[Any]:
    from pytorch_optimizer import Muon

    matrices, others = halves(model)
    decay = {"weight_decay": WEIGHT_DECAY}
    groups = [{"params": matrices, "use_muon": True, "lr": LR}, {"params": others, "use_muon": False, "lr": ADAMW_LR}]
    return [Muon([group | decay for group in groups])]


def torch_adamw(model: Any) -> list[Any]:
    import torch

    return [torch.optim.AdamW(model.parameters(), lr=ADAMW_LR, weight_decay=WEIGHT_DECAY, fused=True)]


CONTESTANTS: dict[str, Callable[[Any], list[Any]]] = {
    "quintic.Muon": quintic_muon,
    "torch.optim.Muon + AdamW": torch_muon,
    "pytorch_optimizer Muon": pytorch_optimizer_muon,
    "torch.optim.AdamW": torch_adamw,
}

# -- measuring -------------------------------------------------------------------------------------------------------


def measure(size: str, only: list[str] | None, seconds: float) -> dict[str, Any]:
    """Return for each optimizer the median, quartiles and number of its steps in ms, or why it was not measured."""
    steps: dict[str, Callable[[], None]] = {}
    rows: dict[str, Any] = {}
    for name, build in CONTESTANTS.items():
        if only and not any(part in name for part in only):
            continue
        try:
            steps[name] = stepper(build(nano_gpt(*SIZES[size])))
        except ImportError as error:
            rows[name] = {"error": str(error)}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    shuffled = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 10:
        for name in shuffled.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    for name, found in times.items():
        rows[name] = spread(found)
    return rows


def stepper(optimizers: list[Any]) -> Callable[[], None]:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


# -- the page --------------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    """Return the result as markdown."""
    machine = result["machine"]
    isa = f"; instructions up to {machine['isa']}" if machine["isa"] else ""
    lines = [
        f"# `optimizer.step()` on a CPU: {machine['cpu']}, {machine['threads']} threads{isa}",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}.",
        "",
        "nanoGPTs with float32 weights and random normal gradients. Median ms of n steps (quartiles); all optimizers "
        "in turn in one process. The ratio is to `torch.optim.Muon` with fused AdamW.",
        "",
    ]
    cells = []
    for size, rows in result["sizes"].items():
        base = rows.get("torch.optim.Muon + AdamW", {}).get("median")
        for name, row in rows.items():
            if "error" in row:
                cells.append([size, name, f"not measured: {row['error']}", "", "", ""])
                continue
            quartiles = f"{row['q1']:.4g} to {row['q3']:.4g}"
            ratio = f"{row['median'] / base:.2f}" if base else "-"
            cells.append([size, name, f"{row['median']:.4g}", quartiles, str(row["n"]), ratio])
    lines += table(("parameters", "optimizer", "ms", "quartiles", "n", "ratio"), cells)
    return "\n".join(lines) + "\n"


def with_instructions(name: str) -> str:
    """Return the processor's name, and which of the instructions for bfloat16 products it has."""
    info = Path("/proc/cpuinfo")
    known = info.read_text(encoding="utf-8") if info.exists() else ""
    found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in known]
    return f"{name} ({', '.join(found) or 'no bfloat16 instructions'})"


if __name__ == "__main__":
    sys.exit(main())
