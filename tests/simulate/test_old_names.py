"""Names from before a renaming, which still work and say what to use now."""

import pytest
import torch

import quintic
from quintic.rehearsal.rehearse import rehearse
from quintic.simulate.simulate import simulate_plan


def test_rehearse_is_the_old_name_of_simulate_plan():
    optimizer = quintic.Muon([torch.nn.Parameter(torch.empty(64, 32, device="meta"))])
    with pytest.warns(DeprecationWarning, match="use quintic.simulate.simulate.simulate_plan"):
        old = rehearse(optimizer, (2, 2), ("replicate", "fsdp"), node_size=2)
    new = simulate_plan(optimizer, (2, 2), ("replicate", "fsdp"), node_size=2)
    assert old.mesh == new.mesh
    assert old.flops.tolist() == new.flops.tolist()
    assert old.bytes_sent.tolist() == new.bytes_sent.tolist()
