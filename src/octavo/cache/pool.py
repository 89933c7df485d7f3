"""KVCachePool: the cache as bytes.

Owns one backing allocation for all cache groups and the per-layer views of it. Does not know which request owns a
block: that is the scheduler's BlockPool. Invariant: block b of every group lies at the same bytes, so a block may pass
from one group to another; page s of a block belongs to the s-th layer of whichever group of attention holds the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from octavo.cache.groups import CacheGroup, TableSpec, block_bytes, pages_differ, table_of_each
from octavo.cache.kernel_blocks import BlockMap, group_kernel_blocks, states_per_block
from octavo.cache.layout import CacheShape, Layout, block_rows, extract_blocks, inject_blocks, kernel_stride
from octavo.cache.parts import Parts

_INT32_MAX = 2**31 - 1


class PartsView(NamedTuple):
    """What one layer keeps in a group of states, or of their inputs; see `octavo.cache.parts`.

    `tensors[t][b, i]` is the t-th tensor's run in the i-th part of block b: [num_blocks, parts in a block, run, ...].
    """

    tensors: tuple[torch.Tensor, ...]
    parts: Parts
    slot: int  # the layer's among those of its group
    table: int  # its block table

    def places(self) -> list[tuple[int, int]]:
        """Of each part of the layer: (the block among an entry's, the place in it)."""
        return [self.parts.place(self.slot, part) for part in range(self.parts.count)]


class KVCachePool:
    """`views[layer]` of an attention layer is [kernel blocks, heads, states of a kernel block, channels].

    The channels are K then V of one head; a latent (mla) layer has one head, and its latent then its key as channels.
    A state is a token, unless the group compresses several into one. A layer that keeps nothing, or no K and V, has an
    empty view; `states[layer]` and `inputs[layer]` are those of a layer with states. `block_maps[t]` says which kernel
    blocks of the views of table t a block is; `group_of_layer[layer]` is the table of a layer that attends, else -1.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        tables: Sequence[TableSpec] = (),
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        """Allocate. Fresh memory is not touched: bytes that no token has written are never read.

        tables: as `choose_tables` gives them; empty: one per group, blocks are not split. allocate: whose memory it is,
        on `device`; None: torch's. Raises ValueError where blocks cannot be split so, and where their pages differ in
        size and `layout` keeps a layer's pages together.
        """
        itemsize = dtype.itemsize
        if pages_differ(groups, itemsize) and not layout.block_outermost:
            raise ValueError(
                f"KV cache layout {layout.name} cannot express this model's mixed page sizes: "
                "set kv_cache_layout to BLHNC or BLNHC"
            )
        self.layout, self.num_blocks = layout, num_blocks
        self.block_bytes = block_bytes(groups, itemsize)
        # of a block; of use where all have one size
        attention = [group for group in groups if group.is_attention and group.kind != "encoder_only"]
        self.num_pages = max((len(group.layers) for group in attention), default=1)
        shape = (num_blocks * self.block_bytes // itemsize,)
        self.buffer = allocate(shape, dtype) if allocate else torch.empty(shape, dtype=dtype, device=device)
        num_layers = 1 + max(layer for group in groups for layer in group.layers)
        self.views: list[torch.Tensor] = [self.buffer[:0]] * num_layers
        self.states: dict[int, PartsView] = {}
        self.inputs: dict[int, PartsView] = {}
        self.group_of_layer: list[int] = [-1] * num_layers
        self.tables = tuple(tables or table_of_each(groups))
        self.block_maps = [self._bind(index, groups[table.group], table) for index, table in enumerate(self.tables)]

    def _bind(self, index: int, group: CacheGroup, table: TableSpec) -> BlockMap:
        """Make the views of a table's layers."""
        if not group.is_attention:
            views = self.states if group.kind == "state" else self.inputs
            for slot, layer in enumerate(group.layers):
                views[layer] = PartsView(self._part_tensors(group.parts), group.parts, slot, index)
            return BlockMap(kernel_block_size=group.block_size)
        for layer in table.layers:
            self.group_of_layer[layer] = index
        size = table.kernel_block_size
        if size is None or group.kind == "encoder_only":
            return BlockMap(kernel_block_size=group.block_size)
        itemsize = self.buffer.itemsize
        page = group.page_bytes(itemsize)
        together = self.layout.block_outermost
        block_stride = self.block_bytes if together else page
        layer_stride = page if together else page * self.num_blocks
        states_per_block(size, group.tokens_per_state)
        ratio = group.block_size // size
        assert ratio * size == group.block_size, f"kernel blocks of {size} do not divide blocks of {group.block_size}"
        shape = CacheShape(1, self.num_blocks, group.num_heads, group.states_per_block, group.num_channels)
        stride = kernel_stride(block_stride // itemsize, shape.page_numel, ratio)
        if self.num_blocks * stride > _INT32_MAX:
            raise ValueError(
                f"{self.num_blocks} blocks of {stride} kernel blocks each pass the {_INT32_MAX} that a block table can "
                "name: lower num_gpu_blocks_override or raise kernel_block_size"
            )
        for layer in table.layers:
            start = group.layers.index(layer) * layer_stride // itemsize
            self.views[layer] = self.layout.page_view(self.buffer, start, block_stride // itemsize, shape, ratio)
        return BlockMap(kernel_block_size=size, ratio=ratio, stride=stride)

    def _part_tensors(self, parts: Parts) -> tuple[torch.Tensor, ...]:
        """Per tensor of a layer, the same for all layers: [num_blocks, parts in a block, run, *what is not cut]."""
        found = []
        for tensor, shape, offset in zip(parts.tensors, parts.shapes, parts.offsets, strict=True):
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            strides = (self.block_bytes // dtype.itemsize, parts.unit_bytes // dtype.itemsize, *steps)
            size = (self.num_blocks, parts.per_block, *shape)
            data = self.buffer.view(torch.uint8).view(dtype)
            found.append(data.as_strided(size, strides, offset // dtype.itemsize))
        return tuple(found)

    def block_view(self, layer: int) -> torch.Tensor:
        """`views[layer]` by blocks: [num_blocks, r, heads, kernel block, channels], without the r where it is 1."""
        stride = self.block_maps[self.group_of_layer[layer]].stride
        return group_kernel_blocks(self.views[layer], self.num_blocks, stride=stride)

    @property
    def data(self) -> torch.Tensor:
        """The cache as bytes, [pages, num_blocks, bytes of a page]; see `block_rows`."""
        return block_rows(self.layout, self.buffer, self.num_blocks, self.num_pages)

    def extract(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A copy of whole blocks, uint8 [len(block_ids), bytes of a block]."""
        return extract_blocks(self.data, block_ids)

    def inject(self, block_ids: Sequence[int], data: torch.Tensor) -> None:
        """Write what `extract` gave to other blocks; see `inject_blocks`."""
        inject_blocks(self.data, block_ids, data)
