"""State in host memory on several ranks: the same numbers on any layout, and checkpoints that go both ways."""

import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import wrappings
from delayed_copies import DelayedCopies, SlowCopies
from harness import DEVICE, ON_GPUS, run
from models import Awkward, give_gradients, gradient, held_by, rules
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from trajectories import NO_GAPS, Gaps, Layout, disagreements, reference

import quintic
from quintic.optim.rules.rule import PARAM_SHAPED_STATE
from quintic.optim.state import placement
from quintic.optim.step.offload import offload

LAYOUTS = {
    "averaged-2": Layout((2,), comms="averaged", cases=("mantissa", "workspace", "narrow_element")),
    "replicated-2": Layout((2,), comms="replicated", cases=("plain", "mantissa")),
    "sharded-2": Layout((2,), comms="sharded", cases=("mantissa", "8bit", "workspace", "narrow")),
    "sharded-3": Layout((3,), comms="sharded", cases=("neuron", "fp32", "element")),
    "fsdp2-1": Layout((1,), wrappings.data_parallel, cases=("mantissa",)),
    "fsdp2-2": Layout((2,), wrappings.data_parallel, cases=("mantissa", "8bit", "workspace", "narrow_mantissa")),
    "fsdp2-3": Layout((3,), wrappings.data_parallel, cases=("neuron", "fp32", "narrow_element")),
    "fsdp2_last_dimension-2": Layout((2,), wrappings.last_dimension, cases=("mantissa", "workspace")),
    "dtensor_copies-2": Layout((2,), wrappings.replicated, cases=("mantissa",)),
    "hsdp-2x2": Layout((2, 2), wrappings.data_parallel, cases=("mantissa",)),
    "tp-2": Layout((2,), wrappings.tensor_parallel, cases=("mantissa", "workspace")),
    "tp_fsdp2-2x2": Layout((2, 2), wrappings.tensor_and_data_parallel, cases=("neuron", "fp32")),
    "ep_fsdp2-4": Layout((4,), wrappings.expert_and_data_parallel, cases=("mantissa", "workspace")),
}

WITHOUT = Gaps(("stack.2.weight", "attention.qkv.weight", "experts.up", "embedding.weight", "mlp.0.bias"), others=True)

WITH_GAPS = {
    "averaged-2": (Layout((2,), comms="averaged", cases=("neuron",)), WITHOUT),
    "sharded-3": (Layout((3,), comms="sharded", cases=("workspace",)), WITHOUT),
    "fsdp2-3": (Layout((3,), wrappings.data_parallel, cases=("mantissa",)), WITHOUT),
    "ep_fsdp2-4": (Layout((4,), wrappings.expert_and_data_parallel, cases=("plain", "element")), WITHOUT),
}


@contextmanager
def delayed(policy):
    """Make late copies, or early ones; gives the list of those made."""
    made = []

    def new_copies(device):
        slow = "loads" if policy == "late" else "computing"
        made.append(SlowCopies(device, slow) if ON_GPUS else DelayedCopies(policy))
        return made[-1]

    with mock.patch.object(offload, "Copies", new_copies):
        yield made


def check_on_ranks(rank, world_size, layout, gaps, policy, references):
    wrong = []
    for title, expected in references.items():
        with delayed(policy) as made:
            lines = disagreements(
                layout.model_name,
                layout.lay_out,
                title,
                range(world_size),
                expected,
                rank=rank,
                comms=layout.comms,
                gaps=gaps,
                offload=True,
            )
        wrong += [f"{title}: {line}" for line in lines]
        assert any(kind == "store" for copies in made for kind, _ in copies.log)
    assert not wrong, "\n".join(["other numbers than on one device:", *wrong])


def check(layout, gaps, policy):
    ranks = range(layout.world_size)
    expected = reference(layout.model_name, layout.cases, ranks, layout.comms, gaps)
    run(check_on_ranks, len(ranks), layout, gaps, policy, expected, timeout=100)


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "late") for name in LAYOUTS), *((name, "early") for name in ("averaged-2", "sharded-2", "fsdp2-2"))],
)
def test_no_layout_changes_the_numbers(name, policy):
    check(LAYOUTS[name], NO_GAPS, policy)


@pytest.mark.parametrize("name", WITH_GAPS)
def test_a_missing_gradient_changes_nothing_or_counts_as_zeros(name):
    check(*WITH_GAPS[name], "late")


def check_sparse_rows(rank, world_size):
    found = []
    with delayed("late"):
        for on in (False, True):
            torch.manual_seed(0)
            table = nn.Parameter(torch.randn(600, 8).to(DEVICE))
            group = {"params": [("table", table)], "algorithm": "adamw", "lr": 0.01}
            optimizer = quintic.Muon([group], comms="sharded_sparse", offload=on, max_workspace_bytes=5000)
            for step in range(3):
                table.grad = torch.zeros_like(table)
                touched = torch.arange(rank + step, 600, 50)
                table.grad[touched] = gradient("table", (len(touched), 8), torch.float32, step, rank).to(DEVICE)
                optimizer.step()
            state = {key: value.cpu() for key, value in optimizer.state[table].items()}
            found.append({"weight": table.detach().cpu(), **state})
            assert bool(optimizer.plan().buckets[0].offloaded) == on
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


def test_tables_of_which_some_rows_are_touched():
    run(check_sparse_rows, 2, timeout=60)


# -- checkpoints -------------------------------------------------------------------------------------------------------

OPTIONS = {"master": "mantissa", "normalize": "neuron", "lr": 0.05, "adamw_lr": 0.01, "max_workspace_bytes": 2000}
SAVED = Layout((2,), wrappings.data_parallel)


class Run:
    """A laid-out model of random gradients, and its optimizer."""

    def __init__(self, rank, world_size, layout, on):
        self.rank, self.averages = rank, layout.comms in ("replicated", "sharded")
        self.held = held_by(layout.model, layout.lay_out)
        self.model = layout.model(torch.bfloat16)
        layout.lay_out(self.model)
        groups = quintic.param_groups(self.model, rules=rules(self.model))
        self.optimizer = quintic.Muon(groups, comms=layout.comms, offload=on, **OPTIONS)

    def step(self, first, last):
        for number in range(first, last):
            params = dict(self.model.named_parameters())
            of_rank = self.rank if self.averages else None
            gradients = {n: gradient(n, p.shape, p.dtype, number, of_rank) for n, p in params.items()}
            give_gradients(self.model, gradients, self.held)
            self.optimizer.step()

    def take_weights(self, other):
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.data.copy_(theirs.data)

    def local(self):
        """The local weights and state, by name. Not every rank knows all second moments, but weights follow them."""
        found = {}
        for name, param in self.model.named_parameters():
            tensors = {"weight": param.detach(), **self.optimizer.state[param]}
            tensors.pop("second_momentum_buffer", None)
            for key, value in tensors.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[name, key] = local.to("cpu", copy=True)
        return found


def assert_same(first, second):
    mine, theirs = first.local(), second.local()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key


def check_ways_to_save(rank, world_size, folder):
    with delayed("late"):
        plain = Run(rank, world_size, SAVED, False)
        plain.step(0, 4)
        for from_host in (True, False):
            saved = Run(rank, world_size, SAVED, from_host)
            saved.step(0, 2)
            ways = {
                "parts": StateDictOptions(),
                "parts_on_cpu": StateDictOptions(cpu_offload=True),
                "whole": StateDictOptions(full_state_dict=True),
                "whole_on_cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
            }
            for name, options in ways.items():
                state = get_optimizer_state_dict(saved.model, saved.optimizer, options=options)
                # Rank 0's state is for all, and PyTorch wants theirs on one device.
                loaded = Run(rank, world_size, SAVED, not from_host and name != "whole_on_cpu")
                loaded.step(0, 1)
                if name == "parts":
                    path = Path(folder) / f"{name}{from_host}"
                    dcp.save({"optimizer": state}, checkpoint_id=path)
                    state = get_optimizer_state_dict(loaded.model, loaded.optimizer)
                    dcp.load({"optimizer": state}, checkpoint_id=path)
                if name != "whole_on_cpu":
                    set_optimizer_state_dict(loaded.model, loaded.optimizer, state)
                else:
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    given = state if rank == 0 else {}
                    set_optimizer_state_dict(loaded.model, loaded.optimizer, given, options=options)
                    loaded.optimizer.offload(not from_host)
                loaded.take_weights(saved)
                assert_same(saved, loaded)
                loaded.step(2, 4)
                assert_same(plain, loaded)


def test_checkpoints_go_both_ways_in_every_way_to_save():
    with tempfile.TemporaryDirectory() as folder:
        run(check_ways_to_save, 2, folder, timeout=100)


def check_sharded_state(rank, world_size):
    layout = Layout((world_size,), comms="sharded")
    with delayed("late"):
        plain, hosted = (Run(rank, world_size, layout, on) for on in (False, True))
        for each in (plain, hosted):
            each.step(0, 2)
        assert_same(plain, hosted)
        saved = hosted.optimizer.state_dict()
        for index, state in plain.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value.cpu(), saved["state"][index][key].cpu())
        for on in (False, True):
            loaded = Run(rank, world_size, layout, on)
            loaded.take_weights(hosted)
            loaded.optimizer.load_state_dict(saved)
            assert_same(hosted, loaded)
        plain.optimizer.offload(True)
        hosted.optimizer.offload(False)
        for each in (plain, hosted):
            each.step(2, 3)
        assert_same(plain, hosted)


def test_sharded_state_is_saved_whole_and_loaded_in_parts():
    run(check_sharded_state, 2, timeout=100)


def check_dtensors_elsewhere(rank, world_size):
    """State may lie on another device than the mesh: what a parameter on a GPU and state on the host are."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    model = Awkward()
    wrappings.data_parallel(model, mesh)
    param = model.mlp[0].weight
    optimizer = quintic.Muon([param])
    value = optimizer.state[param]["momentum_buffer"]
    moved = placement._on_device(value, torch.device("meta"))
    assert isinstance(moved, DTensor)
    assert (moved.placements, moved.device_mesh, moved.shape) == (value.placements, value.device_mesh, value.shape)
    assert moved.to_local().is_meta
    assert moved.to_local().stride() == value.to_local().stride()
    assert moved.dtype == value.dtype


def test_state_may_be_on_another_device_than_the_mesh():
    run(check_dtensors_elsewhere, 2, timeout=60)


def check_state_in_host_memory(rank, world_size, layout):
    found = Run(rank, world_size, layout, True)
    found.step(0, 1)
    for param in found.model.parameters():
        for key, value in found.optimizer.state[param].items():
            assert isinstance(value, DTensor) == (isinstance(param, DTensor) and key in PARAM_SHAPED_STATE)
            local = value.to_local() if isinstance(value, DTensor) else value
            assert local.device.type == ("cpu" if key in PARAM_SHAPED_STATE else DEVICE)
            assert local.is_pinned() == (ON_GPUS and key in PARAM_SHAPED_STATE and local.numel() > 0)


@pytest.mark.parametrize("name", ["averaged-2", "sharded-2", "fsdp2-2"])
def test_state_is_in_host_memory(name):
    run(check_state_in_host_memory, 2, LAYOUTS[name], timeout=60)


def check_other_options(rank, world_size):
    found = Run(rank, world_size, SAVED, rank == 0)
    with pytest.raises(RuntimeError, match=r"offload=True.*offload=False.*same order on all ranks"):
        found.step(0, 1)


def test_ranks_that_do_not_agree_are_told():
    run(check_other_options, 2, timeout=60)


def check_verify(rank, world_size, layout):
    with delayed("late"):
        found = Run(rank, world_size, layout, True)
        found.step(0, 2)
        assert quintic.verify(found.model, found.optimizer).ok
        plain = Run(rank, world_size, layout, False)
        plain.step(0, 2)
        assert_same(plain, found)


@pytest.mark.parametrize("name", ["sharded-2", "fsdp2-2"])
def test_verify_says_that_steps_are_right(name):
    run(check_verify, 2, LAYOUTS[name], timeout=100)


def check_sizes(rank, world_size, layout):
    model = layout.model(torch.bfloat16)
    layout.lay_out(model)
    groups = quintic.param_groups(model, rules=rules(model))
    optimizer = quintic.Muon(groups, comms=layout.comms, offload=True, **OPTIONS)
    state = [v for of_param in optimizer.state.values() for key, v in of_param.items() if key in PARAM_SHAPED_STATE]
    size = sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in state)
    offloaded = [bucket.offloaded for bucket in optimizer.plan()]
    return size, sum(one.num_bytes for one in offloaded), optimizer.plan().offload_buffer_bytes


@pytest.mark.parametrize("name", ["averaged-2", "sharded-2", "fsdp2-2", "ep_fsdp2-4"])
def test_the_plan_counts_all_state(name):
    for size, offloaded, buffers in run(check_sizes, LAYOUTS[name].world_size, LAYOUTS[name], timeout=60):
        # Gaps between pieces are copied too.
        assert size <= offloaded <= 1.5 * size
        assert 0 < buffers < 2 * OPTIONS["max_workspace_bytes"] + 8000
