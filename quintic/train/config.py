"""The configuration of a run: every default once, with its meaning; the command line's options are made from it.

Precedence is preset or saved configuration (`--config`) < `--recipe` < options; presets and recipes are in
`quintic/commands/presets.py`. Nothing derived is stored here: what follows from these numbers (width, steps, learning
rates after scaling) is computed in `recipe.py`. Numbers that no machine could honour are refused at construction,
with the option's name.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quintic.errors import ConfigError

__all__ = [
    "BaseRunConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelName",
    "RunConfig",
    "ScheduleConfig",
    "WeightsName",
    "check_at_least",
    "check_at_most",
    "check_samples",
    "in_options",
]

ParallelName = Literal["sharded", "ddp", "fsdp", "hsdp", "tp"]
WeightsName = Literal["float32", "mantissa"]

# The 256 bytes and the document start: no trained vocabulary is smaller.
_MIN_VOCAB = 257
_SEEDS = 2**63  # PyTorch's generators take smaller ones


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and its tokenizer."""

    data: str = "python"
    """Text: 'python' (the text of your Python installation), a file, a folder, or hf:owner/name[/config]; several
    with shares of the training tokens as one value, "notes/=0.7 web.jsonl=0.3"."""
    val_data: str | None = None
    """Text for validation, one source named as in --data; by default a part of the training text is held back
    (--val-frac)."""
    text_field: str = "text"
    """Key or column that holds the text in JSON, CSV and Parquet."""
    tokenizer: str | None = None
    """Path of a tokenizer.json, or 'gpt2'; by default one is trained on the text."""
    vocab_size: int = 4096
    """Tokens in the vocabulary of a tokenizer trained here."""
    val_frac: float = 0.03
    """Share of the documents held back for validation."""
    max_bytes: int | None = None
    """Stop reading after this many bytes of text (for large sources)."""
    data_dir: Path = Path("data")
    """Folder for prepared data."""
    verify: bool = False
    """Compare all prepared data with its checksums; by default once on each machine, and what changed since."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        if self.tokenizer is None:
            check_at_least(_MIN_VOCAB, vocab_size=self.vocab_size)
            check_at_most(10**8, vocab_size=self.vocab_size)
        check_at_least(1, max_bytes=self.max_bytes)
        if not 0 < self.val_frac < 1:
            raise ConfigError(f"--val-frac {self.val_frac}: must lie strictly between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT."""

    depth: int = 4
    """The dial: number of layers; the width is (--aspect-ratio) x depth, rounded up to a multiple of --head-dim."""
    aspect_ratio: int = 64
    """Channels of the residual stream per layer."""
    head_dim: int = 64
    """Channels of an attention head."""
    kv_ratio: int = 1
    """Query heads that share one key/value head (grouped-query attention)."""
    seq_len: int = 256
    """Tokens the model sees at once."""
    window_pattern: str = "SSSL"
    """Attention windows by layer, repeated: S is short (--short-window), L sees --seq-len; the last is always L."""
    short_window: float = 0.25
    """Share of --seq-len that an S layer sees: a quarter, or 0.5 for a half."""
    l3_layers: str | None = None
    """Layers, counted from 0, behind which a large lookup layer stands, as in '2,5'; none by default."""
    l3_embeddings: int = 0
    """Rows of a lookup layer's tables; 0: one for 1,000 parameters, but at least one for each token."""
    l3_d_up: int = 0
    """Channels between a lookup layer's read and its mixing product; 0: four times the width."""
    l3_k_max: int = 512
    """Rows of one token in a lookup layer, at most."""
    l3_tied: bool = True
    """Lookup layers take their keys as values, too."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        check_at_least(0, l3_embeddings=self.l3_embeddings, l3_d_up=self.l3_d_up)
        check_at_least(1, l3_k_max=self.l3_k_max, kv_ratio=self.kv_ratio, seq_len=self.seq_len)
        check_at_least(1, depth=self.depth, aspect_ratio=self.aspect_ratio, head_dim=self.head_dim)
        # A plan of more layers takes long, and the bytes of wider matrices are too many for an integer.
        check_at_most(1000, depth=self.depth)
        check_at_most(100_000, aspect_ratio=self.aspect_ratio, head_dim=self.head_dim)
        check_at_most(10**9, l3_embeddings=self.l3_embeddings, l3_d_up=self.l3_d_up)
        if not 0 < self.short_window <= 1:
            raise ConfigError(f"--short-window {self.short_window}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    recipe: Literal["quintic", "seed", "nanochat"] = "quintic"
    """Constants: ours, or nanochat's, early ('seed') or newest. Given as an option it sets the defaults of others."""
    scale_rates: bool = False
    """Learning rates are for batches of 2^19 tokens at depth 12: scale them and the decay to batch and size."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of the weight matrices; embeddings, head and scalars use AdamW either way."""
    muon_lr: float = 0.03
    """Learning rate of the matrices under Muon."""
    adamw_lr: float = 0.003
    """Learning rate of the matrices under --optimizer adamw."""
    embedding_lr: float = 0.4
    """AdamW learning rate of the token embedding, at width 256 (768 with another --recipe); scaled by width^-0.5."""
    head_lr: float = 0.006
    """AdamW learning rate of the output head, at the same width and scaled in the same way."""
    adamw_head_lr: float = 0.01
    """The same under --optimizer adamw."""
    scalar_lr: float = 0.03
    """AdamW learning rate of per-layer scalars and gates."""
    momentum: float = 0.95
    """Muon's momentum after its warm-up."""
    momentum_start: float = 0.85
    """Muon's momentum at the first step."""
    momentum_warmup_steps: int = 100
    """Steps over which the momentum rises to --momentum."""
    momentum_end: float | None = None
    """Muon's final momentum, reached while the learning rates fall; None keeps --momentum."""
    orthogonalizer: Literal["auto", "polar_express", "gram", "newton_schulz", "svd"] = "auto"
    """Muon's method of orthogonalisation; 'auto' is Polar Express in the cheapest form for device and shape."""
    normalize: Literal["neuron", "element"] | None = None
    """'neuron' is NorMuon, updates evened out per neuron; 'element' is AdaMuon; None is plain Muon."""
    state_dtype: Literal["bf16"] | None = None
    """'bf16' keeps momentum and AdamW's moments in bfloat16, half the memory; None keeps them in float32."""
    weights: WeightsName = "float32"
    """'mantissa' keeps weights in bfloat16 and 16 more bits of each in the optimizer: float32, in two halves."""
    weight_decay: float = 0.3
    """Decay of the matrices under Muon, per unit of learning rate; falls to zero over the run."""
    decay_shape: Literal["linear", "cosine"] = "linear"
    """Shape of the weight decay's fall: a line, or half a cosine."""
    adamw_weight_decay: float = 0.1
    """The same under --optimizer adamw."""
    cautious: bool = True
    """Decay only weights that the update does not push the other way."""
    beta1: float = 0.8
    """AdamW's first-moment coefficient."""
    beta2: float = 0.95
    """AdamW's second-moment coefficient."""
    clip_norm: float | None = None
    """Scale the gradient down to this norm, that of all weights together, where it is larger; None never does."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """A loss that jumps: only say so, leave out the step's update, or go back to the last checkpoint, with new text."""
    spike_sigmas: float = 6.0
    """Standard deviations above the smoothed loss from which on a loss is such a spike."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        rates = ("muon_lr", "adamw_lr", "embedding_lr", "head_lr", "adamw_head_lr", "scalar_lr")
        others = ("momentum_warmup_steps", "spike_sigmas", "weight_decay", "adamw_weight_decay")
        check_at_least(0, **_values(self, *rates, *others))
        check_at_most(10**6, **_values(self, *rates, "weight_decay", "adamw_weight_decay"))
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"--clip-norm {self.clip_norm}: must be above 0 and finite; 'None' clips nothing")
        averages = _values(self, "momentum", "momentum_start", "momentum_end", "beta1", "beta2")
        for name, value in averages.items():
            if not 0 <= value < 1:
                raise ConfigError(f"{_option(name)} {value}: must be at least 0 and below 1")
        if self.state_dtype is not None:
            from quintic.optim.rules.bf16_state import MAX_BF16_BETA

            for name, value in averages.items():
                if value > MAX_BF16_BETA:
                    raise ConfigError(f"{_option(name)} {value}: must be at most {MAX_BF16_BETA} with bfloat16 state")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Length of the run, and its batches."""

    steps: int | None = 500
    """Optimizer steps; 'None' derives them from --target-flops; else from --tokens-per-param."""
    target_flops: float | None = None
    """Floating-point operations of the whole run, where --steps is 'None'."""
    tokens_per_param: float = 10.5
    """Training tokens per parameter of blocks and head, where neither --steps nor --target-flops says how many."""
    batch_tokens: int | None = 4096
    """Tokens of one optimizer step, of all devices; 'None' is the power of two that suits the size of the model."""
    rows: int = 16
    """Rows of --seq-len tokens that go through the model at once, at most, on each device; the rest is accumulated."""
    warmup_frac: float = 0.02
    """Share of the steps over which the learning rates rise from zero."""
    warmup_steps: int | None = None
    """Steps over which they rise, in place of --warmup-frac."""
    warmdown_frac: float = 0.4
    """Share of the steps over which they fall again at the end."""
    final_lr_frac: float = 0.0
    """Final learning rates, as a share of their peak."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        check_at_least(1, steps=self.steps, batch_tokens=self.batch_tokens, rows=self.rows)
        check_at_least(0, warmup_steps=self.warmup_steps)
        check_at_most(10**9, tokens_per_param=self.tokens_per_param)
        if not self.tokens_per_param > 0:
            raise ConfigError(f"--tokens-per-param {self.tokens_per_param}: must be above 0")
        if self.target_flops is not None and not 0 < self.target_flops < math.inf:
            raise ConfigError(f"--target-flops {self.target_flops}: must be above 0 and finite")
        for name, value in _values(self, "warmup_frac", "warmdown_frac", "final_lr_frac").items():
            if not 0 <= value <= 1:
                raise ConfigError(f"{_option(name)} {value}: must lie between 0 and 1")
        if self.warmup_steps is None and self.warmup_frac + self.warmdown_frac > 1:
            raise ConfigError("--warmup-frac and --warmdown-frac add up to more than 1: shorten one of them")


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig:
    """The options that runs of every model have: where they are, and what computes them."""

    run: str | None = None
    """Name of the run's folder; by default from date and time. With --resume, which speedruns do not have: the
    run to continue. Behind torchrun, which has options that begin with --run, the option is --name."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    seed: int = 1337
    """Seed of initialisation, data order and samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; 'auto' takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of activations; 'auto' is bfloat16 where the hardware has it, else float32. Of weights: --weights; in
    the speedrun they have the same."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"] = "auto"
    """Attention implementation; 'auto' takes the fastest the device has."""
    compile: bool | None = None
    """Compile the model with torch.compile; by default only on a GPU."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and a name that is no folder's."""
        check_at_least(1, threads=self.threads)
        check_at_least(0, seed=self.seed)
        if self.seed >= _SEEDS:
            raise ConfigError(f"--seed {self.seed}: must be below 2^63")
        # A leading dot hides a folder, and marks what is not finished yet.
        if self.run is not None and (not self.run or Path(self.run).name != self.run or self.run.startswith(".")):
            raise ConfigError(
                f"--run {self.run!r}: give a plain folder name without a leading dot, and its parent with --runs-dir"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(BaseRunConfig):
    """First weights, devices, evaluations, checkpoints and records."""

    init_from: str | None = None
    """Start from the weights of this run (its name or folder) or exported model (its folder), with its sizes and its
    tokenizer, a new optimizer and a new schedule; by default from random weights."""
    fp8: bool = False
    """Multiply in 8 bits (a GPU of compute capability 8.9 or more)."""
    fp8_recipe: Literal["auto", "tensorwise", "rowwise"] = "auto"
    """Where, and with which scales: one for a tensor, in the head and the layers that it makes faster (auto) or in
    all whose sizes suit it (tensorwise), or in these one for each row and column, the more exact (rowwise)."""
    parallel: ParallelName = "sharded"
    """Division of the work among several devices (torchrun); see
    docs/how-to/train/several-gpus.md. One device needs none of it."""
    shard_ranks: int | None = None
    """Ranks that share one copy of the model under --parallel hsdp; by default those of a host."""
    eval_every: int = 100
    """Steps between evaluations, the first of them before training (0: only at the end)."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation, at most, but one batch at least."""
    core: str | None = None
    """Folder with in-context tasks of CORE to answer: JSONL files, or nanochat's eval_bundle."""
    core_every: int = 0
    """Steps between answers to these (0: only at the end)."""
    core_items: int = 500
    """Items per task of --core, at most."""
    sample_every: int = 0
    """Steps between text samples (0: only at the end)."""
    sample_tokens: int = 160
    """Tokens per sample."""
    prompts: tuple[str, ...] = ()
    """Beginnings of the samples; by default some that suit the data."""
    save_every: int = 200
    """Steps between checkpoints (0: only at the end)."""
    keep: int = 2
    """Checkpoints kept."""
    rms_every: int = 10
    """Steps between measurements of gradient and update sizes (0: never)."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the package tensorboard)."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (needs the package wandb)."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and a name that is no folder's."""
        super().__post_init__()
        check_at_least(1, **_values(self, "shard_ranks", "eval_tokens", "core_items", "keep"))
        intervals = ("eval_every", "core_every", "sample_every", "sample_tokens", "save_every", "rms_every")
        check_at_least(0, **_values(self, *intervals))
        check_samples(self.prompts, sample_tokens=self.sample_tokens)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Reject sections that do not fit each other."""
        if self.optim.on_spike == "rollback" and self.run.save_every == 0:
            raise ConfigError("--on-spike rollback needs checkpoints to go back to: give --save-every")
        micro = self.schedule.rows * self.model.seq_len
        if self.schedule.batch_tokens is not None and self.schedule.batch_tokens % micro:
            raise ConfigError(
                f"--batch-tokens {self.schedule.batch_tokens} is not a multiple of --rows {self.schedule.rows} x "
                f"--seq-len {self.model.seq_len} = {micro}; change one of the three"
            )


# Bytes of a prompt: its mask has an entry for each pair of tokens.
_LONGEST_PROMPT = 2**14


def check_samples(prompts: Iterable[str], **tokens: int) -> None:
    """Refuse prompts that no tokenizer can read, and more or longer ones than memory can be reserved for.

    Raises:
        ConfigError: there is one, whose bytes on the command line are not UTF-8; or the option of `tokens` is too high.
    """
    check_at_most(2**17, **tokens)
    for prompt in prompts:
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"--prompts {prompt!r}: not UTF-8; type it in a terminal that is") from None
        if size > _LONGEST_PROMPT:
            raise ConfigError(f"--prompts {prompt[:20]!r}...: {size:,} bytes; at most {_LONGEST_PROMPT:,}")


def _values(section: object, *names: str) -> dict[str, Any]:
    """Return fields of a section, those that are None left out."""
    return {name: value for name in names if (value := getattr(section, name)) is not None}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def in_options(error: ValueError) -> str:
    """Return a library's message with its arguments as options: "top_k=0: ..." becomes "--top-k 0: ..."."""
    return re.sub(r"\b([a-z]\w*)=(?:'([^']+)')?", lambda match: f"{_option(match[1])} {match[2] or ''}", str(error))


def check_at_least(least: int, **values: float | None) -> None:
    """Raise ConfigError, naming the option, for a number that is smaller or not finite; None is none."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            finite = "" if math.isfinite(value) else " and finite"
            raise ConfigError(f"{_option(name)} {value}: must be at least {least}{finite}")


def check_at_most(most: int, **values: float) -> None:
    """Raise ConfigError, naming the option, for a number that is larger."""
    for name, value in values.items():
        if value > most:
            raise ConfigError(f"{_option(name)} {value}: must be at most {most:,}")
