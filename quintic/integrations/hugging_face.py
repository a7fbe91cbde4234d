"""`MuonFactory`: makes the optimizer inside the `Trainer` of transformers and the trainers of TRL.

    Trainer(model, args, ..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 0.02, "adamw_lr": 3e-4}))

If the trainer trains exactly the model that it is given, `optimizers=(quintic.Muon(quintic.param_groups(model),
lr=0.02), None)` also works. The factory is needed if the trainer changes the model first: with `peft_config`, which
adds adapters, with `model_init`, and with FSDP.
"""

import dataclasses
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from quintic.integrations import muon_for
from quintic.optim.muon import Muon

__all__ = ["MuonFactory"]

# Fields of TrainingArguments that a factory does not get -> the options that replace them; messages name the first.
_STAND_FOR = {
    "learning_rate": ("adamw_lr", "adamw_lr_ratio"),
    "weight_decay": ("weight_decay", "adamw_weight_decay"),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
}


class MuonFactory:
    """Makes `quintic.Muon` once `Trainer` has prepared the model; pass it as `optimizer_cls_and_kwargs`.

    Its keywords are those of `quintic.Muon` and `quintic.param_groups`. The schedule of `TrainingArguments` scales the
    rates of both algorithms; its `learning_rate`, `weight_decay`, `adam_*` and `optim` are ignored. A warning names the
    ones that were set and that no keyword replaces. Set `max_grad_norm=0`, because `Trainer` clips all gradients by one
    norm. With several ranks but without FSDP2, add `"comms": "averaged"` to share Muon's work among them.

    Raises:
        TypeError: transformers is older than version 5 and passes parameters instead of the model.
    """

    def __init__(self, params: Any = None, **options: Any) -> None:
        if params is not None or options:
            raise TypeError(
                "MuonFactory needs the Trainer of transformers 5 or newer, which passes it the model; with an older "
                "one, use Trainer(..., optimizers=(quintic.Muon(quintic.param_groups(model), lr=0.02), None))"
            )

    def __call__(self, model: nn.Module, **options: Any) -> Muon:
        """Return the optimizer of a model; options as for `muon_for`. Warns of `TrainingArguments` that do not fit.

        Raises:
            ValueError: a group has `step_every` above 1, whose gradients `Trainer` would reset between its steps.
        """
        # Trainer gives the factory no arguments, but the method of it that calls has them.
        _warn_of_arguments(getattr(sys._getframe(1).f_locals.get("self"), "args", None), options)
        optimizer = muon_for(model, **options)
        for number, group in enumerate(optimizer.param_groups):
            if group["step_every"] > 1:
                raise ValueError(
                    f"param group {number} has step_every={group['step_every']}: Trainer resets all gradients after "
                    f"every step, so gradients of skipped steps would be lost; set step_every=1"
                )
        return optimizer


def _warn_of_arguments(arguments: Any, options: Mapping[str, Any]) -> None:
    """Warn once of fields in `TrainingArguments` that were set without effect, and of clipping by one norm.

    Args:
        arguments: the trainer's arguments; anything else has no effect.
        options: keywords of the factory.
    """
    if not dataclasses.is_dataclass(arguments):
        return
    texts, lost = [], []
    # A subclass, such as TRL's, may have defaults of its own.
    for field in dataclasses.fields(arguments):
        value, instead = getattr(arguments, field.name), _STAND_FOR.get(field.name)
        if instead is not None and value != field.default and options.keys().isdisjoint(instead):
            lost.append((f"{field.name}={value}", instead[0]))
    if lost:
        names = ", ".join(f"{given} (give {option!r})" for given, option in lost)
        texts.append(f"these have no effect with MuonFactory, whose keywords take their place: {names}")
    clipping = getattr(arguments, "max_grad_norm", None)
    if clipping:
        texts.append(
            f"max_grad_norm={clipping} clips all gradients by one norm, to which matrices contribute, "
            f"although clipping does not bound Muon's step; set max_grad_norm=0, and see "
            f"docs/how-to/clip-gradients.md for clipping AdamW's groups alone"
        )
    if texts:
        # The caller is a method of Trainer.
        warnings.warn(f"TrainingArguments: {'; '.join(texts)}", UserWarning, stacklevel=3)
