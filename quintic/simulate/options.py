"""Options of `quintic plan --model`. Does not import PyTorch, so that `--help` answers quickly."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SimulationOptions"]


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Show what the optimizer of any model does on any number of GPUs, without them."""

    model: str
    """A well-known model such as llama-3-70b, the path of a config.json, or owner/name on the Hugging Face Hub."""
    mesh: str = "8"
    """Ranks along each dimension of the mesh, as in 8x4."""
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
    normalize: Literal["neuron", "element"] | None = None
    """'neuron' for NorMuon."""
    master: Literal["fp32", "mantissa"] | None = None
    """Extra precision kept for bfloat16 parameters."""
    state_dtype: Literal["bf16"] | None = None
    """'bf16' for momentum and moments in bfloat16."""
