"""State of 8 bits where columns are cut inside of groups of 8: the bits of one device, and the errors that remain."""

import contextlib
import copy
import math

import pytest
import torch
from allocated import peak_bytes
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import quintic
from quintic.interchange import export_torch_state, import_torch_state
from quintic.optim.numeric.int8_state import is_packed, read_packed

GAP, NAN = 2, 3
STEPS = 5


class Weights(nn.Module):
    """Two matrices and a table with `columns` columns; a matrix and a table of which ranks divide the rows alone."""

    def __init__(self, columns, placed=None):
        super().__init__()
        torch.manual_seed(0)
        shapes = {"first": (16, columns), "second": (16, columns), "table": (9, columns), "rows": (10, 16)}
        shapes["even"] = (9, 16)
        for name, shape in shapes.items():
            whole = torch.randn(shape, device=DEVICE)
            self.register_parameter(name, nn.Parameter(whole if placed is None else placed(name, whole)))


def optimizer_of(model, **options):
    groups = [
        {"params": [(name, getattr(model, name)) for name in ("first", "second", "rows")], "algorithm": "muon"},
        {"params": [(name, getattr(model, name)) for name in ("table", "even")], "algorithm": "adamw"},
    ]
    given = {"lr": 0.05, "adamw_lr": 0.01, "state_dtype": "int8", "on_nonfinite": "skip", **options}
    return quintic.Muon(groups, **given)


def placed_on(mesh, dimension):
    """Cut all but two along a dimension."""

    def placed(name, whole):
        return distribute_tensor(whole, mesh, [Shard(0 if name in ("rows", "even") else dimension)], src_data_rank=None)

    return placed


def give(model, step):
    generator = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        gradient = torch.randn(param.shape, generator=generator).to(DEVICE)
        # Bytes of values so small that they would change if they were read and stored again: 2^-126 of momentum, and
        # second moments of 2^-140.
        gradient[0] *= 2.0**-126 if param.shape[0] == 16 else 2.0**-70
        if step == NAN and name == "table":
            gradient[0, 0] = torch.nan
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = None if step == GAP and name in ("second", "table") else gradient


def train(model, optimizer, steps):
    for step in steps:
        give(model, step)
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(model, optimizer, other, other_optimizer):
    found = []
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        state, expected = optimizer.state[param], other_optimizer.state[twin]
        pairs = {"weight": (param, twin), **{key: (state[key], expected[key]) for key in expected}}
        found += [f"{name}: {key}" for key, (one, two) in pairs.items() if not torch.equal(whole(one), whole(two))]
    return found


def trained(columns, mesh=None, dimension=1, steps=range(STEPS)):
    model = Weights(columns, None if mesh is None else placed_on(mesh, dimension))
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return model, optimizer


def check_bits(rank, world_size, columns):
    mesh = DeviceMesh(DEVICE, range(world_size))
    model, optimizer = trained(columns, mesh)
    one, alone = trained(columns)
    assert differences(model, optimizer, one, alone) == []
    for param in (model.first, model.table):
        averages = [state for state in optimizer.state[param].values() if is_packed(state)]
        assert averages
        assert all(isinstance(state, DTensor) and state.placements == param.placements for state in averages)
    # A kernel reads averages of one dtype.
    assert all(("table" in bucket.names) + ("even" in bucket.names) < 2 for bucket in optimizer.plan())
    # Between steps nothing is kept in float32.
    wide = [tensor for tensors in optimizer._plans.runner._cut_state._wide.values() for tensor in tensors.values()]
    assert len(wide) == 4
    assert not any(tensor.untyped_storage().nbytes() for tensor in wide)
    give(model, STEPS)
    report = quintic.verify(model, optimizer)
    assert report.ok, str(report)
    # Into another layout, from it, and from one device.
    for start, (saved_model, saved) in {"cut": (model, optimizer), "one": (one, alone)}.items():
        for dimension in (0, 1):
            twin, other = trained(columns, mesh, dimension, steps=())
            values = copy.deepcopy(saved.state_dict())
            if dimension == 0 and start == "cut":  # pieces of another layout are not taken
                for state in values["state"].values():
                    state.update({key: whole(value) for key, value in state.items()})
            other.load_state_dict(values)
            with torch.no_grad():
                for param, source in zip(twin.parameters(), saved_model.parameters(), strict=True):
                    full = whole(source.detach())
                    param.copy_(distribute_tensor(full, mesh, param.placements, src_data_rank=None))
            train(twin, other, [STEPS, STEPS + 1])
            expected, expected_optimizer = trained(columns, steps=range(STEPS + 2))
            assert differences(twin, other, expected, expected_optimizer) == [], (start, dimension)
    # To PyTorch's optimizers in float32.
    exported = export_torch_state(optimizer)
    expected = export_torch_state(alone)
    for algorithm, saved in exported.items():
        for number, state in saved["state"].items():
            for key, value in state.items():
                assert torch.equal(whole(value), expected[algorithm]["state"][number][key]), (algorithm, number, key)


@pytest.mark.parametrize(("world_size", "columns"), [(2, 24), (3, 40), (3, 8)])
def test_the_bits_are_those_of_one_device(world_size, columns):
    run(check_bits, world_size, columns)


def check_copies(rank, world_size, transposed):
    """The state of a matrix for another one, or for its transpose, both cut."""
    mesh = DeviceMesh(DEVICE, range(world_size))

    def tied(placed):
        torch.manual_seed(1)
        model = nn.Module()
        shapes = {"one": (24, 24), "other": (24, 24)}
        for name, shape in shapes.items():
            tensor = torch.randn(shape, device=DEVICE)
            model.register_parameter(name, nn.Parameter(placed(name, tensor) if placed else tensor))
        options = {"algorithm": "adamw", "state_dtype": "int8"}
        optimizer = quintic.Muon([{"params": list(model.named_parameters()), **options}], lr=0.01)
        train(model, optimizer, range(2))
        optimizer.copy_state("one", "other", transposed=transposed)
        train(model, optimizer, [2 + GAP])
        return model, optimizer

    assert differences(*tied(placed_on(mesh, 1)), *tied(None)) == []


@pytest.mark.parametrize("transposed", [False, True])
def test_state_is_copied_in_whole_groups(transposed):
    run(check_copies, 2, transposed)


def check_errors(rank, world_size):
    mesh = DeviceMesh(DEVICE, range(world_size))
    model = Weights(24, placed_on(mesh, 1))
    with pytest.raises(ValueError, match=r"first: its 24 columns are cut .*offload=True .*use state_dtype='bf16' for"):
        optimizer_of(model, offload=True)
    model, optimizer = trained(24, mesh, steps=range(2))
    with pytest.raises(ValueError, match=r"first: its columns are cut .*step as usual, or use state_dtype='bf16' for"):
        quintic.CapturedStep(optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    # Conversions would need the groups of others.
    for group in optimizer.param_groups:
        group["state_dtype"] = None
    with pytest.raises(ValueError, match=r"first: its momentum_buffer is torch.int8 and cannot become torch.float32"):
        train(model, optimizer, [2])
    for group in optimizer.param_groups:
        group["state_dtype"] = "int8"
    plain = Weights(24)
    wide = optimizer_of(plain, state_dtype=None)
    train(plain, wide, range(2))
    with pytest.raises(ValueError, match=r"first: saved momentum_buffer is torch.float32 and cannot become torch.int8"):
        optimizer.load_state_dict(wide.state_dict())
    exported = export_torch_state(wide)
    for saved in exported.values():
        for state in saved["state"].values():
            for key, value in state.items():
                if value.ndim == 2:
                    state[key] = distribute_tensor(value, mesh, [Shard(1)], src_data_rank=None)
    with pytest.raises(ValueError, match=r"first: saved momentum_buffer is torch.float32 and cannot become torch.int8"):
        import_torch_state(optimizer, *exported.values())
    after = optimizer.state_dict()["state"]
    for key, state in before.items():
        assert all(torch.equal(whole(value), whole(after[key][name])) for name, value in state.items())
    # What the message advises: to convert on one device.
    one, alone = trained(24, steps=range(2))
    alone.load_state_dict(wide.state_dict())
    optimizer.load_state_dict(alone.state_dict())
    assert torch.equal(
        optimizer.state[model.first]["momentum_buffer"].full_tensor(), alone.state[one.first]["momentum_buffer"]
    )


def test_errors_name_the_parameter_and_change_nothing():
    run(check_errors, 2)


def check_reads(rank, world_size):
    """A piece alone tells nothing: the exponents of its cut groups are elsewhere."""
    mesh = DeviceMesh(DEVICE, range(world_size))
    model, optimizer = trained(24, mesh)
    momentum = optimizer.state[model.first]["momentum_buffer"]
    numbers = read_packed(momentum.full_tensor())
    exported = export_torch_state(optimizer)["muon"]["state"][0]["momentum_buffer"]
    assert torch.equal(exported.to_local(), numbers[:, 12 * rank : 12 * (rank + 1)])


def test_exports_are_pieces_of_what_whole_groups_say():
    run(check_reads, 2)


def alone_with(columns, algorithm="adamw"):
    """Return a parameter whose columns all ranks divide, and an optimizer for it."""
    mesh = DeviceMesh(DEVICE, range(torch.distributed.get_world_size()))
    whole = torch.randn(16, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None))
    group = {"params": [("weight", param)], "algorithm": algorithm}
    return param, quintic.Muon([group], lr=0.01, state_dtype="int8")


def check_one_rank_without_gradient(rank, world_size):
    model = nn.Module()
    model.weight, optimizer = alone_with(24)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    if rank == 1:
        model.weight.grad = None
    assert len(str(quintic.verify(model, optimizer)))  # no rank waits for the other


def check_empty_piece(rank, world_size, algorithm):
    """FSDP2 keeps empty pieces of another empty shape; one rank alone must not answer otherwise."""
    for step_dtype in ("int8", None):
        param, optimizer = alone_with(8, algorithm=algorithm)
        if rank == world_size - 1:
            assert param.to_local().numel() == 0
            param._local_tensor = torch.empty(0, 0, device=DEVICE)
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.param_groups[0]["state_dtype"] = step_dtype
        if step_dtype is None:
            with pytest.raises(ValueError, match=r"cannot become torch\.float32 where columns are cut"):
                optimizer.step()
        else:
            optimizer.step()


def check_state_of_others(rank, world_size):
    """A frozen parameter with an entry of the user's, and plans that are made in inference mode."""
    param, optimizer = alone_with(24)
    frozen, _ = alone_with(24)
    frozen.requires_grad_(False)
    optimizer.add_param_group({"params": [("frozen", frozen)], "algorithm": "adamw"})
    optimizer.state[frozen] = {"note": 1}
    with torch.inference_mode():
        optimizer.plan()
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer._plans.drop_plan()
    with torch.inference_mode():
        optimizer.plan()
    optimizer.step()
    assert optimizer.state[frozen] == {"note": 1}


def check_frozen(rank, world_size):
    """Frozen parameters have no state that ranks could share, until they are unfrozen."""
    mesh = DeviceMesh(DEVICE, range(world_size))
    model = Weights(24, placed_on(mesh, 1))
    cut = (model.first, model.second, model.table)
    for param in cut:
        param.requires_grad_(False)
    optimizer = optimizer_of(model)
    for step in range(2):
        give(model, step)
        for param in cut:
            param.grad = None
        optimizer.step()
    assert optimizer.plan().cut_state_bytes == 0
    # On the CPU the device is all that a capture lacks.
    with contextlib.nullcontext() if DEVICE == "cuda" else pytest.raises(ValueError, match="one CUDA device"):
        quintic.CapturedStep(optimizer).close()
    for param in cut:
        param.requires_grad_(True)
    with pytest.raises(ValueError, match=r"first: its columns are cut "):
        quintic.CapturedStep(optimizer)
    train(model, optimizer, range(2))
    assert optimizer.plan().cut_state_bytes
    assert optimizer.state[model.first]["momentum_buffer"].to_local().any()
    # One that is frozen later keeps its state, and is stepped if it is given a gradient.
    model.first.requires_grad_(False)
    before = model.first.detach().clone()
    train(model, optimizer, range(1))
    assert not torch.equal(whole(before), whole(model.first.detach()))


def check_columns_in_memory(rank, world_size):
    """Column by column in memory averages are float32, on ranks with empty pieces, too."""

    def by_columns(local):
        return torch.empty_strided(local.shape, (1, 16), device=DEVICE).copy_(local)

    mesh = DeviceMesh(DEVICE, range(world_size))
    local = by_columns(torch.ones(16, 2 if rank < 4 else 0, device=DEVICE))
    whole = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=torch.Size((16, 8)), stride=(1, 16))
    param = nn.Parameter(whole)
    group = {"params": [("weight", param)], "algorithm": "adamw"}
    optimizer = quintic.Muon([group], lr=0.01, state_dtype="int8")
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


def check_reference(rank, world_size, is_sharded):
    """Second moments, too, which are rounded by a hash of the count of steps."""
    found = []
    for function in (quintic.Muon.step, quintic.reference_step):
        model = Weights(24, None if is_sharded else placed_on(DeviceMesh(DEVICE, range(world_size)), 1))
        optimizer = optimizer_of(model, comms="sharded" if is_sharded else "none")
        for step in range(3):
            give(model, 4 + step)
            function(optimizer)
        state = optimizer.state_dict()["state"]
        found.append({(key, name): whole(value) for key, of_key in state.items() for name, value in of_key.items()})
    assert not [place for place, value in found[0].items() if not torch.equal(value, found[1][place])]


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels differ from plain PyTorch in the last bit")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_reference_step_makes_the_bytes_of_a_step(is_sharded):
    run(check_reference, 2, is_sharded)


def test_verify_waits_for_no_gradient():
    run(check_one_rank_without_gradient, 2)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_empty_pieces_take_part(algorithm):
    run(check_empty_piece, 5, algorithm)


def test_frozen_parameters_and_inference_mode():
    run(check_state_of_others, 2)


def test_frozen_parameters_share_no_groups():
    run(check_frozen, 2)


def test_all_ranks_agree_on_parameters_in_columns():
    run(check_columns_in_memory, 5)


def planned_memory(rank, world_size, columns):
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    model = Weights(columns, placed_on(mesh, 1))
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    give(model, 0)
    peak, plan, cut = peak_bytes(optimizer.step, DEVICE), optimizer.plan(), optimizer._plans.runner._cut_state

    def read_and_store():
        with cut.of_step([0, 0]):
            pass

    return peak, plan.peak_workspace_bytes, peak_bytes(read_and_store, DEVICE), plan.cut_state_bytes


@pytest.mark.parametrize(("world_size", "columns"), [(3, 40), (2, 8 * 301), (3, 8 * 301)])
def test_the_plan_counts_the_float32_averages(world_size, columns):
    for peak, planned, peak_of_cut, cut in run(planned_memory, world_size, columns, timeout=60):
        # One whole average while it is stored, and a piece of each, of two matrices and a table, during the step.
        last_piece = columns - (world_size - 1) * math.ceil(columns / world_size)
        assert cut >= 12 * 16 * columns + 4 * (16 + 16 + 9 + 9) * last_piece
        assert peak <= planned + 2**12
        # Without the buckets, whose bounds leave room.
        assert peak_of_cut <= cut + 2**12
