"""`MaxLogits` collects the largest attention logit of each head, over layers and microbatches, for QK-clip."""

from typing import Any

import torch
from torch import Tensor

from quintic.kernels.attention.attention import max_logits

__all__ = ["MaxLogits"]


class MaxLogits:
    """Running maxima of attention logits per layer and query head, kept on the device.

    Fill it during the forward passes of a step, in one of two ways, then pass `take()` to the optimizer:

        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
        recorder.add("blocks.0.attention", aux.max_scores)     # FlexAttention returns the maxima

        recorder.record("blocks.0.attention", q, k)            # for other attention: one more pass over q and k

        optimizer.step(qk_logits=recorder.take())
    """

    def __init__(self) -> None:
        self._maxima: dict[str, Tensor] = {}

    def add(self, layer: str, maxima: Tensor) -> None:
        """Combine new maxima with those of a layer so far.

        Args:
            layer: name of the attention module, as in the model's parameter names.
            maxima: (H,), or FlexAttention's `max_scores`, (B, H, T).

        Raises:
            ValueError: `maxima` has neither 1 nor 3 dimensions.
        """
        if maxima.ndim not in (1, 3):
            raise ValueError(f"{layer}: maxima have shape {tuple(maxima.shape)}; need (H,) or (B, H, T)")
        maxima = maxima.detach().float()
        maxima_H = maxima if maxima.ndim == 1 else maxima.amax(dim=(0, 2))
        seen_H = self._maxima.get(layer)
        self._maxima[layer] = maxima_H if seen_H is None else torch.maximum(seen_H, maxima_H)

    def record(self, layer: str, q_BTHD: Tensor, k_BTGD: Tensor, **options: Any) -> None:
        """Compute the maxima of queries and keys and `add` them; `options` are passed to `max_logits`."""
        self.add(layer, max_logits(q_BTHD, k_BTGD, **options))

    def take(self) -> dict[str, Tensor]:
        """Return the maxima, layer -> (H,) float32, and start afresh."""
        taken, self._maxima = self._maxima, {}
        return taken
