"""Mask rows of FlexAttention over the paged cache: their persistent buffers, and what a kernel over them is made for.

Owns plain data that `octavo.ops.flex` fills and folds, on a CPU or a GPU. Knows no mods, requests or layers. Invariant:
the buffers keep their addresses and shapes; only their values follow the batch.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

NULL_BLOCK = 0
MASK_BLOCK = 64  # keys that are told wholly or partly visible together, unless a user sets another number
NOWHERE = 1 << 30  # the position of a key that the cache has no block for: behind every request's end
MERGE_LEVELS = 6  # leaf i joins sum i % 2**6; the sums are added halves upon each other


def tokens_of(lines: int, group: int) -> int:
    """Queries of a tile: a power of two, so that a tile of any size lies in one query block of a larger one."""
    return 1 << ((lines // group).bit_length() - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What one compiled kernel is made for."""

    group: int  # heads of a KV head
    lines: int  # of a tile; line t * group + g is head g of the tile's t-th query; some may be left over
    block: int  # tokens of a kernel block of the cache
    stride: int  # kernel blocks from one block of the table to the next in the layer's token axis
    columns: int  # mask blocks of a leaf
    q_block: int  # queries by which mask blocks are told wholly visible from partly visible
    kv_block: int = MASK_BLOCK  # keys of a mask block, from a multiple of it on
    unit: int = 16  # keys that lie together wherever a kernel block begins: divides `block` and `kv_block`

    @property
    def tokens(self) -> int:
        """Queries of a tile. Tiles start at multiples of it."""
        return tokens_of(self.lines, self.group)

    @property
    def leaf(self) -> int:
        """Keys of a leaf."""
        return self.columns * self.kv_block

    @property
    def entry(self) -> int:
        """Numbers that a list has of a mask block: which one it is, and where its units lie."""
        return 1 + self.kv_block // self.unit

    @property
    def units(self) -> int:
        """Of the layer's token axis, from one block of the table to the next."""
        return self.stride * self.block // self.unit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Tests of rectangles that a kernel knows: keys up to the query, less than `window` back, in the query's chunk.

    prompts: [table rows] int32; keys up to the query, or of the first `prompts[row]`.
    """

    causal: bool
    window: int = 0  # 0: all
    chunk: int = 0  # 0: all
    exact: bool = True  # False: something else hides pairs as well, so no block is wholly visible
    prompts: torch.Tensor | None = dataclasses.field(default=None, compare=False)


class Kind(enum.Enum):
    """Rows of a batch that share a tile."""

    ALL = 1
    SINGLE = 2  # of one query
    LONG = 3  # of several


class MaskRows:
    """Persistent buffers of at most `capacity` mask rows: [capacity, ...] int32, at one address.

    partial_num, full_num: mask blocks of each kind; partial, full [capacity, 1, 1, (columns + 1) * entry]: per mask
    block its number in the request, then where its units lie, counted in units of the layer's token axis. A place below
    0 is the complement of one that may be read in its stead: the cache has no block there, and no key of it is seen.
    row: the request's table row; first: logical position of line 0; low, high: first and last position
    that is a query of this step (high < low: none); token: the token of `low` in the batch; length: of the request.
    """

    def __init__(self, capacity: int, shape: Geometry, device: torch.device) -> None:
        """Empty rows at first."""
        self.capacity, self.columns = max(capacity, 2), shape.columns
        lists = (self.capacity, 1, 1, (shape.columns + 1) * shape.entry)
        self.partial, self.full = (torch.zeros(lists, dtype=torch.int32, device=device) for _ in range(2))
        self.partial_num, self.full_num = (
            torch.zeros((self.capacity, 1, 1), dtype=torch.int32, device=device) for _ in range(2)
        )
        self.row, self.first, self.low, self.high, self.token, self.length = (
            torch.zeros(self.capacity, dtype=torch.int32, device=device) for _ in range(6)
        )
        self.ends = torch.zeros(self.capacity, dtype=torch.int32, device=device)  # scratch: where rows' tiles end

    def check(self, num: int) -> None:
        """Raises ValueError for more mask rows than there is room for."""
        if num > self.capacity:
            raise ValueError(
                f"{num} mask rows of {self.columns + 1} blocks exceed the buffers' {self.capacity}: the step is larger "
                "than max_num_seqs, max_num_batched_tokens or max_model_len, which size them"
            )
