"""Ranks that give different layers, or make mistakes: a rule or an error, never a hang."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import attentions
import pytest
import torch
import torch.distributed as dist
from attentions import THRESHOLD, Attentions, largest, seen
from harness import DEVICE, run
from test_invariance import PAIRS
from test_qk_layouts import CASES, Layout, disagreements, optimizer_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import quintic
from quintic import QKClip

HIGH, LOW = 4 * THRESHOLD, THRESHOLD / 2


class Small(nn.Module):
    """One layer of two heads, with weights of one."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("q_proj", "k_proj")})
        self.to(DEVICE)
        for param in self.parameters():
            nn.init.ones_(param)


def small(comms="averaged", **options):
    """A layer, and an optimizer of which only QK-clip does anything."""
    model = options.pop("model", None) or Small()
    clip = QKClip(threshold=THRESHOLD, process_group=options.pop("process_group", None))
    params = list(model.named_parameters())
    return model, quintic.Muon([{"params": params}], lr=0.0, comms=comms, qk_clip=clip, **options)


def rows_of(model):
    """The factors that the rows of the queries were scaled with, squared: those of the logits."""
    weight = getattr(model, "attn", model)["q_proj"].weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return [round(value * value, 4) for value in whole[:, 0].tolist()]


def maxima(*values, layer="attn"):
    return {layer: torch.tensor(values, device=DEVICE)}


# --------------------------------------------------------------------------------------------------------------- layers


def give_late(rank, world_size):
    model, optimizer = small()
    model.other = Small().attn
    optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith("other")]})
    # Nobody gives anything, then only the last rank: agreed upon at once.
    optimizer.step()
    optimizer.step(qk_logits=maxima(HIGH, LOW) if rank == world_size - 1 else None)
    assert rows_of(model) == [0.25, 0.25, 1, 1]
    # Another layer, on one rank: from the next step on, with these maxima.
    optimizer.step(qk_logits=maxima(LOW, HIGH, layer="other") if rank == 0 else {})
    assert model.other["k_proj"].weight.eq(1).all()
    optimizer.step(qk_logits=maxima(2 * THRESHOLD, LOW, layer="other") if rank == 1 else None)
    assert rows_of(model.other) == [0.5, 0.5, 0.25, 0.25]
    assert rows_of(model) == [0.25, 0.25, 1, 1]
    # And both at once, when everything is known.
    both = {**maxima(HIGH, LOW, layer="other"), **maxima(LOW, HIGH)}
    optimizer.step(qk_logits=both if rank == 1 else None)
    assert rows_of(model.other) == [0.125, 0.125, 0.25, 0.25]
    assert rows_of(model) == [0.25, 0.25, 0.25, 0.25]


def test_a_layer_may_come_late_and_from_one_rank():
    run(give_late, 3)


def reduce_once(rank, world_size, wrap, shape):
    calls = []
    original = dist.all_reduce

    def counting(tensor, op=dist.ReduceOp.SUM, **options):
        calls.append((op, tensor.numel()))
        return original(tensor, op, **options)

    model, mesh = (
        Attentions(),
        DeviceMesh(DEVICE, torch.arange(world_size).view(shape), mesh_dim_names=("data", "tensor")),
    )
    wrap(model, mesh)
    optimizer = optimizer_of(model, CASES["float32"], comms="averaged" if wrap is attentions.plain else "none")
    for step in range(2):
        calls.clear()
        # After the first step ranks have nothing to say to each other through the host.
        silence = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError) if step else nullcontext()
        with mock.patch.object(dist, "all_reduce", counting), silence:
            optimizer.step(qk_logits=seen(step, rank))
        assert [size for op, size in calls if op == dist.ReduceOp.MAX] == [sum(attentions.HEADS.values()) + 1]


@pytest.mark.parametrize(
    ("wrap", "shape"),
    [(attentions.plain, (2, 1)), (attentions.rows, (1, 2)), (attentions.tensor_parallel_rows, (2, 2))],
)
def test_all_layers_are_one_all_reduce(wrap, shape):
    run(reduce_once, shape[0] * shape[1], wrap, shape)


def name_a_layer_twice(rank, world_size):
    _, optimizer = small()
    with pytest.raises(ValueError, match=r"both mean attn\.k_proj\.weight"):
        optimizer.step(qk_logits={"attn" if rank else "attn.": torch.ones(2)})


# ------------------------------------------------------------------------------------------------------------- mistakes


def give_other_heads(rank, world_size):
    model, optimizer = small()
    with pytest.raises(ValueError, match=r"qk_logits\['attn'\] has 2 maxima on rank 0 and 4 on rank 1.*DTensor"):
        optimizer.step(qk_logits={"attn": torch.full((2 + 2 * rank,), HIGH)})
    assert rows_of(model) == [1, 1, 1, 1]
    optimizer.step(qk_logits=maxima(HIGH, LOW))
    assert rows_of(model) == [0.25, 0.25, 1, 1]


def make_a_mistake_on_one_rank(rank, world_size):
    model, optimizer = small()
    with pytest.raises(ValueError, match=r"qk_logits\['atn'\]" if rank == 1 else r"on rank 1: qk_logits\['atn'\]"):
        optimizer.step(qk_logits={"attn" if rank != 1 else "atn": torch.full((2,), HIGH)})
    assert rows_of(model) == [1, 1, 1, 1]
    optimizer.step(qk_logits=maxima(HIGH, LOW))
    assert rows_of(model) == [0.25, 0.25, 1, 1]


def ask_on_one_rank(rank, world_size):
    _, optimizer = small()
    if rank:
        optimizer.param_groups[0]["qk_clip"] = None
    with pytest.raises(RuntimeError, match=r"qk_clip=QKClip.*qk_clip=None"):
        optimizer.step()


def say_nothing_of_ranks(rank, world_size):
    model, optimizer = small(comms="none")
    with pytest.raises(ValueError, match=r"plain tensors with comms='none'.*2 ranks.*QKClip\(process_group"):
        optimizer.step(qk_logits=maxima(HIGH, LOW))
    assert rows_of(model) == [1, 1, 1, 1]


def leave_out_ranks(rank, world_size):
    alone = dist.new_group([rank], use_local_synchronization=True)
    _, optimizer = small(process_group=alone)
    with pytest.raises(ValueError, match=r"on the ranks \[0, 1\], but its maxima can be taken over \[\d\].*all ranks"):
        optimizer.step(qk_logits=maxima(HIGH, LOW))


def cut_otherwise(rank, world_size):
    """Queries on one mesh and keys on another, neither of which contains the other."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = Small()
    for name, axis in (("q_proj", "data"), ("k_proj", "tensor")):
        cut = distribute_tensor(model.attn[name].weight.detach(), mesh[axis], [Shard(0)])
        model.attn[name].weight = nn.Parameter(cut)
    _, optimizer = small("none", model=model)
    with pytest.raises(ValueError, match="all ranks that have a part"):
        optimizer.step(qk_logits=maxima(HIGH, LOW))
    _, optimizer = small("none", model=model, process_group=dist.group.WORLD)
    optimizer.step(qk_logits=maxima(HIGH, LOW) if rank == 3 else None)
    found = {name: model.attn[name].weight.full_tensor()[:, 0].tolist() for name in ("q_proj", "k_proj")}
    assert found == {name: [0.5, 0.5, 1, 1] for name in found}


def give_odd_dtensors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model, optimizer = small()
    summed = DTensor.from_local(
        torch.ones(2, device=DEVICE), mesh, [Partial(), Shard(0)], run_check=False, shape=(2,), stride=(1,)
    )
    with pytest.raises(
        ValueError, match=r"qk_logits\['attn'\].*Partial.*Shard\(0\), Replicate\(\) or Partial\('max'\)"
    ):
        optimizer.step(qk_logits={"attn": summed})
    for ranks in ([0, 1], [2, 3]):
        mesh = DeviceMesh(DEVICE, ranks)
        if rank in ranks:
            model = Small()
            for param in list(model.attn.values()):
                param.weight = nn.Parameter(distribute_tensor(param.weight.detach(), mesh, [Shard(0)]))
            found = model
    everywhere = distribute_tensor(torch.ones(4, device=DEVICE), init_device_mesh(DEVICE, (4,)), [Shard(0)])
    _, optimizer = small("none", model=found)
    with pytest.raises(ValueError, match=r"a DTensor on the ranks \[0, 1, 2, 3\].*taken over \[(0, 1|2, 3)\]"):
        optimizer.step(qk_logits={"attn": everywhere})


@pytest.mark.parametrize(
    ("function", "world_size"),
    [
        (name_a_layer_twice, 2),
        (give_other_heads, 2),
        (make_a_mistake_on_one_rank, 3),
        (ask_on_one_rank, 2),
        (say_nothing_of_ranks, 2),
        (leave_out_ranks, 2),
        (cut_otherwise, 4),
        (give_odd_dtensors, 4),
    ],
)
def test_mistakes_are_errors_on_every_rank(function, world_size):
    run(function, world_size, timeout=40)


# ---------------------------------------------------------------------------------------------------------- other ranks


def reduce_over_the_world(rank, world_size):
    """As under DDP: nothing says which ranks there are, except the option."""
    model, optimizer = small(comms="none", process_group=dist.group.WORLD)
    optimizer.step(qk_logits=maxima(HIGH, -1.0) if rank else maxima(-1.0, 2 * THRESHOLD))
    assert rows_of(model) == [0.25, 0.25, 0.5, 0.5]


def repeat_by_hand(rank, world_size):
    """Tensor parallelism on two meshes that hold the same weights; the user averages gradients over them."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = Small()
    for module in model.attn.values():
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tensor"], [Shard(0)]))
    _, optimizer = small("none", model=model, process_group=dist.group.WORLD)
    own = [[HIGH, LOW], [LOW, LOW], [LOW, LOW], [LOW, 2 * THRESHOLD]][rank][rank % 2]
    logits = {"attn": DTensor.from_local(torch.tensor([own], device=DEVICE), mesh["tensor"], [Shard(0)])}
    optimizer.step(qk_logits=logits)
    assert rows_of(model) == [0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(("function", "world_size"), [(reduce_over_the_world, 2), (repeat_by_hand, 4)])
def test_an_explicit_process_group(function, world_size):
    run(function, world_size, timeout=40)


def check_pairs(rank, world_size, comms):
    """Two models with layers of the same names, over every second rank each."""
    mesh = DeviceMesh(DEVICE, torch.tensor(PAIRS), mesh_dim_names=("model", "shard"))["shard"]
    ranks = PAIRS[rank % 2]
    layout = Layout((2,), attentions.rows if comms == "none" else attentions.plain, comms=comms)
    options = {} if comms == "none" else {"process_group": mesh.get_group()}
    wrong = disagreements(rank, ranks, CASES["mantissa"], layout, partial(layout.wrap, mesh=mesh), mesh, **options)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("comms", ["none", "sharded"])
def test_two_models_do_not_hear_of_each_other(comms):
    run(check_pairs, 4, comms, timeout=100)


def stop_everywhere(rank, world_size):
    """A gradient that is not finite on one rank: nothing is scaled anywhere, and the next step is right."""
    for option in ("skip", "raise"):
        model, optimizer = small(comms="replicated", on_nonfinite=option, master=None)
        for param in model.parameters():
            param.grad = torch.full_like(param, float("nan") if rank == 1 else 1.0)
        if option == "raise":
            with pytest.raises(FloatingPointError):
                optimizer.step(qk_logits=maxima(HIGH, LOW))
        else:
            optimizer.step(qk_logits=maxima(HIGH, LOW))
        assert rows_of(model) == [1, 1, 1, 1]
        optimizer.zero_grad()
        optimizer.step(qk_logits=maxima(LOW, HIGH) if rank == 2 else None)
        assert rows_of(model) == [1, 1, 0.25, 0.25]


def test_a_skipped_step_clips_nothing_on_any_rank():
    run(stop_everywhere, 3)


def verify_does_not_clip(rank, world_size):
    model, optimizer = small()
    optimizer.step(qk_logits=maxima(HIGH, LOW))
    # A layer that is not agreed upon yet must not be forgotten.
    assert quintic.verify(model, optimizer).ok
    assert rows_of(model) == [0.25, 0.25, 1, 1]
    optimizer.step(qk_logits=maxima(LOW, HIGH) if rank else None)
    assert rows_of(model) == [0.25, 0.25, 0.25, 0.25]


def test_verify_leaves_qk_clip_alone():
    run(verify_does_not_clip, 2)


def test_maxima_over_ranks_are_those_of_all_tokens():
    of_ranks = [seen(0, rank) for rank in range(3)]
    expected = largest(of_ranks)
    assert all(torch.equal(expected[layer], torch.stack([m[layer] for m in of_ranks]).amax(0)) for layer in expected)
