"""State that the kernels would misread, which see addresses alone, is an error that names the parameter."""

from types import SimpleNamespace

import pytest
import torch

from quintic.optim.layout.pieces import Piece
from quintic.optim.step.bucket_step import _present
from quintic.optim.step.operands import BucketCache, Operands

CPU = torch.device("cpu")


def operands(**state):
    param = torch.zeros(6, 4)
    return Operands((Piece("layer.weight", 0),), [param], [param], [state], 1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"momentum_buffer": torch.zeros(6, 4, dtype=torch.float16)},
            r"layer\.weight: its momentum_buffer is torch.float16 on cpu .*strides \(4, 1\), and must be torch.float32",
        ),
        ({"momentum_buffer": torch.zeros(4, 6).T}, r"strides \(1, 6\), and must be torch.float32 on cpu .* \(4, 1\)"),
        (
            {"momentum_buffer": torch.zeros(6, 4, device="meta")},
            r"on meta .* must be torch.float32 on cpu",
        ),
        ({"momentum_buffer": torch.zeros(6, 4), "mantissa": torch.zeros(6, 4)}, "its mantissa is torch.float32 on cpu"),
        (
            {"momentum_buffer": torch.zeros(6, 4), "mantissa_byte": torch.zeros(6, 4).char()},
            "must be torch.uint8 on cpu",
        ),
    ],
)
def test_state_of_another_form(state, message):
    with pytest.raises(ValueError, match=message):
        BucketCache().check_state(operands(**state), {"momentum_buffer": torch.float32}, (1,))


def test_state_of_the_right_form_is_looked_at_once():
    memory, right = BucketCache(), operands(momentum_buffer=torch.zeros(6, 4))
    memory.check_state(right, {"momentum_buffer": torch.float32}, (1,))
    memory.check_state(right, {"momentum_buffer": torch.bfloat16}, (1,))
    with pytest.raises(ValueError, match=r"must be torch.bfloat16"):
        memory.check_state(right, {"momentum_buffer": torch.bfloat16}, (2,))


@pytest.mark.parametrize("moment", [torch.zeros(2, 6, 1, dtype=torch.float64), torch.zeros(6, 2, 1).transpose(0, 1)])
def test_second_moments_of_another_form(moment):
    bucket = SimpleNamespace(kernels="triton", device=CPU)
    message = r"layer\.weight: its second_momentum_buffer is .* must be torch.float32 on cpu without gaps"
    with pytest.raises(ValueError, match=message):
        BucketCache().vector_table(bucket, "second_momentum_buffer", [moment], ["layer.weight"])


def test_a_parameter_is_left_out_by_the_flags_of_its_own_matrices_alone():
    bank, matrix = Piece("bank", 0, (0, 1), None), Piece("matrix", 1, (0,), None)
    members = Operands((bank, matrix), [], [], [], 3)
    for flags, expected in (((0, 0, 1), [False, True]), ((0, 1, 0), [False, False]), ((1, 1, 0), [True, False])):
        assert _present(members, flags) == expected
