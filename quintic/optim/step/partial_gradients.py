"""Gradients that are sums still to be made over ranks (`Partial`), as tensor parallelism leaves some.

Summing them is a collective of all ranks of the parameter's mesh: a rank without a gradient must join with zeros, so it
has to know that other ranks have a Partial gradient.

    first step    ranks tell each other which gradients are Partial (`exchange`), along with the plans that they compare
    each step     all ranks of the mesh sum the gradients that are known to be Partial, whether they have one or not

Nothing is sent, and no rank waits, if no gradient is Partial. A gradient that is Partial for the first time in a later
step is an error on the ranks that have it, before they send anything: asking the other ranks would make every step
wait. If a gradient is no longer Partial on this rank, the user may have summed it, which must then hold for all ranks.
This rank joins the sum with zeros, so that no rank waits for it, and reports it with the counts of gradients
(`consensus.py`), which make a mixture of both an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms.collectives import ProcessGroup, all_gather_values, this_rank
from quintic.optim.layout.layouts import mesh_layout, placed_as, size_of

if TYPE_CHECKING:  # importing it takes a second; avoid it when DTensor is unused
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["PartialGradients", "PartialSpec", "partial_spec", "zero_addend"]


class PartialSpec(NamedTuple):
    """Placements and dtype of a Partial gradient: equal on all ranks of the mesh."""

    placements: "tuple[Placement, ...]"
    """At least one is `Partial`."""
    dtype: torch.dtype

    def has_copies(self, param: Any) -> bool:
        """Return whether several ranks hold the same addend, so that a missing one cannot count as zeros.

        With placements (Replicate, Partial) the ranks along the first dimension have equal addends. If one of them
        lacked it and joined with zeros, they would get different sums.
        """
        sizes = param.device_mesh.shape
        return any(
            placement.is_replicate() and size > 1 for placement, size in zip(self.placements, sizes, strict=True)
        )


def partial_spec(param: Any) -> PartialSpec | None:
    """Return the placements and dtype of a `DTensor`'s gradient if it is Partial; None if not, or if it is None."""
    gradient = param.grad
    placements = getattr(gradient, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return None
    return PartialSpec(tuple(placements), gradient.dtype)


def zero_addend(param: Any, partial: PartialSpec) -> "DTensor":
    """Return a gradient of zeros with these placements, for a rank that has none to add. Nothing is communicated."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    # An addend has the shape of a replica: Partial says how values combine, and divides no dimension.
    pieces = [Replicate() if placement.is_partial() else placement for placement in partial.placements]
    shape = size_of(mesh_layout(param.shape, mesh.mesh, pieces).box_of(this_rank()))
    # run_check=False: the metadata are right, and comparing them would be a collective.
    local = torch.zeros(shape, dtype=partial.dtype, device=param.device)
    return DTensor.from_local(
        local, mesh, partial.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


class PartialGradients:
    """The shared `DTensor`s whose gradients are Partial, the same on all ranks of a parameter's mesh."""

    def __init__(self) -> None:
        self._names: dict[Tensor, str] = {}
        self._known: dict[Tensor, PartialSpec] = {}
        """Parameters whose gradients all ranks know to be Partial."""
        self._stand_ins: dict[Tensor, Tensor] = {}
        """Parameters without a gradient on this rank -> the sum that `replace` put in `p.grad`."""
        self._reduced: dict[Tensor, bool] = {}
        """Parameters whose gradients `replace` has summed since the last step -> `is_reduced` before that."""
        self._addends: list[tuple[Tensor, Tensor | None]] = []
        """Parameters whose gradients are sums within a step, with the gradients that they have again after it."""

    def is_stand_in(self, param: Tensor) -> bool:
        """Return whether `param.grad` is a sum that `replace` put there because this rank had no gradient."""
        return param.grad is not None and self._stand_ins.get(param) is param.grad

    def may_lack_addends(self, param: Tensor) -> bool:
        """Return whether a missing addend may count as zeros; false until ranks know that the gradient is Partial."""
        return param in self._known and not self._known[param].has_copies(param)

    def is_partial(self, param: Tensor) -> bool:
        """Return whether all ranks know that the gradient of a parameter is Partial."""
        return param in self._known

    def is_reduced(self, param: Any) -> bool:
        """Return whether this rank's gradient has the parameter's placements already, in place of an addend."""
        # A sum that `replace` has put there has them, too: then the gradient that it replaced decides.
        return self._reduced.get(param, self._has_param_placements(param))

    def _has_param_placements(self, param: Any) -> bool:
        return bool(getattr(param.grad, "placements", None) == param.placements)

    def partial_mismatch_message(self, param: Tensor) -> str:
        """Return the error message for a gradient that is Partial on some ranks and not on others."""
        return (
            f"{self._names[param]}: its gradient is Partial (a sum still to be made over ranks) on some ranks, and not "
            f"on others, which would not join the sum; redistribute it to the parameter's placements before the step, "
            f"on all ranks where it is Partial"
        )

    def exchange(self, names: Mapping[Any, str], group: ProcessGroup) -> str | None:
        """Exchange with all ranks of the group which gradients are Partial, and remember them; waits.

        All of these ranks must call it, with the same parameters in the same order.

        Args:
            names: `DTensor`s that the ranks share, with their names.
            group: the process group of these ranks.

        Returns:
            None, or an error message, the same on all ranks: the gradient of a parameter has different placements on
            two ranks, or is Partial on some of the ranks that have one, and not on others.
        """
        # Position of each parameter with a gradient -> placements and dtype if it is Partial, else None.
        own = {number: partial_spec(param) for number, param in enumerate(names) if param.grad is not None}
        of_ranks = all_gather_values(own, group)
        self._names |= names
        for number, param in enumerate(names):
            # The distinct answers of the ranks that have a gradient.
            specs = dict.fromkeys(theirs[number] for theirs in of_ranks if number in theirs)
            sums = [partial for partial in specs if partial is not None]
            if not sums:
                continue
            # Different placements would be different collectives, which wait for each other forever.
            if len(sums) > 1:
                return self._disagreement(param, "on one rank it is", sums[0], "on another one", sums[1])
            if None in specs:
                return self.partial_mismatch_message(param)
            self._known[param] = sums[0]
        return None

    def check(self, params: Iterable[Any]) -> None:
        """Check that no gradient is Partial in a way that the other ranks do not know; nothing is communicated.

        Raises:
            RuntimeError: one is. Only the ranks that have such a gradient raise.
        """
        for param in params:
            gradient = param.grad
            # There are hundreds of gradients in every step, nearly all with the placements of their parameters, and
            # most with the very same object: comparing identities first is fast.
            spec = getattr(gradient, "_spec", None)
            if gradient is None or spec is param._spec or (spec and spec.placements == param._spec.placements):
                continue
            partial, known = partial_spec(param), self._known.get(param)
            # Gradients with other placements that are not Partial are redistributed in the step.
            if partial is None or partial == known:
                continue
            if known is not None:
                raise RuntimeError(self._disagreement(param, "in the steps before it was", known, "now it is", partial))
            raise RuntimeError(
                f"{self._names[param]}: its gradient is Partial (a sum still to be made over ranks), and was not on "
                f"any rank in the first step, before which ranks tell each other; make it Partial in the first step "
                f"on some rank, or redistribute it to the parameter's placements before the step, on all ranks that "
                f"have it"
            )

    def replace(self, params: Iterable[Tensor]) -> None:
        """Replace Partial gradients by their sums until the step is over, also where this rank has no gradient.

        All ranks of the parameters' meshes must call it.
        """
        for param in params:
            if param not in self._known:
                continue
            # Asked before the sum takes the gradient's place, and remembered for the counts of the step.
            is_missing, is_reduced = param.grad is None, self.is_reduced(param)
            total = self._sum(param)
            # Clipping twice before a step: the first call decides.
            self._reduced.setdefault(param, is_reduced)
            if total is not None:
                param.grad = total
                if is_missing:
                    self._stand_ins[param] = total

    @contextmanager
    def reduced(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Replace Partial gradients by their sums within the context. All ranks of the meshes must call it."""
        try:
            for param in params if self._known else ():
                if param in self._known:
                    self._use_sum(param)
            yield
        finally:
            # `p.grad` keeps the user's addend: the next backward pass adds to it.
            for param, gradient in self._addends:
                param.grad = gradient
            self._addends = []
            self._stand_ins.clear()
            self._reduced.clear()

    def forget_replaced(self) -> None:
        """Drop all references to gradients, also to the ones that `reduced` would put back."""
        self._addends = []
        self._stand_ins.clear()

    def _use_sum(self, param: Tensor) -> None:
        """Put the sum of all ranks' addends in `p.grad`, and keep the addend."""
        total = self._sum(param)
        if total is not None:
            self._addends.append((param, param.grad))
            param.grad = total

    def _sum(self, param: Any) -> Tensor | None:
        """Return the sum of all ranks' addends; None if this rank keeps its gradient, which is not Partial."""
        has_param_placements = self._has_param_placements(param)
        if has_param_placements and param in self._reduced:
            # `replace` has summed it on all ranks since the last step: no rank sends anything.
            return None
        # A rank without an addend joins with zeros, because the collective needs all ranks.
        addend = zero_addend(param, self._known[param]) if has_param_placements or param.grad is None else param.grad
        total: Tensor = placed_as(self._names[param], param, addend)
        return None if has_param_placements else total

    def _disagreement(self, param: Tensor, first: str, known: PartialSpec, second: str, partial: PartialSpec) -> str:
        return (
            f"{self._names[param]}: its gradient is Partial (a sum still to be made over ranks) in different ways: "
            f"{first} {_text(known)}, {second} {_text(partial)}; redistribute it to the parameter's placements before "
            f"the step, on all ranks"
        )


def _text(partial: PartialSpec) -> str:
    return f"({', '.join(map(repr, partial.placements))}) of {partial.dtype}"
