"""Momentum and moments in bfloat16: which averages may be kept in it.

An average m <- m + (1 - beta)(x - m) is computed in float32 and rounded to the nearest bfloat16 when it is stored. That
is off by up to 2^-8 of m: small beside a change of (1 - beta) of it where beta is 0.95, more than the change where beta
is 0.999, and then the average stands still. Simulated, with entries spread over all mantissas:

| beta                                                     | 0.9   | 0.95  | 0.98  | 0.985 | 0.99  | 0.995 | 0.997 |
|----------------------------------------------------------|-------|-------|-------|-------|-------|-------|-------|
| of squares of normal numbers, root of mean squared error | 0.4 % | 0.5 % | 1.0 % | 1.2 % | 3.4 % | 6.6 % |  16 % |
| of zeros, error after 1 / (1 - beta) steps, at most      | 1.3 % | 1.0 % | 2.2 % | 4.5 % |  10 % |  13 % | 170 % |

Hence `MAX_BF16_BETA`. Rounding depends on nothing but the value: every layout of the parameters has the same bits.
"""

from typing import Literal

import torch

__all__ = ["MAX_BF16_BETA", "moment_dtype_of"]

MAX_BF16_BETA = 0.98
"""Largest averaging coefficient of bfloat16 state; the average is then within about 2 % of that in float32."""


def moment_dtype_of(weights: torch.dtype, state_dtype: Literal["bf16"] | None) -> torch.dtype:
    """Return the dtype of momentum and moments, given that of the weights and the option of their group."""
    if weights == torch.float64:
        return torch.float64
    return torch.bfloat16 if state_dtype == "bf16" else torch.float32
