"""Draw the phases of a step in three layouts, as they run.

    python scripts/step_diagram.py

Steps two matrices on one process, then on two with FSDP2's placements and with sharded state, under PyTorch's profiler,
and reads the named ranges of the first bucket of matrices from the profile. Writes docs/assets/step.svg. Phases that
only start or await a message are drawn as arrows between ranks; the others are work on this rank. The drawing has dark
colours where the page has.
"""

from __future__ import annotations

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

# Layout -> (lines above its column, name, who holds what).
LAYOUTS = {
    "one": (("one", "device"), "One device", "everything is here"),
    "pieces": (
        ("FSDP2,", "TP, DDP"),
        "FSDP2, tensor parallelism, DDP",
        "ranks hold pieces, or copies, of the matrices",
    ),
    "sharded": (("sharded", "state"), "Sharded state", "ranks hold all weights, each its part of the state"),
}

# Phase -> (title, what happens), in the order of `BucketStep.run`.
PHASES = {
    "send gradients": ("gradients to their owners", "who average them over the ranks"),
    "momentum": ("momentum", "element-wise, m += (1 - mu)(g - m)"),
    "send directions": ("directions to their owners", "pieces become whole matrices"),
    "orthogonalize": ("orthogonalise", "whole matrices, on their owners"),
    "send updates": ("updates to who has the pieces", "matrices become pieces again"),
    "update weights": ("weights", "decay, and a step against the update"),
    "send weights": ("weights to all ranks", "from the owners of the entries"),
}

# Name of a class of the drawing -> its colour on a light and on a dark page.
_COLORS = {
    "card": ("#ffffff", "#1c2128"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9ea7b3"),
    "work": ("#b6d4fb", "#1f4b82"),
    "message": ("#fbd0a5", "#7a4510"),
}

# Narrow enough that its text can be read on a phone: names of phases on the left, a column of marks for each layout.
_WIDTH, _LEFT, _FIRST, _COLUMN = 456, 16, 302, 59
_TOP, _ROW, _MARK_WIDTH, _MARK_HEIGHT = 60, 48, 44, 32


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
    """Return the drawing: a row for each phase, a column for each layout, and below them what they mean."""
    order = list(PHASES)
    parts: list[str] = []
    for row, phase in enumerate(order):
        title, note = PHASES[phase]
        top = _TOP + row * _ROW
        parts += [_text(_LEFT, top + 20, title, 14, "ink", bold=True), _text(_LEFT, top + 37, note, 12.5, "soft")]
    for column, (layout, (lines, _, _)) in enumerate(LAYOUTS.items()):
        x = _FIRST + column * _COLUMN
        parts += [_text(x, 26 + 16 * i, line, 12.5, "ink", centred=True) for i, line in enumerate(lines)]
        rows = [order.index(phase) for phase in order if phase in phases[layout]]
        middle = _TOP + _ROW // 2
        parts.append(f'<path d="M{x} {middle + rows[0] * _ROW}V{middle + rows[-1] * _ROW}" class="line"/>')
        for row in rows:
            parts += _mark(x, middle + row * _ROW, is_message=order[row].startswith("send"))
    below = _TOP + len(order) * _ROW + 32
    for x, is_message, meaning in ((38, False, "work on this rank"), (224, True, "a message between ranks")):
        parts += [*_mark(x, below, is_message=is_message), _text(x + 32, below + 5, meaning, 12.5, "ink")]
    for _, name, note in LAYOUTS.values():
        below += 42
        parts += [_text(_LEFT, below, name, 12.5, "ink", bold=True), _text(_LEFT, below + 17, note, 12.5, "soft")]
    height = below + 34
    light, dark = (
        "".join(f".{name}{{fill:{both[theme]}}}" for name, both in _COLORS.items())
        + f".line{{stroke:{_COLORS['soft'][theme]};stroke-width:1.5}}"
        for theme in (0, 1)
    )
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">',
        "<title>The phases of a step in three layouts</title>",
        f"<style>{light}@media (prefers-color-scheme: dark){{{dark}}}</style>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" class="card"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _mark(x: float, y: float, *, is_message: bool) -> list[str]:
    """Return the mark of a phase around a point."""
    place = f'x="{x - _MARK_WIDTH // 2}" y="{y - _MARK_HEIGHT // 2}" width="{_MARK_WIDTH}" height="{_MARK_HEIGHT}"'
    box = f'<rect {place} rx="6" class="{"message" if is_message else "work"}"/>'
    return [box, _text(x, y + 6, "⇄", 17, "ink", centred=True)] if is_message else [box]


def _text(x: float, y: float, text: str, size: float, color: str, *, bold: bool = False, centred: bool = False) -> str:
    style = (' font-weight="600"' if bold else "") + (' text-anchor="middle"' if centred else "")
    return f'<text x="{x}" y="{y}" font-size="{size}" class="{color}"{style}>{escape(text, quote=False)}</text>'


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
