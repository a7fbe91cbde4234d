"""Batches and the buffers they take turns in: what is copied when, and that nothing comes too early or too late."""

import random

import torch
from delayed_copies import DelayedCopies
from hypothesis import given
from hypothesis import strategies as st

from quintic.optim.step.offload import transfers


def sized_ring(sizes, number, copies):
    states = [torch.arange(size, dtype=torch.float32) + 1000 * place for place, size in enumerate(sizes)]
    batches = [transfers.TransferBatch([state]) for state in states]
    return states, batches, transfers.BufferPool(copies, max(batch.size for batch in batches), number)


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    number=st.integers(1, 4),
    steps=st.integers(1, 3),
    policy=st.one_of(st.sampled_from(["late", "early"]), st.integers(0, 10**6)),
)
def test_loads_are_ahead_and_stores_behind(sizes, number, steps, policy):
    copies = DelayedCopies(random.Random(policy) if isinstance(policy, int) else policy)
    states, batches, pool = sized_ring(sizes, number, copies)
    expected = [state.clone() for state in states]
    for _ in range(steps):
        pool.begin(batches)
        log, places = copies.log, []
        for place, batch in enumerate(batches):
            (twin,) = pool.device_views(batch)
            places.append(twin.data_ptr())
            with pool.use(batch):
                log.append(("use", place))
                twin.add_(1)
            expected[place] += 1
        for place, address in enumerate(places):
            use = log.index(("use", place))
            assert log[use + 1] == ("store", address)
            ahead = min(place + 1, len(places) - 1)
            if number > 1:
                # Of the next one, too.
                assert log[:use].count(("load", places[ahead])) == places[: ahead + 1].count(places[ahead])
        log.clear()
    copies.finish()
    for state, value in zip(states, expected, strict=True):
        assert torch.equal(state, value)
    assert copies.allocated == number * max(batch.size for batch in batches)


@given(data=st.data())
def test_tensors_that_lie_between_each_other(data):
    """Batches with gaps whose gaps are entries of other batches, several tensors of one storage in a batch."""
    base = torch.arange(240.0).view(6, 40)
    cuts = data.draw(st.lists(st.sampled_from([base[:, i * 5 : i * 5 + 5] for i in range(8)]), unique_by=id))
    rows = torch.arange(100.0)
    tensors = [*cuts, rows[:30], rows[30:31], rows[60:].view(5, 8).mT]
    order = data.draw(st.permutations(range(len(tensors))))
    parts = data.draw(st.integers(1, len(tensors)))
    batches = [transfers.TransferBatch([tensors[n] for n in order[first::parts]]) for first in range(parts)]
    expected = [tensor.clone() for tensor in tensors]
    copies = DelayedCopies(random.Random(data.draw(st.integers(0, 10**6))))
    pool = transfers.BufferPool(copies, max(batch.size for batch in batches), 3)
    untouched = base.clone()
    for _ in range(2):
        pool.begin(batches)
        for first, batch in enumerate(batches):
            with pool.use(batch):
                for number, twin in zip(order[first::parts], pool.device_views(batch), strict=True):
                    assert twin.shape == tensors[number].shape
                    assert twin.stride() == tensors[number].stride()
                    twin.mul_(number + 2)
                    expected[number] *= number + 2
    copies.finish()
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)
    for place in range(8):
        if not any(cut.storage_offset() == place * 5 for cut in cuts):
            assert torch.equal(base[:, place * 5 : place * 5 + 5], untouched[:, place * 5 : place * 5 + 5])


def test_twins_of_empty_tensors_are_on_the_device():
    """Where a rank holds no entry of any parameter, there are no bytes, and kernels still look at devices."""
    pool = transfers.BufferPool(transfers.Copies(torch.device("meta")), 0, 1)
    batch = transfers.TransferBatch([torch.empty(16, 0), torch.empty(0, dtype=torch.uint16)])
    for _ in range(2):
        pool.begin([batch])
        with pool.use(batch):
            assert [(twin.device.type, twin.shape, twin.dtype) for twin in pool.device_views(batch)] == [
                ("meta", (16, 0), torch.float32),
                ("meta", (0,), torch.uint16),
            ]
