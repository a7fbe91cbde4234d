"""The state of stages is advanced in float32 or wider, and rounded once."""

import torch

from quintic.optim.rules.wide_state import store, widened


def test_bfloat16_state_is_advanced_in_float32_and_rounded_once():
    kept = {"average": torch.ones(3, dtype=torch.bfloat16), "square": torch.ones(3, dtype=torch.float64)}
    wide = widened(kept, kept)
    assert {name: value.dtype for name, value in wide.items()} == {"average": torch.float32, "square": torch.float64}
    for value in wide.values():
        # A unit in the last place of bfloat16 is 2 ** -7 here: rounded each time, none of these would arrive.
        for _ in range(3):
            value += 2.0**-9
    assert all((value == 1).all() for value in kept.values())
    store(kept, wide)
    assert kept["average"].tolist() == [1 + 2.0**-7] * 3
    assert kept["square"].tolist() == [1 + 3 * 2.0**-9] * 3


def test_only_the_named_state_is_copied_and_stored():
    kept = {"average": torch.zeros(2), "weight": torch.ones(2)}
    wide = widened(kept, ["average"])
    assert list(wide) == ["average"]
    store(kept, {"average": wide["average"] + 1})
    assert kept["average"].tolist() == [1, 1]


def test_state_keeps_its_bits_where_the_mask_is_zero():
    kept = {"rows": torch.tensor([[[1.0]], [[float("nan")]], [[3.0]]], dtype=torch.bfloat16)}
    before = kept["rows"].view(torch.int16).clone()
    wide = widened(kept, kept)
    wide["rows"] += 5
    store(kept, wide, torch.tensor([1, 0, 0], dtype=torch.int32).view(-1, 1, 1))
    assert kept["rows"][0].item() == 6
    assert torch.equal(kept["rows"].view(torch.int16)[1:], before[1:])
