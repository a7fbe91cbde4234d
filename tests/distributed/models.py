"""A small model of awkward shapes, its gradients, and where PyTorch puts the pieces of its parameters.

Everything is on `harness.DEVICE`, with the same numbers on any: they are drawn, and averaged, on the CPU.
Nothing here asks Quintic where a piece lives. A twin of the model whose entries are their own positions is wrapped like
the model itself: what a rank then holds says which entries PyTorch gave it.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from harness import DEVICE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintic import Experts, Heads, Matrix, Rows, Rule, Split

__all__ = [
    "BANK_MULTIPLIERS",
    "Awkward",
    "Narrow",
    "gathered",
    "give_gradients",
    "gradient",
    "held_by",
    "local_of",
    "mean_gradient",
    "numbered",
    "positions",
    "rules",
]

# Rows of the linear layers: fewer than the ranks, one, primes, and a multiple of everything.
_WIDTHS = (8, 18, 3, 1, 7, 16, 8)

BANK_MULTIPLIERS = (1.0, 0.5, 2.0, 0.25, 1.5)


class _Weight(nn.Module):
    """A parameter in a module of its own, for what is no linear layer."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class _Attention(nn.Module):
    """Fused queries, keys and values, and an output projection."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(8 * unit, 24 * unit, bias=False)
        self.out = nn.Linear(12 * unit, 8 * unit, bias=False)


class _Experts(nn.Module):
    """Stacks of three experts, of which the second stores (in_features, out_features)."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(3, 6 * unit, 4 * unit))
        self.down = nn.Parameter(torch.empty(3, 6 * unit, 4 * unit))


class Awkward(nn.Module):
    """Parameters of every kind and of sizes that no number of ranks divides well; only its parameters are of use.

    Args:
        extras: also what FSDP2 cannot shard: a scalar, and a matrix stored column by column.
        dtype: of all parameters.
        unit: multiplies numbers of features. With 32 the pieces of up to four ranks have multiples of eight columns.
    """

    def __init__(self, extras: bool = False, dtype: torch.dtype = torch.float32, *, unit: int = 1) -> None:
        super().__init__()
        self.unit = unit
        self.embedding = nn.Embedding(13, 8 * unit)
        self.mlp = nn.ModuleList(nn.Linear(a * unit, b * unit) for a, b in itertools.pairwise(_WIDTHS))
        self.norm = nn.LayerNorm(16 * unit)
        self.attention = _Attention(unit)
        self.gated = nn.Linear(6 * unit, 12 * unit)
        self.stack = nn.ModuleList(nn.Linear(6 * unit, 10 * unit, bias=False) for _ in range(5))
        self.experts = _Experts(unit)
        self.bank = _Weight(10, 6 * unit)
        self.transposed = _Weight(5, 9 * unit)
        self.none = _Weight(0, 6 * unit)
        if extras:
            self.scale = nn.Parameter(torch.empty(()))
            self.columns = nn.Parameter(torch.empty(9, 5).mT)
        self.to(DEVICE, dtype)
        _initialise(self)


class Narrow(nn.Module):
    """Another model, with fewer parameters than `Awkward` and other shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.to(DEVICE, dtype)
        _initialise(self)


def rules(model: nn.Module, *, multipliers: bool = False) -> list[Rule]:
    """Return the rules for `param_groups`: every view, and matrices of one row or column too.

    Args:
        model: `Awkward` or `Narrow`.
        multipliers: give the bank's matrices learning rates of their own.
    """
    if not isinstance(model, Awkward):
        return []
    unit = model.unit
    options = {"lr_multipliers": BANK_MULTIPLIERS} if multipliers else {}
    found = [
        Rule("mlp.*.weight", "muon"),
        Rule("attention.qkv.weight", "muon", Split((12 * unit, 6 * unit, 6 * unit))),
        Rule("attention.out.weight", "muon", Heads(3, dim=1)),
        Rule("gated.weight", "muon", Split((2 * unit, 2 * unit, 2 * unit), groups=2)),
        Rule("experts.down", "muon", Experts(transposed=True)),
        Rule("bank.weight", "muon", Rows(2), options),
        Rule("transposed.weight", "muon", Matrix(transposed=True)),
        Rule("none.weight", "muon"),
    ]
    return [*found, Rule("columns", "muon")] if hasattr(model, "columns") else found


def numbered(model: nn.Module) -> nn.Module:
    """Fill every parameter with the positions of its entries, 0, 1, ... in row-major order; returns the model."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape))
    return model


def positions(model: nn.Module) -> dict[str, Tensor]:
    """Return, of a wrapped model that was `numbered` before, which entries of each parameter this rank holds."""
    return {name: local_of(param.detach()).long() for name, param in model.named_parameters()}


@functools.cache
def held_by(make: Callable[[], nn.Module], wrap: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Return the entries of each parameter that this rank holds; all ranks must call it.

    The first time only: to wrap a model takes longer than its steps, and where entries are does not change.

    Args:
        make: returns a model of float32, in which positions are exact.
        wrap: lays it out, in place.
    """
    twin = numbered(make())
    wrap(twin)
    return positions(twin)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(name: str, shape: Sequence[int], dtype: torch.dtype, step: int, rank: int | None = None) -> Tensor:
    """Return a whole gradient: the same on every rank, or with `rank` one of its own."""
    return _on_cpu(name, shape, dtype, step, rank).to(DEVICE)


def mean_gradient(
    name: str, shape: Sequence[int], dtype: torch.dtype, step: int, ranks: Iterable[int], without: Iterable[int] = ()
) -> Tensor:
    """Return the mean of the ranks' gradients: their sum in order in float32, or wider, divided and rounded to `dtype`.

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        dtype: of the gradients and of the mean.
        step: number of the step.
        ranks: whose gradients are averaged, in this order.
        without: ranks that have none, which counts as zeros.
    """
    ranks, without = list(ranks), set(without)
    total = torch.zeros(tuple(shape), dtype=torch.promote_types(dtype, torch.float32))
    for rank in ranks:
        total += _on_cpu(name, shape, dtype, step, rank).to(total.dtype) if rank not in without else torch.zeros(())
    # On the CPU: a GPU multiplies by the reciprocal, which rounds twice.
    return (total / len(ranks)).to(dtype).to(DEVICE)


def give_gradients(
    model: nn.Module, gradients: Mapping[str, Tensor | None], held: Mapping[str, Tensor] | None = None
) -> None:
    """Set `p.grad` of every parameter in the parameter's own layout, without communication.

    Args:
        model: wrapped or not.
        gradients: for every parameter its whole gradient, or None.
        held: from `positions`; None for a model of plain tensors.
    """
    for name, param in model.named_parameters():
        whole = gradients[name]
        if whole is None or held is None:
            param.grad = whole
            continue
        local = whole.flatten()[held[name]]
        if isinstance(param, DTensor):
            local = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        param.grad = local


def gathered(model: nn.Module, held: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, Tensor]:
    """Return the whole parameters, put together from what the ranks hold, on this rank's device.

    All ranks of the world must call it.

    Args:
        model: wrapped or not.
        held: from `positions`.
        ranks: those that hold this model; the others may hold another one.

    Raises:
        AssertionError: an entry is held by nobody, or copies of it differ.
    """
    params = dict(model.named_parameters())
    if not params:
        return {}
    local = {name: local_of(param.detach()) for name, param in params.items()}
    starts = dict(zip(params, itertools.accumulate((p.numel() for p in params.values()), initial=0), strict=False))
    # All parameters in one: pickling and indexing them one by one would take most of a test's time.
    mine = (
        torch.cat([held[name].flatten().cpu() + start for name, start in starts.items()]),
        torch.cat([value.flatten().cpu() for value in local.values()]),
    )
    everyone: list[tuple[Tensor, Tensor]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    flat = torch.zeros(sum(param.numel() for param in params.values()), dtype=mine[1].dtype)
    found = torch.zeros(flat.numel(), dtype=torch.bool)

    def name_at(place: Tensor) -> str:
        return next(name for name, start in reversed(starts.items()) if start <= place)

    for rank in ranks:
        places, values = everyone[rank]
        other = places[found[places] & (flat[places] != values)]
        assert len(other) == 0, f"{name_at(other[0])}: rank {rank} holds another copy"
        flat[places], found[places] = values, True
    missing = (~found).nonzero()
    assert len(missing) == 0, f"{name_at(missing[0])}: {len(missing)} entries from here on are held by nobody"
    wholes = flat.split([param.numel() for param in params.values()])
    return {
        name: whole.view(param.shape).to(local[name])
        for (name, param), whole in zip(params.items(), wholes, strict=True)
    }


def _initialise(model: nn.Module) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_random(param.shape, name) * 0.3)


def _on_cpu(name: str, shape: Sequence[int], dtype: torch.dtype, step: int, rank: int | None) -> Tensor:
    return _random(shape, f"{name} {step} {rank}").to(dtype)


def _random(shape: Sequence[int], label: str) -> Tensor:
    """Return float32 normal numbers that follow from the label alone."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(label.encode())))
