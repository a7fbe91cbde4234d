"""The configuration of a run. Each option is declared once here: type, limits, marks, default and text in `--help`.

The docstring below a field is that text. Options override `--recipe`, which overrides the preset or saved configuration
(`--config`); presets and recipes are in `quintic/commands/presets.py`. Derived values (width, number of steps, scaled
learning rates) are not stored but computed in `recipe.py`. Values out of range raise a ConfigError at construction,
which names the option.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from quintic.errors import ConfigError
from quintic.limits import (
    Average,
    Count,
    Fraction,
    Limit,
    Limited,
    NotNegative,
    Positive,
    Whole,
    at_least,
    at_most,
    check,
    metadata_of,
)
from quintic.model.sizes import VariantName
from quintic.optim.rules.names import RuleName

__all__ = [
    "FREE",
    "HIDDEN",
    "OF_ADAMW",
    "OF_MUON",
    "SHOWN",
    "BaseRunConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelName",
    "RunConfig",
    "SampleTokens",
    "ScheduleConfig",
    "WeightsName",
    "check_prompts",
    "marked",
]

ParallelName = Literal["sharded", "ddp", "fsdp", "hsdp", "tp"]
WeightsName = Literal["float32", "mantissa", "8bit"]


# Marks of options, declared beside their types and limits.
FREE = "free"
"""May change when a run is resumed, because it does not affect the trained weights."""
SHOWN = "shown"
"""The command that repeats a run has it also at its default: it describes the run to a reader, and defaults may change
in later versions."""
HIDDEN = "hidden"
"""The command that repeats a run never has it, because it does not affect the result."""
OF_MUON, OF_ADAMW = "of muon", "of adamw"
"""Has no effect with the other --optimizer."""

# A trained vocabulary has at least the 256 bytes and the document start.
_MIN_VOCAB = 257
_SEEDS = 2**63  # PyTorch's generators need smaller seeds

# The sizes of wider matrices overflow 64-bit integers.
Channels = Annotated[int, at_least(1), at_most(100_000)]
Rate = Annotated[NotNegative, at_most(10**6)]
# Folders with a leading dot are hidden, and `durable.new_folder` uses such names for unfinished ones.
FolderName = Annotated[
    str,
    Limit(
        "give a plain folder name without a leading dot, and its parent with --runs-dir",
        lambda name: Path(name).name == name != "" and not name.startswith("."),
    ),
]
SampleTokens = Annotated[int, at_least(0), at_most(2**17)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Limited):
    """The text, and its tokenizer."""

    data: Annotated[str, FREE, SHOWN] = "python"
    """Text: 'python' (the text of your Python installation), a file, a folder, or hf:owner/name[/config]; or several
    with their fractions of the training tokens, as one value: "notes/=0.7 web.jsonl=0.3"."""
    val_data: str | None = None
    """Text for validation, one source named as in --data; by default a part of the training text is held back
    (--val-frac)."""
    text_field: str = "text"
    """Key or column that holds the text in JSON, CSV and Parquet."""
    tokenizer: str | None = None
    """Path of a tokenizer.json, or 'gpt2'; by default one is trained on the text."""
    vocab_size: Annotated[int, SHOWN] = 4096
    """Tokens in the vocabulary of a tokenizer trained here."""
    val_frac: Annotated[float, Limit("must lie strictly between 0 and 1", lambda value: 0 < value < 1)] = 0.03
    """Fraction of the documents held back for validation."""
    max_bytes: Count | None = None
    """Read at most this many bytes of text (for large sources)."""
    data_dir: Annotated[Path, FREE] = Path("data")
    """Folder for prepared data."""
    verify: Annotated[bool, FREE, HIDDEN] = False
    """Compare all prepared data with its checksums; by default only files that are new on this machine or changed."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        super().__post_init__()
        # The vocabulary of a given tokenizer has its own size.
        if self.tokenizer is None:
            check("vocab_size", self.vocab_size, at_least(_MIN_VOCAB), at_most(10**8))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Limited):
    """The shape of the GPT."""

    depth: Annotated[int, at_least(1), at_most(1000), SHOWN] = 4  # planning takes long for deeper models
    """Number of layers; the width is the aspect ratio times the depth, rounded up to a multiple of --head-dim."""
    aspect_ratio: Channels = 64
    """Channels of the residual stream per layer."""
    head_dim: Annotated[Channels, SHOWN] = 64
    """Channels of an attention head."""
    kv_ratio: Count = 1
    """Query heads that share one key/value head (grouped-query attention)."""
    seq_len: Annotated[Count, SHOWN] = 256
    """Tokens of a row, the longest context that the model sees."""
    window_pattern: str = "SSSL"
    """Attention windows by layer, repeated: S is short (--short-window), L sees --seq-len; the last is always L."""
    short_window: Annotated[float, Limit("must be above 0 and at most 1", lambda value: 0 < value <= 1)] = 0.25
    """Window of an S layer as a fraction of --seq-len, such as 0.25 or 0.5."""
    variant: VariantName = "quintic"
    """Initial values, and how far value embeddings may be added: ours, or those of nanochat's model."""
    l3_layers: str | None = None
    """Numbers of layers, from 0, that are followed by a large lookup layer, such as '2,5'; none by default."""
    l3_embeddings: Annotated[int, at_least(0), at_most(10**9)] = 0
    """Rows of a lookup layer's tables; 0: one per 1,000 parameters of the model, but at least one per token."""
    l3_d_up: Annotated[int, at_least(0), at_most(10**9)] = 0
    """Channels between a lookup layer's read and its mixing product; 0: four times the width."""
    l3_k_max: Count = 512
    """Largest number of rows of a token in a lookup layer."""
    l3_tied: bool = True
    """Lookup layers use their keys as values."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Limited):
    """The optimizer."""

    recipe: Literal["quintic", "seed", "nanochat"] = "quintic"
    """Constants: ours, nanochat's early ones ('seed') or its newest. Changes the defaults of other options."""
    scale_rates: bool = False
    """Scale learning rates and decay, given for batches of 2^19 tokens at depth 12, to the run's batch and size."""
    optimizer: Annotated[Literal["muon", "adamw"], SHOWN] = "muon"
    """Optimizer of the weight matrices; embeddings, head and scalars use AdamW either way."""
    muon_lr: Annotated[Rate, SHOWN, OF_MUON] = 0.03
    """Learning rate of the matrices under Muon."""
    adamw_lr: Annotated[Rate, SHOWN, OF_ADAMW] = 0.003
    """Learning rate of the matrices under --optimizer adamw."""
    embedding_lr: Annotated[Rate, SHOWN] = 0.4
    """AdamW learning rate of the token embedding, at width 256 (768 with another --recipe); scaled by width^-0.5."""
    head_lr: Annotated[Rate, SHOWN, OF_MUON] = 0.006
    """AdamW learning rate of the output head, at the same width and scaled in the same way."""
    adamw_head_lr: Annotated[Rate, SHOWN, OF_ADAMW] = 0.01
    """AdamW learning rate of the output head under --optimizer adamw."""
    scalar_lr: Annotated[Rate, SHOWN] = 0.03
    """AdamW learning rate of per-layer scalars and gates."""
    momentum: Annotated[Average, OF_MUON] = 0.9
    """Muon's momentum after its warm-up."""
    momentum_start: Annotated[Average, OF_MUON] = 0.85
    """Muon's momentum at the first step."""
    momentum_warmup_steps: Annotated[Whole, OF_MUON] = 100
    """Steps over which the momentum rises to --momentum."""
    momentum_end: Annotated[Average | None, OF_MUON] = None
    """Muon's final momentum, reached while the learning rates fall; None keeps --momentum."""
    orthogonalizer: Annotated[Literal["auto", "polar_express", "gram", "newton_schulz", "svd"], OF_MUON] = "auto"
    """Muon's method of orthogonalisation; 'auto' is Polar Express in the cheapest form for device and shape."""
    update_rule: Annotated[RuleName | None, OF_MUON] = None
    """Rule of the matrices, see docs/how-to/choose-a-rule.md; adamuon and muown take AdamW's rates; None is Muon."""
    normalize: Annotated[Literal["neuron", "element"] | None, OF_MUON] = None
    """Short for two rules, if there is no --update-rule: 'neuron' for normuon, 'element' for adamuon."""
    state_dtype: Literal["bf16", "int8"] | None = None
    """Keep momentum and AdamW's moments in bfloat16 ('bf16') or 8 bits ('int8'), half or a quarter of float32."""
    weights: WeightsName = "float32"
    """'mantissa' keeps weights in bfloat16 and the other 16 bits of float32 in the optimizer; '8bit' 8 of these."""
    weight_decay: Annotated[Rate, SHOWN, OF_MUON] = 0.3
    """Decay of the matrices under Muon, per unit of learning rate; falls to zero over the run."""
    decay_shape: Literal["linear", "cosine"] = "linear"
    """Shape of the weight decay's fall: a line, or half a cosine."""
    adamw_weight_decay: Annotated[Rate, SHOWN, OF_ADAMW] = 0.1
    """Decay of the matrices under --optimizer adamw, per unit of learning rate; falls to zero over the run."""
    cautious: bool = True
    """Decay only weights that the update also moves toward zero; rules that decide themselves what decays ignore it."""
    beta1: Average = 0.8
    """AdamW's first-moment coefficient."""
    beta2: Average = 0.95
    """AdamW's second-moment coefficient."""
    clip_norm: Positive | None = None
    """Clip the gradient of all weights together to this norm; None does not clip."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """If the loss jumps: warn only, skip the step's update, or go back to the last checkpoint and on with new text."""
    spike_sigmas: NotNegative = 6.0
    """A loss this many standard deviations above the smoothed loss counts as a jump (--on-spike)."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        super().__post_init__()
        if self.state_dtype is not None:
            from quintic.optim.numeric.bf16_state import MAX_BF16_BETA

            words = f"must be at most {MAX_BF16_BETA} with --state-dtype {self.state_dtype}"
            for name in ("momentum", "momentum_start", "momentum_end", "beta1", "beta2"):
                check(name, getattr(self, name), Limit(words, lambda value: value <= MAX_BF16_BETA))


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Limited):
    """Length of the run, and its batches."""

    steps: Annotated[Count | None, SHOWN] = 500
    """Optimizer steps; 'None' derives them from --target-flops; without that, from --tokens-per-param."""
    target_flops: Positive | None = None
    """Floating-point operations of the whole run, if --steps is 'None'."""
    tokens_per_param: Annotated[float, Limit("must be above 0", lambda value: value > 0), at_most(10**9)] = 10.5
    """Training tokens per parameter of blocks and head, if neither --steps nor --target-flops is given."""
    batch_tokens: Annotated[Count | None, SHOWN] = 4096
    """Tokens of one optimizer step on all devices; 'None' chooses a power of two by the size of the model."""
    rows: Annotated[Count, SHOWN] = 16
    """Most rows of --seq-len tokens in one pass on each device; several passes accumulate their gradients."""
    warmup_frac: Fraction = 0.02
    """Fraction of the steps over which the learning rates rise from zero."""
    warmup_steps: Whole | None = None
    """Steps over which the learning rates rise, instead of --warmup-frac."""
    warmdown_frac: Fraction = 0.4
    """Fraction of the steps over which the learning rates fall at the end."""
    final_lr_frac: Fraction = 0.0
    """Final learning rates, as a fraction of their peak."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        super().__post_init__()
        if self.warmup_steps is None and self.warmup_frac + self.warmdown_frac > 1:
            raise ConfigError("--warmup-frac and --warmdown-frac add up to more than 1: shorten one of them")


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig(Limited):
    """Options of runs of any model: their folder, seed, device and precision."""

    run: Annotated[FolderName | None, FREE, HIDDEN] = None
    """Name of the run's folder; by default made from date and time. With --resume (not for speedruns): the run to
    continue. Under torchrun, use --name instead, because torchrun has options that begin with --run."""
    runs_dir: Annotated[Path, FREE, HIDDEN] = Path("runs")
    """Folder of all runs."""
    seed: Annotated[int, at_least(0), Limit("must be below 2^63", lambda value: value < _SEEDS), SHOWN] = 1337
    """Seed of initialisation, data order and samples."""
    device: Annotated[Literal["auto", "cpu", "cuda"], SHOWN] = "auto"
    """Device to compute on; 'auto' takes a GPU if there is one."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], SHOWN] = "auto"
    """Precision of activations; 'auto' is bfloat16 if the hardware is fast at it, else float32. For weights see
    --weights; the speedrun's weights have this dtype, too."""
    attention: Annotated[Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"], SHOWN] = "auto"
    """Attention implementation; 'auto' takes the fastest one that the device supports."""
    compile: Annotated[bool | None, SHOWN] = None
    """Compile the model with torch.compile; by default only on a GPU."""
    # The system kills processes that start too many threads.
    threads: Annotated[Annotated[int, at_least(1), at_most(1024)] | None, FREE, SHOWN] = None
    """CPU threads; by default PyTorch's choice."""


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
    capture: Annotated[bool, FREE] = True
    """Replay passes as CUDA graphs, which is faster, and keeps the memory of activations between passes. Only on a GPU,
    with an attention other than sdpa and flex, and with one rank or sharded ones."""
    parallel: Annotated[ParallelName, FREE] = "sharded"
    """How several devices (torchrun) share the work, see
    docs/how-to/train/several-gpus.md. It has no effect on one device."""
    shard_ranks: Annotated[Count | None, FREE] = None
    """Ranks that hold one copy of the model under --parallel hsdp; by default the ranks of a host."""
    eval_every: Annotated[Whole, FREE] = 100
    """Steps between evaluations, the first of them before training (0: only at the end)."""
    eval_tokens: Count = 131_072
    """Most validation tokens per evaluation; at least one batch is scored."""
    core: Annotated[str | None, FREE] = None
    """Folder with in-context tasks of CORE to answer: JSONL files, or nanochat's eval_bundle."""
    core_every: Annotated[Whole, FREE] = 0
    """Steps between evaluations on --core (0: only at the end)."""
    core_items: Annotated[Count, FREE] = 500
    """Most items per task of --core."""
    sample_every: Annotated[Whole, FREE] = 0
    """Steps between text samples (0: only at the end)."""
    sample_tokens: Annotated[SampleTokens, FREE] = 160
    """Tokens per sample."""
    prompts: Annotated[tuple[str, ...], FREE] = ()
    """Beginnings of the samples; by default some that suit the data."""
    save_every: Annotated[Whole, FREE] = 200
    """Steps between checkpoints (0: only at the end)."""
    keep: Annotated[Count, FREE] = 2
    """Checkpoints kept."""
    rms_every: Annotated[Whole, FREE] = 10
    """Steps between measurements of gradient and update sizes (0: never)."""
    tensorboard: Annotated[bool, FREE, HIDDEN] = False
    """Also write TensorBoard files (needs the package tensorboard)."""
    wandb: Annotated[str | None, FREE, HIDDEN] = None
    """Also log to this Weights & Biases project (needs the package wandb)."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, names that cannot be a folder's, and prompts that cannot be used."""
        super().__post_init__()
        check_prompts(self.prompts)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    data: Annotated[DataConfig, FREE, SHOWN] = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: Annotated[RunConfig, FREE, HIDDEN] = field(default_factory=RunConfig)

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


def marked(mark: str) -> list[str]:
    """Return the names of the options that have a mark."""
    return [name for section in vars(Config()).values() for name, found in metadata_of(type(section)) if found == mark]


# Bytes of a prompt. The attention mask of a prompt grows with the square of its length.
_LONGEST_PROMPT = 2**14


def check_prompts(prompts: Iterable[str]) -> None:
    """Check that beginnings of texts, as typed on the command line, are UTF-8 and fit into memory.

    Raises:
        ConfigError: a prompt is not UTF-8 or is too long.
    """
    for prompt in prompts:
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"--prompts {prompt!r}: not UTF-8; type it in a terminal that uses UTF-8") from None
        if size > _LONGEST_PROMPT:
            raise ConfigError(f"--prompts {prompt[:20]!r}...: {size:,} bytes; must be at most {_LONGEST_PROMPT:,}")
