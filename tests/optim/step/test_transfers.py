"""Batches and the buffers they take turns in: what is copied when, and that nothing comes too early or too late."""

import random

import pytest
import torch
from delayed_copies import DelayedCopies
from hypothesis import given
from hypothesis import strategies as st

from quintic.optim.step.offload import transfers


def sized_ring(sizes, number, copies):
    states = [torch.arange(size, dtype=torch.float32) + 1000 * place for place, size in enumerate(sizes)]
    batches = [transfers.TransferBatch([(state, "both")]) for state in states]
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
    batches = [transfers.TransferBatch([(tensors[n], "both") for n in order[first::parts]]) for first in range(parts)]
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


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    with_masters=st.lists(st.booleans(), min_size=8, max_size=8),
    gaps=st.booleans(),
    policy=st.one_of(st.sampled_from(["late", "early"]), st.integers(0, 10**6)),
)
def test_state_may_be_loaded_in_one_pass_and_stored_in_another(sizes, with_masters, gaps, policy):
    """As for stages on whole matrices: loaded with momentum, and stored, maybe with masters, after all of that."""
    copies = DelayedCopies(random.Random(policy) if isinstance(policy, int) else policy)
    bases = [torch.arange(2.0 * size).view(-1, 2) + 1000 * place for place, size in enumerate(sizes)]
    # Columns, whose gaps nobody owns, or the same number of entries without gaps.
    moments = [base[:, 0] if gaps else base.view(-1)[: len(base)] for base in bases]
    momenta = [torch.full((size,), 1.0) for size in sizes]
    masters = [torch.full((size if has else 0,), 2.0) for size, has in zip(sizes, with_masters, strict=False)]
    expected = [value.clone() for value in (*bases, *momenta, *masters)]
    loaded, stored = [], []
    for moment, momentum, master in zip(moments, momenta, masters, strict=True):
        loaded.append(transfers.TransferBatch([(momentum, "both"), (moment, "load")]))
        stored.append(transfers.TransferBatch([(moment, "store"), (master, "both")]))
    first, second = (transfers.BufferPool(copies, max(b.size for b in of), 3) for of in (loaded, stored))
    for _ in range(3):
        first.begin(loaded)
        second.begin(stored)
        copied = []
        for batch in loaded:
            with first.use(batch):
                momentum, moment = first.device_views(batch)
                momentum.add_(moment)
                copied.append(moment.clone())
        for batch, moment in zip(stored, copied, strict=True):
            with second.use(batch):
                target, master = second.device_views(batch)
                target.copy_(moment * 2)
                master.add_(1)
        for place, size in enumerate(sizes):
            base, momentum, master = expected[place :: len(sizes)]
            moment = base[:, 0] if gaps else base.view(-1)[:size]
            momentum.add_(moment)
            moment.mul_(2)
            master.add_(1)
    copies.finish()
    for value, right in zip((*bases, *momenta, *masters), expected, strict=True):
        assert torch.equal(value, right)
    # Loads for the first pass; for the second one only of masters, or where a store would write gaps.
    loads = sum(size > 0 for size in sizes) + sum(
        master.numel() > 0 or (gaps and size > 1) for master, size in zip(masters, sizes, strict=True)
    )
    assert [kind for kind, _ in copies.log].count("load") == 3 * loads
    assert sum(batch.num_bytes for batch in loaded) == sum(value.nbytes for value in momenta)


def test_twins_of_empty_tensors_are_on_the_device():
    """Where a rank holds no entry of any parameter, there are no bytes, and kernels still look at devices."""
    pool = transfers.BufferPool(transfers.Copies(torch.device("meta")), 0, 1)
    batch = transfers.TransferBatch([(torch.empty(16, 0), "both"), (torch.empty(0, dtype=torch.uint16), "both")])
    for _ in range(2):
        pool.begin([batch])
        with pool.use(batch):
            assert [(twin.device.type, twin.shape, twin.dtype) for twin in pool.device_views(batch)] == [
                ("meta", (16, 0), torch.float32),
                ("meta", (0,), torch.uint16),
            ]


class MarkedCopies(DelayedCopies):
    """Work of the current stream is marked; what each load waits for is noted."""

    marked = object()

    def __init__(self):
        super().__init__("early")
        self.waits = []

    def mark(self):
        return self.marked

    def load(self, targets, sources, after):
        self.waits.append(after)
        return super().load(targets, sources, [event for event in after if event is not self.marked])


def test_loads_after_a_step_that_raised_wait_for_what_it_computes():
    copies = MarkedCopies()
    _, batches, pool = sized_ring([4, 5, 6], 2, copies)
    pool.begin(batches)
    with pytest.raises(ZeroDivisionError), pool.use(batches[0]):
        raise ZeroDivisionError
    copies.waits.clear()
    pool.begin(batches)
    with pool.use(batches[0]):
        pass
    assert len(copies.waits) == 2
    assert all(copies.marked in after for after in copies.waits)
