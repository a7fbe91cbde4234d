"""The layers of the GPT: linear, attention, MLP, block.

No layer has a bias or a learned normalisation. Weights stay in their own dtype (float32 in training) and are cast to
the activations' dtype where they are used, so that mixed precision needs no autocast.

Shape suffixes: B rows, T positions, C width, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from quintic.kernels.attention.attention import DocumentMask, attention
from quintic.kernels.linear.mlp import mlp_relu2
from quintic.model.fp8 import Fp8Scaling, dynamic_fp8_linear
from quintic.model.functions import rms_norm, rotate
from quintic.model.sizes import GATE_CHANNELS

__all__ = ["MLP", "Attention", "Block", "Linear", "distribute_like", "learns"]


# `KVCache.attend` of a layer: queries (B, T, H, D), keys and values (B, T, G, D), and the window -> (B, T, H, D).
CachedAttention = Callable[[Tensor, Tensor, Tensor, int], Tensor]

# Queries and keys have unit RMS. This factor sharpens attention: |q.k| / sqrt(D) is at most QK_GAIN^2 sqrt(D).
QK_GAIN = 1.2


def distribute_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return `value` sharded like `tensor` if that is a `DTensor` of the same shape, else `value` itself.

    Communicates nothing, because every rank already holds the whole `value`.
    """
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def learns(module: nn.Module) -> bool:
    """Return whether this forward pass trains: in training mode, with gradients. Only then products are in 8 bits."""
    return module.training and torch.is_grad_enabled()


class Linear(nn.Linear):
    """A linear layer without bias; its weight is cast to the dtype of the input.

    If `fp8` is set, training multiplies in 8 bits; evaluation and passes without gradients never do.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.fp8: Fp8Scaling | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T` in the dtype of `x`: (..., in_features) -> (..., out_features)."""
        if self.fp8 is not None and learns(self):
            return dynamic_fp8_linear(x, self.weight, self.fp8)
        return F.linear(x, self.weight.to(x.dtype))


def _fuses(x: Tensor, *weights: Tensor) -> bool:
    """Return whether to fuse products with these weights with the operations around them.

    Not on a CPU, where it gains nothing, and not with sharded weights, because tensor parallelism hooks into the
    modules that own them.
    """
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and is_half and not any(isinstance(weight, DTensor) for weight in weights)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, QK-norm, grouped queries and gated value embeddings.

    Value embeddings are vectors looked up by token. They are added to the values of each key/value head, times a gate
    computed from the input (value residual learning, arXiv 2410.17897, in the form of the modded-nanogpt speedrun).
    """

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, *, value_embedding: bool, value_gate_gain: float
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.value_gate_gain = num_heads, num_kv_heads, value_gate_gain
        self.head_dim = width // num_heads
        self.query = Linear(width, width)
        self.key = Linear(width, num_kv_heads * self.head_dim)
        self.value = Linear(width, num_kv_heads * self.head_dim)
        self.out = Linear(width, width)
        self.value_gate = Linear(min(GATE_CHANNELS, width), num_kv_heads) if value_embedding else None

    def forward(
        self,
        x_BTC: Tensor,
        value_embedding_BTC: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        mask: DocumentMask,
        window: int,
        cached: CachedAttention | None = None,
    ) -> Tensor:
        """Return the attention's output, (B, T, C).

        Args:
            x_BTC: (B, T, C) normalised stream.
            value_embedding_BTC: (B, T, G x D) rows of the tokens in this layer's table, if it has one.
            rotary: two (T, D) tables, from `rotary_tables`.
            mask: the batch's documents.
            window: positions that a query sees, its own included.
            cached: attention over the keys and values of earlier positions, too, in generation; stores the new ones.
        """
        q_BTC, k_BTC, v_BTC = self._project(x_BTC)
        q_BTHD = q_BTC.unflatten(-1, (self.num_heads, self.head_dim))
        k_BTGD = k_BTC.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_BTGD = v_BTC.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.value_gate is not None:
            assert value_embedding_BTC is not None
            # (B, T, G). A gain of 2 adds the embedding unscaled while the gate's weights are 0.
            gate_BTG = self.value_gate_gain * torch.sigmoid(self.value_gate(x_BTC[..., : self.value_gate.in_features]))
            v_BTGD = v_BTGD + gate_BTG.unsqueeze(-1) * value_embedding_BTC.view_as(v_BTGD)
        # QK-norm after the rotation, which does not change norms.
        q_BTHD = rms_norm(rotate(q_BTHD, *rotary)) * QK_GAIN
        k_BTGD = rms_norm(rotate(k_BTGD, *rotary)) * QK_GAIN
        if cached is None:
            out_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, mask, window)
        else:
            out_BTHD = cached(q_BTHD, k_BTGD, v_BTGD, window)
        out_BTC: Tensor = self.out(out_BTHD.flatten(-2))
        return out_BTC

    def _project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H x D), keys and values (B, T, G x D)."""
        linears = (self.query, self.key, self.value)
        weights = [linear.weight for linear in linears]
        fp8 = self.query.fp8 if learns(self.query) else None
        if not _fuses(x_BTC, *weights) or any(linear.fp8 != self.query.fp8 for linear in linears):
            return self.query(x_BTC), self.key(x_BTC), self.value(x_BTC)
        # One wide product runs faster than three narrow ones, forward and backward.
        # (H x D + 2 G x D, C) weights -> (B, T, H x D + 2 G x D), split again below.
        if fp8 is None:
            projected = F.linear(x_BTC, torch.cat(weights).to(x_BTC.dtype))
        else:
            projected = dynamic_fp8_linear(x_BTC, torch.cat(weights), fp8)
        query, key, value = projected.split([len(weight) for weight in weights], dim=-1)
        return query, key, value


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them (Primer, arXiv 2109.08668).

    On a GPU the element-wise work is fused into the products (`mlp_relu2`). Inputs must have a root mean square of 1,
    which the scales of 8-bit products assume.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)
        self.fp8_forward = False
        """Multiply in 8 bits in the forward pass only; for layers whose `up` and `down` have no `fp8` of their own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return down(relu(up(x))^2): (..., C) -> (..., C)."""
        # Layers with dynamic 8-bit scales in both passes are not fused: `mlp_relu2` has fixed scales.
        in_8_bits = self.up.fp8 is not None and learns(self.up)
        if not in_8_bits and _fuses(x, self.up.weight, self.down.weight):
            fp8 = self.fp8_forward and learns(self.up)
            return mlp_relu2(x, self.up.weight.to(x.dtype), self.down.weight.to(x.dtype), fp8=fp8)
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class Block(nn.Module):
    """Attention and MLP, each reading the normalised residual stream and adding its output to it.

    x <- a x + b x0, with x0 the initial embedding; x <- x + attention(norm(x)); x <- x + mlp(norm(x)).

    The scaled sum with x0 is computed inside the block rather than between blocks, so that a block that is compiled
    separately fuses all of its element-wise work.
    """

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, *, value_embedding: bool, value_gate_gain: float
    ) -> None:
        super().__init__()
        self.attention = Attention(
            width, num_heads, num_kv_heads, value_embedding=value_embedding, value_gate_gain=value_gate_gain
        )
        self.mlp = MLP(width)

    def forward(
        self,
        x_BTC: Tensor,
        x0_BTC: Tensor,
        scales: tuple[Tensor, Tensor],
        value_embedding: nn.Embedding | None,
        inputs_BT: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: DocumentMask,
        window: int,
        cached: CachedAttention | None = None,
    ) -> Tensor:
        """Return the residual stream after this block, (B, T, C).

        `x0_BTC` are the embeddings that the stream `x_BTC` began with, `scales` the scalars a and b. `value_embedding`
        is this layer's table, (vocab_size, G x D), if it has one, for the tokens `inputs_BT`. The rest is as for
        `Attention`.
        """
        x_BTC = scales[0].to(x_BTC.dtype) * x_BTC + scales[1].to(x_BTC.dtype) * x0_BTC
        value_embedding_BTC = None if value_embedding is None else value_embedding(inputs_BT).to(x_BTC.dtype)
        x_BTC = x_BTC + self.attention(rms_norm(x_BTC), value_embedding_BTC, rotary, mask, window, cached)
        out_BTC: Tensor = x_BTC + self.mlp(rms_norm(x_BTC))
        return out_BTC
