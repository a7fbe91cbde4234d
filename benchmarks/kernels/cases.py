"""The cases to measure: inputs, calls, exact results, and the bytes and operations that each one needs."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.optimizer_cases import Case, Where, optimizer_passes
from quintic.kernels.attention.attention import AttentionName, attention, document_mask, obstacle_to_attention
from quintic.kernels.linear.fp8 import fp8_linear
from quintic.kernels.linear.fp8_quantize import LARGEST, unit_of
from quintic.kernels.linear.mlp import mlp_relu2
from quintic.kernels.linear.transpose import transpose_add_, transpose_copy_
from quintic.kernels.loss.loss import Fp8Scales, softcap_cross_entropy

SOFTCAP = 15.0
E4M3 = torch.float8_e4m3fn
BOS = 0


def both_ways(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of (inputs..., gradient) that returns the output and the gradients of all inputs."""

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        *leaves, gradient = inputs
        out = function(*leaves)
        learning = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        return out.detach(), *torch.autograd.grad(out, learning, gradient)

    return run


def exactly(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return `both_ways(function)` computed in float64."""

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        return both_ways(function)(
            *(
                x.detach().double().requires_grad_(x.requires_grad)
                if isinstance(x, Tensor) and x.is_floating_point()
                else x
                for x in inputs
            )
        )

    return run


# ---------------------------------------------------------------------------------------------------------- subjects


def copies(where: Where) -> Iterator[Case]:
    """The bandwidth that others are measured by."""
    count = where.sizes.copied

    def make() -> tuple[Tensor, Tensor]:
        return tuple(torch.empty(count, dtype=torch.uint8, device=where.device).random_() for _ in range(2))

    def run(target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    yield Case(subject="copy", name="copy_", make=make, run=run, moved=2 * count)


def losses(where: Where) -> Iterator[Case]:
    """Soft-capped cross entropy with the output head, forward and backward."""
    tokens, width, vocab = where.sizes.tokens, where.sizes.width, where.sizes.vocab

    def make() -> tuple[Tensor, ...]:
        x = where.normal(tokens, width, learns=True)
        weight = where.normal(vocab, width, scale=width**-0.5, learns=True)
        return x, weight, torch.randint(vocab, (tokens,), device=where.device), torch.ones((), device=where.device)

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, weight).float()
        return F.cross_entropy(SOFTCAP * torch.tanh(logits / SOFTCAP), targets)

    def exact(x: Tensor, weight: Tensor, targets: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        """The same in float64, some tokens at a time: all logits at once would be several copies of 7 GB."""
        wide, wide_weight = (leaf.detach().double().requires_grad_() for leaf in (x, weight))
        total = torch.zeros((), dtype=torch.float64, device=where.device)
        for some, some_targets in zip(wide.split(2048), targets.split(2048), strict=True):
            logits = SOFTCAP * torch.tanh(some @ wide_weight.T / SOFTCAP)
            part = F.cross_entropy(logits, some_targets, reduction="sum") / tokens
            part.backward()
            total += part.detach()
        return total, wide.grad, wide_weight.grad

    def make_scaled() -> tuple[Any, ...]:
        x, weight, targets, gradient = make()
        grad_scale = torch.full((), 1 / LARGEST[torch.float8_e5m2], device=where.device)
        return x, weight, targets, Fp8Scales(unit_of(x, E4M3), unit_of(weight, E4M3), grad_scale), gradient

    ours = functools.partial(softcap_cross_entropy, softcap=SOFTCAP)
    case = functools.partial(Case, subject="loss", flops=6 * tokens * width * vocab)
    yield case(name="softcap_cross_entropy", make=make, run=both_ways(ours), exact=exact)
    yield case(
        name="softcap_cross_entropy, float8",
        make=make_scaled,
        run=both_ways(lambda x, weight, targets, scales: ours(x, weight, targets, fp8=scales)),
        exact=lambda x, weight, targets, _, gradient: exact(x, weight, targets, gradient),
    )
    yield case(name="PyTorch, compiled", make=make, exact=exact, run=both_ways(where.compiled(plain)))


def products(where: Where) -> Iterator[Case]:
    """The MLP with its activation."""
    tokens, width, hidden = where.sizes.tokens, where.sizes.width, where.sizes.hidden

    def make() -> tuple[Tensor, ...]:
        return (
            where.normal(tokens, width, learns=True),
            where.normal(hidden, width, scale=width**-0.5, learns=True),
            where.normal(width, hidden, scale=hidden**-0.5, learns=True),
            where.normal(tokens, width, scale=1e-3),
        )

    def plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.linear(x, up).relu().square(), down)

    flops = 12 * tokens * width * hidden
    case = functools.partial(Case, subject="linear", make=make, flops=flops, exact=exactly(plain))
    yield case(name="mlp_relu2", run=both_ways(mlp_relu2))
    yield case(name="mlp_relu2, float8 forward", run=both_ways(functools.partial(mlp_relu2, fp8=True)))
    both = functools.partial(mlp_relu2, fp8=True, fp8_backward=True)
    yield case(name="mlp_relu2, float8 forward and backward", run=both_ways(both))
    yield case(name="MLP in PyTorch, compiled", run=both_ways(where.compiled(plain)))


def float8(where: Where) -> Iterator[Case]:
    """A linear layer in 8 bits beside bfloat16."""
    tokens, width, hidden = where.sizes.tokens, where.sizes.width, where.sizes.hidden

    def make() -> tuple[Tensor, ...]:
        return (
            where.normal(tokens, width, learns=True),
            where.normal(width, hidden, scale=width**-0.5, learns=True),
            where.normal(tokens, hidden, scale=1e-3),
        )

    def make_scaled() -> tuple[Any, ...]:
        x, weight, gradient = make()
        scales = {
            "x_scale": unit_of(x, E4M3),
            "weight_scale": unit_of(weight, E4M3),
            "grad_scale": unit_of(gradient, torch.float8_e5m2),
        }
        return x, weight, scales, gradient

    exact = exactly(torch.matmul)
    case = functools.partial(Case, subject="fp8", flops=6 * tokens * width * hidden)
    yield case(
        name="fp8_linear",
        make=make_scaled,
        run=both_ways(lambda x, weight, scales: fp8_linear(x, weight, **scales)),
        exact=lambda x, weight, _, gradient: exact(x, weight, gradient),
    )
    yield case(name="F.linear, bfloat16", make=make, run=both_ways(lambda x, w: F.linear(x, w.T)), exact=exact)


def transposes(where: Where) -> Iterator[Case]:
    """Embedding to head and back."""
    vocab, width = where.sizes.vocab, where.sizes.width
    bf16, fp32 = torch.bfloat16, torch.float32

    def plain_copy(out: Tensor, x: Tensor) -> None:
        out.copy_(x.T)

    def plain_add(out: Tensor, x: Tensor) -> None:
        out.add_(x.T)

    for (m, n), dtype, out_dtype in [
        ((vocab, width), bf16, bf16),
        ((width, vocab), bf16, bf16),
        ((vocab, width), bf16, E4M3),
        ((width, vocab), fp32, fp32),
    ]:

        def make(
            m: int = m, n: int = n, dtype: torch.dtype = dtype, out_dtype: torch.dtype = out_dtype
        ) -> tuple[Any, ...]:
            return where.normal(n, m).to(out_dtype), where.normal(m, n, dtype=dtype)

        names = [str(each).removeprefix("torch.") for each in (dtype, out_dtype)]
        what = f"{m} x {n}, {' to '.join(dict.fromkeys(names))}"
        sides = {"copy": (transpose_copy_, plain_copy), "add": (transpose_add_, plain_add)}
        for side, (ours, plain) in sides.items():
            if side == "add" and out_dtype == E4M3:
                continue
            moved = m * n * (dtype.itemsize + out_dtype.itemsize * (2 if side == "add" else 1))
            case = functools.partial(Case, subject="transpose", make=make, moved=moved)
            yield case(name=f"transpose_{side}_, {what}", run=ours)
            yield case(name=f"PyTorch {side}, {what}", run=plain)


def attentions(where: Where) -> Iterator[Case]:
    """Every implementation of attention that runs here, with documents and a window of a quarter of the row."""
    sizes = where.sizes
    window = sizes.length // 4

    def documents() -> tuple[Tensor, Tensor, int]:
        """Return tokens, offsets of documents, and how many pairs of positions see each other."""
        tokens = (torch.rand(sizes.rows, sizes.length) > 4 / sizes.length).long()
        tokens[:, 0] = BOS
        starts = torch.cat([(tokens.flatten() == BOS).nonzero().flatten(), torch.tensor([tokens.numel()])])
        lengths = starts.diff()
        ramp = torch.arange(1, sizes.length + 1).clamp(max=window).cumsum(0)
        return tokens.to(where.device), starts.int().to(where.device), int(ramp[lengths - 1].sum())

    torch.manual_seed(0)
    shared = documents()

    def mask_for(name: AttentionName, dtype: torch.dtype) -> Any:
        starts = None if name in ("sdpa", "flex") else shared[1]
        return document_mask(
            shared[0], bos_id=BOS, windows=[window], implementation=name, dtype=dtype, document_starts=starts
        )

    for head_dim, name in itertools.product(sizes.head_dims, get_args(AttentionName)):
        if obstacle_to_attention(name, where.device, torch.bfloat16) is not None:
            continue
        shape = sizes.rows, sizes.length, sizes.heads, head_dim

        def make(shape: tuple[int, ...] = shape) -> tuple[Tensor, ...]:
            return (*(where.normal(*shape, learns=True) for _ in range(3)), where.normal(*shape))

        run = both_ways(functools.partial(attention, mask=mask_for(name, torch.bfloat16), window=window))
        exact_mask = mask_for("sdpa", torch.float64)
        # Two products forward, five backward.
        flops = 7 * 2 * head_dim * sizes.heads * shared[2]
        yield Case(
            subject="attention",
            name=f"{name}, head of {head_dim}",
            make=make,
            run=run,
            exact=exactly(functools.partial(attention, mask=exact_mask, window=window)),
            flops=flops,
        )


SUBJECTS: dict[str, Callable[[Where], Iterator[Case]]] = {
    "copy": copies,
    "optimizer": optimizer_passes,
    "loss": losses,
    "linear": products,
    "fp8": float8,
    "transpose": transposes,
    "attention": attentions,
}
