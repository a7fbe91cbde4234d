"""Layouts against what PyTorch really put on each rank: the part of the whole that the box says."""

import math

import pytest
import torch
from harness import DEVICE, run
from newer import needs_torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from quintic.optim.layout import layouts as layouts_module
from quintic.optim.layout.layouts import layout_of, local_gradients, local_tensor, placed_as
from quintic.versions import moves_strided_shards

SHAPES = [(18, 3), (7, 4), (3, 5), (1, 4), (0, 4), (6,), (5, 3, 4)]


def numbered(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32, device=DEVICE).view(shape)


def slices_of(box):
    return tuple(slice(start, stop) for start, stop in box)


def checked_layout(rank, dtensor, whole):
    """The layout, after a look at whether this rank holds what it says."""
    layout = layout_of("weight", dtensor)
    held, local = whole[slices_of(layout.box_of(rank))], local_tensor(dtensor)
    assert held.numel() == local.numel()
    if held.numel():  # what is empty may have any empty shape
        assert held.shape == local.shape
        assert torch.equal(held, local)
    return layout


def assert_ranks_agree(layouts_by_rank):
    """All ranks see the same layouts, and in each of them every copy is complete."""
    for layouts in zip(*layouts_by_rank, strict=True):
        assert len(set(layouts)) == 1
        counts = torch.zeros(layouts[0].num_copies, *layouts[0].shape)
        for box, copy in zip(layouts[0].boxes, layouts[0].copies, strict=True):
            counts[copy][slices_of(box)] += 1
        assert torch.equal(counts, torch.ones_like(counts))


def distributed(rank, mesh, placements, shapes=SHAPES):
    """`distribute_tensor` of several shapes; placements on dimensions that a shape lacks are left out."""
    layouts = []
    for shape in shapes:
        if all(not isinstance(placement, Shard) or placement.dim < len(shape) for placement in placements):
            whole = numbered(shape)
            layouts.append(checked_layout(rank, distribute_tensor(whole, mesh, placements), whole))
    return layouts


def numbered_model(*shapes):
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"weight{index}", nn.Parameter(numbered(shape)))
    return model


def wrapped(rank, model):
    """The layouts of a model's parameters, which were numbered before it was wrapped."""
    params = list(model.parameters())
    assert params
    assert all(isinstance(param, DTensor) for param in params)
    return [checked_layout(rank, param, numbered(param.shape)) for param in params]


def one_dimension(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    layouts = []
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        layouts += distributed(rank, mesh, [placement])
    model = numbered_model(*SHAPES)
    fully_shard(model)
    layouts += wrapped(rank, model)
    model = numbered_model((5, 12), (1, 24), (2, 12, 3))
    fully_shard(model, shard_placement_fn=lambda param: Shard(1))
    return layouts + wrapped(rank, model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_boxes_are_local_tensors_on_one_mesh_dimension(world_size):
    assert_ranks_agree(run(one_dimension, world_size))


def several_dimensions(rank, world_size):
    square = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    layouts = []
    for placements in (
        (Replicate(), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
    ):
        layouts += distributed(rank, square, placements)
    deep = init_device_mesh(DEVICE, (2, 1, 2))
    layouts += distributed(rank, deep, (Shard(0), Shard(1), Replicate()))
    layouts += distributed(rank, deep, (Shard(0), Replicate(), Shard(0)))
    layouts += distributed(rank, square._flatten("flat"), (Shard(0),))
    # Sub-meshes: both rows and both columns of the square at the same time.
    columns, rows = (distributed(rank, square[name], (Shard(0),)) for name in ("outer", "inner"))
    assert {layout.ranks for layout in columns} == {((0, 2), (1, 3))[rank % 2]}
    assert {layout.ranks for layout in rows} == {((0, 1), (2, 3))[rank // 2]}
    model = numbered_model(*SHAPES)
    fully_shard(model, mesh=square)  # hybrid: replicated over "outer", sharded over "inner"
    hybrid = wrapped(rank, model)
    assert {layout.num_copies for layout in hybrid} == {2}
    return layouts + hybrid


def test_boxes_are_local_tensors_on_several_mesh_dimensions():
    assert_ranks_agree(run(several_dimensions, 4))


class Mlp(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, out)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(numbered(param.shape))
        self.to(DEVICE)


def check_moved(rank, param, gradient, whole):
    """A gradient that is cut in another way gets the parts of its parameter, where PyTorch can be trusted with that."""
    if moves_strided_shards():
        assert checked_layout(rank, placed_as("w", param, gradient), whole) == layout_of("w", param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts_module, "_MOVES_STRIDED", False)
        param.grad = gradient
        with pytest.raises(ValueError, match=r"up: its gradient has placements .*_StridedShard.*misplaces rows"):
            local_gradients([param], ["up"])
        param.grad = None


def tensor_parallel(rank, world_size, mesh_shape):
    """Tensor parallel on the last mesh dimension, FSDP2 (hybrid if there are three) on the others."""
    names = ("replicate", "shard", "tensor")[-len(mesh_shape) :]
    mesh = init_device_mesh(DEVICE, mesh_shape, mesh_dim_names=names)
    layouts = []
    for width, hidden, out in ((8, 18, 6), (8, 7, 9), (4, 3, 5), (4, 1, 1)):
        mlp = parallelize_module(
            Mlp(width, hidden, out), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        if len(mesh_shape) == 1:
            layouts += wrapped(rank, mlp)
            continue
        fully_shard(mlp, mesh=mesh[names[:-1]])
        assert any(isinstance(placement, _StridedShard) for placement in mlp.up.weight.placements)
        layouts += wrapped(rank, mlp)
        whole = numbered((hidden, width))
        check_moved(rank, mlp.up.weight, distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim), whole)
    return layouts


@pytest.mark.parametrize(
    "mesh_shape",
    [(2,), (2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((3,), (3, 2), (2, 2, 2)))],
    ids=str,
)
def test_boxes_are_local_tensors_under_tensor_parallel_and_fsdp(mesh_shape):
    assert_ranks_agree(run(tensor_parallel, math.prod(mesh_shape), mesh_shape))


def expert_parallel(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 2, 2), mesh_dim_names=("shard", "expert", "tensor"))
    layouts = []
    for expert_placements, fsdp_dim in (
        ((Shard(0), Replicate()), 0),
        ((Shard(0), Shard(1)), 0),
        ((Shard(0), Shard(1)), 1),
        ((Shard(0), Shard(2)), 1),
        ((Shard(0), Shard(0)), 0),
    ):
        for experts in (8, 3):
            whole = numbered((experts, 8, 4))
            model = nn.Module()
            model.experts = nn.Parameter(distribute_tensor(whole, mesh["expert", "tensor"], expert_placements))
            fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda param, dim=fsdp_dim: Shard(dim))
            layouts += wrapped(rank, model)
    return layouts


@needs_torch("2.9", "FSDP2 beside two dimensions of a mesh")
def test_boxes_are_local_tensors_under_expert_parallel_and_fsdp():
    assert_ranks_agree(run(expert_parallel, 8))


def part_of_the_world(rank, world_size):
    """Two models on strided ranks; every process sees both layouts, and has a box in one."""
    layouts = []
    for ranks in ((0, 2), (1, 3)):
        dtensor = distribute_tensor(numbered((5, 2)), DeviceMesh(DEVICE, list(ranks)), [Shard(0)])
        layout = layout_of("weight", dtensor)
        assert layout.ranks == ranks
        if rank in ranks:
            checked_layout(rank, dtensor, numbered((5, 2)))
        else:
            with pytest.raises(KeyError, match=f"^{rank}$"):
                layout.box_of(rank)
        layouts.append(layout)
    return layouts


def test_ranks_outside_the_mesh_see_the_layout():
    assert_ranks_agree(run(part_of_the_world, 4))


def local_tensors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    param = nn.Parameter(distribute_tensor(numbered((5, 2)), mesh, [Shard(0)]))
    local = local_tensor(param)
    assert local.grad_fn is None
    with torch.no_grad():
        local.fill_(rank)
    assert (param.full_tensor() == torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0]], device=DEVICE)).all()
    # A collective that still runs is waited for.
    gathered = param.detach().redistribute(placements=[Replicate()], async_op=True)
    assert type(local_tensor(gathered)) is torch.Tensor
    assert torch.equal(local_tensor(gathered), param.detach().full_tensor())


def test_local_tensor_shares_memory_and_is_there():
    run(local_tensors, 2)


def wrong_tensors(rank, world_size):
    mesh = init_device_mesh(DEVICE, (world_size,))
    partial = DTensor.from_local(torch.zeros(3, 2, device=DEVICE), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"parameter 'layer\.weight' of shape \(3, 2\).*Partial.*Replicate or Shard"):
        layout_of("layer.weight", partial)
    strided = distribute_tensor(numbered((8, 2)), mesh, [_StridedShard(0, split_factor=2)])
    with pytest.raises(ValueError, match=r"parameter 'layer\.weight'.*split_factor 2.*possible are \[1\]"):
        layout_of("layer.weight", strided)
    # Five rows on two ranks are three and two, not two and three.
    local = torch.zeros(2 + rank, 2, device=DEVICE)
    uneven = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([5, 2]), stride=(2, 1))
    message = rf"'layer\.weight'.*Shard\(dim=0\).*rank {rank} holds.*\({3 - rank}, 2\).*has shape \({2 + rank}, 2\)"
    with pytest.raises(ValueError, match=message):
        layout_of("layer.weight", uneven)


def test_a_local_tensor_that_does_not_fit_is_an_error_with_its_name():
    run(wrong_tensors, 2)
