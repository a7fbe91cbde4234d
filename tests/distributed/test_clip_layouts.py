"""The total norm and the clipped gradients in every layout against those of one device, to the last bit."""

import math
from functools import partial

import pytest
import torch
import wrappings
from harness import DEVICE, run
from models import Awkward, Narrow, give_gradients, gradient, local_of, numbered, positions, rules
from newer import needs_torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from trajectories import Layout

import quintic

LAYOUTS = {
    "fsdp2": ((4,), wrappings.data_parallel),
    "fsdp2, last dimension": ((4,), wrappings.last_dimension),
    "hsdp": ((2, 2), wrappings.data_parallel),
    "tp": ((4,), wrappings.tensor_parallel),
    "tp and fsdp2": ((2, 2), wrappings.tensor_and_data_parallel),
    "ep and fsdp2": ((4,), wrappings.expert_and_data_parallel),
    "ep and fsdp2 on several meshes": ((2, 2), wrappings.expert_and_data_parallel),
    "replicated": ((2, 2), wrappings.replicated),
    "plain": ((4,), wrappings.plain),
}

MAX_NORM = 0.5

# Cut, copied, or with nothing on the last rank, as the layout has it.
MISSING = ("embedding.weight", "mlp.0.weight", "mlp.0.bias", "mlp.1.bias", "experts.up", "none.weight")


def optimizer_of(model, **options):
    return quintic.Muon(quintic.param_groups(model, rules=rules(model)), **options)


def in_scope(optimizer, scope):
    groups = (group for group in optimizer.param_groups if scope in ("all", group["algorithm"]))
    return {name for group in groups for name in group["param_names"]}


def laid_out(make, wrap):
    """A wrapped model, and which entries of each parameter this rank holds."""
    twin, model = numbered(make()), make()
    wrap(twin)
    wrap(model)
    return model, positions(twin)


def norm_of_what_is_held(model, held, names):
    """The norm of all entries that some rank has a gradient of, each counted once; all ranks must call it."""
    params = dict(model.named_parameters())
    mine = {n: (held[n].cpu(), local_of(params[n].grad).cpu()) for n in names if params[n].grad is not None}
    everyone = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    total = 0.0
    for name in names:
        whole = torch.zeros(params[name].numel(), dtype=torch.float64)
        for theirs in everyone:
            if name in theirs:
                places, values = theirs[name]
                whole[places.flatten()] = values.flatten().double()
        total += float(whole.square().sum())
    return math.sqrt(total)


def clipped_on_one_device(make, scope):
    """The norm, and all gradients after clipping."""
    model = make()
    give_gradients(model, {n: gradient(n, p.shape, p.dtype, 0) for n, p in model.named_parameters()})
    norm = quintic.clip_grad_norm_(optimizer_of(model), MAX_NORM, scope=scope)
    return norm, {name: param.grad for name, param in model.named_parameters()}


def check_layouts(rank, world_size, dtype):
    make = partial(Awkward, dtype=dtype)
    wrong = []
    for title, (shape, wrap) in LAYOUTS.items():
        mesh = Layout(shape).device_mesh()
        comms = "averaged" if wrap is wrappings.plain else "none"
        model, held = laid_out(make, partial(wrap, mesh=mesh))
        optimizer = optimizer_of(model, comms=comms)
        params = dict(model.named_parameters())
        for scope in ("adamw", "all"):
            wholes = {name: gradient(name, param.shape, dtype, 0) for name, param in params.items()}
            give_gradients(model, wholes, held)
            norm = quintic.clip_grad_norm_(optimizer, MAX_NORM, scope=scope)
            expected_norm, expected = clipped_on_one_device(make, scope)
            if not torch.equal(norm, expected_norm):
                wrong.append(f"{title}, {scope}: norm {norm.item()!r} instead of {expected_norm.item()!r}")
            for name, param in params.items():
                if not torch.equal(local_of(param.grad), expected[name].flatten()[held[name]]):
                    wrong.append(f"{title}, {scope}: {name}")
        # Gaps only where the ranks know of each other: not in plain tensors, and not in copies on other meshes.
        shared = {n for n, p in params.items() if isinstance(p, DTensor) and p.device_mesh.size() == world_size}
        last = rank == world_size - 1
        without = {
            "the last rank lacks some": {name for name in MISSING if name in shared and last},
            "the first rank alone has any": shared if rank else set(),
            "nobody has any": shared,
        }
        for gap, names in without.items():
            present = {name: wholes[name] for name in shared - names}
            give_gradients(model, {name: present.get(name) for name in params}, held)
            expected = norm_of_what_is_held(model, held, sorted(shared))
            norm = quintic.clip_grad_norm_(optimizer, math.inf, scope="all").item()
            if norm != pytest.approx(expected, rel=2.0**-22, abs=0):
                wrong.append(f"{title}, {gap}: norm {norm} instead of {expected}")
            if {name for name, param in params.items() if param.grad is not None} != present.keys():
                wrong.append(f"{title}, {gap}: gradients came or went")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layout_has_the_norm_and_the_gradients_of_one_device(dtype):
    run(check_layouts, 4, dtype, timeout=100)


def check_meshes(rank, world_size):
    """Parameters of one model on many meshes, some of them not of this rank; gradients with other placements."""
    square = Layout((2, 2)).device_mesh()
    flat = square._flatten("flat")
    wholes = {}
    model = nn.Module()

    def add(name, mesh, placements, *shape):
        wholes[name] = gradient(name, shape, torch.float32, 0)
        model.register_parameter(name, nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements)))

    add("both", square, [Shard(0), Shard(1)], 7, 5)
    add("twice", square, [Shard(0), Shard(0)], 7, 5)
    add("outer", square, [Shard(0), Replicate()], 3, 2)
    add("inner", square, [Replicate(), Shard(0)], 1, 2)
    add("copies", square, [Replicate(), Replicate()], 6)
    add("flat", flat, [Shard(0)], 9, 2)
    add("column", square["outer"], [Shard(0)], 5)
    add("row", square["inner"], [Shard(0)], 5)
    add("empty", flat, [Shard(0)], 0, 2)
    # Ranks in another order, where PyTorch's own scattering does not keep to it.
    turned = DeviceMesh(DEVICE, [[3, 1], [0, 2]])
    first, second = turned.get_coordinate()
    pieces = {"first": ([Shard(0), Replicate()], first), "second": ([Replicate(), Shard(0)], second)}
    for name, (placements, place) in pieces.items():
        wholes[f"turned_{name}"] = whole = gradient(f"turned_{name}", (6, 2), torch.float32, 0)
        local, of_gradient = (
            DTensor.from_local(tensor[3 * place : 3 * place + 3].clone(), turned, placements, run_check=False)
            for tensor in (torch.zeros_like(whole), whole)
        )
        param = nn.Parameter(local)
        param.grad = of_gradient
        model.register_parameter(f"turned_{name}", param)
    model.plain = nn.Parameter(torch.zeros(3, device=DEVICE))
    wholes["plain"] = gradient("plain", (3,), torch.float32, 0)
    optimizer = quintic.Muon([{"params": list(model.named_parameters()), "algorithm": "adamw"}])

    # Sums still to be made: outer x inner ranks hold addends of small integers, which add up exactly.
    addends = {n: torch.full(wholes[n].shape, 1.0 + rank, device=DEVICE) for n in ("both", "inner", "copies")}
    for name, param in model.named_parameters():
        whole = wholes[name]
        if name in addends:
            placements = [Partial(), Partial()]
            param.grad = DTensor.from_local(addends[name], square, placements, run_check=False)
            wholes[name] = torch.full_like(whole, 10.0)
        elif name.startswith("turned"):
            continue
        elif name == "outer":  # whole on every rank, though the parameter is cut
            param.grad = distribute_tensor(whole, square, [Replicate(), Replicate()])
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
        else:
            param.grad = whole.clone()
    expected = math.sqrt(sum(float(whole.double().square().sum()) for whole in wholes.values()))
    norm = quintic.clip_grad_norm_(optimizer, 0.5)
    assert norm.item() == pytest.approx(expected, rel=2.0**-23)
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            assert param.grad.placements == param.placements, name
        if name.startswith("turned"):
            place = turned.get_coordinate()[name == "turned_second"]
            torch.testing.assert_close(local_of(param.grad), wholes[name][3 * place :][:3] * (0.5 / expected))
            continue
        found = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
        torch.testing.assert_close(found, wholes[name] * (0.5 / expected))
    optimizer.step()

    # Parameters on meshes that this rank is not part of count nothing here, and nobody waits.
    for ranks in ([0, 2], [1, 3]):
        mesh = DeviceMesh(DEVICE, ranks)
        param = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
        of_mesh = distribute_tensor(torch.full((5, 2), 1.0 + ranks[0]), mesh, [Shard(0)])
        if rank in ranks or DEVICE == "cpu":  # elsewhere what PyTorch computes for no entries is on the CPU
            param.grad = of_mesh
        elsewhere = quintic.Muon([{"params": [param], "algorithm": "adamw"}])
        found = quintic.clip_grad_norm_(elsewhere, 1.0).item()
        assert found == pytest.approx(math.sqrt(10) * (1 + ranks[0]) if rank in ranks else 0)


def test_many_meshes_in_one_model():
    run(check_meshes, 4, timeout=60)


def check_stages(rank, world_size):
    """A pipeline of two stages, each under FSDP2 on two ranks; one of the stages has no gradients at first."""
    mesh = DeviceMesh(DEVICE, torch.arange(4).view(2, 2), mesh_dim_names=("stage", "shard"))
    stage, stages = rank // 2, mesh["stage"].get_group()
    makes = (Awkward, Narrow)
    model, held = laid_out(makes[stage], partial(wrappings.data_parallel, mesh=mesh["shard"]))
    optimizer = optimizer_of(model)
    both = [clipped_on_one_device(make, "adamw")[0].double().square() for make in makes]
    wholes = {n: gradient(n, p.shape, p.dtype, 0) for n, p in model.named_parameters()}
    norms = []
    for present in ((0,), (0, 1)):
        optimizer.zero_grad()
        if stage in present:
            give_gradients(model, wholes, held)
        norm = quintic.clip_grad_norm_(optimizer, MAX_NORM, process_group=stages)
        torch.testing.assert_close(norm.double(), sum(both[number] for number in present).sqrt(), rtol=1e-6, atol=0)
        norms.append(norm.item())
    factor = MAX_NORM / norms[1]
    for name in in_scope(optimizer, "adamw"):
        found = local_of(dict(model.named_parameters())[name].grad)
        torch.testing.assert_close(found, wholes[name].flatten()[held[name]] * factor)
    if rank == 0:
        local_of(model.embedding.weight.grad).fill_(math.nan)
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        quintic.clip_grad_norm_(optimizer, MAX_NORM, process_group=stages, error_if_nonfinite=True)
    return norms


def test_stages_of_a_pipeline_are_added():
    norms = run(check_stages, 4, timeout=60)
    assert all(found == norms[0] for found in norms)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 12)
        self.to(DEVICE)

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens))
        return self.head(self.down(torch.relu(self.up(x))))


def check_backward(rank, world_size):
    """Gradients as backward passes leave them, with sums over sequence-parallel norms still to be made."""
    mesh = DeviceMesh(DEVICE, torch.arange(4).view(2, 2), mesh_dim_names=("data", "tensor"))
    tokens = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def backward(model):
        loss = model(tokens).square().mean()
        loss.backward()
        return model

    for scope in ("adamw", "all"):
        one = backward(Mlp())
        expected = torch.nn.utils.get_total_norm(
            [p.grad for n, p in one.named_parameters() if n in in_scope(optimizer_of(one), scope)]
        )
        for with_fsdp in (False, True):
            model = Mlp()
            plan = {
                "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            parallelize_module(model, mesh["tensor"], plan)
            if with_fsdp:
                fully_shard(model, mesh=mesh["data"])
            backward(model)
            is_partial = [any(p.is_partial() for p in param.grad.placements) for param in model.parameters()]
            assert any(is_partial) != with_fsdp
            norm = quintic.clip_grad_norm_(optimizer_of(model), 1e-3, scope=scope)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            again = quintic.clip_grad_norm_(optimizer_of(model), math.inf, scope=scope)
            assert again.item() == pytest.approx(1e-3, rel=1e-2)


@needs_torch("2.9", "an average by FSDP2 beside tensor parallelism on CPUs")
def test_gradients_of_a_backward_pass():
    run(check_backward, 4, timeout=60)
