"""`explain`: the algorithm, view and cost of every parameter with the reason, as data and as a table.

The answers come from the code that does the work: the assignments of `assign.py`, and a real `Muon` on twins of the
parameters on the meta device. So `explain` refuses every option or view that `Muon` would refuse, and needs no memory
for models of any size.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quintic.grouping.assign import Rule, assign
from quintic.grouping.classify import Convolutions
from quintic.grouping.doubts import NOTES
from quintic.grouping.explain_text import Cells, column_lines, table_lines
from quintic.grouping.forward.roles import Roles
from quintic.grouping.param_groups import grouped, roles_of
from quintic.optim.groups.names import mask_layer_indices, model_parameters
from quintic.optim.layout.views import View
from quintic.optim.muon import Muon
from quintic.optim.rules.table import orthogonalizes
from quintic.tables import bytes_text, output_width

__all__ = ["Explanation", "Row", "Total", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One parameter: its algorithm, view, options and state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    algorithm: str
    """`"muon"`, `"adamw"`, or `"frozen"` for `requires_grad=False`."""
    optimizer: str
    """The name of its rule: `"Muon"`, `"NorMuon"` (`normalize="neuron"`), `"AdaMuon"` (`"element"`), `"AdamW"` or
    `"frozen"`."""
    view: View | None = None
    """The matrices that it holds; None unless the algorithm is Muon."""
    matrices: tuple[tuple[int, int, int], ...] = ()
    """(count, m outputs, n inputs) for each kind of matrix."""
    why: str
    otherwise: str = ""
    """What types and names say where the forward pass decided against them."""
    lr: float = 0.0
    """The learning rate it is stepped with, before `adjust_lr`; 0 if frozen."""
    lr_scale: tuple[float, ...] = ()
    """The factor of `adjust_lr` on `lr` for each kind of matrix; empty unless the algorithm is Muon."""
    weight_decay: float = 0.0
    """The `weight_decay` of its group, per unit of learning rate; 0 if frozen."""
    state_bytes: int = 0
    """Bytes of the optimizer state of the whole parameter, before any sharding."""

    @property
    def reason(self) -> str:
        """Return the reason, and the decision that it overrules."""
        return f"{self.why}; types and names: {self.otherwise}" if self.otherwise else self.why

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return math.prod(self.shape)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the parameter itself."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sums over the rows of one algorithm, or over all."""

    algorithm: str
    tensors: int
    parameters: int
    matrices: int
    weight_bytes: int
    state_bytes: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `explain`; `print` it, or read `rows` and `totals`."""

    model: str
    """Class name of the model."""
    rows: tuple[Row, ...]
    """One per parameter, in the model's order."""

    @property
    def totals(self) -> tuple[Total, ...]:
        """Return the sums of each algorithm in use, and of all rows as `"all"`."""
        algorithms = [name for name in ("muon", "adamw", "frozen") if any(row.algorithm == name for row in self.rows)]
        return tuple(_total(name, self.rows) for name in (*algorithms, "all"))

    def to_table(self, *, fold: bool = True, width: int | None = None) -> str:
        """Return the rows and totals as aligned text.

        Args:
            fold: show parameters that differ only in the numbers of their names as one line, `layers.*.weight`.
            width: columns of text; None for the terminal's width, or 160 where the output is no terminal. Names
                that are too long are shortened in the middle, views and reasons continue on the next line. If a
                parameter does not fit one line, its treatment stands on a second one.
        """
        if width is None:
            width = output_width()
        # Rows that look alike except for layer numbers become one line, at the place of the first.
        folded: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            pattern = mask_layer_indices(row.name) if fold else row.name
            why = mask_layer_indices(row.reason) if fold else row.reason
            rates = (row.lr, row.lr_scale, row.weight_decay)
            key = (pattern, row.shape, row.dtype, row.optimizer, row.view, why, rates, row.state_bytes)
            folded.setdefault(key, []).append(row)
        cells = [_cells(rows) for rows in folded.values()]
        return "\n".join([*table_lines(cells, width), "", *self._totals_lines(width), *self._notes(width)])

    def __str__(self) -> str:
        """Return the table with repeated layers folded."""
        return self.to_table()

    __repr__ = __str__

    def _totals_lines(self, width: int) -> list[str]:
        titles: dict[str, set[str]] = {}
        for row in self.rows:
            titles.setdefault(row.algorithm, set()).add(row.optimizer)
        names = {algorithm: ", ".join(sorted(found)) for algorithm, found in titles.items()}
        lines = [(self.model, "tensors", "parameters", "matrices", "weights", "state")]
        for total in self.totals:
            counts = (f"{total.tensors:,}", f"{total.parameters:,}", f"{total.matrices:,}")
            sizes = (bytes_text(total.weight_bytes), bytes_text(total.state_bytes))
            lines.append((names.get(total.algorithm, total.algorithm), *counts, *sizes))
        return column_lines(lines, width)

    def _notes(self, width: int) -> list[str]:
        texts = []
        for doubt, text in NOTES.items():
            count = sum(doubt in row.why for row in self.rows)
            if count:
                texts.append(f"{count} parameter{'' if count == 1 else 's'} may be {text}")
        if not texts:
            return []
        remedy = "example= decides it by a forward pass, quintic.Rule by name"
        return ["", *textwrap.wrap(f"{'; '.join(texts)}: {remedy}", width)]


def explain(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    rules: Iterable[Rule] = (),
    convolutions: Convolutions = "adamw",
    example: Any = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    roles: Roles | None = None,
    **options: Any,
) -> Explanation:
    """Return the treatment of each parameter of `model` and the reason for it, without making an optimizer.

    `print(quintic.explain(model))` shows what `quintic.Muon(quintic.param_groups(model))` would do, also for a model
    on the meta device, in a table that fits the terminal. Shapes and bytes belong to whole parameters, before any
    sharding.

    Args:
        model: any module.
        muon: as for `param_groups`.
        adamw: as for `param_groups`.
        rules: as for `param_groups`.
        convolutions: as for `param_groups`.
        example: as for `param_groups`; where the forward pass decides against names, the reason has both.
        call: as for `param_groups`.
        roles: as for `param_groups`.
        **options: keyword arguments of `quintic.Muon`, e.g. `lr=0.02` or `normalize="neuron"`.

    Raises:
        ValueError, TypeError: as `param_groups` and `Muon` for this model and these options, in particular for a
            matrix that no rule covers; the message names the parameter.
    """
    assignments = assign(model, rules, convolutions, roles=roles_of(model, example, call, roles))
    # Twins on the meta device have the shapes, strides and dtypes of the parameters, and no memory.
    twins = {
        p: nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")) for p in assignments
    }
    groups = grouped(assignments, muon=muon, adamw=adamw)
    # A real optimizer of the twins checks options and views, and makes its state, on the meta device.
    for dictionary in groups:
        dictionary["params"] = [twins[param] for param in dictionary["params"]]
    optimizer = Muon(groups, **options)
    group_of = {twin: group for group in optimizer._plans.current_groups() for twin in group.params}
    rows, states = [], optimizer.state
    # One row per parameter, in the model's order.
    for name, param in model_parameters(model):
        if param not in assignments:
            why, shape = "requires_grad=False", tuple(param.shape)
            rows.append(Row(name=name, shape=shape, dtype=param.dtype, algorithm="frozen", optimizer="frozen", why=why))
            continue
        one, twin = assignments[param], twins[param]
        group = group_of[twin]
        is_muon = orthogonalizes(one.algorithm)
        matrices = one.view.shapes(twin.shape) if is_muon else ()
        rows.append(
            Row(
                name=name,
                shape=tuple(twin.shape),
                dtype=twin.dtype,
                algorithm=one.algorithm,
                optimizer=group.rule.title,
                view=one.view if is_muon else None,
                matrices=matrices,
                why=one.why,
                otherwise=one.otherwise,
                lr=group.effective_lr,
                lr_scale=tuple(group.rule.lr_factor(group.adjust_lr, m, n) for _, m, n in matrices),
                weight_decay=float(group.weight_decay),
                state_bytes=sum(value.nbytes for value in states[twin].values()),
            )
        )
    return Explanation(type(model).__name__, tuple(rows))


def _total(algorithm: str, rows: Sequence[Row]) -> Total:
    counted = [row for row in rows if algorithm in ("all", row.algorithm)]
    return Total(
        algorithm=algorithm,
        tensors=len(counted),
        parameters=sum(row.numel for row in counted),
        matrices=sum(count for row in counted for count, _, _ in row.matrices),
        weight_bytes=sum(row.weight_bytes for row in counted),
        state_bytes=sum(row.state_bytes for row in counted),
    )


def _cells(rows: Sequence[Row]) -> Cells:
    """Return the cells of one line, for parameters that differ only in the numbers of their names."""
    row = rows[0]
    folded = len(rows) > 1
    rate = ""
    if row.algorithm != "frozen":
        scales = ", ".join(f"{scale:.3g}" for scale in dict.fromkeys(row.lr_scale))
        rate = f"{row.lr:g}" + (f" x {scales}" if scales else "")
    return Cells(
        name=mask_layer_indices(row.name) if folded else row.name,
        times=f"x{len(rows)}" if folded else "",
        shape="x".join(map(str, row.shape)) or "-",
        optimizer=row.optimizer,
        view="" if row.view is None else _view_text(row.view),
        rate=rate,
        decay="" if row.algorithm == "frozen" else f"{row.weight_decay:g}",
        state=bytes_text(sum(r.state_bytes for r in rows)),
        why=mask_layer_indices(row.reason) if folded else row.reason,
    )


def _view_text(view: View) -> str:
    """Return a view's constructor call without default arguments, as in `Split((64, 64, 64), groups=12)`."""
    fields: Mapping[str, dataclasses.Field[Any]] = getattr(view, "__dataclass_fields__", {})
    if not fields:  # a user's view that is no dataclass
        return str(view)
    # Fields without a default are positional; `repr=False` marks fields that do not matter to people.
    parts = []
    for field in fields.values():
        value = getattr(view, field.name)
        if field.default is dataclasses.MISSING:
            parts.append(repr(value))
        elif field.repr and value != field.default:
            parts.append(f"{field.name}={value!r}")
    return f"{type(view).__name__}({', '.join(parts)})"
