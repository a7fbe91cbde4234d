"""State that a head hands to an embedding stored as its transpose: nobody can tell that there were two parameters."""

import itertools

import numpy as np
import oracle
import pytest
import torch
from harness import DEVICE, run
from models import local_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import quintic
from quintic.optim.numeric.precision import full_precision
from quintic.optim.state.state import master_of

ROWS, COLUMNS = 40, 96  # so many entries that three ranks divide them
BETAS, EPS, LR, DECAY = (0.8, 0.95), 1e-8, 0.05, 0.3

# How the parameters lie: with options of the group, or cut in a dimension.
LAYOUTS = {
    "sharded": {"comms": "sharded"},
    "sharded_sparse": {"comms": "sharded_sparse"},
    "replicated": {"comms": "replicated"},
    "averaged": {"comms": "averaged"},
    "offloaded": {"comms": "sharded", "offload": True},
    "rows": Shard(0),
    "columns": Shard(1),
    "copies": Replicate(),
}
DTYPES = {None: torch.float32, "fp32": torch.bfloat16, "mantissa": torch.bfloat16, "8bit": torch.bfloat16}


def value(step, transposed=False):
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step)).bfloat16().float()
    return drawn.T.contiguous() if transposed else drawn


def laid_out(tensor, layout, mesh):
    if isinstance(LAYOUTS[layout], dict):
        return tensor
    return distribute_tensor(tensor, mesh, [LAYOUTS[layout]])


def group_of(name, param, layout, algorithm):
    options = LAYOUTS[layout] if isinstance(LAYOUTS[layout], dict) else {}
    return {"params": [(name, param)], "algorithm": algorithm, **options}


def optimizer_of(groups, master):
    options = {"lr": LR, "adamw_lr": LR, "betas": BETAS, "eps": EPS, "momentum": 0.8}
    # Not PyTorch's fused update, which rounds the end of a tensor otherwise, wherever that is.
    decays = {"weight_decay": DECAY, "adamw_weight_decay": DECAY, "decay_coupling": "lr_squared"}
    return quintic.Muon(groups, master=master, compute_dtype=torch.float32, **decays, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def handed_over(layouts, master, algorithm, mesh):
    """The weight after three steps as one parameter and three as another, and the whole state of both then."""
    dtype = DTYPES[master]
    first, second = (
        nn.Parameter(laid_out(value(0, transposed).to(DEVICE, dtype), layout, mesh))
        for layout, transposed in zip(layouts, (False, True), strict=True)
    )
    groups = [group_of("head", first, layouts[0], algorithm), group_of("embed", second, layouts[1], algorithm)]
    optimizer = optimizer_of(groups, master)
    for step in range(1, 7):
        if step == 4:
            with torch.no_grad():
                turned = whole(first.detach()).T.contiguous()
                second.copy_(laid_out(turned, layouts[1], mesh))
            optimizer.copy_state("head", second, transposed=True)
            first.grad = None
        param, layout = (second, layouts[1]) if step > 3 else (first, layouts[0])
        param.grad = laid_out(value(step, step > 3).to(DEVICE, dtype), layout, mesh)
        optimizer.step()
    # Also what the ranks' own parts of a state are put together to.
    saved = optimizer.state_dict()["state"]
    return whole(second.detach()).cpu(), {key: whole(found).cpu() for key, found in saved[1].items()}


def never_split(master, algorithm):
    """The same of one parameter on one device."""
    dtype = DTYPES[master]
    param = nn.Parameter(value(0).to(DEVICE, dtype))
    optimizer = optimizer_of([{"params": [param], "algorithm": algorithm}], master)
    for step in range(1, 7):
        param.grad = value(step).to(DEVICE, dtype)
        optimizer.step()
    return param.detach().cpu(), {key: found.cpu() for key, found in optimizer.state[param].items()}


def wrong_handovers(rank, world_size, cases):
    mesh = init_device_mesh(DEVICE, (world_size,))
    wrong = []
    for number, (layouts, master, algorithm) in enumerate(cases):
        found, state = handed_over(layouts, master, algorithm, mesh)
        weight, expected = never_split(master, algorithm)
        if algorithm == "adamw":  # and not only like ourselves
            twin = oracle.AdamWTensor(value(0).numpy())
            for step in range(1, 7):
                twin.step(value(step).numpy(), lr=LR, betas=BETAS, eps=EPS, wd=DECAY * LR)
            low = master_of(state)
            low = low.to(torch.uint16) if master == "mantissa" else low
            exact = found if low is None else full_precision(found, low)
            # Each of six steps rounds a weight that is no larger than before or after all of them.
            largest = np.maximum(np.abs(value(0).numpy()), np.abs(twin.w))
            allowed = 1e-6 + largest * (1e-5 + (6 * 2.0**-16 if master == "8bit" else 0.0))
            assert (np.abs(exact.T.cpu().numpy() - twin.w) <= allowed).all()
        pairs = {"weight": (found, weight.T)}
        for key, one in expected.items():
            pairs[key] = state[key], one.T.to(state[key].dtype) if one.ndim == 2 else one
        wrong += [(number, layouts, master, key) for key, pair in pairs.items() if not torch.equal(*pair)]
    return wrong


def cases(world_size):
    pairs = [pair for pair in itertools.product(LAYOUTS, LAYOUTS) if pair[0] != pair[1] or "sharded" in pair]
    masters = itertools.cycle(DTYPES)
    every = {1: 6, 2: 1, 3: 3}[world_size]
    found = [(pair, next(masters), "adamw") for pair in [*pairs, ("rows", "rows"), ("columns", "columns")]]
    return [*found[::every], *((("sharded", "sharded"), master, "adamw") for master in ("mantissa", "8bit"))]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_transposed_handover_is_no_event(world_size):
    assert run(wrong_handovers, world_size, cases(world_size), timeout=100) == [[]] * world_size


def matrices(rank, world_size):
    """Momentum of matrices goes from those that one rank has to those that come together elsewhere."""
    mesh = init_device_mesh(DEVICE, (world_size,))
    wrong, view = [], quintic.Rows(8)
    for normalize, layouts in itertools.product((None, "neuron"), (("sharded", "rows"), ("rows", "sharded"))):
        first, second, alone = (
            nn.Parameter(laid_out(value(0).to(DEVICE), layout, mesh)) for layout in (*layouts, "averaged")
        )
        of_both = [
            {**group_of(name, param, layout, "muon"), "view": view}
            for name, param, layout in zip(("a", "b"), (first, second), layouts, strict=True)
        ]
        options = {"lr": LR, "normalize": normalize, "compute_dtype": torch.float32}
        optimizer = quintic.Muon(of_both, **options)
        twin = quintic.Muon([{"params": [alone], "view": view}], **options)
        for step in range(1, 5):
            if step == 3:
                with torch.no_grad():
                    second.copy_(laid_out(whole(first.detach()), layouts[1], mesh))
                optimizer.copy_state(first, second)
                first.grad = None
            param, layout = (second, layouts[1]) if step > 2 else (first, layouts[0])
            param.grad, alone.grad = laid_out(value(step).to(DEVICE), layout, mesh), value(step).to(DEVICE)
            optimizer.step()
            twin.step()
        if not torch.equal(whole(second.detach()), alone):
            wrong.append((normalize, layouts))
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_momentum_and_neurons_of_banks_are_handed_over(world_size):
    assert run(matrices, world_size, timeout=60) == [[]] * world_size


def strangers(rank, world_size):
    """A head of one rank alone, and an embedding that all share."""
    head, embedding = (nn.Parameter(value(0, turned).to(DEVICE)) for turned in (False, True))
    groups = [group_of("head", head, "replicated", "adamw"), group_of("embed", embedding, "sharded", "adamw")]
    optimizer = quintic.Muon([{**groups[0], "comms": "none"}, groups[1]])
    with pytest.raises(ValueError, match="head and embed are on different ranks"):
        optimizer.copy_state(head, embedding, transposed=True)
    return local_of(optimizer.state[embedding]["exp_avg"]).numel()


def test_parameters_of_other_ranks_are_refused():
    assert sum(run(strangers, 2, timeout=30)) == ROWS * COLUMNS
