"""8-bit state whose groups of 8 columns are cut, by views, meshes and options: after each step the bytes of one device.

`test_cut_groups.py` has its checkpoints and errors.
"""

import functools

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import quintic
from quintic import Experts, Heads, Matrix, Split

# Name -> (shape, view); None for AdamW.
PARAMETERS = {
    "matrix": ((12, 24), Matrix()),
    "another": ((12, 24), Matrix()),
    "transposed": ((10, 40), Matrix(transposed=True)),
    "heads": ((16, 48), Heads(2, dim=1)),
    "parts": ((14, 32), Split((8, 24), transposed=True)),
    "experts": ((3, 10, 16), Experts()),
    "table": ((11, 24), None),
    "cube": ((2, 3, 8), None),
    "whole": ((6, 16), None),
    "odd": ((6, 12), Matrix()),
}

LAYOUTS = {
    "2": ((2,), [Shard(-1)]),
    "3": ((3,), [Shard(-1)]),
    "4": ((4,), [Shard(-1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(-1)]),
    "copies": ((2, 2), [Replicate(), Shard(-1)]),
    "columns twice": ((2, 2), [Shard(-1), Shard(-1)]),
}


def make(layout=None, dtype=torch.float32, names=tuple(PARAMETERS), **options):
    """Return parameters by name, laid out over ranks or whole, and an optimizer for them."""
    params = {}
    for number, name in enumerate(names):
        shape, _ = PARAMETERS[name]
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        params[name] = nn.Parameter(laid_out(name, value, layout))
    # One group for each view, so that buckets have several parameters.
    groups = {}
    for name, param in params.items():
        _, view = PARAMETERS[name]
        group = groups.setdefault(str(view), {"algorithm": "adamw"} if view is None else {"view": view})
        group.setdefault("params", []).append((name, param))
    options = {"state_dtype": "int8", "lr": 0.05, "adamw_lr": 0.01, "compute_dtype": torch.float32, **options}
    return params, quintic.Muon(list(groups.values()), **options)


def laid_out(name, value, layout):
    if layout is None:
        return value.to(DEVICE)
    mesh, placements = layout
    placements = [Shard(one.dim % value.ndim) if isinstance(one, Shard) else one for one in placements]
    if name == "whole":
        placements = [Replicate()] * len(mesh)
    return distribute_tensor(value.to(DEVICE), mesh_of(mesh), placements, src_data_rank=None)


@functools.cache
def mesh_of(shape):
    return DeviceMesh(DEVICE, torch.arange(torch.Size(shape).numel()).view(shape))


def gradient(name, step, dtype):
    """Of entries from 2^-140 to 2^20, all zero in some groups, and not finite in one group of a late step."""
    shape, _ = PARAMETERS[name]
    generator = torch.Generator().manual_seed(97 * step + len(name))
    value = torch.randn(shape, generator=generator)
    value *= 2.0 ** torch.randint(-3, 20, (*shape[:-1], 1), generator=generator)
    value[0] *= 2.0**-140
    value[..., -8:] *= torch.rand((*shape[:-1], 1), generator=generator) < 0.5
    if step == 3 and PARAMETERS[name][1] is None:
        value.view(-1)[-1] = torch.inf
    return value.to(dtype)


def step(params, optimizer, numbers, layout=None, rank=0):
    for number in numbers:
        for index, (name, param) in enumerate(params.items()):
            param.grad = laid_out(name, gradient(name, number, param.dtype), layout)
            # Nobody has this gradient in one step, and one rank lacks it in another.
            is_last = layout is not None and rank == torch.Size(layout[0]).numel() - 1
            missing = number == 1 + index % 2
            if missing and (number == 1 or layout is None or is_last or name == "whole"):
                param.grad = None
        optimizer.step()


def everything(params, optimizer):
    """Return weights and state by name, whole and on the CPU, without numbers that only owners of matrices have."""
    found = {}
    for name, param in params.items():
        state = {"weight": param.detach(), **optimizer.state[param]}
        state.pop("second_momentum_buffer", None)
        for key, value in state.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = value.cpu()
    return found


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [key for key in found if not torch.equal(found[key].nan_to_num(7), expected[key].nan_to_num(7))]


OPTIONS = {
    "plain": {},
    "masters": {"master": "8bit", "normalize": "neuron", "cautious": True, "weight_decay": 0.1},
    "adamuon": {"normalize": "element", "max_workspace_bytes": 3000},
    "guarded": {"on_nonfinite": "skip", "adamw_weight_decay": 0.1},
}


def check_layout(rank, world_size, layout, dtype, options):
    params, optimizer = make(layout, dtype, **options)
    one, alone = make(None, dtype, **options)
    for number in range(5):
        step(params, optimizer, [number], layout, rank)
        step(one, alone, [number])
        wrong = differing(everything(params, optimizer), everything(one, alone))
        assert not wrong, f"after step {number}: {wrong}"
    assert alone.state[one["matrix"]]["momentum_buffer"].dtype == torch.int8


# The quick tests have cut groups of two ranks and of four, and masks; the slow ones have copies and masters, too.
QUICK = {("3", "plain"), ("4", "guarded")}


@pytest.mark.parametrize(
    ("name", "title"),
    [
        pytest.param(name, title, marks=() if (name, title) in QUICK else pytest.mark.slow)
        for name in LAYOUTS
        for title in OPTIONS
    ],
)
def test_bytes_and_weights_are_those_of_one_device(name, title):
    mesh, placements = LAYOUTS[name]
    dtype = torch.bfloat16 if title == "masters" else torch.float32
    run(check_layout, torch.Size(mesh).numel(), (mesh, placements), dtype, OPTIONS[title])
