"""How busy NVML calls a card, by the library that comes with its driver; without torch."""

from __future__ import annotations

import ctypes
from contextlib import suppress

LIBRARY = "libnvidia-ml.so.1"


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """One card's figures, by its place on the PCI bus, as "0000:dc:00.0". OSError without library, driver or card."""

    def __init__(self, pci_bus_id: str, library: ctypes.CDLL | None = None) -> None:
        self._library = library or ctypes.CDLL(LIBRARY)
        self._card = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.encode(), ctypes.byref(self._card))

    def utilisation(self) -> float:
        """The share of the last moments (the driver's choice, 1/6 to 1 s) in which some kernel ran, 0 to 1."""
        rates = _Rates()
        self._call("nvmlDeviceGetUtilizationRates", self._card, ctypes.byref(rates))
        return rates.gpu / 100

    def close(self) -> None:
        """Let the library go."""
        with suppress(OSError):
            self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise OSError(f"{LIBRARY} has no {name}") from error
        if code != 0:
            raise OSError(f"{name} returned {code}")
