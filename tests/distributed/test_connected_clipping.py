"""Ranks that parameters connect clip by one norm: that of all their parameters, each counted once."""

import math

import pytest
import torch
from harness import DEVICE, run
from models import local_of
from shared_parameters import LAYOUTS, SHARED, Model, connected_with, world_of
from torch import nn

import quintic


def clip(rank, world_size, title, layout):
    """The norm is that of all parameters that are connected, each counted once, and the same on all of their ranks."""
    shared = SHARED[title]
    sizes = {name: 2.0**number for number, name in enumerate(shared)}

    def parameters_named(model, names):
        """The norm of gradients of 24 equal entries each."""
        return math.sqrt(sum(24 * sizes[name] ** 2 for name in names))

    mine = connected_with(rank, shared)
    connected = {name for name, ranks in shared.items() if mine & set(ranks)}
    model = Model(rank, shared, layout)
    for scope, max_norm in (("all", math.inf), ("adamw", 1.0), ("all", 1.0)):
        for name, param in model.params.items():
            param.grad = torch.full_like(param, sizes[name])
        norm = quintic.clip_grad_norm_(model.optimizer, max_norm, scope=scope).item()
        assert norm == pytest.approx(parameters_named(model, connected) if scope == "all" else 0.0, rel=2.0**-23)
    if layout != "sharded":
        for name, param in model.params.items():
            values = local_of(param.grad)
            torch.testing.assert_close(
                values, torch.full_like(values, sizes[name] / parameters_named(model, connected))
            )


@pytest.mark.parametrize(
    ("title", "layout"),
    [
        *(("expert and dense", layout) for layout in LAYOUTS),
        ("chain", "cut"),
        ("an island of one", "cut"),
        *(
            pytest.param(title, layout, marks=pytest.mark.slow)
            for title, layout in (("pairs of experts", "averaged"), ("ring", "copied"), ("islands", "averaged"))
        ),
    ],
)
def test_connected_ranks_clip_by_one_norm(title, layout):
    run(clip, world_of(SHARED[title]), title, layout, timeout=60)


def clip_what_has_one_name(rank, world_size):
    """The largest of several parameters with one name that ranks do not share counts, so that all ranks clip alike."""
    groups = [
        {"params": [("dense", nn.Parameter(torch.zeros(2, 2, device=DEVICE)))], "comms": "averaged"},
        {"params": [("mine", nn.Parameter(torch.zeros(1, device=DEVICE)))], "algorithm": "adamw"},
    ]
    if rank == 2:
        last = nn.Parameter(torch.zeros(1, device=DEVICE))
        groups.append({"params": [("last", last)], "algorithm": "adamw"})
    optimizer = quintic.Muon(groups)

    def norm_of(mine, scope="all"):
        optimizer.zero_grad()
        for group in groups:
            [(name, param)] = group["params"] if isinstance(group["params"][0], tuple) else [(None, None)]
            param.grad = torch.full_like(param, {"dense": 1.0, "mine": mine, "last": 6.0}[name])
        return quintic.clip_grad_norm_(optimizer, math.inf, scope=scope).item()

    assert norm_of(3.0) == 7.0
    assert norm_of(float(rank)) == pytest.approx(math.sqrt(4 + 4 + 36))
    assert norm_of(3.0, "adamw") == pytest.approx(math.sqrt(9 + 36))
    # Broken on one rank, and known to all.
    assert math.isnan(norm_of(math.nan if rank == 1 else 3.0))
    assert norm_of(math.inf if rank == 1 else 3.0) == math.inf
    norm_of(math.nan if rank == 0 else 0.0)
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        quintic.clip_grad_norm_(optimizer, 1.0, scope="all", error_if_nonfinite=True)
    assert norm_of(3.0) == 7.0


def test_parameters_of_one_name_on_ranks_that_do_not_share_them():
    run(clip_what_has_one_name, 3, timeout=40)


def clip_in_turns(rank, world_size):
    shared = {"expert": (0, 1), "dense": (0, 1, 2)}
    model = Model(rank, shared, own={"dense": {"step_every": 2}})
    for step in range(4):
        model.give()
        norm = quintic.clip_grad_norm_(model.optimizer, math.inf, scope="all").item()
        assert norm == pytest.approx(math.sqrt(24 * (1 + step % 2)))
        model.optimizer.step()


def test_clipping_of_groups_that_step_at_different_times():
    run(clip_in_turns, 3, timeout=40)
