"""Divides the cases of a file among processes."""

import itertools
from collections.abc import Sequence


def cases_of_share(cases: Sequence[str], number: int, shares: int) -> list[str]:
    """Return the cases of share `number` of so many, given the cases' ids; every case is in one share.

    Neighbouring cases of a test compile similar kernels, so each share has a run of neighbours of every test. Tests
    take turns at who comes first: otherwise share 0 would have all tests with a single case.
    """
    chosen: list[str] = []
    for turn, (_, group) in enumerate(itertools.groupby(cases, key=lambda case: case.partition("[")[0])):
        of_test, place = list(group), (number + turn) % shares
        chosen += of_test[len(of_test) * place // shares : len(of_test) * (place + 1) // shares]
    return chosen
