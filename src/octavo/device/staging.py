"""StagedTensor: device state that the host changes by differences.

Owns a tensor with a fixed address and the writes that wait for it. The host stages ragged writes at any time; `apply`
brings them to the device at one line of the step. Does not know what the rows mean. Invariant: between two `apply`
calls the tensor changes only through device work; later writes to the same element win.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.ops.staged_write import staged_write


class StagedTensor:
    """`data` is [num_rows, width], or [num_rows] where `width` is 0."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Zeroed at first."""
        self.data = torch.zeros((num_rows, width) if width else (num_rows,), dtype=dtype, device=device)
        self._flat = self.data.view(-1)
        self._width = width or 1
        self._starts: list[int] = []
        self._values: list[Sequence[int | float]] = []

    def stage(self, row: int, start: int, values: Sequence[int | float]) -> None:
        """Stage `values` for columns start .. start + len(values) - 1 of `row`. Values are kept, not copied."""
        assert start + len(values) <= self._width, f"write of {len(values)} at {start} leaves a row of {self._width}"
        self._starts.append(row * self._width + start)
        self._values.append(values)

    def stage_one(self, row: int, value: int | float) -> None:
        """Stage one value for column 0 of `row`."""
        self._starts.append(row * self._width)
        self._values.append((value,))

    def apply(self) -> None:
        """Bring the staged writes to the device, in the order in which they were staged."""
        if self._starts:
            staged_write(self._flat, self._starts, self._values)
            self._starts.clear()
            self._values.clear()
