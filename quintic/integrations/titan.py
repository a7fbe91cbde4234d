"""`MuonContainer`: `quintic.Muon` for torchtitan (0.3 or newer), as a replacement of its `OptimizersContainer`.

config = llama3_8b()
config.optimizer = MuonContainer.Config(options={"lr": 0.02, "adamw_lr": 3e-4, "weight_decay": 0.1})
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtitan.components.optimizer import OptimizersContainer

from quintic.integrations import muon_for

__all__ = ["MuonContainer"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class MuonContainer(OptimizersContainer):  # type: ignore[misc]
    """Holds a `quintic.Muon` for each pipeline stage of the model; torchtitan steps and saves it.

    Checkpoints have torchtitan's keys, `state.NAME.KEY` and `param_groups.NAME.KEY`, and fit any number of ranks.

    Args:
        config: see `Config`.
        model_parts: the pipeline stages, parallelised by torchtitan.

    Raises:
        ValueError: the configuration has torchtitan's `param_groups`; use `rules` instead.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The value for `Trainer.Config.optimizer`; `implementation` is ignored."""

        options: dict[str, Any] = field(default_factory=dict)
        """Keywords of `quintic.Muon` and `quintic.param_groups`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups or config.optimizer_factory_kwargs_by_name:
            raise ValueError(
                "MuonContainer makes its own groups: leave param_groups and optimizer_factory_kwargs_by_name empty and "
                'give options={"rules": [quintic.Rule(...)]} instead'
            )
        self.model_parts = model_parts
        self.optimizers = [muon_for(part, **config.options) for part in model_parts]
        params = [
            param for optimizer in self.optimizers for group in optimizer.param_groups for param in group["params"]
        ]
        # The base class's constructor is not called, because it would make torchtitan's optimizers.
        self._validate_params(params)
        self._post_init(params)

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyperparameters of all stages by parameter name. All ranks must call it."""
        saved: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            saved.update(get_optimizer_state_dict(part, optimizer, options=_FLAT))
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`; each stage's optimizer takes its entries. All ranks must call it."""
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, dict(state_dict), options=_FLAT)
