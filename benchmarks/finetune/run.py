"""One run of pretraining or fine-tuning, in a worker of `benchmarks.training.workers`."""

import math
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.finetune.page import PACKAGES
from quintic.data.dataset import Dataset
from quintic.train.schedule import lr_multiplier

_BETAS, _RANK = (0.9, 0.95), 8


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Pretrain or fine-tune as a job says, in a process of its own.

    Returns:
        `loss` of the held-out text that was trained on, `before` the same of the initial weights, `other` that of the
        job's other text at the end (nats per token; None where they are not finite), and the machine.
    """
    import torch

    from benchmarks.common.results import versions
    from quintic.data.loader import Loader
    from quintic.train.config import RunConfig, ScheduleConfig
    from quintic.train.hardware import choose_hardware, machine_facts

    begin = time.perf_counter()
    hardware = choose_hardware(RunConfig(device=job["device"], compile=False, threads=job["threads"]))
    text, other = Dataset.open(job["data"]), Dataset.open(job["other"])
    torch.manual_seed(job["seed"])
    model = make_model(job["sizes"], text.vocab_size)
    if job["weights"] is not None:
        model.load_state_dict(torch.load(job["weights"], weights_only=True))
    if job["mode"] == "lora":
        model = with_adapters(model)
    model.to(hardware.device)
    optimizer = make_optimizer(model, job["optimizer"], job["rate"])
    peaks = [group["lr"] for group in optimizer.param_groups]
    sizes = {"rows": job["rows"], "seq_len": job["sizes"]["seq_len"]}
    schedule = ScheduleConfig(warmup_frac=0.05, warmdown_frac=0.95)
    before = held_out_loss(model, text, job)
    with Loader(text, "train", seed=job["seed"], device=hardware.device, **sizes) as loader:
        for step in range(job["steps"]):
            if time.time() > job["deadline"]:
                return {"cut": f"at step {step} of {job['steps']}, when the time was over"}
            factor = lr_multiplier(schedule, step, job["steps"])
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            batch = next(loader)
            loss_of(model, batch.inputs, batch.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    if job["save"] is not None:
        torch.save(model.state_dict(), job["save"])
    return {
        "loss": finite(held_out_loss(model, text, job)),
        "before": finite(before),
        "other": finite(held_out_loss(model, other, job)),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": time.perf_counter() - begin,
        "machine": machine_facts(hardware) | {"attention": "sdpa", "dtype": "float32"},
        "versions": versions(*PACKAGES),
    }


def make_model(sizes: Mapping[str, int], vocab_size: int) -> Any:
    """Return a Llama with random weights from PyTorch's generator.

    Args:
        sizes: width, depth, heads and seq_len.
        vocab_size: tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    width, heads = sizes["width"], sizes["heads"]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=sizes["depth"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=sizes["seq_len"],
            tie_word_embeddings=False,
        )
    )


def with_adapters(model: Any) -> Any:
    """Return the model with frozen weights and new LoRA adapters of all its layers' linear maps."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, lora_dropout=0.0, target_modules="all-linear")
    return get_peft_model(model, config)


def make_optimizer(model: Any, name: str, rate: float) -> Any:
    """Return Muon, with AdamW for what is no matrix, or AdamW for everything: one rate, the same betas, no decay."""
    import torch

    import quintic

    if name == "adamw":
        return torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=rate, betas=_BETAS, weight_decay=0.0
        )
    groups = quintic.param_groups(model)
    return quintic.Muon(groups, lr=rate, adamw_lr=rate, betas=_BETAS, weight_decay=0.0, adjust_lr="match_rms_adamw")


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    """Return the mean loss of (B, T) tokens in nats per token."""
    import torch

    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def held_out_loss(model: Any, text: Any, job: Mapping[str, Any]) -> float:
    """Return the loss of a text's validation split, at most `eval_tokens` of it, in nats per token."""
    import torch

    from quintic.data.loader import validation_rows

    device = next(model.parameters()).device
    batches = validation_rows(text, rows=job["rows"], seq_len=job["sizes"]["seq_len"], max_tokens=job["eval_tokens"])
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            inputs, targets = batch.inputs.to(device), batch.targets.to(device)
            total += loss_of(model, inputs, targets).item() * targets.numel()
            count += targets.numel()
    return total / count


def finite(loss: float) -> float | None:
    """Return a loss as JSON has it: None where it is infinite or no number."""
    return loss if math.isfinite(loss) else None
