"""The cheapest settings with which training fits into a device's memory (`quintic plan --memory`).

Savings are settings from the cheapest to the costliest. `setups_of` adds one after the other and counts the bytes of
each sum; `cheapest` takes the first that fits, and leaves out costly settings that are not needed.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

import quintic
from quintic.optim.groups.options import OPTIONS
from quintic.simulate.options import SimulationOptions, size_in_bytes
from quintic.simulate.planned_models import planned_model
from quintic.simulate.simulate import simulate_plan
from quintic.simulate.table import mesh_of, naming_options, planned_optimizer, whose_memory
from quintic.tables import aligned

__all__ = [
    "FREE",
    "SAVINGS",
    "Parts",
    "Settings",
    "Setup",
    "cheapest",
    "gib",
    "kept_bytes",
    "memory_table",
    "memory_text",
    "needs_of",
    "peak",
    "setups_of",
]

Settings: TypeAlias = Mapping[str, Any]
"""Name of an option -> its value."""

Parts: TypeAlias = Mapping[str, int]
"""Purpose -> bytes on one device: `weights`, `gradients`, `state`, `step` for the bytes that the optimizer's step needs
beside these, and `activations` where they are known, or `graphs` where CUDA graphs keep them. `host` is state in host
memory, which is not on the device."""

FREE = "nothing"
SAVINGS: tuple[tuple[Settings, str], ...] = (
    ({"master": "mantissa"}, FREE),
    ({"release_gradients": True}, "graphs"),
    ({"max_workspace_bytes": 2**28}, "time"),
    ({"state_dtype": "bf16"}, "loss"),
    ({"mesh": None}, "messages"),  # the mesh that was given
    ({"max_workspace_bytes": 2**28}, "time"),  # here too, since ranks do not reuse the gradients' memory
    ({"state_dtype": "int8"}, "loss"),
    ({"master": "8bit"}, "loss"),
    ({"offload": True}, "copies"),
)
"""Options of `quintic.Muon` that save memory, with their cost, from the cheapest to the costliest. A later value of an
option replaces an earlier one."""

_KEPT = ("weights", "gradients", "state")
# Simulating more takes long.
_MOST_RANKS = 1024
_ONE_DEVICE = ((1,), ("fsdp",))


class Setup(NamedTuple):
    """Some settings and the memory that training needs with them."""

    change: Settings
    """The setting that was added last, with its cost."""
    cost: str
    settings: Settings
    parts: Parts


def peak(parts: Parts) -> int:
    """Return the most bytes on the device.

    Activations are freed before the step needs its temporary memory, unless graphs keep them.
    """
    return kept_bytes(parts) + parts.get("graphs", 0) + max(parts.get("activations", 0), parts["step"])


def kept_bytes(parts: Parts) -> int:
    """Return the bytes of weights, gradients and state on the device."""
    return sum(parts[name] for name in _KEPT)


def setups_of(savings: Sequence[tuple[Settings, str]], needs: Callable[[Settings], Parts]) -> list[Setup]:
    """Return a setup without any of the settings, and one for each setting that saves memory beside those before it."""
    setups = [Setup({}, "", {}, needs({}))]
    for change, cost in savings:
        settings = {**setups[-1].settings, **change}
        try:
            parts = needs(settings)
        except ValueError:
            # The layout cuts groups of 8-bit state, which then cannot be offloaded; state of 16 bits can.
            if "offload" not in change or settings.get("state_dtype") != "int8":
                raise
            change = {**change, "state_dtype": "bf16"}
            settings = {**settings, **change}
            parts = needs(settings)
        if peak(parts) < peak(setups[-1].parts):
            setups.append(Setup(change, cost, settings, parts))
    return setups


def cheapest(setups: Sequence[Setup], needs: Callable[[Settings], Parts], memory: int) -> Setup | None:
    """Return the first setup that fits into `memory` bytes, less settings that it does not need; None if none fits.

    Settings that cost nothing are used in any case. Of the others the costliest are left out first.
    """
    num_free = len(list(itertools.takewhile(lambda setup: setup.cost == FREE, setups[1:])))
    first = next((number for number in range(num_free, len(setups)) if peak(setups[number].parts) <= memory), None)
    if first is None:
        return None
    best, used = setups[first], list(setups[1 : first + 1])
    for setup in reversed(used[:-1]):
        fewer = [other for other in used if other is not setup]
        settings = {name: value for other in fewer for name, value in other.change.items()}
        if setup.cost != FREE and peak(parts := needs(settings)) <= memory:
            best, used = best._replace(settings=settings, parts=parts), fewer
    return best


def memory_table(
    setups: Sequence[Setup], memory: int, parameters: int, start: str, name: Callable[[Settings], str]
) -> str:
    """Return a line for each setup: bytes of a weight, its gradient and its state, GiB by purpose, and whether it fits.

    Args:
        setups: from `setups_of`.
        memory: bytes of the device.
        parameters: the number of weights of the whole model.
        start: the name of the first setup.
        name: returns the name of a setting.
    """
    knows = not {"activations", "graphs"}.isdisjoint(setups[0].parts)
    left = [] if knows else ["for activations"]
    rows = [("setting", "costs", "bytes a weight", *setups[0].parts, "sum", "fits", *left)]
    for setup in setups:
        kept, most = kept_bytes(setup.parts), peak(setup.parts)
        title = f"+ {name(setup.change)}" if setup.change else start
        fits = most <= memory
        left = [] if knows else [gib(memory - kept) if fits else "-"]
        sizes = map(gib, (*setup.parts.values(), most))
        rows.append((title, setup.cost, f"{kept / parameters:.2f}", *sizes, "yes" if fits else "no", *left))
    return "\n".join(aligned(rows, [0, 0, *[-1] * (len(rows[0]) - 2)]))


def gib(size: float) -> str:
    """Return bytes as GiB with two digits, without the unit."""
    return f"{size / 2**30:.2f}"


def needs_of(
    options: SimulationOptions, groups: Sequence[Mapping[str, Any]], *, device: str = "cuda"
) -> Callable[[Settings], Parts]:
    """Return a function that counts the memory of a model, on the rank that needs most, with settings of `SAVINGS`.

    Args:
        options: of the command, for all other options.
        groups: the model's groups, from `param_groups`.
        device: type of the devices.
    """

    def needs(settings: Settings) -> Parts:
        chosen = {"mesh": _ONE_DEVICE, "master": _master(options), **settings}
        mesh, layout = chosen.pop("mesh")
        optimizer = planned_optimizer(options, [dict(group) for group in groups], **chosen)
        simulation = simulate_plan(optimizer, mesh, layout, device=device, node_size=options.node_size)
        weights, state, host = simulation.stored
        # (parts, ranks); host memory is not counted.
        sizes = torch.stack([weights, weights, state - host, simulation.workspace_bytes, host])
        most = sizes[:, sizes[:-1].sum(0).argmax()].tolist()
        return dict(zip((*_KEPT, "step", "host"), most, strict=True))

    return needs


def _master(options: SimulationOptions) -> str | None:
    # Weights of 16 bits lose small updates without a master.
    return options.master or ("fp32" if options.dtype == "bfloat16" else None)


def memory_text(options: SimulationOptions) -> str:
    """Return the output of `quintic plan --model NAME --memory SIZE`.

    Raises:
        ConfigError: an option is wrong. The message begins with its name.
    """
    assert options.memory is not None
    memory, master = size_in_bytes(options.memory), _master(options)
    given = (mesh_of(options.mesh or "1"), tuple(options.layout.split(",")))
    with naming_options(options.model):
        groups = quintic.param_groups(planned_model(options.model, getattr(torch, options.dtype)))
        needs = needs_of(options, groups)
        setups = setups_of([({"mesh": given} if "mesh" in change else change, cost) for change, cost in SAVINGS], needs)
        best = cheapest(setups, needs, memory)
        if best is None:
            result = [_more_ranks(needs, setups[-1].settings, memory, math.prod(given[0]))]
        else:
            host, left = best.parts["host"], gib(memory - kept_bytes(best.parts))
            also = f" and {gib(host)} GiB of host memory" if host else ""
            result = [
                f"Cheapest that fits: {gib(peak(best.parts))} GiB{also}; activations may take {left} GiB, as they are "
                "freed before the step:",
                *_python(options, {"master": master, **best.settings}),
            ]
    parameters = sum(param.numel() for group in groups for param in group["params"])
    start = f"{options.dtype} weights" + (f', master="{master}"' if master else "")
    lines = [
        f"{options.model}: {parameters:,} parameters, into {gib(memory)} GiB a device",
        "GiB on the rank that needs most, each line with the settings above it\n",
        memory_table(setups, memory, parameters, start, _setting),
        "\nNot counted: activations, and what CUDA and FSDP keep for themselves.",
    ]
    if note := whose_memory():
        lines.append(f"step: temporary memory {note}.")
    return "\n".join([*lines, *result])


def _setting(settings: Settings) -> str:
    """Return settings as text, such as `state_dtype="bf16"` or `fsdp on 8 ranks`."""
    words = []
    for name, value in settings.items():
        if name == "mesh":
            words.append(f"{','.join(value[1])} on {'x'.join(map(str, value[0]))} ranks")
        elif name == "max_workspace_bytes":
            words.append(f"{name}=2**{value.bit_length() - 1}")
        else:
            words.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}")
    return ", ".join(words)


def _python(options: SimulationOptions, settings: Settings) -> list[str]:
    """Return the two lines of Python that make the optimizer with these settings."""
    keywords = {name: getattr(options, name) for name in vars(options) if name in OPTIONS} | dict(settings)
    mesh = keywords.pop("mesh", _ONE_DEVICE)
    if "dp" in mesh[1]:
        keywords["comms"] = "averaged"
    where = "whole on each GPU" if mesh == _ONE_DEVICE else _setting({"mesh": mesh})
    # Options of the whole optimizer are here only if they were set.
    changed = {name: value for name, value in keywords.items() if name not in OPTIONS or value != OPTIONS[name].default}
    return [
        f"    groups = quintic.param_groups(model)  # {options.dtype} weights, {where}",
        f"    optimizer = quintic.Muon({', '.join(filter(None, ('groups', _setting(changed))))})",
    ]


def _more_ranks(needs: Callable[[Settings], Parts], settings: Settings, memory: int, given: int) -> str:
    """Return a sentence about the number of ranks, doubled until it is enough, on which all settings fit."""
    whole = kept_bytes(needs({**settings, "mesh": _ONE_DEVICE}))
    ranks, most = max(given, 2), max(given, _MOST_RANKS)
    while ranks <= most:
        # If even shards are too large, no simulation is needed.
        if whole <= memory * ranks:
            parts = needs({**settings, "mesh": ((ranks,), ("fsdp",))})
            if peak(parts) <= memory:
                each = f"{gib(peak(parts))} GiB each"
                return f"None of these fits; {ranks:,} GPUs would, with all of these settings and fsdp: {each}."
        ranks *= 2
    return f"None of these fits, nor would they with fsdp on {most:,} GPUs."
