from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def forbidden_synchronisation() -> Iterator[Callable[[], None]]:
    """Call it: from then on, whatever makes the host wait for the device fails, as far as torch knows."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
