"""Training runs that need no package but PyTorch and NumPy: the recipe of `quintic train` on words of Python's source.

What `quintic train` adds (tokenizers, shards, checkpoints, records) is left out; model, optimizer and schedule are its
own. Runs of one seed see the same batches, whatever else differs.
"""

import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.attention.attention import choose_attention, needs_document_starts
from quintic.model.fp8 import Fp8Recipe
from quintic.model.gpt import GPT
from quintic.train.config import Config, ModelConfig, RunConfig, ScheduleConfig
from quintic.train.recipe import apply_schedule, build_model, build_optimizer, model_config

BOS = 0
_WORDS = re.compile(r" ?\w+|\s+|[^\w\s]")
_HELD_BACK = 0.05


def word_tokens(vocab_size: int, max_tokens: int) -> Tensor:
    """Return the source text of this Python's library as words: a document per file, the most frequent words as ids.

    Token 0 starts a document, 1 stands for all rarer words.

    Args:
        vocab_size: tokens.
        max_tokens: end after this many.

    Returns:
        (tokens,) int64 on the CPU, the same on every machine with the same Python.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    words: list[str | None] = []
    for path in files:
        words.append(None)
        words += _WORDS.findall(path.read_text(encoding="utf-8", errors="ignore"))
        if len(words) >= max_tokens:
            break
    words = words[:max_tokens]
    counts = Counter(word for word in words if word is not None)
    ids: dict[str | None, int] = {word: 2 + rank for rank, (word, _) in enumerate(counts.most_common(vocab_size - 2))}
    ids[None] = BOS
    return torch.tensor([ids.get(word, 1) for word in words])


class Task(NamedTuple):
    """What the runs of a comparison have in common."""

    tokens: Tensor
    vocab_size: int
    depth: int
    width: int
    """A multiple of `head_dim`."""
    head_dim: int
    seq_len: int
    rows: int
    """Of each step, in one pass."""
    steps: int
    device: torch.device
    compile: bool

    def config(self, seed: int, **model: Any) -> Config:
        """Return the configuration of a run; `model` are more fields of `ModelConfig`."""
        sizes = {"depth": self.depth, "aspect_ratio": self.width // self.depth, "head_dim": self.head_dim}
        return Config(
            model=ModelConfig(**sizes, seq_len=self.seq_len, **model),
            schedule=ScheduleConfig(steps=self.steps, rows=self.rows, batch_tokens=self.rows * self.seq_len),
            run=RunConfig(seed=seed),
        )

    def batches(self, seed: int, *, held_back: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows from random places, (rows, seq_len) inputs and targets on the CPU; each begins with `BOS`."""
        cut = int(len(self.tokens) * (1 - _HELD_BACK))
        tokens = self.tokens[cut:] if held_back else self.tokens[:cut]
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(tokens) - self.seq_len, (self.rows,), generator=generator)
            rows = tokens[starts[:, None] + torch.arange(self.seq_len + 1)]
            inputs = rows[:, :-1].clone()
            inputs[:, 0] = BOS
            yield inputs, rows[:, 1:].contiguous()


class Outcome(NamedTuple):
    """What a run has to show."""

    losses: list[float]
    """Of each step."""
    step_ms: list[float]
    evaluations: list[tuple[int, float, float]]
    """Step, loss of held-back text, seconds of training until then."""
    parameters: int
    flops_per_token: int
    peak_bytes: int


def build(task: Task, config: Config) -> GPT:
    """Return the initialised model of a run, in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if task.device.type == "cuda" else torch.float32
    return build_model(
        model_config(config, vocab_size=task.vocab_size, bos_id=BOS),
        device=task.device,
        dtype=dtype,
        attention=choose_attention("auto", device=task.device, dtype=dtype),
        seed=config.run.seed,
    )


def train(
    task: Task, config: Config, model: GPT, *, fp8: Fp8Recipe | None = None, eval_every: int = 0, eval_batches: int = 8
) -> Outcome:
    """Train a model and return its losses and times, evaluations left out of the latter."""
    on_gpu = task.device.type == "cuda"
    if fp8 is not None:
        model.use_fp8(fp8)
    if task.compile:
        model.compile_parts()
    optimizer = build_optimizer(model, config)
    batches = task.batches(config.run.seed)
    losses, times, evaluations = [], [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(task.steps):
        apply_schedule(optimizer, config, step, task.steps)
        inputs, targets = next(batches)
        _wait(on_gpu)
        start = time.perf_counter()
        loss = _loss(model, inputs, targets, task.device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        _wait(on_gpu)
        times.append(1000 * (time.perf_counter() - start))
        if step + 1 == task.steps or (eval_every and (step + 1) % eval_every == 0):
            score = _evaluate(model, task, eval_batches)
            evaluations.append((step + 1, score, sum(times) / 1000))
    return Outcome(
        losses=losses,
        step_ms=times,
        evaluations=evaluations,
        parameters=sum(param.numel() for param in model.parameters()),
        flops_per_token=model.flops_per_token(),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
    )


def steady(times: Iterable[float]) -> list[float]:
    """Return the times without those in which things are compiled and kernels chosen: a quarter, but ten at most."""
    times = list(times)
    return times[min(10, len(times) // 4) :]


@torch.no_grad()
def _evaluate(model: GPT, task: Task, count: int) -> float:
    batches = task.batches(0, held_back=True)
    return sum(float(_loss(model, *next(batches), task.device)) for _ in range(count)) / count


def _loss(model: GPT, inputs: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    starts = None
    if needs_document_starts(model.attention_name):
        found = (inputs.flatten() == BOS).nonzero().flatten().int()
        # Of one size, or what is compiled would be compiled again.
        starts = torch.full((inputs.numel() // 16 + 2,), inputs.numel(), dtype=torch.int32)
        starts[: len(found)] = found
        starts = starts.to(device)
    loss: Tensor = model(inputs.to(device), targets.to(device), document_starts=starts)
    return loss


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
