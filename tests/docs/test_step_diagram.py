"""The drawing of a step has the phases that a step has."""

import re
import sys
from pathlib import Path

import pytest

from quintic.optim.step import bucket_step

ROOT = Path(__file__).resolve().parents[2]

sys.path.append(str(ROOT / "scripts"))

import step_diagram  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_drawing_is_that_of_real_steps():
    phases = step_diagram.measured()
    assert phases["one"] == ["momentum", "orthogonalize", "update weights"]
    assert step_diagram.OUT.read_text("utf-8") == step_diagram.draw(phases), (
        "python scripts/step_diagram.py draws it anew"
    )


def test_every_phase_of_a_bucket_is_drawn():
    ranges = re.findall(r'self\.ranges\["([\w ]+)"\]', Path(bucket_step.__file__).read_text("utf-8"))
    awaited = {name for name in ranges if name.startswith("receive")}
    assert set(ranges) - awaited - {"update"} == set(step_diagram.PHASES)
