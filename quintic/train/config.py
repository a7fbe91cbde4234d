"""The configuration of a run. Each field is declared once here; the command line's options are generated from it.

The docstring below a field is its text in `--help`. Options override `--recipe`, which overrides the preset or saved
configuration (`--config`); presets and recipes are in `quintic/commands/presets.py`. Derived values (width, number of
steps, scaled learning rates) are not stored but computed in `recipe.py`. Values out of range raise a ConfigError at
construction, which names the option.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quintic.errors import ConfigError
from quintic.optim.rules.names import RuleName

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
    "option_of",
]

ParallelName = Literal["sharded", "ddp", "fsdp", "hsdp", "tp"]
WeightsName = Literal["float32", "mantissa", "8bit"]

# A trained vocabulary has at least the 256 bytes and the document start.
_MIN_VOCAB = 257
_SEEDS = 2**63  # PyTorch's generators need smaller seeds


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and its tokenizer."""

    data: str = "python"
    """Text: 'python' (the text of your Python installation), a file, a folder, or hf:owner/name[/config]; or several
    with their fractions of the training tokens, as one value: "notes/=0.7 web.jsonl=0.3"."""
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
    """Fraction of the documents held back for validation."""
    max_bytes: int | None = None
    """Read at most this many bytes of text (for large sources)."""
    data_dir: Path = Path("data")
    """Folder for prepared data."""
    verify: bool = False
    """Compare all prepared data with its checksums; by default only files that are new on this machine or changed."""

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
    """Number of layers; the width is the aspect ratio times the depth, rounded up to a multiple of --head-dim."""
    aspect_ratio: int = 64
    """Channels of the residual stream per layer."""
    head_dim: int = 64
    """Channels of an attention head."""
    kv_ratio: int = 1
    """Query heads that share one key/value head (grouped-query attention)."""
    seq_len: int = 256
    """Tokens of a row, the longest context that the model sees."""
    window_pattern: str = "SSSL"
    """Attention windows by layer, repeated: S is short (--short-window), L sees --seq-len; the last is always L."""
    short_window: float = 0.25
    """Window of an S layer as a fraction of --seq-len, such as 0.25 or 0.5."""
    l3_layers: str | None = None
    """Numbers of layers, from 0, that are followed by a large lookup layer, such as '2,5'; none by default."""
    l3_embeddings: int = 0
    """Rows of a lookup layer's tables; 0: one per 1,000 parameters of the model, but at least one per token."""
    l3_d_up: int = 0
    """Channels between a lookup layer's read and its mixing product; 0: four times the width."""
    l3_k_max: int = 512
    """Largest number of rows of a token in a lookup layer."""
    l3_tied: bool = True
    """Lookup layers use their keys as values."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        check_at_least(0, l3_embeddings=self.l3_embeddings, l3_d_up=self.l3_d_up)
        check_at_least(1, l3_k_max=self.l3_k_max, kv_ratio=self.kv_ratio, seq_len=self.seq_len)
        check_at_least(1, depth=self.depth, aspect_ratio=self.aspect_ratio, head_dim=self.head_dim)
        # Planning takes long for deeper models, and the sizes of wider matrices overflow 64-bit integers.
        check_at_most(1000, depth=self.depth)
        check_at_most(100_000, aspect_ratio=self.aspect_ratio, head_dim=self.head_dim)
        check_at_most(10**9, l3_embeddings=self.l3_embeddings, l3_d_up=self.l3_d_up)
        if not 0 < self.short_window <= 1:
            raise ConfigError(f"--short-window {self.short_window}: must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    recipe: Literal["quintic", "seed", "nanochat"] = "quintic"
    """Constants: ours, nanochat's early ones ('seed') or its newest. Changes the defaults of other options."""
    scale_rates: bool = False
    """Scale learning rates and decay, given for batches of 2^19 tokens at depth 12, to the run's batch and size."""
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
    """AdamW learning rate of the output head under --optimizer adamw."""
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
    update_rule: RuleName | None = None
    """Rule of the matrices, see docs/how-to/choose-a-rule.md; adamuon and muown take AdamW's rates; None is Muon."""
    normalize: Literal["neuron", "element"] | None = None
    """Short for two rules, if there is no --update-rule: 'neuron' for normuon, 'element' for adamuon."""
    state_dtype: Literal["bf16", "int8"] | None = None
    """Keep momentum and AdamW's moments in bfloat16 ('bf16') or 8 bits ('int8'), half or a quarter of float32."""
    weights: WeightsName = "float32"
    """'mantissa' keeps weights in bfloat16 and the other 16 bits of float32 in the optimizer; '8bit' 8 of these."""
    weight_decay: float = 0.3
    """Decay of the matrices under Muon, per unit of learning rate; falls to zero over the run."""
    decay_shape: Literal["linear", "cosine"] = "linear"
    """Shape of the weight decay's fall: a line, or half a cosine."""
    adamw_weight_decay: float = 0.1
    """Decay of the matrices under --optimizer adamw, per unit of learning rate; falls to zero over the run."""
    cautious: bool = True
    """Decay only weights that the update also moves toward zero; rules that decide themselves what decays ignore it."""
    beta1: float = 0.8
    """AdamW's first-moment coefficient."""
    beta2: float = 0.95
    """AdamW's second-moment coefficient."""
    clip_norm: float | None = None
    """Clip the gradient of all weights together to this norm; None does not clip."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """If the loss jumps: warn only, skip the step's update, or go back to the last checkpoint and on with new text."""
    spike_sigmas: float = 6.0
    """A loss this many standard deviations above the smoothed loss counts as a jump (--on-spike)."""

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
                raise ConfigError(f"{option_of(name)} {value}: must be at least 0 and below 1")
        if self.state_dtype is not None:
            from quintic.optim.numeric.bf16_state import MAX_BF16_BETA

            for name, value in averages.items():
                if value > MAX_BF16_BETA:
                    limit = f"must be at most {MAX_BF16_BETA} with --state-dtype {self.state_dtype}"
                    raise ConfigError(f"{option_of(name)} {value}: {limit}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Length of the run, and its batches."""

    steps: int | None = 500
    """Optimizer steps; 'None' derives them from --target-flops; without that, from --tokens-per-param."""
    target_flops: float | None = None
    """Floating-point operations of the whole run, if --steps is 'None'."""
    tokens_per_param: float = 10.5
    """Training tokens per parameter of blocks and head, if neither --steps nor --target-flops is given."""
    batch_tokens: int | None = 4096
    """Tokens of one optimizer step on all devices; 'None' chooses a power of two by the size of the model."""
    rows: int = 16
    """Most rows of --seq-len tokens in one pass on each device; several passes accumulate their gradients."""
    warmup_frac: float = 0.02
    """Fraction of the steps over which the learning rates rise from zero."""
    warmup_steps: int | None = None
    """Steps over which the learning rates rise, instead of --warmup-frac."""
    warmdown_frac: float = 0.4
    """Fraction of the steps over which the learning rates fall at the end."""
    final_lr_frac: float = 0.0
    """Final learning rates, as a fraction of their peak."""

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
                raise ConfigError(f"{option_of(name)} {value}: must lie between 0 and 1")
        if self.warmup_steps is None and self.warmup_frac + self.warmdown_frac > 1:
            raise ConfigError("--warmup-frac and --warmdown-frac add up to more than 1: shorten one of them")


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig:
    """Options of runs of any model: their folder, seed, device and precision."""

    run: str | None = None
    """Name of the run's folder; by default made from date and time. With --resume (not for speedruns): the run to
    continue. Under torchrun, use --name instead, because torchrun has options that begin with --run."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    seed: int = 1337
    """Seed of initialisation, data order and samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; 'auto' takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of activations; 'auto' is bfloat16 if the hardware is fast at it, else float32. For weights see
    --weights; the speedrun's weights have this dtype, too."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"] = "auto"
    """Attention implementation; 'auto' takes the fastest one that the device supports."""
    compile: bool | None = None
    """Compile the model with torch.compile; by default only on a GPU."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""

    def __post_init__(self) -> None:
        """Reject numbers out of range and names that cannot be a folder's."""
        check_at_least(1, threads=self.threads)
        check_at_least(0, seed=self.seed)
        if self.seed >= _SEEDS:
            raise ConfigError(f"--seed {self.seed}: must be below 2^63")
        # Folders with a leading dot are hidden, and `durable.new_folder` uses such names for unfinished ones.
        if self.run is not None and (not self.run or Path(self.run).name != self.run or self.run.startswith(".")):
            raise ConfigError(
                f"--run {self.run!r}: give a plain folder name without a leading dot, and its parent with --runs-dir"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(BaseRunConfig):
    """Initial weights, devices, evaluations, checkpoints and logs."""

    init_from: str | None = None
    """Start from the weights of this run (its name or folder) or exported model (its folder), with its sizes and
    tokenizer but a new optimizer and schedule; by default from random weights."""
    fp8: bool = False
    """Multiply in 8 bits (a GPU of compute capability 8.9 or more)."""
    fp8_recipe: Literal["auto", "tensorwise", "rowwise"] = "auto"
    """Scaling of --fp8: 'tensorwise' has one scale per tensor, 'rowwise' one per row and column, which is more exact;
    both in all layers of suitable sizes. 'auto' is tensorwise, only in the head and in layers that become faster."""
    parallel: ParallelName = "sharded"
    """How several devices (torchrun) share the work, see
    docs/how-to/train/several-gpus.md. It has no effect on one device."""
    shard_ranks: int | None = None
    """Ranks that hold one copy of the model under --parallel hsdp; by default the ranks of a host."""
    eval_every: int = 100
    """Steps between evaluations, the first of them before training (0: only at the end)."""
    eval_tokens: int = 131_072
    """Most validation tokens per evaluation; at least one batch is scored."""
    core: str | None = None
    """Folder with in-context tasks of CORE to answer: JSONL files, or nanochat's eval_bundle."""
    core_every: int = 0
    """Steps between evaluations on --core (0: only at the end)."""
    core_items: int = 500
    """Most items per task of --core."""
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
        """Reject numbers out of range and names that cannot be a folder's."""
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


# Bytes of a prompt. The attention mask of a prompt grows with the square of its length.
_LONGEST_PROMPT = 2**14


def check_samples(prompts: Iterable[str], **tokens: int) -> None:
    """Check that prompts are UTF-8, and that prompts and samples, with these numbers of tokens, fit into memory.

    Raises:
        ConfigError: a prompt is not UTF-8 or is too long, or the number of tokens is too high.
    """
    check_at_most(2**17, **tokens)
    for prompt in prompts:
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"--prompts {prompt!r}: not UTF-8; type it in a terminal that uses UTF-8") from None
        if size > _LONGEST_PROMPT:
            raise ConfigError(f"--prompts {prompt[:20]!r}...: {size:,} bytes; must be at most {_LONGEST_PROMPT:,}")


def _values(section: object, *names: str) -> dict[str, Any]:
    """Return the named fields of a section that are not None."""
    return {name: value for name in names if (value := getattr(section, name)) is not None}


def option_of(name: str) -> str:
    """Return the option of a field."""
    return "--" + name.replace("_", "-")


def in_options(error: ValueError) -> str:
    """Return a library's message with arguments written as options: "top_k=0: ..." becomes "--top-k 0: ..."."""
    return re.sub(r"\b([a-z]\w*)=(?:'([^']+)')?", lambda match: f"{option_of(match[1])} {match[2] or ''}", str(error))


def check_at_least(least: int, **values: float | None) -> None:
    """Raise a ConfigError that names the option if a number is below `least` or not finite; None passes."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            finite = "" if math.isfinite(value) else " and finite"
            raise ConfigError(f"{option_of(name)} {value}: must be at least {least}{finite}")


def check_at_most(most: int, **values: float) -> None:
    """Raise a ConfigError that names the option if a number is above `most`."""
    for name, value in values.items():
        if value > most:
            raise ConfigError(f"{option_of(name)} {value}: must be at most {most:,}")
