"""`param_groups`: parameter groups for `Muon`, made from the assignments of a model's parameters.

Matrices that map features to features go to Muon: weights of linear layers, attention's fused input projections and
stacks of experts. Parameters whose rows or columns are not features go to AdamW: embeddings, the output head, norms,
biases, gates, routers, convolutions and every parameter with fewer than two dimensions. A parameter that no rule covers
is an error that names it, and never a silent choice (`assign.py`).
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from quintic.grouping.assign import Rule, assign, check_rules, list_some
from quintic.grouping.classify import Convolutions
from quintic.grouping.doubts import BY_PASS, WARNINGS
from quintic.grouping.forward.roles import Roles
from quintic.grouping.forward.trace import trace
from quintic.grouping.layer_types import with_layer_types
from quintic.grouping.patterns import patterns_of
from quintic.grouping.plain_groups import Request, remember
from quintic.grouping.uses import stored
from quintic.optim.groups.assignment import Assignment
from quintic.optim.groups.names import clean_names
from quintic.optim.groups.options import OPTIONS, adopt_old_names, with_new_names
from quintic.optim.rules.table import orthogonalizes

__all__ = ["grouped", "param_groups", "roles_of"]

_logger = logging.getLogger("quintic")


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    rules: Iterable[Rule] = (),
    convolutions: Convolutions = "adamw",
    example: Any = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    roles: Roles | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for `quintic.Muon` that cover every trainable parameter of `model` once.

    Works on any device, also on the meta device. A tensor used under several names (a tied head) is listed once, under
    its first name, and is an embedding if any of its uses is one. `quintic.explain` shows each decision and its reason.
    A compiled, data-parallel or checkpointed model gives the names of the bare model.

    Warns where a weight is taken as one matrix and may be several, where a model with linear layers or convolutions has
    no matrix for Muon although no rule says so, and of options that groups of the algorithm do not read.

    Args:
        model: any module; parameters with `requires_grad=False` are left out.
        muon: hyperparameters for all Muon groups, e.g. `{"lr": 0.02}`.
        adamw: hyperparameters for all AdamW groups, e.g. `{"lr": 3e-4}`.
        rules: decisions by name that come before the ones by module; with or without the prefixes of wrappers.
        convolutions: `"muon"` for convolutions as (out_channels, in_channels * kernel) matrices, those with groups as
            one matrix per group, transposed ones as (out_channels * kernel, in_channels); depthwise ones stay AdamW's.
        example: an input of the model, as for `trace`; a forward pass on tensors without data then comes before names.
        call: as for `trace`.
        roles: the result of `trace` instead of an example, for a model that was sharded, wrapped or cut since.

    Returns:
        One group per algorithm, view and set of options, each with `params`, `param_names`, `algorithm` and `view`;
        Muon groups first.

    Raises:
        ValueError: a rule matches no parameter, a parameter is covered by no rule, the model has none to train, or
            hyperparameters have a key of the group itself, such as `"view"`.
        TypeError: `model` is no module.
        ValueError, TypeError: with `example`, as `trace`.
    """
    rules = check_rules(rules)
    roles = roles_of(model, example, call, roles)
    assignments = assign(model, rules, convolutions, roles=roles)
    _warn_of_doubts(model, assignments)
    if _logger.isEnabledFor(logging.DEBUG):
        for param, one in assignments.items():
            how = f"muon, {one.view}" if orthogonalizes(one.algorithm) else one.algorithm
            _logger.debug("%s %s: %s, because: %s", one.name, tuple(param.shape), how, one.why)
    groups = grouped(assignments, muon=muon, adamw=adamw)
    options = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    _warn_of_idle_options(options, assignments)
    for given in options.values():
        adopt_old_names(given)
    remember(model, Request(rules, convolutions, options, roles))
    return groups


def roles_of(
    model: nn.Module, example: Any, call: Callable[[nn.Module, Any], Any] | None, roles: Roles | None
) -> Roles | None:
    """Return the given roles, or the roles that the forward pass of an example shows; None without either."""
    if example is None and call is None:
        return roles
    if roles is not None:
        raise ValueError("roles and example both say what the weights are: give one of them")
    return trace(model, example, call=call)


def grouped(
    assignments: Mapping[Tensor, Assignment],
    *,
    muon: Mapping[str, Any] | None,
    adamw: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return the groups of `param_groups` for assignments already made; a reason never splits a group."""
    defaults = {
        which: _hyperparameters(which, {} if options is None else options)
        for which, options in (("muon", muon), ("adamw", adamw))
    }
    # Options may hold lists, which cannot be hashed: groups are found by comparison.
    groups: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for param, one in assignments.items():
        # Equal views may name their matrices differently, and QK-clip reads the names.
        key = (one.algorithm, one.view, getattr(one.view, "names", None), one.options)
        group = next((group for other, group in groups if other == key), None)
        if group is None:
            own = _hyperparameters(f"options of the rule for {one.name}", one.options)
            about: dict[str, Any] = {"params": [], "param_names": [], "algorithm": one.algorithm, "view": one.view}
            group = {**about, **defaults[one.algorithm], **own}
            groups.append((key, group))
        group["params"].append(param)
        group["param_names"].append(one.name)
    return sorted((group for _, group in groups), key=lambda group: not orthogonalizes(group["algorithm"]))


def _hyperparameters(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters of groups under their new names; a ValueError for other keys names the `source`."""
    if not isinstance(options, Mapping):
        raise TypeError(f"{source}={options!r} must be a dictionary of hyperparameters")
    for key in ("params", "param_names", "algorithm", "view"):
        if key in options:
            raise ValueError(
                f"{source}: {key!r} is no hyperparameter, but what the group consists of; choose algorithm and view by "
                f"quintic.Rule(pattern, algorithm, view)"
            )
    return with_new_names(dict(options), source, stacklevel=4)


def _warn_of_idle_options(given: Mapping[str, Mapping[str, Any]], assignments: Mapping[Tensor, Assignment]) -> None:
    """Warn of options that groups of their algorithm do not read, as AdamW's groups do not read `momentum`."""
    sources = [(algorithm, algorithm, options) for algorithm, options in given.items()]
    sources += [(f"options of {one.why}", one.algorithm, one.options) for one in assignments.values() if one.by_rule]
    every = dict.fromkeys((source, algorithm, key) for source, algorithm, options in sources for key in options)
    for source, algorithm, key in every:
        reader = OPTIONS[key].algorithm if key in OPTIONS else None
        if reader not in (None, algorithm):
            message = f"{source}: only groups of {reader!r} read {key!r}, so it does nothing here; give it in {reader}="
            warnings.warn(f"{message}, or to quintic.Muon", UserWarning, stacklevel=3)


def _warn_of_doubts(model: nn.Module, assignments: Mapping[Tensor, Assignment]) -> None:
    every = assignments.values()
    for doubt, text in WARNINGS.items():
        doubtful = {param: one for param, one in assignments.items() if doubt in one.doubt}
        if doubtful:
            # Layers that differ in their numbers share an entry, and a rule.
            names = _patterns(model, doubtful, assignments)
            warnings.warn(text.format(list_some(names), repr(names[0])) + BY_PASS, UserWarning, stacklevel=3)
    if not any(orthogonalizes(one.algorithm) for one in every):
        missing = _without_matrices(model, assignments)
        if missing:
            warnings.warn(f"Muon gets no matrix of this {type(model).__name__}: {missing}", UserWarning, stacklevel=3)


def _without_matrices(model: nn.Module, assignments: Mapping[Tensor, Assignment]) -> str | None:
    """Return why a model with layers gives Muon no matrix, and the remedy; None if no matrix was to be expected."""
    layers = [
        module
        for module in with_layer_types(model).modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]
    weights = [weight for layer in layers if (weight := stored(layer, "weight")) is not None]
    trained = [weight for weight in weights if weight in assignments]
    if not weights or any(assignments[weight].by_rule for weight in trained):
        return None
    if not trained:
        return "none of its linear layers is trained; make the groups after requires_grad is set as it shall be"
    if any(weight.ndim < 2 for weight in trained):
        return (
            "its weights are 1-D pieces, as FSDP1 and DeepSpeed make them; shard with FSDP2 (fully_shard), or keep "
            "whole weights on every rank and let quintic.Muon(..., comms='sharded') divide the state"
        )
    if any(assignments[weight].why == "convolution" for weight in trained):
        return "its weights are convolutions; quintic.param_groups(model, convolutions='muon') takes them as matrices"
    # By reason, as the weights of a list of layers may have several.
    by_reason: dict[str, list[Tensor]] = {}
    for weight in trained:
        by_reason.setdefault(assignments[weight].why, []).append(weight)
    listed = [f"{name} ({why})" for why, some in by_reason.items() for name in _patterns(model, some, assignments)]
    return f"{list_some(listed)}; quintic.Rule(name, 'muon') decides otherwise"


def _patterns(model: nn.Module, params: Collection[Tensor], assignments: Mapping[Tensor, Assignment]) -> list[str]:
    """Return patterns for rules about these of the parameters that were assigned."""
    clean = clean_names(model)
    every = nn.Module.named_parameters(model, remove_duplicate=False)
    chosen = set(params)
    others = {clean[name] for name, param in every if param in assignments and param not in chosen}
    return list(dict.fromkeys(patterns_of((assignments[param].name for param in params), others).values()))
