"""`GPTConfig`: the sizes of a GPT, given one by one or derived from the depth."""

from dataclasses import dataclass

from quintic.model.layers import window_sizes

__all__ = ["GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT; `from_depth` derives them from the depth.

    Args:
        vocab_size: number of tokens in the vocabulary.
        depth: number of blocks.
        width: channels of the residual stream, a multiple of `head_dim`.
        head_dim: channels per head, even.
        num_kv_heads: key/value heads, a divisor of the number of query heads (width / head_dim).
        seq_len: positions of a training row.
        window_pattern: letters S (short window) and L (whole row), repeated over the layers; the last is always L.
        short_window: window of an S layer as a fraction of `seq_len`, in (0, 1].
        bos_id: token that starts a document.
        softcap: logits are softcap tanh(logits / softcap).
        rotary_base: the slowest rotary wavelength is about 2 pi times this.
        l3_layers: ascending numbers of blocks, from 0, that are followed by a lookup layer.
        l3_embeddings: rows of a lookup layer's tables, between 1 and `l3_k_max` for each token of the vocabulary.
        l3_d_up: channels between the lookup and its mixing product; 0 for 4 x width.
        l3_k_max: largest number of rows of a token.
        l3_tied: use a lookup layer's keys as its values.
    """

    vocab_size: int
    depth: int
    width: int
    head_dim: int
    num_kv_heads: int
    seq_len: int
    bos_id: int
    window_pattern: str = "SSSL"
    short_window: float = 0.25
    softcap: float = 15.0
    rotary_base: float = 100_000.0
    l3_layers: tuple[int, ...] = ()
    l3_embeddings: int = 0
    l3_d_up: int = 0
    l3_k_max: int = 512
    l3_tied: bool = True

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        for name in ("vocab_size", "depth", "width", "head_dim", "num_kv_heads", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even number")
        if self.width % self.head_dim:
            raise ValueError(f"width={self.width} is not a multiple of head_dim={self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide the {self.num_heads} query heads")
        if not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(f"bos_id={self.bos_id} is not a token of a vocabulary of {self.vocab_size}")
        _ = self.windows  # raises if the pattern or the short window is invalid
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
        cls,
        depth: int,
        *,
        vocab_size: int,
        seq_len: int,
        bos_id: int,
        head_dim: int = 128,
        kv_ratio: int = 1,
        aspect_ratio: int = 64,
        window_pattern: str = "SSSL",
        short_window: float = 0.25,
    ) -> "GPTConfig":
        """Return the sizes for a depth: the width is aspect_ratio x depth, rounded up to a multiple of `head_dim`.

        Args:
            depth: number of blocks.
            vocab_size: number of tokens in the vocabulary.
            seq_len: positions of a training row.
            bos_id: token that starts a document.
            head_dim: channels per head.
            kv_ratio: query heads per key/value head.
            aspect_ratio: channels of the residual stream per block.
            window_pattern: see the class.
            short_window: see the class.

        Raises:
            ValueError: the sizes do not fit each other. The message names the argument.
        """
        # The width in heads, rounded up.
        num_heads = max(1, -(-aspect_ratio * depth // head_dim))
        if kv_ratio < 1 or num_heads % kv_ratio:
            raise ValueError(f"kv_ratio={kv_ratio} does not divide the {num_heads} query heads of depth {depth}")
        return cls(
            vocab_size=vocab_size,
            depth=depth,
            width=num_heads * head_dim,
            head_dim=head_dim,
            num_kv_heads=num_heads // kv_ratio,
            seq_len=seq_len,
            bos_id=bos_id,
            window_pattern=window_pattern,
            short_window=short_window,
        )

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.width // self.head_dim

    @property
    def windows(self) -> tuple[int, ...]:
        """Return the attention window of each layer, in positions."""
        return tuple(window_sizes(self.window_pattern, self.depth, self.seq_len, self.short_window))

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer has a value embedding: every second one, the last included."""
        return (self.depth - 1 - layer) % 2 == 0
