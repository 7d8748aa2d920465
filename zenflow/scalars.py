"""What a step tells the device beside the gradients: who takes part, learning rates and so on, bias corrections."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from zenflow_kernels.numerics import pack_hyper

from zenflow.bias import bias_table


class StepScalars:
    """Small tables on `device`, made and sent again only when they have changed; nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[str, tuple[Hashable, Tensor]] = {}

    def present(self, row: Sequence[bool]) -> Tensor:
        """int32 `[params]`, 1 where the parameter has a gradient in this step."""
        row = tuple(row)
        return self._send("present", row, lambda: torch.tensor(row, dtype=torch.int32, device="cpu"))

    def factors(self, groups: Sequence[tuple[float, ...]], highest_t: int) -> tuple[Tensor, Tensor]:
        """Scalars fp32 `[groups, 8]` and bias corrections fp32 `[groups, length, 2]`, for every t up to `highest_t`.

        groups: lr, beta1, beta2, eps and weight decay of each.
        """
        rows = tuple(groups)
        tables = [bias_table(beta1, beta2, highest_t) for _, beta1, beta2, _, _ in rows]

        def packed() -> Tensor:
            return torch.tensor([pack_hyper(*row) for row in rows], dtype=torch.float32, device="cpu")

        def stacked() -> Tensor:
            # A table that is shorter than another has saturated: its factors stay 1.
            factors = torch.ones(len(tables), max(map(len, tables)), 2, dtype=torch.float32, device="cpu")
            for place, table in enumerate(tables):
                factors[place, : len(table)] = torch.from_numpy(table.copy())
            return factors

        key = tuple((row[1], row[2], len(table)) for row, table in zip(rows, tables, strict=True))
        return self._send("hyper", rows, packed), self._send("bias", key, stacked)

    def _send(self, name: str, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._sent or self._sent[name][0] != key:
            tensor = make()
            if self._device.type == "cuda":
                tensor = tensor.pin_memory().to(self._device, non_blocking=True)
            self._sent[name] = key, tensor
        return self._sent[name][1]
