"""`MuonFactory`: makes the optimizer inside the `Trainer` of transformers and the trainers of TRL.

    Trainer(model, args, ..., optimizer_cls_and_kwargs=(MuonFactory, {"lr": 0.02, "adamw_lr": 3e-4}))

If the trainer trains exactly the model that it is given, `optimizers=(quintic.Muon(quintic.param_groups(model),
lr=0.02), None)` also works. The factory is needed if the trainer changes the model first: with `peft_config`, which
adds adapters, with `model_init`, and with FSDP.
"""

from typing import Any

from torch import nn

from quintic.grouping.uses import attribute_of
from quintic.integrations import muon_for
from quintic.optim.groups.names import unwrap_module
from quintic.optim.muon import Muon

__all__ = ["MuonFactory"]


class MuonFactory:
    """Makes `quintic.Muon` once `Trainer` has prepared the model; pass it as `optimizer_cls_and_kwargs`.

    Its keywords are those of `quintic.Muon` and `quintic.param_groups`. The schedule of `TrainingArguments` scales the
    rates of both algorithms; its `learning_rate`, `weight_decay`, `adam_*` and `optim` are ignored. Set
    `max_grad_norm=0`, because `Trainer` clips all gradients by one norm. With several ranks but without FSDP2, add
    `"comms": "averaged"` to share Muon's work among them.

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
        """Return the optimizer of a model; options as for `muon_for`.

        `example="dummy_inputs"` takes the input that transformers keeps for the model, in place of a batch.

        Raises:
            ValueError: the model has no `dummy_inputs`.
            ValueError: a group has `step_every` above 1, whose gradients `Trainer` would reset between its steps.
        """
        if isinstance(options.get("example"), str) and options["example"] == "dummy_inputs":
            options["example"] = attribute_of(unwrap_module(model), "dummy_inputs")
            if options["example"] is None:
                raise ValueError(f"{type(model).__name__} has no dummy_inputs: give a batch as example")
        optimizer = muon_for(model, **options)
        for number, group in enumerate(optimizer.param_groups):
            if group["step_every"] > 1:
                raise ValueError(
                    f"param group {number} has step_every={group['step_every']}: Trainer resets all gradients after "
                    f"every step, so gradients of skipped steps would be lost; set step_every=1"
                )
        return optimizer
