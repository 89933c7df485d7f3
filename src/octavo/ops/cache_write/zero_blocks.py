"""Zeroing cache blocks that were just handed out, for operators that read bytes which nobody has written.

Owns the dispatch and the reference implementation. Does not know who owns a block or what its bytes mean. Invariant:
every byte of the named blocks becomes zero, and no other byte changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def zero_blocks(data: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Zero data[:, b] for each b of `block_ids`, in one launch on a GPU and without a wait.

    data: uint8 [pages, num_blocks, bytes of a page], contiguous.
    """
    if not len(block_ids):
        return
    if data.is_cuda:
        from octavo.ops.cache_write import zero_blocks_gpu

        zero_blocks_gpu.zero_blocks(data, block_ids)
        return
    zero_blocks_eager(data, block_ids)


def zero_blocks_eager(data: torch.Tensor, block_ids: Sequence[int]) -> None:
    """The reference implementation of `zero_blocks`, on any device."""
    index = torch.as_tensor(block_ids, dtype=torch.int64, device=data.device)
    data[:, index] = 0
