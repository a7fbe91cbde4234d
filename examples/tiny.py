"""Shared by the examples, replaced by your own: a small GPT, data it can learn, the start of a process."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 64, 32, 16


class Attention(nn.Module):
    """Causal self-attention with heads of 16 channels; as many heads as the projections of this rank have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, 16)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """(rows, LENGTH) tokens and their successors -> mean cross-entropy, in nats per token."""

    def __init__(self, mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mlp()) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), y.flatten())


def batch(step: int, device: torch.device | str = "cpu", part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens and their successors, (BATCH / parts, LENGTH) each: every `parts`-th row of the step's batch.

    Each token is 5 times the one before it plus 3, modulo the vocabulary, except where chance decides (one in ten).
    """
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    chance = torch.rand(BATCH, LENGTH + 1, generator=generator) < 0.1
    for i in range(LENGTH):
        rows[:, i + 1] = torch.where(chance[:, i], rows[:, i + 1], (5 * rows[:, i] + 3) % VOCABULARY)
    rows = rows[part::parts].to(device)
    return rows[:, :-1], rows[:, 1:]


def start() -> torch.device:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs), or be alone; return this one's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of all ranks' losses; all ranks must call it."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def tell(losses: list[float]) -> list[float]:
    """Print the first and the last loss, on rank 0; return `losses`."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    return losses


def finish() -> None:
    """Leave the other processes; all ranks must call it."""
    dist.destroy_process_group()
    # Until then a thread of gloo may hold a tensor; where Python ends first, it aborts (pytorch/pytorch#179291).
    time.sleep(0.1)
