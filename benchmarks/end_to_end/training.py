"""A sharded Qwen3 on random tokens, its optimizers, and the times of its steps."""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import quintic
from benchmarks.common.ranks import Team
from benchmarks.common.results import spread
from benchmarks.common.timing import synchronize
from benchmarks.optimizer_step.contestants import ADAMW_LR, WEIGHT_DECAY, Weights, dion
from benchmarks.optimizer_step.measure import local

# Whole steps before the timed ones: the first builds plans, the others bring clocks and memory to where they stay.
WARMUP_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and what it is trained on."""

    width: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tokens: int
    """Tokens of a step, over all ranks."""
    length: int

    def __str__(self) -> str:
        return (
            f"Qwen3 of {self.layers} layers of width {self.width:,}, {self.heads} query and {self.key_value_heads} "
            f"key and value heads of {self.head_dim}, MLP of {self.hidden:,}, vocabulary {self.vocabulary:,}"
        )


SIZES = {
    # Qwen3-0.6B with a smaller vocabulary: 0.47B parameters.
    "0.47b": Size(
        width=1024,
        layers=28,
        hidden=3072,
        heads=16,
        key_value_heads=8,
        head_dim=128,
        vocabulary=32768,
        tokens=65536,
        length=2048,
    ),
    "tiny": Size(
        width=64,
        layers=2,
        hidden=128,
        heads=4,
        key_value_heads=2,
        head_dim=16,
        vocabulary=256,
        tokens=256,
        length=32,
    ),
}


def _torch_adamw(model: nn.Module, mesh: DeviceMesh) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)


def _quintic(model: nn.Module, mesh: DeviceMesh) -> Any:
    return quintic.Muon(quintic.param_groups(model))


def _dion(kind: str) -> Callable[[nn.Module, DeviceMesh], Any]:
    def build(model: nn.Module, mesh: DeviceMesh) -> Any:
        named = list(model.named_parameters())
        matrices = [param for name, param in named if ".layers." in name and param.ndim == 2]
        others = [param for name, param in named if not (".layers." in name and param.ndim == 2)]
        return dion(kind, Weights(matrices, others), mesh.device_type == "cuda", distributed_mesh=mesh)

    return build


CONTESTANTS: dict[str, Callable[[nn.Module, DeviceMesh], Any]] = {
    "torch-adamw": _torch_adamw,
    "quintic": _quintic,
    "dion-muon": _dion("Muon"),
    "dion-normuon": _dion("NorMuon"),
}
DEFAULT = ("torch-adamw", "quintic", "dion-muon")


def new_model(size: Size, device: torch.device) -> nn.Module:
    """Return the model with bfloat16 weights, the same on all ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config)
    for param in model.parameters():  # the buffers of the rotary embedding stay what they are
        param.data = param.data.bfloat16()
    return model.train()


def backend_of(team: Team) -> str:
    """Return the compiler of the blocks; on CPUs, where nothing is compared, one that needs no C++ compiler."""
    return "inductor" if team.cuda else "aot_eager"


class Training:
    """A model, its optimizer and its data on this rank. All ranks must make it.

    Args:
        size: of the model.
        build: makes the optimizer of a sharded model.
        team: this process among the others.
    """

    def __init__(self, size: Size, build: Callable[[nn.Module, DeviceMesh], Any], team: Team) -> None:
        self.team = team
        self.model = new_model(size, team.device)
        mesh = init_device_mesh(team.device.type, (dist.get_world_size(),))
        for block in self.model.model.layers:
            # The forward pass alone: the hooks of FSDP2 stay outside.
            block.forward = torch.compile(block.forward, backend=backend_of(team))
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = build(self.model, mesh)
        rows, rest = divmod(size.tokens // size.length, dist.get_world_size())
        if rest:
            raise ValueError(f"{size.tokens // size.length} rows of tokens cannot be divided among the ranks")
        self.shape, self.vocabulary = (rows, size.length), size.vocabulary
        self.generator = torch.Generator(team.device).manual_seed(1 + dist.get_rank())

    def measure(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return times and losses. All ranks must call it."""
        self.forward_backward()  # compiles the model
        self.check_gradients()
        self.optimizer.zero_grad()
        begun = self.wait()
        losses = [self.step()]
        first = self.wait() - begun
        for _ in range(WARMUP_STEPS):
            losses.append(self.step())
        windows: list[float] = []
        singles: list[float] = []
        tails: list[float] = []
        for _ in range(options.windows):
            starts, ends = [], []
            begun = self.wait()
            for _ in range(options.steps):
                starts.append(self.mark())
                loss = self.forward_backward()
                ends.append(self.mark())
                self.optimizer.step()
                self.optimizer.zero_grad()
            starts.append(self.mark())
            windows.append(1000 * (self.wait() - begun) / options.steps)
            singles += map(elapsed, starts[:-1], starts[1:])
            tails += map(elapsed, ends, starts[1:])
            losses.append(loss)
        self.forward_backward()
        norm = self.check_gradients()
        told = [float(loss) for loss in losses]
        if not all(map(math.isfinite, told)):
            raise ArithmeticError(f"losses that are no numbers: {told}")
        return {
            "step_ms": spread(self.team.slowest(windows)),
            "single_ms": spread(self.team.slowest(singles)),
            "optimizer_ms": spread(self.team.slowest(tails)),
            "first_step_s": max(self.team.from_all(first)),
            "gradient_norm": norm,
            "losses": told,
        }

    def step(self) -> Tensor:
        """Make a whole step; return its loss on this rank, still on the device."""
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def forward_backward(self) -> Tensor:
        """Return the loss of new tokens on this rank, after its backward pass."""
        tokens = torch.randint(self.vocabulary, self.shape, generator=self.generator, device=self.team.device)
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def check_gradients(self) -> float:
        """Return the norm of all gradients. All ranks must call it.

        Raises:
            ArithmeticError: a parameter has none, or one of zeros, or one that is no number: with zeros everything is
                faster than it is in training.
        """
        of_rank = {
            name: 0.0 if param.grad is None else float(local(param.grad).double().square().sum())
            for name, param in self.model.named_parameters()
        }
        of_ranks = self.team.from_all(of_rank)
        squares = {name: sum(one[name] for one in of_ranks) for name in of_rank}
        wrong = [name for name, square in squares.items() if not (0 < square < math.inf)]
        if wrong:
            raise ArithmeticError(f"{len(wrong)} parameters without a proper gradient, such as {wrong[0]}")
        return math.sqrt(sum(squares.values()))

    def mark(self) -> Any:
        """Return an event in the device's queue, on a CPU the time."""
        if not self.team.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> float:
        """Wait for the devices of all ranks; return the time. All ranks must call it."""
        synchronize(self.team.cuda)
        dist.barrier(group=self.team.control)
        return time.perf_counter()


def elapsed(start: Any, end: Any) -> float:
    """Return the milliseconds between two marks that the device has passed."""
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)
