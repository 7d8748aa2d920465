"""Bias corrections of AdamW, from one table that both halves read.

`first[t] = 1 / (1 - beta1**t)` and `second[t] = 1 / sqrt(1 - beta2**t)`, computed in float64 with the C library's
`pow` and rounded to fp32 once. A channel indexes the table with its own t, clamped to the last entry: a table is
either long enough for every t that can occur, or ends where both factors have become exactly 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


def saturation(beta1: float, beta2: float) -> int:
    """The smallest t from which both factors are 1 in fp32 (beta**t < 2**-26)."""
    longest = max(beta1, beta2)
    return 1 if longest <= 0 else math.ceil(-26 * math.log(2) / math.log(longest)) + 1


def bias_table(beta1: float, beta2: float, highest_step: int) -> np.ndarray:
    """fp32 `[length, 2]` for every t in `[0, highest_step]`; row t holds both factors, row 0 is unused (1, 1).

    `highest_step` is an upper bound on any t; it is rounded up to a power of two so that few tables are ever made, and
    the table ends early where it saturates. Read-only, shared between calls.
    """
    bound = 1 << max(8, int(highest_step).bit_length())
    return _table(beta1, beta2, min(bound, saturation(beta1, beta2)) + 1)


@lru_cache(maxsize=16)
def _table(beta1: float, beta2: float, length: int) -> np.ndarray:
    steps = range(1, length)
    table = np.ones((length, 2), dtype=np.float64)
    table[1:, 0] = [1 / (1 - beta1**t) for t in steps]
    table[1:, 1] = [1 / math.sqrt(1 - beta2**t) for t in steps]
    table = table.astype(np.float32)
    table.setflags(write=False)
    return table
