"""The configuration of a run: every default once, with its meaning; the command line's options are made from it.

Precedence is preset < saved configuration (`--config`) < options. Nothing derived is stored here: what follows from
these numbers (width, steps, learning rates after scaling) is computed in `recipe.py`. Numbers that no machine could
honour are refused at construction, with the option's name.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quintic.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "check_prompts",
    "gpu_preset",
]

# The 256 bytes and the document start: no trained vocabulary is smaller.
_MIN_VOCAB = 257
_SEEDS = 2**63  # what PyTorch's generators take


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    data: str = "python"
    """Text: 'python' (the text of your Python installation), a file, a folder, or hf:owner/name[/config]."""
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
            _check_at_least(_MIN_VOCAB, vocab_size=self.vocab_size)
        _check_at_least(1, max_bytes=self.max_bytes)
        if not 0 < self.val_frac < 1:
            raise ConfigError(f"--val-frac {self.val_frac}: must lie strictly between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT."""

    depth: int = 4
    """The dial: number of layers; the width is 64 x depth, rounded up to a multiple of --head-dim."""
    head_dim: int = 64
    """Channels of an attention head."""
    kv_ratio: int = 1
    """Query heads that share one key/value head (grouped-query attention)."""
    seq_len: int = 256
    """Tokens the model sees at once."""
    window_pattern: str = "SSSL"
    """Attention windows by layer, repeated: S sees a quarter of --seq-len, L all of it; the last layer is always L."""
    l3_layers: str | None = None
    """Layers, counted from 0, behind which a large lookup layer stands, as in '2,5'; none by default."""
    l3_embeddings: int = 0
    """Rows of a lookup layer's tables; 0: one for 1,000 parameters, but at least one for each token."""
    l3_d_up: int = 0
    """Channels that a lookup layer raises what it found to; 0: four times the width."""
    l3_k_max: int = 512
    """Rows of one token in a lookup layer, at most."""
    l3_tied: bool = True
    """Lookup layers take their keys as values, too."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        _check_at_least(0, l3_embeddings=self.l3_embeddings, l3_d_up=self.l3_d_up)
        _check_at_least(1, l3_k_max=self.l3_k_max)
        _check_at_least(1, depth=self.depth, head_dim=self.head_dim, kv_ratio=self.kv_ratio, seq_len=self.seq_len)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the weights are updated."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of the weight matrices; embeddings, head and scalars use AdamW either way."""
    muon_lr: float = 0.03
    """Learning rate of the matrices under Muon."""
    adamw_lr: float = 0.003
    """Learning rate of the matrices under --optimizer adamw."""
    embedding_lr: float = 0.4
    """AdamW learning rate of the token embedding, at width 256 (scaled by width^-0.5)."""
    head_lr: float = 0.006
    """AdamW learning rate of the output head, at width 256 (scaled by width^-0.5)."""
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
    orthogonalizer: Literal["auto", "polar_express", "gram", "newton_schulz", "svd"] = "auto"
    """How Muon orthogonalises its updates; 'auto' is Polar Express in the cheapest form for device and shape."""
    normalize: Literal["neuron"] | None = None
    """'neuron' is NorMuon: updates evened out per neuron; None is plain Muon."""
    state_dtype: Literal["bf16"] | None = None
    """'bf16' keeps momentum and AdamW's moments in bfloat16, half the memory; None keeps them in float32."""
    weight_decay: float = 0.3
    """Decay of the matrices under Muon, per unit of learning rate; falls linearly to zero over the run."""
    adamw_weight_decay: float = 0.1
    """The same under --optimizer adamw."""
    cautious: bool = True
    """Decay only weights that the update does not push the other way."""
    beta1: float = 0.8
    """AdamW's first-moment coefficient."""
    beta2: float = 0.95
    """AdamW's second-moment coefficient."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        _check_at_least(
            0,
            muon_lr=self.muon_lr,
            adamw_lr=self.adamw_lr,
            embedding_lr=self.embedding_lr,
            head_lr=self.head_lr,
            adamw_head_lr=self.adamw_head_lr,
            scalar_lr=self.scalar_lr,
            momentum_warmup_steps=self.momentum_warmup_steps,
            weight_decay=self.weight_decay,
            adamw_weight_decay=self.adamw_weight_decay,
        )
        averages = {name: getattr(self, name) for name in ("momentum", "momentum_start", "beta1", "beta2")}
        _check_below_one(**averages)
        if self.state_dtype is not None:
            from quintic.optim.rules.narrow_state import MOST_OF_BF16

            for name, value in averages.items():
                if value > MOST_OF_BF16:
                    raise ConfigError(f"{_option(name)} {value}: must be at most {MOST_OF_BF16} with bfloat16 state")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long, and with which batches."""

    steps: int | None = 500
    """Optimizer steps; 'None' derives them from --tokens-per-param."""
    tokens_per_param: float = 10.5
    """Training tokens per parameter of blocks and head, where --steps is 'None'."""
    batch_tokens: int = 4096
    """Tokens of one optimizer step."""
    rows: int = 16
    """Rows of --seq-len tokens that go through the model at once; the rest of the batch is accumulated."""
    warmup_frac: float = 0.02
    """Share of the steps over which the learning rates rise from zero."""
    warmdown_frac: float = 0.4
    """Share of the steps over which they fall again at the end."""
    final_lr_frac: float = 0.0
    """Where they end, as a share of their peak."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        _check_at_least(1, steps=self.steps, batch_tokens=self.batch_tokens, rows=self.rows)
        _check_at_least(0, tokens_per_param=self.tokens_per_param)
        for name in ("warmup_frac", "warmdown_frac", "final_lr_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_option(name)} {getattr(self, name)}: must lie between 0 and 1")
        if self.warmup_frac + self.warmdown_frac > 1:
            raise ConfigError("--warmup-frac and --warmdown-frac add up to more than 1: shorten one of them")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where to run, what to record."""

    run: str | None = None
    """Name of the run's folder; by default date, time and depth. With --resume: the run to continue."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    seed: int = 1337
    """Seed of initialisation, data order and samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; 'auto' takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of activations; 'auto' is bfloat16 where the hardware has it, else float32. Weights are float32."""
    attention: Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"] = "auto"
    """Attention implementation; 'auto' takes the fastest the device has."""
    compile: bool | None = None
    """Compile the model with torch.compile; by default only on a GPU."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""
    eval_every: int = 100
    """Steps between evaluations, the first of them before training (0: only at the end)."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation, at most."""
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
    """Also write TensorBoard files (needs quintic[tensorboard])."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (needs quintic[wandb])."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and a name that is no folder's."""
        _check_at_least(1, threads=self.threads, eval_tokens=self.eval_tokens, keep=self.keep)
        _check_at_least(
            0,
            seed=self.seed,
            eval_every=self.eval_every,
            sample_every=self.sample_every,
            sample_tokens=self.sample_tokens,
            save_every=self.save_every,
            rms_every=self.rms_every,
        )
        if self.seed >= _SEEDS:
            raise ConfigError(f"--seed {self.seed}: must be below 2^63")
        check_prompts(self.prompts)
        # A leading dot hides a folder, and marks what is not finished yet.
        if self.run is not None and (not self.run or Path(self.run).name != self.run or self.run.startswith(".")):
            raise ConfigError(
                f"--run {self.run!r}: give a plain folder name without a leading dot, and its parent with --runs-dir"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Reject a batch that is not a whole number of passes through the model."""
        micro = self.schedule.rows * self.model.seq_len
        if self.schedule.batch_tokens % micro:
            raise ConfigError(
                f"--batch-tokens {self.schedule.batch_tokens} is not a multiple of --rows {self.schedule.rows} x "
                f"--seq-len {self.model.seq_len} = {micro}; change one of the three"
            )


def gpu_preset() -> Config:
    """Return the defaults for one GPU: depth 12 at 2048 tokens.

    Batch, context and the AdamW learning rates follow nanochat's depth-12 recipe.
    """
    return Config(
        data=DataConfig(vocab_size=32_768, val_frac=0.01),
        model=ModelConfig(depth=12, head_dim=128, seq_len=2048),
        optim=OptimConfig(
            muon_lr=0.02,
            adamw_lr=0.002,
            embedding_lr=0.5,
            head_lr=0.007,
            adamw_head_lr=0.007,
            scalar_lr=0.1,
            weight_decay=0.2,
            momentum_warmup_steps=300,
        ),
        schedule=ScheduleConfig(steps=None, batch_tokens=2**19, rows=32, warmup_frac=0.0),
        run=RunConfig(eval_every=250, eval_tokens=2**21, save_every=1000),
    )


def check_prompts(prompts: Iterable[str]) -> None:
    """Refuse prompts that no tokenizer can read: bytes of the command line that are not UTF-8.

    Raises:
        ConfigError: there is one.
    """
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--prompts {prompt!r}: not UTF-8; type it in a terminal that is") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_at_least(least: int, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            finite = "" if math.isfinite(value) else " and finite"
            raise ConfigError(f"{_option(name)} {value}: must be at least {least}{finite}")


def _check_below_one(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{_option(name)} {value}: must be at least 0 and below 1")
