"""What a step decides on the device: skip or not, clip factor, loss scale, and what each parameter does.

Written by `close_step`, read by `fused_step`; the window's log travels to the worker behind the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FOLD_NONE, FOLD_OVERWRITE, FOLD_ADD = 0, 1, 2

# The log, int32: the number of the window, then the words of each step, then the number again.
STAMP_WORDS = 2
LOG_WORDS = 4
LOG_FINITE, LOG_CLIP, LOG_INV_SCALE, LOG_ZERO = range(LOG_WORDS)


def log_words(max_steps: int) -> int:
    """int32 words in the log of a window of at most `max_steps` steps."""
    return STAMP_WORDS + LOG_WORDS * max_steps + STAMP_WORDS


@dataclass(frozen=True)
class StepControl:
    """Device tensors that outlive the step; their addresses never change.

    `window_log` int32 `[log_words(max_steps)]`: the window's number (low word, high word), then four words for each of
    the latest `max_steps` steps (finite, clip as the bits of an fp32, inverse loss scale likewise, 0), whose places are
    taken in turn, then the number again. `cohort` says when the windows of a parameter end, see `close_step`.
    """

    window_log: Tensor
    finite: Tensor  # int32 [1]: 1 if this step counts
    clip: Tensor  # fp32 [1]
    inv_scale: Tensor  # fp32 [1]
    norm: Tensor  # fp32 [1]: norm of the unscaled gradient before clipping
    skipped: Tensor  # int64 [1]: steps skipped so far
    cohort: Tensor  # int32 [P], 1 to max_steps
    count: Tensor  # int32 [P]: steps of its window that were present and finite
    fold: Tensor  # int32 [P]: FOLD_NONE, FOLD_OVERWRITE or FOLD_ADD in this step
    advance: Tensor  # int32 [P]: AdamW updates since an entry's `start` was written

    @classmethod
    def create(cls, n_params: int, max_steps: int, device: torch.device | str) -> StepControl:
        """Zeroed control of `n_params` parameters and windows of at most `max_steps` steps, all of the last cohort."""
        if n_params < 0 or max_steps < 1:
            raise ValueError(f"StepControl needs n_params >= 0 and max_steps >= 1, got {n_params} and {max_steps}")

        def zeros(length: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        return cls(
            window_log=zeros(log_words(max_steps), torch.int32),
            finite=zeros(1, torch.int32),
            clip=zeros(1, torch.float32),
            inv_scale=zeros(1, torch.float32),
            norm=zeros(1, torch.float32),
            skipped=zeros(1, torch.int64),
            cohort=torch.full((n_params,), max_steps, dtype=torch.int32, device=device),
            count=zeros(n_params, torch.int32),
            fold=zeros(n_params, torch.int32),
            advance=zeros(n_params, torch.int32),
        )

    @property
    def max_steps(self) -> int:
        return (self.window_log.numel() - log_words(0)) // LOG_WORDS
