"""A stand-in for CUDA graphs, so that what is captured, and when, can be tested where there is no GPU."""

import torch

from quintic.optim import captured_step

GRAPHS = []
"""Those made and not reset."""


class HostGraph:
    """Runs its work when it is replayed, with the gradients that it was captured with, and not when it is captured."""

    def __init__(self, work, done, params):
        self._work, self._done, self._params = work, done, params
        self._gradients = [param.grad for param in params]
        self.replays = 0
        GRAPHS.append(self)

    def replay(self):
        now = [param.grad for param in self._params]
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient
        done = self._work()
        if done.go is not None:  # a graph writes to the same memory each time
            self._done.go.copy_(done.go)
        for param, gradient in zip(self._params, now, strict=True):
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
        tensors = [*params, *(param.grad for param in params if param.grad is not None)]
        tensors += [value for param in params for value in optimizer.state[param].values()]
        before = [tensor.detach().clone() for tensor in tensors]
        skipped = optimizer.steps_made._skipped
        counted = None if skipped is None else skipped.clone()
        done = work()
        with torch.no_grad():
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
        if counted is not None:
            optimizer.steps_made._skipped.copy_(counted)
        return HostGraph(work, done, params), done

    GRAPHS.clear()
    patch.setattr(captured_step, "capture", captured)
    patch.setattr(captured_step, "_check_devices", lambda *_: None)
