"""Assigns parameter groups without `algorithm`: `{"params": [...]}`, as other libraries make them.

Callbacks that unfreeze layers of a model (Lightning's `BackboneFinetuning`) add such groups, and helpers that group a
model by depth (timm's layer decay) return them. The first of these that is known decides:

1. the model, if `param_groups` was called for it;
2. the names of the parameters;
3. their shapes, with a warning that says how to decide instead.

The first two are questions for the `Classifier` (`quintic/grouping`). A group whose parameters need both algorithms, or
several views, becomes several groups with one learning rate.

An optimizer in which no group has an `algorithm` is used like `torch.optim.Muon`: its parameters are matrices, and
others are an error. If the constructor is given groups that hold both, they make up a whole model, and shapes decide.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from quintic import hooks
from quintic.optim.groups.assignment import Algorithm, Assignment, Classifier
from quintic.optim.groups.names import made_up, without_wrappers
from quintic.optim.layout.views import Matrix
from quintic.optim.linked_options import ADDED_WITH
from quintic.optim.rules.table import orthogonalizes

__all__ = ["Undecided"]

# The most parameters that a warning lists.
_NUM_LISTED = 5


# (name of a parameter, its shape, the algorithm that these suggest).
_Guess: TypeAlias = tuple[str, tuple[int, ...], Algorithm]


def _assigned_groups(
    number: int, group: Mapping[str, Any], defaults: Mapping[str, Any], *, has_decisions: bool, trusts_matrices: bool
) -> tuple[list[dict[str, Any]], list[_Guess]]:
    """Return the groups that a group without an `algorithm` becomes, and the guesses that this took.

    A group with an `algorithm` or a view is returned unchanged, and so is one without any hint on its parameters.

    Args:
        number: the index of the group in the optimizer.
        group: the group that the caller passed.
        defaults: options of the optimizer.
        has_decisions: whether any group has an `algorithm`, or the constructor's groups were mixed.
        trusts_matrices: whether matrices without names are meant for Muon: while the optimizer is constructed, and if
            its groups are made by hand.
    """
    # Groups that need no decision, or whose members are not parameters, which is an error elsewhere.
    params = group.get("params")
    if "algorithm" in group or "view" in group or isinstance(params, Tensor | set | None):
        return [dict(group)], []
    params = list(params)  # an iterator would be empty after the first pass
    rows = _rows(params, group.get("param_names"))
    if rows is None:
        return [{**group, "params": params}], []
    # Source 1: models that `param_groups` was called for.
    classifier: Classifier = hooks.load_classifier()
    known = classifier.from_models({param for _, param in rows})
    is_named = any(name is not None for name, _ in rows)
    if not known and not has_decisions and not is_named:
        return [{**group, "params": params}], []
    # Sources 2 and 3, for the other parameters: names, then shapes.
    unknown = [row for row in rows if row[1] not in known]
    suggested = _suggested(classifier, unknown, trusts_matrices=trusts_matrices)
    # Collect members by all that must be equal in a group: algorithm, view with its names, and options.
    members: dict[tuple[Any, ...], list[tuple[str, Tensor, Assignment]]] = {}
    guesses: list[_Guess] = []
    for place, (name, param) in enumerate(rows):
        if param in known:
            one, is_certain = known[param], True
            own_name = one.name if name is None else name
        else:
            one, is_certain = suggested[param]
            own_name = made_up(number, place) if name is None else name
        if not is_certain:
            guesses.append((own_name, tuple(param.shape), one.algorithm))
        # Options may hold lists, which cannot be hashed: their text tells sets of options apart.
        options = repr(sorted(one.options.items(), key=lambda item: item[0]))
        key = (one.algorithm, str(one.view), getattr(one.view, "names", None), options)
        members.setdefault(key, []).append((own_name, param, one))
    # Muon groups come first, as in `param_groups`. Several groups remember the index of the group they came from.
    made = [_as_group(group, members[key], defaults) for key in sorted(members, key=lambda key: key[0] != "muon")]
    if len(made) > 1:
        for each in made:
            each[ADDED_WITH] = number
    return made, guesses


def _with_list(entry: Any) -> Any:
    """Return an element of the constructor's argument; a group's iterator of parameters becomes a list."""
    if isinstance(entry, Mapping) and isinstance(entry.get("params"), Iterator):
        return {**entry, "params": list(entry["params"])}
    return entry


def _dimensions(group: Mapping[str, Any]) -> set[int]:
    """Return the numbers of dimensions that the tensors of a group have; empty for a group with a view."""
    params = group.get("params")
    if "view" in group or not isinstance(params, Sequence):
        return set()
    tensors = (row[-1] if isinstance(row, tuple) and row else row for row in params)
    return {tensor.ndim for tensor in tensors if isinstance(tensor, Tensor)}


def _rows(params: Sequence[Any], names: Any) -> list[tuple[str | None, Tensor]] | None:
    """Return (name or None, parameter) for each member of a group; None if they are not parameters.

    Names come from `names`, or from members that are (name, parameter); all members have one or none has.
    """
    if isinstance(names, list | tuple) and len(names) == len(params):
        params = list(zip(names, params, strict=True))
    rows = [row if isinstance(row, tuple) and len(row) == 2 else (None, row) for row in params]
    is_right = rows and all(isinstance(param, Tensor) for _, param in rows)
    return rows if is_right and len({name is None for name, _ in rows}) == 1 else None


def _suggested(
    classifier: Classifier, rows: Sequence[tuple[str | None, Tensor]], *, trusts_matrices: bool
) -> dict[Tensor, tuple[Assignment, bool]]:
    """Return for each parameter the assignment that its name and shape suggest, and whether it is certain."""
    # By name, as for the layers of a model.
    named = [(name, param) for name, param in rows if name is not None]
    clean = without_wrappers(str(name) for name, _ in named)
    by_name = classifier.from_names({name: param for name, (_, param) in zip(clean, named, strict=True)})
    suggested: dict[Tensor, tuple[Assignment, bool]] = {}
    for name, param in rows:
        one = by_name.get(param)
        if one is not None:
            # Vectors always go to AdamW, and matrices named like a layer to Muon; AdamW for a matrix is a guess.
            suggested[param] = one, param.ndim < 2 or orthogonalizes(one.algorithm)
        else:
            # By shape: only matrices go to Muon.
            algorithm: Algorithm = "muon" if param.ndim == 2 else "adamw"
            is_certain = param.ndim < 2 or (param.ndim == 2 and (name is not None or trusts_matrices))
            suggested[param] = Assignment(algorithm, Matrix(), "by its shape"), is_certain
    return suggested


def _as_group(
    group: Mapping[str, Any], members: Sequence[tuple[str, Tensor, Assignment]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group like the caller's with these members, all of one algorithm, view and set of options."""
    one = members[0][2]
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    made = {**one.options, **own, "algorithm": one.algorithm, "view": one.view}
    made["params"] = [(name, param) for name, param, _ in members]
    if not orthogonalizes(one.algorithm) and "lr" in own and "adamw_lr_ratio" not in made:
        # The caller wrote one rate for the whole model, on the scale of `lr`. AdamW's rate is a ratio of it.
        ratio, rate = defaults["adamw_lr_ratio"], float(defaults["lr"])
        if ratio is None and rate > 0:
            usual = one.options.get("lr", made.get("adamw_lr", defaults["adamw_lr"]))
            ratio = float(usual) / rate
        if ratio is not None:
            made["adamw_lr_ratio"] = ratio
    return made


class Undecided:
    """Assigns an optimizer's groups without `algorithm`, and warns of guesses."""

    def __init__(self) -> None:
        # The source of the groups' `algorithm`: groups from `param_groups` have views, handmade ones have none.
        self.decided_by: Literal["nobody", "hand", "model"] = "nobody"
        # Whether the optimizer is being constructed, and from parameters without groups, which are matrices.
        self._is_new = self._takes_matrices = False
        # Whether it was constructed from groups without `algorithm` that hold both matrices and other tensors.
        self._is_mixed = False
        # The guesses since the last warning.
        self._guesses: list[_Guess] = []

    def begin(self, params: Any) -> Any:
        """Begin the construction; return its argument for PyTorch's constructor, with lists for iterators."""
        if isinstance(params, Tensor | dict):
            return params
        params = list(params)
        self._is_new, self._takes_matrices = True, not any(isinstance(entry, Mapping) for entry in params)
        params = [_with_list(entry) for entry in params]
        groups = [entry for entry in params if isinstance(entry, Mapping)]
        # Matrices and other tensors in groups without any `algorithm`: a whole model, in which shapes decide.
        self._note(groups)
        dimensions = set().union(*map(_dimensions, groups))
        self._is_mixed = self.decided_by == "nobody" and {2} < dimensions
        return params

    def end(self, stacklevel: int) -> None:
        """End the construction and warn once of its guesses; `stacklevel` counts from the caller."""
        self._is_new = self._takes_matrices = False
        # A trainer that makes the optimizer from its class gives it parameters without their model.
        self.warn(
            stacklevel + 1,
            instead="quintic.Muon(quintic.param_groups(model), ...); in the Trainer of transformers give MuonFactory "
            "of quintic.integrations.hugging_face in place of quintic.Muon, docs/how-to/clients/transformers.md",
        )

    def assigned_groups(
        self, number: int, group: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the groups that a new group becomes: itself if there is nothing to decide."""
        # Parameters without groups, as `torch.optim.Muon` takes them: all must be matrices.
        if self._takes_matrices:
            return [dict(group)]
        trusts_matrices = not self._is_mixed and (self._is_new or self.decided_by != "model")
        has_decisions = self._is_mixed or self.decided_by != "nobody"
        assigned, guesses = _assigned_groups(
            number, group, defaults, has_decisions=has_decisions, trusts_matrices=trusts_matrices
        )
        self._guesses += guesses
        self._note([group])
        return assigned

    def forget_guesses(self) -> None:
        """Drop the guesses about a group that was refused."""
        self._guesses = []

    def _note(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Update `decided_by`; a group with a view shows that `param_groups` decided, once and for all."""
        for group in groups:
            if "algorithm" in group:
                self.decided_by = "model" if "view" in group or self.decided_by == "model" else "hand"

    def warn(
        self,
        stacklevel: int,
        instead: str = "for group in quintic.param_groups(module): optimizer.add_param_group(group)",
    ) -> None:
        """Warn of the guesses since the last warning; during construction they are kept until its end.

        Args:
            stacklevel: counts from the caller.
            instead: the code that makes groups of the model.
        """
        if self._is_new or not self._guesses:
            return
        # One warning for all, by algorithm.
        guesses, self._guesses = self._guesses, []
        texts = []
        for algorithm, what in (("muon", "taken for Muon's matrices"), ("adamw", "given to AdamW")):
            names = [f"{name} of shape {shape}" for name, shape, guessed in guesses if guessed == algorithm]
            if names:
                more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
                texts.append(f"{what} are {', '.join(names[:_NUM_LISTED])}{more}")
        warnings.warn(
            f"parameter groups without algorithm, of no model that quintic.param_groups was called for: by name and "
            f"shape, {'; '.join(texts)}. Set algorithm='muon' or 'adamw' in each group; or make groups of the module: "
            f"{instead}",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
