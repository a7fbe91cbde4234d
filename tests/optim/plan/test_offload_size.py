"""The pieces that AdamW's offloaded state is loaded in, and that a step keeps to them."""

import pytest
import torch
from delayed_copies import DelayedCopies
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quintic import Muon
from quintic.optim.plan.offload_size import POOL_BUFFERS, adamw_pieces
from quintic.optim.step.offload import offload


def optimizer_of(numels, workspace):
    params = [(f"p{number}", nn.Parameter(torch.ones(numel))) for number, numel in enumerate(numels)]
    group = {"params": params, "algorithm": "adamw"}
    return Muon([group], lr=0.1, offload=True, max_workspace_bytes=workspace)


@given(
    numels=st.lists(st.integers(0, 700), min_size=1, max_size=8),
    workspace=st.integers(1, 20_000),
    has_gaps=st.booleans(),
)
def test_pieces_are_all_entries_in_order_and_of_bounded_size(numels, workspace, has_gaps):
    optimizer = optimizer_of([1], workspace)
    optimizer.plan()
    (group,) = optimizer._plans.groups
    pieces = list(adamw_pieces(group, torch.float32, numels, has_gaps=has_gaps))
    # Two moments of four bytes for each entry; kernels want at least 64 entries.
    limit = max(64, workspace // POOL_BUFFERS // 8 // 64 * 64)
    found = [[] for _ in numels]
    last = 0
    for piece in pieces:
        sizes = []
        for number, run in piece:
            assert number in (last, last + 1)
            last = number
            entries = range(numels[number])[run or slice(None)]
            found[number] += entries
            sizes.append(len(entries))
            assert run is None or (run.start % 64 == 0 and sizes[-1] > 0)
            assert run is None or (numels[number] > limit and not has_gaps)
        assert sum(sizes) <= limit or (has_gaps and max(sizes) > limit)
    assert found == [list(range(numel)) for numel in numels]


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2, 3)])
def test_a_step_loads_the_planned_pieces_without_missing_members(missing, monkeypatch):
    made = []
    monkeypatch.setattr(offload, "Copies", lambda device: made.append(DelayedCopies("late")) or made[-1])
    numels = [200, 1000, 300, 100]
    optimizer = optimizer_of(numels, POOL_BUFFERS * 8 * 448)
    pieces = optimizer.plan().buckets[0].offloaded.pieces
    assert len(pieces) == 4
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = None if number in missing else torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    loaded = [piece for piece in pieces if any(number not in missing for number, _ in piece)]
    assert [kind for kind, _ in made[0].log].count("load") == 2 * len(loaded)
