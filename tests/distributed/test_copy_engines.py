"""`transport="copy_engines"`: the same bits through memory that ranks write to, in places that do not overlap in time.

On CPUs files take the place of the memory of GPUs. They are filled with what is no number, and a place that is given
back too early is overwritten by the next message, so that wrong numbers come out.
"""

import pytest
import torch
import torch.distributed as dist
import wrappings
from harness import DEVICE, ON_GPUS, run
from shared_memory import SharedMemory, copy_engines
from torch import nn
from trajectories import Gaps, Layout, check_layout

import quintic
from quintic.optim.comms.channels import Channel, Route
from quintic.optim.comms.copy_engines import CopyEngines
from quintic.optim.comms.peer_memory import PeerMemory

ENGINES = "copy_engines"

LAYOUTS = {
    "averaged-2": Layout((2,), comms="averaged", cases=("neuron",), transport=ENGINES),
    "averaged-3": Layout((3,), comms="averaged", cases=("workspace",), transport=ENGINES),
    "replicated-2": Layout((2,), comms="replicated", cases=("plain",), transport=ENGINES),
    "sharded-2": Layout((2,), comms="sharded", cases=("mantissa", "workspace"), transport=ENGINES),
    "sharded-3": Layout((3,), comms="sharded", cases=("neuron",), transport=ENGINES),
    "fsdp2-2": Layout((2,), wrappings.data_parallel, cases=("bf16",), transport=ENGINES),
    "fsdp2-3": Layout((3,), wrappings.data_parallel, cases=("neuron",), transport=ENGINES),
    "tp-2": Layout((2,), wrappings.tensor_parallel, cases=("neuron",), transport=ENGINES),
    "hsdp-2x2": Layout((2, 2), wrappings.data_parallel, cases=("neuron",), transport=ENGINES),
}

WITHOUT = Gaps(("stack.2.weight", "attention.qkv.weight", "experts.up", "embedding.weight", "mlp.0.bias"), others=True)


def check(rank, world_size, layout, gaps):
    with copy_engines():
        check_layout(rank, world_size, layout, gaps)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_way_messages_travel_changes_nothing(name):
    run(check, LAYOUTS[name].world_size, LAYOUTS[name], Gaps(), timeout=100)


@pytest.mark.parametrize("name", ["sharded-3", "fsdp2-3"])
def test_nor_with_missing_gradients(name):
    run(check, LAYOUTS[name].world_size, LAYOUTS[name], WITHOUT, timeout=100)


def open_memory(num_bytes, group, device):
    return (PeerMemory if ON_GPUS else SharedMemory)(num_bytes, group, device)


def own_device():
    return torch.device(DEVICE, torch.cuda.current_device()) if ON_GPUS else torch.device("cpu")


def messages(channel, rank, size, device):
    """Send messages of all kinds, two under way at a time; return what arrived."""
    amounts = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    route = Route(size, rank, lambda i, j: amounts[i][j])
    send = torch.arange(sum(route.sends), device=device) + 1000 * rank
    first = channel.all_to_all(send, route)
    second = channel.all_gather(torch.full((3, 2), float(rank), device=device))
    found = [first.wait().clone(), second.wait().clone()]
    first.release()
    second.release()
    whole = torch.zeros(size * 5, dtype=torch.bfloat16, device=device)
    whole[rank * 5 : rank * 5 + 5] = rank + 1
    first = channel.all_gather(whole[rank * 5 : rank * 5 + 5], out=whole)
    counts = [i % 3 for i in range(size)]
    rows = torch.zeros(sum(counts), 3, device=device)
    rows[sum(counts[:rank]) :][: counts[rank]] = rank + 0.5
    second = channel.broadcasts(rows, counts)
    assert first.wait() is whole
    assert second.wait() is rows
    first.release()
    second.release()
    return [tensor.cpu() for tensor in (*found, whole, rows)]


def check_messages(rank, world_size):
    device = own_device()
    opened = []

    def counted(*arguments):
        opened.append(open_memory(*arguments))
        return opened[-1]

    expected = messages(Channel(dist.group.WORLD), rank, world_size, device)
    engines = CopyEngines(dist.group.WORLD, device, counted)
    for _ in range(4):
        with engines.messages():
            found = messages(engines, rank, world_size, device)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    # The first step has none, and the second one what it asked for.
    assert len(opened) == 1
    assert engines.num_bytes == opened[0].num_bytes > 0
    # A step with larger messages sends collectives, and the next one has the memory.
    send = torch.arange(4096.0, device=device) + rank
    for number in (1, 2):
        with engines.messages():
            pending = engines.all_gather(send)
            assert torch.equal(pending.wait(), torch.cat([send - rank + other for other in range(world_size)]))
            pending.release()
        assert len(opened) == number
    assert engines.num_bytes == 4 * 4096 * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_arrive_as_by_collectives(world_size):
    run(check_messages, world_size, timeout=60)


def check_one_place(rank, world_size):
    """Send many messages through one place, each read late on one rank."""
    device = own_device()
    engines = CopyEngines(dist.group.WORLD, device, open_memory)
    found = []
    for step in range(3):
        with engines.messages():
            for number in range(20):
                pending = engines.all_gather(torch.full((1000,), float(100 * step + number + rank), device=device))
                received = pending.wait()
                if ON_GPUS and rank == 0:
                    torch.cuda._sleep(1_000_000)
                found.append(received.view(world_size, -1).clone())
                pending.release()
        expected = [[100 * step + number + other for other in range(world_size)] for number in range(20)]
        assert [tensor[:, 0].tolist() for tensor in found] == expected
        assert all(bool((tensor == tensor[:, :1]).all()) for tensor in found)
        found.clear()
    return engines.num_bytes


@pytest.mark.parametrize("world_size", [2])
def test_a_place_is_not_overwritten_before_it_was_read(world_size):
    size = -(-4000 * world_size // 512) * 512
    assert run(check_one_place, world_size, timeout=60) == [size] * world_size


def check_after_error(rank, world_size):
    device = own_device()
    engines = CopyEngines(dist.group.WORLD, device, open_memory)
    found = []
    for step in range(6):
        try:
            with engines.messages():
                pending = engines.all_gather(torch.full((1000,), float(rank + step), device=device))
                if step in (2, 4):
                    # On all ranks: nobody waits for the message, nor gives its place back.
                    raise FloatingPointError
                found.append(pending.wait()[::1000].tolist())
                pending.release()
        except FloatingPointError:
            continue
    assert found == [[step + float(other) for other in range(world_size)] for step in (0, 1, 3, 5)]
    return engines.num_bytes


def test_an_error_leaves_nothing_behind():
    first, second = run(check_after_error, 2, timeout=60)
    assert first == second == 8192  # 4 x 1000 bytes of 2 ranks, up to a multiple of 512


def check_other_transport(rank, world_size):
    param = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    param.grad = torch.ones_like(param)
    with copy_engines():
        transport = ENGINES if rank else "collectives"
        optimizer = quintic.Muon([param], comms="sharded", transport=transport)
        with pytest.raises(RuntimeError, match="transport="):
            optimizer.step()


def test_ranks_that_disagree_are_told():
    run(check_other_transport, 2, timeout=60)


def check_no_memory(rank, world_size):
    def fails(num_bytes, group, device):
        raise RuntimeError("no memory")

    engines = CopyEngines(dist.group.WORLD, own_device(), fails)
    with engines.messages():
        pending = engines.all_gather(torch.ones(4, device=own_device()))
        pending.wait()
        pending.release()
    with pytest.raises(RuntimeError, match="no memory"), engines.messages():
        raise AssertionError("entered")


def test_an_error_of_the_memory_ends_the_step_that_would_need_it():
    run(check_no_memory, 2, timeout=60)


def check_failed_growth(rank, world_size):
    device = own_device()
    opened = []

    def second_fails(*arguments):
        if len(opened) == 1:
            opened.append(None)
            raise RuntimeError("no memory")
        opened.append(open_memory(*arguments))
        return opened[-1]

    engines = CopyEngines(dist.group.WORLD, device, second_fails)
    for numel in (100, 100, 1000):
        with engines.messages():
            pending = engines.all_gather(torch.ones(numel, device=device))
            pending.wait()
            pending.release()
    with pytest.raises(RuntimeError, match="no memory"), engines.messages():
        raise AssertionError("entered")
    assert engines.num_bytes == 0
    with engines.messages():
        pending = engines.all_gather(torch.full((1000,), float(rank), device=device))
        assert pending.wait()[::1000].tolist() == [0.0, 1.0]
        pending.release()
    assert len(opened) == 3


def test_a_step_can_be_tried_again_after_too_little_memory():
    run(check_failed_growth, 2, timeout=60)
