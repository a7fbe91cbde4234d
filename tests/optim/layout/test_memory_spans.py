"""Ranges of memory in one buffer and back, and means over ranks, in plain PyTorch."""

import torch

from quintic.optim.layout.packing import MemorySpan, Packing, in_memory_order, mean_in_order

CPU = torch.device("cpu")
SPANS = [MemorySpan(0, 2, 8, 3), MemorySpan(1, 0, 4, 9)]


def test_packed_ranges_are_those_of_the_memory_and_come_back():
    tensors = [torch.randn(4, 3).T, torch.randn(2, 2)]
    packing, buffer = Packing(SPANS, "torch", CPU), torch.zeros(13)
    packing.pack(tensors, buffer)
    assert torch.equal(buffer[3:], torch.cat([in_memory_order(tensors[0])[2:8], tensors[1].flatten()]))
    others = [torch.zeros_like(tensor) for tensor in tensors]
    packing.unpack(buffer, others)
    assert torch.equal(in_memory_order(others[0])[2:8], in_memory_order(tensors[0])[2:8])
    assert not in_memory_order(others[0])[:2].any()
    assert torch.equal(others[1], tensors[1])


def test_a_missing_tensor_is_packed_as_zeros():
    buffer = torch.full((13,), 7.0)
    Packing(SPANS, "torch", CPU).pack([None, torch.ones(2, 2)], buffer)
    assert buffer.tolist() == [7.0] * 3 + [0.0] * 6 + [1.0] * 4


def test_a_mean_of_bfloat16_is_rounded_once():
    addends = [torch.tensor([256.0]).bfloat16(), *(torch.ones(1).bfloat16() for _ in range(3))]
    assert mean_in_order(addends, torch.empty(1).bfloat16()).item() == torch.tensor(259 / 4).bfloat16().item()
