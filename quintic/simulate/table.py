"""The output of `quintic plan --model`: the optimizer's work for a model on a mesh of ranks, as a table."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import quintic
from quintic.errors import ConfigError
from quintic.kernels.dispatch import triton_is_installed
from quintic.optim.groups.options import OPTIONS
from quintic.optim.rules.table import rule_of
from quintic.simulate.options import SimulationOptions
from quintic.simulate.planned_models import planned_model
from quintic.simulate.simulate import BucketLoad, Simulation, simulate_plan

__all__ = ["mesh_of", "naming_options", "planned_optimizer", "simulation_text", "table", "whose_memory"]


def simulation_text(options: SimulationOptions) -> str:
    """Return the output of `quintic plan --model`.

    Raises:
        ConfigError: an option is wrong. The message begins with its name.
    """
    mesh = mesh_of(options.mesh or "8")
    names = tuple(options.layout.split(","))
    with naming_options(options.model):
        model = planned_model(options.model, getattr(torch, options.dtype))
        optimizer = planned_optimizer(options, quintic.param_groups(model))
        simulation = simulate_plan(optimizer, mesh, names, node_size=options.node_size)
    parameters = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    rule = rule_of("muon", options.normalize, options.update_rule)
    head = f"{options.model}: {parameters:,} parameters of {options.dtype}, matrices by {rule.title}"
    return f"{head}\n{table(simulation)}"


def planned_optimizer(options: SimulationOptions, groups: list[dict[str, Any]], **settings: Any) -> quintic.Muon:
    """Return an optimizer of these groups with the options of the command; `settings` replace some of them."""
    given = {name: value for name, value in vars(options).items() if name in OPTIONS}
    return quintic.Muon(groups, **(given | settings))


@contextmanager
def naming_options(model: str) -> Iterator[None]:
    """Return a context in which errors about a planned model name the command's options.

    Raises:
        ConfigError: in place of one that names an argument of the library, and of the ValueError of `param_groups` for
            parameters of `model` that no rule covers.
    """
    try:
        yield
    except ConfigError as error:
        text = re.sub("^node_size=", "--node-size ", str(error))
        raise ConfigError(re.sub("^(model|mesh|layout)=", r"--\1 ", text)) from None
    except ValueError as error:
        raise ConfigError(f"--model {model}: {error}") from None


def mesh_of(text: str) -> tuple[int, ...]:
    """Return the number of ranks along each dimension; a ConfigError for a text that is not like `8x4`."""
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise ConfigError(f"--mesh {text}: give the number of ranks per dimension, such as 8 or 8x4")
    return tuple(int(size) for size in text.split("x"))


def table(simulation: Simulation) -> str:
    """Return a simulation as text: a line per kind of bucket, then totals, each as maximum / mean over ranks."""
    mesh = "x".join(map(str, simulation.mesh))
    ranks = "1 rank" if simulation.num_ranks == 1 else f"{simulation.num_ranks:,} ranks"
    lines = [
        f"{ranks} as {mesh} ({', '.join(simulation.names)}); the most / the mean of the ranks",
        "",
        f"{'method':18} {'matrices':>22} {'buckets':>7} {'GFLOP':>21} {'MB sent':>21} {'work MiB':>19}",
    ]
    # Buckets of the same method, shapes and dtype share a line; buckets with and without messages do not.
    kinds: dict[Any, list[BucketLoad]] = {}
    for load in simulation.bucket_loads:
        kinds.setdefault((load.method, load.shapes, load.dtype, load.exchange_bytes is None), []).append(load)
    for (method, shapes, _, is_local), loads in kinds.items():
        matrices = f"{sum(load.num_matrices for load in loads):,} x {'+'.join(f'{m}x{n}' for m, n in shapes)}"
        sent = _most_and_mean(_sum_loads(load.bytes_sent for load in loads), 1e6)
        most_buckets = int(_sum_loads(load.present for load in loads).max())
        workspace = torch.stack([load.workspace_bytes for load in loads]).amax(0)
        lines.append(
            f"{method:18} {matrices if shapes else '-':>22} {most_buckets:>7} "
            f"{_most_and_mean(_sum_loads(load.flops for load in loads), 1e9):>21} {'-' if is_local else sent:>21} "
            f"{_most_and_mean(workspace, 2**20):>19}"
        )
    totals = {
        "operations": f"{_most_and_mean(simulation.flops, 1e9)} GFLOP, balance {simulation.balance:.2f}",
        "sent": f"{_most_and_mean(simulation.bytes_sent, 1e6)} MB",
        "state": f"{_most_and_mean(simulation.state_bytes, 2**20)} MiB",
        "temporary memory": f"at most {_most_and_mean(simulation.workspace_bytes, 2**20)} MiB",
    }
    if note := whose_memory():
        totals["temporary memory"] += f", {note}"
    if simulation.bytes_between.any():
        totals["sent between nodes"] = f"{_most_and_mean(simulation.bytes_between, 1e6)} MB"
    chosen = map(str, simulation.choices)
    return "\n".join([*lines, "", *(f"{name:18} {text}" for name, text in totals.items()), *chosen])


def whose_memory() -> str:
    """Return whose temporary memory was counted where it is not that of Triton's kernels, else an empty text."""
    if triton_is_installed():
        return ""
    return "of plain PyTorch, since Triton is not installed here; with Triton a GPU usually needs less"


def _sum_loads(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def _most_and_mean(values: Tensor, unit: float) -> str:
    return f"{float(values.max()) / unit:,.1f} / {float(values.double().mean()) / unit:,.1f}"
