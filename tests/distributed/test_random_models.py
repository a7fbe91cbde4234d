"""Models, layouts and options drawn at random: after every step every rank's weights have the bits of one device's.

What the other files leave out because nobody thought of it. QUINTIC_TEST_SEEDS=1000 draws so many instead of a few; a
failure tells its seed, and `QUINTIC_TEST_FIRST_SEED` where to begin.
"""

import copy
import functools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import DEVICE, ON_GPUS, run
from models import gradient, mean_gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from trajectories import fused_adamw_tolerance

import quintic
from quintic import Experts, Heads, Matrix, Rows, Split
from quintic.optim.layout.views import View
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.table import (
    ADAMUON,
    AURORA,
    EMA_NESTEROV,
    HYPERBALL,
    MUON,
    MUON_PLUS,
    NANOCHAT,
    RADIAL_BRAKE,
    RELATIVE_UPDATE,
    RULES,
    TWO_RATE,
    rule_of,
)

STEPS = 4
NUM_SEEDS = int(os.environ.get("QUINTIC_TEST_SEEDS", "20"))
FIRST_SEED = int(os.environ.get("QUINTIC_TEST_FIRST_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)

# Draws by the same processes, and the seconds for each.
AT_A_TIME, SECONDS = 20, 5

AVERAGING = ("replicated", "sharded", "sharded_sparse")

# What drawn rules are made of.
EQUALIZED, SIGNED = (Equalize("both"),), ADAMUON.before
WEIGHTS = (None, HYPERBALL.constrain, RADIAL_BRAKE.constrain, RELATIVE_UPDATE.constrain)

# Of layouts of `DTensor`s, the meshes: all ranks, all in two dimensions, and half of these each.
MESHES = {"cut": ["all"], "cut twice": ["square"], "several meshes": ["all", "square", "rows", "columns"]}

ADAMW_LR = 0.01


@dataclass
class Drawn:
    """The case of one seed."""

    layout: str
    dtype: torch.dtype
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    """Views of the matrices; the other parameters are AdamW's."""
    meshes: dict[str, str] = field(default_factory=dict)
    """The mesh of the parameters that are `DTensor`s, one of `meshes_of`."""
    cuts: dict[str, list[int | None]] = field(default_factory=dict)
    """For each dimension of the mesh the one that is cut, or None for copies."""
    has_gaps: bool = False
    clipped: str | None = None
    reloaded_after: int | None = None
    verified_before: int | None = None
    changed_before: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Options that are set on all groups before a step."""

    @property
    def averages(self) -> bool:
        """Return whether gradients differ among ranks."""
        return self.layout in AVERAGING


def random_case(seed: int, world_size: int) -> Drawn:
    choose = random.Random(f"{seed} {world_size}")
    layouts = ["averaged", *AVERAGING, "cut", "cut", *(["cut twice", "several meshes"] * (world_size == 4))]
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    methods = ["auto", "polar_express", "gram", "newton_schulz", *([] if ON_GPUS else ["svd"])]
    options = {
        "orthogonalizer": choose.choice(methods),
        "compute_dtype": torch.float64 if dtype == torch.float64 else choose.choice([torch.float32, None]),
        "normalize": choose.choice([None, None, "neuron"]),
        "nesterov": choose.random() < 0.7,
        "weight_decay": choose.choice([0.0, 0.1]),
        "decay_coupling": choose.choice(["lr", "lr_squared"]),
        "cautious": choose.random() < 0.7,
        "adjust_lr": choose.choice(["spectral", "match_rms_adamw", "unit_rms", None]),
        "max_workspace_bytes": choose.choice([None, 2**31, 300, 3000, 20_000]),
        "step_every": choose.choice([1, 1, 1, 2]),
        "on_nonfinite": choose.choice(["propagate", "skip"]),
        "master": choose.choice([None, "fp32", "mantissa", "8bit"]) if dtype == torch.bfloat16 else None,
        "offload": choose.random() < 0.2,
    }
    options["adamw_weight_decay"] = options["weight_decay"]
    if options["orthogonalizer"] == "svd":
        options["compute_dtype"] = None
    elif options["orthogonalizer"] == "gram" and dtype != torch.float64:
        options["compute_dtype"] = torch.float32
    found = Drawn(choose.choice(layouts), dtype, options)
    for number in range(choose.randint(1, 7)):
        shape, view = draw_matrix(choose)
        for copy_number in range(choose.choice([1, 1, 2, 3, 5])):
            name = f"matrix{number}_{copy_number}"
            found.shapes[name], found.views[name] = shape, view
    vectors = [lambda: (choose.randint(1, 20),), lambda: (choose.randint(1, 33), choose.randint(1, 5)), lambda: ()]
    for number in range(choose.randint(0, 4)):
        found.shapes[f"other{number}"] = choose.choice(vectors)()
    for name, shape in found.shapes.items():
        if found.layout in MESHES:
            found.meshes[name] = choose.choice(MESHES[found.layout])
            num_dims = 2 if found.meshes[name] == "square" else 1
            found.cuts[name] = [choose.choice([*range(len(shape)), None]) for _ in range(num_dims)]
    found.has_gaps = choose.random() < 0.5
    # Which is that of one device up to the last bit of float32, and scales float64.
    found.clipped = choose.choice([None, "all", "adamw"]) if dtype != torch.float64 and not found.has_gaps else None
    found.reloaded_after = choose.choice([None, 1, 2])
    found.verified_before = choose.choice([None, None, 1, 3])
    found.changed_before = choose.choice([None, 1, 2])
    # What computes in 16 bits keeps to methods that CPUs have for these.
    others = [method for method in methods if method not in ("auto", "gram") or options["compute_dtype"] is not None]
    found.changes = {
        "orthogonalizer": choose.choice(others),
        "orthogonalizer_steps": choose.choice([2, 5, 8]),
        "max_workspace_bytes": choose.choice([None, 300, 20_000]),
        "offload": choose.random() < 0.5,
    }
    options["state_dtype"] = choose.choice([None, "bf16"])
    if options["cautious"] or dtype == torch.bfloat16:
        # PyTorch's fused AdamW may differ in a last bit, which makes another bfloat16 of what lies half-way.
        found.changes["state_dtype"] = choose.choice([None, "bf16"])
    options["replicas"] = choose.choice(["auto", "divide", "repeat", "repeat"])
    found.changes["replicas"] = choose.choice(["auto", "divide", "repeat"])
    if choose.random() < 0.25:
        options |= {"normalize": "element", "adjust_lr": "spectral"}
    options["scale_decay"] = choose.random() < 0.5
    if options["cautious"]:
        options["cautious"] = choose.choice([True, "strict"])
    if choose.random() < 0.35:
        draw_rule(choose, options)
    return found


def draw_rule(choose: random.Random, options: dict[str, Any]) -> None:
    """Put a rule of the field into options, or one of several rules' stages, with options that it can have."""
    options["normalize"] = None
    options["update_rule"] = choose.choice(
        [*sorted(RULES.keys() - {"muon", "normuon", "adamuon"}), composed(choose), composed(choose)]
    )
    rule = rule_of("muon", None, options["update_rule"])
    if rule.scale is not None:
        options["adjust_lr"] = "spectral"
    if rule.constrain is not None:
        options |= {"cautious": False, "scale_decay": False, "decay_coupling": "lr"}


def composed(choose: random.Random) -> UpdateRule:
    before, polar, constrain = choose.choice([EQUALIZED, SIGNED]), choose.choice([None, AURORA]), choose.choice(WEIGHTS)
    return UpdateRule(
        title="drawn",
        direction=choose.choice([TWO_RATE, MUON]).direction,
        before=before,
        polar=polar and polar.polar,
        after=choose.choice([NANOCHAT, ADAMUON, MUON_PLUS, MUON]).after,
        constrain=constrain,
        drift=choose.choice([EMA_NESTEROV, MUON]).drift,
    )


def draw_matrix(choose: random.Random) -> tuple[tuple[int, ...], View]:
    m, n, count = choose.randint(1, 13), choose.randint(1, 13), choose.randint(1, 4)
    return choose.choice(
        [
            ((m, n), Matrix()),
            ((m, n), Matrix()),
            ((m, n), Matrix(transposed=True)),
            ((m, 1), Matrix()),
            ((0, n), Matrix()),
            ((count, m, n), Experts()),
            ((count, m, n), Experts(transposed=True)),
            ((count * m, n), Heads(count)),
            ((m, count * n), Heads(count, dim=1)),
            ((count * m, n), Rows(m)),
            ((m + n + count, 5), Split((m, n, count))),
            ((2 * (m + n), 4), Split((m, n), groups=2)),
        ]
    )


def lacking(drawn: Drawn, seed: int, name: str, step: int, world_size: int) -> list[int]:
    """The ranks that have no gradient: some, and now and then all."""
    if not drawn.has_gaps:
        return []
    choose = random.Random(f"{seed} {name} {step}")
    share = 1.0 if choose.random() < 0.2 else 0.25
    if drawn.meshes.get(name) in ("rows", "columns"):
        share = float(share == 1.0)  # half of the ranks do not know what the others lack
    return [rank for rank in range(world_size) if choose.random() < share]


def initial(drawn: Drawn) -> dict[str, torch.Tensor]:
    return {
        name: gradient(name, shape, torch.float32, -1).mul(0.3).to(drawn.dtype) for name, shape in drawn.shapes.items()
    }


def optimizer_of(
    drawn: Drawn, params: dict[str, nn.Parameter], comms: str, without: tuple[str, ...] = ()
) -> quintic.Muon:
    groups: dict[object, dict[str, Any]] = {}
    for name, param in params.items():
        view = drawn.views.get(name)
        group = {"algorithm": "adamw"} if view is None else {"view": view}
        if comms == "sharded_sparse":  # of tables only
            group["comms"] = "sharded_sparse" if view is None and param.ndim == 2 else "sharded"
        groups.setdefault(repr(sorted(group.items())), {**group, "params": []})["params"].append((name, param))
    options = {key: value for key, value in drawn.options.items() if key not in without}
    return quintic.Muon([*groups.values()], lr=0.05, adamw_lr=ADAMW_LR, comms=comms, **options)


@functools.cache
def meshes_of(world_size: int) -> dict[str, DeviceMesh]:
    """All meshes; all ranks must call it the first time."""
    found = {"all": DeviceMesh(DEVICE, torch.arange(world_size))}
    if world_size == 4:
        square = DeviceMesh(DEVICE, torch.arange(4).view(2, 2), mesh_dim_names=("columns", "rows"))
        found |= {"square": square, "rows": square["rows"], "columns": square["columns"]}
    return found


def check_seed(rank: int, world_size: int, seed: int) -> None:
    drawn = random_case(seed, world_size)
    one_params = {name: nn.Parameter(value) for name, value in initial(drawn).items()}
    one = optimizer_of(drawn, one_params, "none", without=("offload",))
    comms = "none" if drawn.meshes else drawn.layout
    meshes = meshes_of(world_size) if drawn.meshes else {}

    def laid_out(name, value):
        """This rank's copy of a tensor that all have."""
        if name not in drawn.meshes:
            return value.clone()
        placements = [Replicate() if dim is None else Shard(dim) for dim in drawn.cuts[name]]
        return distribute_tensor(value, meshes[drawn.meshes[name]], placements, src_data_rank=None).clone()

    params = {name: nn.Parameter(laid_out(name, value)) for name, value in initial(drawn).items()}
    optimizer = optimizer_of(drawn, params, comms)
    for step in range(STEPS):
        if step == drawn.changed_before:
            for group in (*one.param_groups, *optimizer.param_groups):
                group.update(drawn.changes)
        for name, shape in drawn.shapes.items():
            without = lacking(drawn, seed, name, step, world_size)
            is_missing = len(without) == world_size if drawn.averages else bool(without)
            if drawn.averages:
                whole = mean_gradient(name, shape, drawn.dtype, step, range(world_size), without)
                own = gradient(name, shape, drawn.dtype, step, rank)
            else:
                whole = gradient(name, shape, drawn.dtype, step)
                own = laid_out(name, whole)
            one_params[name].grad = None if is_missing else whole
            params[name].grad = None if rank in without else own
        if drawn.clipped is not None:
            norms = [quintic.clip_grad_norm_(found, 0.5, scope=drawn.clipped) for found in (one, optimizer)]
            assert torch.equal(*norms)
        if step == drawn.verified_before:
            report = quintic.verify(nn.ParameterDict(params), optimizer)
            assert report.ok, str(report)
        one.step()
        optimizer.step()
        for name, param in params.items():
            found = param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()
            is_plain = drawn.options["cautious"] or drawn.options["state_dtype"] or drawn.dtype == torch.bfloat16
            is_fused = name not in drawn.views and not (is_plain and drawn.dtype != torch.float64)
            rtol, atol = fused_adamw_tolerance(STEPS, ADAMW_LR) if is_fused else (0.0, 0.0)
            assert torch.allclose(found, one_params[name].detach(), rtol, atol), f"step {step}: {name}"
        if step == drawn.reloaded_after:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(drawn, params, comms)
            for group in optimizer.param_groups:
                group["state_dtype"] = one.param_groups[0]["state_dtype"]  # which is not loaded, but loaded into
            optimizer.load_state_dict(saved)
            for group in optimizer.param_groups:
                group["orthogonalizer"] = one.param_groups[0]["orthogonalizer"]  # which is not loaded


def check_seeds(rank: int, world_size: int, seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            check_seed(rank, world_size, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {random_case(seed, world_size)}") from error


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, SEEDS[::2]), pytest.param(2, SEEDS[1::2], marks=pytest.mark.slow), (3, SEEDS[::2]), (4, SEEDS[1::2])],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} seeds from {value[0]}",
)
def test_every_step_has_the_bits_of_one_device(world_size, seeds):
    for first in range(0, len(seeds), AT_A_TIME):
        some = seeds[first : first + AT_A_TIME]
        run(check_seeds, world_size, some, timeout=SECONDS * len(some))
