"""NVML's figure, from a library made for it: no card is needed, and none that fails may end a measurement."""

from __future__ import annotations

import pytest
import torch

from zenflow.cores import gpu_bus_id
from zenflow.diagnose.meter import Meter
from zenflow.diagnose.nvml import Nvml

BUS = "0000:dc:00.0"


class Library:
    """Answers as NVML does: 0 and a value behind a pointer, or an error's number."""

    def __init__(self, fails: str = "", busy: int = 73) -> None:
        self._fails, self._busy, self.asked = fails, busy, []

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments):
            self.asked.append(name)
            if name == self._fails:
                return 9
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                assert arguments[0] == BUS.encode()
                arguments[1]._obj.value = 4711
            if name == "nvmlDeviceGetUtilizationRates":
                assert arguments[0].value == 4711
                arguments[1]._obj.gpu = self._busy
            return 0

        return answer


def test_the_card_at_that_place_is_asked():
    library = Library()
    card = Nvml(BUS, library)
    assert card.utilisation() == 0.73
    card.close()
    assert library.asked[0] == "nvmlInit_v2" and library.asked[-1] == "nvmlShutdown"


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUtilizationRates"])
def test_an_error_of_the_library_is_an_oserror_with_its_name(call):
    with pytest.raises(OSError, match=f"{call} returned 9"):
        Nvml(BUS, Library(call)).utilisation()


def test_an_older_library_is_an_oserror_too():
    with pytest.raises(OSError, match="has no nvmlInit_v2"):
        Nvml(BUS, object())


def test_a_meter_has_the_mean_of_what_it_was_told(monkeypatch):
    answers = iter((0.5, 1.0))

    class Card:
        closed = False

        def utilisation(self) -> float:
            if (value := next(answers, None)) is None:
                raise OSError("lost")
            return value

        def close(self) -> None:
            Card.closed = True

    monkeypatch.setattr("zenflow.diagnose.meter._open_nvml", lambda device: Card())
    meter = Meter(torch.device("cpu"), warm_up=1, steps=40)
    for _ in range(41):
        meter.end_step()
    assert meter.full and meter.utilisation == 0.75 and Card.closed


@pytest.mark.gpu
def test_the_device_s_own_library_answers():
    assert 0 <= Nvml(gpu_bus_id(torch.device("cuda", 0))).utilisation() <= 1
