"""Ranks that parameters connect decide together, also through other ranks; the others do not wait for each other."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from harness import DEVICE, run
from models import gradient, local_of
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import quintic
from quintic.optim.connected import Connected

# Which ranks hold each parameter: an expert before a dense layer, chains and rings of pairs, and ranks that nothing
# connects.
SHARED = {
    "expert and dense": {"expert": (0, 1), "dense": (0, 1, 2)},
    "dense and expert": {"dense": (0, 1, 2), "expert": (1, 2)},
    "pairs of experts": {"expert_0": (0, 2), "expert_1": (1, 3), "dense": (0, 1, 2, 3)},
    "chain": {"last": (2, 3), "first": (0, 1), "middle": (1, 2)},
    "ring": {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (0, 3)},
    "islands": {"left": (0, 1), "right": (2, 3)},
    "an island of one": {"left": (0, 1), "right": (2,)},
}

LAYOUTS = ("averaged", "replicated", "sharded", "cut", "copied")


def world_of(shared):
    return 1 + max(max(ranks) for ranks in shared.values())


def connected_with(rank, shared):
    """All ranks that a rank is connected with, by following parameters until no rank is added."""
    found = {rank}
    while True:
        more = found.union(*(ranks for ranks in shared.values() if found & set(ranks)))
        if more == found:
            return found
        found = more


class Model(nn.Module):
    """Parameters of ones, in groups of their own, and an optimizer that moves every entry with a gradient of ones.

    Args:
        rank: of this process.
        shared: name -> ranks.
        layout: one of `LAYOUTS`; of those with `comms` parameters are plain tensors.
        own: names of groups -> their options.
        options: of the optimizer.
    """

    def __init__(self, rank, shared, layout="averaged", own=None, **options):
        super().__init__()
        groups = []
        self.params = nn.ParameterDict()
        # Every rank calls, in one order, whatever it holds.
        process_groups = {name: dist.new_group(list(ranks)) for name, ranks in shared.items()}
        meshes = {name: DeviceMesh(DEVICE, list(ranks)) for name, ranks in shared.items() if len(ranks) > 1}
        for name, ranks in shared.items():
            if rank not in ranks:
                continue
            ones, of_group = torch.ones(6, 4, device=DEVICE), {}
            if len(ranks) == 1:
                pass
            elif layout in ("cut", "copied"):
                ones = distribute_tensor(ones, meshes[name], [Shard(0) if layout == "cut" else Replicate()])
            else:
                of_group = {"comms": layout, "process_group": process_groups[name]}
            self.params[name] = nn.Parameter(ones)
            groups.append({"params": [(name, self.params[name])], **of_group, **(own or {}).get(name, {})})
        self.optimizer = quintic.Muon(groups, lr=0.5, **options) if groups else None

    def give(self, bad=()):
        """Set gradients: entries that are not finite in the parameters named, ones elsewhere."""
        for name, param in self.params.items():
            param.grad = torch.full_like(param, math.inf if name in bad else 1.0)

    def moved(self):
        """Return the names of the parameters that are no longer ones; their entries are all alike."""
        found = set()
        for name, param in self.params.items():
            is_one = local_of(param.detach()) == 1
            assert bool(is_one.all()) or not bool(is_one.any()), name
            if is_one.numel() and not bool(is_one.any()):
                found.add(name)
        return found

    def held(self):
        """Return the names of the parameters of which this rank has entries."""
        return {name for name, param in self.params.items() if local_of(param).numel()}


def stop_those_connected(rank, world_size, title, layout, on_nonfinite):
    shared = SHARED[title]
    for bad, where in [(name, ranks[-1]) for name, ranks in shared.items()]:
        model = Model(rank, shared, layout, on_nonfinite=on_nonfinite)
        stopped = where in connected_with(rank, shared)
        model.give([bad] if rank == where else [])
        if stopped and on_nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=bad if rank == where else "on another rank"):
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
        *((title, "averaged") for title in SHARED),
        *(("expert and dense", layout) for layout in LAYOUTS if layout != "averaged"),
        ("ring", "cut"),
        ("islands", "cut"),
        ("islands", "copied"),
        ("an island of one", "cut"),
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
    with pytest.raises(FloatingPointError, match="dense" if rank == 2 else "on another rank"):
        model.optimizer.step()
    model.give()
    model.optimizer.step()
    assert model.moved() == model.held()


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


# ------------------------------------------------------------------------------------------- ranks that the user binds


def bind_stages(rank, world_size, on_nonfinite):
    """Stages of a pipeline share nothing; with a process group they decide together nevertheless."""
    shared = {"first": (0, 1), "second": (2, 3)}
    names = ("first", "second")
    own = {name: {"process_group": dist.group.WORLD} for name in names}
    for bad, where in (("first", 1), ("second", 2)):
        model = Model(rank, shared, "cut", own=own, on_nonfinite=on_nonfinite)
        model.give([bad] if rank == where else [])
        if on_nonfinite == "raise":
            with pytest.raises(FloatingPointError):
                model.optimizer.step()
        else:
            assert quintic.verify(model, model.optimizer).ok
            model.optimizer.step()
        assert model.moved() == set()
        model.give()
        norm = quintic.clip_grad_norm_(model.optimizer, math.inf, scope="all").item()
        assert norm == pytest.approx(math.sqrt(2 * 24))
        model.optimizer.step()
        assert model.moved() == model.held()


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_process_group_binds_ranks_that_share_nothing(on_nonfinite):
    run(bind_stages, 4, on_nonfinite, timeout=60)


class Stage(nn.Module):
    """A part of a model: an embedding at the beginning, the head tied to it at the end."""

    def __init__(self, number, last):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(10, 4)
        self.config = SimpleNamespace(vocab_size=10)
        if number == 0:
            self.tokens = nn.Embedding(10, 4)
            self.tokens.weight = nn.Parameter(weight)
        self.middle = nn.Linear(4, 4, bias=False)
        if number == last:
            self.project = nn.Linear(4, 10, bias=False)
            self.project.weight = nn.Parameter(weight)
        self.to(DEVICE)


def step_tied_stages(rank, world_size, comms):
    """Two tensors that are one for the optimizer: equal after every step, and one in the norm."""
    model = Stage(rank, world_size - 1)
    ends = dist.new_group([0, world_size - 1])
    tied = {0: "tokens.weight", world_size - 1: "project.weight"}.get(rank)
    rules = [quintic.Rule(tied, "adamw", options={"comms": comms, "process_group": ends})] if tied else []
    groups = quintic.param_groups(model, rules=rules)
    for group in groups:
        group["param_names"] = ["tied" if name == tied else f"{rank}.{name}" for name in group["param_names"]]
    optimizer = quintic.Muon(groups, lr=0.1, adamw_lr=0.1, on_nonfinite="skip")
    params = dict(model.named_parameters())
    for step in range(4):
        for name, param in params.items():
            # The user adds up both ends' gradients, or the optimizer averages.
            title, own = ("tied", rank * (comms != "averaged")) if name == tied else (name, 0)
            param.grad = gradient(title, param.shape, param.dtype, step, own)
        is_bad = step == 1
        if is_bad and rank == 0:
            model.middle.weight.grad[0, 0] = math.nan
        norm = quintic.clip_grad_norm_(optimizer, 0.5).item()
        if tied and comms == "averaged":
            whole = gradient("tied", (10, 4), torch.float32, step, 0)
            assert norm == pytest.approx(float(whole.double().norm()), rel=1e-6)
        before = {name: param.detach().clone() for name, param in params.items()}
        optimizer.step()
        is_stopped = is_bad and tied is not None
        assert optimizer.last_step().skipped == is_stopped
        assert {torch.equal(param, before[name]) for name, param in params.items()} == {is_stopped}
    return params[tied].detach() if tied else None


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_weights_tied_across_stages_stay_equal(comms):
    first, between, last = run(step_tied_stages, 3, comms, timeout=60)
    assert between is None
    assert torch.equal(first, last)


# ------------------------------------------------------------------------------------------------------------- clipping


def clip(rank, world_size, title, layout):
    """The norm is that of all parameters that are connected, each counted once, and the same on all of their ranks."""
    shared = SHARED[title]
    sizes = {name: 2.0**number for number, name in enumerate(shared)}

    def of(model, names):
        """The norm of gradients of 24 equal entries each."""
        return math.sqrt(sum(24 * sizes[name] ** 2 for name in names))

    mine = connected_with(rank, shared)
    connected = {name for name, ranks in shared.items() if mine & set(ranks)}
    model = Model(rank, shared, layout)
    for scope, max_norm in (("all", math.inf), ("adamw", 1.0), ("all", 1.0)):
        for name, param in model.params.items():
            param.grad = torch.full_like(param, sizes[name])
        norm = quintic.clip_grad_norm_(model.optimizer, max_norm, scope=scope).item()
        assert norm == pytest.approx(of(model, connected) if scope == "all" else 0.0, rel=2.0**-23)
    if layout != "sharded":
        for name, param in model.params.items():
            values = local_of(param.grad)
            torch.testing.assert_close(values, torch.full_like(values, sizes[name] / of(model, connected)))


@pytest.mark.parametrize(
    ("title", "layout"),
    [
        *(("expert and dense", layout) for layout in LAYOUTS),
        ("pairs of experts", "averaged"),
        ("chain", "cut"),
        ("ring", "copied"),
        ("islands", "averaged"),
        ("an island of one", "cut"),
    ],
)
def test_connected_ranks_clip_by_one_norm(title, layout):
    run(clip, world_of(SHARED[title]), title, layout, timeout=60)


def clip_what_has_one_name(rank, world_size):
    """Of parameters of one name that ranks do not share, the largest counts, so that all ranks clip alike."""
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


@pytest.mark.parametrize("title", ["expert and dense", "chain"])
def test_verify_finds_ranks_that_were_not_asked(title):
    run(verify_mistakes, world_of(SHARED[title]), title, timeout=60)
