"""A stand-in for CUDA graphs, so that what is captured, and when, can be tested where there is no GPU."""

from unittest import mock

import torch

from quintic.optim import captured_step

GRAPHS = []
"""Those made and not reset."""


class HostGraph:
    """Runs its work when it is replayed, and not when it is captured.

    It reads the gradients, and the averages that clipping made of them, that it was captured with.
    """

    def __init__(self, work, outcome, gradients, reduction, averages):
        self._work, self._outcome, self._gradients = work, outcome, gradients
        self._reduction, self._averages = reduction, averages
        self.replays = 0
        GRAPHS.append(self)

    def replay(self):
        now = {param: param.grad for param in self._gradients}
        for param, gradient in self._gradients.items():
            param.grad = gradient
        with mock.patch.object(self._reduction, "valid", return_value=dict(self._averages)):
            outcome = self._work()
        if outcome.apply_mask is not None:  # a graph writes to the same memory each time
            self._outcome.apply_mask.copy_(outcome.apply_mask)
        for param, gradient in now.items():
            param.grad = gradient
        self.replays += 1

    def reset(self):
        GRAPHS.remove(self)


def capture_on_hosts(patch, optimizer):
    """Let `CapturedStep` of one optimizer capture on the host: its work is done for what it returns, and undone.

    Args:
        patch: pytest's.
        optimizer: of plain tensors.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def captured(work):
        reduction, gradients = optimizer._plans.reduction, {param: param.grad for param in params}
        averages = reduction.valid()
        tensors = [*params, *(gradient for gradient in gradients.values() if gradient is not None)]
        tensors += [value for param in params for value in optimizer.state[param].values()]
        before = [tensor.detach().clone() for tensor in tensors]
        skipped = optimizer._step_history._skipped
        counted = None if skipped is None else skipped.clone()
        outcome = work()
        with torch.no_grad():
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
        if counted is not None:
            optimizer._step_history._skipped.copy_(counted)
        return HostGraph(work, outcome, gradients, reduction, averages), outcome

    GRAPHS.clear()
    patch.setattr(captured_step, "capture", captured)
    patch.setattr(captured_step, "_check_devices", lambda *_: None)
