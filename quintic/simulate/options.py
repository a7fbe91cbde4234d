"""Options of `quintic plan --model` and `quintic rates`. Does not import PyTorch, so that `--help` answers quickly."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from quintic.errors import ConfigError
from quintic.limits import Count, Limit, Limited, NotNegative
from quintic.optim.rules.names import RuleName

__all__ = ["RatesOptions", "SimulationOptions", "size_in_bytes"]

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}
_LEAST_MEMORY = 2**20


def size_in_bytes(text: str) -> int:
    """Return the bytes that a text such as 80GiB, 80GB or 24000MiB stands for; a number alone is bytes.

    Raises:
        ConfigError: the text is no such size, or less than a MiB. The message begins with `--memory`.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"--memory {text}: give a number with a unit, such as 80GiB, 80GB or 24000MiB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < _LEAST_MEMORY:
        raise ConfigError(
            f"--memory {text}: {size:,} bytes are less than a MiB; give the memory of a device, as in 80GiB"
        )
    return size


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Show what the optimizer of any model does on any number of GPUs, without them."""

    model: str
    """A well-known model such as llama-3-70b, the path of a config.json, or owner/name on the Hugging Face Hub."""
    memory: str | None = None
    """Memory of one device, such as 80GiB: names the cheapest settings that fit into it."""
    mesh: str | None = None
    """Ranks along each dimension of the mesh, as in 8x4; by default 8, with --memory 1."""
    layout: str = "fsdp"
    """Kind of each dimension: dp (DDP), replicate, fsdp, ep, tp; as in fsdp,tp."""
    node_size: int = 8
    """Consecutive ranks that are on one node."""
    replicas: Literal["auto", "divide", "repeat"] = "auto"
    """Work on parameters with several copies: divided among all ranks, or repeated by the ranks of each copy."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The parameters' dtype."""
    orthogonalizer: Literal["auto", "polar_express", "gram", "newton_schulz", "svd"] = "auto"
    """Method of orthogonalisation."""
    update_rule: RuleName | None = None
    """Rule of the matrices; None for Muon."""
    normalize: Literal["neuron", "element"] | None = None
    """Short for two rules: 'neuron' for --update-rule normuon, 'element' for adamuon."""
    master: Literal["fp32", "mantissa", "8bit"] | None = None
    """Extra precision kept for bfloat16 parameters."""
    state_dtype: Literal["bf16", "int8"] | None = None
    """'bf16' for momentum and moments in bfloat16, 'int8' for 8 bits of each."""

    def __post_init__(self) -> None:
        if self.memory is not None:
            size_in_bytes(self.memory)
        if self.normalize is not None and self.update_rule is not None:
            raise ConfigError(f"--normalize {self.normalize}: is short for an --update-rule; leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class RatesOptions(Limited):
    """Say where to begin with a model: learning rates, weight decay, batch, length, and memory by option."""

    model: str
    """A well-known model such as llama-3-8b, the path of a config.json, or owner/name on the Hugging Face Hub."""
    tokens: Annotated[float, Limit("must be at least 1 and finite", lambda value: 1 <= value < math.inf)] | None = None
    """Tokens to train on, as in 20e9; None for 20 per parameter."""
    batch_tokens: Count | None = None
    """Tokens of a step; None for the harness' batch for these tokens."""
    adamw_lr: NotNegative = 0.0003
    """Learning rate that AdamW has, or would have, for this model."""
    adamw_weight_decay: NotNegative = 0.1
    """Weight decay that AdamW has with it."""
    ranks: Count = 1
    """Ranks among which weights, gradients and state are divided (FSDP2)."""
