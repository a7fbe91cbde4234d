"""Conditions of messages: connections made before the first step, and memory that lives until they have arrived."""

import functools
from unittest import mock

import attentions
import pytest
import torch
import wrappings
from collectives import delayed, logged
from harness import DEVICE, ON_GPUS, run
from models import give_gradients, gradient, held_by, local_of, rules
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from trajectories import CASES, Layout

import quintic
from quintic.optim.comms import collectives as comms
from quintic.optim.plan import row_sharding
from quintic.optim.step.consensus import RankConsensus

NUM_STEPS = 3

LAYOUTS = {
    "averaged": Layout((3,), comms="averaged", cases=("neuron", "workspace")),
    "replicated": Layout((3,), comms="replicated", cases=("plain",)),
    "sharded": Layout((3,), comms="sharded", cases=("mantissa", "workspace")),
    "fsdp2": Layout((3,), wrappings.data_parallel, cases=("neuron", "workspace")),
    "hsdp": Layout((2, 2), wrappings.data_parallel, cases=("neuron",)),
    "tp and fsdp2": Layout((2, 2), wrappings.tensor_and_data_parallel, cases=("mantissa",)),
}


def steps_of_a_layout(title, case):
    """An optimizer of the awkward model, and what gives its gradients and steps."""
    layout, case = LAYOUTS[title], CASES[case]
    model = layout.model(case.dtype)
    layout.lay_out(model)
    held = held_by(layout.model, layout.lay_out)
    groups = quintic.param_groups(model, rules=rules(model, multipliers=case.multipliers))
    options = {"comms": layout.comms, "on_nonfinite": "skip", **case.options}
    optimizer = quintic.Muon(groups, lr=0.05, adamw_lr=0.01, telemetry_every=1, **options)
    rank = dist.get_rank() if layout.comms in ("replicated", "sharded") else None

    def step(number):
        named = model.named_parameters()
        give_gradients(model, {n: gradient(n, p.shape, p.dtype, number, rank) for n, p in named}, held)
        quintic.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    return optimizer, step


def steps_by_rows():
    """Few rows of a table, found in one step and announced in the others."""
    table = nn.Parameter(gradient("table", (64, 512), torch.float32, -1))
    optimizer = quintic.Muon([{"params": [("table", table)], "algorithm": "adamw"}], comms="sharded_sparse")

    def step(number):
        rows = torch.tensor([1, 7 * dist.get_rank() + 3, 40 + number], device=DEVICE)
        table.grad = torch.zeros_like(table)
        table.grad[rows] = gradient("rows", (3, 512), torch.float32, number, dist.get_rank())
        if number:
            optimizer.announce_rows("table", rows)
        optimizer.step()

    return optimizer, step


def steps_with_logits():
    """QK-clip whose weights owners send again."""
    model = attentions.Attentions(torch.bfloat16)
    groups = quintic.param_groups(model, rules=attentions.rules())
    clip = quintic.QKClip(threshold=attentions.THRESHOLD)
    optimizer = quintic.Muon(groups, comms="sharded", master="fp32", qk_clip=clip)

    def step(number):
        for name, param in model.named_parameters():
            param.grad = gradient(name, param.shape, param.dtype, number, dist.get_rank())
        optimizer.step(qk_logits=attentions.seen(number, dist.get_rank()) if number else None)

    return optimizer, step


def steps_of_a_chain():
    """Pairs of ranks that other pairs connect, and that ask with them."""
    params = []
    for ranks in ((0, 1), (1, 2)):
        mesh = DeviceMesh(DEVICE, list(ranks))
        if dist.get_rank() in ranks:
            weight = distribute_tensor(gradient(str(ranks), (6, 4), torch.float32, -1), mesh, [Shard(0)])
            params.append((str(ranks), nn.Parameter(weight)))
    optimizer = quintic.Muon([{"params": params}], on_nonfinite="skip")

    def step(number):
        for _, param in params:
            param.grad = torch.full_like(param, 1.0 + number)
        quintic.clip_grad_norm_(optimizer, 1.0, scope="all")
        optimizer.step()

    return optimizer, step


SCENARIOS = {
    **{
        f"{title}, {case}": (layout.world_size, functools.partial(steps_of_a_layout, title, case))
        for title, layout in LAYOUTS.items()
        for case in layout.cases
    },
    "rows": (3, steps_by_rows),
    "logits": (3, steps_with_logits),
    "chain": (3, steps_of_a_chain),
}

TITLES = {size: [title for title, (ranks, _) in SCENARIOS.items() if ranks == size] for size in (3, 4)}


def everything(optimizer):
    """Copies of what this rank holds of weights and state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = [tensor for param in params for tensor in (param, *optimizer.state[param].values())]
    return [local_of(tensor.detach()).clone() for tensor in tensors]


# ---------------------------------------------------------------------------------------------------------- connections


class Connections:
    """The kinds of collectives that ran on each process group before a step, and those that ran only in one."""

    def __init__(self):
        self.made, self.late, self.kinds = set(), set(), set()
        self._is_step = False

    def note(self, call):
        if not self._is_step:
            self.made.add((call.group, call.kind))
        else:
            self.kinds.add(call.kind)
            if (call.group, call.kind) not in self.made:
                self.late.add((call.group, call.kind))

    def of_steps(self):
        """Count as a step what follows the comparison of plans, which comes first in it."""
        original = RankConsensus.validate_plans

        def agree(agreements):
            self._is_step = False
            original(agreements)
            self._is_step = True

        return mock.patch.object(RankConsensus, "validate_plans", agree)


def find_connections(rank, world_size):
    """Return the collectives that were first used in steps, and the kinds that were used."""
    late, kinds = {}, set()
    for title in TITLES[world_size]:
        found = Connections()
        with logged(found.note), mock.patch.object(row_sharding, "_LEAST_BYTES", 0):
            _, step = SCENARIOS[title][1]()
            with found.of_steps():
                for number in range(NUM_STEPS):
                    step(number)
        late[title], kinds = sorted(found.late), kinds | found.kinds
    return late, kinds


@pytest.mark.parametrize("world_size", sorted(TITLES))
def test_connections_are_made_before_the_first_step(world_size):
    for late, kinds in run(find_connections, world_size, timeout=100):
        assert late == {title: [] for title in TITLES[world_size]}
        assert kinds == {"all_reduce", "all_gather", "all_to_all_single", "broadcast"}


# --------------------------------------------------------------------------------------------------------------- memory


def compare_late_messages(rank, world_size):
    for title in TITLES[world_size]:
        results = []
        for is_late in (False, True):
            with mock.patch.object(row_sharding, "_LEAST_BYTES", 0):
                optimizer, step = SCENARIOS[title][1]()
                problems = []
                for number in range(NUM_STEPS):
                    if not is_late:
                        step(number)
                        continue
                    with delayed() as of_step:
                        step(number)
                    problems += of_step
            assert not problems, f"{title}: {problems}"
            results.append(everything(optimizer))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), title


@pytest.mark.skipif(ON_GPUS, reason="delays messages on the host")
@pytest.mark.parametrize("world_size", sorted(TITLES))
def test_messages_may_arrive_as_late_as_they_are_waited_for(world_size):
    run(compare_late_messages, world_size, timeout=100)


def free_at_once(rank, world_size):
    """Tensors that only a message keeps."""
    group, ones = dist.group.WORLD, [1] * world_size
    with delayed() as problems:
        pending = [
            comms.start_all_to_all(torch.full((world_size,), float(rank)), ones, ones, group),
            comms.start_all_gather(torch.full((1,), float(rank)), world_size, group),
            comms.start_sum(torch.full((1,), float(rank)), group),
            comms.start_all_max(torch.full((1,), float(rank)), group),
            comms.start_broadcasts(torch.full((world_size,), float(rank)), ones, group),
        ]
        found = [one.wait().tolist() for one in pending]
    assert not problems
    everyone = [float(other) for other in range(world_size)]
    assert found == [everyone, everyone, [sum(everyone)], [max(everyone)], everyone]


@pytest.mark.skipif(ON_GPUS, reason="delays messages on the host")
def test_messages_keep_their_memory():
    run(free_at_once, 3)
