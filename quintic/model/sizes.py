"""`GPTConfig`: the sizes of a GPT, given one by one or derived from the depth."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["GATE_CHANNELS", "SMEAR_CHANNELS", "VARIANTS", "GPTConfig", "Variant", "VariantName"]

GATE_CHANNELS = 12
"""Leading channels of the stream that the gate of value embeddings reads: enough to decide, and cheap."""
SMEAR_CHANNELS = 24
"""Leading channels of an embedding that the smear gate reads."""

VariantName: TypeAlias = Literal["quintic", "nanochat"]


class Variant(NamedTuple):
    """What GPTs of the same sizes differ in."""

    embedding_std: float
    up_scale: float  # of the initial weights of an MLP's first matrix, relative to the other matrices'
    gate_init: float  # gates start with weights from 0 to this
    value_gate_gain: float  # value embeddings are added with gates from 0 to this


VARIANTS: dict[VariantName, Variant] = {
    "quintic": Variant(embedding_std=1.0, up_scale=0.5, gate_init=0.0, value_gate_gain=2.0),
    # As in nanochat's gpt.py at 92d63d4.
    "nanochat": Variant(embedding_std=0.8, up_scale=0.4, gate_init=0.02, value_gate_gain=3.0),
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT; `from_depth` derives them from the depth."""

    vocab_size: int
    depth: int  # blocks
    width: int  # channels of the residual stream, a multiple of `head_dim`
    head_dim: int  # channels per head, even
    num_kv_heads: int  # key/value heads, a divisor of the number of query heads (width / head_dim)
    seq_len: int  # positions of a training row
    bos_id: int  # token that starts a document
    window_pattern: str = "SSSL"  # S (short window) and L (whole row), repeated over the layers; the last is always L
    short_window: float = 0.25  # window of an S layer as a fraction of `seq_len`, in (0, 1]
    softcap: float = 15.0  # logits are softcap tanh(logits / softcap)
    rotary_base: float = 100_000.0  # the slowest rotary wavelength is about 2 pi times this
    variant: VariantName = "quintic"  # initial values and gates
    l3_layers: tuple[int, ...] = ()  # ascending numbers of blocks, from 0, that are followed by a lookup layer
    l3_embeddings: int = 0  # rows of a lookup layer's tables, from 1 to `l3_k_max` for each token of the vocabulary
    l3_d_up: int = 0  # channels between the lookup and its mixing product; 0 for 4 x width
    l3_k_max: int = 512  # largest number of rows of a token
    l3_tied: bool = True  # use a lookup layer's keys as its values

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        for name in ("vocab_size", "depth", "width", "head_dim", "num_kv_heads", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}: choose {' or '.join(VARIANTS)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even number")
        if self.width % self.head_dim:
            raise ValueError(f"width={self.width} is not a multiple of head_dim={self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide the {self.num_heads} query heads")
        if not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(f"bos_id={self.bos_id} is not a token of a vocabulary of {self.vocab_size}")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(
                f"window_pattern={self.window_pattern!r}: use the letters S (short window) and L (full window)"
            )
        if not 0 < self.short_window <= 1:
            raise ValueError(f"short_window={self.short_window}: must be above 0 and at most 1")
        if self.l3_layers:
            self._check_lookups()

    def _check_lookups(self) -> None:
        layers, least, most = self.l3_layers, self.vocab_size, self.vocab_size * self.l3_k_max
        if not set(layers) <= set(range(self.depth)) or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"l3_layers={','.join(map(str, layers))}: must be layers from 0 to {self.depth - 1}, in ascending order"
            )
        if not least <= self.l3_embeddings <= most:
            raise ValueError(
                f"l3_embeddings={self.l3_embeddings}: need at least one for each of {least:,} tokens, and at most "
                f"{self.l3_k_max} (l3_k_max={self.l3_k_max})"
            )
        if self.l3_d_up < 0:
            raise ValueError(f"l3_d_up={self.l3_d_up}: must be at least 0")

    @classmethod
    def from_depth(
        cls, depth: int, *, head_dim: int = 128, kv_ratio: int = 1, aspect_ratio: int = 64, **sizes: Any
    ) -> "GPTConfig":
        """Return the sizes for a depth: the width is aspect_ratio x depth, rounded up to a multiple of `head_dim`.

        Args:
            depth: number of blocks.
            head_dim: channels per head.
            kv_ratio: query heads per key/value head.
            aspect_ratio: channels of the residual stream per block.
            **sizes: other fields.

        Raises:
            ValueError: the sizes do not fit each other. The message names the argument.
        """
        num_heads = max(1, -(-aspect_ratio * depth // head_dim))  # rounded up
        if kv_ratio < 1 or num_heads % kv_ratio:
            raise ValueError(f"kv_ratio={kv_ratio} does not divide the {num_heads} query heads of depth {depth}")
        kv_heads = num_heads // kv_ratio
        return cls(depth=depth, width=num_heads * head_dim, head_dim=head_dim, num_kv_heads=kv_heads, **sizes)

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.width // self.head_dim

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """Return the attention window of each layer, in positions."""
        short = max(1, math.ceil(self.seq_len * self.short_window))
        pattern = self.window_pattern
        # The last layer sees the whole row, so that every position can reach the output.
        letters = [pattern[layer % len(pattern)] for layer in range(self.depth - 1)] + ["L"]
        return tuple(short if letter == "S" else self.seq_len for letter in letters)

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer has a value embedding: every second one, the last included."""
        return (self.depth - 1 - layer) % 2 == 0

    def matrix_weights(self) -> int:
        """Return the number of weights of the matrices in blocks, lookup layers and head."""
        kv_width = self.num_kv_heads * self.head_dim
        block = 2 * self.width * (self.width + kv_width) + 8 * self.width**2  # attention and MLP
        gate = min(GATE_CHANNELS, self.width) * self.num_kv_heads
        gates = gate * sum(self.has_value_embedding(layer) for layer in range(self.depth))
        raised = self.l3_d_up or 4 * self.width
        lookup = self.width * raised + (raised + self.width) * self.width
        return self.depth * block + gates + len(self.l3_layers) * lookup + self.vocab_size * self.width

    def flops_per_token(self, lookup_rows: float | None = None) -> int:
        """Return the floating-point operations of the forward and backward pass per token.

        6 for each weight of a matrix product; 12 x width x window for each attention layer (PaLM, arXiv 2204.02311,
        appendix B), counting the full window as is usual, although causal queries near a row's start see less of it;
        12 x width x mean rows per token for each lookup layer, whose rows multiply as keys and as values.

        Args:
            lookup_rows: mean rows of a token in a lookup layer; by default as if all tokens had equally many.
        """
        weights = self.matrix_weights() + min(SMEAR_CHANNELS, self.width)
        visible = sum(12 * self.width * window for window in self.windows)
        rows = self.l3_embeddings / self.vocab_size if lookup_rows is None else lookup_rows
        return 6 * weights + visible + round(12 * self.width * rows * len(self.l3_layers))
