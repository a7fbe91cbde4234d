"""The walk of a steady step: the calls into the library once its plan is there and gradients are where they were.

A call is a function of the package that begins, or a generator of it that is resumed. Python 3.11 also counts
comprehensions, later versions do not. The package is `quintic`, without the one file that differs between versions of
PyTorch. A change of file is a call in another file than the call before it: what a reader has to turn to.
"""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import quintic

PACKAGE = Path(quintic.__file__).parent
# What PyTorch before 2.9 lacks, which nobody has to follow.
OF_OLD_VERSIONS = PACKAGE / "versions.py"


class Walk(NamedTuple):
    """The calls of one step, in order: (file, function)."""

    calls: list[tuple[str, str]]

    @property
    def counts(self):
        """The numbers of calls, of files, and of changes of file."""
        files = [file for file, _ in self.calls]
        return len(files), len(set(files)), sum(a != b for a, b in pairwise(files))

    def __str__(self):
        return "\n".join(f"{count:4} {file} {name}" for (file, name), count in Counter(self.calls).most_common())


def walk_of(function):
    calls = []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and path != OF_OLD_VERSIONS:
            calls.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Walk(calls)


def model_of():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))
        for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))


def steady_walk(optimizer, params):
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return walk_of(optimizer.step)
