"""Ranks that parameters connect decide together, also through other ranks; the others do not wait for each other."""

from unittest import mock

import pytest
import torch
from harness import ON_GPUS, run
from models import local_of
from shared_parameters import LAYOUTS, SHARED, Model, connected_with, world_of
from torch import distributed as dist

import quintic
from quintic.optim.comms.connected import Connected


def stop_those_connected(rank, world_size, title, layout, on_nonfinite):
    shared = SHARED[title]
    for bad, where in [(name, ranks[-1]) for name, ranks in shared.items()]:
        model = Model(rank, shared, layout, on_nonfinite=on_nonfinite)
        stopped = where in connected_with(rank, shared)
        model.give([bad] if rank == where else [])
        if stopped and on_nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=f"^{bad}" if rank == where else f"^on rank {where}: {bad}"):
                model.optimizer.step()
        else:
            model.optimizer.step()
            assert model.optimizer.last_step().skipped == stopped
        assert model.moved() == (set() if stopped else model.held()), (bad, where)
        model.give()
        model.optimizer.step()
        assert model.moved() == model.held()
        assert not model.optimizer.last_step().skipped


@pytest.mark.parametrize(
    ("title", "layout"),
    [
        *((title, "averaged") for title in ("expert and dense", "chain", "islands")),
        *(("expert and dense", layout) for layout in LAYOUTS if layout != "averaged"),
        ("an island of one", "cut"),
        *(
            pytest.param(title, layout, marks=pytest.mark.slow)
            for title, layout in (
                *((title, "averaged") for title in SHARED if title not in ("expert and dense", "chain", "islands")),
                ("ring", "cut"),
                ("islands", "cut"),
                ("islands", "copied"),
            )
        ),
    ],
)
def test_a_bad_gradient_stops_the_ranks_that_are_connected(title, layout):
    run(stop_those_connected, world_of(SHARED[title]), title, layout, "skip", timeout=60)


@pytest.mark.parametrize(
    ("title", "layout"), [("expert and dense", "averaged"), ("chain", "sharded"), ("an island of one", "cut")]
)
def test_a_bad_gradient_is_an_error_on_the_ranks_that_are_connected(title, layout):
    run(stop_those_connected, world_of(SHARED[title]), title, layout, "raise", timeout=60)


def ask_on_some_ranks(rank, world_size):
    """Experts ask, and the dense layer does not: it goes on, also on the rank that has nothing else."""
    shared = {"expert": (0, 1), "dense": (0, 1, 2)}
    model = Model(rank, shared, own={"expert": {"on_nonfinite": "skip"}})
    model.give(["expert"] if rank == 0 else [])
    model.optimizer.step()
    assert model.moved() == {"dense"}
    assert model.optimizer.last_step().skipped == (rank < 2)
    model.give()
    model.optimizer.step()
    assert model.moved() == model.held()
    assert model.optimizer.last_step().skipped_steps == (1 if rank < 2 else 0)

    # One group raises, another one skips: no rank goes on alone with counts of its own.
    own = {"expert": {"on_nonfinite": "raise"}, "dense": {"on_nonfinite": "skip", "step_every": 2}}
    model = Model(rank, shared, own=own)
    model.give()
    model.optimizer.step()
    model.give(["dense"] if rank == 2 else [])
    with pytest.raises(FloatingPointError, match="^dense" if rank == 2 else "^on rank 2: dense"):
        model.optimizer.step()
    model.give()
    model.optimizer.step()
    assert model.moved() == model.held()

    # A group that waits for its turn does not raise about another one.
    own = {"expert": {"on_nonfinite": "raise", "step_every": 2}, "dense": {"on_nonfinite": "skip"}}
    model = Model(rank, shared, own=own)
    model.give(["dense"] if rank == 2 else [])
    model.optimizer.step()
    assert model.moved() == set()
    assert model.optimizer.last_step().skipped


def test_ranks_whose_groups_do_not_ask_take_part():
    run(ask_on_some_ranks, 3, timeout=40)


def take_turns(rank, world_size):
    """A rank that has nothing to step asks with the others, and what waits neither stops a step nor is stopped."""
    shared = {"expert": (0, 1), "dense": (0, 1, 2)}
    model = Model(rank, shared, own={"dense": {"step_every": 2}}, on_nonfinite="skip")
    experts = model.held() - {"dense"}
    model.give(["dense"] if rank == 2 else [])
    model.optimizer.step()
    assert model.moved() == experts
    model.give(["expert"] if rank == 0 else [])
    model.optimizer.step()
    assert model.optimizer.last_step().skipped
    assert model.moved() == experts
    model.give(["expert"] if rank == 0 else [])
    model.optimizer.step()
    assert model.optimizer.last_step().skipped == (rank < 2)
    model.give()
    model.optimizer.step()
    assert model.moved() == model.held()


def test_groups_that_step_at_different_times():
    run(take_turns, 3, timeout=40)


def change_the_option(rank, world_size):
    shared = {"expert": (0, 1), "dense": (0, 1, 2)}
    model = Model(rank, shared)
    model.give()
    model.optimizer.step()
    for option in ("skip", "propagate", "raise"):
        for group in model.optimizer.param_groups:
            group["on_nonfinite"] = option
        before = {name: local_of(param.detach()).clone() for name, param in model.params.items()}
        model.give(["dense"] if rank == 2 else [])
        if option == "raise":
            with pytest.raises(FloatingPointError):
                model.optimizer.step()
        else:
            model.optimizer.step()
        is_kept = [torch.equal(local_of(param.detach()), before[name]) for name, param in model.params.items()]
        assert is_kept == [option != "propagate"] * len(is_kept)


def test_the_option_may_be_changed_on_all_ranks():
    run(change_the_option, 3, timeout=40)


def disagree(rank, world_size):
    """Two ranks that were given different experts: the third one does not wait for them."""
    shared = {"expert": (0, 1), "dense": (0, 1, 2)}
    model = Model(rank, shared, own={"expert": {"normalize": "neuron" if rank == 1 else None}})
    model.give()
    with pytest.raises(
        RuntimeError, match="on rank 0: ranks 0 and 1 were given" if rank == 2 else "^ranks 0 and 1 were"
    ):
        model.optimizer.step()
    model = Model(rank, shared, on_nonfinite="skip" if rank else "raise")
    with pytest.raises(RuntimeError, match=r"on_nonfinite=raise.*on_nonfinite=skip"):
        model.optimizer.step()


def test_a_disagreement_is_an_error_on_the_ranks_that_are_connected():
    run(disagree, 3, timeout=40)


def wait_for_nothing(rank, world_size):
    model = Model(rank, {"expert": (0, 1), "dense": tuple(range(world_size))}, "cut", on_nonfinite="skip")
    for step in range(4):
        model.give(["expert"] if step == 2 and rank == 0 else [])
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            quintic.clip_grad_norm_(model.optimizer, 1.0, scope="all")
            model.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert model.optimizer.last_step().skipped == (step == 2)
    assert model.moved() == model.held()


@pytest.mark.skipif(not ON_GPUS, reason="needs QUINTIC_TEST_DEVICE=cuda")
@pytest.mark.parametrize("world_size", [2, 3])
def test_hosts_do_not_wait_for_gpus(world_size):
    run(wait_for_nothing, world_size)


# ------------------------------------------------------------------------------------------------------ found by verify


def verify_mistakes(rank, world_size, title):
    shared = SHARED[title]
    model = Model(rank, shared, on_nonfinite="skip")
    first = next(iter(shared))

    def check(is_right):
        for bad, where in [(first, shared[first][0]), (None, None)]:
            model.give([bad] if rank == where else [])
            report = quintic.verify(model, model.optimizer)
            assert report.ok == (is_right or bad is None), str(report)

    check(is_right=True)

    def ask_few(self, flags):
        """Listen to the ranks that have the same first parameter alone."""
        everyone = [torch.empty_like(flags) for _ in range(world_size)]
        dist.all_gather(everyone, flags)
        firsts = [next(name for name, ranks in shared.items() if other in ranks) for other in range(world_size)]
        heard = [flag for flag, first in zip(everyone, firsts, strict=True) if first == firsts[rank]]
        flags.copy_(torch.stack(heard).amin(0))

    with mock.patch.object(Connected, "all_agree_", ask_few):
        check(is_right=False)
    with mock.patch.object(Connected, "all_agree_"):
        check(is_right=False)
    check(is_right=True)


@pytest.mark.parametrize("title", ["expert and dense", pytest.param("chain", marks=pytest.mark.slow)])
def test_verify_finds_ranks_that_were_not_asked(title):
    run(verify_mistakes, world_of(SHARED[title]), title, timeout=60)
