"""Counts what a step of the library goes through once its plan is there and gradients are where they were."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import quintic

PACKAGE = Path(quintic.__file__).parent
# What PyTorch before 2.9 lacks, which nobody has to follow.
OF_OLD_VERSIONS = PACKAGE / "versions.py"


def calls_of(function):
    """Return for each file of the library the number of calls into it, and of resumptions after a yield."""
    calls = Counter()

    def count(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and path != OF_OLD_VERSIONS:
            calls[str(path.relative_to(PACKAGE))] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def model_of():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.LayerNorm(32))
        for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))


def steady_calls(optimizer, params):
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return calls_of(optimizer.step)
