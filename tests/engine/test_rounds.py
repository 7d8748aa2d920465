"""A thousand windows through the same slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.driving import RULES, STREAMS, Builder, Pair, assert_same_bits, make_gradients, make_parameters

SLOW = 5_000_000  # cycles: milliseconds, several rounds long
PLACES = [("cpu", None), *(pytest.param("cuda", slow, marks=pytest.mark.gpu) for slow in (None, *STREAMS))]


@pytest.mark.parametrize(("device", "slow"), PLACES, ids=lambda value: str(value or "at-full-speed"))
@pytest.mark.parametrize("rule", ["gpu", "host"])
def test_e15_a_thousand_rounds_through_two_slots(rule: str, device: str, slow: str | None, build: Builder) -> None:
    """E15: a window a step, so that the two records of each bucket, and the lanes, are refilled a thousand times while
    worker and streams are busy with them; every weight of every round is kept, and compared at the end."""
    shapes = [(31, 40), (17, 64), (5, 5)]
    settings = {"lr": 0.02, "topk_ratio": 0.2, "update_interval": 1, "select_interval": 5000, "bucket_bytes": 1024}
    parameters = make_parameters(shapes, torch.bfloat16, device)
    pair = Pair(build, parameters, **settings, **RULES[rule])
    stamps = make_gradients(shapes, torch.bfloat16, 8)
    on_device = [[grad.to(device) for grad in grads] for grads in stamps]
    seen: list[list[Tensor]] = []
    for number in range(1000):
        if slow is not None and number % 50 < 3:
            with torch.cuda.stream(STREAMS[slow](pair.engine)):
                torch.cuda._sleep(SLOW)
        pair.engine.zero_grad()
        torch.autograd.backward(parameters, [grad * (1 + number % 7) for grad in on_device[number % 8]])
        pair.engine.step()
        seen.append([parameter.detach().clone() for parameter in parameters])
    for number, weights in enumerate(seen):
        pair.model.step([grad * (1 + number % 7) for grad in stamps[number % 8]])
        for index, weight in enumerate(weights):
            assert_same_bits(weight, pair.model.visible(index), f"weight {index} in round {number}")
    pair.check_state()
