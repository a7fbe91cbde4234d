"""`param_groups`: which parameters Muon orthogonalises and which AdamW takes, decided from the model's modules.

Matrices that map features to features go to Muon: weights of linear layers, attention's fused input projections and
stacks of experts. Everything whose rows or columns are not features goes to AdamW: embeddings, the output head, norms,
biases, gates, routers, convolutions and every parameter with fewer than two dimensions. A parameter that no rule covers
is an error that names it, and never a silent choice; `Rule` decides by name.

Who decides, first to last: a rule; the module types that are certain (`nn.Embedding`, norms, convolutions); the
registry of known views (`registry.py`); the kind of linear layer (`heads.py` knows output heads); the name of a
parameter that belongs to no known module. What is decided about one parameter is in `classify.py`; `uses.py` finds the
modules that use it. Names are those without what wrappers add (`names.py`).
"""

import fnmatch
import logging
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quintic.optim.groups.classify import PERHAPS_FUSED, Algorithm, Choice, Convolutions, choose
from quintic.optim.groups.flattened import check_model_is_whole
from quintic.optim.groups.heads import heads_of
from quintic.optim.groups.layer_types import with_layer_types
from quintic.optim.groups.names import model_parameters, numberless
from quintic.optim.groups.options import adopt_old_names, with_new_names
from quintic.optim.groups.registry import known_views
from quintic.optim.groups.uses import Use, stored, uses_of
from quintic.optim.layout.views import Matrix, Split, View
from quintic.optim.rules.table import orthogonalizes

__all__ = ["Decision", "Rule", "decide", "grouped", "later_decisions", "param_groups"]

_logger = logging.getLogger("quintic")

# How many parameters an error or a warning lists.
_NUM_LISTED = 5


@dataclass(frozen=True)
class Rule:
    """Decide the treatment of the parameters whose name matches a pattern; the first matching rule wins.

    Args:
        pattern: shell-style pattern on the full parameter name, e.g. `"blocks.*.attn.qkv.weight"`; of a tensor with
            several names, on any of them.
        algorithm: `"muon"` or `"adamw"`.
        view: how a Muon parameter is made of matrices; None for the view that would be chosen without the rule, or
            `Matrix()` if there is none.
        options: hyperparameters of the group these parameters go into, e.g. `{"lr": 0.01}`.
    """

    pattern: str
    algorithm: Algorithm
    view: View | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a TypeError or ValueError for an unfit argument."""
        if not isinstance(self.pattern, str):
            raise TypeError(f"pattern={self.pattern!r} of a rule must be a string, such as 'blocks.*.weight'")
        which = f"rule {self.pattern!r}"
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(f"{which}: unknown algorithm {self.algorithm!r}; choose 'muon' or 'adamw'")
        if not isinstance(self.view, View | None):
            raise TypeError(
                f"{which}: view={self.view!r} is not a view; use quintic.Matrix(), Heads(n), Split(sizes), ..."
            )
        if not isinstance(self.options, Mapping):
            raise TypeError(f"{which}: options={self.options!r} must be a dictionary of hyperparameters")


@dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """The treatment of one trainable parameter, and the reason for it."""

    name: str
    param: nn.Parameter
    algorithm: Algorithm
    view: View
    options: Mapping[str, Any]
    """Hyperparameters of its rule."""
    why: str
    by_rule: bool


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    rules: Iterable[Rule] = (),
    convolutions: Convolutions = "adamw",
) -> list[dict[str, Any]]:
    """Return parameter groups for `quintic.Muon` that cover every trainable parameter of `model` once.

    Works on any device, also on the meta device. A tensor used under several names (a tied head) is listed once, under
    its first name, and is an embedding if any of its uses is one. `quintic.explain` shows each decision and its reason.
    Names are those of the bare model, also of one that is compiled, data-parallel or checkpointed.

    Warns where a weight is taken as one matrix and may be several, and where a model with linear layers or convolutions
    has no matrix for Muon although no rule says so.

    Args:
        model: any module; parameters with `requires_grad=False` are left out.
        muon: hyperparameters for all Muon groups, e.g. `{"lr": 0.02}`.
        adamw: hyperparameters for all AdamW groups, e.g. `{"lr": 3e-4}`.
        rules: decisions by name that come before the ones by module; with or without the prefixes of wrappers.
        convolutions: `"muon"` for convolutions as (out_channels, in_channels * kernel) matrices, those with groups as
            one matrix per group, transposed ones as (out_channels * kernel, in_channels); depthwise ones stay AdamW's.

    Returns:
        One group per algorithm, view and set of options, each with `params`, `param_names`, `algorithm` and `view`;
        Muon groups first.

    Raises:
        ValueError: a rule matches no parameter, a parameter is covered by no rule, the model has none to train, or
            hyperparameters have a name that says what a group consists of.
        TypeError: `model` is no module.
    """
    rules = _checked_rules(rules)
    decisions = decide(model, rules, convolutions)
    _warn(model, decisions)
    if _logger.isEnabledFor(logging.DEBUG):
        for one in decisions:
            how = f"muon, {one.view}" if orthogonalizes(one.algorithm) else one.algorithm
            _logger.debug("%s %s: %s, because: %s", one.name, tuple(one.param.shape), how, one.why)
    groups = grouped(decisions, muon=muon, adamw=adamw)
    options = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    for given in options.values():
        adopt_old_names(given)
    _remember(model, _Request(rules, convolutions, options))
    return groups


class _Request(NamedTuple):
    """The arguments of a call of `param_groups`."""

    rules: Sequence[Rule]
    convolutions: Convolutions
    options: Mapping[str, Mapping[str, Any]]
    """By algorithm."""


_requests: list[tuple[weakref.ref[nn.Module], _Request]] = []
"""The models that groups were made for, and that are still there; the latest last."""


def _remember(model: nn.Module, request: _Request) -> None:
    others = [(ref, other) for ref, other in _requests if ref() is not None and ref() is not model]
    _requests[:] = [*others, (weakref.ref(model), request)]


def later_decisions(params: Collection[Tensor]) -> dict[Tensor, Decision]:
    """Return decisions about parameters of models that `param_groups` has made groups for, also frozen ones.

    The model is read as it is now. Rules and options of the call count, and come as the options of the decisions.
    Parameters that are in no such model, or that are undecided there, are left out.
    """
    decisions: dict[Tensor, Decision] = {}
    for ref, request in reversed(_requests):
        model = ref()
        wanted = {param for param in params if param not in decisions}
        if model is None or not any(param in wanted for param in model.parameters()):
            continue
        for one in decide(model, request.rules, request.convolutions, wanted=wanted):
            options = {**request.options[one.algorithm], **one.options}
            decisions[one.param] = replace(one, options=options)
    return decisions


def grouped(
    decisions: Sequence[Decision], *, muon: Mapping[str, Any] | None, adamw: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the groups of `param_groups` for decisions already made; a reason never splits a group."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    defaults = {
        which: _hyperparameters(which, {} if options is None else options)
        for which, options in (("muon", muon), ("adamw", adamw))
    }
    distinct: list[Mapping[str, Any]] = []  # options may hold lists, so they are compared and not hashed
    own: list[dict[str, Any]] = []
    for decision in decisions:
        if decision.options not in distinct:
            own.append(_hyperparameters(f"options of the rule for {decision.name}", decision.options))
            distinct.append(decision.options)
        # Names of parts are no difference between views, but another order of them takes a group of its own.
        names = getattr(decision.view, "names", None)
        number = distinct.index(decision.options)
        key = (decision.algorithm, decision.view, names, number)
        if key not in groups:
            groups[key] = {
                "params": [],
                "param_names": [],
                "algorithm": decision.algorithm,
                "view": decision.view,
                **defaults[decision.algorithm],
                **own[number],
            }
        groups[key]["params"].append(decision.param)
        groups[key]["param_names"].append(decision.name)
    return sorted(groups.values(), key=lambda group: not orthogonalizes(group["algorithm"]))


def _hyperparameters(what: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters of groups under their new names; a ValueError for other keys."""
    if not isinstance(options, Mapping):
        raise TypeError(f"{what}={options!r} must be a dictionary of hyperparameters")
    for key in ("params", "param_names", "algorithm", "view"):
        if key in options:
            raise ValueError(
                f"{what}: {key!r} is no hyperparameter, but what the group consists of; choose algorithm and view by "
                f"quintic.Rule(pattern, algorithm, view)"
            )
    return with_new_names(dict(options), what, stacklevel=4)


def _checked_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules from any iterable as a list; a TypeError names an entry that is not a rule."""
    if isinstance(rules, Rule | Mapping | str) or not isinstance(rules, Iterable):
        raise TypeError(f"rules={rules!r} must be a list of rules: [quintic.Rule(pattern, algorithm, view), ...]")
    found = list(rules)
    for number, rule in enumerate(found):
        if not isinstance(rule, Rule):
            raise TypeError(f"rules[{number}] is {rule!r}: give quintic.Rule(pattern, algorithm, view, options)")
    return found


def decide(
    model: nn.Module,
    rules: Iterable[Rule] = (),
    convolutions: Convolutions = "adamw",
    *,
    wanted: Collection[Tensor] | None = None,
) -> list[Decision]:
    """Return one decision per trainable parameter, in the model's order; arguments and errors as `param_groups`.

    With `wanted`, decide about these parameters instead, frozen or not, and leave out those that no rule covers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a {type(model).__name__} says nothing of what its parameters are for: give the model, a torch.nn.Module, "
            f"or several in a torch.nn.ModuleList; quintic.Muon(parameters) takes all of them for matrices"
        )
    rules = _checked_rules(rules)
    if convolutions not in get_args(Convolutions):
        raise ValueError(f"convolutions={convolutions!r}: choose 'muon' or 'adamw'")
    check_model_is_whole(model)
    typed = with_layer_types(model)
    uses = uses_of(typed)
    known = known_views(typed.modules())
    heads = heads_of(typed)
    ruled = [_names_of(rule, uses.values()) for rule in rules]
    decisions: list[Decision] = []
    undecided: list[str] = []
    used_rules: set[int] = set()
    # A shared tensor is listed once, under its first name.
    for name, param in model_parameters(model):
        if not (param.requires_grad if wanted is None else param in wanted):
            continue
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet: run one batch through the model before making parameter groups")
        own_uses = uses.get(param, [])
        others = [use.name for use in own_uses if use.name != name]
        choice = choose(name, param, own_uses, known, heads, convolutions)
        number = next((number for number, names in enumerate(ruled) if not names.isdisjoint([name, *others])), None)
        options: Mapping[str, Any] = {}
        if number is not None:
            used_rules.add(number)
            rule, options = rules[number], rules[number].options
            inherited = choice.view if isinstance(choice, Choice) and orthogonalizes(rule.algorithm) else Matrix()
            choice = Choice(rule.algorithm, _named_like(rule.view, inherited), f"rule {rule.pattern!r}")
        if not isinstance(choice, Choice):
            undecided.append(f"{name} of shape {tuple(param.shape)}{choice}")
            continue
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        why = f"{choice.why}; tied to {others[0]}{more}" if others else choice.why
        decisions.append(Decision(name, param, choice.algorithm, choice.view, options, why, number is not None))
    if wanted is not None:
        return decisions
    if undecided:
        raise ValueError(_undecided_message(undecided))
    unused = [rule.pattern for number, rule in enumerate(rules) if number not in used_rules]
    if unused:
        message = f"rule {unused[0]!r} matches no trainable parameter that an earlier rule left"
        frozen = [name for name, param in model_parameters(model) if not param.requires_grad]
        frozen = [name for name in frozen if fnmatch.fnmatchcase(name, unused[0])]
        if frozen:
            message += f"; these parameters are frozen and need none: {_listed(frozen)}"
        raise ValueError(message)
    if not decisions:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    return decisions


def _named_like(view: View | None, inherited: View) -> View:
    """Return the view of a rule, if it has one, with the names that the parts it divides into are known by."""
    if not isinstance(view, Split) or not isinstance(inherited, Split) or view.names is not None:
        return view or inherited
    is_same = (view.sizes, view.groups, view.transposed) == (inherited.sizes, inherited.groups, inherited.transposed)
    return replace(view, names=inherited.names) if is_same else view


def _undecided_message(undecided: Sequence[str]) -> str:
    first = undecided[0].partition(" ")[0]
    count = "this parameter" if len(undecided) == 1 else f"these {len(undecided)} parameters"
    return (
        f"nobody decided how to optimize {count}: {_listed(undecided)}; add quintic.Rule({first!r}, 'adamw') "
        f"to rules for what is added or looked up (positions, embeddings), or 'muon' for what inputs are multiplied "
        f"with, and a view if it holds several matrices or is stored as (in_features, out_features)"
    )


def _listed(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _NUM_LISTED} more" if len(entries) > _NUM_LISTED else ""
    return ", ".join(entries[:_NUM_LISTED]) + more


def _names_of(rule: Rule, uses: Iterable[Sequence[Use]]) -> set[str]:
    """Return the parameters that a rule matches, by name; with the prefixes of wrappers only if none does without."""
    every = [use for several in uses for use in several]
    names = {use.name for use in every if fnmatch.fnmatchcase(use.name, rule.pattern)}
    return names or {use.name for use in every if fnmatch.fnmatchcase(use.given_name, rule.pattern)}


def _warn(model: nn.Module, decisions: Sequence[Decision]) -> None:
    # Layers that differ in their numbers share a line, and a rule.
    perhaps = list(dict.fromkeys(numberless(d.name) for d in decisions if PERHAPS_FUSED in d.why))
    if perhaps:
        warnings.warn(
            f"perhaps several matrices each, orthogonalized as one: {_listed(perhaps)}; say which with "
            f"quintic.Rule({perhaps[0]!r}, 'muon', quintic.Split(sizes, groups=...)), or quintic.Matrix() for one",
            UserWarning,
            stacklevel=3,
        )
    if not any(orthogonalizes(decision.algorithm) for decision in decisions):
        missing = _without_matrices(model, decisions)
        if missing:
            warnings.warn(f"Muon gets no matrix of this {type(model).__name__}: {missing}", UserWarning, stacklevel=3)


def _without_matrices(model: nn.Module, decisions: Sequence[Decision]) -> str | None:
    """Return why a model with layers gives Muon no matrix, and what to do; None if that was to be expected."""
    layers = [
        module
        for module in with_layer_types(model).modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]
    decided: dict[Tensor, Decision] = {decision.param: decision for decision in decisions}
    choices = [decided.get(param) for layer in layers for param in [stored(layer, "weight")] if param is not None]
    trained = [decision for decision in choices if decision is not None]
    if not choices or any(decision.by_rule for decision in trained):
        return None
    if not trained:
        return "none of its linear layers is trained; make the groups after requires_grad is set as it shall be"
    if any(decision.param.ndim < 2 for decision in trained):
        return (
            "its weights are 1-D pieces, as FSDP1 and DeepSpeed make them; shard with FSDP2 (fully_shard), or keep "
            "whole weights on every rank and let quintic.Muon(..., comms='sharded') divide the state"
        )
    if any(decision.why == "convolution" for decision in trained):
        return "its weights are convolutions; quintic.param_groups(model, convolutions='muon') takes them as matrices"
    reasons = list(dict.fromkeys(f"{numberless(decision.name)} ({decision.why})" for decision in trained))
    return f"{_listed(reasons)}; quintic.Rule(name, 'muon') decides otherwise"
