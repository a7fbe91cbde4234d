"""Cases of test_triton.py: state in host memory with the kernels, which find loaded state by its address."""

import pytest
import torch
from on_device import DEVICE
from torch import nn

from quintic import Experts, Heads, Matrix, Muon, Rows, Split
from quintic.optim.layout import tables
from quintic.optim.step import operands

# The interpreter has no reliable bfloat16.
LOW = torch.float16 if DEVICE == "cpu" else torch.bfloat16

GROUPS = [
    (Matrix(), (12, 9)),
    (Matrix(transposed=True), (9, 13)),
    (Heads(2, dim=1), (8, 12)),
    (Split((3, 2, 1), groups=2), (12, 8)),
    (Experts(), (3, 6, 8)),
    (Rows(8, transposed=True), (16, 12)),
]


EVERYTHING = {
    "normalize": "neuron",
    "on_nonfinite": "skip",
    "cautious": True,
    "weight_decay": 0.3,
    "adamw_weight_decay": 0.3,
}


def made(dtype, **options):
    torch.manual_seed(0)
    # Two of a shape only in the first groups, which makes buckets of several parameters.
    shapes = [shape for number, (_, shape) in enumerate(GROUPS) for _ in range(2 if number < 2 else 1)]
    params = [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in shapes]
    turned = torch.randn(19, 30).to(DEVICE, dtype).mT
    vectors = [nn.Parameter(t) for t in (torch.randn(900).to(DEVICE, dtype), torch.ones(7).to(DEVICE, dtype), turned)]
    groups = [{"params": [p for p, s in zip(params, shapes, strict=True) if s == of], "view": v} for v, of in GROUPS]
    groups.append({"params": vectors, "algorithm": "adamw"})
    optimizer = Muon(groups, lr=0.05, adamw_lr=0.05, kernels="triton", **options)
    return [*params, *vectors], optimizer


def give_gradients(params, step, wide=False):
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=generator).to(DEVICE, torch.float32 if wide else param.dtype)
        # With the parameter's strides, as autograd gives it.
        param.grad = torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
        if number == 3 and step == 1:
            param.grad = None


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("dtype", "options", "workspace"),
    [
        (torch.float32, {}, 2**31),
        # Buckets of one matrix where state is in host memory, of two elsewhere.
        (torch.float32, {}, 4_000),
        (torch.float32, EVERYTHING, 2**31),
        (torch.float32, EVERYTHING, 4_000),
        # State that a stage on whole matrices advances.
        (torch.float32, {"normalize": "element", "on_nonfinite": "skip"}, 4_000),
        (LOW, {"master": "fp32", "weight_decay": 0.1, "adamw_weight_decay": 0.1}, 4_000),
        *([(LOW, {"master": "mantissa"}, workspace) for workspace in (2**31, 4_000)] if DEVICE == "cuda" else []),
        (torch.bfloat16, {"master": "8bit", "weight_decay": 0.1, "adamw_weight_decay": 0.1}, 4_000),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_where_state_is(dtype, options, workspace):
    found = []
    for on in (False, True):
        params, optimizer = made(dtype, offload=on, max_workspace_bytes=workspace, **options)
        assert {bucket.kernels for bucket in optimizer.plan()} == {"triton"}
        for step in range(3):
            give_gradients(params, step)
            if step == 2 and "on_nonfinite" in options:
                params[0].grad[0] = torch.inf
            optimizer.step()
        if on:
            kinds = [
                optimizer.state[p][k]
                for p in params
                for k in ("momentum_buffer", "exp_avg", "master", "mantissa_byte")
                if k in optimizer.state[p]
            ]
            assert all(value.device.type == "cpu" and value.is_pinned() == (DEVICE == "cuda") for value in kinds)
        found.append((params, optimizer))
    (plain_params, plain), (params, hosted) = found
    for expected, param in zip(plain_params, params, strict=True):
        assert torch.equal(expected, param)
        for key, value in plain.state[expected].items():
            assert torch.equal(value.cpu(), hosted.state[param][key].cpu()), key


def test_tables_of_addresses_are_uploaded_once(monkeypatch):
    params, optimizer = made(torch.float32, offload=True, max_workspace_bytes=4_000)
    uploads = []
    upload = tables.upload
    for module in (operands, tables):
        monkeypatch.setattr(module, "upload", lambda *given: uploads.append(given) or upload(*given))
    counts = []
    give_gradients(params, 0)
    for _ in range(4):
        optimizer.step()
        counts.append(len(uploads))
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 3
