"""Trains nanochat's GPT with its own optimizer and schedules on text that Quintic has prepared: a peer's training loop.

Started by `benchmarks.train_throughput`, one process for each GPU. Model, optimizer and constants are those of nanochat
(Andrej Karpathy, github.com/karpathy/nanochat) in a folder of --peers; nothing of it is here but the order of calls in
its `base_train`: accumulate gradients over micro-batches of a compiled model, set rates, step. Rows come from Quintic's
loader, so both trainers see the same text in the same order. nanochat's attention is FlashAttention-3 or, where that
is not installed, PyTorch's with an explicit mask; here it gets what `--attention auto` gives to Quintic, with windows.

Prints a line of JSON for each step and each evaluation on rank 0.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintic.data.dataset import Dataset
from quintic.data.loader import Loader, validation_rows
from quintic.eval.score import document_sums, score_from_sums
from quintic.kernels.attention.attention import fastest_attention, needs_document_starts
from quintic.kernels.attention.flash import FlashName, attend

# The defaults of base_train's options, at the commit that the result names.
BASE_BATCH = 2**19
RATIO = 12.0
DECAY = 0.28
WARMUP_STEPS, WARMDOWN, FINAL = 40, 0.65, 0.05


def main() -> None:
    options = parse()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl", device_id=device)
    sys.path.insert(0, str(options.peer))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(42)
    dataset = Dataset.open(options.dataset)
    model, scaling = new_model(options.depth, dataset.vocab_size, options.seq_len, device)
    # Before any conversion, because its counter does not see layers of 8 bits.
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "flops_per_token": model.estimate_flops()}
    if options.fp8:
        with_fp8(model)
    compiled: Any = torch.compile(model, dynamic=False)
    decay = DECAY * math.sqrt(options.batch_tokens / BASE_BATCH)
    if options.depth != 12:  # as for a horizon of RATIO tokens per parameter
        decay *= new_model(12, dataset.vocab_size, options.seq_len, torch.device("meta"))[1] / scaling
    rates = math.sqrt(options.batch_tokens / BASE_BATCH)
    optimizer = model.setup_optimizer(
        unembedding_lr=0.008 * rates, embedding_lr=0.3 * rates, scalar_lr=0.5 * rates, matrix_lr=0.02 * rates,
        weight_decay=decay,
    )  # fmt: skip
    loader = Loader(
        dataset, "train", rows=options.rows, seq_len=options.seq_len, device=device, rank=rank, world_size=size
    )
    batches = list(validation_rows(dataset, rows=options.rows, seq_len=options.seq_len, max_tokens=options.eval_tokens))
    micro_steps = options.batch_tokens // (options.rows * options.seq_len * size)
    batch = next(loader)
    for step in range(options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(micro_steps):
            loss = compiled(batch.inputs, batch.targets)
            (loss / micro_steps).backward()
            batch = next(loader)
        set_rates(optimizer, step, options.steps, decay)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        optimizer.step()
        events[1].record()
        model.zero_grad(set_to_none=True)
        nats = loss.item()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if rank == 0:
            record = {"step": step + 1, "seconds": seconds, "optimizer_ms": events[0].elapsed_time(events[1])}
            print(json.dumps({"kind": "train", "loss": nats, **record}), flush=True)
        if options.eval_every and ((step + 1) % options.eval_every == 0 or step + 1 == options.steps):
            evaluate(compiled, batches, dataset, device, step + 1, rank)
    if rank == 0:
        print(json.dumps({"kind": "final", "peak_bytes": torch.cuda.max_memory_allocated(), **facts}), flush=True)
    loader.close()
    if size > 1:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder that holds the package nanochat")
    parser.add_argument("--dataset", type=Path, required=True, help="folder that `quintic prepare` made")
    for name in ("depth", "steps", "rows", "seq-len", "batch-tokens", "eval-every", "eval-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--fp8", action="store_true", help="nanochat's products with 8 bits")
    return parser.parse_args()


def new_model(depth: int, vocab_size: int, seq_len: int, device: torch.device) -> tuple[Any, int]:
    """Return nanochat's GPT of a depth, with 64 channels a layer in heads of 128, and its scaling parameters."""
    from nanochat import gpt  # type: ignore[import-not-found, unused-ignore]

    name, _ = fastest_attention(torch.device("cuda"), torch.bfloat16)
    assert needs_document_starts(name), f"{name} has no windows without a mask"
    WindowedAttention.name = name
    gpt.flash_attn = WindowedAttention
    heads = -(-64 * depth // 128)
    config = gpt.GPTConfig(
        sequence_len=seq_len, vocab_size=vocab_size, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=128 * heads
    )
    with torch.device("meta"):
        model = gpt.GPT(config)
    counts = model.num_scaling_params()
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights()
    return model, counts["transformer_matrices"] + counts["lm_head"]


def with_fp8(model: Any) -> None:
    """Make nanochat's products ones with 8 bits: where both sizes are multiples of 16 and neither is below 128."""
    from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    def fits(module: torch.nn.Linear, name: str) -> bool:
        sizes = (module.in_features, module.out_features)
        return all(size % 16 == 0 for size in sizes) and min(sizes) >= 128

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=fits)


class WindowedAttention:
    """Stands where nanochat keeps FlashAttention-3."""

    name: FlashName  # known before anything is compiled, because asking would break the graph

    @classmethod
    def flash_attn_func(cls, q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        """Return (B, T, H, D) causal attention in which a query sees so many positions before its own."""
        rows, length = q.shape[:2]
        starts = torch.arange(0, (rows + 1) * length, length, device=q.device, dtype=torch.int32)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        window = length if window_size[0] < 0 else window_size[0] + 1
        out: Tensor = attend(cls.name, q, k, v, starts, longest=length, window=window).unflatten(0, (rows, length))
        return out


def set_rates(optimizer: Any, step: int, total: int, decay: float) -> None:
    """Set what base_train sets before a step: rates, Muon's momentum and its weight decay."""
    warmdown = round(WARMDOWN * total)
    past = (step - (total - warmdown)) / warmdown
    rate = min((step + 1) / WARMUP_STEPS, 1.0)
    if step >= WARMUP_STEPS and past > 0:
        rate = 1 - past + past * FINAL
    momentum = 0.97 - 0.07 * max(past, 0.0)
    if step < 400:
        momentum = 0.85 + 0.12 * step / 400
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate
        if group["kind"] == "muon":
            group["momentum"] = momentum
            group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / total))


def evaluate(compiled: Any, batches: Any, dataset: Dataset, device: torch.device, step: int, rank: int) -> None:
    """Print the score of the validation rows; every rank scores all of them, which is not timed."""

    def losses(inputs: Tensor, targets: Tensor, **_: Any) -> Tensor:
        found: Tensor = compiled(inputs, targets, loss_reduction="none")
        return found.view(targets.shape)

    compiled.eval()
    found = score_from_sums(document_sums(losses, batches, dataset.tokenizer.token_bytes(), device))
    compiled.train()
    if rank == 0:
        print(json.dumps({"kind": "eval", "step": step, "loss": found.loss, "bpb": found.bpb}), flush=True)


if __name__ == "__main__":
    main()
