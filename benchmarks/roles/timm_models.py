"""Models of timm, some of each module, without data for their weights."""

import importlib
import re
from typing import Any

import torch
from torch import nn

from benchmarks.roles.compare import Attempt

MODELS_OF_A_MODULE = 3

_LARGE = re.compile(
    "large|huge|giant|giga|enorm|base|big|so150|so400|_[lxbh]{1,3}\\d*(_|$)|m36|m48|b[3-9]|_[4-9]b|1[0-9][0-9]|2[0-9][0-9]|2b"
)
"""In the names of models that say no more than smaller ones do, and take longer."""


def families() -> dict[str, str]:
    """Return {model: module}; of each module those at equal distances in the list of its smaller models."""
    timm = importlib.import_module("timm")
    found: dict[str, str] = {}
    for module in sorted(timm.list_modules()):
        every = timm.list_models(module=module)
        names = [name for name in every if not _LARGE.search(name)] or every[:1]
        chosen = min(len(names), MODELS_OF_A_MODULE)
        for number in range(chosen):
            found.setdefault(names[number * len(names) // chosen], module)
    return found


def attempts(name: str) -> list[Attempt]:
    """Return ways to build and call a model: on the meta device, else on the CPU."""

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return _model(name)

    return [
        Attempt("meta", on_meta, _image),
        Attempt("cpu", lambda: _model(name), _image, after="^build|meta|item"),
    ]


def _model(name: str) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
    return model.eval()


def _image(model: nn.Module) -> Any:
    configuration: Any = model.default_cfg
    sizes = configuration.get("input_size", (3, 224, 224))
    return torch.empty(1, *sizes, device="cpu")
