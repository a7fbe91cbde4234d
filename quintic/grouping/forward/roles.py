"""`Roles`: the findings of a forward pass as data, and their weight against names and types."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quintic.grouping.heads import without_adapters
from quintic.grouping.uses import ParameterUse
from quintic.optim.groups.assignment import Assignment
from quintic.optim.layout.views import Experts, Matrix, Split, View
from quintic.optim.rules.table import orthogonalizes

__all__ = ["Role", "Roles", "decided"]

_FORMAT = 1
_ADAMW = frozenset({"table", "factors", "head", "router", "gate", "thin"})
KINDS = _ADAMW | {"matrix", "unknown"}

UNSEEN = "not used in the forward pass"
"""The evidence of a role about a weight that the pass did not reach."""

# Reasons of names and sizes that a matrix found in the forward pass overrules, for weights of linear layers.
_BY_NAME_OR_SIZE = ("output head", "gate or router (by its name)")


# With fewer outputs, a head by its name stays one: coordinates are returned, and used again by later layers.
_FEWEST_FEATURES = 8


@dataclass(frozen=True)
class Role:
    """What one weight is, and how the forward pass shows it."""

    kind: str
    """`matrix`; for AdamW `table`, `factors`, `head`, `router`, `gate` or `thin` (one output or input); `unknown`."""
    shape: tuple[int, ...]
    evidence: str
    pieces: tuple[int, ...] = ()
    """Output features of each of several matrices within one group, as the sizes of `Split`; empty for one."""
    groups: int = 1
    transposed: bool = False
    """Stored as (..., in_features, out_features)."""

    @property
    def view(self) -> View | None:
        """Return the matrices; None unless the weight is a matrix, or a stack of them."""
        if self.kind != "matrix" or len(self.shape) not in (2, 3):
            return None
        if self.pieces:
            return Split(self.pieces, self.transposed, self.groups)
        return Matrix(self.transposed) if len(self.shape) == 2 else Experts(self.transposed)


@dataclass(frozen=True, repr=False)
class Roles(Mapping[str, Role]):
    """The result of `trace`: {parameter name: `Role`}; print it, save it, give it to `param_groups(roles=...)`."""

    model: str
    """Class name of the model."""
    found: Mapping[str, Role]
    """By the names of the bare model."""

    def __getitem__(self, name: str) -> Role:
        """Return the role of a parameter."""
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the model's order."""
        return iter(self.found)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self.found)

    def __str__(self) -> str:
        """Return a line for each parameter."""
        size = max(map(len, self.found), default=0)
        lines = (f"{name:{size}}  {_text(role.kind, role.view)}  {role.evidence}" for name, role in self.found.items())
        return "\n".join([f"{self.model}:", *lines])

    __repr__ = __str__

    def of(self, names: Iterable[str]) -> Role | None:
        """Return the role of a parameter with these names, also where PEFT has changed them since; None without one."""
        every = [bare for name in names for bare in (name, without_adapters(name))]
        return next((self.found[name] for name in every if name in self.found), None)

    def save(self, path: str | Path) -> None:
        """Write the roles to a JSON file, for `Roles.load`."""
        entries = {name: asdict(role) for name, role in self.found.items()}
        Path(path).write_text(json.dumps({"format": _FORMAT, "model": self.model, "roles": entries}, indent=1), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Roles":
        """Return the roles that `save` wrote.

        Raises:
            ValueError: the file holds no roles, or roles of another format.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}, this version reads {_FORMAT}")
            found = {name: _from_entry(entry) for name, entry in data["roles"].items()}
            return cls(str(data["model"]), found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of quintic.Roles.save: {error!s}; call quintic.trace again") from None


def _from_entry(entry: dict[str, Any]) -> Role:
    if entry["kind"] not in KINDS:
        raise ValueError(f"unknown kind {entry['kind']!r}")
    return Role(**{**entry, "shape": tuple(entry["shape"]), "pieces": tuple(entry["pieces"])})


def decided(
    found: Assignment | str, names: Sequence[str], uses: Sequence[ParameterUse], shape: tuple[int, ...], roles: Roles
) -> Assignment | str:
    """Return the assignment of a parameter from types, names and the forward pass.

    Args:
        found: by types and names; a remark if they do not decide.
        names: of the parameter.
        uses: the places where modules compute with it.
        shape: of the whole parameter.
        roles: of the model, or of the model before it was wrapped, sharded or cut.

    Raises:
        ValueError: the role is that of a parameter of another shape.
    """
    if len(shape) < 2:
        return found
    role = roles.of(names)
    if role is not None and role.shape != shape:
        raise ValueError(f"{names[0]} has shape {shape}, but {role.shape} in roles: call quintic.trace for this model")
    if role is None or role.kind == "unknown":
        is_seen = role is not None and role.evidence != UNSEEN
        note = f"; forward pass: {role.evidence}" if role is not None and is_seen else "; not seen in the forward pass"
        return found + note if isinstance(found, str) else found._replace(why=found.why + note)
    view, why = role.view, f"forward pass: {role.evidence}"
    if isinstance(found, str):
        # A convolution without a layer has a shape that no view of the pass describes.
        if role.kind == "matrix":
            return found if view is None else Assignment("muon", view, why)
        return Assignment("adamw", Matrix(), why)
    before = f"{_text(found.algorithm, found.view)} {found.why}"
    is_muon = orthogonalizes(found.algorithm)
    if is_muon and role.kind in _ADAMW:
        return Assignment("adamw", Matrix(), why, otherwise=before)
    if is_muon and view is not None and _differs(found.view, role):
        return Assignment("muon", view, why, otherwise=before)
    # Tables, norms and routers by their type, and adapters, stay with AdamW.
    is_layer = shape[0] >= _FEWEST_FEATURES and all(
        isinstance(use.module, nn.Linear) and use.attribute == "weight" for use in uses
    )
    if not is_muon and view is not None and is_layer and found.why.startswith(_BY_NAME_OR_SIZE):
        return Assignment("muon", view, why, otherwise=before)
    return found._replace(doubt="")


def _differs(view: View, role: Role) -> bool:
    """Return whether the pass saw more matrices in a weight, other ones, or another orientation.

    One matrix in the pass proves nothing against several: a kernel that the pass cannot look into takes all features.
    """
    if not isinstance(view, Matrix | Split | Experts):
        return False
    if isinstance(view, Split) and not role.pieces:
        return view.transposed != role.transposed
    if isinstance(view, Split) and view.transposed == role.transposed:
        # Finer pieces of the same ones, such as the four gates in two halves, are no contradiction.
        return not _edges(view.sizes, view.groups) >= _edges(role.pieces, role.groups)
    return view != role.view


def _edges(sizes: Sequence[int], groups: int) -> set[int]:
    """Return the output features at which a piece ends."""
    edges, at = set(), 0
    for _ in range(groups):
        for size in sizes:
            at += size
            edges.add(at)
    return edges


def _text(kind: str, view: View | None) -> str:
    if kind not in ("muon", "matrix") or view is None:
        return kind
    parts = view.sizes if isinstance(view, Split) else ()
    layout = f" of {len(parts)} parts" if parts else ""
    return f"{kind}{layout}" + (", (in, out)" if getattr(view, "transposed", False) else "")
