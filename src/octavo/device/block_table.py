"""BlockTables: the device's block tables, one per cache group and backend.

Owns, per table, the kernel block ids of every row in logical order, and how many are live. Blocks come in and are split
where they are staged, so a step does no work for it. Does not know which blocks are free. Invariant: the first `count`
entries of a row are its kernel blocks; entries beyond are garbage and never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from octavo.cache.groups import CacheGroup
from octavo.cache.kernel_blocks import BlockMap
from octavo.device.staging import Queue, StagedTensor
from octavo.plan import IntArray, NewBlocks, StepLimits


class BlockTables:
    """`tables[t].data` is [max_num_rows + 1, max kernel blocks] int32; `block_sizes[t]` is the kernel block size.

    The last row is the null row: it holds zeros.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: StepLimits,
        *,
        device: torch.device,
        block_maps: Sequence[BlockMap] = (),
        sources: Sequence[int] = (),
        queue: Queue,
    ) -> None:
        """Sized for `max_model_len` tokens per row.

        sources: per table its cache group (default: one table each); block_maps: per table (default: blocks are not
        split).
        """
        self._sources = list(sources) or list(range(len(groups)))
        groups = [groups[source] for source in self._sources]
        self._maps = list(block_maps) or [BlockMap(kernel_block_size=group.block_size) for group in groups]
        # tables whose rows a step gathers: those of attention, which come first; others are read by row where they are
        self.num_gathered = sum(group.is_attention for group in groups)
        assert all(group.is_attention for group in groups[: self.num_gathered]), "tables of attention come first"
        self.block_sizes = [block_map.kernel_block_size for block_map in self._maps]
        self._widths = [
            max(group.num_blocks(limits.max_model_len) * block_map.ratio, 1)
            for group, block_map in zip(groups, self._maps, strict=True)
        ]
        num_rows = limits.max_num_rows + 1
        self.tables = [StagedTensor(num_rows, width, torch.int32, device, queue) for width in self._widths]
        self._counts = [np.zeros(limits.max_num_rows, np.int64) for _ in groups]

    def begin(self, rows: IntArray, block_ids: Sequence[Sequence[Sequence[int]]]) -> None:
        """Stage the blocks of rows, from their start: block_ids[i], per group, are those of rows[i].

        Raises RuntimeError, and stages nothing for that group and those after it, where they do not fit a row.
        """
        for index, source in enumerate(self._sources):
            ids = [self._maps[index].expand(own[source]) for own in block_ids]
            counts = np.array([*map(len, ids)])
            longest = int(counts.argmax())
            self._check_width(index, int(rows[longest]), int(counts[longest]))
            some, all_ids = counts > 0, np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(counts.sum()))
            if len(all_ids):
                self.tables[index].stage_lines(rows[some], counts[some], all_ids)
            self._counts[index][rows] = counts

    def extend(self, new_blocks: Sequence[NewBlocks]) -> None:
        """Stage what a plan appends to rows that are there: per group, or nothing at all.

        Raises RuntimeError, and stages nothing for that group and those after it, where it does not fit a row.
        """
        if not new_blocks:
            return
        for index, source in enumerate(self._sources):
            new = new_blocks[source]
            if not len(new.rows):
                continue
            block_map, counts = self._maps[index], self._counts[index]
            rows, ids = new.rows, new.block_ids
            if block_map.ratio > 1:
                rows = np.repeat(rows, block_map.ratio)
                ids = np.array(block_map.expand(ids.tolist()))
            begins, lengths = rows[1:] != rows[:-1], None  # pairs of a row are neighbours
            if np.count_nonzero(begins) < len(begins):
                firsts = np.concatenate(([0], begins.nonzero()[0] + 1))
                lengths, rows = np.diff(firsts, append=len(rows)), rows[firsts]
            starts = counts[rows]
            ends = starts + (1 if lengths is None else lengths)
            longest = int(ends.argmax())
            self._check_width(index, int(rows[longest]), int(ends[longest]))
            if lengths is None:
                self.tables[index].stage_each(rows, starts, ids)
            else:
                self.tables[index].stage_lines(rows, lengths, ids, starts)
            counts[rows] = ends

    def _check_width(self, index: int, row: int, end: int) -> None:
        width = self._widths[index]
        if end > width:
            raise RuntimeError(
                f"Block table write for row {row}, group {self._sources[index]} exceeds row capacity ({end} > {width})"
            )
