"""`param_groups`: which parameters Muon orthogonalises and which AdamW takes, decided from the model's modules.

Matrices that map features to features go to Muon: weights of linear layers, attention's fused input projections and
stacks of experts. Everything whose rows or columns are not features goes to AdamW: embeddings, the output head, norms,
biases, gates, routers, convolutions and every parameter with fewer than two dimensions. A parameter that nobody decided
about is an error that names it, and never a silent choice; `Rule` decides by name.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from quintic.optim.views import Experts, Matrix, Split, View

__all__ = ["Rule", "param_groups"]

Algorithm = Literal["muon", "adamw"]

# Last parts of module names that mean "scores over the vocabulary or over classes" across model libraries.
_HEAD_NAMES = frozenset({"lm_head", "head", "output", "unembed", "unembedding", "embed_out", "classifier", "score"})

# A part of a module name that is an index into a stack of layers.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

# Small linear layers that choose or weigh, where a singular-value view makes no sense.
_GATE_NAMES = frozenset({"router", "gate"})


@dataclass(frozen=True)
class Rule:
    """Decide the treatment of the parameters whose name matches a pattern; the first matching rule wins.

    Args:
        pattern: shell-style pattern on the full parameter name, e.g. `"blocks.*.attn.qkv.weight"`.
        algorithm: `"muon"` or `"adamw"`.
        view: how a Muon parameter is made of matrices; None for `Matrix()`.
        options: hyperparameters of the group these parameters go into, e.g. `{"lr": 0.01}`.
    """

    pattern: str
    algorithm: Algorithm
    view: View | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Decision:
    algorithm: Algorithm
    view: View
    options: tuple[tuple[str, Any], ...] = ()


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    rules: Sequence[Rule] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups for `quintic.Muon` that cover every trainable parameter of `model` once.

    Works on any device, also on the meta device. A tensor used under several names (a tied head) is listed once, under
    its first name, and is an embedding if any of its uses is one.

    Args:
        model: any module; parameters with `requires_grad=False` are left out.
        muon: hyperparameters for all Muon groups, e.g. `{"lr": 0.02}`.
        adamw: hyperparameters for all AdamW groups, e.g. `{"lr": 3e-4}`.
        rules: decisions by name that come before the ones by module.

    Returns:
        One group per algorithm, view and set of options, each with `params`, `param_names`, `algorithm` and `view`.

    Raises:
        ValueError: a rule matches no parameter, a parameter was decided by nobody, or the model has none to train.
    """
    names = _first_names(model)
    uses = _module_uses(model)
    heads = _heads(model)
    matched: set[str] = set()
    groups: dict[_Decision, dict[str, Any]] = {}
    for param, name in names.items():
        decision = _by_rule(name, rules, matched)
        if decision is None:
            decision = _by_modules(name, param, uses.get(param, []), heads)
        if decision is None:
            raise ValueError(
                f"{name}: nobody decided how to optimize this parameter of shape {tuple(param.shape)}; "
                f"add quintic.Rule({name!r}, 'muon' or 'adamw') to rules"
            )
        group = groups.get(decision)
        if group is None:
            defaults = muon if decision.algorithm == "muon" else adamw
            group = {
                "params": [],
                "param_names": [],
                "algorithm": decision.algorithm,
                "view": decision.view,
                **(defaults or {}),
                **dict(decision.options),
            }
            groups[decision] = group
        group["params"].append(param)
        group["param_names"].append(name)
    unused = [rule.pattern for rule in rules if rule.pattern not in matched]
    if unused:
        raise ValueError(f"rule {unused[0]!r} matches no trainable parameter that an earlier rule left")
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def _first_names(model: nn.Module) -> dict[Tensor, str]:
    # named_parameters() lists a shared tensor once, under its first name.
    return {param: name for name, param in model.named_parameters() if param.requires_grad}


def _module_uses(model: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module, str]]]:
    """Return for each parameter all (module name, module, attribute) under which it is registered."""
    uses: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                uses.setdefault(param, []).append((module_name, module, attribute))
    return uses


def _by_rule(name: str, rules: Sequence[Rule], matched: set[str]) -> _Decision | None:
    for rule in rules:
        if fnmatch.fnmatchcase(name, rule.pattern):
            matched.add(rule.pattern)
            options = tuple(sorted(rule.options.items()))
            return _Decision(rule.algorithm, rule.view or Matrix(), options)
    return None


def _heads(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that score a vocabulary or classes, by their name or by their size.

    By size alone a layer of a stack could be meant (a hidden layer may be as wide as the vocabulary). So among the
    layers with as many outputs as an embedding has rows, those that recur under other numbers are left out; then a
    name without a number wins, else the last layer does.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = {name for name in linears if name.rpartition(".")[2] in _HEAD_NAMES}
    vocabulary_sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    recurring = Counter(_NUMBER.sub("*", name) for name in linears)
    sized = [
        name
        for name, linear in linears.items()
        if linear.out_features in vocabulary_sizes and (recurring[_NUMBER.sub("*", name)] == 1 or "." not in name)
    ]
    plain = {name for name in sized if not _NUMBER.search(name)}
    return named | (plain or set(sized[-1:]))


def _by_modules(name: str, param: Tensor, uses: list[tuple[str, nn.Module, str]], heads: set[str]) -> _Decision | None:
    if param.ndim < 2:
        return _Decision("adamw", Matrix())
    decisions = {
        decision
        for module_name, module, attribute in uses
        if (decision := _by_module(module_name, module, attribute, heads)) is not None
    }
    # A tied embedding and head: one AdamW use makes the tensor AdamW's, in whatever order the modules come.
    for decision in decisions:
        if decision.algorithm == "adamw":
            return decision
    if decisions:
        return decisions.pop()
    if param.ndim == 3 and "experts" in name:
        return _Decision("muon", Experts())
    return None


def _by_module(module_name: str, module: nn.Module, attribute: str, heads: set[str]) -> _Decision | None:
    adamw = _Decision("adamw", Matrix())
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd | nn.LayerNorm | nn.RMSNorm):
        return adamw
    if isinstance(module, nn.Linear):
        last = module_name.rpartition(".")[2]
        is_gate = last in _GATE_NAMES or last.endswith("_gate") or 1 in (module.out_features, module.in_features)
        return adamw if module_name in heads or is_gate else _Decision("muon", Matrix())
    if isinstance(module, nn.MultiheadAttention):
        if attribute == "in_proj_weight":
            return _Decision("muon", Split((module.embed_dim,) * 3))
        if attribute.endswith("_proj_weight"):
            return _Decision("muon", Matrix())
        return adamw  # bias_k and bias_v, (1, 1, embed_dim)
    return None
