"""Several text sources in one dataset: sources with weights for training, and a source for validation only.

    quintic train --data "notes/=0.7 web.jsonl=0.3" --val-data held_out/

A weight is the fraction of the training tokens that comes from a source, regardless of its size:
`quintic.data.rows.MixedRows` takes rows from the sources in proportion, and reads a small source more often. Preparing
writes the sources one after the other into one dataset with one tokenizer, which is trained on samples of all sources
in proportion to their weights.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quintic.data.open_source import open_source
from quintic.data.source import Source, SplitName, slug
from quintic.errors import DataError

__all__ = ["joined", "open_sources", "parse_mixture"]


def parse_mixture(spec: str) -> list[tuple[str, float]] | None:
    """Return the sources and weights of a mixture, two or more words `SOURCE=WEIGHT`; None for a single source.

    Raises:
        DataError: only some words have a weight, a weight is not a positive number, or a source is given twice.

    >>> parse_mixture("a.txt=0.7 b/=0.3")
    [('a.txt', 0.7), ('b/', 0.3)]
    """
    words = [word.rpartition("=") for word in spec.split()]
    # The path of a single source may have spaces and equals signs, too.
    if len(words) < 2 or not any(sign for _, sign, _ in words) or Path(spec).expanduser().exists():
        return None
    found: list[tuple[str, float]] = []
    for source, _, number in words:
        try:
            weight = float(number) if source else math.nan
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise DataError(
                f"--data {spec!r}: {source or number!r} has no weight; write SOURCE=WEIGHT for each source of a "
                "mixture, with weights above 0 and no spaces in a path"
            )
        if source in dict(found):
            raise DataError(f"--data {spec!r}: {source} is given twice; give it once, with the sum of its weights")
        found.append((source, weight))
    return found


def open_sources(spec: str, val_data: str | None, *, cache_dir: Path, text_field: str) -> tuple[Source, ...]:
    """Open the sources of a dataset: those of `spec`, followed by `val_data` if validation has a source of its own.

    Raises:
        DataError: as `parse_mixture` and `open_source`; or ``val_data`` is a mixture, or one of the training sources.
    """
    words = parse_mixture(spec) or [(spec, 1.0)]
    if val_data is not None:
        if parse_mixture(val_data) is not None:
            raise DataError(f"--val-data {val_data!r}: takes one source; put several into one folder")
        if val_data in dict(words):
            raise DataError(
                f"--val-data {val_data}: is also trained on (--data), so its loss would not show how the model does on "
                "new text; give other text, or leave out --val-data to hold back some documents"
            )
    total = sum(weight for _, weight in words)
    side: SplitName | None = None if val_data is None else "train"
    sources = [
        replace(open_source(name, cache_dir=cache_dir, text_field=text_field), weight=weight / total, side=side)
        for name, weight in words
    ]
    if val_data is not None:
        held_back = open_source(val_data, cache_dir=cache_dir, text_field=text_field)
        sources.append(replace(held_back, weight=0.0, side="val"))
    return tuple(sources)


def joined(sources: Sequence[Source], spec: str) -> Source:
    """Return one source with the documents of all sources, one after the other."""
    if len(sources) == 1:
        return sources[0]
    return Source(
        name=slug("-".join(source.name for source in sources)),
        spec=spec,
        files=tuple(file for source in sources for file in source.files),
        identity=json.dumps([[source.weight, source.side, source.identity, len(source.files)] for source in sources]),
        is_remote=any(source.is_remote for source in sources),
        notes=tuple(note for source in sources for note in source.notes),
    )
