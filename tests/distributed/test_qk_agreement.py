"""Ranks that give different layers, or make mistakes: a rule or an error, never a hang."""

from contextlib import ExitStack, contextmanager, nullcontext
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quintic
from quintic import QKClip
from quintic.optim.comms import collectives as collectives
from quintic.optim.qk_clip.step import QKStep

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


# --------------------------------------------------------------------------------------------------------------- dtypes


def give_doubles(rank, world_size):
    """Queries of two heads in float64, and of another layer in float32; each rank has seen one head's largest logit."""
    model = Small().double()
    model.other = Small().attn
    _, optimizer = small(model=model)
    logits = torch.full((2,), LOW, dtype=torch.float64, device=DEVICE)
    logits[rank] = THRESHOLD / (0.3, 0.7)[rank]
    optimizer.step(qk_logits={"attn": logits, "other": logits})
    return [layer["q_proj"].weight[::2, 0].detach() for layer in (model.attn, model.other)]


def test_maxima_of_float64_weights_travel_in_float64():
    factors = torch.tensor([0.3, 0.7], dtype=torch.float64).sqrt()
    for wide, narrow in run(give_doubles, 2):
        torch.testing.assert_close(wide, factors, rtol=1e-15, atol=0)
        torch.testing.assert_close(narrow, factors.float(), rtol=1e-6, atol=0)


# --------------------------------------------------------------------------------------------------------------- layers


def give_late(rank, world_size):
    model, optimizer = small()
    model.other = Small().attn
    optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith("other")]})
    # Nobody gives anything, then only the last rank: from the next step on, with these maxima.
    optimizer.step()
    optimizer.step(qk_logits=maxima(HIGH, LOW) if rank == world_size - 1 else None)
    assert rows_of(model) == [1, 1, 1, 1]
    optimizer.step(qk_logits=maxima(2 * THRESHOLD, LOW) if rank == 0 else None)
    assert rows_of(model) == [0.25, 0.25, 1, 1]
    # So does another layer.
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


def give_all_late(rank, world_size):
    """Layers that all ranks give in the same step are clipped at once, as on one device, whatever came before."""
    model, optimizer = small()
    model.other = Small().attn
    optimizer.add_param_group({"params": [(n, p) for n, p in model.named_parameters() if n.startswith("other")]})
    for _ in range(2):
        optimizer.step()
    optimizer.step(qk_logits=maxima(HIGH if rank == 1 else -1.0, LOW))
    assert rows_of(model) == [0.25, 0.25, 1, 1]
    optimizer.step()
    optimizer.step(qk_logits=maxima(LOW, HIGH if rank == 0 else LOW, layer="other"))
    assert rows_of(model.other) == [1, 1, 0.25, 0.25]
    assert rows_of(model) == [0.25, 0.25, 1, 1]


def test_layers_that_all_ranks_give_are_clipped_at_once():
    run(give_all_late, 3)


@contextmanager
def counted():
    """Collect the largest entries taken over ranks, as numbers of entries; everything else may only be a count."""
    calls = []
    original = dist.all_reduce

    def counting(tensor, op=dist.ReduceOp.SUM, **options):
        if op == dist.ReduceOp.MAX:
            calls.append(tensor.numel())
        return original(tensor, op, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        yield calls


def step_without_logits(rank, world_size, comms, master):
    """Until a layer is known a step sends two numbers, and nothing through the host."""
    _, optimizer = small(comms, master=master)
    _, without = small(comms, master=master)
    for one in (optimizer, without):
        one.step()
    silent = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("through the host"))
    without.param_groups[0]["qk_clip"] = None
    without.step()
    logs = []
    for one in (optimizer, without):
        with silent, logged_collectives() as log:
            for _ in range(3):
                one.step()
        logs.append(log)
    more = list(logs[0])
    for call in logs[1]:
        more.remove(call)
    assert more == [("all_reduce", 2)] * 3
    # Then all ranks agree, once.
    optimizer.step(qk_logits=maxima(HIGH, LOW))
    with silent, counted() as calls:
        optimizer.step()
    assert calls == [4]


@pytest.mark.parametrize(("comms", "master"), [("averaged", None), ("sharded", "fp32")])
def test_steps_without_logits_send_two_numbers(comms, master):
    run(step_without_logits, 2, comms, master)


@contextmanager
def logged_collectives():
    """Collect (name, entries sent) of all collectives."""
    log = []

    def logging(name, original, place):
        def call(*args, **options):
            log.append((name, args[place].numel()))
            return original(*args, **options)

        return call

    places = {"all_reduce": 0, "all_to_all_single": 1, "broadcast": 0}
    with ExitStack() as stack:
        for name, place in places.items():
            stack.enter_context(mock.patch.object(dist, name, logging(name, getattr(dist, name), place)))
        gather = logging("all_gather", collectives._all_gather, 1)
        stack.enter_context(mock.patch.object(collectives, "_all_gather", gather))
        yield log


def reduce_once(rank, world_size, wrap, shape):
    model, mesh = (
        Attentions(),
        DeviceMesh(DEVICE, torch.arange(world_size).view(shape), mesh_dim_names=("data", "tensor")),
    )
    wrap(model, mesh)
    optimizer = optimizer_of(model, CASES["float32"], comms="averaged" if wrap is attentions.plain else "none")
    for step in range(2):
        # After the first step ranks have nothing to say to each other through the host.
        silence = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError) if step else nullcontext()
        with counted() as calls, silence:
            optimizer.step(qk_logits=seen(step, rank))
        # In the first step they find out that all have layers.
        assert calls == [2] * (step == 0) + [sum(attentions.HEADS.values()) + 2]


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
    with pytest.raises(ValueError, match="qk_logits is a list" if rank == 1 else "on rank 1: qk_logits is a list"):
        optimizer.step(qk_logits=[torch.full((2,), HIGH)] if rank == 1 else maxima(HIGH, LOW))
    assert rows_of(model) == [1, 1, 1, 1]
    optimizer.step(qk_logits=maxima(HIGH, LOW))
    assert rows_of(model) == [0.25, 0.25, 1, 1]


def make_a_mistake_where_others_give_nothing(rank, world_size):
    """The others do not wait in order to hear of it; the next step is right."""
    model, optimizer = small("none", process_group=dist.group.WORLD)
    if rank == 1:
        with pytest.raises(ValueError, match=r"^qk_logits\['atn'\]"):
            optimizer.step(qk_logits=maxima(HIGH, LOW, layer="atn"))
    else:
        optimizer.step()
    assert rows_of(model) == [1, 1, 1, 1]
    # All agree now, on what was right.
    optimizer.step(qk_logits=maxima(HIGH, LOW) if rank else None)
    assert rows_of(model) == [0.25, 0.25, 1, 1]


def raise_on_one_rank(rank, world_size):
    """A rank's step ends with an error that the others do not share, and a layer was new in it."""
    model, optimizer = small("none", process_group=dist.group.WORLD, on_nonfinite="raise")
    optimizer.step()
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan") if rank == 1 else 1.0)
    logits = maxima(HIGH, LOW) if rank == 0 else None
    if rank == 1:
        with pytest.raises(FloatingPointError):
            optimizer.step(qk_logits=logits)
    else:
        optimizer.step(qk_logits=logits)
    optimizer.zero_grad()
    optimizer.step()
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
    with pytest.raises(ValueError, match="all ranks that hold a piece"):
        optimizer.step(qk_logits=maxima(HIGH, LOW))
    _, optimizer = small("none", model=model, process_group=dist.group.WORLD)
    optimizer.step(qk_logits=maxima(HIGH, LOW) if rank == 3 else None)
    optimizer.step()
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
        (make_a_mistake_where_others_give_nothing, 2),
        (raise_on_one_rank, 3),
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


@pytest.mark.parametrize("comms", ["none", pytest.param("sharded", marks=pytest.mark.slow)])
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


def send_again(rank, world_size, dtype, master, limit):
    """What owners alone can scale comes to all ranks: each byte once, from its owner, as many at a time as fit."""
    model, others = Small(), ("second", "third", "fourth")
    for other in others:
        model.add_module(other, Small().attn)
    model.linear = nn.Linear(4, 4, bias=False)
    model.to(DEVICE, dtype)
    params = list(model.named_parameters())
    clip = QKClip(threshold=THRESHOLD)
    options = {"comms": "sharded", "master": master, "qk_clip": clip, "max_workspace_bytes": limit}
    optimizer = quintic.Muon([{"params": params}], lr=0.0, **options)
    sent = []
    original = dist.broadcast

    def logging(tensor, src, **options):
        sent.append((src, tensor.numel() * tensor.itemsize))
        return original(tensor, src, **options)

    for _ in range(2):
        sent.clear()
        with mock.patch.object(dist, "broadcast", logging):
            optimizer.step(qk_logits=maxima(HIGH, LOW) | {other: torch.full((2,), LOW) for other in others})
        clipped = [param for name, param in params if name != "linear.weight"]
        key = master if master == "mantissa" else "master"
        owned = torch.tensor([optimizer.state[param][key].numel() * dtype.itemsize for param in clipped], device=DEVICE)
        everyone = [torch.empty_like(owned) for _ in range(world_size)]
        dist.all_gather(everyone, owned)
        assert sum(int(found.sum()) for found in everyone) == sum(p.numel() * dtype.itemsize for p in clipped)
        expected = {source: int(found.sum()) for source, found in enumerate(everyone)}
        assert {source: sum(size for src, size in sent if src == source) for source in expected} == expected
        # Each owner sends all it has at once, or of as many weights as fit.
        together = [clipped] if limit is None else [[param] for param in clipped]
        places = {param: place for place, param in enumerate(clipped)}
        messages = [sum(int(found[places[param]]) for param in some) for some in together for found in everyone]
        assert len(sent) == sum(size > 0 for size in messages)
    assert rows_of(model) == [0.0625, 0.0625, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "master", "limit"),
    [
        (torch.bfloat16, "mantissa", None),
        (torch.bfloat16, "fp32", 63),
        pytest.param(torch.float16, "fp32", None, marks=pytest.mark.slow),
    ],
)
def test_scaled_weights_are_sent_once(dtype, master, limit):
    run(send_again, 2, dtype, master, limit)


class Wide(nn.Module):
    """A layer whose queries and keys are owned in parts: heads of a matrix, and rows of AdamW's."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(256, 64, bias=False) for name in ("q_proj", "k_proj")})
        self.to(DEVICE, torch.bfloat16)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def measure_scaling(rank, world_size, master):
    """Return the most bytes of a temporary tensor while weights are scaled."""
    model = Wide()
    groups = [
        {"params": [("attn.q_proj.weight", model.attn["q_proj"].weight)], "view": quintic.Heads(8)},
        {"params": [("attn.k_proj.weight", model.attn["k_proj"].weight)], "algorithm": "adamw"},
    ]
    clip = QKClip(threshold=THRESHOLD)
    optimizer = quintic.Muon(groups, lr=0.0, adamw_lr=0.0, comms="sharded", master=master, qk_clip=clip)
    expected = {name: param.detach().float() for name, param in model.named_parameters()}
    largest, scale = Largest(), QKStep._scale

    def measured(*args):
        with largest:
            scale(*args)

    with mock.patch.object(QKStep, "_scale", measured):
        optimizer.step(qk_logits=maxima(*[HIGH] * 4, *[LOW] * 4))
    factors = torch.tensor([0.5, 1.0], device=DEVICE).repeat_interleave(32).unsqueeze(1)
    for name, param in model.named_parameters():
        assert torch.equal(param.float(), expected[name] * factors), name
    return largest.nbytes


@pytest.mark.parametrize("master", ["fp32", "mantissa"])
def test_scaling_takes_no_more_than_a_part_of_a_weight(master):
    """Of the keys each of two ranks owns a half, in float32 while it is scaled; of the queries single heads."""
    for nbytes in run(measure_scaling, 2, master):
        assert nbytes == 64 * 256 * 4 // 2
