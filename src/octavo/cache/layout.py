"""Layouts: where the bytes of a token's K and V lie.

Owns the physical orders of the logical axes [layer, block, head, token, channel], the views over one backing buffer,
and the choice of one layout per engine. A channel axis holds K then V of one head. Does not know who owns a block or
which backend reads it. Invariants: every layer's view is [block, head, token, channel] with a contiguous channel axis;
the page of layer l and block b is contiguous, at l * layer_stride + b * block_stride, whatever the layout.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

_AXES = "LBHNC"
_LOG = logging.getLogger(__name__)


class CacheShape(NamedTuple):
    """Logical sizes: K and V of one head of one token are `num_channels` elements."""

    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    num_channels: int

    @property
    def page_numel(self) -> int:
        """Elements of one block of one layer."""
        return self.num_heads * self.block_size * self.num_channels


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A physical order of the logical axes, outermost first, named by their letters."""

    name: str

    @property
    def order(self) -> tuple[int, ...]:
        """The logical axes from outermost to innermost."""
        return tuple(map(_AXES.index, self.name))

    @property
    def layer_compact(self) -> bool:
        """Whether a layer's bytes lie together."""
        return self.name[0] == "L"

    @property
    def block_outermost(self) -> bool:
        """Whether one block of all layers is one run of bytes."""
        return self.name[0] == "B"

    @property
    def token_major(self) -> bool:
        """Whether a token's heads lie together; then any split of a block is a view of the same bytes."""
        return self.name.index("N") < self.name.index("H")

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Element strides of the logical axes for logical sizes `shape` = (L, B, H, N, C)."""
        strides, step = [0] * 5, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= shape[axis]
        return tuple(strides)

    def page_view(
        self, buffer: torch.Tensor, start: int, block_stride: int, shape: CacheShape, ratio: int = 1
    ) -> torch.Tensor:
        """[kernel blocks, H, N / ratio, C] of pages that begin at element `start` and lie `block_stride` apart.

        The j-th part of block b is kernel block b * kernel_stride + j. Blocks keep their pages at any ratio; inside a
        page the parts follow each other. Raises ValueError as `kernel_stride` does.
        """
        _, blocks, heads, tokens, channels = shape
        stride, part = kernel_stride(block_stride, shape.page_numel, ratio), shape.page_numel // ratio
        inner = self.strides((1, 1, heads, tokens // ratio, channels))[2:]
        size = ((blocks - 1) * stride + ratio, heads, tokens // ratio, channels)
        step = block_stride if ratio == 1 else part
        return buffer.as_strided(size, (step, *inner), buffer.storage_offset() + start)


def kernel_stride(block_stride: int, page_numel: int, ratio: int) -> int:
    """Kernel blocks from one block to the next where blocks, `block_stride` apart, are split in `ratio`.

    1 if they are not split. More than `ratio` where other layers' bytes lie between two blocks. Raises ValueError where
    these are no whole number of kernel blocks.
    """
    if ratio == 1:
        return 1
    part = page_numel // ratio
    if page_numel % ratio or block_stride % part:
        raise ValueError(
            f"blocks {block_stride} elements apart do not store pages of {page_numel} densely, so a block cannot be "
            f"split into {ratio} kernel blocks: set attention_config kernel_block_size to the block size, or another "
            "backend"
        )
    return block_stride // part


LAYOUTS = {name: Layout(name) for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")}
ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


def layout_by_name(name: str) -> Layout:
    """The layout called `name` or aliased so. Raises ValueError naming the known ones."""
    layout = LAYOUTS.get(ALIASES.get(name, name))
    if layout is None:
        raise ValueError(f"unknown cache layout {name!r}: known are {', '.join([*LAYOUTS, *ALIASES])}")
    return layout


def resolve_layout(
    supported: Mapping[str, Sequence[str]],
    *,
    requested: str | None = None,
    fixed: str | None = None,
    mixed_pages: bool = False,
) -> Layout:
    """The one layout of an engine.

    takes: per backend and connector the layouts that it takes, the preferred first. The choice is `fixed` if the
    engine has one, else the user's `requested`, else the first that everyone takes in the first participant's order.
    mixed_pages: groups whose pages differ in size share the pool, so the blocks of all layers must lie together.
    Raises ValueError, naming what each takes, if nothing satisfies all; a settled layout or a wish is never dropped.
    """
    stated = "; ".join(f"{name}: {', '.join(names)}" for name, names in supported.items())
    sets = [[layout_by_name(name).name for name in names] for names in supported.values()]
    common = [name for name in (sets[0] if sets else LAYOUTS) if all(name in names for names in sets)]
    if not common:
        raise ValueError(f"No KV cache layout satisfies every supported set ({stated}): change the attention backend")
    wished = None if requested is None else layout_by_name(requested)
    if mixed_pages:
        fitting = [name for name in common if not LAYOUTS[name].layer_compact]
        refused = wished.name if wished is not None and wished.layer_compact else None
        if refused or not fitting:
            raise ValueError(
                f"KV cache layout {refused or ', '.join(common)} cannot express this model's mixed page sizes: "
                "set kv_cache_layout to BLHNC or BLNHC, with a backend that takes it"
            )
        common = fitting
    if wished is not None and wished.name not in common:
        raise ValueError(
            f"kv_cache_layout={requested} does not satisfy every supported set ({stated}): valid "
            f"are {', '.join(common)}"
        )
    if fixed is not None:
        fixed = layout_by_name(fixed).name
        if (wished is not None and wished.name != fixed) or fixed not in common:
            wanted = wished.name if wished is not None else common[0]
            raise ValueError(f"KV cache layout is already resolved to {fixed}; cannot change it to {wanted}")
        return LAYOUTS[fixed]
    return wished or LAYOUTS[common[0]]


def block_rows(layout: Layout, buffer: torch.Tensor, num_blocks: int, num_pages: int) -> torch.Tensor:
    """The bytes of a flat `buffer` by blocks: uint8 [pages, num_blocks, row bytes], where [:, b] is block b, all of it.

    One page where the blocks of all layers lie together, else the `num_pages` of a block.
    """
    pages = 1 if layout.block_outermost else num_pages
    data = buffer.view(torch.uint8)
    return data.view(pages, num_blocks, data.numel() // (pages * num_blocks))


def extract_blocks(rows: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
    """A copy of whole blocks: uint8 [len(block_ids), bytes of a block in all layers]. rows: `block_rows`."""
    index = torch.as_tensor(block_ids, dtype=torch.int64, device=rows[0].device)
    return torch.cat([row[index] for row in rows], dim=1)


def inject_blocks(rows: torch.Tensor, block_ids: Sequence[int], data: torch.Tensor) -> None:
    """Write what `extract_blocks` gave to other blocks.

    With more ids than data the first ones are written, and a warning says so; more data than ids, or another width, is
    a ValueError, and nothing is written.
    """
    width = sum(row.shape[1] for row in rows)
    if data.ndim != 2 or data.shape[1] != width or len(data) > len(block_ids):
        raise ValueError(f"{tuple(data.shape)} bytes do not fit {len(block_ids)} blocks of {width} bytes each")
    if len(data) < len(block_ids):
        _LOG.warning("%d blocks were named and %d came: only the first ones are written", len(block_ids), len(data))
    index = torch.as_tensor(block_ids[: len(data)], dtype=torch.int64, device=rows[0].device)
    start = 0
    for row in rows:
        row[index] = data[:, start : start + row.shape[1]]
        start += row.shape[1]


def split_kv(view: torch.Tensor) -> torch.Tensor:
    """A layer's view [B, H, N, 2 * D] as (B, 2, N, H, D): K and V by `unbind(1)`. Zero-copy in every layout."""
    blocks, heads, tokens, channels = view.shape
    block, head, token, channel = view.stride()
    size = channels // 2
    return view.as_strided((blocks, 2, tokens, heads, size), (block, size * channel, token, head, channel))
