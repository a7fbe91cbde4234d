"""Figures of a step on several GPUs, and what the project wants of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of each peer: Quintic's contestant that does the same, the layouts in which they are compared, and the limit.
PEERS = {
    "dion-muon": ("quintic", ("ddp", "fsdp2"), 0.8),
    "dion-normuon": ("quintic-neuron", ("ddp", "fsdp2"), 0.8),
    "nanochat": ("quintic-neuron", ("sharded",), 0.9),
    "speedrun": ("quintic-speedrun", ("sharded",), 0.9),
}
TARGET_LAYOUTS = {layout for _, layouts, _ in PEERS.values() for layout in layouts}
PEER_SETS = ("gpt124m", "qwen1.7b")
HIDDEN_LIMIT = 1.25
SCALING_LIMIT, SCALING_SET = 0.9, "qwen1.7b"


def median(row: Mapping[str, Any], name: str) -> float | None:
    """Return the median of a time, None if it was not measured."""
    return row[name]["median"] if name in row else None


def compute_ms(row: Mapping[str, Any], kind: str = "device_") -> float | None:
    """Return milliseconds of a step's computation alone: what filling took in place of sending is taken off."""
    compute, fill = median(row, f"compute_{kind}ms"), median(row, f"fill_{kind}ms")
    return compute if compute is None or fill is None else compute - fill


def hidden(row: Mapping[str, Any]) -> float | None:
    """Return a step's time over the larger of what it sends alone and computes alone, all with busy devices."""
    step, exchange, compute = median(row, "device_ms"), median(row, "exchange_device_ms"), compute_ms(row)
    if step is None or exchange is None or compute is None:
        return None
    return step / max(exchange, compute)


def scaling(row: Mapping[str, Any]) -> float | None:
    """Return the parallel efficiency of orthogonalisation: 1 if N ranks need an Nth of one device's time."""
    alone, here = median(row, "orthogonalization_alone_ms"), median(row, "orthogonalization_ms")
    return None if not alone or not here else alone / (row["ranks"] * here)


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        subject: the quantity.
        value: as measured, or None.
        limit: in words.
        met: None if it was not measured.
        detail: the figures behind the value.
    """

    subject: str
    value: float | None
    limit: str
    met: bool | None
    detail: str = ""

    def __str__(self) -> str:
        """Return one line."""
        verdict = {True: "met", False: "**missed**", None: "not measured"}[self.met]
        found = "" if self.value is None else f"{self.value:.3g} "
        detail = f" ({self.detail})" if self.detail else ""
        return f"{verdict}: {self.subject}: {found}[{self.limit}]{detail}"


def targets(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return the targets of everything that was measured, and those whose measurement is missing."""
    of_layouts = [row for row in rows if "layout" in row]
    found: list[Target] = []
    for ranks in sorted({row["ranks"] for row in of_layouts}):
        found += _of_ranks([row for row in of_layouts if row["ranks"] == ranks and row["set"] != "tiny"], ranks)
    return found


def _of_ranks(rows: Sequence[Mapping[str, Any]], ranks: int) -> Iterator[Target]:
    quintic = [row for row in rows if row["family"] == "quintic"]
    for row in quintic:
        name = f"{row['contestant']}, {row['set']}, {row['layout']} on {ranks}"
        if row.get("error"):
            yield Target(f"{name}: runs", None, "no error", False, row["error"])
            continue
        if "differing_entries" in row:
            entries = row["differing_entries"]
            yield Target(f"{name}: entries whose bits differ", entries, "0", entries == 0)
    for row in quintic:
        ratio = scaling(row)
        if row["set"] == SCALING_SET and row["layout"] not in ("single", "replicated") and ratio is not None:
            name = f"{row['contestant']}, {row['set']}, {row['layout']}: efficiency of orthogonalisation on {ranks}"
            alone, here = median(row, "orthogonalization_alone_ms"), median(row, "orthogonalization_ms")
            yield Target(
                name, ratio, f"at least {SCALING_LIMIT}", ratio >= SCALING_LIMIT, f"{alone:.3g} ms alone, {here:.3g} ms"
            )
    for row in quintic:
        ratio = hidden(row)
        if ratio is not None and row["layout"] != "single":
            name = f"{row['contestant']}, {row['set']}, {row['layout']}: step over the larger of its parts on {ranks}"
            yield Target(name, ratio, f"at most {HIDDEN_LIMIT}", ratio <= HIDDEN_LIMIT, _parts(row))
    by_key = {(row["contestant"], row["set"], row["layout"]): row for row in rows if not row.get("error")}
    sets = [name for name in PEER_SETS if any(row["set"] == name for row in rows)]
    measured = {row["layout"] for row in rows}
    for peer, (ours, layouts, limit) in PEERS.items():
        for name in sets:
            for layout in (layout for layout in layouts if layout in measured):
                one, other = (by_key.get((contestant, name, layout), {}) for contestant in (ours, peer))
                yield from _against(f"{ours} over {peer}, {name}, {layout} on {ranks}", one, other, limit)


def _parts(row: Mapping[str, Any]) -> str:
    """Return the times of a step and of its parts."""
    values = (median(row, "device_ms"), median(row, "exchange_device_ms"), compute_ms(row))
    return "step {} ms, exchange {} ms, compute {} ms".format(*(f"{value:.3g}" for value in values))


def _against(subject: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], limit: float) -> Iterator[Target]:
    """Yield a step's time over a peer's, both from idle devices: each at its fastest, and each without a CUDA graph."""
    busy = _fastest(ours, theirs, ["device_ms"])
    for way, kinds in {"at its fastest": ["step_ms", "replay_ms"], "without a CUDA graph": ["step_ms"]}.items():
        found = _fastest(ours, theirs, kinds)
        if found is None:
            yield Target(f"{subject}: step {way}", None, f"at most {limit}", None)
            continue
        one, other = found
        detail = f"{one:.3g} / {other:.3g} ms" + (f"; with busy devices {busy[0] / busy[1]:.3g}" if busy else "")
        yield Target(f"{subject}: step {way}", one / other, f"at most {limit}", one / other <= limit, detail)


def _fastest(ours: Mapping[str, Any], theirs: Mapping[str, Any], kinds: Sequence[str]) -> tuple[float, float] | None:
    """Return each one's smallest median of these kinds; None where one was not measured."""
    one, other = ([value for kind in kinds if (value := median(row, kind)) is not None] for row in (ours, theirs))
    return (min(one), min(other)) if one and other else None
