"""Messages that the page of troubleshooting shows are those that users get."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.comms import comparing

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")


def shown(kind):
    """The messages of a kind in the page, each as one line."""
    found = re.findall(rf"^```text\n{kind}: (.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    return [" ".join(message.split()) for message in found]


def test_a_parameter_that_nothing_covers():
    model = nn.Module()
    model.mystery = nn.Parameter(torch.zeros(16, 16))
    with pytest.raises(ValueError, match="no rule covers") as error:
        quintic.param_groups(model)
    assert shown("ValueError") == [str(error.value)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)


def test_warnings_are_those_of_the_page():
    fused = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"qkv_proj": nn.Linear(8, 24)})])})
    scored = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "scores": nn.Linear(8, 5)})
    messages = []
    for model in (fused, scored, Net()):
        with pytest.warns(UserWarning) as warned:  # noqa: PT030
            quintic.param_groups(model)
        messages += [str(warning.message) for warning in warned]
    assert shown("UserWarning") == messages


def test_ranks_that_differ(monkeypatch):
    other = {str: "another digest", list: ["weight of shape (3,)"]}
    monkeypatch.setattr(comparing, "all_gather_values", lambda value, group: [value, other[type(value)]])
    message = comparing.difference(["weight of shape (2,)"], (0, 1), None)
    [beginning] = shown("RuntimeError")
    assert beginning.endswith(": ...")
    assert message.startswith(beginning.removesuffix("..."))
