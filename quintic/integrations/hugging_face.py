"""`MuonFactory`: the optimizer that transformers' `Trainer`, and TRL's trainers, make for their model.

    Trainer(model, args, ..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 0.02, "adamw_lr": 3e-4}))

A finished optimizer does as well, `optimizers=(quintic.Muon(quintic.param_groups(model), lr=0.02), None)`, where the
trainer trains the very model that it is given. The factory is needed where it does not: with `peft_config`, which adds
the adapters that are trained, with `model_init`, and with FSDP.
"""

from typing import Any

from torch import nn

from quintic.integrations import muon_for
from quintic.optim.muon import Muon

__all__ = ["MuonFactory"]


class MuonFactory:
    """Makes `quintic.Muon` when `Trainer` knows the model that it trains; for `optimizer_cls_and_kwargs`.

    The keywords beside it are those of `quintic.Muon` and `quintic.param_groups`. Of `TrainingArguments` the schedule
    counts, and scales the rates of both algorithms; `learning_rate`, `weight_decay`, `adam_beta1` and its like, and
    `optim` do not. Set `max_grad_norm=0`: `Trainer` clips all gradients by one norm. Several ranks without FSDP2: add
    `"comms": "averaged"`, and they divide Muon's work.

    Raises:
        TypeError: transformers is older than version 5, and gives parameters without their model.
    """

    def __init__(self, params: Any = None, **options: Any) -> None:
        if params is not None or options:
            raise TypeError(
                "MuonFactory needs the Trainer of transformers 5 or newer, which gives it the model; with an older "
                "one: Trainer(..., optimizers=(quintic.Muon(quintic.param_groups(model), lr=0.02), None))"
            )

    def __call__(self, model: nn.Module, **options: Any) -> Muon:
        """Return the optimizer of a model; options as in `muon_for`.

        Raises:
            ValueError: a group has `step_every`: `Trainer` resets gradients of the model that wait for their turn.
        """
        optimizer = muon_for(model, **options)
        for number, group in enumerate(optimizer.param_groups):
            if group["step_every"] > 1:
                raise ValueError(
                    f"param group {number} has step_every={group['step_every']}: Trainer resets the gradients of the "
                    f"model after every step, so that those of a group that waits would be lost; leave it at 1"
                )
        return optimizer
