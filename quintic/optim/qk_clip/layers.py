"""Finds the query and key parameters of one attention layer, and the role of each of their output features.

Only names, shapes and views are needed, so that the optimizer needs no model. Phases of `HeadSearch`:
    scope         the module that the layer's name or number means, and the projections below it
    kind          multi-latent (an up-projection from a latent makes keys and values), separate projections, or one
                  fused weight, whose view must be a `Split`
    rows          roles of output features, as `groups` repetitions of (role, number of features)
    biases        scaled along with their weights
Anything that is missing, ambiguous or does not divide evenly is an error that names it.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from quintic.optim.groups.names import name_variants, without_holders, without_wrappers
from quintic.optim.layout.views import Matrix, Split, View

__all__ = ["PROJECTIONS", "Features", "HeadSearch", "Role", "Scaled", "is_projection"]

Role = Literal["query", "key", "rotary", "none"]
"""Which factor a feature is scaled by: its query head's, its key head's, its head's rotary one, or none."""


def _spellings(short: str, long: str) -> frozenset[str]:
    forms = ("{}", "w{}", "w_{}", "c_{}", "to_{}", "{}_proj", "{}_lin", "{}_linear", "linear_{}")
    return frozenset(form.format(short) for form in forms) | {long, f"{long}_proj", f"{long}_layer"}


# Names of projections in lower case, by the features that they make; "up" and "down" are multi-latent attention's.
_QUERY = _spellings("q", "query")
_KEY = _spellings("k", "key")
_KEY_VALUE = _spellings("kv", "key_value")
_FUSED = _spellings("qkv", "query_key_value") | {"c_attn", "in_proj"}
_QUERY_UP = frozenset({"q_b_proj", "wq_b", "q_up_proj", "linear_q_up_proj"})
_LATENT_UP = frozenset({"kv_b_proj", "wkv_b", "kv_up_proj", "linear_kv_up_proj"})
_LATENT_DOWN = frozenset({"kv_a_proj_with_mqa", "kv_a_proj", "wkv_a", "kv_down_proj", "linear_kv_down_proj"})

PROJECTIONS = _QUERY | _KEY | _KEY_VALUE | _FUSED | _QUERY_UP | _LATENT_UP | _LATENT_DOWN
"""The names of projections that are understood."""

# A module that owns one of these is an attention module.
_MARKS_ATTENTION = _QUERY | _QUERY_UP | _FUSED

# Names that libraries give a normalisation between projection and logits.
_QK_NORM = re.compile(
    r"(q|k|qk|query|key)_?(layer_?|rms_?)?norms?|(layer_?|rms_?)?norm_?(q|k|qk|query|key)|ln_[qk]|[qk]_ln"
)


class Features(NamedTuple):
    """The output features of a parameter: `groups` times the same sequence of (role, number of features)."""

    groups: int
    segments: tuple[tuple[Role, int], ...]

    def count(self, role: Role) -> int:
        """Return the number of features that have a role."""
        return self.groups * sum(size for other, size in self.segments if other == role)


class Scaled(NamedTuple):
    """A parameter to scale: its name, the dimension of its output features, and their roles."""

    name: str
    dim: int
    rows: Features


def is_projection(name: str, names: Mapping[str, str]) -> bool:
    """Return whether a parameter may, by its name, be one that `HeadSearch` looks for; `names` as in `QKClip`."""
    return _Projection.of(name, name).means(names) in PROJECTIONS


class _Projection(NamedTuple):
    """A parameter's name, without wrappers' prefixes, split into module, projection and kind."""

    name: str
    # Path of the module that owns the projection.
    module: str
    projection: str
    is_bias: bool

    @property
    def path(self) -> str:
        return f"{self.module}.{self.projection}" if self.module else self.projection

    def means(self, names: Mapping[str, str]) -> str:
        return names.get(self.projection, self.projection.lower())

    @classmethod
    def of(cls, name: str, clean_name: str) -> "_Projection":
        path = clean_name.split(".")
        last = path.pop()
        projection, _, kind = last.rpartition("_")  # in_proj_weight, q_proj_weight
        if last in ("weight", "bias"):
            projection, kind = (path.pop() if path else ""), last
        elif kind not in ("weight", "bias") or not projection:
            projection, kind = last, "weight"  # a bare nn.Parameter
        return cls(name, ".".join(path), projection, kind == "bias")


@dataclass
class HeadSearch:
    """The search for one layer's query and key parameters; arguments and errors as `QKClip.resolve`."""

    layer: str | int
    shapes: Mapping[str, torch.Size]
    num_heads: int
    views: Mapping[str, View]
    parts: tuple[int, int] | None
    rope_dim: int | None
    layouts: Mapping[str, View]
    names: Mapping[str, str]

    def __post_init__(self) -> None:
        self.projections = [
            _Projection.of(name, clean) for name, clean in zip(self.shapes, without_wrappers(self.shapes), strict=True)
        ]
        self.scope = self._scope()
        self.below = [p for p in self.projections if _is_below(p.path, self.scope)]

    def heads(self) -> tuple[int, tuple[Scaled, ...]]:
        """Return the number of key heads and the parameters to scale."""
        latent_up = self._one(_LATENT_UP)
        query = (self._one(_QUERY_UP) if latent_up else None) or self._one(_QUERY)
        key = self._one(_KEY) or self._one(_KEY_VALUE)
        # Multi-latent attention, with compressed queries or without.
        if query and latent_up:
            self._refuse_norms(query, latent_size=self._features(query)[1])
            return self._latent(query, latent_up)
        # Separate projections; cross-attention may fuse keys with values.
        if query and key:
            self._refuse_norms(query)
            is_fused = key.means(self.names) in _KEY_VALUE
            key_rows = self._split_rows(key, ("key",)) if is_fused else self._rows_of_one(key, "key")
            return self._built((query, self._rows_of_one(query, "query")), (key, key_rows))
        # One weight for queries and keys.
        fused = self._one(_FUSED)
        if fused:
            self._refuse_norms(fused)
            return self._built((fused, self._split_rows(fused, ("query", "key"))))
        names = _listed(p.name for p in (query, key or latent_up) if p)
        raise self._error(
            f"a query and a key projection are needed below it, found {names}; they must be parameters of the "
            f"optimizer, and names other than q_proj, k_proj, query, key, wq, wk, to_q, to_k, qkv, ... are given as "
            f"quintic.QKClip(names={{'yours': 'q_proj', ...}})"
        )

    # -- kinds of attention

    def _latent(self, query: _Projection, latent_up: _Projection) -> tuple[int, tuple[Scaled, ...]]:
        """Return key heads and parameters of multi-latent attention.

        Per head, the query's features are [no position, rotary] and the up-projection's [key, value].
        """
        up_features, latent = self._features(latent_up)
        rope = self.rope_dim
        if rope is None:
            latent_down = self._one(_LATENT_DOWN)
            if latent_down is None:
                raise self._error(
                    f"{latent_up.name} makes keys from a latent, but no kv_a_proj_with_mqa tells how many rotary "
                    f"channels a head has; give quintic.QKClip(rope_dim=...)"
                )
            # The down-projection makes the latent and the one rotary key that all heads use.
            rope = self._features(latent_down)[0] - latent
        head_dim = self._per_head(query, self._features(query)[0])
        # Per head: queries and keys have `nope` features without position and `rope` rotary ones; `value` are the rest.
        nope = head_dim - rope
        value = self._per_head(latent_up, up_features) - nope
        if rope < 0 or nope < 1 or value < 0:
            raise self._error(
                f"{query.name} has {head_dim} features per head, {rope} of them rotary, and {latent_up.name} has "
                f"{value + nope} per head, which do not fit each other; check that there are {self.num_heads} query "
                f"heads, and give the rotary channels as quintic.QKClip(rope_dim=...)"
            )
        query_rows = Features(self.num_heads, (("query", nope), ("rotary", rope)))
        return self._with_biases(
            self.num_heads,
            (query, query_rows),
            (latent_up, Features(self.num_heads, (("key", nope), ("none", value)))),
        )

    def _built(self, *weights: tuple[_Projection, Features]) -> tuple[int, tuple[Scaled, ...]]:
        """Return key heads and parameters, after checking that heads and groups divide the features evenly.

        The first weight has the queries, the last one the keys; a fused weight is both.
        """
        (query, query_rows), (key, key_rows) = weights[0], weights[-1]
        num_features, key_features = query_rows.count("query"), key_rows.count("key")
        head_dim = self._per_head(query, num_features)
        # Key heads are as wide as query heads, so the number of key features tells how many there are.
        num_kv_heads, rest = divmod(key_features, head_dim)
        if rest or num_kv_heads < 1 or self.num_heads % num_kv_heads:
            raise self._error(
                f"{key.name} has {key_features} key features, but with {num_features} query features over "
                f"{self.num_heads} heads it must have a multiple of {head_dim} that divides {num_features}; correct "
                f"the number of maxima, or describe what {query.name} holds with quintic.QKClip(layouts=...)"
            )
        # Each group of a Split must hold whole heads.
        for projection, rows in weights:
            heads_of: dict[Role, int] = {"query": self.num_heads, "key": num_kv_heads}
            for role, heads in heads_of.items():
                if rows.count(role) and heads % rows.groups:
                    raise self._error(
                        f"{projection.name}: the {rows.groups} groups of its Split do not divide the {heads} {role} "
                        f"heads; correct its groups or sizes"
                    )
        return self._with_biases(num_kv_heads, *weights)

    def _with_biases(self, num_kv_heads: int, *weights: tuple[_Projection, Features]) -> tuple[int, tuple[Scaled, ...]]:
        """Return key heads and the weights with their biases: logits are products of W x + b, so both are scaled."""
        scaled = []
        for weight, rows in weights:
            scaled.append(Scaled(weight.name, self._dim(weight), rows))
            for other in self.below:
                if other.is_bias and other.path == weight.path:
                    scaled.append(Scaled(other.name, 0, rows))
        return num_kv_heads, (*scaled, *self._biases_of_torch(*weights))

    def _biases_of_torch(self, *weights: tuple[_Projection, Features]) -> Iterator[Scaled]:
        """Yield biases of `nn.MultiheadAttention` that are not named after one of the weights."""
        (query, query_rows), (key, key_rows) = weights[0], weights[-1]
        num_features, key_features = query_rows.count("query"), key_rows.count("key")
        for other in self.below:
            size = self.shapes[other.name][-1]
            if other.module != key.module:
                continue
            if other.projection == "bias_k":  # (1, 1, features): one more key, with add_bias_kv=True
                yield Scaled(other.name, 2, Features(1, (("key", size),)))
            elif other.is_bias and other.projection == "in_proj" and query.projection == "q_proj":
                # With kdim or vdim the weights are separate, but the bias is still one, (q + k + v features,).
                values = size - num_features - key_features
                yield Scaled(
                    other.name, 0, Features(1, (("query", num_features), ("key", key_features), ("none", values)))
                )

    # -- names

    def _scope(self) -> str:
        """Return the path of the module that the layer's name or number means; sets `projections` to match it."""
        # Modules with query projections of their own.
        attentions = sorted({p.module for p in self.projections if p.means(self.names) in _MARKS_ATTENTION})
        if isinstance(self.layer, str):
            layer = self.layer.strip(".")
            for scope in name_variants(layer):
                if any(_is_below(p.path, scope) for p in self.projections):
                    return scope
            # Compare again without attributes called `module`, DDP's or the model's own.
            scope = without_holders(layer)
            bare = [p._replace(module=without_holders(p.module)) for p in self.projections]
            if not any(_is_below(p.path, scope) for p in bare):
                near = difflib.get_close_matches(scope, attentions, n=3, cutoff=0)
                raise self._error(f"no parameter of the optimizer is below this name; close to it are {_listed(near)}")
            self.projections = bare
            return scope
        if isinstance(self.layer, bool) or not isinstance(self.layer, int):
            raise self._error("a layer is the name of its attention module, or its number")
        # A number means the only attention module that has it as a component of its path.
        numbered = [module for module in attentions if str(self.layer) in module.split(".")]
        if len(numbered) != 1:
            listed = _listed(numbered or attentions)
            raise self._error(f"{len(numbered)} attention modules have this number; give the name instead: {listed}")
        return numbered[0]

    def _one(self, names: frozenset[str]) -> _Projection | None:
        """Return the projection with one of these names, preferring the layer's own to those of modules inside it.

        None if there is no such projection; an error if there are several.
        """
        matches = [p for p in self.below if not p.is_bias and p.means(self.names) in names]
        matches = [p for p in matches if p.module == self.scope] or matches
        if len(matches) > 1:
            raise self._error(f"it has {_listed(p.name for p in matches)}; give the name of one attention module")
        return matches[0] if matches else None

    def _refuse_norms(self, query: _Projection, latent_size: int | None = None) -> None:
        """Raise an error if queries or keys are normalised after their projections, which would undo any scaling."""
        # A layer may be named by one of its projections: then the norms stand beside it, in the query's module.
        scope = self.scope if _is_below(query.module, self.scope) else query.module
        others = {p.module for p in self.projections if p.means(self.names) in PROJECTIONS} - {query.module}
        for norm in self.projections:
            # The norms of another module with projections (a sparse-attention indexer, a neighbour) do not matter.
            if not _is_below(norm.path, scope) or norm.module in others:
                continue
            # Multi-latent attention may call the norm of its compressed queries q_norm; it comes before the weights.
            if self.shapes[norm.name].numel() == latent_size:
                continue
            if any(_QK_NORM.fullmatch(component.lower()) for component in norm.path.split(".")):
                raise self._error(
                    f"{norm.name} normalises queries or keys after {query.name}, which undoes any scaling of the "
                    f"weights: QK-clip has no effect here and is not needed; leave this layer out of qk_logits"
                )

    # -- layouts

    def _explicit(self, projection: _Projection) -> View | None:
        layouts = self.layouts.items()
        return next((layout for pattern, layout in layouts if fnmatch.fnmatchcase(projection.name, pattern)), None)

    def _layout(self, projection: _Projection) -> View:
        return self._explicit(projection) or self.views.get(projection.name) or Matrix()

    def _dim(self, projection: _Projection) -> int:
        return 1 if getattr(self._layout(projection), "transposed", False) else 0

    def _features(self, projection: _Projection) -> tuple[int, int]:
        """Return the numbers of output and input features of a 2-D weight."""
        shape = self.shapes[projection.name]
        if len(shape) != 2:
            raise self._error(f"{projection.name} has shape {tuple(shape)}; QK-clip needs the projection's 2-D weight")
        dim = self._dim(projection)
        return shape[dim], shape[1 - dim]

    def _rows_of_one(self, projection: _Projection, role: Role) -> Features:
        # Muon's view counts only if it names its parts: an unnamed Split of a single projection may be one into heads.
        view = self.views.get(projection.name)
        is_named = isinstance(view, Split) and view.names is not None and role in view.names
        if isinstance(self._explicit(projection) or (view if is_named else None), Split):
            return self._split_rows(projection, (role,))
        return Features(1, ((role, self._features(projection)[0]),))

    def _split_rows(self, projection: _Projection, wanted: tuple[Role, ...]) -> Features:
        """Return the rows of a weight stored as a `Split`: wanted roles at their parts, "none" at the others."""
        layout, features = self._layout(projection), self._features(projection)[0]
        if not isinstance(layout, Split):
            raise self._error(
                f"{projection.name} holds several projections, and its view {layout} does not say where; use "
                f"quintic.Rule({projection.name!r}, 'muon', quintic.Split(sizes, groups=...)), or, to leave Muon's "
                f"view alone, quintic.QKClip(layouts={{{projection.name!r}: quintic.Split(sizes, groups=...)}})"
            )
        if sum(layout.sizes) * layout.groups != features:
            raise self._error(f"{projection.name}: {layout} does not add up to its {features} output features")
        places = self._places(projection, layout, wanted)
        # Gates and values are neither scaled nor counted.
        roles: list[Role] = ["none"] * len(layout.sizes)
        for role, place in zip(wanted, places, strict=True):
            roles[place] = role
        return Features(layout.groups, tuple(zip(roles, layout.sizes, strict=True)))

    def _places(self, projection: _Projection, layout: Split, wanted: tuple[Role, ...]) -> tuple[int, ...]:
        """Return the numbers of the parts of a `Split` that have the wanted roles, in the order of `wanted`.

        Taken from the names of the `Split`, else from `QKClip.parts`, else the first parts if that is unambiguous.
        """
        is_fused = len(wanted) == 2
        given = self.parts if is_fused else None
        if layout.names is not None:
            if not set(wanted) <= set(layout.names):
                raise self._error(
                    f"{projection.name} holds {', '.join(layout.names)}, and QK-clip looks for {' and '.join(wanted)} "
                    f"there; give the name of another attention module, or describe the weight with "
                    f"quintic.QKClip(layouts={{{projection.name!r}: quintic.Split(sizes, names=...)}})"
                )
            places = tuple(layout.names.index(role) for role in wanted)
            if given is not None and given != places:
                raise self._error(
                    f"{projection.name} holds {', '.join(layout.names)} in this order, and "
                    f"quintic.QKClip(parts={given!r}) means others; leave parts out, or describe the weight with "
                    f"quintic.QKClip(layouts=...)"
                )
            return places
        num_parts = len(layout.sizes)
        places = given or tuple(range(len(wanted)))
        # Only three parts, or fewer for one projection, are unambiguous: four may be query, gate, key, value or a Split
        # into heads, and two may be the key and value of cross-attention.
        unsaid = given is None and self._explicit(projection) is None
        if num_parts <= max(places) or (unsaid and (num_parts > 3 or (is_fused and num_parts < 3))):
            raise self._error(
                f"{projection.name}: {layout} has {num_parts} parts; say with quintic.QKClip(parts=(i, j)) which one "
                f"is the queries and which one the keys, or describe the weight with quintic.QKClip(layouts=...)"
            )
        return places

    def _per_head(self, projection: _Projection, features: int) -> int:
        if self.num_heads < 1 or features < 1 or features % self.num_heads:
            raise self._error(
                f"the {features} features of {projection.name} do not divide into {self.num_heads} heads; qk_logits "
                f"needs one maximum per query head"
            )
        return features // self.num_heads

    def _error(self, message: str) -> ValueError:
        return ValueError(f"qk_logits[{self.layer!r}]: {message}")


def _is_below(path: str, scope: str) -> bool:
    return not scope or path == scope or path.startswith(scope + ".")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
