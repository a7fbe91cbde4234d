"""`quintic plan`: what the optimizer does to each kind of weight, without training."""

import torch

from quintic.commands.parsing import options_of, parse
from quintic.commands.training_options import training_options
from quintic.errors import ConfigError
from quintic.model.gpt import GPT
from quintic.rehearsal.table import RehearsalOptions, rehearsal_text
from quintic.train.config import Config
from quintic.train.recipe import build_optimizer, model_config, total_steps

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if _asks_for_rehearsal(arguments):
        description = "Show what the optimizer of any model does on any number of GPUs, without them."
        print(rehearsal_text(parse(RehearsalOptions, arguments, "plan", description)))
        return 0

    start = training_options(arguments, "plan")
    config = start.config
    with torch.device("meta"):
        model = GPT(model_config(config, vocab_size=config.data.vocab_size, bos_id=0))
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        parameters = sum(param.numel() for param in group["params"])
        names = f"{group['param_names'][0]}" + (f" (+{len(group['params']) - 1})" if len(group["params"]) > 1 else "")
        print(f"{group['name']:17} {group['algorithm']:6} lr {group['lr']:<9.5g} {parameters:>13,} parameters  {names}")
    print(f"\n{optimizer.plan()}\n")
    steps = total_steps(config, model)
    tokens = steps * config.schedule.batch_tokens
    print(
        f"{sum(model.num_parameters().values()):,} parameters; {steps:,} steps of {config.schedule.batch_tokens:,} "
        f"tokens, {tokens * model.flops_per_token():.3g} floating-point operations"
    )
    return 0


def _asks_for_rehearsal(arguments: list[str]) -> bool:
    """Return whether the arguments of `quintic plan` speak of another model than the harness' own.

    Raises:
        ConfigError: they do, but do not say of which.
    """
    own = {name for name, _ in options_of(RehearsalOptions)} - {name for name, _ in options_of(Config)}
    given = [name for argument in arguments if (name := argument.partition("=")[0]) in own]
    if given and "--model" not in given:
        raise ConfigError(f"{given[0]} needs --model NAME: a model to plan for, such as llama-3-70b")
    return bool(given)
