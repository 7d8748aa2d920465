"""Warnings about what a caller has done, which name the caller's line."""

from __future__ import annotations

import os
import sys
import warnings

import torch

# torch wraps step() in functions of its own: for profilers, learning-rate schedulers and its compiler.
_INSIDE = tuple(os.path.dirname(os.path.abspath(place)) + os.sep for place in (__file__, torch.__file__))


def warn_caller(message: str) -> None:
    """UserWarning at the innermost line that is neither this package's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
