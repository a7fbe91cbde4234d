"""The bytes a weight in the page on memory: those of the state that these options make."""

import re
from pathlib import Path

import pytest
import torch

import quintic
from quintic.optim.rules.rule import PARAM_SHAPED_STATE
from quintic.optim.state.placement import planned_state, state_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "save-memory.md"


def rows():
    """(dtype of the weights, options, bytes of matrices, bytes of others) of each line, bytes as [(part, ...), sum]."""
    lines = PAGE.read_text("utf-8").splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| weights | options"))
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            return
        dtype, options, *sizes = [cell.strip() for cell in line.strip("|").split("|")][:4]
        parts = [re.fullmatch(r"(\d+) \+ (\d+) \+ (\d+) = (\d+)", size).groups() for size in sizes]
        yield dtype, options, *([tuple(map(int, of_kind[:3])), int(of_kind[3])] for of_kind in parts)


@pytest.mark.parametrize(("dtype", "options", "matrices", "others"), list(rows()), ids=str)
def test_bytes_a_weight_are_those_of_the_state(dtype, options, matrices, others):
    chosen = {} if options == "none" else eval(f"dict({options.strip('`')})")
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 256, bias=False))
    optimizer = quintic.Muon(quintic.param_groups(model.to(getattr(torch, dtype))), **chosen)
    found = {}
    for group in optimizer._plans.current_groups():
        for param in group.params:
            state = state_bytes(param, group)
            if group.offload:
                state -= sum(
                    value.nbytes for name, value in planned_state(param, group).items() if name in PARAM_SHAPED_STATE
                )
            # AdamW has a count of steps besides, which is 4 bytes.
            found[group.algorithm] = (param.dtype.itemsize, param.dtype.itemsize, state // param.numel())
            assert state % param.numel() == (4 if group.algorithm == "adamw" else 0)
    assert (found["muon"], found["adamw"]) == (matrices[0], others[0])
    assert sum(matrices[0]) == matrices[1]
    assert sum(others[0]) == others[1]


def test_the_table_has_all_options_that_change_the_state():
    named = " ".join(options for _, options, *_ in rows())
    assert {'"bf16"', '"int8"', '"fp32"', '"mantissa"', '"8bit"', "offload=True"} <= set(
        re.findall(r'"\w+"|offload=True', named)
    )
    assert len(list(rows())) >= 10
