"""`param_groups`: which parameters Muon orthogonalises and which AdamW takes, decided from the model's modules.

Matrices that map features to features go to Muon: weights of linear layers, attention's fused input projections and
stacks of experts. Everything whose rows or columns are not features goes to AdamW: embeddings, the output head, norms,
biases, gates, routers, convolutions and every parameter with fewer than two dimensions. A parameter that nobody decided
about is an error that names it, and never a silent choice; `Rule` decides by name.

Who decides, first to last: a rule; the module types that are certain (`nn.Embedding`, norms, convolutions); the
registry of known views (`registry.py`); the kind of linear layer; the name of a parameter that belongs to no known
module. A tensor with several uses is decided by all of them together, so that the order of modules does not matter.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quintic.optim.flattened import check_model_is_whole
from quintic.optim.registry import Found, known_views
from quintic.optim.views import Experts, Matrix, Split, View

__all__ = ["PERHAPS_FUSED", "Decision", "Rule", "decide", "grouped", "param_groups"]

Algorithm = Literal["muon", "adamw"]

PERHAPS_FUSED = "by its name perhaps several matrices, taken as one"
"""Part of the reason for a parameter like `qkv_proj.weight` whose owner is not in the registry."""

_FUSED_NAME = re.compile(
    r"qkv|query_key_value|gate_up|up_gate|^(c_attn|att_proj|in_proj|(to_)?kv(_proj)?)$", re.IGNORECASE
)

# Last parts of module names that mean "scores over the vocabulary or over classes" across model libraries.
_HEAD_NAMES = frozenset(
    {"lm_head", "head", "output", "unembed", "unembedding", "embed_out", "classifier", "score", "qa_outputs"}
)

# A part of a module name that is an index into a stack of layers.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# Embeddings whose number of rows is no vocabulary: no head scores positions or segments.
_POSITIONS = re.compile(r"pos|^wpe$|type|segment", re.IGNORECASE)

# Modules that choose experts, by the end of their class name.
_ROUTER_CLASS = re.compile(r"(Router|TopKGate|TopKGating|MoE\w*Gate)$", re.IGNORECASE)

# Parameters that no known module owns, by the name of the attribute.
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|$)")
_LOOKUP_NAME = re.compile(r"(^|_)(tokens?|emb|embeds?|embeddings?)(_table)?$|position|(^|_)(rel_)?pos(_|$)")

# How many undecided parameters an error lists.
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


@dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """What happens to one trainable parameter, and why."""

    name: str
    param: nn.Parameter
    algorithm: Algorithm
    view: View
    options: Mapping[str, Any]
    """Hyperparameters of its rule."""
    why: str


class _Use(NamedTuple):
    """One place where a parameter is registered."""

    name: str
    module: nn.Module
    attribute: str
    parent: nn.Module | None
    """What holds `module`."""

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]


class _Choice(NamedTuple):
    """A treatment without its parameter."""

    algorithm: Algorithm
    view: View
    why: str


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    rules: Sequence[Rule] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups for `quintic.Muon` that cover every trainable parameter of `model` once.

    Works on any device, also on the meta device. A tensor used under several names (a tied head) is listed once, under
    its first name, and is an embedding if any of its uses is one. `quintic.explain` shows each decision and its reason.

    Args:
        model: any module; parameters with `requires_grad=False` are left out.
        muon: hyperparameters for all Muon groups, e.g. `{"lr": 0.02}`.
        adamw: hyperparameters for all AdamW groups, e.g. `{"lr": 3e-4}`.
        rules: decisions by name that come before the ones by module.

    Returns:
        One group per algorithm, view and set of options, each with `params`, `param_names`, `algorithm` and `view`;
        Muon groups first.

    Raises:
        ValueError: a rule matches no parameter, a parameter was decided by nobody, or the model has none to train.
    """
    return grouped(decide(model, rules), muon=muon, adamw=adamw)


def grouped(
    decisions: Sequence[Decision], *, muon: Mapping[str, Any] | None, adamw: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the groups of `param_groups` for decisions already made; a reason never splits a group."""
    groups: dict[tuple[Algorithm, View, int], dict[str, Any]] = {}
    distinct: list[Mapping[str, Any]] = []  # options may hold lists, so they are compared and not hashed
    for decision in decisions:
        if decision.options not in distinct:
            distinct.append(decision.options)
        key = (decision.algorithm, decision.view, distinct.index(decision.options))
        if key not in groups:
            defaults = muon if decision.algorithm == "muon" else adamw
            groups[key] = {
                "params": [],
                "param_names": [],
                "algorithm": decision.algorithm,
                "view": decision.view,
                **(defaults or {}),
                **decision.options,
            }
        groups[key]["params"].append(decision.param)
        groups[key]["param_names"].append(decision.name)
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def decide(model: nn.Module, rules: Sequence[Rule] = ()) -> list[Decision]:
    """Return one decision per trainable parameter, in the model's order.

    Raises:
        ValueError: as `param_groups`.
    """
    check_model_is_whole(model)
    # With duplicates: a module that is registered twice may be recognisable under its second name only.
    modules = list(model.named_modules(remove_duplicate=False))
    uses = _uses(modules)
    known = known_views(model.modules())
    heads = _heads(modules)
    decisions: list[Decision] = []
    undecided: list[str] = []
    used_rules: set[int] = set()
    # named_parameters() lists a shared tensor once, under its first name.
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet: run one batch through the model before making parameter groups")
        own_uses = uses.get(param, [])
        others = [use.name for use in own_uses if use.name != name]
        choice = _choose(name, param, own_uses, known.get(param, []), heads)
        number = _matching_rule([name, *others], rules)
        options: Mapping[str, Any] = {}
        if number is not None:
            used_rules.add(number)
            rule, options = rules[number], rules[number].options
            inherited = choice.view if isinstance(choice, _Choice) and rule.algorithm == "muon" else Matrix()
            choice = _Choice(rule.algorithm, rule.view or inherited, f"rule {rule.pattern!r}")
        if not isinstance(choice, _Choice):
            undecided.append(f"{name} of shape {tuple(param.shape)}{choice}")
            continue
        why = choice.why + _tied(others)
        decisions.append(Decision(name, param, choice.algorithm, choice.view, options, why))
    if undecided:
        raise ValueError(_undecided_message(undecided))
    unused = [rule.pattern for number, rule in enumerate(rules) if number not in used_rules]
    if unused:
        raise ValueError(f"rule {unused[0]!r} matches no trainable parameter that an earlier rule left")
    if not decisions:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    return decisions


def _undecided_message(undecided: Sequence[str]) -> str:
    first = undecided[0].partition(" ")[0]
    listed = ", ".join(undecided[:_NUM_LISTED])
    more = f" and {len(undecided) - _NUM_LISTED} more" if len(undecided) > _NUM_LISTED else ""
    count = "this parameter" if len(undecided) == 1 else f"these {len(undecided)} parameters"
    return (
        f"nobody decided how to optimize {count}: {listed}{more}; add quintic.Rule({first!r}, 'muon' or 'adamw') to "
        f"rules, with a view if it holds several matrices or is stored as (in_features, out_features)"
    )


def _tied(others: Sequence[str]) -> str:
    if not others:
        return ""
    return f"; tied to {others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")


def _uses(modules: Sequence[tuple[str, nn.Module]]) -> dict[Tensor, list[_Use]]:
    by_name = dict(modules)
    uses: dict[Tensor, list[_Use]] = {}
    for module_name, module in modules:
        for attribute, param in module._parameters.items():
            if param is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                parent = by_name.get(module_name.rpartition(".")[0]) if module_name else None
                uses.setdefault(param, []).append(_Use(name, module, attribute, parent))
    return uses


def _matching_rule(names: Sequence[str], rules: Sequence[Rule]) -> int | None:
    for number, rule in enumerate(rules):
        if any(fnmatch.fnmatchcase(name, rule.pattern) for name in names):
            return number
    return None


def _heads(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return {name: why} for the linear layers that score a vocabulary or classes.

    A head is known by its name, because the model says so (`get_output_embeddings`), or by its size. By size alone a
    layer of a stack could be meant (a hidden layer may be as wide as the vocabulary). So among the layers with as many
    outputs as an embedding has rows, those that recur under other numbers are left out; then a name without a number
    wins, else the one with the highest numbers does.
    """
    linears = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    heads: dict[str, str] = {}
    declared = {id(_declared_head(module)) for _, module in modules}
    by_name = dict(modules)
    for name, linear in linears.items():
        parent, _, last = name.rpartition(".")
        inside = type(by_name[parent]).__name__ if parent in by_name else ""
        # Attention, too, calls its last layer "output".
        if last in _HEAD_NAMES and not (last == "output" and _NUMBER.search(name)):
            heads[name] = "output head (by its name)"
        elif id(linear) in declared:
            heads[name] = "output head (the model says so)"
        elif last == "out_proj" and inside.endswith("ClassificationHead"):
            heads[name] = "output head (of a classifier)"
    sizes = {linears[name].out_features for name in heads}
    vocabularies = {
        module.num_embeddings: name
        for name, module in reversed(modules)
        if isinstance(module, nn.Embedding)
        and module.num_embeddings not in sizes
        and not _POSITIONS.search(name.rpartition(".")[2])
    }
    recurring = Counter(_NUMBER.sub("*", name) for name in linears)
    sized = [
        name
        for name, linear in linears.items()
        if linear.out_features in vocabularies and (recurring[_NUMBER.sub("*", name)] == 1 or "." not in name)
    ]
    plain = [name for name in sized if not _NUMBER.search(name)]
    for name in plain or sorted(sized, key=_natural_order)[-1:]:
        rows = linears[name].out_features
        heads[name] = f"output head (as many outputs as {vocabularies[rows] or 'the embedding'} has rows)"
    return heads


def _declared_head(module: nn.Module) -> object:
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _choose(
    name: str, param: Tensor, uses: Sequence[_Use], known: Sequence[Found], heads: Mapping[str, str]
) -> _Choice | str:
    """Return the treatment of a parameter without rules, or what an error should add about an undecided one."""
    if param.ndim < 2:
        return _Choice("adamw", Matrix(), f"{param.ndim}-D")
    for use in uses:
        certain = _by_type(use)
        if certain is not None:
            return certain
    if known:
        problem = next((k.problem for k in known if k.problem is not None), None)
        if problem is not None:
            return f" ({known[0].entry.why}; but {problem})"
        if any(k.view != known[0].view for k in known):
            return f" (its uses disagree: {known[0].entry.why}, {known[-1].entry.why})"
        view, why = known[0].view, known[0].entry.why
        return _Choice("adamw", Matrix(), why) if view is None else _Choice("muon", view, why)
    choices = [choice for use in uses if (choice := _by_module(use, heads)) is not None]
    # One AdamW use makes the tensor AdamW's (a head that is a linear layer elsewhere), in whatever order they come.
    for choice in sorted(choices, key=lambda choice: (choice.algorithm, str(choice.view), choice.why)):
        return choice
    for use in uses:
        choice = _by_attribute(use, param)
        if choice is not None:
            return choice
    if param.ndim == 3 and "experts" in name:
        why = _perhaps_fused("stacked experts, taken as (experts, out, in)", name.rpartition(".")[2])
        return _Choice("muon", Experts(), why)
    return ""


def _perhaps_fused(why: str, last: str) -> str:
    return f"{why}; {PERHAPS_FUSED}" if _FUSED_NAME.search(last) else why


def _by_type(use: _Use) -> _Choice | None:
    """Return the treatment that the type of a module settles, whatever else the tensor is used for."""
    if isinstance(use.module, nn.Embedding | nn.EmbeddingBag):
        return _Choice("adamw", Matrix(), "embedding")
    if isinstance(use.module, nn.modules.conv._ConvNd):
        return _Choice("adamw", Matrix(), "convolution")
    if isinstance(use.module, nn.LayerNorm | nn.RMSNorm) or type(use.module).__name__.endswith("Norm"):
        return _Choice("adamw", Matrix(), "norm")
    return None


def _by_module(use: _Use, heads: Mapping[str, str]) -> _Choice | None:
    module = use.module
    if isinstance(module, nn.Linear):
        last = use.module_name.rpartition(".")[2]
        reason = heads.get(use.module_name) or _gate(use, module, last)
        if reason is not None:
            return _Choice("adamw", Matrix(), reason)
        return _Choice("muon", Matrix(), _perhaps_fused("linear layer", last))
    if isinstance(module, nn.MultiheadAttention):
        if use.attribute == "in_proj_weight":
            return _Choice("muon", Split((module.embed_dim,) * 3), "fused queries, keys, values")
        if use.attribute.endswith("_proj_weight"):
            return _Choice("muon", Matrix(), "linear layer")
        return _Choice("adamw", Matrix(), "bias")  # bias_k and bias_v, (1, 1, embed_dim)
    return None


def _gate(use: _Use, linear: nn.Linear, last: str) -> str | None:
    """Return why a linear layer chooses or weighs, where a singular-value view makes no sense; else None."""
    owners = [module for module in (linear, use.parent) if module is not None]
    is_router = any(_ROUTER_CLASS.search(base.__name__) for owner in owners for base in type(owner).__mro__)
    if is_router or "router" in use.module_name.split("."):
        return "router"
    if 1 in (linear.out_features, linear.in_features):
        return "one output or one input"
    if last == "gate":
        # The gate of a gated MLP has a twin; the gate that chooses experts has none.
        twins = [use.parent._modules.get(twin) for twin in ("up", "up_proj")] if use.parent is not None else []
        if any(isinstance(twin, nn.Linear) and twin.weight.shape == linear.weight.shape for twin in twins):
            return None
    return "gate or router (by its name)" if last == "gate" or last.endswith("_gate") else None


def _by_attribute(use: _Use, param: Tensor) -> _Choice | None:
    """Return the treatment of a parameter that no known module owns."""
    last = use.module_name.rpartition(".")[2]
    reason = None
    if any(_ROUTER_CLASS.search(base.__name__) for base in type(use.module).__mro__) or last in ("router", "gate"):
        reason = "router"
    elif param.numel() == max(param.shape):
        reason = f"1-D, stored with {param.ndim} dimensions"
    elif _BIAS_NAME.search(use.attribute):
        reason = "bias"
    elif _LOOKUP_NAME.search(use.attribute):
        reason = "embedding (by its name)"
    return None if reason is None else _Choice("adamw", Matrix(), reason)
