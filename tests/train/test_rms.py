"""Root mean squares by kind of layer, against a computation by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from quintic.model.gpt import GPT, GPTConfig
from quintic.train.metrics import RmsMeter, layer_kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("embedding.weight", "embedding"),
        ("value_embeddings.0.weight", "value embeddings"),
        ("head.weight", "head"),
        ("blocks.3.attention.query.weight", "attention"),
        ("blocks.3.attention.value_gate.weight", "scalars and gates"),
        ("blocks.3.mlp.down.weight", "MLP"),
        ("residual_scales", "scalars and gates"),
        ("smear_gate.weight", "scalars and gates"),
    ],
)
def test_the_kind_of_a_layer(name: str, kind: str) -> None:
    assert layer_kind(name) == kind


def test_every_matrix_of_the_model_has_a_kind_of_its_own() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=300, depth=2, width=64, head_dim=32, num_kv_heads=2, seq_len=32, bos_id=0))
    small = [name for name, param in model.named_parameters() if layer_kind(name) == "scalars and gates"]
    assert all("gate" in name or "scale" in name for name in small)


def test_gradients_and_changes_by_hand() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "smear_gate": nn.Linear(3, 1)})
    frozen = model["head"].bias.requires_grad_(False)
    gradients = {}
    for name, param in model.named_parameters():
        if param is not frozen and "gate" not in name:
            param.grad = torch.randn_like(param) * 3
            gradients[name] = param.grad.double().numpy()
    meter = RmsMeter(model)
    measured = meter.before()
    # A kind of which nothing has a gradient is left out.
    assert measured.keys() == {"embedding", "head"}
    for name, gradient in gradients.items():
        assert measured[layer_kind(name)] == pytest.approx(np.sqrt(np.mean(gradient**2)), rel=1e-6)
    with torch.no_grad():
        model["embedding"].weight[0] += 2.0  # a fifth of the entries
        model["smear_gate"].weight -= 0.5  # three of four entries, the fourth is the bias
    changes = meter.after()
    assert changes["embedding"] == pytest.approx(2 / 5**0.5, rel=1e-6)
    assert changes["scalars and gates"] == pytest.approx(0.5 * (3 / 4) ** 0.5, rel=1e-6)
    assert changes["head"] == 0.0


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    meter = RmsMeter(model)
    assert meter.before() == {"scalars and gates": 1.0}
    assert meter.after() == {"scalars and gates": 0.0}
    assert all(torch.equal(old, param) for old, param in zip(before, model.parameters(), strict=True))
