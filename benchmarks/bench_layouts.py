"""Step the same weights under every layout, on several devices: are they the same to the last bit, and at what cost?

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_layouts.py --out FOLDER --set gpt124m qwen1.7b

The first rank writes tables to FOLDER/NAME.md and everything that was measured to FOLDER/NAME.json, after each set of
weights. What fails is reported with its error, and the next layout follows: each has a process group of its own, which
is given up if a rank does not come back within `--limit` seconds. `--device cpu --set tiny` tries the script.

The sets of weights stand in `optimizer_step_contestants.py`.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import shlex
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import optimizer_step_measure as measure  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_kernels import describe_error  # noqa: E402
from optimizer_step import describe, git_commit, in_cell, middle  # noqa: E402
from optimizer_step_contestants import SETS, WEIGHT_DECAY, Weights  # noqa: E402
from optimizer_step_measure import MIB, WORKSPACE_TOLERANCE  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

import quintic  # noqa: E402
from quintic.optim.comms import Pending, start_all_gather, start_all_to_all  # noqa: E402
from quintic.optim.exchange import Exchange  # noqa: E402
from quintic.optim.plan import Bucket, direction_dtype, update_dtype  # noqa: E402

Result = TypeVar("Result")

LAYOUTS = ("single", "averaged", "sharded", "replicated", "fsdp2", "tp")

# The dimension along which these layouts cut matrices; what AdamW updates is always cut along the first.
CUT_DIMENSION = {"fsdp2": 0, "tp": 1}

# Steps after which the weights are compared.
COMPARED_STEPS = 3

# Large enough that most bf16 weights change in each step: equality of weights that stay would say nothing.
LR, ADAMW_LR = 0.02, 0.003

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Gradients that are averaged without a bucket go by so many entries when communication is timed alone.
ENTRIES_AT_A_TIME = 2**28

NOTES = """\
Layouts: **single**: every rank does all the work by itself, as one device would. **averaged**, **sharded**,
**replicated**: plain tensors, with this `comms`. **fsdp2**: `DTensor`s cut along the first dimension, as by
`fully_shard`. **tp**: matrices cut along the second dimension, the rest along the first. Every rank is given the same
gradients, anew for each compared step: the mean of 2, 4 or 8 equal ones is exact, so that those that average must end
with the same bits, too.

- **differing**: entries of all weights whose bits are not those of single after {steps} steps, on the worst rank.
- **step**: the device idle before, so host included. **device**: the same with the device kept busy until the host is
  done, what a step costs in a training loop whose host runs ahead. **host**: wall clock of the call on the empty queue
  of an idle device. Medians of n steps, the layouts in turn; of each step the time of the slowest rank.
- **exchange**: the collectives of the plan alone, one after the other, with buffers of the same sizes and nothing
  computed, the device kept busy, too. A step that hides no communication takes its computing and this. **sent**: what
  leaves a rank in these, at most.
- **temporary**: most memory allocated over weights, gradients and state in a later step, and what the plan promises, of
  the rank where the former is largest. Bold where any rank needs over {tolerance:.0%} more than its plan.
- **balance**: operations of orthogonalisation of the busiest rank over the mean of all."""


class Failed(Exception):
    """An action raised on some rank; raised on all of them, with what the ranks said, the first to fail first."""


@dataclass(frozen=True)
class Team:
    """This process among the others.

    Attributes:
        device: of this process.
        limit: seconds that one action may take.
        control: a gloo group of all ranks. Layouts do not use it, so it works whatever becomes of their own groups.
    """

    device: torch.device
    limit: float
    control: dist.ProcessGroup

    @property
    def cuda(self) -> bool:
        """Return whether the device has a queue of its own."""
        return self.device.type == "cuda"

    def new_group(self) -> dist.ProcessGroup:
        """Return a new process group of all ranks. All ranks must call it."""
        # gloo gives up by itself; NCCL would end the process, so `together` gives up first.
        group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=self.limit * (10 if self.cuda else 1)))
        return group

    def from_all(self, value: Any) -> list[Any]:
        """Return what each rank gives. All ranks must call it."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self.control)
        return found

    def together(self, action: Callable[[], Result], group: dist.ProcessGroup) -> Result:
        """Return what an action returns, once it has ended on all ranks. All ranks must call it.

        Args:
            action: uses no other process group.
            group: given up when the time is over.

        Raises:
            Failed: it raised on a rank, or took too long; the same on all ranks.
        """
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            with contextlib.suppress(RuntimeError):
                group.abort()

        timer = threading.Timer(self.limit, give_up)
        timer.daemon = True
        timer.start()
        result: list[Result] = []
        error = ""
        try:
            result.append(action())
            measure.synchronize(self.cuda)
        except Exception as found:  # whatever it may be: it is the result
            traceback.print_exc()
            error = describe_error(found)
        timer.cancel()
        if given_up.is_set():
            error = error or f"TimeoutError: not done after {self.limit:.0f} seconds"
        failed = torch.tensor(int(bool(error)))
        when = time.time()
        dist.all_reduce(failed, group=self.control)
        if failed:
            errors = sorted(self.from_all((when, dist.get_rank(), error)))
            raise Failed("; ".join(f"rank {rank}: {text}" for _, rank, text in errors if text))
        return result[0]


@dataclass
class Contestant:
    """The weights of a set in one layout, and what was found about stepping them."""

    row: dict[str, Any]
    group: dist.ProcessGroup
    weights: Weights
    optimizer: quintic.Muon
    collectives: list["Collective"] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the other processes, measure, and write."""
    options = parse(arguments)
    team = join(options)
    measure_sets(options, team)
    dist.destroy_process_group()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="layouts", help="of the results' files, without ending")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["gpt124m", "qwen1.7b"], dest="sets")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="single is always among them")
    parser.add_argument("--normalize", choices=("neuron",), help="NorMuon's, for all layouts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, at most")
    parser.add_argument("--seconds", type=float, default=3, help="for one kind of time; at least ten steps are timed")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a layout that hangs is given up")
    parser.add_argument("--commit", help="of this repository, for the record; by default what git says")
    options = parser.parse_args(arguments)
    options.command = recorded_command(sys.argv[1:] if arguments is None else arguments, options.out)
    options.layouts = ["single", *(layout for layout in LAYOUTS if layout in options.layouts and layout != "single")]
    return options


def recorded_command(words: Sequence[str], out: Path) -> str:
    """Return the command as others would type it: without the folder of this machine."""
    start = f"torchrun --standalone --nproc-per-node {os.environ.get('WORLD_SIZE', 1)} benchmarks/bench_layouts.py "
    return start + shlex.join("FOLDER" if word == str(out) else word for word in words)


def join(options: argparse.Namespace) -> Team:
    """Return this process' place among those that torchrun started."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it with torchrun --standalone --nproc-per-node N benchmarks/bench_layouts.py ...")
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # The machine's own name need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    # Others wait here for a rank that waits for the end of its time.
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=10 * options.limit))
    return Team(device, options.limit, control)


# ---------------------------------------------------------------------------------------------------------- measurement


def measure_sets(options: argparse.Namespace, team: Team) -> None:
    """Measure every set of weights; the first rank writes. All ranks must call it."""
    result = {
        "command": options.command,
        "commit": options.commit or git_commit(),
        "device": measure.device_name(team.cuda),
        "ranks": dist.get_world_size(),
        "versions": measure.versions() | ({"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if team.cuda else {}),
        "options": {"lr": LR, "adamw_lr": ADAMW_LR, "weight_decay": WEIGHT_DECAY, "normalize": options.normalize},
        "rows": [],
    }
    for name in options.sets:
        result["rows"] += measure_set(name, options, team)
        if dist.get_rank() == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result, indent=1) + "\n"
            options.out.joinpath(f"{options.name}.json").write_text(text, encoding="utf-8")
            options.out.joinpath(f"{options.name}.md").write_text(page(result), encoding="utf-8")


def measure_set(name: str, options: argparse.Namespace, team: Team) -> list[dict[str, Any]]:
    """Return one row for each layout of a set of weights. All ranks must call it."""
    rows: list[dict[str, Any]] = []
    contestants: list[Contestant] = []
    expected: list[Tensor] = []
    for layout in options.layouts:
        gc.collect()
        rows.append({"set": name, "layout": layout, "dtype": SETS[name].dtypes[0]})
        group = team.new_group()
        try:
            contestants.append(prepared(rows[-1], group, expected, options, team))
        except Failed as error:
            give_up(rows[-1], error, group)
            if layout == "single":
                expected.clear()  # some ranks may have it, others not
    expected.clear()
    for index in range(max((one.row["n"] for one in contestants), default=0)):
        for one in list(contestants):
            if index < one.row["n"]:
                try:
                    time_once(one, team)
                except Failed as error:
                    contestants.remove(one)
                    give_up(one.row, error, one.group)
    for one in contestants:
        by_rank = team.from_all(one.times)
        one.row |= {
            kind: measure.spread([max(times) for times in zip(*(of_rank[kind] for of_rank in by_rank), strict=True)])
            for kind in one.times
        }
    groups = [one.group for one in contestants]
    contestants.clear()
    gc.collect()
    for group in groups:
        dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        print("\n".join(f"{name:10} {' '.join(cells(row))}" for row in rows), flush=True)
    return rows


def give_up(row: dict[str, Any], error: Failed, group: dist.ProcessGroup) -> None:
    """Note a layout's error, and end what it left on the device."""
    row["error"] = str(error)
    with contextlib.suppress(RuntimeError):  # kernels that wait for another rank would wait for ever
        group.abort()


def prepared(
    row: dict[str, Any], group: dist.ProcessGroup, expected: list[Tensor], options: argparse.Namespace, team: Team
) -> Contestant:
    """Return a layout that has been compared with single, and is ready to be timed. All ranks must call it.

    Args:
        row: what is found is added.
        group: of the layout's own.
        expected: the weights of single after the compared steps, which fills it; empty if it failed.
        options: the command line's.
        team: of this process.

    Raises:
        Failed: on all ranks.
    """
    one = team.together(lambda: built(row, group, options, team), group)
    step = one.optimizer.step

    def compare() -> dict[str, int]:
        for number in range(COMPARED_STEPS):
            set_gradients(one.weights, number)
            step()
        if row["layout"] == "single":
            expected.extend(whole(param).clone() for param in one.weights.all)
            start = measure.make_weights(SETS[row["set"]], team.device, one.weights.all[0].dtype).all
            row["moved"] = differing(start, expected)[0] / sum(param.numel() for param in start)
        if not expected:
            return {}
        entries, tensors = differing(one.weights.all, expected)
        return {"entries": entries, "tensors": tensors}

    found = team.from_all(team.together(compare, group))
    row["differing"] = {key: max(of_rank[key] for of_rank in found) for key in found[0]}

    def step_on() -> tuple[int, float]:
        memory = measure.Memory(team.cuda)
        step()
        measure.synchronize(team.cuda)
        peak = memory.peak()
        start = time.perf_counter()
        for _ in range(measure.WARMUP_STEPS):
            step()
            measure.synchronize(team.cuda)
        return peak, (time.perf_counter() - start) / measure.WARMUP_STEPS

    peak, seconds = team.together(step_on, group)
    plan = one.optimizer.plan()
    one.collectives = list(collectives_of(one.optimizer, dist.get_world_size()))
    sent = sum(collective.sent * collective.dtype.itemsize for collective in one.collectives)
    facts = team.from_all((plan.flops, plan.peak_workspace_bytes / MIB, peak / MIB, sent / MIB, seconds))
    flops, planned, peaks, sent_mib, estimates = (list(values) for values in zip(*facts, strict=True))
    row |= {
        "balance": max(flops) / statistics.mean(flops) if any(flops) else 1.0,
        "buckets": len(plan.buckets),
        "planned_mib": planned,
        "sent_mib": sent_mib,
        "n": min(options.steps, max(measure.LEAST_STEPS, int(options.seconds / max(*estimates, 1e-6)))),
    }
    if team.cuda:
        row["peak_mib"] = peaks
    return one


def built(row: dict[str, Any], group: dist.ProcessGroup, options: argparse.Namespace, team: Team) -> Contestant:
    """Return the weights of a set in a layout, and their optimizer. All ranks must call it."""
    layout, shapes = row["layout"], SETS[row["set"]]
    weights = measure.make_weights(shapes, team.device, {"bf16": torch.bfloat16, "fp32": torch.float32}[row["dtype"]])
    if layout in CUT_DIMENSION:
        mesh = DeviceMesh.from_group(group, team.device.type)
        matrices = [torch.nn.Parameter(cut(param, mesh, CUT_DIMENSION[layout])) for param in weights.matrices]
        weights = Weights(matrices, [torch.nn.Parameter(cut(param, mesh, 0)) for param in weights.others])
    groups: list[dict[str, Any]] = [{"params": weights.matrices}, {"params": weights.others, "algorithm": "adamw"}]
    optimizer = quintic.Muon(
        groups,
        lr=LR,
        adamw_lr=ADAMW_LR,
        weight_decay=WEIGHT_DECAY,
        normalize=options.normalize,
        comms=layout if layout in ("averaged", "sharded", "replicated") else "none",
        process_group=group,
    )
    return Contestant(row, group, weights, optimizer)


def cut(tensor: Tensor, mesh: DeviceMesh, dimension: int) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, in memory of its own."""
    found = distribute_tensor(tensor.detach(), mesh, [Shard(dimension)], src_data_rank=None)
    return found.clone()


def set_gradients(weights: Weights, number: int) -> None:
    """Give the weights the normal gradients of a step, the same on all ranks and in all layouts."""
    generator: torch.Generator | None = None
    for param in weights.all:
        generator = generator or torch.Generator(param.device).manual_seed(1 + number)
        gradient = torch.empty(param.shape, device=param.device, dtype=param.dtype)
        gradient.normal_(0, 0.001, generator=generator)
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = gradient


def whole(param: Tensor) -> Tensor:
    """Return all of a parameter. All ranks must call it."""
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def differing(params: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[int, int]:
    """Return how many entries of whole parameters have other bits than expected, and how many parameters have such."""
    pairs = zip(params, expected, strict=True)
    counts = [int((whole(x).view(INTEGERS[y.itemsize]) != y.view(INTEGERS[y.itemsize])).sum()) for x, y in pairs]
    return sum(counts), sum(count > 0 for count in counts)


def time_once(one: Contestant, team: Team) -> None:
    """Time one step of each kind. All ranks must call it.

    Raises:
        Failed: on all ranks.
    """

    def aligned(index: int) -> None:
        dist.all_reduce(torch.zeros((), device=team.device), group=one.group)

    def times_of(call: Callable[[], None]) -> tuple[list[float], list[float], list[float]]:
        """Return milliseconds from an idle device, on the host, and on a busy device (CPU: from an idle one again)."""
        idle, host = measure.time_steps(call, aligned, 1, team.cuda)
        return idle, host, measure.time_device(call, aligned, 1, host[0]) if team.cuda else idle

    def time_all() -> dict[str, list[float]]:
        step, host, device = times_of(lambda: one.optimizer.step())
        found = {"step_ms": step, "host_ms": host} | ({"device_ms": device} if team.cuda else {})
        if one.collectives:
            buffers = send_buffers(one.collectives, team.device)
            _, _, found["exchange_ms"] = times_of(lambda: run_collectives(one.collectives, buffers, one.group))
        return found

    for kind, values in team.together(time_all, one.group).items():
        one.times.setdefault(kind, []).extend(values)


# --------------------------------------------------------------------------------------------------- collectives alone


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as this rank sees it.

    Attributes:
        dtype: of the entries.
        entries: of the buffer that it is given.
        sent: entries that leave this rank.
        start: starts it with such a buffer; all ranks of the group must call it.
    """

    dtype: torch.dtype
    entries: int
    sent: int
    start: Callable[[Tensor, dist.ProcessGroup], Pending]


def all_to_all(dtype: torch.dtype, rank: int, sends: Sequence[int], receives: Sequence[int]) -> Collective:
    """Return the collective that sends so many entries to each rank."""
    total = sum(sends)
    return Collective(dtype, total, total - sends[rank], lambda x, group: start_all_to_all(x, sends, receives, group))


def all_gather(dtype: torch.dtype, num_ranks: int, entries: int) -> Collective:
    """Return the collective that sends the same entries to all ranks."""
    sent = entries * (num_ranks - 1)
    return Collective(dtype, entries, sent, lambda x, group: start_all_gather(x, num_ranks, group))


def all_gather_units(dtype: torch.dtype, exchange: Exchange, width: int) -> Collective:
    """Return the collective that sends so many entries of each unit from its owner to all ranks."""
    owned = exchange.num_owned
    sent = (owned if exchange.is_sparse else max(exchange.counts)) * width * (len(exchange.ranks) - 1)
    return Collective(dtype, owned * width, sent, lambda x, group: exchange.all_gather(x.view(owned, width), group))


def collectives_of(optimizer: quintic.Muon, num_ranks: int) -> Iterator[Collective]:
    """Yield what a step sends to other ranks, but for the count of gradients."""
    rank = dist.get_rank()
    for group in optimizer.param_groups:
        if group["comms"] == "replicated" and num_ranks > 1:
            dtype, left = group["params"][0].dtype, sum(param.numel() for param in group["params"])
            while left:
                part = -(-min(left, ENTRIES_AT_A_TIME) // num_ranks)
                left -= min(left, ENTRIES_AT_A_TIME)
                yield all_to_all(dtype, rank, [part] * num_ranks, [part] * num_ranks)
                yield all_gather(dtype, num_ranks, part)
    for bucket in optimizer.plan():
        if bucket.sharding is not None:
            entries = bucket.sharding.entries
            yield all_to_all(bucket.dtype, rank, entries, [entries[rank]] * num_ranks)
            yield all_gather(bucket.dtype, num_ranks, max(entries))
        elif bucket.travel is not None and bucket.travels:
            yield from _collectives_of_travel(bucket, optimizer.param_groups[bucket.group]["normalize"] is not None)


def _collectives_of_travel(bucket: Bucket, normalizes: bool) -> Iterator[Collective]:
    assert bucket.travel is not None
    exchange, rank = bucket.travel.exchange, bucket.travel.exchange.position
    update = update_dtype(bucket.form, bucket.dtype)
    if exchange.is_replicated:
        yield all_gather_units(update, exchange, math.prod(exchange.unit_shape))
    else:
        direction = direction_dtype(bucket.form, bucket.dtype)
        yield all_to_all(direction, rank, exchange.gather_sends(), exchange.gather_receives())
        yield all_to_all(update, rank, exchange.scatter_sends(), exchange.scatter_receives())
    if normalizes:  # factors and second moments
        dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        yield all_gather_units(dtype, exchange, 2 * sum(max(kind.shape) for kind in bucket.travel.kinds))


def send_buffers(collectives: Sequence[Collective], device: torch.device) -> dict[torch.dtype, Tensor]:
    """Return for each dtype random entries, as many as any collective sends."""
    sizes: dict[torch.dtype, int] = {}
    for one in collectives:
        sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.entries)
    return {dtype: torch.empty(size, dtype=dtype, device=device).normal_() for dtype, size in sizes.items()}


def run_collectives(
    collectives: Sequence[Collective], buffers: dict[torch.dtype, Tensor], group: dist.ProcessGroup
) -> None:
    """Run all of them, each begun before the one before is waited for. All ranks of the group must call it."""
    before: Pending | None = None
    for one in collectives:
        pending = one.start(buffers[one.dtype][: one.entries], group)
        if before is not None:
            before.wait()
        before = pending
    if before is not None:
        before.wait()


# -------------------------------------------------------------------------------------------------------------- results


HEADER = (
    *("layout", "differing", "step (ms)", "quartiles", "device (ms)", "host (ms)", "exchange (ms)", "sent (MiB)"),
    *("temporary / planned (MiB)", "balance", "buckets"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    if "error" in row:
        return [row["layout"], f"failed: {in_cell(row['error'])}", *[""] * (len(HEADER) - 2)]
    step = row["step_ms"]
    return [
        row["layout"],
        differing_cell(row["differing"]),
        middle(row, "step_ms"),
        f"{step['q1']:.3g} to {step['q3']:.3g} (n {step['n']})",
        middle(row, "device_ms"),
        middle(row, "host_ms"),
        middle(row, "exchange_ms"),
        f"{max(row['sent_mib']):,.1f}",
        temporary(row),
        f"{row['balance']:.3f}",
        str(row["buckets"]),
    ]


def differing_cell(found: dict[str, int]) -> str:
    """Return how many entries in how many tensors, bold if any; a dash where there was nothing to compare with."""
    if not found:
        return "-"
    return f"**{found['entries']:,} in {found['tensors']}**" if found["entries"] else "0"


def temporary(row: dict[str, Any]) -> str:
    """Return measured and planned memory, bold where a rank needs more than it planned."""
    if "peak_mib" not in row:
        return f"- / {max(row['planned_mib']):,.0f}"
    pairs = list(zip(row["peak_mib"], row["planned_mib"], strict=True))
    peak, planned = max(pairs)
    text = f"{peak:,.0f} / {planned:,.0f}"
    return f"**{text}**" if any(peak > planned * (1 + WORKSPACE_TOLERANCE) for peak, planned in pairs) else text


def page(result: dict[str, Any]) -> str:
    """Return the result as markdown."""
    version_text = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    option_text = ", ".join(f"{name} {value}" for name, value in result["options"].items() if value is not None)
    lines = [
        f"# The same weights in every layout, on {result['ranks']} x {result['device']}",
        "",
        f"`{result['command']}` at commit {result['commit']}; {version_text}. {option_text}.",
        "",
        *NOTES.format(steps=COMPARED_STEPS, tolerance=WORKSPACE_TOLERANCE).splitlines(),
    ]
    for name in dict.fromkeys(row["set"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["set"] == name]
        lines += ["", f"## {name}, {rows[0]['dtype']} weights: {describe(SETS[name])}", ""]
        if "moved" in rows[0]:
            lines += [f"{rows[0]['moved']:.0%} of the entries of single had changed when they were compared.", ""]
        lines += [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
