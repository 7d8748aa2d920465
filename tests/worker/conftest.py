from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.worker.feeding import Trainer
from zenflow.geometry import Segment


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    """Makes hand-fed workers and closes them."""
    made: list[Trainer] = []

    def make(*segments: Segment, **settings) -> Trainer:
        made.append(Trainer(*segments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
