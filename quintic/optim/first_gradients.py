"""Warns if no parameter had a gradient in the first step, on any rank.

Phases:
    check               before each step until one counts: does this rank have a gradient?
    start_rank_check    after that step, if this rank had none: begin to copy the other ranks' answers to the host
    warn                at a later step, when all answers have arrived; nothing waits for them
"""

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from quintic.optim.groups.group import Group
from quintic.optim.rules.device import HostCopy

__all__ = ["FirstGradients"]


class FirstGradients:
    """Warns if no parameter had a gradient in the first step: the optimizer may have another model's parameters.

    `to_empty`, `fully_shard` and PEFT give a model new parameters. An optimizer made before steps the old ones, which
    never get a gradient, and nothing is trained, without an error. One rank may have no gradients although others do (a
    skipped batch, experts without a token), so the warning needs all ranks that share parameters to lack all gradients.
    """

    def __init__(self) -> None:
        # Whether the first step has been made.
        self._is_over = False
        # The warning, while it is unknown whether other ranks have gradients; empty if there is nothing to warn of.
        self._suspect = ""
        # Whether any rank had a gradient, for each set of ranks that share parameters; None before they are asked.
        self._present: list[HostCopy] | None = None

    def check(self, groups: Sequence[Group], *, allow_missing: bool) -> None:
        """Before a step: check, if it is the first, whether this rank has a gradient; warn if answers have arrived.

        With `allow_missing` gradients may be missing for a good reason, and the next step counts as the first one.

        Raises:
            ValueError: a gradient is on the meta device.
        """
        self._warn()
        if self._is_over or allow_missing:
            return
        rows = [row for group in groups for row in zip(group.param_names, group.params, strict=True)]
        # Meta parameters have no values; their gradients show that someone tries to train them.
        for name, param in rows:
            if param.is_meta and param.grad is not None:
                raise ValueError(
                    f"{name} is on the meta device, where it has no values to step; materialise the model (to_empty, "
                    f"or a checkpoint loaded with assign=True), then make the optimizer"
                )
        # This step counts as the first.
        self._is_over = True
        if any(param.grad is not None for _, param in rows):
            return
        # Frozen parameters lack gradients for good reason.
        trained = [name for name, param in rows if param.requires_grad]
        if trained:
            others = f" and {len(trained) - 1} others" if len(trained) > 1 else ""
            self._suspect = (
                f"no parameter had a gradient in the first step, including {trained[0]}{others} with "
                f"requires_grad=True; if the model got new parameters after the optimizer was made (to_empty, "
                f"fully_shard, PEFT), this optimizer has the old ones: make it after that; "
                f"quintic.verify(model, optimizer) names them"
            )

    def start_rank_check(self, present: Iterable[Tensor]) -> bool:
        """After a step: start to copy other ranks' answers to the host, if needed; return whether all checks are over.

        Args:
            present: () tensors on devices, one for each set of ranks that share parameters: nonzero if any of these
                ranks has a gradient.
        """
        if self._suspect and self._present is None:
            self._present = list(map(HostCopy, present))
            self._warn()
        return self._is_over and not self._suspect

    def _warn(self) -> None:
        """Warn if all answers have arrived and none is positive; the host does not wait for them."""
        if not self._suspect or self._present is None or not all(answer.is_there for answer in self._present):
            return
        message, self._suspect = self._suspect, ""
        if not any(answer.read() for answer in self._present):
            warnings.warn(message, UserWarning, stacklevel=2)
