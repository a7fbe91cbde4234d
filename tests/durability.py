"""Records what is flushed to disk and what is renamed, in order, and says which renames survive a crash."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Synced(NamedTuple):
    """A file or folder was flushed, with so much in it: bytes, or the names in a folder."""

    identity: tuple[int, int]
    content: object


class Renamed(NamedTuple):
    """A file or folder got its name."""

    path: Path
    needed: list[Synced]
    """The files that must have been flushed before: one, or a folder and each file in it, in their current state."""
    parent: Synced


def as_it_is(place: Path | int) -> Synced:
    status = os.stat(place)
    is_folder = os.path.isdir(place)
    return Synced((status.st_dev, status.st_ino), sorted(os.listdir(place)) if is_folder else status.st_size)


def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[Synced | Renamed]:
    """Return a list that fills while files are written. Renames of files that are to be deleted are left out."""
    events: list[Synced | Renamed] = []
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(as_it_is(descriptor))

    def watched(rename: Callable[..., None]) -> Callable[..., None]:
        def call(source: str | Path, target: str | Path) -> None:
            source, target = Path(source), Path(target)
            needed = [as_it_is(path) for path in (source, *source.rglob("*"))]
            rename(source, target)
            if not target.name.endswith(".old.tmp"):
                events.append(Renamed(target, needed, as_it_is(target.parent)))

        return call

    monkeypatch.setattr(os, "fsync", watched_fsync)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    return events


def durable_names(events: list[Synced | Renamed]) -> list[str]:
    """Return the names that were given, in order; an `AssertionError` says which one a crash may undo or empty."""
    names = []
    for number, event in enumerate(events):
        if isinstance(event, Renamed):
            before, after = events[:number], events[number + 1 :]
            for needed in event.needed:
                assert needed in before, f"{event.path.name}: renamed before all of it was flushed"
            flushed = [place.identity for place in after if isinstance(place, Synced)]
            assert event.parent.identity in flushed, f"{event.path.name}: its folder was not flushed afterwards"
            names.append(event.path.name)
    return names
