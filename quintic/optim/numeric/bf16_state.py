"""Which momentum and moments may be kept in bfloat16.

An average m <- m + (1 - beta)(x - m) is computed in float32 and rounded to the nearest bfloat16 when it is stored. The
rounding error is up to 2^-8 of m. With beta = 0.95 that is small beside a change of (1 - beta) m; with beta = 0.999 it
is larger than the change, and the average stops moving. Simulated, with entries spread over all mantissas:

| beta                                                      |   0.9 |  0.95 |  0.98 | 0.985 |  0.99 | 0.995 | 0.997 |
|-----------------------------------------------------------|-------|-------|-------|-------|-------|-------|-------|
| averaging squares of normal numbers: RMS error            | 0.4 % | 0.5 % | 1.0 % | 1.2 % | 3.4 % | 6.6 % |  16 % |
| averaging zeros: largest error after 1 / (1 - beta) steps | 1.3 % | 1.0 % | 2.2 % | 4.5 % |  10 % |  13 % | 170 % |

Hence `MAX_BF16_BETA`. Rounding depends only on the value, so that every layout of the parameters has the same bits.
"""

from typing import Literal

import torch

__all__ = ["MAX_BF16_BETA", "StateDtype", "moment_dtype_of"]

StateDtype = Literal["bf16", "int8"] | None

MAX_BF16_BETA = 0.98
"""Largest averaging coefficient of bfloat16 state; averages are then within about 2 % of the float32 ones."""


def moment_dtype_of(weights: torch.dtype, state_dtype: StateDtype) -> torch.dtype:
    """Return the dtype of averages that are not of 8 bits, given the weights' dtype and their group's `state_dtype`."""
    if weights == torch.float64:
        return torch.float64
    return torch.float32 if state_dtype is None else torch.bfloat16
