"""The report of `quintic.verify`: differences between a step and the reference, of all ranks together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Difference", "RankReport", "Verification", "merge_reports", "severity_key"]

# Differences that are printed.
_MOST_PRINTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the step and the reference in one tensor of one matrix."""

    name: str
    """The name of the parameter."""
    tensor: str
    """`"weight"` (the value behind it, if it has a master), or the name of a state."""
    matrix: int | None
    """The number of the matrix in the parameter's view, from 0; None for parameters of AdamW."""
    num_matrices: int
    ranks: tuple[int, ...]
    """Global ranks that hold entries which are wrong; where none are, ranks that hold the matrix."""
    absolute: float
    """Largest absolute difference of an entry."""
    relative: float
    """The same, relative to the largest change of a weight that the reference makes; of state, to its largest entry."""
    ratio: float
    """Largest difference of an entry over what rounding explains there: more than 1 is wrong."""

    def __str__(self) -> str:
        which = "" if self.matrix is None else f", matrix {self.matrix} of {self.num_matrices}"
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        of = "largest change" if self.tensor == "weight" else "largest entry"
        return (
            f"{self.name}{which}, {self.tensor} on {where}: off by {self.absolute:.2g}, {self.relative:.2g} of the "
            f"{of}, {self.ratio:.2g} times what rounding explains"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`; the same on all ranks. Print it."""

    num_ranks: int
    num_parameters: int
    """Parameters that have a gradient on any rank."""
    num_matrices: int
    """Matrices of these."""
    worst: Difference | None
    """The largest of all by `ratio`; None if there is nothing to compare."""
    wrong: tuple[Difference, ...]
    """The differences that rounding does not explain, worst first."""
    problems: tuple[str, ...]
    """Mistakes found without a step, one sentence each."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.wrong and not self.problems

    @property
    def is_bitwise(self) -> bool:
        """Return whether step and reference agree to the last bit."""
        return self.worst is None or self.worst.absolute == 0

    def __str__(self) -> str:
        checked = (
            f"{_count(self.num_parameters, 'parameter', 's')} ({_count(self.num_matrices, 'matri', 'ces', 'x')}) "
            f"on {_count(self.num_ranks, 'rank', 's')}"
        )
        if self.ok:
            agree = "agree with the reference to the last bit" if self.is_bitwise else f"agree; worst: {self.worst}"
            return f"the step is right: {checked} {agree if self.num_parameters else 'were stepped'}"
        lines = [
            f"THE STEP IS WRONG: of {checked}, {_count(len(self.wrong), 'tensor', 's')} differ "
            f"by more than rounding explains"
        ]
        lines += [str(difference) for difference in self.wrong[:_MOST_PRINTED]]
        if len(self.wrong) > _MOST_PRINTED:
            lines.append(f"and {len(self.wrong) - _MOST_PRINTED} more")
        return "\n  ".join([*lines, *self.problems])


def _count(number: int, word: str, plural: str, singular: str = "") -> str:
    return f"{number} {word}{singular if number == 1 else plural}"


@dataclass(frozen=True, slots=True)
class RankReport:
    """The result of one rank."""

    differences: list[Difference]
    num_matrices: dict[str, int]
    """The number of matrices of each parameter that has a gradient; 0 for AdamW."""
    problems: list[str]
    options: dict[tuple[str, tuple[int, ...]], dict[str, str]]
    """The options of each parameter that several ranks share, by its name and the ranks."""
    copies: dict[tuple[str, str], tuple[int, int]]
    """Name and place of what this rank holds of each of these -> its rank, and a checksum of the weights there."""


def severity_key(difference: Difference) -> tuple[float, str, str, int]:
    """Return the sort key of a difference, worst first."""
    return -difference.ratio, difference.name, difference.tensor, difference.matrix or 0


def merge_reports(reports: Sequence[RankReport]) -> Verification:
    """Return the report of what all ranks found."""
    differences: dict[tuple[str, str, int | None], Difference] = {}
    num_matrices: dict[str, int] = {}
    for rank_report in reports:
        num_matrices |= rank_report.num_matrices
        for difference in rank_report.differences:
            key = (difference.name, difference.tensor, difference.matrix)
            differences[key] = _together(differences[key], difference) if key in differences else difference
    ordered = sorted(differences.values(), key=severity_key)
    problems = [text for rank_report in reports for text in rank_report.problems]
    problems += [*_disagreements(reports), *_unequal_copies(reports)]
    return Verification(
        num_ranks=len(reports),
        num_parameters=len(num_matrices),
        num_matrices=sum(num_matrices.values()),
        worst=ordered[0] if ordered else None,
        wrong=tuple(difference for difference in ordered if difference.ratio > 1),
        problems=tuple(dict.fromkeys(problems)),
    )


def _disagreements(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield options of a parameter that differ between the ranks which share it."""
    first: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}
    for rank_report in reports:
        for key, options in rank_report.options.items():
            expected = first.setdefault(key, options)
            for option in sorted(expected.keys() | options.keys()):
                one, other = expected.get(option), options.get(option)
                if one != other:
                    yield f"{key[0]}: the ranks {key[1]} that share it have {option}={one} and {option}={other}"


def _unequal_copies(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield a line for each parameter of which ranks hold copies that are not equal."""
    by_place: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank_report in reports:
        for place, (rank, checksum) in rank_report.copies.items():
            by_place.setdefault(place, {}).setdefault(checksum, []).append(rank)
    seen: set[str] = set()
    for (name, _), ranks in by_place.items():
        if len(ranks) > 1 and name not in seen:
            seen.add(name)
            sides = " and ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in ranks.values())
            yield (
                f"{name}: the copies of its weights on {sides} differ; begin with equal weights (the same seed, or a "
                f"broadcast, as DDP makes it), and change them on all ranks alike"
            )


def _together(a: Difference, b: Difference) -> Difference:
    """Return the difference in one tensor, given those of two ranks."""
    worse, better = (a, b) if a.ratio >= b.ratio else (b, a)
    if worse.ratio > 1 >= better.ratio:
        return worse
    return replace(worse, ranks=tuple(sorted({*worse.ranks, *better.ranks})))
