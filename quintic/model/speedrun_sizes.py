"""`SpeedrunConfig`: sizes and features of the speedrun's model, and the plan of each layer derived from them."""

import functools
from dataclasses import dataclass

__all__ = ["COEFFICIENT_SCALE", "IGNORED", "RESIDUAL_SCALE", "LayerPlan", "SpeedrunConfig", "Starts"]

IGNORED = -100  # target that does not count in the loss
COEFFICIENT_SCALE = 0.1  # output factor of `TokenCoefficients`, which makes Adam's steps small relative to the outputs
RESIDUAL_SCALE = 1.1**0.5  # initial scale of the stream per sublayer: 1.1 per layer

Starts = dict[str, tuple[int, float]]
"""Coefficients that a small MLP computes for each token: name -> (number of them, initial value)."""


@dataclass(frozen=True)
class LayerPlan:
    """The features of one layer."""

    attends: bool  # has attention; otherwise only an MLP
    long: bool  # attention has the long window
    paired: bool  # the queries of two heads see the keys of both
    key_offset: bool  # channels of keys without position come from the previous token
    value_table: int | None  # index of its value embedding
    exclusive: bool  # attention may drop the component along the token's own value
    gated: bool  # attention has a gate per token and head
    skips: bool  # the skip connection ends here


@dataclass(frozen=True, kw_only=True)
class SpeedrunConfig:
    """Sizes and features; the defaults are the race's. `num_layers` determines which layers have a feature."""

    vocab_size: int = 50_304  # padded to a multiple of 128, for fast products
    num_layers: int = 11
    width: int = 768  # channels of the residual stream, num_heads x head_dim
    num_heads: int = 6
    head_dim: int = 128
    bos_id: int = 50_256  # token that starts a document
    rotary_base: float = 1024.0  # the slowest channel turns by 1 / rotary_base per position
    attention_free_layer: bool = True  # the layer past the middle has no attention
    paired_heads: bool = True  # in some layers with short windows, the queries of two heads see the keys of both
    key_offset: bool = True  # with long windows, channels of keys without position are the previous token's: induction
    value_embeddings: bool = True  # in five layers, a gated vector per token is added to the values (arXiv 2410.17897)
    shared_attention_input: bool = True  # attention of the last layers reads the output of the layer `shared_source`
    attention_gates: bool = True  # with long windows, a gate per token and head (arXiv 2505.06708)
    exclusive_attention: bool = True  # attention may drop the component along the token's own value (arXiv 2603.09078)
    embedding_injection: bool = True  # the embedding, times a gate, is added after each attention
    smear: bool = True  # the previous token's embedding, times a gate, is added to each token's
    bigram_hash: bool = True  # a hashed embedding of token pairs, times hashed signs, is added after each attention
    bigram_rows: int = 377_280  # rows of its table; the last one is for tokens that start documents
    bigram_sign_rows: int = 8192
    skip: bool = True  # a gated connection from an early layer past the middle
    residual_scalars: bool = True  # scales of the stream, of sublayers' outputs, of attention's values and outputs
    dense_connections: bool = True  # last layer and head mix streams of earlier layers (MUDDFormer, arXiv 2502.12170)
    gate_channels: int = 64  # hidden channels of the MLPs that compute gates; 0 for gates that are equal for all tokens
    yarn: bool = True  # rotary frequencies and the scale of logits follow growing windows (arXiv 2309.00071)
    sigmoid_logits: bool = True  # logits are 23 sigmoid((x + 5) / 7.5), otherwise 15 tanh(x / 15)
    multi_token: bool = True  # the loss also predicts tokens further ahead, by its weights
    prefix_tokens: bool = True  # the loss also predicts the longest token that a target begins with (`prefixes`)
    tied: bool = True  # head and embedding are tied until a stage unties them; the optimizer copies one to the other
    fp8_head: bool = False  # the head trains with 8-bit products, with the race's constant scales
    fp8_mlp: bool = False  # MLPs train with 8-bit products in the forward pass, with scales from their weights
    fp8_mlp_backward: bool = False  # with it, also in the backward pass, except for gradients of weights

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        for name, least in (("num_layers", 4), ("bigram_rows", 2), ("bigram_sign_rows", 1), ("gate_channels", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.num_heads % 2 or self.num_heads < 2:
            raise ValueError(f"num_heads={self.num_heads}: must be even, because matrices and layers pair heads")
        if self.head_dim % 4 or self.head_dim < 4:
            raise ValueError(f"head_dim={self.head_dim}: must be a multiple of 4; half of the channels rotate in pairs")
        if self.width != self.num_heads * self.head_dim:
            raise ValueError(f"width={self.width}: must be num_heads x head_dim = {self.num_heads * self.head_dim}")
        if not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(f"bos_id={self.bos_id} is not a token of a vocabulary of {self.vocab_size}")

    @property
    def middle(self) -> int:
        """The layer that the skip connection enters; it has no attention."""
        return (self.num_layers + 1) // 2

    @property
    def skip_source(self) -> int:
        """The layer whose output the skip connection takes, and from which gates of later layers are computed."""
        return self.middle // 2

    @property
    def shared_source(self) -> int:
        """The layer whose output the attention of later layers reads, and dense connections use."""
        return min(self.middle + 1, self.num_layers - 2)

    @property
    def value_tables(self) -> int:
        """Number of layers with a value embedding."""
        return sum(plan.value_table is not None for plan in self.layers)

    @functools.cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The features of each layer."""
        last, middle, source = self.num_layers - 1, self.middle, self.skip_source
        attending = set(range(last + 1)) - ({middle} if self.attention_free_layer else set())
        long = {source, last}
        paired = ({0, source - 1, middle - 1, last - 1} & attending) - long if self.paired_heads else set()
        valued = sorted({1, 2, last - 2, last - 1, last} & attending) if self.value_embeddings else []
        exclusive = ({1, source, source + 1, middle + 1} & attending) - paired if self.exclusive_attention else set()
        return tuple(
            LayerPlan(
                attends=index in attending,
                long=index in long,
                paired=index in paired,
                key_offset=self.key_offset and index in long,
                value_table=valued.index(index) if index in valued else None,
                exclusive=index in exclusive,
                gated=self.attention_gates and index in long,
                skips=self.skip and index == middle,
            )
            for index in range(self.num_layers)
        )

    def gate_starts(self) -> tuple[Starts, Starts]:
        """Return the gates, named "kind.layer", of the layers up to `skip_source`, and of the layers after it."""
        early: Starts = {}
        late: Starts = {}
        for index, plan in enumerate(self.layers):
            own: Starts = {}
            if plan.exclusive:
                own["exclusive"] = self.num_heads, 0.0
            if plan.gated:
                own["attention"] = self.num_heads, 0.25
            if plan.skips:
                own["skip"] = 1, 0.5
            if plan.attends and not (self.dense_connections and index == self.num_layers - 1):
                own |= self._injection_starts()
            starts = late if index > self.skip_source else early
            starts |= {f"{name}.{index}": start for name, start in own.items()}
        return early, late

    def dense_starts(self) -> tuple[Starts, Starts]:
        """Return the coefficients of dense connections, of the last layer and of the head's input."""
        last: Starts = {"values": (3, 0.0), "streams": (3, 0.0)}
        top: Starts = {"entry": (1, 0.0), "shared": (1, -0.5), "last": (1, 0.0), "early": (1, 0.0)}
        if self.value_embeddings:
            last["value_gates"] = 2, 2.0
            top["value"] = 1, 0.0
        if self.residual_scalars:
            for sublayer in ("attention", "mlp"):
                last |= {f"{sublayer}_residual": (1, RESIDUAL_SCALE), f"{sublayer}_output": (1, 1.0)}
        return last | self._injection_starts(), top

    def _injection_starts(self) -> Starts:
        starts: Starts = {"embedding": (1, 0.0)} if self.embedding_injection else {}
        return starts | ({"bigram": (1, 0.05)} if self.bigram_hash else {})
