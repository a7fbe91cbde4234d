"""`quintic rates`: settings to begin with for a model, and the memory that the optimizer's options take.

Batch and weight decay are the harness' laws (`quintic.train.schedule`), which a model enters with its tokens. Bytes are
counted on the model and its optimizer on the meta device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from quintic.commands.presets import preset
from quintic.grouping.param_groups import param_groups
from quintic.optim.muon import Muon
from quintic.optim.state.placement import state_bytes
from quintic.simulate.options import RatesOptions
from quintic.simulate.planned_models import planned_model
from quintic.simulate.table import naming_options
from quintic.tables import aligned
from quintic.train.recipe import model_config
from quintic.train.schedule import Scale, automatic_batch, scale_of

__all__ = ["StartingPoint", "bytes_by_option", "run", "start_of"]

TOKENS_PER_PARAMETER = 20
LR, LEAST_LR, MOST_LR = 0.02, 0.01, 0.04
"""Rate of matrices to begin with, and the ends of the range worth a search: docs/how-to/choose-settings.md."""
SHORT_RUN_DECAY = 0.1

_CAVEAT = """\
Rates were searched here in models of up to 768 channels. For larger ones these are places to begin a search, not
results: see docs/how-to/choose-settings.md."""

# Options of the optimizer that decide about the bytes of its state.
_STATES: Sequence[Mapping[str, str]] = (
    {},
    {"state_dtype": "bf16"},
    {"state_dtype": "int8"},
    {"master": "mantissa"},
    {"master": "mantissa", "state_dtype": "bf16"},
    {"master": "8bit"},
    {"master": "8bit", "state_dtype": "bf16"},
    {"master": "8bit", "state_dtype": "int8"},
    {"master": "fp32"},
)


class StartingPoint(NamedTuple):
    """Settings to begin with."""

    scale: Scale
    weight_decay: float  # of matrices, by the harness' law
    same_product: float  # the decay with which `lr * weight_decay` is AdamW's


def run(options: RatesOptions) -> int:
    """Run the command; return its exit code."""
    with naming_options(options.model):
        groups = param_groups(planned_model(options.model, torch.bfloat16))
    kinds = {"muon": 0, "adamw": 0}
    for group in groups:
        kinds[group["algorithm"]] += sum(param.numel() for param in group["params"])
    parameters = sum(kinds.values())
    print(
        f"{options.model}: {parameters:,} parameters, {kinds['muon']:,} in matrices (Muon), {kinds['adamw']:,} in "
        "embeddings, head and norms (AdamW)\n"
    )
    _print_table(_rows(options, start_of(options, parameters), parameters), (0, -1, 0, 0))
    print(f"\n{_CAVEAT}\n")
    if options.ranks > 1:
        print(f"On each of {options.ranks:,} ranks, if weights, gradients and state are divided among them (FSDP2):")
    rows: list[Sequence[str]] = [
        ("bfloat16 weights", "bytes a weight: matrices", "others", "state, GiB", "and weights, gradients")
    ]
    for name, of_kind in bytes_by_option(groups).items():
        whole = [kinds[kind] and 2 + of_kind[kind] / kinds[kind] for kind in ("muon", "adamw")]
        state = sum(of_kind.values())
        sizes = [size / options.ranks / 2**30 for size in (state, state + 4 * parameters)]
        rows.append((name, *(f"{each:.1f}" for each in whole), *(f"{size:.2f}" for size in sizes)))
    _print_table(rows, (0, -1, -1, -1, -1))
    return 0


def start_of(options: RatesOptions, parameters: int) -> StartingPoint:
    """Return the settings that a model of this size begins with."""
    config = preset("gpu")
    sizes = model_config(config, vocab_size=config.data.vocab_size, bos_id=0)
    reference_tokens = scale_of(config, sizes).reference_tokens
    tokens = int(options.tokens or TOKENS_PER_PARAMETER * parameters)
    batch = options.batch_tokens or automatic_batch(tokens, reference_tokens)
    steps = max(1, round(tokens / batch))
    scale = Scale(tokens=tokens, reference_tokens=reference_tokens, batch_tokens=batch, steps=steps)
    same_product = options.adamw_lr * options.adamw_weight_decay / LR
    return StartingPoint(scale, config.optim.weight_decay * scale.decay_factor, same_product)


def bytes_by_option(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for some settings of the optimizer of these groups, as text, the bytes of its state by algorithm."""
    found = {}
    for settings in _STATES:
        optimizer = Muon([dict(group) for group in groups], lr=LR, **cast(Any, settings))
        state = {"muon": 0, "adamw": 0}
        for group in optimizer._plans.current_groups():
            state[group.algorithm] += sum(state_bytes(param, group) for param in group.params)
        found[", ".join(f'{option}="{value}"' for option, value in settings.items()) or "defaults"] = state
    return found


def _rows(options: RatesOptions, start: StartingPoint, parameters: int) -> list[tuple[str, str, str, str]]:
    """Return a row for each setting: its name, where to begin, what to search over, and the reason."""
    scale = start.scale
    if options.tokens is None:
        length = f"{TOKENS_PER_PARAMETER} a parameter (arXiv 2203.15556)"
    else:
        length = f"yours, {scale.tokens / parameters:.3g} a parameter"
    batch = "yours" if options.batch_tokens else "as tokens^0.383 (arXiv 2505.13738), from the harness' depth 12"
    least, most = sorted((start.weight_decay, start.same_product))
    return [
        ("setting", "begin with", "search", "why"),
        ("tokens", f"{scale.tokens:,}", "", length),
        ("batch", f"{scale.batch_tokens:,}", f"{scale.batch_tokens // 2:,} to {2 * scale.batch_tokens:,}", batch),
        ("steps", f"{scale.steps:,}", "", ""),
        ("lr", f"{LR}", f"{LEAST_LR} to {MOST_LR}", "flat between these in the models measured here, at every width"),
        ("adamw_lr", f"{options.adamw_lr:g}", "", "what AdamW has for these parameters today"),
        ("momentum", "0.95", "", "the default"),
        (
            "weight_decay",
            f"{start.weight_decay:.2g}",
            f"{least:.2g} to {max(most, SHORT_RUN_DECAY):.2g}",
            f"sqrt(batch) / tokens (arXiv 2405.13698), falling to 0; {start.same_product:.2g}: AdamW's lr * decay",
        ),
        ("warm-up", f"{max(1, round(0.02 * scale.steps)):,}", "", "2 % of the steps"),
    ]


def _print_table(rows: Sequence[Sequence[str]], least: Sequence[int]) -> None:
    for line in aligned(rows, least):
        print(line.rstrip())
