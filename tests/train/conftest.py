"""Runs here write reports without drawings, whose tests are in tests/report."""

import pytest


@pytest.fixture(autouse=True)
def undrawn(no_drawings: None) -> None:
    """Ask for `no_drawings` in every test."""
