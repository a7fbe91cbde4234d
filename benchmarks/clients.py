"""Run every example, library by library, and tell what came of it: a table of clients.

    python -m benchmarks.clients --ranks 2 --out FOLDER

FOLDER/NAME.md gets the table, FOLDER/NAME.json all losses. On GPUs if there are any, rank r on GPU r, else on the CPU.
A library that is not installed has a row that says so; `--only titan` runs rows whose example's name begins so.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import (
    REPOSITORY,
    add_options,
    device_name,
    git_commit,
    made_by,
    table,
    versions,
    write_result,
)

LIMIT = 240
"""Seconds for one row."""

NOTES = """\
Small models from configurations with random weights; each row is a file of [examples](../../examples), run by torchrun.

- **loss**: of the first and the last step.
- **plain loop**: the losses of all steps beside those of a plain loop on one device: the same bits, or the largest
  relative difference. Averages that DDP and FSDP2 make differ in the last bits, as do products of other shapes.
- **resumed**: the losses after a checkpoint beside those of the run that was not interrupted, likewise.
"""


@dataclass(frozen=True)
class Row:
    """One thing to run."""

    library: str
    """Its distribution, whose version is told."""
    what: str
    example: str
    layout: str = "one device"
    calls: tuple[dict[str, Any], ...] = ({},)
    """Arguments of `main`; {folder} is a new folder. Calls after the first resume from what one before them saved."""
    is_plain: bool = False
    """The plain loop, run by a library."""
    alone: bool = False
    """One process, however many devices there are."""
    also_needs: tuple[str, ...] = ()
    """Modules besides the library's."""


def resumed(steps: int, **options: Any) -> tuple[dict[str, Any], ...]:
    """Return the calls of `Trainer`: a whole run, and its second half."""
    return (
        {"steps": steps, "folder": "{folder}/whole", **options},
        {
            "steps": steps,
            "folder": "{folder}/resumed",
            "resume": f"{{folder}}/whole/checkpoint-{steps // 2}",
            **options,
        },
    )


SAVED = ({}, {"until": 15, "save": "{folder}/half"}, {"resume": "{folder}/half"})
TITAN = ({"steps": 10, "folder": "{folder}"}, {"steps": 10, "folder": "{folder}", "resume": 5})

ROWS = (
    Row("torch", "plain loop", "plain", is_plain=True, alone=True),
    Row("torch", "DistributedDataParallel", "ddp", "DDP", is_plain=True),
    Row("torch", "fully_shard, DCP", "fsdp2", "FSDP2", SAVED, is_plain=True),
    Row("torch", "fully_shard, two copies", "hsdp", "HSDP", is_plain=True),
    Row("torch", "divided state", "sharded", "sharded", is_plain=True),
    Row("torch", "parallelize_module", "tp_fsdp2", "TP x FSDP2", is_plain=True),
    Row("torch", "mixture of experts", "moe_ep", "EP, FSDP2"),
    Row("transformers", "Trainer", "hf_trainer", "DDP", resumed(20), also_needs=("accelerate",)),
    Row("transformers", "Trainer", "hf_trainer", "FSDP2", resumed(20, fsdp=True), also_needs=("accelerate",)),
    Row(
        "transformers",
        "optimizers=",
        "hf_trainer",
        "DDP",
        ({"steps": 20, "factory": False},),
        also_needs=("accelerate",),
    ),
    Row("transformers", "QK-clip on Llama", "hf_qk_clip", "DDP"),
    Row("accelerate", "prepare", "hf_accelerate", "DDP", is_plain=True),
    Row("accelerate", "prepare", "hf_accelerate", "FSDP2", ({"fsdp": True},), is_plain=True),
    Row("lightning", "automatic", "lightning_loops", is_plain=True, alone=True),
    Row("lightning", "manual", "lightning_loops", calls=({"loop": "manual"},), is_plain=True, alone=True),
    Row("lightning", "automatic", "lightning_loops", "DDP", is_plain=True),
    Row("lightning", "ModelParallelStrategy", "lightning_loops", "FSDP2", ({"loop": "fsdp2"},), is_plain=True),
    Row("trl", "SFTTrainer with LoRA", "trl_lora", "DDP", also_needs=("peft", "datasets")),
    Row("torchtitan", "Trainer, Llama 3", "titan", "FSDP2", TITAN),
    Row("timm", "vision transformer", "timm_images", "DDP", also_needs=("torchvision",)),
    Row("timm", "ResNet", "timm_images", "DDP", ({"model": "resnet"},), also_needs=("torchvision",)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, write the table, return the exit status: 1 if a library that is installed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of rows that are not on one device")
    parser.add_argument("--at-a-time", type=int, default=1, metavar="ROWS", help="rows to run beside each other")
    parser.add_argument("--only", nargs="+", default=[""], metavar="EXAMPLE", help="the plain loop is run in any case")
    add_options(parser, "clients")
    options = parser.parse_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("start it with python: it starts torchrun itself")
    results: list[dict[str, Any]] = []
    rows = [row for row in ROWS if row.example == "plain" or row.example.startswith(tuple(options.only))]
    with ThreadPoolExecutor(options.at_a_time) as pool:
        for row, result in zip(rows, pool.map(lambda row: timed(row, options.ranks), rows), strict=True):
            results.append({**asdict(row), **result})
            told = ", ".join(f"{key} {text}" for key, text in judged(results[-1], results[0]).items())
            print(f"{result['seconds']:5.0f} s  {row.example}, {row.what}, {row.layout}: {told}", flush=True)
    text = page(results, options)
    write_result(options.out / options.name, results, text)
    print(text)
    return int(any("error" in result for result in results))


def timed(row: Row, ranks: int) -> dict[str, Any]:
    """Return the result of `run`, and its seconds."""
    begun = time.monotonic()
    result = run(row, 1 if row.alone else ranks)
    return {**result, "seconds": time.monotonic() - begun}


def run(row: Row, ranks: int) -> dict[str, Any]:
    """Run a row on processes of its own: its ranks, version and losses, or an error, or what is missing."""
    missing = [name for name in (row.library, *row.also_needs) if importlib.util.find_spec(name) is None]
    if missing:
        return {"ranks": ranks, "version": "", "missing": missing}
    result: dict[str, Any] = {"ranks": ranks, "version": importlib.metadata.version(row.library)}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        calls = json.dumps(row.calls).replace("{folder}", folder)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, "-m", "benchmarks.clients", "--worker", row.example, calls, str(answer)]
        try:
            # Not in the repository: libraries write where they stand.
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=environment())
        except subprocess.TimeoutExpired:
            return {**result, "error": f"not done within {LIMIT} s"}
        if not answer.exists():
            return {**result, "error": last_error(done.stderr), "stderr": done.stderr[-20_000:]}
        return {**result, "losses": [losses_of(value) for value in json.loads(answer.read_text("utf-8"))]}


def environment() -> dict[str, str]:
    """Return the variables of the processes: this checkout first, nothing downloaded, one thread for each rank."""
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def last_error(stderr: str) -> str:
    """Return the line of the first rank's traceback that names the error."""
    lines = [line.partition("]: ")[2] or line for line in stderr.splitlines()]
    named = [line.strip() for line in lines if line[:1].strip() and "Error" in line.partition(":")[0]]
    return next((line for line in named if "ChildFailedError" not in line), "no error was told")[:300]


def losses_of(value: Any) -> list[float]:
    """Return the losses of what `main` returned: some return more."""
    losses: list[float] = value[0] if isinstance(value[0], list) else value
    return losses


def worker(example: str, calls: str, answer: str) -> None:
    """One rank: call the example's `main`; rank 0 writes what it returns."""
    import torch.distributed as dist

    sys.path.insert(0, str(REPOSITORY / "examples"))
    module = importlib.import_module(example)
    found = [module.main(**arguments) for arguments in json.loads(calls)]
    if os.environ["RANK"] == "0":
        Path(answer).write_text(json.dumps(found), "utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def compared(one: Sequence[float], other: Sequence[float]) -> str:
    """Return "same bits", or the largest relative difference of two rows of numbers."""
    if len(one) != len(other):
        return f"{len(one)} steps beside {len(other)}"
    largest = max(abs(x - y) / abs(y) for x, y in zip(one, other, strict=True))
    return "same bits" if largest == 0 else f"{largest:.0e}"


def judged(result: dict[str, Any], plain: dict[str, Any]) -> dict[str, str]:
    """Return the columns of the table that say what came of a row."""
    if "missing" in result:
        return {"loss": f"not installed: {', '.join(result['missing'])}"}
    if "error" in result:
        return {"loss": result["error"]}
    first, *later = result["losses"]
    told = {"loss": f"{first[0]:.3f} to {first[-1]:.3f}"}
    if result["is_plain"] and "losses" in plain and result is not plain:
        told["plain"] = compared(first, plain["losses"][0])
    if later:
        again = [loss for losses in later for loss in losses]
        told["resumed"] = compared(again, first[-len(again) :])
    return told


def page(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the table and how it was made, as Markdown."""
    import torch

    device, ranks = device_name(torch.cuda.is_available()), options.ranks
    command = f"python -m benchmarks.clients --ranks {ranks} --out FOLDER"
    heads = ("library", "what ran", "example", "layout", "ranks", "loss", "plain loop", "resumed")
    lines = [
        f"# Clients, on {f'{ranks} x ' if ranks > 1 and device != 'CPU' else ''}{device}",
        "",
        f"{made_by(command, options.commit or git_commit(), versions())}.",
        "",
        NOTES,
        *table(heads, [cells(result, judged(result, results[0])) for result in results]),
    ]
    return "\n".join(lines) + "\n"


def cells(result: dict[str, Any], told: dict[str, str]) -> list[str]:
    """Return the cells of a row."""
    return [
        f"{result['library']} {result['version']}".strip(),
        result["what"],
        result["example"] + ".py",
        result["layout"],
        str(result["ranks"]),
        told["loss"].replace("|", "/"),
        told.get("plain", ""),
        told.get("resumed", ""),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
