"""Draw the phases of a step in three layouts, as they run.

    python scripts/step_diagram.py

Steps two matrices on one process, then on two with FSDP2's placements and with sharded state, under PyTorch's profiler,
and reads the named ranges of the first bucket of matrices from the profile. Writes docs/assets/step.svg. Phases that
only start or await a message are drawn as arrows between ranks; the others are work on this rank.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "assets" / "step.svg"

LAYOUTS = {
    "one": ("one device", "everything is here"),
    "pieces": ("FSDP2, tensor parallelism, DDP", "ranks hold pieces, or copies, of the matrices"),
    "sharded": ("sharded state", "ranks hold all weights, each its part of the state"),
}

# Phase -> (title, what happens), in the order of `BucketStep.run`.
PHASES = {
    "send gradients": ("gradients to their owners", "who average them over the ranks"),
    "momentum": ("momentum", "m += (1 - mu)(g - m), element by element"),
    "send directions": ("directions to their owners", "pieces become whole matrices"),
    "orthogonalize": ("orthogonalise", "whole matrices, on their owners"),
    "send updates": ("updates to who has the pieces", "matrices become pieces again"),
    "update weights": ("weights", "decay, and a step against the update"),
    "send weights": ("weights to all ranks", "from the owners of the entries"),
}

# Colours that can be read on light and dark pages; the drawing has a light card below it.
_CARD, _INK, _SOFT, _WORK, _MESSAGE = "#ffffff", "#1f2328", "#59636e", "#dbe9fb", "#fdeedd"
_COLUMN, _ROW, _TOP, _GAP = 300, 62, 84, 24


def phases_of(layout: str) -> list[str]:
    """Return the phases of the first bucket of matrices, in the order in which they begin, of one step."""
    import quintic

    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16, 8)) for _ in range(2)]
    if layout == "pieces":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params = [nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])) for one in params]
    optimizer = quintic.Muon(params, lr=0.1, comms="sharded" if layout == "sharded" else "none")
    found: list[str] = []
    for step in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == 0:
            optimizer.step()  # makes the plan and the state
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            optimizer.step()
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        found = [event.name.rpartition("/")[2] for event in events if event.name.startswith("quintic.step/bucket 0")]
    return [phase for phase in found if phase in PHASES]


def on_rank(rank: int, world_size: int, folder: str) -> None:
    """Write the phases of the layouts with messages to a file of the first rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    lines = [f"{layout}\t{','.join(phases_of(layout))}" for layout in ("pieces", "sharded")]
    if rank == 0:
        Path(folder, "phases").write_text("\n".join(lines), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured() -> dict[str, list[str]]:
    """Return for each layout its phases."""
    found = {"one": phases_of("one")}
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, args=(2, folder), nprocs=2)
        for line in Path(folder, "phases").read_text("utf-8").splitlines():
            layout, _, phases = line.partition("\t")
            found[layout] = phases.split(",")
    return found


def draw(phases: dict[str, list[str]]) -> str:
    """Return the drawing: a column for each layout, a row for each phase."""
    order = list(PHASES)
    width, height = len(LAYOUTS) * _COLUMN + _GAP, _TOP + len(order) * _ROW + _GAP
    parts: list[str] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
        "<title>The phases of a step in three layouts</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{_CARD}"/>',
    ]
    for column, (layout, (title, note)) in enumerate(LAYOUTS.items()):
        left = _GAP + column * _COLUMN
        parts += [_text(left, 34, title, 15, _INK, bold=True), _text(left, 54, note, 10.5, _SOFT)]
        for row, phase in enumerate(order):
            if phase not in phases[layout]:
                continue
            top, box = _TOP + row * _ROW, _COLUMN - _GAP
            is_message = phase.startswith("send")
            fill = _MESSAGE if is_message else _WORK
            parts.append(f'<rect x="{left}" y="{top}" width="{box}" height="{_ROW - 12}" rx="6" fill="{fill}"/>')
            mark = "⇄ " if is_message else ""
            head, line = PHASES[phase]
            parts += [
                _text(left + 12, top + 21, mark + head, 13, _INK, bold=True),
                _text(left + 12, top + 39, line, 11, _SOFT),
            ]
        rows = [order.index(phase) for phase in order if phase in phases[layout]]
        for above, below in itertools.pairwise(rows):
            x = left + 20
            y0, y1 = _TOP + above * _ROW + _ROW - 12, _TOP + below * _ROW
            parts.append(f'<path d="M{x} {y0}V{y1}" stroke="{_SOFT}" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: float, color: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{weight}>{escape(text, quote=False)}</text>'


def main() -> int:
    """Measure and draw; return the exit code."""
    found = measured()
    for layout, phases in found.items():
        print(f"{layout:8} {', '.join(phases)}")
    OUT.write_text(draw(found), "utf-8")
    print(OUT.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
