"""Gradients that are sums still to be made over ranks: `Partial` placements, as tensor parallelism leaves some.

To add them up is a collective, which a rank without a gradient must join with zeros. So it has to know that others have
such a gradient, and all ranks have to know the same. They tell each other before the first step, with what they
compare anyway, and remember it: from then on all ranks of the mesh add up these parameters' gradients in every step,
whoever has one. Without such gradients nothing is sent, and nobody waits.

A gradient may be a sum for the first time later, when other ranks cannot know it: that of an expert that got no token
before. The ranks that have it say so in the count of gradients (`agreements.py`), and wait for the result. If all ranks
have it, they add it up; if not, it counts as missing in this step, and those that lack it read the count before
the next one, where all tell each other about it as before the first.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quintic.optim.comms import ProcessGroup, all_gather_values, this_rank
from quintic.optim.layouts import mesh_layout, size_of

if TYPE_CHECKING:  # importing it takes a second, which who has no DTensor should not pay
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Cut", "PartialGradients", "cut_of", "zeros"]


class Cut(NamedTuple):
    """How a gradient that is a sum still to be made lies on the mesh of its parameter."""

    placements: "tuple[Placement, ...]"
    """At least one is `Partial`."""
    dtype: torch.dtype

    def has_copies(self, param: Any) -> bool:
        """Return whether ranks have copies of an addend, which differ if one of them counts as zeros."""
        sizes = param.device_mesh.shape
        return any(found.is_replicate() and size > 1 for found, size in zip(self.placements, sizes, strict=True))


def cut_of(param: Any) -> Cut | None:
    """Return how the gradient of a `DTensor` is cut; None where it is no sum still to be made, or not there."""
    gradient = param.grad
    placements = getattr(gradient, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return None
    return Cut(tuple(placements), gradient.dtype)


def zeros(param: Any, cut: Cut) -> "DTensor":
    """Return a gradient of zeros for a `DTensor`, cut so: what a rank adds that has none. Nothing is communicated."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    pieces = [Replicate() if placement.is_partial() else placement for placement in cut.placements]
    shape = size_of(mesh_layout(param.shape, mesh.mesh, pieces).box_of(this_rank()))
    local = torch.zeros(shape, dtype=cut.dtype, device=param.device)
    return DTensor.from_local(local, mesh, cut.placements, run_check=False, shape=param.shape, stride=param.stride())


class PartialGradients:
    """Which of the `DTensor`s that ranks share have such gradients: the same on all ranks of each parameter's mesh."""

    def __init__(self) -> None:
        self._names: dict[Tensor, str] = {}
        self._known: dict[Tensor, Cut] = {}
        self._late: dict[Tensor, Cut] = {}
        """Of this rank's gradients those that other ranks do not know of."""
        self._stand_ins: dict[Tensor, Tensor] = {}
        """Sums in the place of gradients that this rank does not have."""

    def watch(self, names: Iterable[str], params: Iterable[Tensor]) -> None:
        """Look after parameters that several ranks share; plain tensors are left out."""
        self._names |= {param: name for name, param in zip(names, params, strict=True) if hasattr(param, "device_mesh")}

    @property
    def num_known(self) -> int:
        """How many parameters have gradients that are sums, as far as all ranks know."""
        return len(self._known)

    def is_watched(self, param: Tensor) -> bool:
        """Return whether it is one of those parameters."""
        return param in self._names

    def is_known(self, param: Tensor) -> bool:
        """Return whether its gradient is a sum, as far as all ranks know."""
        return param in self._known

    @property
    def has_stand_ins(self) -> bool:
        """Whether `replace` has put sums where this rank had no gradient, since the last step."""
        return bool(self._stand_ins)

    def is_stand_in(self, param: Tensor) -> bool:
        """Return whether `param.grad` was put there by `replace`, where this rank had none."""
        return param.grad is not None and self._stand_ins.get(param) is param.grad

    def may_lack_addends(self, param: Tensor) -> bool:
        """Return whether a sum is right although ranks have no addend."""
        return param in self._known and not self._known[param].has_copies(param)

    def late(self, params: Sequence[Any], gradients: Sequence[Any]) -> list[int]:
        """Return which of this rank's gradients are sums that other ranks do not know of, by their positions.

        Args:
            params: `DTensor`s.
            gradients: of these, or None.

        Raises:
            RuntimeError: a gradient is another sum than in the steps before.
        """
        if self._late:
            for param in params:
                self._late.pop(param, None)
        found = []
        # Hundreds of gradients in every step, nearly all cut as their parameters, and most by the very same objects.
        pairs = enumerate(zip(params, gradients, strict=True))
        others = [n for n, (param, g) in pairs if g is not None and getattr(g, "_spec", None) is not param._spec]
        for position in others:
            param = params[position]
            cut = cut_of(param)
            known = None if cut is None else self._known.get(param)
            if cut is None or cut == known or param not in self._names:
                continue
            if known is not None:
                raise RuntimeError(self._disagreement(param, "in the steps before it was", known, "now it is", cut))
            self._late[param] = cut
            found.append(position)
        return found

    def learn(self, params: Iterable[Tensor]) -> None:
        """Remember what sums this rank has found, and all ranks do."""
        self._known |= {param: self._late.pop(param) for param in params}

    def exchange(self, params: Sequence[Tensor], group: ProcessGroup) -> None:
        """Tell all ranks what sums were found, and remember theirs. All ranks of the group must call it; waits.

        Args:
            params: the same ones on all ranks.
            group: of their ranks.

        Raises:
            RuntimeError: ranks have different sums of one parameter.
        """
        own = {number: self._late.pop(param) for number, param in enumerate(params) if param in self._late}
        for theirs in all_gather_values(own, group):
            for number, cut in theirs.items():
                known = self._known.setdefault(params[number], cut)
                if cut != known:
                    raise RuntimeError(
                        self._disagreement(params[number], "on one rank it is", known, "on another one", cut)
                    )

    def replace(self, params: Iterable[Tensor]) -> None:
        """Put the sums in the place of gradients, also where this rank has none. All ranks of the meshes must call it.

        Args:
            params: those that are no sums, as far as ranks know, are left alone.
        """
        for param in params:
            if param not in self._known:
                continue
            is_missing = param.grad is None
            total = self._sum(param)
            if total is not None:
                param.grad = total
                if is_missing:
                    self._stand_ins[param] = total

    @contextmanager
    def summed(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Put the sums in the place of gradients meanwhile. All ranks of the meshes must call it.

        Args:
            params: of those that are sums, but unknown to other ranks, gradients are missing meanwhile.
        """
        kept: list[tuple[Tensor, Tensor | None]] = []
        try:
            if self._known or self._late:
                for param in params:
                    total = self._sum(param) if param in self._known else None
                    if total is not None or param in self._late:
                        kept.append((param, param.grad))
                        param.grad = total
            yield
        finally:
            for param, gradient in kept:
                param.grad = gradient
            self._stand_ins.clear()

    def _sum(self, param: Any) -> Tensor | None:
        """Return the sum of all ranks' addends; None if it has been made."""
        gradient = param.grad
        if gradient is None:
            gradient = zeros(param, self._known[param])
        elif gradient.placements == param.placements:
            return None
        total: Tensor = gradient.redistribute(param.device_mesh, param.placements)
        return total

    def _disagreement(self, param: Tensor, first: str, known: Cut, second: str, cut: Cut) -> str:
        return (
            f"{self._names[param]}: its gradient is a sum still to be made over ranks, and not always the same one: "
            f"{first} {_text(known)}, {second} {_text(cut)}; redistribute it to the parameter's placements before "
            f"the step, on all ranks"
        )

    def unknown(self, param: Tensor) -> RuntimeError:
        """Return the error for a gradient that is a sum for the first time while a CUDA graph is being captured."""
        return RuntimeError(
            f"{self._names[param]}: its gradient is a sum still to be made over ranks (Partial), and was none in the "
            f"steps before; make a step with such gradients before a CUDA graph is captured"
        )

    def mixed(self, param: Tensor) -> RuntimeError:
        """Return the error for a gradient that only some of the ranks that have one have as a sum."""
        return RuntimeError(
            f"{self._names[param]}: its gradient is a sum still to be made over ranks (Partial) on some ranks and "
            f"not on others; redistribute it to the parameter's placements before the step, on all ranks"
        )


def _text(cut: Cut) -> str:
    return f"({', '.join(map(repr, cut.placements))}) of {cut.dtype}"
