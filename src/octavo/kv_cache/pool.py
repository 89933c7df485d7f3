"""KVCachePool: the cache as bytes.

Owns one backing allocation for all cache groups and the per-layer views of it. Does not know which request owns a
block: that is the scheduler's BlockPool. Invariant: block b of every group lies at the same bytes, so a block may pass
from one group to another; layer slot s of a block belongs to the s-th layer of whichever group holds the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.groups import CacheGroup
from octavo.kv_cache.kernel_blocks import BlockMap, group_kernel_blocks
from octavo.kv_cache.layout import CacheShape, Layout, block_rows, extract_blocks, inject_blocks

_INT32_MAX = 2**31 - 1


class KVCachePool:
    """`views[layer]` is [kernel blocks, num_kv_heads, kernel_block_size, channels]: K then V, or a latent state.

    `block_maps[g]` says which kernel blocks of the views of group g a block is.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        num_kv_heads: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        kernel_block_sizes: Sequence[int | None] = (),
    ) -> None:
        """Allocate. Fresh memory is not touched: bytes that no token has written are never read.

        kernel_block_sizes: per group, as `prepare_kernel_block_sizes` gives them; empty: blocks are not split.
        """
        num_slots = max(len(group.layers) for group in groups)
        shape = CacheShape(num_slots, num_blocks, num_kv_heads, groups[0].block_size, channels)
        self.layout, self.shape = layout, shape
        self.buffer = torch.empty(num_slots * num_blocks * shape.page_numel, dtype=dtype, device=device)
        self.pages = layout.pages(self.buffer, shape)  # [layer slots, num_blocks, page elements]
        self.block_maps = [_block_map(shape, layout, size) for size in kernel_block_sizes or [None] * len(groups)]
        num_layers = sum(len(group.layers) for group in groups)
        self.views: list[torch.Tensor] = [self.buffer] * num_layers
        self.group_of_layer: list[int] = [0] * num_layers
        for index, (group, block_map) in enumerate(zip(groups, self.block_maps, strict=True)):
            for slot, layer in enumerate(group.layers):
                self.views[layer] = layout.layer_view(self.buffer, shape, slot, block_map.ratio)
                self.group_of_layer[layer] = index

    def block_view(self, layer: int) -> torch.Tensor:
        """`views[layer]` by blocks: [num_blocks, r, heads, kernel block, channels], without the r where it is 1."""
        stride = self.block_maps[self.group_of_layer[layer]].stride
        return group_kernel_blocks(self.views[layer], self.shape.num_blocks, stride=stride)

    def rows(self) -> list[torch.Tensor]:
        """The cache as bytes, [num_blocks, row bytes]; see `block_rows`."""
        return block_rows(self.layout, self.buffer, self.shape)

    def extract(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A copy of whole blocks, uint8 [len(block_ids), bytes of a block]."""
        return extract_blocks(self.rows(), block_ids)

    def inject(self, block_ids: Sequence[int], data: torch.Tensor) -> None:
        """Write what `extract` gave to other blocks; see `inject_blocks`."""
        inject_blocks(self.rows(), block_ids, data)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero every byte of the blocks, for groups that read what they have not written."""
        if block_ids:
            self.pages[:, torch.as_tensor(block_ids, device=self.pages.device)] = 0


def _block_map(shape: CacheShape, layout: Layout, size: int | None) -> BlockMap:
    """Raises ValueError if kernel block ids do not fit block tables."""
    if size is None:
        return BlockMap(kernel_block_size=shape.block_size)
    ratio = shape.block_size // size
    assert ratio * size == shape.block_size, f"kernel blocks of {size} do not divide blocks of {shape.block_size}"
    stride = layout.kernel_stride(shape.num_layers, ratio)
    if shape.num_blocks * stride > _INT32_MAX:
        raise ValueError(
            f"{shape.num_blocks} blocks of {stride} kernel blocks each pass the {_INT32_MAX} that a block table can "
            "name: lower num_gpu_blocks_override or raise kernel_block_size"
        )
    return BlockMap(kernel_block_size=size, ratio=ratio, stride=stride)
