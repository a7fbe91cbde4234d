"""How large gradients and updates are, by kind of layer: the two numbers that show a wrong learning rate first."""

import torch
from torch import Tensor, nn

__all__ = ["RmsMeter", "layer_kind"]

_KINDS = (
    ("value_embeddings.", "value embeddings"),
    ("embedding.", "embedding"),
    ("head.", "head"),
    (".attention.", "attention"),
    (".mlp.", "MLP"),
)


def layer_kind(name: str) -> str:
    """Return the kind of layer a parameter of `quintic.model.GPT` belongs to, in words for a chart."""
    if "gate" in name:
        return "scalars and gates"
    return next((kind for part, kind in _KINDS if part in name), "scalars and gates")


class RmsMeter:
    """Root mean squares over all parameters of a kind; `before` a step copies the weights, `after` compares."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [(layer_kind(name), param) for name, param in model.named_parameters() if param.requires_grad]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before(self) -> dict[str, float]:
        """Remember the weights and return the RMS of the gradients by kind."""
        self._before = [param.detach().clone() for _, param in self._params]
        return self._rms([param.grad for _, param in self._params])

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """Return the RMS of the change of the weights since `before` by kind, and forget them."""
        changes: list[Tensor | None] = [param - old for (_, param), old in zip(self._params, self._before, strict=True)]
        self._before = []
        return self._rms(changes)

    def _rms(self, tensors: list[Tensor | None]) -> dict[str, float]:
        squares: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for (kind, _), tensor in zip(self._params, tensors, strict=True):
            if tensor is not None:
                square = tensor.float().square().sum()
                squares[kind] = squares[kind] + square if kind in squares else square
                counts[kind] = counts.get(kind, 0) + tensor.numel()
        return {kind: float((square / counts[kind]).sqrt()) for kind, square in squares.items()}
