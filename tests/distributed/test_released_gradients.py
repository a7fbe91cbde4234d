"""`release_gradients` on several ranks: the same bits, no gradient after a step, and its memory free in time."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, run
from test_invariance import LAYOUTS, WITH_GAPS
from test_partial_gradients import GAPS as PARTIAL_GAPS
from test_partial_gradients import assert_equal, but_copies, give, mesh_of, of_mesh
from test_sparse_rows import differences, on_rank, two_tables
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trajectories import NO_GAPS, disagreements, reference

import quintic
from quintic.optim.step import sparse_rows

CASES = ("mantissa", "element")
OF_TWO = ("averaged-2", "replicated-2", "sharded-2", "fsdp2-2", "tp-2")
SLOW = ("dtensor_copies-2", "hsdp-2x2", "tp_fsdp2-2x2", "ep_fsdp2-2x2", "sharded-3")


def check_layout(rank, world_size, layout, expected, gaps, options):
    wrong = []
    for title in CASES:
        lines = disagreements(
            layout.model_name, layout.lay_out, title, range(world_size), expected[title], rank=rank, gaps=gaps,
            comms=layout.comms, release_gradients=True, **options,
        )  # fmt: skip
        wrong += [f"{title}: {line}" for line in lines]
    assert not wrong, "\n".join(["other than one device that keeps its gradients:", *wrong])


def try_layout(layout, gaps=NO_GAPS, **options):
    expected = reference(layout.model_name, CASES, range(layout.world_size), layout.comms, gaps)
    run(check_layout, layout.world_size, layout, expected, gaps, options, timeout=100)


@pytest.mark.parametrize("name", [*OF_TWO, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_has_the_bits_of_one_device_and_no_gradients(name):
    try_layout(LAYOUTS[name])


@pytest.mark.parametrize("name", ["sharded-2", "fsdp2-2"])
def test_the_same_with_state_in_host_memory(name):
    try_layout(LAYOUTS[name], offload=True, on_nonfinite="skip")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averaged-3", "replicated-2", "sharded-3", "fsdp2-3", "hsdp-2x2"])
def test_missing_gradients_are_zeros_or_stop_a_parameter_as_before(name):
    try_layout(*WITH_GAPS[name])


def check_partial(rank, world_size, clip):
    """As the same gradients kept: sums over ranks, in place of addends that some ranks lack."""
    mesh = mesh_of(world_size)
    params, plain, optimizer, alone = of_mesh(mesh)
    optimizer._plans.release_gradients = True
    for step, gap in enumerate(["one", "none", "all but one", "all", "some names"]):
        give(params, plain, mesh, step, but_copies(PARTIAL_GAPS[gap]))
        if clip:
            for found in (optimizer, alone):
                quintic.clip_grad_norm_(found, 0.5, scope="all")
        optimizer.step()
        alone.step()
        assert_equal(params, plain, f"step {step} ({gap})")
        assert all(param.grad is None for param in params.values())


@pytest.mark.parametrize("clip", [False, True])
def test_partial_gradients_are_summed_and_their_addends_freed(clip):
    run(check_partial, 4, clip, timeout=60)


# -- memory ------------------------------------------------------------------------------------------------------------

# One bucket each: (number of matrices, shape).
BUCKETS = {"a": (2, (8, 6)), "b": (2, (12, 6)), "c": (3, (10, 4))}


def check_memory(rank, world_size, comms, clip):
    """When the matrices of a bucket are orthogonalised, no gradient of it is in memory any more."""
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (world_size,)) if comms == "fsdp2" else None
    params = {
        f"{key}{n}": nn.Parameter(
            torch.randn(shape) if mesh is None else distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        )
        for key, (count, shape) in BUCKETS.items()
        for n in range(count)
    }
    alive, seen = {}, []

    def orthogonalizer(matrices):
        (key,) = (key for key, (_, shape) in BUCKETS.items() if sorted(shape) == sorted(matrices.shape[1:]))
        left = sorted(name for name in alive if alive[name]() is not None)
        seen.append(key)
        assert not [name for name in left if name[0] == key], f"{key} is orthogonalised, and there are {left}"
        return matrices

    optimizer = quintic.Muon(
        params.items(), orthogonalizer=orthogonalizer, comms="none" if comms == "fsdp2" else comms,
        release_gradients=True,
    )  # fmt: skip
    for _ in range(3):
        for name, param in params.items():
            local = param.to_local() if isinstance(param, DTensor) else param
            # The storage of a tensor refers to the array that it is made of, so the array lives as long as it.
            array = np.full(local.shape, 1.0 + rank, dtype=np.float32)
            alive[name] = weakref.ref(array)
            gradient = torch.from_numpy(array)
            del array
            param.grad = gradient if mesh is None else DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)
            del gradient, local
        if clip:
            quintic.clip_grad_norm_(optimizer, 0.5, scope="all")
        assert all(ref() is not None for ref in alive.values())
        optimizer.step()
        assert not [name for name, ref in alive.items() if ref() is not None]
    # Ranks divide the matrices: together they have computed all of them.
    everyone = [None] * world_size
    dist.all_gather_object(everyone, seen)
    assert {key for theirs in everyone for key in theirs} == set(BUCKETS)


@pytest.mark.skipif(ON_GPUS, reason="sees the memory of host tensors")
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("comms", ["none", "averaged", "replicated", "sharded", "fsdp2"])
def test_memory_is_free_when_matrices_are_orthogonalised(comms, clip):
    run(check_memory, 2, comms, clip, timeout=60)


@on_rank
def check_sparse(rank, world_size):
    """A table whose touched rows travel: its gradient is freed when they have been copied into the message."""
    params, expected, optimizer, dense = two_tables()
    optimizer._plans.release_gradients = True
    table, alive, seen = params["table"], [], []
    mean_of_rows = sparse_rows.mean_of_rows

    def mean(*args):
        seen.append(alive[-1]() is not None)
        return mean_of_rows(*args)

    for step in range(4):
        rows = torch.tensor([step, 30 * rank, 599])
        array = np.zeros((600, 64), dtype=np.float32)
        array[rows] = 1.0 + rank
        alive.append(weakref.ref(array))
        expected["table"].grad = torch.from_numpy(array.copy())
        table.grad = torch.from_numpy(array)
        del array
        if step % 2:
            optimizer.announce_rows("table", rows)
        with mock.patch.object(sparse_rows, "mean_of_rows", mean):
            optimizer.step()
        dense.step()
        assert not differences(params, optimizer, expected, dense)
        assert table.grad is None
    assert seen == [False] * 4


@pytest.mark.skipif(ON_GPUS, reason="sees the memory of host tensors")
def test_memory_of_a_table_is_free_when_its_touched_rows_are_averaged():
    run(check_sparse, 2, timeout=60)
