"""BlockTables: the device's block tables, one per cache group.

Owns, per group, the block ids of every row in logical order, and how many are live. Does not know which blocks are
free. Invariant: the first `count` entries of a row are its blocks; entries beyond are garbage and never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.device.staging import StagedTensor
from octavo.groups import CacheGroup


class BlockTables:
    """`tables[g].data` is [max_num_rows, max_blocks] int32."""

    def __init__(
        self, groups: Sequence[CacheGroup], *, max_num_rows: int, max_model_len: int, device: torch.device
    ) -> None:
        """Sized for `max_model_len` tokens per row."""
        self.groups = tuple(groups)
        self.tables = [
            StagedTensor(max_num_rows, -(-max_model_len // group.block_size), torch.int32, device) for group in groups
        ]
        self._counts = [[0] * max_num_rows for _ in groups]

    def append(self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool = False) -> None:
        """Stage block ids for `row`, per group: after its live ones, or from the start if `overwrite`."""
        for table, counts, ids in zip(self.tables, self._counts, block_ids, strict=True):
            start = 0 if overwrite else counts[row]
            if ids:
                table.stage(row, start, ids)
            counts[row] = start + len(ids)

    def apply(self) -> None:
        """Bring the staged ids to the device."""
        for table in self.tables:
            table.apply()
