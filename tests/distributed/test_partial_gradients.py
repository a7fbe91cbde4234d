"""Gradients that are sums still to be made over ranks (`Partial`), and missing on some of them: never a hang."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import quintic
from quintic.optim.comms import collectives as comms
from quintic.optim.step import consensus
from quintic.optim.verify.reference import reference_step

# Of each parameter: shape, placements of the parameter and of its gradient on a mesh of 2 x (ranks / 2).
PARAMS = {
    "norm": ((6,), (Replicate(), Replicate()), (Partial(), Partial())),
    "copies": ((6, 4), (Replicate(), Replicate()), (Replicate(), Partial())),
    "rows": ((7, 4), (Shard(0), Replicate()), (Shard(0), Partial())),
    "cut": ((5, 6), (Shard(0), Shard(1)), (Partial(), Shard(1))),
    "bias": ((7,), (Shard(0), Replicate()), (Shard(0), Partial())),
}


def addend(name, shape, step, rank):
    """Small integers, which add up exactly in any order."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)) + 77 * rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


def mesh_of(world_size):
    return DeviceMesh(DEVICE, torch.arange(world_size).view(2, -1))


def of_mesh(mesh):
    """A model of DTensors, one of plain tensors with the same weights, and an optimizer of each."""
    params, plain = {}, {}
    for name, (shape, placements, _) in PARAMS.items():
        weight = addend(name, shape, 99, 0).to(DEVICE) / 8
        plain[name] = nn.Parameter(weight.clone())
        params[name] = nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))
    vectors = [name for name, (shape, _, _) in PARAMS.items() if len(shape) == 1]

    def optimizer_of(found):
        groups = [
            {"params": [(n, p) for n, p in found.items() if n in vectors], "algorithm": "adamw"},
            {"params": [(n, p) for n, p in found.items() if n not in vectors], "algorithm": "muon"},
        ]
        # Fused AdamW of CPUs rounds the ends of pieces otherwise.
        return quintic.Muon(groups, lr=0.1, adamw_lr=0.1, compute_dtype=torch.float32, cautious=True)

    return params, plain, optimizer_of(params), optimizer_of(plain)


def local_part(whole, mesh, placements, rank):
    """The addend that a rank has: zeros but for what the sum over the partial dimensions takes from it."""
    kept = [Replicate() if placement.is_partial() else placement for placement in placements]
    return distribute_tensor(whole.to(DEVICE), mesh, kept, src_data_rank=None).to_local().clone()


def give(params, plain, mesh, step, missing):
    """Gradients on this rank and whole ones; `missing(name, rank)` says who lacks one, then counted as zeros."""
    rank = dist.get_rank()
    for name, (shape, _, cut) in PARAMS.items():
        params[name].grad = plain[name].grad = None
        lacking = [missing(name, other) for other in range(dist.get_world_size())]
        if not lacking[rank]:
            # Along dimensions that are not summed ranks have pieces of, or the same, addend.
            local = local_part(addend(name, shape, step, source(mesh, cut, rank)), mesh, cut, rank)
            params[name].grad = DTensor.from_local(
                local, mesh, cut, run_check=False, shape=params[name].shape, stride=params[name].stride()
            )
        # Ranks have copies of the addends of one of them: what zeros in one copy gave would differ among ranks.
        if not all(lacking) and not (name == "copies" and any(lacking)):
            plain[name].grad = expected(name, mesh, step, lacking).to(DEVICE)


def source(mesh, cut, rank):
    """The number of a rank's addend: its coordinates on the dimensions that are summed."""
    [coordinate] = (mesh.mesh == rank).nonzero().tolist()
    return 1 + sum(
        10**dim * place for dim, (place, p) in enumerate(zip(coordinate, cut, strict=True)) if p.is_partial()
    )


def expected(name, mesh, step, lacking):
    """The sum of all addends; where a rank lacks one, its piece of it counts as zeros."""
    shape, _, cut = PARAMS[name]
    total = torch.zeros(shape)
    seen = set()
    for other, is_lacking in enumerate(lacking):
        [coordinate] = (mesh.mesh == other).nonzero().tolist()
        # Ranks that differ only where the gradient is replicated have the same piece of the same addend.
        key = tuple(c for c, p in zip(coordinate, cut, strict=True) if not p.is_replicate())
        if key in seen or is_lacking:
            continue
        seen.add(key)
        piece = addend(name, shape, step, source(mesh, cut, other))
        box = [slice(None)] * len(shape)
        for dim, placement in enumerate(cut):
            if placement.is_shard():
                each = -(-shape[placement.dim] // mesh.size(dim))
                box[placement.dim] = slice(coordinate[dim] * each, (coordinate[dim] + 1) * each)
        total[tuple(box)] += piece[tuple(box)]
    return total


def assert_equal(params, plain, what, rtol=0.0, atol=0.0):
    for name, param in params.items():
        found = param.detach().full_tensor()
        assert torch.allclose(found, plain[name].detach(), rtol, atol), f"{what}: {name}"


def lacks_nothing(name, rank):
    return False


GAPS = {
    "one": lambda name, rank: rank == 3,
    "all but one": lambda name, rank: rank != 2,
    "all": lambda name, rank: True,
    "none": lacks_nothing,
    "some names": lambda name, rank: name in ("norm", "cut") and rank in (0, 3),
}


def but_copies(gap):
    """The norm counts a gradient that one of several copies lacks, which is not stepped then."""
    return lambda name, rank: name != "copies" and gap(name, rank)


def check_gaps(rank, world_size, first, clip, with_reference):
    mesh = mesh_of(world_size)
    params, plain, optimizer, alone = of_mesh(mesh)
    for step, gap in enumerate([first, "none", "all but one", "all", "one", "some names"]):
        give(params, plain, mesh, step, but_copies(GAPS[gap]) if clip else GAPS[gap])
        before = {name: param.grad for name, param in params.items()}
        if clip:
            norms = [quintic.clip_grad_norm_(found, 0.5, scope="all") for found in (optimizer, alone)]
            again = [quintic.clip_grad_norm_(found, 0.5, scope="all") for found in (optimizer, alone)]
            assert norms[0] == norms[1]
            assert again[0].item() == pytest.approx(again[1].item(), rel=1e-6)
        if with_reference:
            reference_step(optimizer)
        else:
            optimizer.step()
        alone.step()
        # On GPUs the products of a step are rounded otherwise than the reference's.
        tolerance = (1e-4, 1e-5) if with_reference and ON_GPUS else (0.0, 0.0)
        assert_equal(params, plain, f"step {step} ({gap})", *tolerance)
        if not clip:
            # A step leaves gradients as they are.
            assert all(param.grad is before[name] for name, param in params.items())


@pytest.mark.parametrize("first", ["none", "one", "all but one"])
def test_missing_addends_count_as_zeros(first):
    run(check_gaps, 4, first, False, False, timeout=60)


@pytest.mark.parametrize("first", ["none", "one"])
def test_missing_addends_count_as_zeros_when_gradients_are_clipped(first):
    run(check_gaps, 4, first, True, False, timeout=60)


def test_the_reference_counts_missing_addends_as_zeros():
    run(check_gaps, 4, "one", False, True, timeout=60)


LATE = r"norm: .*sum still to be made.*not on any rank in the first step.*redistribute it"


def everything(params, optimizer):
    """Copies of all weights, gradients and state of this rank."""
    found = {}
    for name, param in params.items():
        tensors = {"weight": param.detach(), "gradient": param.grad, **optimizer.state[param]}
        for key, value in tensors.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            found[name, key] = None if local is None else torch.as_tensor(local).clone()
    return found


def check_late(rank, world_size, earlier, lacking, act):
    """Gradients that are partial for the first time after the first step, on all ranks but those that lack them."""
    mesh = mesh_of(world_size)
    params, plain, optimizer, _ = of_mesh(mesh)
    for name, param in params.items():
        whole = addend(name, param.shape, 0, 0).to(DEVICE)
        param.grad = distribute_tensor(whole, mesh, param.placements, src_data_rank=None) if earlier else None
    optimizer.step()
    give(params, plain, mesh, 1, lambda name, other: name == "bias" or other in lacking)
    before = everything(params, optimizer)
    if rank not in lacking:
        # Before anything is sent: these calls return although no other rank waits for the same collectives.
        with (
            mock.patch.object(consensus, "start_sum", side_effect=AssertionError),
            mock.patch.object(dist, "all_gather_object", side_effect=AssertionError),
            pytest.raises(RuntimeError, match=LATE),
        ):
            act(optimizer)
    after = everything(params, optimizer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value is after[key] is None or torch.equal(value, after[key]), key
    # Made whole, as the message says, it is a gradient as any other: missing on some ranks, it is not stepped.
    for name, param in params.items():
        total = expected(name, mesh, 1, [other in lacking for other in range(world_size)]).to(DEVICE)
        whole = distribute_tensor(total, mesh, param.placements, src_data_rank=None)
        param.grad = None if rank in lacking or name == "bias" else whole
    act(optimizer)
    optimizer.step()
    for name, param in params.items():
        is_stepped = name != "bias" and not lacking
        assert torch.equal(param.detach().to_local(), before[name, "weight"]) != is_stepped, name


def step_all(optimizer):
    optimizer.step()


def clip_all(optimizer):
    quintic.clip_grad_norm_(optimizer, 0.5, scope="all")


@pytest.mark.parametrize("earlier", [False, True], ids=["missing", "whole"])
@pytest.mark.parametrize("lacking", [(), (0, 3)], ids=["all", "some"])
@pytest.mark.parametrize("act", [step_all, clip_all, reference_step])
def test_a_gradient_that_is_partial_for_the_first_time_later_is_an_error_of_each_rank_that_has_it(
    earlier, lacking, act
):
    run(check_late, 4, earlier, lacking, act, timeout=60)


def check_late_with_logits(rank, world_size):
    """Nothing of QK-clip was sent before the error."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    names = ("attn.q_proj.weight", "attn.k_proj.weight")
    params = {
        name: nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None))
        for name in names
    }
    optimizer = quintic.Muon(list(params.items()), qk_clip=quintic.QKClip(threshold=1.0))
    logits = {"attn": torch.full((2,), 4.0, device=DEVICE)}
    optimizer.step(qk_logits=logits)
    weights = {name: param.detach().to_local().clone() for name, param in params.items()}
    if rank == 0:
        cut = DTensor.from_local(torch.ones(4, 4, device=DEVICE), mesh, [Partial()], run_check=False)
        params[names[0]].grad = cut
        with pytest.raises(RuntimeError, match=r"q_proj.*sum still to be made.*in the first step"):
            optimizer.step(qk_logits=logits)
        params[names[0]].grad = None
    assert all(torch.equal(param.detach().to_local(), weights[name]) for name, param in params.items())
    # Had rank 0 sent anything, ranks would not mean the same messages now.
    optimizer.step(qk_logits=logits)
    assert all(not torch.equal(param.detach().to_local(), weights[name]) for name, param in params.items())


def test_the_error_comes_before_logits_are_brought_together():
    run(check_late_with_logits, 2, timeout=60)


def check_verify_first(rank, world_size):
    """The gradients that `verify` makes up before training say nothing of what are sums."""
    mesh = mesh_of(world_size)
    params, plain, optimizer, alone = of_mesh(mesh)
    report = quintic.verify(nn.ParameterDict(params), optimizer)
    assert report.ok, str(report)
    for step, gap in enumerate(["one", "none", "all but one"]):
        give(params, plain, mesh, step, GAPS[gap])
        report = quintic.verify(nn.ParameterDict(params), optimizer)
        assert report.ok, str(report)
        optimizer.step()
        alone.step()
        assert_equal(params, plain, f"step {step}")


def test_verify_before_the_first_step_leaves_that_the_first():
    run(check_verify_first, 4, timeout=60)


def check_groups_that_wait(rank, world_size):
    mesh = mesh_of(world_size)
    params, plain, _, _ = of_mesh(mesh)
    found = [
        quintic.Muon([{"params": [("norm", some["norm"])], "algorithm": "adamw"}], step_every=2, cautious=True)
        for some in (params, plain)
    ]
    for step, gap in enumerate(["one", "one", "none", "all but one"]):
        give(params, plain, mesh, step, GAPS[gap])
        for optimizer in found:
            optimizer.step()
        assert torch.equal(params["norm"].detach().full_tensor(), plain["norm"].detach()), step


def test_gradients_of_groups_that_wait_are_left_alone():
    run(check_groups_that_wait, 4, timeout=60)


def check_many_meshes(rank, world_size, clip):
    """Parameters of all ranks, of pairs and of one, whose gradients are missing at random from the first step on."""
    square = DeviceMesh(DEVICE, torch.arange(world_size).view(2, -1), mesh_dim_names=("outer", "inner"))
    meshes = {"all": square, "row": square["inner"], "column": square["outer"], "one": DeviceMesh(DEVICE, [rank])}
    groups = [], []
    for name, mesh in meshes.items():
        for index, shape in enumerate([(5,), (4, 6), (4, 6), (3,)]):
            placements = [Replicate()] * mesh.ndim
            weight = addend(name, shape, 99, 0).to(DEVICE)
            param = nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))
            groups[len(shape) - 1].append((f"{name}{index}", param))
    optimizer = quintic.Muon(
        [{"params": groups[0], "algorithm": "adamw"}, {"params": groups[1]}], lr=0.1, compute_dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(rank)
    named = groups[0] + groups[1]
    first = {name: param.detach().to_local().clone() for name, param in named}
    for step in range(12):
        for name, param in named:
            param.grad = None
            # Hardly any at first, but of each on one rank, so that all know that it is a sum.
            is_told = step == 0 and rank == param.device_mesh.mesh.min()
            if is_told or torch.rand((), generator=generator) < (0.1 if step < 3 else 0.6):
                value = addend(name, param.shape, step, rank).to(DEVICE)
                cut = [Partial()] * param.device_mesh.ndim
                param.grad = DTensor.from_local(value, param.device_mesh, cut, run_check=False)
        if clip and step % 3:
            # Ranks have other parameters besides, and so other norms: they must not scale.
            quintic.clip_grad_norm_(optimizer, math.inf, scope=("adamw", "all")[step % 2])
        optimizer.step()
    for name, param in named:
        local = param.detach().to_local()
        assert not torch.equal(local, first[name]), name
        for dim in range(param.device_mesh.ndim):
            group = param.device_mesh.get_group(dim)
            found = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, local, group=group)
            assert all(torch.equal(other, local) for other in found), name


@pytest.mark.parametrize("clip", [False, True])
def test_ranks_of_many_meshes_do_not_wait_for_each_other(clip):
    run(check_many_meshes, 4, clip, timeout=60)


def check_nothing_is_added(rank, world_size):
    """Without partial gradients: one count per step, no exchange of values."""
    mesh = mesh_of(world_size)
    params, _, optimizer, _ = of_mesh(mesh)

    def give_cut_gradients(step):
        for name, param in params.items():
            whole = addend(name, param.shape, step, 0).to(DEVICE)
            param.grad = distribute_tensor(whole, mesh, param.placements, src_data_rank=None)

    give_cut_gradients(0)
    optimizer.step()
    with (
        mock.patch.object(consensus, "start_sum", wraps=consensus.start_sum) as counts,
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError),
    ):
        give_cut_gradients(1)
        optimizer.step()
        assert counts.call_count == 1
        quintic.clip_grad_norm_(optimizer, 1.0, scope="all")
        assert counts.call_count == 1
    assert comms.all_gather_values(rank, None) == list(range(world_size))


def test_without_partial_gradients_nothing_is_added():
    run(check_nothing_is_added, 4, timeout=60)


def step_gain(world_size, *cuts):
    """Take a step with each of some gradients of one parameter, given how they are cut; None for a missing one."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    param = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None))
    optimizer = quintic.Muon([{"params": [("gain", param)], "algorithm": "adamw"}])
    for cut in cuts:
        ones = torch.ones(3, device=DEVICE)
        param.grad = None if cut is None else DTensor.from_local(ones, mesh, [cut], run_check=False)
        optimizer.step()


def mixed(rank, world_size):
    step_gain(world_size, None, Partial() if rank else Replicate())


def test_a_gradient_that_is_a_sum_on_some_ranks_only_is_an_error_with_its_name():
    with pytest.raises(Exception, match=r"gain: .*sum still to be made.*redistribute"):
        run(mixed, 2, timeout=20)


def mixed_at_first(rank, world_size):
    """The ranks that have the gradient whole would not join the sum of the others."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    names = ("even", "gain", "other")
    params = {n: nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None)) for n in names}
    optimizer = quintic.Muon([{"params": list(params.items()), "algorithm": "adamw"}])
    for name, param in params.items():
        cut = Partial() if name == "even" or (name == "gain" and rank != 1) else Replicate()
        param.grad = DTensor.from_local(torch.ones(3, device=DEVICE), mesh, [cut], run_check=False)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert all(torch.equal(param.to_local(), torch.ones(3, device=DEVICE)) for param in params.values())
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_first_gradient_that_is_a_sum_on_some_ranks_and_whole_on_others_is_an_error_on_all(world_size):
    for message in run(mixed_at_first, world_size, timeout=30):
        assert message.startswith("gain: its gradient is Partial (a sum still to be made over ranks) on some ranks")
        assert "redistribute" in message


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def mixed_later(rank, world_size, clips, whole):
    """Sums in the first step; then gradients of some ranks are none."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    names = ("gain", "other")
    params = {n: nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None)) for n in names}
    optimizer = quintic.Muon([{"params": list(params.items()), "algorithm": "adamw", "lr": 0.1}])

    def step(cut, value=1.0):
        for name, param in params.items():
            found = torch.full((3,), value, device=DEVICE)
            placements = [Replicate() if name == "other" else cut]
            param.grad = DTensor.from_local(found, mesh, placements, run_check=False)
        if clips:
            quintic.clip_grad_norm_(optimizer, max_norm=math.inf)
        optimizer.step()

    step(Partial())
    before = {name: param.to_local().clone() for name, param in params.items()}
    kept = {key: local(value).clone() for key, value in optimizer.state[params["gain"]].items()}
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        step(Replicate() if rank in whole else Partial())
        if DEVICE != "cpu":  # where the host need not know of it yet
            step(Partial())
    assert torch.equal(params["gain"].to_local(), before["gain"])
    for key, value in optimizer.state[params["gain"]].items():
        assert torch.equal(local(value), kept[key]), key
    assert not torch.equal(params["other"].to_local(), before["other"])
    # All of them may have made the sum, and all may leave it to the step again.
    moved = []
    for cut, value in ((Replicate(), float(world_size)), (Partial(), 1.0)):
        step(cut, value)
        moved.append(params["gain"].to_local().clone())
    return str(caught.value), moved


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("whole", [(0,), (1, 2)], ids=str)
def test_a_sum_that_is_none_on_some_ranks_later_is_an_error_on_all(clips, whole):
    found = run(mixed_later, 3, clips, whole, timeout=40)
    for message, moved in found:
        assert message.startswith("gain: its gradient is Partial (a sum still to be made over ranks) on some ranks")
        assert all(map(torch.equal, moved, found[0][1]))


def captured_then_cut_otherwise(rank, world_size):
    """Without a CUDA graph: the captured step is an eager one, and a replay does nothing."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    param = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None))
    optimizer = quintic.Muon([{"params": [("gain", param)], "algorithm": "adamw"}])

    def give(*placements):
        local = torch.full((3,), 1.0 + rank, device=DEVICE)
        param.grad = DTensor.from_local(local, mesh, placements, run_check=False)

    graph = mock.MagicMock()
    with (
        mock.patch.object(quintic.CapturedStep, "_check"),
        mock.patch("quintic.optim.captured_step.capture", lambda work: (graph, work())),
    ):
        step = quintic.CapturedStep(optimizer)
        for _ in range(4):
            give(Partial())
            step()
        assert graph.replay.call_count == 2
        give(Replicate())
        with pytest.raises(RuntimeError) as caught:
            step()
        assert graph.replay.call_count == 2
        give(Partial())
        step()
        assert graph.replay.call_count == 3
    return str(caught.value)


def test_a_captured_step_does_not_take_a_whole_gradient_for_an_addend():
    for message in run(captured_then_cut_otherwise, 2, timeout=60):
        assert message.startswith("gain: its gradient has placements (Replicate(),) now and had (Partial(sum),) when")
        assert "redistribute it before the step" in message


def other_cut(rank, world_size):
    step_gain(world_size, Partial("sum"), Partial("avg"))


def test_a_gradient_that_is_another_sum_than_before_is_an_error_with_its_name():
    with pytest.raises(Exception, match=r"gain: .*Partial\(sum\).*Partial\(avg\)"):
        run(other_cut, 2, timeout=20)


def plain_gradients(rank, world_size, algorithm, placements):
    """What a step, a norm and `verify` say of whole gradients that are no DTensors; weights after another step."""
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    whole = addend("weight", (6, 4), 0, 0).to(DEVICE)
    params = [nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)) for _ in range(2)]
    optimizers = [quintic.Muon([{"params": [("weight", param)], "algorithm": algorithm}]) for param in params]
    gradient = addend("weight", (6, 4), 1, 0).to(DEVICE)
    params[0].grad, params[1].grad = gradient, distribute_tensor(gradient, mesh, placements, src_data_rank=None)
    messages = []
    calls = [
        optimizers[0].step,
        lambda: quintic.clip_grad_norm_(optimizers[0], math.inf, scope="all"),
        lambda: quintic.verify(nn.ParameterDict({"weight": params[0]}), optimizers[0]),
    ]
    for call in calls if Shard(0) in placements else []:
        with pytest.raises(ValueError, match="plain tensor") as caught:
            call()
        messages.append(str(caught.value))
        assert torch.equal(params[0].full_tensor(), whole)
    if messages:
        params[0].grad = params[1].grad
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*(param.full_tensor() for param in params))
    return messages


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("placements", [(Shard(0),), (Replicate(),)], ids=str)
def test_a_plain_gradient_is_not_taken_for_a_piece(algorithm, placements):
    for messages in run(plain_gradients, 2, algorithm, placements, timeout=40):
        assert len(messages) == (3 if Shard(0) in placements else 0)
        for message in messages:
            assert message.startswith(
                "weight: its gradient is a plain tensor, and the parameter a DTensor with placemen"
            )
