"""Bias corrections of AdamW, from one table that both halves read.

`first[t] = 1 / (1 - beta1**t)` and `second[t] = 1 / sqrt(1 - beta2**t)`, computed in float64 with the C library's
`pow` and rounded to fp32 once. A channel indexes the table with its own t, clamped to the last entry: a table is
either long enough for every t that can occur, or ends where both factors have become exactly 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


def saturation(beta: float) -> int:
    """The smallest t from which the factor is 1 in fp32 (`beta**t < 2**-26`)."""
    return 1 if beta <= 0 else math.ceil(-26 * math.log(2) / math.log(beta)) + 1


def bias_table(beta1: float, beta2: float, highest_step: int) -> np.ndarray:
    """fp32 `[length, 2]` for every t in `[0, highest_step]`; row t holds both factors, row 0 is unused (1, 1).

    `highest_step` is an upper bound on any t; it is rounded up to a power of two so that few tables are ever made, and
    the table ends early where it saturates. Read-only, shared between calls.
    """
    bound = 1 << max(8, int(highest_step).bit_length())
    return _table(beta1, beta2, min(bound, max(saturation(beta1), saturation(beta2))) + 1)


@lru_cache(maxsize=16)
def _table(beta1: float, beta2: float, length: int) -> np.ndarray:
    table = np.ones((length, 2), dtype=np.float32)
    for column, factors in enumerate((_factors(beta1, False, length), _factors(beta2, True, length))):
        table[1 : 1 + len(factors), column] = factors
    table.setflags(write=False)
    return table


@lru_cache(maxsize=16)
def _factors(beta: float, root: bool, length: int) -> np.ndarray:
    """One beta's factors for t = 1, 2, ... up to where they are 1: a schedule that moves one beta keeps the other's."""
    corrections = (1 - beta**t for t in range(1, min(length, saturation(beta) + 1)))
    return np.array([1 / (math.sqrt(c) if root else c) for c in corrections], dtype=np.float64).astype(np.float32)
