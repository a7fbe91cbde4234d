"""The names of the library's rules, for options that are read without importing PyTorch."""

from typing import Literal

__all__ = ["RuleName"]

RuleName = Literal[
    "muon",
    "normuon",
    "adamuon",
    "muoneq",
    "muon_plus",
    "nanochat",
    "muown",
    "hyperball",
    "radial_brake",
    "relative_update",
    "two_rate",
    "ema_nesterov",
    "aurora",
]
"""The keys of `table.RULES`."""
