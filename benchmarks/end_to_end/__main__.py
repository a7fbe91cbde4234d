"""Time whole training steps of a Hugging Face Qwen3 under FSDP2, with one optimizer after the other.

    python -m benchmarks.end_to_end --out FOLDER --ranks 2 --peers FOLDER_OF_OTHER_LIBRARIES
    torchrun --standalone --nproc-per-node 2 -m benchmarks.end_to_end --out FOLDER

The first starts the second. The model has random weights and gets random tokens, new ones in every step; gradients come
from its backward pass. All contestants run in the same processes on a model made anew. FOLDER/NAME.md holds the table,
FOLDER/NAME.json everything that was measured; both are written anew after every contestant. It needs transformers, and
nothing else beside PyTorch and Quintic. `--device cpu --size tiny` tries the script.
"""

import argparse
import gc
import importlib.util
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.ranks import Team, join
from benchmarks.common.results import (
    REPOSITORY,
    add_options,
    describe_error,
    device_name,
    git_commit,
    in_cell,
    made_by,
    middle,
    number,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import MIB, Memory
from benchmarks.end_to_end.training import CONTESTANTS, DEFAULT, SIZES, Training, backend_of, new_model
from benchmarks.optimizer_step.layouts.contestants import default_ranks
from benchmarks.optimizer_step.measure import state_bytes

MODULE = "benchmarks.end_to_end"

NOTES = """\
{parameters:,} parameters: {model}; embeddings and head are one tensor.
{tokens:,} random tokens a step over all ranks, in rows of {length:,}. Weights, gradients and their reduction are
bfloat16, without a policy of mixed precision. `fully_shard` on each block and on the root, {compiled}; no
activations are computed again. Contestants one after the other in the same processes, each with a new model of the
same weights; of each time the slowest rank's.

- **step**: wall clock of {window} steps between two waits for all devices, over their number: as in training, the host
  runs ahead. Here and below: median, quartiles, and number of windows or steps.
- **single steps**: between events on the device that stand at the beginning of each step's forward pass.
- **optimizer**: between the end of backward, the last gradients reduced, and the beginning of the next forward pass on
  the device: `optimizer.step()` and `zero_grad()`, and what the device waits for the host.
- **share**: of the optimizer in a step: medians of the last two.
- **first step**: wall clock of the first one; a forward and backward pass before it has compiled the model.
- **peak**: most memory allocated on a rank, all steps and the making of the optimizer counted. **state**: on a rank.
- **loss**: of the last step, in nats: those of random tokens stay about ln {vocabulary:,} = {entropy:.2f}."""

HEADS = (
    *("contestant", "step (ms)", "single steps (ms)", "optimizer (ms)", "share", "first step (s)"),
    *("peak (MiB)", "state (MiB)", "loss"),
)


# ------------------------------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them; return 1 if a contestant failed that is installed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("the model is Hugging Face's Qwen3: install transformers 4.51 or newer, it is not importable")
    if "LOCAL_RANK" not in os.environ:
        return start_ranks(words, options)
    sys.path += [str(Path(folder).resolve()) for folder in options.peers]
    team = join(options.device, MODULE)
    torch._dynamo.config.recompile_limit = 64  # peers compile one function for many shapes
    result = describe(words, options, team)
    deadline = time.monotonic() + options.budget
    for name in options.only or DEFAULT:
        late = team.from_all(time.monotonic() > deadline)[0]
        row = {"error": "not measured: the time was over"} if late else measured(name, options, team)
        result["rows"].append({"contestant": name, **row})
        if dist.get_rank() == 0:
            print(short_line(result["rows"][-1]), flush=True)
            write_result(options.out / options.name, result, page(result))
        if "lost" in row:  # ranks do not stand at the same place any more
            break
    if dist.get_rank() == 0:
        print("\n" + "\n".join(table(HEADS, map(cells, result["rows"]))), flush=True)
    failed = [row for row in result["rows"] if "error" in row and not row.get("missing")]
    if any("lost" in row for row in failed):
        os._exit(1)  # others may wait for this rank in a collective, as would its end
    dist.destroy_process_group()
    return int(bool(failed))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "end-to-end")
    parser.add_argument("--ranks", type=int, default=default_ranks(), help="where torchrun has not started them")
    parser.add_argument("--size", choices=SIZES, default="0.47b", help="of the model")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help=f"by default {', '.join(DEFAULT)}")
    parser.add_argument("--peers", action="append", default=[], help="folder with the packages of other libraries")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--windows", type=int, default=6, help="each between two waits for the devices")
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--budget", type=float, default=150, help="start no contestant after this many seconds")
    options = parser.parse_args(words)
    if options.windows < 2 or options.steps < 2:
        parser.error("--windows and --steps: at least 2 each")
    return options


def start_ranks(words: Sequence[str], options: argparse.Namespace) -> int:
    """Run this module again on all ranks; return its status."""
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
    environment = {
        "OMP_NUM_THREADS": threads,
        "TRITON_CACHE_AUTOTUNING": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return subprocess.run([*launcher, "-m", MODULE, *words], env=environment, check=False).returncode


def describe(words: Sequence[str], options: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Return the result before anything is measured, with no rows. All ranks must call it."""
    names = {str(options.out): "FOLDER", **dict.fromkeys(options.peers, "PEERS")}
    return {
        "command": recorded_command(MODULE, words, names),
        "commit": options.commit or git_commit(),
        "devices": team.from_all(device_name(team.cuda)),
        "versions": versions("transformers", nccl=team.cuda),
        "size": options.size,
        "steps_of_a_window": options.steps,
        "backend": backend_of(team),
        "parameters": sum(param.numel() for param in new_model(SIZES[options.size], torch.device("meta")).parameters()),
        "rows": [],
    }


# --------------------------------------------------------------------------------------------------------- measurement


def measured(name: str, options: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Return the measurements of one contestant, or its error. All ranks must call it."""
    training, error = None, None
    gc.collect()
    memory = Memory(team.cuda)
    try:
        training = Training(SIZES[options.size], CONTESTANTS[name], team)
    except Exception as found:  # whatever a library may raise: it is the result
        error = found
        if not isinstance(found, ImportError):
            traceback.print_exc()
    errors = [told for told in team.from_all(None if error is None else describe_error(error)) if told]
    if training is None or errors:
        return {"error": errors[0], **({"missing": True} if isinstance(error, ImportError) else {})}
    try:
        row = training.measure(options)
    except Exception as found:
        traceback.print_exc()
        return {"error": describe_error(found), "lost": True}
    row["peak_mib"] = max(team.from_all(memory.peak())) / MIB
    row["state_mib"] = max(team.from_all(state_bytes(training.optimizer.state))) / MIB
    return row


# ---------------------------------------------------------------------------------------------------------------- page


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    size, devices = SIZES[result["size"]], result["devices"]
    compiled = f'blocks compiled with `torch.compile(backend="{result["backend"]}")`'
    notes = NOTES.format(
        parameters=result["parameters"],
        model=size,
        tokens=size.tokens,
        length=size.length,
        compiled=compiled,
        window=result["steps_of_a_window"],
        vocabulary=size.vocabulary,
        entropy=math.log(size.vocabulary),
    )
    lines = [
        f"# Whole training steps of a Qwen3 under FSDP2, on {len(devices)} x {devices[0]}",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}.",
        "",
        notes,
        "",
        *table(HEADS, map(cells, result["rows"])),
    ]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    if "error" in row:
        return [row["contestant"], in_cell(row["error"]), *[""] * (len(HEADS) - 2)]
    return [
        row["contestant"],
        *(times(row[kind]) for kind in ("step_ms", "single_ms", "optimizer_ms")),
        f"{row['optimizer_ms']['median'] / row['single_ms']['median']:.1%}",
        f"{row['first_step_s']:.2f}",
        number(row, "peak_mib"),
        number(row, "state_mib"),
        f"{row['losses'][-1]:.2f}",
    ]


def times(found: dict[str, float]) -> str:
    """Return median, quartiles and number of some times."""
    return f"{found['median']:.4g} ({found['q1']:.4g} to {found['q3']:.4g}; n {found['n']})"


def short_line(row: dict[str, Any]) -> str:
    """Return one row for the terminal."""
    if "error" in row:
        return f"{row['contestant']:14} {row['error']}"
    times = f"step {middle(row, 'step_ms')} ms, optimizer {middle(row, 'optimizer_ms')} ms"
    return f"{row['contestant']:14} {times}, first {row['first_step_s']:.2f} s, peak {number(row, 'peak_mib')} MiB"


if __name__ == "__main__":
    sys.exit(main())
