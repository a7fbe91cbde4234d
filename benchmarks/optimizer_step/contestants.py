"""The sets of weights, and the optimizers that update them.

A library that is not installed, or refuses its options, raises when its optimizer is built: the row tells its error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from quintic.optim.rules.names import RuleName

# The same for every contestant, so that all have the same work to do.
LR, ADAMW_LR, WEIGHT_DECAY = 0.001, 0.0003, 0.1

# Logarithms of `max_workspace_bytes`: from less than two large matrices need to the default.
WORKSPACES = range(26, 32)


@dataclass(frozen=True, kw_only=True)
class WeightSet:
    """Shapes of a model's parameters.

    Attributes:
        matrices: (count, rows, columns), in the order of the parameters.
        others: (count, *shape) of what AdamW updates.
        dtypes: those measured by default.
    """

    matrices: tuple[tuple[int, int, int], ...]
    others: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ("bf16", "fp32")


SETS = {
    "gpt124m": WeightSet(matrices=((40, 768, 768), (22, 3072, 768)), others=((2, 50304, 768),)),
    "qwen1.7b": WeightSet(
        matrices=((56, 2048, 2048), (56, 1024, 2048), (56, 6144, 2048), (28, 2048, 6144)), others=((1, 151936, 2048),)
    ),
    # 60 small layers: what counts is the time that Python needs for 500 parameters.
    "params500": WeightSet(
        matrices=((240, 128, 128), (60, 512, 128), (60, 128, 512)),
        others=((2, 4096, 128), (138, 128)),
        dtypes=("bf16",),
    ),
    "tiny": WeightSet(matrices=((4, 64, 64), (2, 128, 64)), others=((1, 512, 64), (3, 64)), dtypes=("fp32",)),
}


def describe(shapes: WeightSet) -> str:
    """Return the shapes of a set in words."""
    parts = [f"{count} of {'x'.join(str(n) for n in shape)}" for count, *shape in [*shapes.matrices, *shapes.others]]
    return ", ".join(parts)


@dataclass
class Weights:
    """The parameters to be updated, each with its gradient."""

    matrices: list[Any]
    others: list[Any]

    @property
    def all(self) -> list[Any]:
        """Return matrices and the rest."""
        return [*self.matrices, *self.others]


# -- contestants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to update the weights.

    Attributes:
        name: how it is called on the command line and in the tables.
        build: makes the optimizers, stepped one after the other; an ImportError says what is missing.
        family: contestants that share the caches of the compilers.
        sets, dtypes: where it takes part by default.
        preload: modules worth importing while the contestant before it is measured.
    """

    name: str
    build: Callable[[Weights, bool], list[Any]]
    family: str
    sets: tuple[str, ...] = tuple(SETS)
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    preload: tuple[str, ...] = ("torch",)


def quintic_muon(weights: Weights, **options: Any) -> Any:
    """Return Quintic's optimizer of some weights, with further options."""
    import quintic

    groups = [
        {"params": weights.matrices, "algorithm": "muon"},
        {"params": weights.others, "algorithm": "adamw"},
    ]
    decays = {"weight_decay": WEIGHT_DECAY, "adamw_weight_decay": WEIGHT_DECAY}
    return quintic.Muon(groups, lr=LR, adamw_lr=ADAMW_LR, **decays, **options)


def dion(kind: str, weights: Weights, cuda: bool, **options: Any) -> Any:
    """Return an optimizer of the library dion."""
    import dion

    groups = [{"params": weights.matrices}, {"params": weights.others, "algorithm": "adamw", "lr": ADAMW_LR}]
    options |= {"lr": LR, "weight_decay": WEIGHT_DECAY, "nesterov": True, "use_triton": cuda}
    return getattr(dion, kind)(groups, **options)


def _quintic(**options: Any) -> Callable[[Weights, bool], list[Any]]:
    return lambda weights, cuda: [quintic_muon(weights, **options)]


def _fused_adamw(params: list[Any], cuda: bool) -> Any:
    import torch

    # `capturable` allows its CUDA graph, and changes nothing else of the fused kernel.
    return torch.optim.AdamW(
        params, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True, capturable=cuda
    )


def _torch_muon(weights: Weights, cuda: bool) -> list[Any]:
    import torch

    muon = torch.optim.Muon(weights.matrices, lr=LR, weight_decay=WEIGHT_DECAY, momentum=0.95, nesterov=True)
    return [muon, _fused_adamw(weights.others, cuda)]


def _keller_jordan(weights: Weights, cuda: bool) -> list[Any]:
    from muon import SingleDeviceMuon

    muon = SingleDeviceMuon(weights.matrices, lr=LR, weight_decay=WEIGHT_DECAY, momentum=0.95)
    return [muon, _fused_adamw(weights.others, cuda)]


def _dion(kind: str) -> Callable[[Weights, bool], list[Any]]:
    return lambda weights, cuda: [dion(kind, weights, cuda)]


def _gram_newton_schulz(use_kernels: bool) -> Callable[[Weights, bool], list[Any]]:
    def build(weights: Weights, cuda: bool) -> list[Any]:
        from gram_newton_schulz import Muon

        muon = Muon(weights.matrices, lr=LR, weight_decay=WEIGHT_DECAY, momentum=0.95, ns_use_kernels=use_kernels)
        return [muon, _fused_adamw(weights.others, cuda)]

    return build


def nanochat(weights: Weights, cuda: bool) -> list[Any]:
    from nanochat.optim import MuonAdamW

    adamw = {"kind": "adamw", "lr": ADAMW_LR, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": WEIGHT_DECAY}
    muon = {"kind": "muon", "lr": LR, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": WEIGHT_DECAY}
    groups = [{**adamw, "params": weights.others}]
    for shape in sorted({param.shape for param in weights.matrices}):  # it stacks a group: one shape in each
        groups.append({**muon, "params": [param for param in weights.matrices if param.shape == shape]})
    return [MuonAdamW(groups)]


COMPILED = ("torch", "torch._dynamo", "torch._inductor.compile_fx")
_LARGE = ("gpt124m", "qwen1.7b", "tiny")
_NOT_LARGEST = ("gpt124m", "params500", "tiny")

# In the order in which they run: what is compared first comes first, in case that the time ends.
CONTESTANTS = (
    Contestant(name="quintic", build=_quintic(orthogonalizer="auto"), family="quintic"),
    Contestant(name="torch-adamw", build=lambda weights, cuda: [_fused_adamw(weights.all, cuda)], family="torch"),
    Contestant(name="torch-muon", build=_torch_muon, family="torch"),
    Contestant(
        name="quintic-mantissa",
        build=_quintic(orthogonalizer="auto", master="mantissa"),
        family="quintic",
        dtypes=("bf16",),
    ),
    Contestant(name="quintic-bf16-state", build=_quintic(orthogonalizer="auto", state_dtype="bf16"), family="quintic"),
    Contestant(name="quintic-neuron", build=_quintic(orthogonalizer="auto", normalize="neuron"), family="quintic"),
    Contestant(name="quintic-polar-express", build=_quintic(orthogonalizer="polar_express"), family="quintic"),
    Contestant(name="quintic-gram", build=_quintic(orthogonalizer="gram"), family="quintic"),
    Contestant(name="keller-jordan", build=_keller_jordan, family="torch"),
    Contestant(name="nanochat", build=nanochat, family="nanochat", preload=COMPILED),
    Contestant(name="dion-muon", build=_dion("Muon"), family="dion", sets=_LARGE, preload=COMPILED),
    Contestant(name="dion-normuon", build=_dion("NorMuon"), family="dion", sets=_LARGE, preload=COMPILED),
    Contestant(
        name="gram-ns-kernels", build=_gram_newton_schulz(True), family="gram-ns", sets=_LARGE, preload=COMPILED
    ),
    Contestant(name="gram-ns-torch", build=_gram_newton_schulz(False), family="gram-ns", sets=_LARGE, preload=COMPILED),
    Contestant(
        name="quintic-cautious",
        build=_quintic(orthogonalizer="auto", cautious=True),
        family="quintic",
        sets=_NOT_LARGEST,
    ),
    Contestant(
        name="quintic-fp32-master",
        build=_quintic(orthogonalizer="auto", master="fp32"),
        family="quintic",
        sets=_NOT_LARGEST,
        dtypes=("bf16",),
    ),
    Contestant(
        name="quintic-plain-kernels",
        build=_quintic(orthogonalizer="auto", kernels="torch"),
        family="quintic",
        sets=_NOT_LARGEST,
    ),
    # Measured with `--only rule-` alone.
    *(
        Contestant(
            name=f"rule-{name}",
            build=_quintic(orthogonalizer="auto", update_rule=name),
            family="quintic",
            sets=(),
        )
        for name in get_args(RuleName)
    ),
    # The step by its temporary memory; measured with `--only workspace-` alone.
    *(
        Contestant(
            name=f"workspace-{2 ** (power - 20)}MiB",
            build=_quintic(orthogonalizer="auto", max_workspace_bytes=2**power),
            family="quintic",
            sets=(),
        )
        for power in WORKSPACES
    ),
)
