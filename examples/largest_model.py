"""One device: the largest model that it holds, with state as usual and with what saves memory.

python examples/largest_model.py
"""

import gc

import torch
from tiny import tell
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintic

USUAL = {"master": "mantissa"}  # with the weight and its gradient 10 bytes for each weight of a matrix
SAVING = {"master": "8bit", "state_dtype": "int8", "release_gradients": True}  # 6 bytes
VOCABULARY, ROWS, LENGTH = 32_768, 1, 1024


class Model(nn.Module):
    """(ROWS, LENGTH) tokens -> logits of the next ones; activations are computed again for gradients."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        sizes = {"d_model": width, "nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0}
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, batch_first=True, norm_first=True, bias=False) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.tokens(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = checkpoint(layer, x, mask.to(x), is_causal=True, use_reentrant=False)
        return self.head(x)


def train(layers: int, width: int, steps: int, options: dict) -> list[float]:
    """Train a bfloat16 model on one batch, and return its losses."""
    torch.manual_seed(0)
    model = Model(layers, width)
    optimizer = quintic.Muon(quintic.param_groups(model), lr=0.01, adamw_lr=1e-3, **options)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(width: int = 4096, steps: int = 4, memory: float | None = None) -> list[float]:
    """Train with both settings the largest model that fits; return the losses of the larger one.

    Args:
        width: of the model.
        steps: of training.
        memory: bytes; by default what is free on the GPU.
    """
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    memory = memory or torch.cuda.mem_get_info()[0]
    for options, size in ((USUAL, 10), (SAVING, 6)):
        layers, losses = int(memory / size / (12 * width**2)), []
        while not losses:
            try:
                losses = train(layers, width, steps, options)
            except torch.OutOfMemoryError:
                layers -= 1
            gc.collect()
            torch.cuda.empty_cache()
        weights = (12 * layers * width + 2 * VOCABULARY) * width
        print(f"{options}: {layers} layers, {weights / 1e9:.2f} billion weights", flush=True)
    return tell(losses)


if __name__ == "__main__":
    main()
