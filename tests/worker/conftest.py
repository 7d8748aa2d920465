from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.worker.feeding import Trainer
from zenflow import native
from zenflow.geometry import Segment


@pytest.fixture(scope="session")
def library() -> native.Native:
    """The compiled pass; tests about it are skipped where it cannot be built."""
    built = native.load()
    if built is None:
        pytest.skip("no C compiler, or ZENFLOW_NATIVE=0")
    return built


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
