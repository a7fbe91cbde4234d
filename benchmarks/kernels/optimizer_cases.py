"""`Case`, and the cases of the optimizer's passes over memory."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintic.optim.polar.orthogonalize import _normalized
from quintic.optim.rules.device import HYPERPARAMETERS
from quintic.optim.rules.update import adamw_, decay_and_step_, momentum_


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases."""

    tokens: int
    width: int
    hidden: int
    vocab: int
    matrices: tuple[tuple[int, int, int], ...]
    """(count, rows, columns) of weights that Muon updates; AdamW has two of (vocab, width)."""
    rows: int
    length: int
    heads: int
    head_dims: tuple[int, ...]
    copied: int
    """Bytes of the copy that gives the bandwidth."""


FULL = Sizes(16384, 768, 3072, 50304, ((40, 768, 768), (22, 3072, 768)), 8, 2048, 12, (64, 128), 2**30)
TINY = Sizes(32, 32, 64, 112, ((2, 32, 32), (1, 64, 32)), 2, 32, 2, (16,), 2**12)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the result."""

    subject: str
    name: str
    make: Callable[[], tuple[Any, ...]]
    """Returns one set of inputs, random ones."""
    run: Callable[..., Sequence[Tensor] | None]
    """The timed function; returns the tensors to compare with those of `exact`, if there is one."""
    exact: Callable[..., Sequence[Tensor]] | None = None
    moved: int = 0
    """Bytes that must be read and written."""
    flops: int = 0


@dataclass(frozen=True)
class Where:
    """The machine, and how large things are on it."""

    device: torch.device
    sizes: Sizes

    @property
    def cuda(self) -> bool:
        """Return whether kernels run here."""
        return self.device.type == "cuda"

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, learns: bool = False
    ) -> Tensor:
        """Return normal values."""
        return (torch.randn(shape, device=self.device) * scale).to(dtype).requires_grad_(learns)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as `torch.compile` makes it; on the CPU, where nothing is compared, as it is."""
        return torch.compile(function, dynamic=False) if self.cuda else function


@dataclass
class Bucket:
    """Matrices of one shape, bfloat16 with float32 momenta, and what their passes read and write."""

    gradients: list[Tensor]
    momenta: list[Tensor]
    weights: list[Tensor]
    directions: Tensor
    updates: Tensor
    factors: Tensor
    hyperparameters: Tensor
    addresses: Tensor


HYPER = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
INDEX = {name: index for index, name in enumerate(HYPERPARAMETERS)}


def optimizer_passes(where: Where) -> Iterator[Case]:
    """The optimizer's passes over memory, on the weights of a GPT of 124M parameters."""
    shapes = where.sizes.matrices
    numel = sum(count * rows * columns for count, rows, columns in shapes)
    values = torch.tensor([HYPER[name] for name in HYPERPARAMETERS], dtype=torch.float64)

    def make() -> tuple[list[Bucket]]:
        buckets = []
        for count, *shape in shapes:
            gradients, weights = ([where.normal(*shape) for _ in range(count)] for _ in "gw")
            momenta = [where.normal(*shape, dtype=torch.float32) for _ in range(count)]
            pointers = [[x.data_ptr() for x in found] for found in (gradients, momenta, weights, weights)]
            buckets.append(
                Bucket(
                    gradients,
                    momenta,
                    weights,
                    where.normal(count, *shape),
                    where.normal(count, *shape),
                    torch.ones(count, 1, 1, device=where.device),
                    values.to(where.device),
                    torch.tensor(pointers).to(where.device),
                )
            )
        return (buckets,)

    for kernels in ("triton", "torch") if where.cuda else ("torch",):
        case = functools.partial(Case, subject="optimizer", make=make)
        # Gradient, momentum twice, direction; weight twice, update; matrix twice, result.
        run = triton_momentum if kernels == "triton" else torch_momentum
        yield case(name=f"momentum, {kernels}", run=run, moved=numel * (2 + 8 + 2))
        run = triton_apply if kernels == "triton" else torch_apply
        yield case(name=f"weights, {kernels}", run=run, moved=numel * (4 + 2))
        run = functools.partial(normalize, uses_kernels=kernels == "triton")
        yield case(name=f"normalisation, {kernels}", run=run, moved=numel * (4 + 2))
    yield from adamw_passes(where)


def layout_of(bucket: Bucket) -> Any:
    from quintic.kernels.update.matrix_layout import MatrixLayout

    rows, columns = bucket.weights[0].shape
    return MatrixLayout(1, rows, columns, rows * columns, columns, 1)


def triton_momentum(buckets: list[Bucket]) -> None:
    from quintic.kernels.update.matrix_update import momentum_directions_

    for bucket in buckets:
        momentum_directions_(
            bucket.addresses[:2], bucket.directions, bucket.hyperparameters, layout_of(bucket),
            gradient_dtype=torch.bfloat16, mu_index=INDEX["momentum"], nesterov=True, apply_mask=None, aligned=True,
        )  # fmt: skip


def torch_momentum(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        directions = momentum_(bucket.momenta, bucket.gradients, mu=HYPER["momentum"], nesterov=True)
        torch.stack(directions).to(torch.bfloat16)


def triton_apply(buckets: list[Bucket]) -> None:
    from quintic.kernels.update.matrix_update import apply_updates_

    for bucket in buckets:
        apply_updates_(
            bucket.addresses[2:], bucket.updates, bucket.factors[None], bucket.hyperparameters, layout_of(bucket),
            weight_dtype=torch.bfloat16, master_dtype=None, lr_index=INDEX["lr"],
            weight_decay_index=INDEX["weight_decay"], cautious=False, squared_lr_decay=False,
            apply_mask=None, aligned=True,
        )  # fmt: skip


def torch_apply(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        count = len(bucket.weights)
        decay_and_step_(
            bucket.weights, [None] * count, list(bucket.updates), [1.0] * count,
            lr=HYPER["lr"], weight_decay=HYPER["weight_decay"], cautious=False,
        )  # fmt: skip


def normalize(buckets: list[Bucket], uses_kernels: bool) -> None:
    for bucket in buckets:
        _normalized(bucket.directions, 128.0, torch.bfloat16, uses_kernels=uses_kernels)


def adamw_passes(where: Where) -> Iterator[Case]:
    """AdamW on embedding and head, bfloat16 with float32 moments."""
    shape = where.sizes.vocab, where.sizes.width
    values = torch.tensor([HYPER[name] for name in HYPERPARAMETERS], dtype=torch.float64)

    def make() -> tuple[Any, ...]:
        gradients, weights = ([where.normal(*shape) for _ in range(2)] for _ in "gw")
        firsts, seconds = ([where.normal(*shape, dtype=torch.float32).abs_() for _ in range(2)] for _ in "mv")
        return gradients, firsts, seconds, weights, values.to(where.device)

    def in_torch(gradients: Any, firsts: Any, seconds: Any, weights: Any, _: Tensor) -> None:
        for gradient, first, second, weight in zip(gradients, firsts, seconds, weights, strict=True):
            adamw_(
                weight, None, gradient, first, second, torch.ones((), device=where.device), lr=HYPER["lr"],
                betas=(HYPER["beta1"], HYPER["beta2"]), eps=HYPER["eps"], weight_decay=0.1, cautious=False,
            )  # fmt: skip

    def tables(*tensors: list[Tensor]) -> tuple[Any, ...]:
        from quintic.kernels.update.adamw import adamw_programs

        numels = [x.numel() for x in tensors[0]]
        divided = adamw_programs(numels)
        places = {name: getattr(divided, name).to(where.device) for name in ("tensor_of_program", "tile_of_program")}
        addresses = torch.tensor([[x.data_ptr() for x in found] for found in (*tensors, tensors[-1])])
        steps = [torch.full((), 10.0, device=where.device) for _ in numels]
        counts = torch.tensor([step.data_ptr() for step in steps])
        found = (addresses, counts, torch.tensor(numels))
        return (*(table.to(where.device) for table in found), replace(divided, **places), steps)

    def make_with_tables() -> tuple[Any, ...]:
        *tensors, hyperparameters = make()
        *made, steps = tables(*tensors)
        return (*made, hyperparameters, (tensors, steps))

    def in_triton(addresses: Tensor, steps: Tensor, numels: Tensor, programs: Any, hyper: Tensor, _: Any) -> None:
        from quintic.kernels.update.adamw import adamw_tensors_

        adamw_tensors_(
            addresses, steps, numels, programs, hyper, weight_dtype=torch.bfloat16,
            gradient_dtype=torch.bfloat16, master_dtype=None,
            indices=tuple(INDEX[name] for name in ("lr", "weight_decay", "beta1", "beta2", "eps")),
            cautious=False, squared_lr_decay=False, apply_mask=None, aligned=True,
        )  # fmt: skip

    # Gradient, both moments twice, weight twice.
    moved = 2 * shape[0] * shape[1] * (2 + 16 + 4)
    if where.cuda:
        yield Case(subject="optimizer", name="AdamW, triton", make=make_with_tables, run=in_triton, moved=moved)
    yield Case(subject="optimizer", name="AdamW, torch", make=make, run=in_torch, moved=moved)
