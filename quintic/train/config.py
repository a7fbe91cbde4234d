"""The configuration of a run: every default once, with its meaning; the command line's options are made from it.

Precedence is preset < saved configuration (`--config`) < options. Nothing derived is stored here: what follows from
these numbers (width, steps, learning rates after scaling) is computed in `scaling.py` and `recipe.py`.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quintic.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "changed_fields",
    "from_dict",
    "gpu_preset",
    "load_config",
    "to_dict",
]


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


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the weights are updated."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """Optimizer of the weight matrices; embeddings, head and scalars use AdamW either way."""
    muon_lr: float = 0.02
    """Learning rate of the matrices under Muon."""
    adamw_lr: float = 0.003
    """Learning rate of the matrices under --optimizer adamw."""
    embedding_lr: float = 0.2
    """AdamW learning rate of the token embedding, at width 256 (scaled by width^-0.5)."""
    head_lr: float = 0.006
    """AdamW learning rate of the output head, at width 256 (scaled by width^-0.5)."""
    scalar_lr: float = 0.03
    """AdamW learning rate of per-layer scalars and gates."""
    momentum: float = 0.95
    """Muon's momentum after its warm-up."""
    momentum_start: float = 0.85
    """Muon's momentum at the first step."""
    momentum_warmup_steps: int = 100
    """Steps over which the momentum rises to --momentum."""
    orthogonalizer: Literal["polar_express", "newton_schulz", "svd"] = "polar_express"
    """How Muon orthogonalises its updates."""
    normalize: Literal["neuron"] | None = None
    """'neuron' gives NorMuon: updates evened out per neuron."""
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
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention implementation; 'auto' takes the fastest the device has."""
    compile: bool | None = None
    """Compile the model with torch.compile; by default only on a GPU."""
    threads: int | None = None
    """CPU threads; by default PyTorch's choice."""
    eval_every: int = 100
    """Steps between evaluations (0: only at the end)."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation, at most."""
    sample_every: int = 0
    """Steps between text samples (0: only at the end)."""
    sample_tokens: int = 160
    """Tokens per sample."""
    prompts: tuple[str, ...] = ()
    """Beginnings of the samples; by default two that suit the data."""
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Reject values that no machine could honour."""
        positive = {
            "--vocab-size": self.data.vocab_size,
            "--depth": self.model.depth,
            "--head-dim": self.model.head_dim,
            "--kv-ratio": self.model.kv_ratio,
            "--seq-len": self.model.seq_len,
            "--batch-tokens": self.schedule.batch_tokens,
            "--rows": self.schedule.rows,
            "--keep": self.run.keep,
            "--eval-tokens": self.run.eval_tokens,
        }
        for option, value in positive.items():
            if value < 1:
                raise ConfigError(f"{option} {value}: must be at least 1")
        fractions = {
            "--warmup-frac": self.schedule.warmup_frac,
            "--warmdown-frac": self.schedule.warmdown_frac,
            "--final-lr-frac": self.schedule.final_lr_frac,
        }
        for option, fraction in fractions.items():
            if not 0 <= fraction <= 1:
                raise ConfigError(f"{option} {fraction}: must lie between 0 and 1")
        if self.schedule.warmup_frac + self.schedule.warmdown_frac > 1:
            raise ConfigError("--warmup-frac and --warmdown-frac add up to more than 1: shorten one of them")
        if not 0 < self.data.val_frac < 1:
            raise ConfigError(f"--val-frac {self.data.val_frac}: must lie strictly between 0 and 1")
        if self.schedule.steps is not None and self.schedule.steps < 1:
            raise ConfigError(f"--steps {self.schedule.steps}: must be at least 1")
        micro = self.schedule.rows * self.model.seq_len
        if self.schedule.batch_tokens % micro:
            raise ConfigError(
                f"--batch-tokens {self.schedule.batch_tokens} is not a multiple of --rows {self.schedule.rows} x "
                f"--seq-len {self.model.seq_len} = {micro}; change one of the three"
            )
        if self.run.run is not None and (not self.run.run or Path(self.run.run).name != self.run.run):
            raise ConfigError(f"--run {self.run.run!r}: give a plain folder name, and its parent with --runs-dir")


def gpu_preset() -> Config:
    """Return the defaults for one GPU: depth 12 at 2048 tokens.

    Batch, context and the AdamW learning rates follow nanochat's depth-12 recipe.
    """
    return Config(
        data=DataConfig(vocab_size=32_768, val_frac=0.01),
        model=ModelConfig(depth=12, head_dim=128, seq_len=2048),
        optim=OptimConfig(
            muon_lr=0.02, adamw_lr=0.002, embedding_lr=0.5, head_lr=0.007, scalar_lr=0.1, momentum_warmup_steps=300
        ),
        schedule=ScheduleConfig(steps=None, batch_tokens=2**19, rows=32, warmup_frac=0.0),
        run=RunConfig(eval_every=250, eval_tokens=2**21, save_every=1000),
    )


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values, ready for JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def from_dict(values: dict[str, Any], *, origin: str) -> Config:
    """Return the configuration that `to_dict` made these values from.

    Args:
        values: nested plain values; missing fields keep their defaults.
        origin: file the values come from, for messages.

    Raises:
        ConfigError: an unknown section or field, or values that do not fit.
    """
    sections: dict[str, Any] = {}
    types = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for section, fields in values.items():
        if section not in types:
            raise ConfigError(f"{origin}: unknown section {section!r}; there are {', '.join(types)}")
        section_type: Any = types[section]
        defaults = section_type()
        unknown = set(fields) - {f.name for f in dataclasses.fields(defaults)}
        if unknown:
            raise ConfigError(f"{origin}: unknown field {section}.{sorted(unknown)[0]}; remove it")
        restored = {
            name: Path(value)
            if isinstance(getattr(defaults, name), Path)
            else tuple(value)
            if isinstance(value, list)
            else value
            for name, value in fields.items()
        }
        sections[section] = section_type(**restored)
    return Config(**sections)


def load_config(path: Path) -> Config:
    """Read a configuration saved as JSON (a run's `config.json`).

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the config.json of a run") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration ({error})") from None
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise ConfigError(f"{path}: not a configuration; give the config.json of a run")
    return from_dict(values, origin=str(path))


def changed_fields(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ as `{"section.field": (old, new)}`."""
    changes = {}
    for section in dataclasses.fields(Config):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for f in dataclasses.fields(before):
            values = getattr(before, f.name), getattr(after, f.name)
            if values[0] != values[1]:
                changes[f"{section.name}.{f.name}"] = values
    return changes
