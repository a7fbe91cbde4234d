"""The optimizers compared on several ranks, and the layouts of weights that each of them wants.

Layouts: `single`, every rank does all the work by itself; `ddp`, gradients are the same on all ranks, who divide the
work; `sharded`, the optimizer averages gradients and divides state and work; `replicated`, it averages them and every
rank does all the work; `fsdp2` and `hsdp`, `DTensor`s cut along the first dimension, as by `fully_shard`; `tp`,
matrices cut along the second one.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.peer_files import load
from benchmarks.optimizer_step import contestants as shapes
from benchmarks.optimizer_step.contestants import COMPILED, Weights

LAYOUTS = ("single", "ddp", "sharded", "replicated", "fsdp2", "hsdp", "tp")

# Layouts of plain tensors: Quintic's `comms`.
COMMS = {"ddp": "averaged", "sharded": "sharded", "replicated": "replicated"}

# Layouts in which the optimizer averages gradients over ranks.
AVERAGING = ("sharded", "replicated")

# Steps after which the weights are compared with those of one device.
COMPARED_STEPS = 3

# The dimension along which layouts of `DTensor`s cut matrices; what AdamW updates is always cut along the first.
CUT_DIMENSION = {"fsdp2": 0, "hsdp": 0, "tp": 1}


@dataclass
class Place:
    """The placement of a contestant's weights.

    Attributes:
        layout: one of `LAYOUTS`.
        num_ranks: all of them.
        cuda: whether the ranks are CUDA devices.
        meshes: those made so far, by shape.
    """

    layout: str
    num_ranks: int
    cuda: bool
    meshes: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def mesh(self) -> Any:
        """Return the mesh of a layout of `DTensor`s; all ranks must call it. Its last dimension cuts."""
        from torch.distributed.device_mesh import init_device_mesh

        shape: tuple[int, ...] = (self.num_ranks,)
        if self.layout == "hsdp":
            copies = 2 if self.num_ranks % 2 == 0 and self.num_ranks >= 4 else 1
            shape = (copies, self.num_ranks // copies)
        if shape not in self.meshes:
            names = ("copies", "shards") if len(shape) == 2 else ("shards",)
            self.meshes[shape] = init_device_mesh("cuda" if self.cuda else "cpu", shape, mesh_dim_names=names)
        return self.meshes[shape]


def placed(weights: Weights, place: Place) -> Weights:
    """Return weights with gradients that all ranks have as a layout wants them. All ranks must call it."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if place.layout not in CUT_DIMENSION:
        return weights
    mesh = place.mesh

    def cut(param: Any, dimension: int) -> Any:
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dimension)]
        # Memory of its own, so that the whole tensor is given back.
        param_cut, gradient = (
            distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
            for whole in (param.detach(), param.grad)
        )
        sharded = torch.nn.Parameter(param_cut)
        sharded.grad = gradient
        return sharded

    dimension = CUT_DIMENSION[place.layout]
    return Weights([cut(one, dimension) for one in weights.matrices], [cut(one, 0) for one in weights.others])


@dataclass(frozen=True, kw_only=True)
class LayoutContestant:
    """One way to update weights on several ranks.

    Attributes:
        name: how it is called on the command line and in the tables.
        family: contestants measured by the same processes.
        layouts: where it takes part.
        build: makes the optimizer.
        place: lays the weights out.
        needs_cuda: whether it cannot run elsewhere.
        dtypes: of the weights that it takes.
        graph: whether a CUDA graph of its step is tried.
        preload: modules worth importing early.
    """

    name: str
    family: str
    layouts: tuple[str, ...]
    build: Callable[[Weights, Place], Any]
    place: Callable[[Weights, Place], Weights] = placed
    needs_cuda: bool = False
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    graph: bool = False
    preload: tuple[str, ...] = COMPILED


def _quintic(**options: Any) -> Callable[[Weights, Place], Any]:
    return lambda weights, place: shapes.quintic_muon(weights, comms=COMMS.get(place.layout, "none"), **options)


def _dion(kind: str) -> Callable[[Weights, Place], Any]:
    def build(weights: Weights, place: Place) -> Any:
        import torch.distributed as dist

        ranks: Any = None  # `single`
        if place.layout in CUT_DIMENSION:
            ranks = place.mesh["shards"]  # of several dimensions it takes the one that cuts
        elif place.layout == "ddp":
            ranks = dist.group.WORLD
        return shapes.dion(kind, weights, place.cuda, distributed_mesh=ranks)

    return build


def _nanochat(weights: Weights, place: Place) -> Any:
    return shapes.nanochat(weights, place.cuda)[0]


def _banks(weights: Weights, place: Place) -> Weights:
    """Return matrices of one shape as one parameter, with zeros up to a multiple of the ranks; labels for all."""
    import torch

    banks: list[Any] = []
    for shape in sorted({tuple(param.shape) for param in weights.matrices}):
        of_shape = [param for param in weights.matrices if tuple(param.shape) == shape]
        padding = [torch.zeros_like(of_shape[0])] * (-len(of_shape) % place.num_ranks)
        bank: Any = torch.nn.Parameter(torch.stack([*(param.detach() for param in of_shape), *padding]))
        bank.grad = torch.stack([*(param.grad for param in of_shape), *padding])
        bank.label, bank.reshape = f"bank_{len(banks)}", tuple(bank.shape)
        banks.append(bank)
    for index, param in enumerate(weights.others):
        param.label = f"other_{index}"
    return Weights(banks, weights.others)


def _speedrun(weights: Weights, place: Place) -> Any:
    import sys

    folders = [Path(folder, "modded-nanogpt") for folder in sys.path]
    path = next((folder for folder in folders if folder.is_dir()), Path("modded-nanogpt")) / "train_gpt.py"
    normuon_and_adam = load(path, ["NorMuonAndAdam"]).NorMuonAndAdam
    # Small ones first, as in the script; what cannot be divided, or is small, is averaged everywhere.
    divides = {param.label: param.numel() >= 1024 and param.shape[0] % place.num_ranks == 0 for param in weights.others}
    table: dict[str, dict[str, Any]] = {
        bank.label: {"optim": "normuon", "comms": "sharded", "adam_betas": None} for bank in weights.matrices
    }
    for label, divided in divides.items():
        comms = "sharded" if divided else "replicated"
        table[label] = {"optim": "adam", "comms": comms, "adam_betas": [0.9, 0.95]}
    optimizer = normuon_and_adam(
        [(param.label, param) for param in weights.all],
        param_table=table,
        scatter_order=list(table),
        compute_order=[*sorted(divides, key=divides.__getitem__), *(bank.label for bank in weights.matrices)],
        adam_defaults={"lr": shapes.ADAMW_LR, "eps": 1e-10, "weight_decay": shapes.WEIGHT_DECAY},
        normuon_defaults={"lr": shapes.LR, "momentum": 0.95, "beta2": 0.9, "weight_decay": shapes.WEIGHT_DECAY},
    )
    optimizer.state = optimizer.param_states
    return optimizer


# Forms of state and masters.
_STATES: dict[str, dict[str, Any]] = {
    "quintic-mantissa": {"master": "mantissa"},
    "quintic-bf16-state": {"state_dtype": "bf16"},
    "quintic-int8": {"state_dtype": "int8"},
    "quintic-int8-8bit": {"state_dtype": "int8", "master": "8bit"},
}

# In the order in which they run: what is compared first comes first, in case that the time ends.
LAYOUT_CONTESTANTS = (
    LayoutContestant(
        name="quintic",
        family="quintic",
        layouts=LAYOUTS,
        build=_quintic(),
        graph=True,
        preload=("torch", "torch.distributed.tensor"),
    ),
    LayoutContestant(
        name="quintic-neuron",
        family="quintic",
        layouts=("single", "ddp", "sharded", "fsdp2"),
        build=_quintic(normalize="neuron"),
        graph=True,
        preload=("torch", "torch.distributed.tensor"),
    ),
    # Each copy's ranks do all of the work, and send nothing to other copies.
    LayoutContestant(
        name="quintic-repeat",
        family="quintic",
        layouts=("hsdp",),
        build=_quintic(replicas="repeat"),
        graph=True,
        preload=("torch", "torch.distributed.tensor"),
    ),
    # What the speedrun's optimizer does: the neurons' statistics, cautious decay, and low bits of the weights kept.
    LayoutContestant(
        name="quintic-speedrun",
        family="quintic",
        layouts=("sharded",),
        build=_quintic(normalize="neuron", cautious=True, master="mantissa"),
        dtypes=("bf16",),
        graph=True,
        preload=("torch", "torch.distributed.tensor"),
    ),
    *(
        LayoutContestant(
            name=name,
            family="quintic",
            layouts=("fsdp2",),
            build=_quintic(**options),
            dtypes=("bf16",),
            graph=True,
            preload=("torch", "torch.distributed.tensor"),
        )
        for name, options in _STATES.items()
    ),
    LayoutContestant(
        name="torch-adamw",
        family="torch",
        layouts=("fsdp2",),
        build=lambda weights, place: shapes.fused_adamw(weights.all, place.cuda),
        dtypes=("bf16",),
    ),
    LayoutContestant(
        name="flash-adamw",
        family="flashoptim",
        layouts=("fsdp2",),
        build=lambda weights, place: shapes.flash_adamw(weights),
        dtypes=("bf16",),
    ),
    LayoutContestant(name="nanochat", family="nanochat", layouts=("sharded",), build=_nanochat),
    LayoutContestant(
        name="speedrun",
        family="speedrun",
        layouts=("sharded",),
        build=_speedrun,
        place=_banks,
        dtypes=("bf16",),
        needs_cuda=True,
    ),
    LayoutContestant(
        name="dion-muon", family="dion", layouts=("ddp", "fsdp2", "hsdp", "tp"), build=_dion("Muon"), graph=True
    ),
    # It refuses matrices cut along the second dimension.
    LayoutContestant(
        name="dion-normuon", family="dion", layouts=("ddp", "fsdp2", "hsdp"), build=_dion("NorMuon"), graph=True
    ),
)


def contestant_of(job: dict[str, Any]) -> LayoutContestant:
    """Return the contestant of a job."""
    return next(one for one in LAYOUT_CONTESTANTS if one.name == job["contestant"])


def default_ranks() -> int:
    """Return the number of CUDA devices, at least 2; without asking CUDA, which would keep its memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return max(2, len(visible.split(",")))
    return max(2, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
