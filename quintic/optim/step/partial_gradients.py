"""Gradients that are sums still to be made over ranks: `Partial` placements, as tensor parallelism leaves some.

To add them up is a collective, which a rank without a gradient must join with zeros. So it has to know that others have
such a gradient, and all ranks have to know the same. They tell each other before the first step, with what they
compare anyway, and remember it: from then on all ranks of the mesh add up these parameters' gradients in every step,
whoever has one. Without such gradients nothing is sent, and no rank waits.

A gradient that is a sum for the first time later is an error on the ranks that have it, before they send anything:
others cannot know of it, and to ask them would make every step wait. One that was a sum, and now is none on this rank,
may have been added up by the user: then it is so on all ranks. This rank joins the others' sum with zeros all the same,
so that no rank waits for it, and says so with the counts of gradients (`consensus.py`).
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
    """How a gradient that is a sum still to be made lies on the mesh of its parameter."""

    placements: "tuple[Placement, ...]"
    """At least one is `Partial`."""
    dtype: torch.dtype

    def has_copies(self, param: Any) -> bool:
        """Return whether ranks have copies of an addend, which differ if one of them counts as zeros."""
        sizes = param.device_mesh.shape
        return any(
            placement.is_replicate() and size > 1 for placement, size in zip(self.placements, sizes, strict=True)
        )


def partial_spec(param: Any) -> PartialSpec | None:
    """Return the cut of a `DTensor`'s gradient; None where it is no sum still to be made, or not there."""
    gradient = param.grad
    placements = getattr(gradient, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return None
    return PartialSpec(tuple(placements), gradient.dtype)


def zero_addend(param: Any, partial: PartialSpec) -> "DTensor":
    """Return a gradient of zeros for a `DTensor`, cut so: what a rank adds that has none. Nothing is communicated."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    pieces = [Replicate() if placement.is_partial() else placement for placement in partial.placements]
    shape = size_of(mesh_layout(param.shape, mesh.mesh, pieces).box_of(this_rank()))
    local = torch.zeros(shape, dtype=partial.dtype, device=param.device)
    return DTensor.from_local(
        local, mesh, partial.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


class PartialGradients:
    """Which of the `DTensor`s that ranks share have such gradients: the same on all ranks of each parameter's mesh."""

    def __init__(self) -> None:
        self._names: dict[Tensor, str] = {}
        self._known: dict[Tensor, PartialSpec] = {}
        self._stand_ins: dict[Tensor, Tensor] = {}
        """Sums in the place of gradients that this rank does not have."""
        self._reduced: dict[Tensor, bool] = {}
        """Parameters whose gradients `replace` has added up since the last step -> whether this rank's was whole."""

    def is_stand_in(self, param: Tensor) -> bool:
        """Return whether `param.grad` was put there by `replace`, where this rank had none."""
        return param.grad is not None and self._stand_ins.get(param) is param.grad

    def may_lack_addends(self, param: Tensor) -> bool:
        """Return whether missing addends may count as zeros; false until every rank knows that there is a sum."""
        return param in self._known and not self._known[param].has_copies(param)

    def is_partial(self, param: Tensor) -> bool:
        """Return whether all ranks know that the gradient of a parameter is a sum."""
        return param in self._known

    def is_reduced(self, param: Any) -> bool:
        """Return whether this rank has no addend of a sum, but a gradient that is none."""
        return self._reduced.get(param, self._has_param_placements(param))

    def _has_param_placements(self, param: Any) -> bool:
        return bool(getattr(param.grad, "placements", None) == param.placements)

    def partial_mismatch_message(self, param: Tensor) -> str:
        """Return the message that some ranks have a sum and others a gradient that is none."""
        return (
            f"{self._names[param]}: its gradient is a sum still to be made over ranks (Partial) on some ranks, and "
            f"none on others, which would not join it; redistribute it to the parameter's placements before the step, "
            f"on all ranks that have it as a sum"
        )

    def exchange(self, names: Mapping[Any, str], group: ProcessGroup) -> str | None:
        """Tell all ranks what sums there are among the gradients of `DTensor`s with names, and remember theirs.

        All ranks of the group must call it; waits.

        Returns:
            None, or on all ranks the same message: ranks have different sums of one parameter, or only some of those
            that have a gradient have it as a sum, which the others would not join.
        """
        # Of every gradient that there is: how it is cut if it is a sum, else None.
        own = {number: partial_spec(param) for number, param in enumerate(names) if param.grad is not None}
        of_ranks = all_gather_values(own, group)
        self._names |= names
        for number, param in enumerate(names):
            specs = dict.fromkeys(theirs[number] for theirs in of_ranks if number in theirs)
            sums = [partial for partial in specs if partial is not None]
            if not sums:
                continue
            if len(sums) > 1:
                return self._disagreement(param, "on one rank it is", sums[0], "on another one", sums[1])
            if None in specs:
                return self.partial_mismatch_message(param)
            self._known[param] = sums[0]
        return None

    def check(self, params: Iterable[Any]) -> None:
        """Check that the gradients of `DTensor`s are no other sums than all ranks know of; nothing is communicated.

        Raises:
            RuntimeError: one is; on the ranks that have such a gradient, and on no others.
        """
        for param in params:
            gradient = param.grad
            # Hundreds of gradients in every step, nearly all cut as their parameters, and most by the very same object.
            spec = getattr(gradient, "_spec", None)
            if gradient is None or spec is param._spec or (spec and spec.placements == param._spec.placements):
                continue
            partial, known = partial_spec(param), self._known.get(param)
            if partial is None or partial == known:
                continue
            if known is not None:
                raise RuntimeError(self._disagreement(param, "in the steps before it was", known, "now it is", partial))
            raise RuntimeError(
                f"{self._names[param]}: its gradient is a sum still to be made over ranks (Partial), and was none on "
                f"any rank in the first step, before which ranks tell each other; make it Partial in the first step "
                f"on some rank, or redistribute it to the parameter's placements before the step, on all ranks that "
                f"have it"
            )

    def replace(self, params: Iterable[Tensor]) -> None:
        """Put known sums in the place of gradients, or of none. All ranks of the meshes must call it."""
        for param in params:
            if param not in self._known:
                continue
            is_missing, is_reduced = param.grad is None, self.is_reduced(param)
            total = self._sum(param)
            self._reduced.setdefault(param, is_reduced)
            if total is not None:
                param.grad = total
                if is_missing:
                    self._stand_ins[param] = total

    @contextmanager
    def reduced(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Put known sums in the place of gradients meanwhile. All ranks of the meshes must call it."""
        kept: list[tuple[Tensor, Tensor | None]] = []
        try:
            if self._known:
                for param in params:
                    total = self._sum(param) if param in self._known else None
                    if total is not None:
                        kept.append((param, param.grad))
                        param.grad = total
            yield
        finally:
            for param, gradient in kept:
                param.grad = gradient
            self._stand_ins.clear()
            self._reduced.clear()

    def _sum(self, param: Any) -> Tensor | None:
        """Return the sum of all ranks' addends; None if this rank's gradient is none of them."""
        has_param_placements = self._has_param_placements(param)
        if has_param_placements and param in self._reduced:  # on all ranks
            return None
        addend = zero_addend(param, self._known[param]) if has_param_placements or param.grad is None else param.grad
        total: Tensor = placed_as(self._names[param], param, addend)
        return None if has_param_placements else total

    def _disagreement(self, param: Tensor, first: str, known: PartialSpec, second: str, partial: PartialSpec) -> str:
        return (
            f"{self._names[param]}: its gradient is a sum still to be made over ranks, and not always the same one: "
            f"{first} {_text(known)}, {second} {_text(partial)}; redistribute it to the parameter's placements before "
            f"the step, on all ranks"
        )


def _text(partial: PartialSpec) -> str:
    return f"({', '.join(map(repr, partial.placements))}) of {partial.dtype}"
