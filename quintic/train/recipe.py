"""The recipe: from a configuration to a model, its optimizer, and what each step sets.

The matrices of the blocks go to Muon (or to AdamW, for comparison); embeddings, head, gates and scalars each have an
AdamW learning rate of their own, because their gradients differ by orders of magnitude.
"""

import re
from typing import Any

import torch

import quintic
from quintic.errors import ConfigError
from quintic.kernels.attention.attention import AttentionName
from quintic.model.gpt import GPT, GPTConfig
from quintic.optim.groups.groups import Rule
from quintic.train.config import Config
from quintic.train.lookups import with_lookups
from quintic.train.schedule import lr_multiplier, momentum_at, weight_decay_multiplier

__all__ = ["apply_schedule", "build_model", "build_optimizer", "model_config", "total_steps"]

# Width at which the AdamW learning rates of embedding and head are given; they scale with width^-0.5 (nanochat).
_LR_WIDTH = 256

# Value embeddings add to every value: half the rate of the token embedding (nanochat).
_VALUE_EMBEDDING_FRAC = 0.5

# As fast as the token embedding, in relation to what entries are at first: 1 there, width^-0.5 in a lookup layer.
_LOOKUP_FRAC = 1.0

# The residual scales multiply the whole stream: a small fraction of the other scalars' rate.
_RESIDUAL_SCALE_FRAC = 0.1


def model_config(config: Config, *, vocab_size: int, bos_id: int) -> GPTConfig:
    """Return the sizes of the model for a vocabulary.

    Raises:
        ConfigError: the sizes do not fit each other.
    """
    try:
        sizes = GPTConfig.from_depth(
            config.model.depth,
            vocab_size=vocab_size,
            seq_len=config.model.seq_len,
            bos_id=bos_id,
            head_dim=config.model.head_dim,
            kv_ratio=config.model.kv_ratio,
            window_pattern=config.model.window_pattern,
        )
        return with_lookups(sizes, config.model)
    except ValueError as error:
        # The library speaks of its argument, the user of the option.
        message = re.sub(r"\b([a-z][a-z0-9_]*)=", lambda match: f"--{match[1].replace('_', '-')} ", str(error))
        raise ConfigError(f"{message}; change one of the model's sizes") from None


def build_model(
    sizes: GPTConfig, *, device: torch.device, dtype: torch.dtype, attention: AttentionName, seed: int
) -> GPT:
    """Return an initialised model: built on the meta device, so that no weight is ever made twice."""
    with torch.device("meta"):
        model = GPT(sizes, compute_dtype=dtype, attention=attention)
    model.to_empty(device=device)
    model.init_weights(seed)
    return model


def build_optimizer(model: GPT, config: Config) -> quintic.Muon:
    """Return the optimizer with named groups; each group's `initial_lr` and `initial_weight_decay` are its peaks."""
    optim = config.optim
    scale = (model.config.width / _LR_WIDTH) ** -0.5
    table_scale = _LOOKUP_FRAC * model.config.width**-0.5
    # What was tuned for each of the two optimizers; everything else is common to both.
    uses_adamw = optim.optimizer == "adamw"
    decay = optim.adamw_weight_decay if uses_adamw else optim.weight_decay
    head_lr = optim.adamw_head_lr if uses_adamw else optim.head_lr
    rules = [
        Rule("embedding.weight", "adamw", options={"name": "embedding", "lr": optim.embedding_lr * scale}),
        Rule(
            "value_embeddings.*",
            "adamw",
            options={"name": "value embeddings", "lr": optim.embedding_lr * scale * _VALUE_EMBEDDING_FRAC},
        ),
        Rule("head.weight", "adamw", options={"name": "head", "lr": head_lr * scale}),
        Rule(
            "residual_scales",
            "adamw",
            options={"name": "residual scales", "lr": optim.scalar_lr * _RESIDUAL_SCALE_FRAC},
        ),
    ]
    if model.lookups:
        options = {"name": "lookup tables", "lr": optim.embedding_lr * scale * table_scale}
        tables = ["keys"] if model.config.l3_tied else ["keys", "values"]
        rules += [Rule(f"lookups.*.{table}", "adamw", options=options) for table in tables]
    matrices = {"name": "matrices", "weight_decay": decay, "cautious": optim.cautious}
    if uses_adamw:
        blocks = [f"blocks.*.{part}.*" for part in ("query", "key", "value", "out", "mlp")]
        for pattern in [*blocks, *(["lookups.*"] if model.lookups else [])]:
            rules.append(Rule(pattern, "adamw", options={**matrices, "lr": optim.adamw_lr}))
    groups = quintic.param_groups(
        model,
        muon={**matrices, "lr": optim.muon_lr},
        adamw={"name": "scalars", "lr": optim.scalar_lr},
        rules=rules,
    )
    optimizer = quintic.Muon(
        groups,
        momentum=optim.momentum,
        orthogonalizer=optim.orthogonalizer,
        # A CPU without bfloat16 instructions multiplies float32 faster; CUDA devices have every method's own dtype.
        compute_dtype=None if model.head.weight.is_cuda or optim.orthogonalizer == "svd" else model.compute_dtype,
        normalize=optim.normalize,
        state_dtype=optim.state_dtype,
        betas=(optim.beta1, optim.beta2),
        eps=1e-10,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        group["initial_weight_decay"] = group["weight_decay"]
    return optimizer


def total_steps(config: Config, model: GPT) -> int:
    """Return the number of optimizer steps: given, or from tokens per parameter of blocks and head."""
    if config.schedule.steps is not None:
        return config.schedule.steps
    parameters = model.num_parameters()
    tokens = config.schedule.tokens_per_param * (parameters["blocks"] + parameters["head"])
    return max(1, round(tokens / config.schedule.batch_tokens))


def apply_schedule(optimizer: quintic.Muon, config: Config, step: int, total: int) -> dict[str, Any]:
    """Set learning rates, momentum and weight decay for a step (0-based) and return them for the log."""
    schedule, optim = config.schedule, config.optim
    multiplier = lr_multiplier(
        step,
        total,
        warmup_frac=schedule.warmup_frac,
        warmdown_frac=schedule.warmdown_frac,
        final_frac=schedule.final_lr_frac,
    )
    momentum = momentum_at(
        step, start=optim.momentum_start, end=optim.momentum, warmup_steps=optim.momentum_warmup_steps
    )
    decay = weight_decay_multiplier(step, total)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        group["weight_decay"] = group["initial_weight_decay"] * decay
        if group["algorithm"] == "muon":
            group["momentum"] = momentum
    return {
        "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
        "momentum": momentum,
        "weight_decay": next(g["weight_decay"] for g in optimizer.param_groups if g["name"] == "matrices"),
    }
