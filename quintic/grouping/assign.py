"""Assigns an algorithm and a view to each parameter of a model, or raises an error that names the parameter.

The first of these that has an answer decides:

1. a `Rule`, by the name of the parameter;
2. module types that leave no doubt: `nn.Embedding`, norms, convolutions;
3. the registry of model families (`registry.py`);
4. the kind of linear layer (`heads.py` finds output heads);
5. the name of a parameter that no known module owns.

The roles that a forward pass has shown (`forward`) then overrule 2 to 5 where they split a weight, orient it, take it
from Muon, or decide what these leave open. `uses.py` finds the modules that compute with a parameter, `classify.py`
has the steps 2 to 5. Names are the bare
model's, without the prefixes that wrappers add (`optim/groups/names.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from quintic.grouping.classify import Convolutions, classify
from quintic.grouping.doubts import BY_PASS, taken_features
from quintic.grouping.forward.roles import Roles, decided
from quintic.grouping.heads import heads_of
from quintic.grouping.layer_types import with_layer_types
from quintic.grouping.patterns import matches, patterns_of
from quintic.grouping.registry import registry_matches
from quintic.grouping.uses import ParameterUse, attribute_of, uses_of
from quintic.optim.groups.assignment import Algorithm, Assignment
from quintic.optim.groups.flattened import FLATTENED_REMEDY, check_is_not_flattened
from quintic.optim.groups.names import model_parameters
from quintic.optim.layout.views import Matrix, Split, View
from quintic.optim.rules.table import orthogonalizes

__all__ = ["Rule", "assign", "check_rules", "list_some"]

# How many parameters an error or a warning lists.
_NUM_LISTED = 5


@dataclass(frozen=True)
class Rule:
    """Decide the treatment of the parameters whose name matches a pattern; the first matching rule wins.

    Args:
        pattern: shell-style pattern on the full parameter name, e.g. `"blocks.*.attn.qkv.weight"`, or the name itself;
            of a tensor with several names, on any of them.
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


def assign(
    model: nn.Module,
    rules: Iterable[Rule] = (),
    convolutions: Convolutions = "adamw",
    *,
    wanted: Collection[Tensor] | None = None,
    roles: Roles | None = None,
) -> dict[Tensor, Assignment]:
    """Return an assignment for each trainable parameter, in the model's order; arguments and errors as `param_groups`.

    With `wanted`, only these parameters are assigned, frozen or not, and parameters that no rule covers are left out.
    """
    _check_is_module(model)
    if roles is not None and not isinstance(roles, Roles):
        raise TypeError(f"roles={roles!r} must be the result of quintic.trace, or of quintic.Roles.load")
    rules = check_rules(rules)
    if convolutions not in get_args(Convolutions):
        raise ValueError(f"convolutions={convolutions!r}: choose 'muon' or 'adamw'")
    _check_is_whole(model)
    typed = with_layer_types(model)
    uses = uses_of(typed)
    known = registry_matches(typed.modules())
    heads = heads_of(typed)
    taken = taken_features(uses)
    names_of_rules = [_matching_names(rule, uses.values()) for rule in rules]
    assignments: dict[Tensor, Assignment] = {}
    uncovered: dict[str, list[str]] = {}  # shapes and remarks -> names
    used_rules: set[int] = set()
    # A tensor that is registered several times comes once, under its first name.
    for name, param in model_parameters(model):
        if not (param.requires_grad if wanted is None else param in wanted):
            continue
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet: run one batch through the model before making parameter groups")
        own_uses = uses.get(param, [])
        other_names = [use.name for use in own_uses if use.name != name]
        found = classify(name, param, own_uses, known, heads, convolutions, taken)
        if roles is not None:
            found = decided(found, [name, *other_names], own_uses, tuple(param.shape), roles)
        number = _first_match(names_of_rules, [name, *other_names])
        if number is not None:
            used_rules.add(number)
            found = _by_rule(rules[number], found)
            _check_view_fits(name, param, found)
        if not isinstance(found, Assignment):
            uncovered.setdefault(f"{tuple(param.shape)}{found}", []).append(name)
            continue
        why = f"{found.why}; {found.doubt}" if found.doubt else found.why
        assignments[param] = found._replace(name=name, why=why + _tied_text(other_names))
    if roles is not None and wanted is None and roles.of(use.name for every in uses.values() for use in every) is None:
        raise ValueError(f"roles of {roles.model} name no parameter of {type(model).__name__}: trace this model")
    if wanted is None:
        if uncovered:
            covered = {use.name for param in assignments for use in uses.get(param, ())}
            raise ValueError(_uncovered_message(uncovered, covered) + (BY_PASS if roles is None else ""))
        _check_rules_are_used(model, [rule for number, rule in enumerate(rules) if number not in used_rules])
        if not assignments:
            raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    return assignments


def check_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules from any iterable as a list; a TypeError names an entry that is not a rule."""
    if isinstance(rules, Rule | Mapping | str) or not isinstance(rules, Iterable):
        raise TypeError(f"rules={rules!r} must be a list of rules: [quintic.Rule(pattern, algorithm, view), ...]")
    checked = list(rules)
    for number, rule in enumerate(checked):
        if not isinstance(rule, Rule):
            raise TypeError(f"rules[{number}] is {rule!r}: give quintic.Rule(pattern, algorithm, view, options)")
    return checked


def list_some(entries: Sequence[str]) -> str:
    """Return the first entries for a message, and how many more there are."""
    more = f" and {len(entries) - _NUM_LISTED} more" if len(entries) > _NUM_LISTED else ""
    return ", ".join(entries[:_NUM_LISTED]) + more


def _check_is_module(model: object) -> None:
    """Reject anything but a module; the TypeError says what to give."""
    if isinstance(model, nn.Module):
        return
    hint = "quintic.Muon(parameters) takes all parameters for matrices"
    if isinstance(model, Optimizer):
        algorithms = "{name: group['algorithm'] for group in optimizer.param_groups for name in group['param_names']}"
        hint = f"an optimizer's own groups say what it has: {algorithms}"
    raise TypeError(
        f"model is a {type(model).__name__}: give the model itself, a torch.nn.Module, or several of them in a "
        f"torch.nn.ModuleList; {hint}"
    )


def _check_is_whole(model: nn.Module) -> None:
    """Reject a model that FSDP1 or DeepSpeed has flattened; the ValueError names the library and the remedy."""
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        # Without sharding, FSDP1 is data parallelism and keeps the shapes.
        strategy = getattr(attribute_of(module, "sharding_strategy"), "name", "NO_SHARD")
        if "FullyShardedDataParallel" in bases and strategy != "NO_SHARD":
            raise ValueError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1): {FLATTENED_REMEDY}"
            )
    for name, param in model.named_parameters():
        check_is_not_flattened(name, param)


def _matching_names(rule: Rule, uses: Iterable[Sequence[ParameterUse]]) -> set[str]:
    """Return the names that a rule matches. The prefixes of wrappers count only if no bare name matches."""
    every = [use for several in uses for use in several]
    names = {use.name for use in every if matches(use.name, rule.pattern)}
    return names or {use.name for use in every if matches(use.given_name, rule.pattern)}


def _first_match(names_of_rules: Sequence[set[str]], names: Sequence[str]) -> int | None:
    return next((number for number, matching in enumerate(names_of_rules) if not matching.isdisjoint(names)), None)


def _by_rule(rule: Rule, found: Assignment | str) -> Assignment:
    """Return the assignment of a rule, with the view `found` without it where the rule has none."""
    inherited = found.view if isinstance(found, Assignment) and orthogonalizes(rule.algorithm) else Matrix()
    view = _with_matrix_names(rule.view, inherited)
    return Assignment(rule.algorithm, view, f"rule {rule.pattern!r}", options=rule.options, by_rule=True)


def _check_view_fits(name: str, param: Tensor, by_rule: Assignment) -> None:
    """Raise the ValueError of `quintic.Muon` where a rule's view does not fit; vectors have an error of their own."""
    try:
        if orthogonalizes(by_rule.algorithm) and param.ndim > 1:
            by_rule.view.shapes(param.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error} ({by_rule.why})") from None


def _with_matrix_names(view: View | None, inherited: View) -> View:
    """Return a rule's view. An equal `Split` without names takes the inherited ones, such as query, key and value."""
    if not isinstance(view, Split) or not isinstance(inherited, Split) or view.names is not None:
        return view or inherited
    is_same = (view.sizes, view.groups, view.transposed) == (inherited.sizes, inherited.groups, inherited.transposed)
    return replace(view, names=inherited.names) if is_same else view


def _tied_text(other_names: Sequence[str]) -> str:
    if not other_names:
        return ""
    more = f" and {len(other_names) - 1} more" if len(other_names) > 1 else ""
    return f"; tied to {other_names[0]}{more}"


def _uncovered_message(uncovered: Mapping[str, Sequence[str]], covered: Collection[str]) -> str:
    entries: dict[str, str] = {}  # the text of each pattern of a rule
    every = {name for names in uncovered.values() for name in names}
    for about, names in uncovered.items():
        patterns = patterns_of(names, every.union(covered).difference(names)).values()
        entries |= {pattern: f"{pattern} of shape {about}" for pattern in patterns}
    first = next(iter(entries))
    count = "this parameter" if len(every) == 1 else f"these {len(every)} parameters"
    return (
        f"no rule covers {count}: {list_some(list(entries.values()))}; add quintic.Rule({first!r}, 'adamw') to rules "
        f"for a parameter that is added or looked up (positions, embeddings), or 'muon' for one that inputs are "
        f"multiplied with, and a view if it holds several matrices or is stored as (in_features, out_features)"
    )


def _check_rules_are_used(model: nn.Module, unused: Sequence[Rule]) -> None:
    if not unused:
        return
    pattern = unused[0].pattern
    message = f"rule {pattern!r} matches no trainable parameter that an earlier rule left"
    frozen = [name for name, param in model_parameters(model) if not param.requires_grad]
    frozen = [name for name in frozen if matches(name, pattern)]
    if frozen:
        message += f"; these parameters are frozen and need none: {list_some(frozen)}"
    raise ValueError(message)
