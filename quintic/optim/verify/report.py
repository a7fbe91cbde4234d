"""The report of `quintic.verify`: the differences between a step and the reference, merged from all ranks.

Every rank makes an `RankReport`; all ranks gather all reports and merge them (`merged`) into the same `Verification`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Difference", "RankReport", "Verification", "merge_reports", "severity_key"]

# The most differences that are printed.
_MOST_PRINTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the step and the reference in one tensor of one matrix."""

    name: str
    """The name of the parameter."""
    tensor: str
    """`"weight"` (with a master, the value in full precision), or the name of a state."""
    matrix: int | None
    """The number of the matrix in the parameter's view, from 0; None for AdamW's parameters."""
    num_matrices: int
    """The number of matrices of the parameter; 0 for AdamW's."""
    ranks: tuple[int, ...]
    """Global ranks that hold wrong entries; if no entry is wrong, ranks that hold the matrix."""
    absolute: float
    """Largest absolute difference of an entry."""
    relative: float
    """`absolute` over the largest change of a weight by the reference; for state, over its largest entry."""
    ratio: float
    """Largest quotient of an entry's difference and the difference that rounding explains: above 1 is wrong."""

    def __str__(self) -> str:
        # As in "layers.0.weight, matrix 1 of 3, weight on rank 2: off by 1e-3, 0.1 of the largest change, ...".
        which = "" if self.matrix is None else f", matrix {self.matrix} of {self.num_matrices}"
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        of = "largest change" if self.tensor == "weight" else "largest entry"
        return (
            f"{self.name}{which}, {self.tensor} on {where}: off by {self.absolute:.2g}, {self.relative:.2g} of the "
            f"{of}, {self.ratio:.2g} times what rounding explains"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`, equal on all ranks; `print` it, or read `ok`."""

    num_ranks: int
    # The next two count each parameter once, though several ranks may hold it.
    num_parameters: int
    """The number of parameters that have a gradient on any rank."""
    num_matrices: int
    """The number of matrices in these parameters."""
    worst: Difference | None
    """The difference with the largest `ratio`; None if there was nothing to compare."""
    wrong: tuple[Difference, ...]
    """The differences that rounding does not explain, worst first."""
    problems: tuple[str, ...]
    """Mistakes that were found without a step, one sentence each."""

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
        # One line if all is right; otherwise a line for each difference, worst first, then the problems.
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
    """The number of matrices of each parameter that has a gradient, by name; 0 for AdamW's."""
    problems: list[str]
    options: dict[tuple[str, tuple[int, ...]], dict[str, str]]
    """(name, ranks) of each shared parameter -> its options as text."""
    copies: dict[tuple[str, str], tuple[int, int]]
    """(name, box and ranks) of each piece of a shared parameter here -> (this rank, checksum of its weights)."""


def severity_key(difference: Difference) -> tuple[float, str, str, int]:
    """Return the sort key of a difference; sorting puts the worst first."""
    return -difference.ratio, difference.name, difference.tensor, difference.matrix or 0


def merge_reports(reports: Sequence[RankReport]) -> Verification:
    """Return the report for the reports of all ranks, in rank order."""
    # One difference for each tensor of a matrix: ranks may hold different pieces of it.
    differences: dict[tuple[str, str, int | None], Difference] = {}
    num_matrices: dict[str, int] = {}
    for rank_report in reports:
        num_matrices |= rank_report.num_matrices
        # The same tensor of another rank: keep the worse difference, and both ranks if both are wrong.
        for difference in rank_report.differences:
            key = (difference.name, difference.tensor, difference.matrix)
            differences[key] = _merge_differences(differences[key], difference) if key in differences else difference
    ordered = sorted(differences.values(), key=severity_key)
    # Problems of single ranks, and problems that only a comparison of ranks shows.
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
    """Yield a line for each option that differs between ranks that share a parameter."""
    first: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}  # of the first rank that shares it
    for rank_report in reports:
        for key, options in rank_report.options.items():
            expected = first.setdefault(key, options)
            # A key that only one of them has, a user's own, differs as well.
            for option in sorted(expected.keys() | options.keys()):
                one, other = expected.get(option), options.get(option)
                if one != other:
                    yield f"{key[0]}: the ranks {key[1]} that share it have {option}={one} and {option}={other}"


def _unequal_copies(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield a line for each parameter whose copies on several ranks are not equal."""
    # Place -> checksum -> the ranks that have it: more than one checksum at a place is an error.
    by_place: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank_report in reports:
        for place, (rank, checksum) in rank_report.copies.items():
            by_place.setdefault(place, {}).setdefault(checksum, []).append(rank)
    # One line for each parameter, though it may have many places.
    seen: set[str] = set()
    for (name, _), ranks in by_place.items():
        if len(ranks) > 1 and name not in seen:
            seen.add(name)
            sides = " and ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in ranks.values())
            yield (
                f"{name}: the copies of its weights on {sides} differ; begin with equal weights (the same seed, or a "
                f"broadcast, as DDP makes it), and change them on all ranks alike"
            )


def _merge_differences(a: Difference, b: Difference) -> Difference:
    """Merge the differences that two ranks report for one tensor: the larger one, with the ranks of both."""
    worse, better = (a, b) if a.ratio >= b.ratio else (b, a)
    # A rank without wrong entries is not named beside one that has some.
    if worse.ratio > 1 >= better.ratio:
        return worse
    return replace(worse, ranks=tuple(sorted({*worse.ranks, *better.ranks})))
