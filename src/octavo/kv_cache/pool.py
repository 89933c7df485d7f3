"""KVCachePool: the cache as bytes.

Owns one backing allocation for all cache groups and the per-layer views of it. Does not know which request owns a
block: that is the scheduler's BlockPool. Invariant: block b of every group lies at the same bytes, so a block may pass
from one group to another; layer slot s of a block belongs to the s-th layer of whichever group holds the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.groups import CacheGroup
from octavo.kv_cache.layout import Layout


class KVCachePool:
    """`views[layer]` is [num_blocks, num_kv_heads, block_size, 2 * head_size], K then V along the last axis."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
    ) -> None:
        """Allocate. Fresh memory is not touched: bytes that no token has written are never read."""
        num_slots = max(len(group.layers) for group in groups)
        shape = (num_slots, num_blocks, num_kv_heads, groups[0].block_size, 2 * head_size)
        numel = num_slots * num_blocks * num_kv_heads * groups[0].block_size * 2 * head_size
        self.layout = layout
        self.cache = layout.view(torch.empty(numel, dtype=dtype, device=device), shape)
        self.views: list[torch.Tensor] = [self.cache[0]] * sum(len(group.layers) for group in groups)
        self.group_of_layer: list[int] = [0] * len(self.views)
        for index, group in enumerate(groups):
            for slot, layer in enumerate(group.layers):
                self.views[layer] = self.cache[slot]
                self.group_of_layer[layer] = index

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero every byte of the blocks, for groups that read what they have not written."""
        if block_ids:
            self.cache[:, torch.as_tensor(block_ids, device=self.cache.device)] = 0
