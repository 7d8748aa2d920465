from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.driving import Builder
from tests.engine.simulation import TOGETHER
from tests.engine.uploading import watch_uploads
from zenflow import ZenFlow
from zenflow.uploading import Sent


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def build() -> Iterator[Builder]:
    """Makes engines that defer every matrix, however small, on the schedule `TOGETHER`, as the simulation and what most
    tests count by hand are; those of the usual one say `USUAL`. Closes them."""
    made: list[ZenFlow] = []

    def make(params: Any, **settings: Any) -> ZenFlow:
        made.append(ZenFlow(params, **{"min_deferred_numel": 0, "worker_threads": 1, **TOGETHER, **settings}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close(flush=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sent, bool]]:
    """Every upload of the test, in order: what, and whether backward took it."""
    return watch_uploads(monkeypatch)
