"""The error of a run that cannot start as asked."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave cannot be used: one sentence naming the value and what is allowed."""
