"""Owners of state: it stays with them whatever changes, and a loaded state finds them."""

import pytest
import torch
from harness import DEVICE, run
from models import local_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import quintic
from quintic.optim.plan.bucket import Gathered

FLOAT32 = {"compute_dtype": torch.float32}
EXPERTS, MATRIX = quintic.Experts(), quintic.Matrix()

# Shapes whose work compares otherwise in one form than in another: (view, shapes, options before, options afterwards).
CHANGES = {
    "svd of experts": (EXPERTS, [(7, 16, 16), (3, 24, 48)], FLOAT32, {"orthogonalizer": "svd"}),
    "svd": (MATRIX, [(32, 32), (24, 96)], FLOAT32, {"orthogonalizer": "svd"}),
    "steps": (MATRIX, [(32, 32), (23, 183)], {**FLOAT32, "orthogonalizer": "gram"}, {"orthogonalizer_steps": 8}),
    "coefficients": (
        MATRIX,
        [(32, 32), (23, 183)],
        {**FLOAT32, "orthogonalizer": "gram"},
        {"coefficients": (2, -1.5, 0.5)},
    ),
    "dtype": (MATRIX, [(32, 32), (23, 183)], {"orthogonalizer": "gram"}, FLOAT32),
    "a function": (
        MATRIX,
        [(32, 32), (23, 183)],
        {**FLOAT32, "orthogonalizer": "gram"},
        {"orthogonalizer": torch.sign},
    ),
    "multipliers": (EXPERTS, [(3, 5, 4), (3, 9, 2)], FLOAT32, {"lr_multipliers": (1.0, 0.5, 2.0)}),
    "workspace": (EXPERTS, [(7, 6, 6), (3, 9, 4)], FLOAT32, {"max_workspace_bytes": 2000}),
    "offload": (EXPERTS, [(7, 6, 6), (3, 9, 4)], FLOAT32, {"offload": True, "kernels": "torch"}),
}

MASTERS = [(torch.float32, None), (torch.bfloat16, "fp32"), (torch.bfloat16, "mantissa"), (torch.bfloat16, "8bit")]


def model(shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def optimizer_of(params, view, comms, options):
    return quintic.Muon([{"params": params, "view": view}], lr=0.1, weight_decay=0.1, comms=comms, **options)


def take_steps(optimizer, params, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            # The same on every rank, with so few digits that the mean of three is exact, too.
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param)
        optimizer.step()


def saved_of(optimizer, params):
    return [param.detach().clone() for param in params], optimizer.state_dict()


def differences(found, expected):
    """The places where weights and whole state differ."""
    (weights, saved), (expected_weights, expected) = found, expected
    rows = [(f"weight {n}", *pair) for n, pair in enumerate(zip(weights, expected_weights, strict=True))]
    for number, tensors in expected["state"].items():
        rows += [(f"{key} {number}", saved["state"][number][key], value) for key, value in tensors.items()]
    return [what for what, value, wanted in rows if not torch.equal(value, wanted)]


def changed(comms, view, shapes, options, change, dtype):
    """Weights and state after steps, with other options from the third one on."""
    params = model(shapes, dtype)
    optimizer = optimizer_of(params, view, comms, options)
    take_steps(optimizer, params, 0, 2)
    for group in optimizer.param_groups:
        group.update(change)
    take_steps(optimizer, params, 2, 5)
    return saved_of(optimizer, params)


def changes(rank, world_size, names):
    wrong = {}
    for number, name in enumerate(names):
        view, shapes, options, change = CHANGES[name]
        for dtype, master in MASTERS if number == 0 else [MASTERS[number % len(MASTERS)]]:
            case = (view, shapes, {**options, "normalize": "neuron", "master": master}, change, dtype)
            found = differences(changed("sharded", *case), changed("none", *case))
            wrong |= {(name, master): found} if found else {}
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_options_that_change_between_steps_move_no_state(world_size):
    assert run(changes, world_size, list(CHANGES), timeout=110) == [{}] * world_size


# One after the other; owners of what is gathered change with the work.
IN_TURN = [
    {"orthogonalizer": "gram", "orthogonalizer_steps": 8},
    {"orthogonalizer": "svd", "max_workspace_bytes": 3000},
    {"orthogonalizer": torch.sign, "offload": True},
    {"orthogonalizer": "newton_schulz", "coefficients": (2, -1.5, 0.5), "max_workspace_bytes": None},
]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered_changes(rank, world_size, layouts):
    """Differences of weights and state from one device's, and owners of units before and after, by case."""
    wrong, owners = {}, {}
    mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("strided",))
    for number, layout in enumerate(layouts):
        dtype, master = MASTERS[number % len(MASTERS)]
        shapes = [(7, 8, 8), (3, 5, 40)] if layout == "experts" else [(32, 32), (23, 183), (5, 3)]
        group = {"view": EXPERTS if layout == "experts" else MATRIX, "normalize": "neuron", "master": master, **FLOAT32}

        def saved(params, comms, group=group, dtype=dtype):
            optimizer = quintic.Muon([{"params": params, **group}], lr=0.1, comms=comms)
            plans = []
            for step, change in enumerate([{}, *IN_TURN]):
                optimizer.param_groups[0].update(change)
                for index, param in enumerate(params):
                    generator = torch.Generator().manual_seed(100 * step + index)
                    gradient = torch.randn(param.shape, generator=generator).to(DEVICE, dtype)
                    if isinstance(param, DTensor):
                        gradient = distribute_tensor(gradient, mesh, param.placements, src_data_rank=None)
                    param.grad = gradient
                optimizer.step()
                plans.append(sorted(name for bucket in optimizer.plan() for name in owned_by(bucket)))
            state = {n: {k: whole(v) for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
            return ([whole(param).detach() for param in params], {"state": state}), plans

        params, comms, _ = laid_out(model(shapes, dtype), layout, {"strided": mesh})
        found, plans = saved(params, comms)
        differing = differences(found, saved(model(shapes, dtype), "none")[0])
        wrong |= {(layout, master): differing} if differing else {}
        owners[layout] = plans
    return wrong, owners


def owned_by(bucket):
    return [unit.name for unit in bucket.units.local] if isinstance(bucket, Gathered) else []


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_options_that_change_between_steps_move_no_state_where_matrices_are_gathered(world_size):
    results = run(gathered_changes, world_size, ["averaged", "rows", "columns", "experts"], timeout=110)
    assert [wrong for wrong, _ in results] == [{}] * world_size
    for layout in ("averaged", "rows", "columns"):
        assert any(len({tuple(plan) for plan in owners[layout]}) > 1 for _, owners in results), layout


def adamw_changes(rank, world_size):
    """Differences of AdamW's weights and state from one device's, by master."""
    wrong = {}
    for master in ("fp32", "mantissa", "8bit"):

        def stepped(comms, master=master):
            # One that is divided into rows, one whose last rank has less, and small ones with an owner each.
            params = model([(1500, 4), (4099,), (7,), (30, 20), (9,)], torch.bfloat16)
            optimizer = quintic.Muon(
                [{"params": params, "algorithm": "adamw"}], adamw_lr=0.1, comms=comms, master=master
            )
            take_steps(optimizer, params, 0, 2)
            [group] = optimizer.param_groups
            group.update({"kernels": "torch", "max_workspace_bytes": 2000, "offload": True, "betas": (0.8, 0.9)})
            take_steps(optimizer, params, 2, 4)
            if comms == "sharded":
                group["comms"] = "sharded_sparse"
            take_steps(optimizer, params, 4, 5)
            return saved_of(optimizer, params)

        found = differences(stepped("sharded"), stepped("none"))
        wrong |= {master: found} if found else {}
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_options_that_change_between_steps_move_no_state_of_adamw(world_size):
    assert run(adamw_changes, world_size) == [{}] * world_size


# Options with which state is saved, and those with which it is loaded.
LOADS = {
    "steps": ({"orthogonalizer": "gram"}, {"orthogonalizer": "gram", "orthogonalizer_steps": 8}),
    "method": ({"orthogonalizer": "svd"}, {"orthogonalizer": "newton_schulz"}),
    "coefficients": ({"coefficients": (2, -1.5, 0.5)}, {"orthogonalizer": "gram"}),
}


def started(comms, options, master, order):
    """Parameters by name, and their optimizer, given the order of the names in their group."""
    dtype = torch.float32 if master is None else torch.bfloat16
    shapes = {"square": (32, 32), "wide": (23, 183), "small": (5, 3), "twin": (32, 32)}
    params = dict(zip(shapes, model(list(shapes.values()), dtype), strict=True))
    options = {**FLOAT32, **options, "normalize": "neuron", "master": master, "lr": 0.1}
    return params, quintic.Muon([(name, params[name]) for name in order], comms=comms, **options)


NAMES = ["square", "wide", "small", "twin"]

# Every change of options with one kind of weights, and one of them with all.
LOAD_CASES = [*zip(LOADS, [master for _, master in MASTERS[:3]], strict=True), *(("steps", m) for _, m in MASTERS[1:])]


def saves(rank, world_size, comms):
    """The state saved after two steps, by case."""
    found = {}
    for name, master in LOAD_CASES:
        params, optimizer = started(comms, LOADS[name][0], master, NAMES)
        take_steps(optimizer, params.values(), 0, 2)
        found[name, master] = [param.detach() for param in params.values()], optimizer.state_dict()
    return found


def loads(rank, world_size, comms, everything, order):
    """Weights and momentum by name after three more steps, the last one after another load."""
    found = {}
    for (name, master), (weights, state_dict) in everything.items():
        params, optimizer = started(comms, LOADS[name][1], master, order)
        with torch.no_grad():
            for param, value in zip(params.values(), weights, strict=True):
                param.copy_(value)
        optimizer.load_state_dict(state_dict)
        take_steps(optimizer, params.values(), 2, 4)
        # A state of other options also comes into an optimizer that has stepped, and brings its options along.
        optimizer.load_state_dict(state_dict)
        take_steps(optimizer, params.values(), 4, 5)
        state = dict(zip(order, optimizer.state_dict()["state"].values(), strict=True))
        found[name, master] = {n: (params[n].detach(), state[n]) for n in NAMES}
    return found


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(3, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(1, 3, marks=pytest.mark.slow)],
)
def test_a_loaded_state_finds_its_owner(saving, loading):
    everything = run(saves, saving, "none" if saving == 1 else "sharded", timeout=60)[0]
    [expected] = run(loads, 1, "none", everything, NAMES)
    for found in run(loads, loading, "sharded", everything, ["twin", "small", "wide", "square"]):
        for case, by_name in expected.items():
            for name, (weight, state) in by_name.items():
                assert torch.equal(found[case][name][0], weight), (case, name)
                for key, value in state.items():
                    assert torch.equal(found[case][name][1][key], value), (case, name, key)


STRIDED = ["averaged", "sharded", "rows", "columns", "copies", "experts"]


def laid_out(params, layout, mesh):
    """Parameters on every second rank, or all (`"copies"`), with the `comms` and the process group that they need."""
    if layout in ("averaged", "sharded"):
        return params, layout, mesh["strided"].get_group()
    placements = [Shard(1 if layout == "columns" else 0)]
    mesh, placements = (mesh, [*placements, Replicate()]) if layout == "copies" else (mesh["strided"], placements)
    cut = [distribute_tensor(param.detach(), mesh, placements, src_data_rank=None) for param in params]
    return [nn.Parameter(one) for one in cut], "none", None


def every_second(rank, world_size):
    """By layout: this rank's matrices, its share of the work and of the momentum, and whether weights are as alone."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("strided", "others"))
    found = {}
    for layout in STRIDED:
        shapes, view = ([(8, 6, 6)], EXPERTS) if layout == "experts" else ([(8, 6)] * 8, MATRIX)
        # Not as the speed of the device has it: small matrices are repeated by GPUs and divided by CPUs.
        options = {"view": view, "normalize": "neuron", "replicas": "divide", **FLOAT32}
        alone = model(shapes, torch.float32)
        params, comms, process_group = laid_out(model(shapes, torch.float32), layout, mesh)
        one_device = quintic.Muon([{"params": alone, **options}], lr=0.1)
        optimizer = quintic.Muon([{"params": params, **options}], lr=0.1, comms=comms, process_group=process_group)
        # The other ranks have a model of their own.
        generator = torch.Generator().manual_seed(0 if layout == "copies" else rank % 2)
        for _ in range(3):
            for param, whole in zip(params, alone, strict=True):
                whole.grad = param.grad = torch.randn(whole.shape, generator=generator).to(whole)
                if isinstance(param, DTensor):
                    places = param.device_mesh, param.placements
                    param.grad = distribute_tensor(whole.grad, *places, src_data_rank=None)
            optimizer.step()
            one_device.step()
        plan, expected = optimizer.plan(), one_device.plan()
        momentum = sum(local_of(values["momentum_buffer"]).numel() for values in optimizer.state.values())
        whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in params]
        found[layout] = (
            sum(bucket.num_matrices for bucket in plan),
            plan.flops / expected.flops,
            momentum / sum(param.numel() for param in alone),
            all(map(torch.equal, whole, alone)),
        )
    return found


def test_all_ranks_of_a_strided_group_own_work():
    """Ranks {0, 2} and {1, 3}: owners are positions in the group, not ranks modulo its size (Motif's Muon)."""
    for found in run(every_second, 4):
        assert found == {
            "averaged": (4, 0.5, 1.0, True),
            "sharded": (4, 0.5, 0.5, True),
            "rows": (4, 0.5, 0.5, True),
            "columns": (4, 0.5, 0.5, True),
            "copies": (2, 0.25, 0.5, True),
            "experts": (4, 0.5, 0.5, True),
        }


def changed_masters(rank, world_size):
    """Differences from one device with masters that never changed, by layout and the masters before and after."""
    wrong = {}
    mesh = init_device_mesh(DEVICE, (world_size,), mesh_dim_names=("strided",))

    def saved(layout, first, second):
        params, comms = model([(23, 183), (8, 8), (2100, 3), (6,)], torch.bfloat16), "none"
        if layout != "one device":
            params, comms, _ = laid_out(params, layout, {"strided": mesh})
        groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}]
        optimizer = quintic.Muon(groups, lr=0.1, adamw_lr=0.1, comms=comms, master=first, **FLOAT32)
        for step in range(4):
            for group in optimizer.param_groups if step == 2 else ():
                group["master"] = second
            for index, param in enumerate(params):
                generator = torch.Generator().manual_seed(100 * step + index)
                gradient = torch.randn(param.shape, generator=generator).to(DEVICE, torch.bfloat16)
                if isinstance(param, DTensor):
                    gradient = distribute_tensor(gradient, mesh, param.placements, src_data_rank=None)
                param.grad = gradient
            optimizer.step()
        state = {n: {k: whole(v) for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
        return [whole(param).detach() for param in params], {"state": state}

    for layout in ("sharded", "rows"):
        for first, second in (("fp32", "mantissa"), ("mantissa", "fp32")):
            found = differences(saved(layout, first, second), saved("one device", second, second))
            wrong |= {(layout, first, second): found} if found else {}
        # Steps before the change have other bits with the one form than with the other.
        for first, second in (("fp32", "8bit"), ("8bit", "mantissa")):
            found = differences(saved(layout, first, second), saved("one device", first, second))
            wrong |= {(layout, first, second): found} if found else {}
    return wrong


def test_masters_that_change_between_steps_keep_their_values():
    assert run(changed_masters, 2) == [{}] * 2
