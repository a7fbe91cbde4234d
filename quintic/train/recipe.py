"""The recipe: builds a run's model and optimizer from its configuration, and sets the rates of each step.

Phases: `model_config` and `build_model` make the model, `build_optimizer` makes the groups with their peak rates, and
`apply_schedule` sets the rates before each step. Muon (or AdamW, for comparison) updates the matrices of the blocks.
Embeddings, head, gates and scalars are groups under AdamW with separate learning rates, because their gradients differ
by orders of magnitude.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

import quintic
from quintic.errors import ConfigError
from quintic.grouping.assign import Rule
from quintic.kernels.attention.attention import AttentionName
from quintic.limits import in_options
from quintic.model.gpt import GPT, GPTConfig
from quintic.optim.layout.layouts import local_tensor
from quintic.optim.numeric.bf16_state import MAX_BF16_BETA
from quintic.optim.rules.table import orthogonalizes, rule_of
from quintic.train.config import Config, ModelConfig, WeightsName
from quintic.train.distributed import Parallelism, micro_batch_rows
from quintic.train.hardware import check_memory
from quintic.train.saved_config import with_options
from quintic.train.schedule import lengths, lr_multiplier, momentum_at, scale_of, weight_decay_multiplier

__all__ = ["apply_schedule", "build_model", "build_optimizer", "empty_model", "model_config", "scale_lines"]


@dataclass(frozen=True, kw_only=True)
class _Constants:
    """The constants of a recipe that are not options."""

    lr_width: int
    """Width at which the AdamW learning rates of embeddings and head are given; they scale with width^-0.5."""
    value_embedding_frac: float
    """Learning rate of the value embeddings, relative to the token embedding's."""
    residual_frac: float
    """Learning rate of the residual scales, which scale the whole stream, relative to the other scalars'."""
    smear_lr: float | None = None
    """Learning rate of smear and backout, the same for all batches; None puts these and the scales of x0 among the
    other scalars."""
    gates_to_muon: bool = False
    """Muon updates the gates of the value embeddings."""
    neuron_beta: float = 0.95
    """NorMuon's coefficient of the average of squared updates over steps."""
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a group under AdamW -> coefficients that differ from --beta1 and --beta2, and a constant weight decay."""


_EARLY_NANOCHAT = _Constants(
    lr_width=768,
    value_embedding_frac=1.0,
    residual_frac=0.01,
    smear_lr=0.2,
    gates_to_muon=True,
    groups={"x0 scales": {"betas": (0.96, 0.95)}},
)
_CONSTANTS = {
    "quintic": _Constants(lr_width=256, value_embedding_frac=0.5, residual_frac=0.1),
    "seed": _EARLY_NANOCHAT,
    # As in nanochat's gpt.py and base_train.py at 92d63d4 (2026-07).
    "nanochat": replace(
        _EARLY_NANOCHAT,
        value_embedding_frac=0.5,
        neuron_beta=0.9,
        groups={
            "embedding": {"betas": (0.8, 0.995), "weight_decay": 0.001},
            "value embeddings": {"betas": (0.8, 0.995), "weight_decay": 0.01},
            "head": {"betas": (0.8, 0.96), "weight_decay": 0.01},
            "residual scales": {"weight_decay": 0.05},
            **_EARLY_NANOCHAT.groups,
        },
    ),
}

# Learning rate of a lookup layer's tables relative to the token embedding's, after dividing each by the scale of its
# initial entries: 1 in the embedding, width^-0.5 in a table.
_LOOKUP_FRAC = 0.5

# The model's parameters per row of a lookup layer's tables where --l3-embeddings is 0 (as in jhspaybar's fork of
# nanochat, pull request 559).
_PARAMETERS_PER_EMBEDDING = 1000


def model_config(config: Config, *, vocab_size: int, bos_id: int) -> GPTConfig:
    """Return the sizes of the configured model for a vocabulary.

    Raises:
        ConfigError: the sizes do not fit each other.
    """
    try:
        given = {name: value for name, value in vars(config.model).items() if not name.startswith("l3_")}
        sizes = GPTConfig.from_depth(**given, vocab_size=vocab_size, bos_id=bos_id)
        return _with_lookups(sizes, config.model)
    except ValueError as error:
        raise ConfigError(f"{in_options(error)}; change one of the model's sizes") from None


def _with_lookups(sizes: GPTConfig, model: ModelConfig) -> GPTConfig:
    """Return the model's sizes with the lookup layers that the options ask for.

    Raises:
        ValueError: the lookup layers do not fit the model.
    """
    if model.l3_layers is None:
        return sizes
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", model.l3_layers):
        raise ValueError(f"l3_layers={model.l3_layers}: must be layer numbers separated by commas, such as 2,5")
    sizes = replace(
        sizes,
        l3_layers=tuple(int(layer) for layer in model.l3_layers.split(",")),
        l3_embeddings=model.l3_embeddings or sizes.vocab_size,
        l3_d_up=model.l3_d_up,
        l3_k_max=model.l3_k_max,
        l3_tied=model.l3_tied,
    )
    if model.l3_embeddings:
        return sizes
    # A row per 1,000 parameters of the model, whose own tables have the placeholder size of one row per token here.
    with torch.device("meta"):
        parameters = sum(param.numel() for param in GPT(sizes).parameters())
    embeddings = max(sizes.vocab_size, parameters // _PARAMETERS_PER_EMBEDDING)
    return replace(sizes, l3_embeddings=min(embeddings, sizes.vocab_size * sizes.l3_k_max))


def build_model(
    sizes: GPTConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionName,
    seed: int,
    weights: WeightsName = "float32",
    parallelism: Parallelism | None = None,
) -> GPT:
    """Return an initialised model on a device; `dtype` is the activations' dtype.

    Raises:
        ConfigError: the model and its gradients need more memory than the device has.
    """
    # Built on the meta device, sharded, then allocated: no device holds a weight twice, or a sharded model whole.
    model = empty_model(sizes, dtype=dtype, attention=attention, weights=weights)
    if parallelism is not None:
        parallelism.place(model, device)
    local = [local_tensor(param.detach()) for param in model.parameters()]
    check_memory(2 * sum(weight.numel() * weight.element_size() for weight in local), device)
    model.to_empty(device=device)
    model.init_weights(seed)
    return model


def empty_model(
    sizes: GPTConfig, *, dtype: torch.dtype, attention: AttentionName, weights: WeightsName = "float32"
) -> GPT:
    """Return a model on the meta device with weights in float32, or in bfloat16 for "mantissa" and "8bit"."""
    with torch.device("meta"):
        model = GPT(sizes, compute_dtype=dtype, attention=attention)
    if weights != "float32":
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(param.bfloat16()))
    return model


def build_optimizer(
    model: GPT, config: Config, *, on_gpu: bool | None = None, comms: Literal["none", "averaged", "sharded"] = "none"
) -> quintic.Muon:
    """Return the optimizer with named groups, whose `initial_lr` and `initial_weight_decay` are the peak values.

    Args:
        model: on any device, including the meta device.
        config: only the sections `model`, `optim` and `schedule` are read.
        on_gpu: whether the optimizer will run on a GPU; None if it will run on the model's device.
        comms: the optimizer's option of this name, see `Parallelism.comms`.

    Raises:
        ConfigError: --state-dtype cannot hold an average of the recipe.
    """
    optim, constants = config.optim, _CONSTANTS[config.optim.recipe]
    for name, options in constants.groups.items():
        beta = max(options.get("betas", (0.0,)))
        if optim.state_dtype is not None and beta > MAX_BF16_BETA:
            raise ConfigError(
                f"--state-dtype {optim.state_dtype}: --recipe {optim.recipe} has the coefficient {beta} for the "
                f"{name}, and such state follows at most {MAX_BF16_BETA}; leave one of the two out"
            )
    scale = scale_of(config, model.config)
    lr_factor, decay_factor = (scale.lr_factor, scale.decay_factor) if optim.scale_rates else (1.0, 1.0)
    by_width = lr_factor * (model.config.width / constants.lr_width) ** -0.5
    scalar_lr = lr_factor * optim.scalar_lr
    # These rates were tuned separately for Muon and AdamW; everything below is common to both.
    uses_adamw = optim.optimizer == "adamw"
    decay = optim.adamw_weight_decay if uses_adamw else optim.weight_decay
    head_lr = optim.adamw_head_lr if uses_adamw else optim.head_lr
    embedding_lr = optim.embedding_lr * by_width
    rates = [
        ("embedding", "embedding.weight", embedding_lr),
        ("value embeddings", "value_embeddings.*", embedding_lr * constants.value_embedding_frac),
        ("head", "head.weight", head_lr * by_width),
        ("residual scales", "residual_scales", scalar_lr * constants.residual_frac),
    ]
    if model.lookups:
        table_lr = embedding_lr * _LOOKUP_FRAC * model.config.width**-0.5
        tables = ["keys"] if model.config.l3_tied else ["keys", "values"]
        rates += [("lookup tables", f"lookups.*.{table}", table_lr) for table in tables]
    if constants.smear_lr is not None:
        rates += [("x0 scales", "x0_scales", scalar_lr), ("smear", "smear*", constants.smear_lr)]
        rates.append(("backout", "backout_scale", constants.smear_lr))
    rules = [
        Rule(pattern, "adamw", options={"name": name, "lr": lr, **constants.groups.get(name, {})})
        for name, pattern, lr in rates
    ]
    rule = rule_of(optim.optimizer, optim.normalize, optim.update_rule)
    matrices = {"name": "matrices", "weight_decay": decay * decay_factor}
    matrices["cautious"] = optim.cautious and rule.constrain is None
    if uses_adamw:
        blocks = [f"blocks.*.{part}.*" for part in ("query", "key", "value", "out", "mlp")]
        for pattern in [*blocks, *(["lookups.*"] if model.lookups else [])]:
            rules.append(Rule(pattern, "adamw", options={**matrices, "lr": optim.adamw_lr * lr_factor}))
    elif constants.gates_to_muon:
        rules.append(Rule("blocks.*.value_gate.*", "muon"))
    groups = quintic.param_groups(
        model,
        muon={**matrices, "lr": optim.muon_lr * lr_factor},
        adamw={"name": "scalars", "lr": scalar_lr},
        rules=rules,
    )
    on_gpu = model.head.weight.is_cuda if on_gpu is None else on_gpu
    optimizer = quintic.Muon(
        groups,
        momentum=optim.momentum,
        orthogonalizer=optim.orthogonalizer,
        # None is the method's default dtype, for GPUs. A CPU without bfloat16 instructions multiplies float32 faster.
        compute_dtype=None if on_gpu or optim.orthogonalizer == "svd" else model.compute_dtype,
        update_rule=optim.update_rule,
        normalize=optim.normalize if optim.update_rule is None else None,
        normalize_beta=constants.neuron_beta,
        master=None if optim.weights == "float32" else optim.weights,
        state_dtype=optim.state_dtype,
        betas=(optim.beta1, optim.beta2),
        eps=1e-10,
        comms=comms,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        group["initial_weight_decay"] = group["weight_decay"]
    return optimizer


def scale_lines(config: Config, *, vocab_size: int, data_ranks: int = 1) -> list[str]:
    """Describe a run's model, length, batch, rates and rule in lines for the user, without allocating anything.

    Args:
        config: the run's configuration.
        vocab_size: number of tokens in the vocabulary.
        data_ranks: number of ranks that get different rows of a batch.

    Raises:
        ConfigError: sizes, or batch and rows, do not fit each other.
    """
    sizes = model_config(config, vocab_size=vocab_size, bos_id=0)
    model = empty_model(sizes, dtype=torch.float32, attention="sdpa")
    scale = scale_of(config, sizes)
    planned = with_options(config, batch_tokens=scale.batch_tokens)
    schedule, parts = config.schedule, model.num_parameters()
    names = {name: name.replace("_", " ") for name in parts} | {"scalars": "scalars outside the blocks"}
    by_part = ", ".join(f"{names[name]} {count:,}" for name, count in parts.items())
    total_tokens, per_token = scale.steps * scale.batch_tokens, sizes.flops_per_token()
    (option, value), *others = lengths(schedule)
    unused = f", not by {' or '.join(f'{other} {number:g}' for other, number in others)}" if others else ""
    rows = micro_batch_rows(planned, data_ranks)
    passes = scale.batch_tokens // (rows * sizes.seq_len * data_ranks)
    groups = build_optimizer(model, planned).param_groups
    rates = {group["name"]: group["lr"] for group in groups}
    decay = next(group["weight_decay"] for group in groups if group["name"] == "matrices")
    factors = ""
    if config.optim.scale_rates:
        factors = f" (rates x {scale.lr_factor:.3f}, decay x {scale.decay_factor:.3f} of those at depth 12)"
    falling = scale.steps - round(schedule.warmdown_frac * scale.steps)
    if schedule.warmup_steps is not None and schedule.warmup_steps > falling:
        factors += f"; --warmup-steps {schedule.warmup_steps} ends after they begin to fall (step {falling})"
    rule = rule_of(config.optim.optimizer, config.optim.normalize, config.optim.update_rule)
    return [
        f"Model: depth {sizes.depth}, width {sizes.width}, {sizes.num_heads} head{'s' * (sizes.num_heads > 1)}, "
        f"{sum(parts.values()):,} parameters: {by_part}",
        f"Operations: {per_token:,} per token forward and backward, {per_token * total_tokens:.4g} in all"
        f"{', with equally many lookup rows for each token' if sizes.l3_layers else ''}",
        f"Length: {scale.steps:,} step{'s' * (scale.steps > 1)}, {total_tokens:,} tokens "
        f"({total_tokens / sizes.matrix_weights():.3g} per parameter of blocks and head), "
        f"by {option} {value:{'g' if isinstance(value, float) else ','}}{unused}",
        f"Batch: {scale.batch_tokens:,} tokens ({'automatic' if schedule.batch_tokens is None else 'given'}), in "
        f"{passes:,} {'pass' if passes == 1 else 'passes'} of {rows} x {sizes.seq_len:,}"
        f"{f' on each of {data_ranks} ranks' if data_ranks > 1 else ''}",
        f"Rates ({rule.title}): {', '.join(f'{name} {lr:.4g}' for name, lr in rates.items())}; "
        f"decay {decay:.4g}{factors}",
    ]


def apply_schedule(optimizer: quintic.Muon, config: Config, step: int, total: int) -> dict[str, Any]:
    """Set learning rates, momentum and weight decay in the groups for a step (0-based); return them for the log."""
    multiplier = lr_multiplier(config.schedule, step, total)
    momentum = momentum_at(config, step, total)
    decay = weight_decay_multiplier(step, total, config.optim.decay_shape)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group["name"] == "matrices":
            group["weight_decay"] = group["initial_weight_decay"] * decay
        if orthogonalizes(group["algorithm"]):
            group["momentum"] = momentum
    return {
        "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
        "lr_multiplier": multiplier,
        "momentum": momentum,
        "weight_decay": next(g["weight_decay"] for g in optimizer.param_groups if g["name"] == "matrices"),
    }
