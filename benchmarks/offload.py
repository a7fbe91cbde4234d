"""Time `optimizer.step()` with the state in device memory and in host memory, beside what the bus allows.

    python -m benchmarks.offload --out FOLDER --set gpt124m qwen1.7b

Weights, gradients and timing are those of `optimizer_step`. For every set and variant of the options two optimizers
step the same weights, one after the other; after three steps weights and state must have the same bits. FOLDER/NAME.md
holds the tables, FOLDER/NAME.json everything that was measured; both are written anew after every row. What cannot run
is reported with its error. `--device cpu --set tiny` tries the script.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import quintic
from benchmarks.common.results import (
    add_options,
    describe_error,
    device_name,
    git_commit,
    made_by,
    recorded_command,
    spread,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import MIB, Memory, find_sync, synchronize, time_device, time_steps
from benchmarks.optimizer_step.contestants import SETS, Weights, quintic_muon
from benchmarks.optimizer_step.measure import make_weights, scheduler
from quintic.optim.rules.rule import PARAM_SHAPED_STATE

VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "mantissa": {"master": "mantissa"},
    "neuron": {"normalize": "neuron"},
}

COMPARED_STEPS = 3
WARMUP_STEPS = 3
STEPS_IN_A_ROW = 10

COLUMNS = """\
- **idle**: CUDA events before and after `step()`, the device idle before, host included. **until stored**: wall clock
  of the same until all state is back in host memory.
- **busy**: the same events with the device kept busy until the host is done.
- **in a row**: steps one after the other, time of each: nothing is left out, and nothing overlaps with anything else.
- **host**: wall clock of the call on the empty queue of an idle device.
- **moved**: state copied to the device in a step, and as much back. **rate**: that over the time in a row, each way.
- **state**: on the device after construction. **peak**: most memory allocated over weights and gradients, in any step.
- **bits**: whether weights and state are those of the other row after three steps. **syncs**: whether `step()` passes
  `torch.cuda.set_sync_debug_mode("error")`."""

HEADS = ("options", "state in", "in a row", "idle", "until stored", "busy", "host", "moved", "rate GB/s")
HEADS += ("state", "buffers", "peak", "bits", "syncs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "offload")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["gpt124m", "qwen1.7b"], dest="sets")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["muon"], dest="variants")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    cuda = options.device == "cuda"
    result: dict[str, Any] = {
        "command": recorded_command("benchmarks.offload", given, {str(options.out): "FOLDER"}),
        "commit": options.commit or git_commit(),
        "device": device_name(cuda),
        "dtype": options.dtype,
        "versions": versions(),
        "bus": bus_rates() if cuda else {},
        "rows": [],
    }
    for name in options.sets:
        for variant in options.variants:
            kept: dict[str, torch.Tensor] = {}
            for offload in (False, True):
                row = {"set": name, "variant": variant, "offload": offload}
                try:
                    row |= measure(name, VARIANTS[variant], offload, options, kept)
                except (RuntimeError, ValueError, AssertionError) as error:
                    row["error"] = describe_error(error)
                result["rows"].append(row)
                print(short_line(row), flush=True)
                write_result(options.out / options.name, result, page(result))
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
    return int(any("error" in row or row.get("same_bits") is False for row in result["rows"]))


def measure(
    name: str, variant: dict[str, Any], offload: bool, options: argparse.Namespace, kept: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Measure one optimizer.

    Args:
        name: of the set.
        variant: options of the optimizer.
        offload: where its state is.
        options: the command line's.
        kept: weights and state of the other optimizer after some steps, filled by the first and emptied by the second.
    """
    cuda = options.device == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    weights = make_weights(SETS[name], torch.device(options.device), dtype)
    memory = Memory(cuda)
    optimizer = quintic_muon(weights, offload=offload, **variant)
    row: dict[str, Any] = {"state_mib": state_on_device(optimizer, cuda) / MIB}
    for _ in range(COMPARED_STEPS):
        optimizer.step()
    found = values_of(weights, optimizer)
    if kept:
        row["same_bits"] = kept.keys() == found.keys() and all(torch.equal(kept.pop(k), found[k]) for k in list(kept))
        kept.clear()
    else:
        kept |= found
    del found
    before = scheduler([optimizer])
    for index in range(WARMUP_STEPS):
        before(index)
        optimizer.step()
    synchronize(cuda)
    plan = optimizer.plan()
    moved = sum(bucket.offloaded.num_bytes for bucket in plan if bucket.offloaded is not None)
    row |= {
        "moved_mib": moved / MIB,
        "buffers_mib": plan.offload_buffer_bytes / MIB,
        "planned_mib": plan.peak_workspace_bytes / MIB,
        "buckets": len(plan.buckets),
        "plan": str(plan),
    }
    idle, host = time_steps(optimizer.step, before, options.steps, cuda)
    in_a_row = time_in_a_row(optimizer.step, before, max(2, options.steps // 4), cuda)
    row |= {"idle_ms": spread(idle), "host_ms": spread(host), "in_a_row_ms": spread(in_a_row)}
    row["until_stored_ms"] = spread(time_until_stored(optimizer, before, options.steps, cuda))
    if cuda:
        row["busy_ms"] = spread(time_device(optimizer.step, before, options.steps, statistics.median(host)))
        row["peak_mib"] = memory.peak() / MIB
        row["syncs"] = find_sync(optimizer.step, before)
    if moved:
        row["rate_gb_s"] = moved / 1e6 / statistics.median(in_a_row)
        row["switch_ms"] = time_switches(optimizer, cuda)
    return row


def state_on_device(optimizer: quintic.Muon, cuda: bool) -> int:
    """Return the bytes of state on the device (without one: all of it)."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in tensors if value.is_cuda or not cuda)


def values_of(weights: Weights, optimizer: quintic.Muon) -> dict[str, torch.Tensor]:
    """Return copies of weights and state in host memory."""
    copies = {}
    for number, param in enumerate(weights.all):
        tensors = {"weight": param.detach(), **optimizer.state[param]}
        for key, value in tensors.items():
            if key == "weight" or key in PARAM_SHAPED_STATE:
                copies[f"{number} {key}"] = value.to("cpu", copy=True)
    return copies


def time_in_a_row(step: Callable[[], None], before: Callable[[int], None], repetitions: int, cuda: bool) -> list[float]:
    """Return milliseconds per step of runs of some steps, until everything is over."""
    times = []
    for _ in range(repetitions):
        synchronize(cuda)
        start = time.perf_counter()
        for index in range(STEPS_IN_A_ROW):
            before(index)
            step()
        synchronize(cuda)
        times.append(1000 * (time.perf_counter() - start) / STEPS_IN_A_ROW)
    return times


def time_until_stored(optimizer: quintic.Muon, before: Callable[[int], None], number: int, cuda: bool) -> list[float]:
    """Return milliseconds from the call of a step on an idle device until its state can be read."""
    times = []
    for index in range(number):
        before(index)
        synchronize(cuda)
        start = time.perf_counter()
        optimizer.step()
        synchronize(cuda)
        times.append(1000 * (time.perf_counter() - start))
    return times


def time_switches(optimizer: quintic.Muon, cuda: bool) -> dict[str, float]:
    """Return milliseconds that it takes to bring all state to the device and to host memory; it ends there."""
    times: dict[str, float] = {}
    for on, name in ((False, "to_device"), (True, "to_host")):
        synchronize(cuda)
        start = time.perf_counter()
        optimizer.offload(on)
        synchronize(cuda)
        times[name] = 1000 * (time.perf_counter() - start)
    return times


def bus_rates(num_bytes: int = 2**28, repetitions: int = 10) -> dict[str, float]:
    """Return the GB/s of copies of pinned memory, each way alone and both at a time."""
    hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(load: bool, store: bool) -> float:
        for measured in (False, True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repetitions if measured else 1):
                if load:
                    with torch.cuda.stream(streams[0]):
                        there[0].copy_(hosts[0], non_blocking=True)
                if store:
                    with torch.cuda.stream(streams[1]):
                        hosts[1].copy_(there[1], non_blocking=True)
            torch.cuda.synchronize()
        return repetitions * num_bytes / 1e9 / (time.perf_counter() - start)

    return {
        "to_device_gb_s": rate(True, False),
        "to_host_gb_s": rate(False, True),
        "each_way_at_once_gb_s": rate(True, True),
    }


# -- results ----------------------------------------------------------------------------------------------------------


def short_line(row: dict[str, Any]) -> str:
    """Return a row as a line to print."""
    what = f"{row['set']:10} {row['variant']:10} {'host' if row['offload'] else 'device':7}"
    if "error" in row:
        return f"{what} {row['error']}"
    bits = {True: "same bits", False: "OTHER BITS", None: ""}[row.get("same_bits")]
    return (
        f"{what} in a row {row['in_a_row_ms']['median']:8.2f} ms  idle {row['idle_ms']['median']:8.2f} ms  "
        f"state {row['state_mib']:8.1f} MiB  moved {row['moved_mib']:8.1f} MiB  {bits}"
    )


def page(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = [
        f"# Optimizer state in host memory, {result['device']}",
        "",
        f"{made_by(result['command'], result['commit'], result['versions'])}; {result['dtype']} weights.",
        "Times in milliseconds, medians; memory in MiB.",
        "",
        COLUMNS,
    ]
    if result["bus"]:
        bus = result["bus"]
        lines += [
            "",
            f"The bus alone, pinned memory, pieces of 256 MiB: {bus['to_device_gb_s']:.1f} GB/s to the device, "
            f"{bus['to_host_gb_s']:.1f} to the host,",
            f"{bus['each_way_at_once_gb_s']:.1f} each way at the same time.",
        ]
    for name in dict.fromkeys(row["set"] for row in result["rows"]):
        rows = [cells(row) for row in result["rows"] if row["set"] == name]
        lines += ["", f"## {name}", "", *table(HEADS, rows)]
    return "\n".join(lines) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    where = "host" if row["offload"] else "device"
    if "error" in row:
        return [row["variant"], where, row["error"], *[""] * (len(HEADS) - 3)]
    times = [
        f"{row[key]['median']:.2f}" if key in row else "-"
        for key in ("in_a_row_ms", "idle_ms", "until_stored_ms", "busy_ms", "host_ms")
    ]
    sizes = [f"{row[key]:,.0f}" if key in row else "-" for key in ("state_mib", "buffers_mib", "peak_mib")]
    moved = [f"{row['moved_mib']:,.0f}", f"{row['rate_gb_s']:.1f}" if "rate_gb_s" in row else "-"]
    bits = {True: "same", False: "**other**", None: "-"}[row.get("same_bits")]
    return [row["variant"], where, *times, *moved, *sizes, bits, row.get("syncs", "-")]


if __name__ == "__main__":
    sys.exit(main())
