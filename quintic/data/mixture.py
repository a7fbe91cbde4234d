"""Several text sources as one: their weights in training, and text that is only for validation.

    quintic train --data "notes/=0.7 web.jsonl=0.3" --val-data held_out/

Weights are shares of the training tokens, whatever the sources' sizes: `quintic.data.rows.MixedRows` takes rows from
them accordingly, and reads a small source more often. Preparing writes the sources one after the other into one
dataset with one tokenizer, trained on a sample of each in its share.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quintic.data.dataset import SplitName
from quintic.data.source import Source, slug
from quintic.data.sources import open_source
from quintic.data.survey import HASH_RANGE, Survey, survey, teachable, text_hash
from quintic.errors import DataError

__all__ = ["MixedSource", "joined", "mixture_words", "open_sources", "survey_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource:
    """One source of a dataset.

    Attributes:
        source: its documents.
        weight: share of the training tokens; 0 for validation text.
        side: where all of its documents go; they are divided by hash when None.
    """

    source: Source
    weight: float
    side: SplitName | None


def mixture_words(spec: str) -> list[tuple[str, float]] | None:
    """Return the sources and weights of a mixture, `SOURCE=WEIGHT` two or more times; None for a single source.

    Raises:
        DataError: some words have a weight and others none, a weight is no positive number, or a source comes twice.

    >>> mixture_words("a.txt=0.7 b/=0.3")
    [('a.txt', 0.7), ('b/', 0.3)]
    """
    words = [word.rpartition("=") for word in spec.split()]
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
            raise DataError(f"--data {spec!r}: {source} comes twice; give it once, with the sum of its weights")
        found.append((source, weight))
    return found


def open_sources(spec: str, val_data: str | None, *, cache_dir: Path, text_field: str) -> tuple[MixedSource, ...]:
    """Open the sources of a dataset: one, or those of a mixture, and the one for validation.

    Args:
        spec: as for `open_source`, or a mixture.
        val_data: source of the validation text; the documents of the others are divided when None.
        cache_dir: as for `open_source`.
        text_field: as for `open_source`, of all sources.

    Raises:
        DataError: as `mixture_words` and `open_source`; or ``val_data`` is a mixture, or one of the other sources.
    """
    words = mixture_words(spec) or [(spec, 1.0)]
    if val_data is not None:
        if mixture_words(val_data) is not None:
            raise DataError(f"--val-data {val_data!r}: takes one source; put several into one folder")
        if val_data in dict(words):
            raise DataError(
                f"--val-data {val_data}: is also read for training (--data), and says nothing about other text then; "
                "give other text, or leave it out to hold a part back"
            )
    total = sum(weight for _, weight in words)
    side: SplitName | None = None if val_data is None else "train"
    sources = [
        MixedSource(
            source=open_source(name, cache_dir=cache_dir, text_field=text_field), weight=weight / total, side=side
        )
        for name, weight in words
    ]
    if val_data is not None:
        held_back = open_source(val_data, cache_dir=cache_dir, text_field=text_field)
        sources.append(MixedSource(source=held_back, weight=0.0, side="val"))
    return tuple(sources)


def joined(sources: Sequence[MixedSource], spec: str) -> Source:
    """Return the documents of all sources, one after the other, as one source."""
    if len(sources) == 1:
        return sources[0].source
    every = [mixed.source for mixed in sources]
    sizes = [source.text_bytes for source in every]
    return Source(
        name=slug("-".join(source.name for source in every)),
        spec=spec,
        parts=tuple(part for source in every for part in source.parts),
        identity=json.dumps(
            [[mixed.weight, mixed.side, mixed.source.identity, len(mixed.source.parts)] for mixed in sources]
        ),
        text_bytes=sum(size for size in sizes if size is not None) if None not in sizes else None,
        is_remote=any(source.is_remote for source in every),
        notes=tuple(note for source in every for note in source.notes),
    )


def survey_all(
    sources: Sequence[MixedSource], *, val_frac: float, max_bytes: int | None, sample_bytes: int
) -> tuple[Survey, list[int]]:
    """Survey each source; return the text for the tokenizer, and each source's threshold.

    Args:
        sources: of one dataset.
        val_frac: as for `survey`.
        max_bytes: as for `survey`, of each source.
        sample_bytes: as for `survey`; each source has its share of it.

    Raises:
        DataError: as `survey`.
    """
    if len(sources) == 1:
        alone = survey(sources[0].source, val_frac=val_frac, max_bytes=max_bytes, sample_bytes=sample_bytes)
        return alone, [alone.threshold]
    texts: list[bytes] = []
    thresholds: list[int] = []
    num_bytes = 0
    for mixed in sources:
        if mixed.side == "val":
            if next(mixed.source.documents_from((0, 0)), None) is None:
                raise DataError(f"--val-data {mixed.source.spec}: there is no text in it; give a source with text")
            thresholds.append(HASH_RANGE)
            continue
        share = survey(
            mixed.source,
            val_frac=val_frac if mixed.side is None else 0.0,
            max_bytes=max_bytes,
            sample_bytes=max(1, int(sample_bytes * mixed.weight)),
        )
        texts += share.texts
        num_bytes += share.text_bytes
        thresholds.append(share.threshold)
    # Each sample is small enough by itself; together they may not be.
    texts = teachable([(text_hash(text), text) for text in texts])
    return Survey(texts=texts, text_bytes=num_bytes, threshold=thresholds[0]), thresholds
