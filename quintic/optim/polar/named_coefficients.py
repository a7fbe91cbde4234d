"""Published lists of polynomial coefficients under names, which the option `coefficients` takes.

A name stands for a list with one triple (a, b, c) of p(s) = a s + b s^3 + c s^5 per step, or for a function that makes
the list for any number of steps. Lists with figures have the number of steps that their authors chose them for: each
polynomial is made for the image of the one before it, so the list is neither cut nor continued.
The ranges that they map singular values to: docs/explanation/orthogonalization.md. Read next: `forms.py`.
"""

from collections.abc import Callable
from typing import Literal, get_args

from quintic.optim.polar.coefficients import (
    DEFAULT_STEPS,
    SAFETY,
    Coefficients,
    checked_steps,
    newton_schulz_coefficients,
    polar_express_coefficients,
)

__all__ = ["WITHOUT_MARGIN", "CoefficientsName", "named_coefficients"]

CoefficientsName = Literal["polar_express", "muon", "moonlight", "deepseek_v4", "cubic", "cans"]


def _guarded(coefficients: Coefficients) -> Coefficients:
    """Return polynomials of s / (1 + SAFETY) for all steps but the last, the guard that Polar Express has."""
    shrink = 1 + SAFETY
    return (*((a / shrink, b / shrink**3, c / shrink**5) for a, b, c in coefficients[:-1]), coefficients[-1])


_SETS: dict[CoefficientsName, Coefficients | Callable[[int], Coefficients]] = {
    # N. Amsel et al. 2025, arXiv 2505.16932, computed for the number of steps. The guard is in the triples.
    "polar_express": polar_express_coefficients,
    # K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Needs no guard: the polynomial maps (0, 1.25]
    # to (0, 1.21].
    "muon": newton_schulz_coefficients,
    # J. Liu et al. 2025, arXiv 2502.16982: Jordan's triple, in five steps.
    "moonlight": newton_schulz_coefficients,
    # DeepSeek-V4 report, 2026: eight steps of Jordan's triple, then two that converge to one. As "muon", without
    # a guard and without the need of one.
    "deepseek_v4": (*newton_schulz_coefficients(8), *((2.0, -1.5, 0.5),) * 2),
    # arXiv 2606.00371: relaxed cubics, made for [0.007, 1] and bfloat16. They have no guard: the first is negative from
    # s = 1.0036 on.
    "cubic": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    # E. Grishina et al. 2025, arXiv 2506.10935, in the figures that NVIDIA's Emerging-Optimizers has. As published
    # they have no guard: each polynomial ends close to where the next one turns steep, and rounding to bfloat16 is
    # enough to diverge (1e12 was measured). So Polar Express's guard is added.
    "cans": _guarded(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        )
    ),
}

WITHOUT_MARGIN = frozenset({"cubic"})
"""Sets that need matrices of a norm below one, because they take singular values just above one to the other sign."""


def named_coefficients(name: str, steps: int | None = None) -> Coefficients:
    """Return the triples of a named set, one per step.

    Args:
        name: one of `CoefficientsName`.
        steps: None for as many as the set has, or five if it is made for any number; else the number of steps.

    Raises:
        ValueError: no set has this name, or the set has another number of steps; the message lists the choices.
    """
    names = get_args(CoefficientsName)
    if name not in names:
        raise ValueError(
            f"coefficients={name!r}: no set has this name; choose one of {', '.join(map(repr, names))}, or give one "
            f"triple (a, b, c) or one per step"
        )
    found = _SETS[name]  # type: ignore[index]  # it is one of the names
    if callable(found):
        return found(DEFAULT_STEPS if steps is None else steps)
    if steps is not None and checked_steps(steps) != len(found):
        raise ValueError(f"steps={steps}: coefficients={name!r} are made for {len(found)} steps; give that, or None")
    return found
