"""What is printed: numbers with the right form of their noun."""

from __future__ import annotations

import pytest

from zenflow.terminal import counted


@pytest.mark.parametrize(
    ("number_of", "said"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (12345, "12,345 threads")]
)
def test_a_number_of_things(number_of, said):
    assert counted(number_of, "thread") == said
