"""Schedules: pure functions of the step. Step 0 is the first one; `total` is the number of steps of the run."""

__all__ = ["is_due", "lr_multiplier", "momentum_at", "weight_decay_multiplier"]


def lr_multiplier(step: int, total: int, *, warmup_frac: float, warmdown_frac: float, final_frac: float) -> float:
    """Return the share of the peak learning rate: linear warm-up, constant, linear warm-down to `final_frac`.

    The first step already moves (1 / warm-up steps) and the last one would, one step later, reach `final_frac`.
    """
    warmup, warmdown = round(warmup_frac * total), round(warmdown_frac * total)
    if step < warmup:
        return (step + 1) / warmup
    if step >= total - warmdown:
        left = (total - step) / warmdown
        return left + (1 - left) * final_frac
    return 1.0


def momentum_at(step: int, *, start: float, end: float, warmup_steps: int) -> float:
    """Return Muon's momentum: linear from `start` to `end` over `warmup_steps`, then `end`."""
    if step >= warmup_steps:
        return end
    return start + (end - start) * step / warmup_steps


def weight_decay_multiplier(step: int, total: int) -> float:
    """Return the share of the weight decay: linear from 1 at the first step to 0 after the last."""
    return 1.0 - step / total


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens `every` so many steps happens after this many; 0 is never."""
    return every > 0 and step % every == 0
