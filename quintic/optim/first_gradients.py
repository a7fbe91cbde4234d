"""A warning where the first step finds no gradient at all."""

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.rules.device import HostCopy

__all__ = ["FirstGradients"]


class FirstGradients:
    """Warns where the first step finds no gradient at all: the model may have other parameters than the optimizer.

    `to_empty`, `fully_shard` and PEFT give a model new parameters. An optimizer made before steps the old ones, which
    never get a gradient, and nothing is trained without a word. A rank may well have no gradient where others do (a
    batch that was skipped, experts without a token): of ranks that share parameters all must lack all gradients.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._suspect = ""
        """The warning, while it is not known whether other ranks have gradients."""
        self._present: list[HostCopy] | None = None

    def check(self, groups: Sequence[Group], *, allow_missing: bool) -> None:
        """Look whether this rank has a gradient, before the first step; warn if it is known by now that none has.

        Where it may lack them for a reason, the next step counts as the first one. A gradient on the meta device is a
        ValueError.
        """
        self._warn()
        if self._is_over or allow_missing:
            return
        rows = [row for group in groups for row in zip(group.param_names, group.params, strict=True)]
        for name, param in rows:
            if param.is_meta and param.grad is not None:
                raise ValueError(
                    f"{name} is on the meta device, where it has no values to step; materialise the model (to_empty, "
                    f"or a checkpoint loaded with assign=True), then make the optimizer"
                )
        self._is_over = True
        if any(param.grad is not None for _, param in rows):
            return
        trained = [name for name, param in rows if param.requires_grad]
        if trained:
            others = f" and {len(trained) - 1} others" if len(trained) > 1 else ""
            self._suspect = (
                f"the first step found no gradient at all, also none of {trained[0]}{others} with requires_grad=True; "
                f"if the model got other parameters after the optimizer was made (to_empty, fully_shard, PEFT), this "
                f"optimizer has the old ones: make it afterwards; quintic.verify(model, optimizer) names them"
            )

    def start_rank_check(self, present: Iterable[Tensor]) -> bool:
        """Begin to find out whether other ranks have gradients, after the step. Return whether nothing is left to do.

        What is `present` is () on a device each: whether any rank of those that share parameters has a gradient.
        """
        if self._suspect and self._present is None:
            self._present = list(map(HostCopy, present))
            self._warn()
        return self._is_over and not self._suspect

    def _warn(self) -> None:
        """Warn, as soon as all answers are there; the host waits for none of them."""
        if not self._suspect or self._present is None or not all(answer.is_there for answer in self._present):
            return
        message, self._suspect = self._suspect, ""
        if not any(answer.read() for answer in self._present):
            warnings.warn(message, UserWarning, stacklevel=2)
