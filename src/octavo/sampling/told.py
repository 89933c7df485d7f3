"""What rows say now, drafts and all, on its way from a GPU to the host.

Owns the copy of a step's last tokens, which is begun when the step's drafts are written and waited for when their masks
are made: a step later, while the forward pass runs. Knows no form. Invariant: nothing here waits for work that was
issued after the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.device.staging import PinnedRing
from octavo.ops.copying import to_device


class Line(NamedTuple):
    """The end of one row."""

    number: int  # of the row
    total: int  # tokens that are known
    last: list[int]  # the last ones of these; before the first token anything
    drafts: list[int]  # what stands behind them, as many as a row may have


class ToldTokens:
    """The copy that is under way, if there is one."""

    def __init__(self, tokens: torch.Tensor, ring: PinnedRing) -> None:
        """tokens: [max_num_rows + 1, max_model_len] int32, the request table's."""
        self._tokens, self._ring = tokens, ring
        self._numbers: Sequence[int] = ()
        self._lines: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._event: torch.cuda.Event | None = None
        self._most = 0

    def begin(self, numbers: Sequence[int], total_len: torch.Tensor, most_drafts: int) -> None:
        """Copy the ends of the rows `numbers`, in place of any copy before. total_len: [max_num_rows + 1] int32."""
        back, width = 2 * (1 + most_drafts), self._tokens.shape[1]
        rows = to_device(np.array(numbers, np.int64), self._tokens.device)
        total = total_len.index_select(0, rows).to(torch.int64)[:, None]
        at = (total + torch.arange(-back, most_drafts, device=rows.device)).clamp(0, width - 1)
        said = self._tokens.view(-1).index_select(0, (rows[:, None] * width + at).view(-1)).view(len(numbers), -1)
        lines = torch.cat([total.to(torch.int32), said], dim=1)
        slot, self._event = self._ring.take(lines.numel())
        host = slot[: lines.numel()].view(lines.shape)
        host.copy_(lines, non_blocking=True)
        self._event.record()
        self._numbers, self._lines, self._most = numbers, host.numpy(), most_drafts

    def take(self) -> Iterator[Line]:
        """Wait for the copy, and give what it says. Once."""
        if self._event is None:
            return
        self._event.synchronize()
        self._event = None
        end = self._lines.shape[1] - self._most
        for number, line in zip(self._numbers, self._lines.tolist(), strict=True):
            yield Line(number, line[0], line[1:end], line[end:])
