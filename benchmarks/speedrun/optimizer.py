"""One step of the speedrun's optimizer on the preset's own parameters: ours, ours as CUDA graphs, and the race's.

    torchrun --standalone --nproc-per-node 1 -m benchmarks.speedrun.optimizer --peer CHECKOUT --out FOLDER
    torchrun --standalone --nproc-per-node 1 -m benchmarks.speedrun.optimizer --preset speedrun-tiny --out FOLDER

The second tries this script on a CPU. Weights are tied, as in the first two thirds of the run, AdamW moves its
parameters in every second step, and the pairs' table has as many rows with a gradient as a batch of the first stage
touches. FOLDER gets NAME.json and NAME.md, written anew after each contestant.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import quintic
from benchmarks.common.peer_files import load
from benchmarks.common.ranks import Team, join
from benchmarks.common.results import (
    add_options,
    describe_error,
    device_name,
    git_commit,
    made_by,
    print_table,
    recorded_command,
    table,
    versions,
    write_result,
)
from benchmarks.common.timing import time_device, time_steps
from quintic.model.speedrun import SpeedrunGPT
from quintic.speedrun.presets import Preset, preset
from quintic.speedrun.recipe import build_optimizer

MODULE = "benchmarks.speedrun.optimizer"
NAMES = ("quintic", "quintic, captured", "race")
TIMES = ("idle", "host", "busy")
HEADS = ("contestant", *(f"{parity}, {which} (ms)" for which in TIMES for parity in ("even", "odd")), "mean, busy (ms)")
NOTES = """\
Medians of {steps} steps of each kind on {machine}, the slowest rank counts; odd steps move AdamW's parameters, too.
Idle: steps that start on an idle device. Host: until the call returns. Busy: kernels waiting in the device's queue."""
WARM_UP_STEPS = 8


class Contestant(NamedTuple):
    """A step and what comes before it, with the number of the step."""

    step: Callable[[], None]
    before: Callable[[int], None]
    close: Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "speedrun-optimizer")
    parser.add_argument("--peer", type=Path, help="checkout of modded-nanogpt at f411b3d3")
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each kind")
    options = parser.parse_args(words)
    team = join("cuda" if torch.cuda.is_available() else "cpu", MODULE)
    result: dict[str, Any] = {
        "command": recorded_command(MODULE, words, {str(options.out): "FOLDER", str(options.peer): "CHECKOUT"}),
        "commit": options.commit or git_commit(),
        "machine": f"{dist.get_world_size()} x {device_name(team.cuda)}",
        "versions": versions(nccl=dist.get_world_size() > 1 and team.cuda),
        "steps": options.steps,
        "rows": [],
    }
    for name in NAMES if options.peer is not None else NAMES[:2]:
        if name == "quintic, captured" and not team.cuda:
            continue  # a CUDA graph
        try:
            row: dict[str, Any] = {"contestant": name, **measured(name, preset(options.preset), team, options)}
        except Exception as error:  # of a peer: the others count all the same
            row = {"contestant": name, "error": describe_error(error)}
        result["rows"].append(row)
        if dist.get_rank() == 0:
            write_result(options.out / options.name, result, page(result))
            print_table(HEADS, [cells(row)])
            print(*filter(None, [row.get("error")]), flush=True)
    failed = any("error" in row for row in result["rows"])
    dist.destroy_process_group()
    return int(failed)


def measured(name: str, chosen: Preset, team: Team, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of even and odd steps, by how they were measured."""
    model = SpeedrunGPT(chosen.model, attention="sdpa", dtype=torch.bfloat16 if team.cuda else torch.float32)
    model.init_weights(0)
    model.to(team.device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = chosen.track.at(0).batch_tokens // dist.get_world_size()
    rows = torch.randint(0, chosen.model.bigram_rows, (tokens,), generator=generator).to(team.device)
    gradients: dict[Tensor, Tensor] = {}
    tables = model.names_by_role()["bigram"]
    for param_name, param in model.named_parameters():
        gradients[param] = torch.zeros_like(param)
        here = rows if param_name in tables else ...
        gradients[param][here] = 0.01 * torch.randn_like(gradients[param][here])
    contestant = race(model, gradients, options.peer) if name == "race" else ours(model, gradients, rows, name)
    for index in range(WARM_UP_STEPS):
        contestant.before(index)
        contestant.step()
    idle, host = time_steps(contestant.step, contestant.before, 2 * options.steps, team.cuda)
    found = {"idle": idle, "host": host}
    if team.cuda:
        found["busy"] = time_device(contestant.step, contestant.before, 2 * options.steps, max(team.slowest(host)))
    contestant.close()
    slowest = {which: team.slowest(times) for which, times in found.items()}
    return {which: [statistics.median(times[parity::2]) for parity in (0, 1)] for which, times in slowest.items()}


def ours(model: SpeedrunGPT, gradients: dict[Tensor, Tensor], rows: Tensor, name: str) -> Contestant:
    optimizer = build_optimizer(model, ranks=dist.get_world_size())
    announced = model.names_by_role()["bigram"] if dist.get_world_size() > 1 else []

    def before(index: int) -> None:
        for param, gradient in gradients.items():
            param.grad = gradient
        for table_name in announced:
            optimizer.announce_rows(table_name, rows)

    if name == "quintic":
        return Contestant(lambda: optimizer.step(), before, lambda: None)
    captured = quintic.CapturedStep(optimizer)
    return Contestant(captured, before, captured.close)


def race(model: SpeedrunGPT, gradients: dict[Tensor, Tensor], checkout: Path) -> Contestant:
    """Return the step of `NorMuonAndAdam`, with our rates, decays and orders."""
    torch._dynamo.config.recompile_limit = 64  # it compiles its step for each shape
    optimizer_class = load(checkout / "train_gpt.py", ["NorMuonAndAdam"]).NorMuonAndAdam
    # Labels to which it gives a meaning of its own.
    labels = {"head": "lm_head", "embedding": "embed"}
    entries: dict[str, dict[str, Any]] = {}
    params: list[tuple[str, Any]] = []
    optimizer = build_optimizer(model)
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            role = group["name"]
            label = labels.get(role, role if len(group["params"]) == 1 else name)
            params.append((name, param))
            param.label = label
            if group["algorithm"] == "muon":
                param.reshape = (len(param) // group["view"].num_rows, group["view"].num_rows, param.shape[1])
                entries[label] = {"optim": "normuon", "comms": "sharded", "adam_betas": None}
            else:
                entries[label] = {
                    "optim": "adam",
                    "comms": "sharded" if param.ndim == 2 and len(param) > 512 else "replicated",
                    "adam_betas": list(group["betas"]),
                    "lr_mul": group["lr"] / 0.008,
                    "wd_mul": group["weight_decay"] / 0.005,
                }
    del optimizer
    orders = sorted(entries, key=lambda label: (entries[label]["optim"], entries[label]["comms"] != "replicated"))
    peer = optimizer_class(
        params,
        param_table=entries,
        scatter_order=list(entries),
        compute_order=orders,
        adam_defaults={"lr": 0.008, "eps": 1e-10, "weight_decay": 0.005},
        normuon_defaults={"lr": 0.023, "momentum": 0.95, "beta2": 0.9, "weight_decay": 1.2},
    )
    number = 0

    def before(index: int) -> None:
        nonlocal number
        number = index
        for param, gradient in gradients.items():
            param.grad = gradient

    return Contestant(lambda: peer.step(do_adam=number % 2 == 1), before, lambda: None)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a contestant's line of the table."""
    times = [f"{value:.2f}" for which in TIMES for value in row.get(which, ())]
    times += ["-"] * (2 * len(TIMES) - len(times))
    mean = f"{statistics.mean(row['busy']):.2f}" if "busy" in row else "-"
    return [row["contestant"] + (" (failed)" if "error" in row else ""), *times, mean]


def page(result: dict[str, Any]) -> str:
    """Return the Markdown page, with our times over the race's."""
    rows = {row["contestant"]: row for row in result["rows"]}
    lines = [
        "# The step of the speedrun's optimizer",
        "",
        *made_by(result["command"], result["commit"], result["versions"]).splitlines(),
        "",
        *NOTES.format(steps=result["steps"], machine=result["machine"]).splitlines(),
        "",
        *table(HEADS, [cells(row) for row in result["rows"]]),
        "",
    ]
    for name in NAMES[:2]:
        for which in TIMES:
            if which in rows.get(name, {}) and which in rows.get("race", {}):
                ratio = statistics.mean(rows[name][which]) / statistics.mean(rows["race"][which])
                lines.append(f"- {name} over the race, {which}, mean of even and odd: {ratio:.3f}")
    lines += [f"- {row['contestant']}: {row['error']}" for row in result["rows"] if "error" in row]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
