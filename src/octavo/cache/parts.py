"""Parts: how what a layer keeps whole, however large, lies in blocks that were sized by something else.

Owns the cut of a layer's tensors into parts of equal shape, and where a part lies. A state may be larger than a block,
or a small share of one: so an entry (one state of all layers of a group, or one block of tokens' inputs) takes several
blocks, a block holds several parts, and every block id means the same bytes to every group. Knows no layers by number
and no torch. Invariant: part p of layer s of an entry is the unit u = s * count + p; it lies in the entry's block
u // per_block, `unit_bytes` times u % per_block from the block's begin.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from octavo.cache.specs import StateTensor

ALIGNMENT = 128  # bytes: of a part's begin, and of each tensor in it
_MOST_PARTS = 4096  # of a layer
_FAIR_WASTE = 0.25  # beyond it a finer cut is looked for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The cut of one entry. Each tensor's leading `depth` axes, as one, are cut into `count` runs of equal length.

    The last run may be shorter: what is left of its part is never read.
    """

    tensors: tuple[StateTensor, ...] = ()  # of one layer
    count: int = 1  # of a layer's parts
    depth: int = 1
    per_block: int = 1  # parts in a block
    blocks: int = 1  # of an entry

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each tensor in one part: [run, *the axes that are not cut]."""
        return tuple(_part_shape(tensor, self.count, self.depth) for tensor in self.tensors)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from a part's begin to each tensor of it."""
        return _offsets(self.tensors, self.count, self.depth)[0]

    @property
    def unit_bytes(self) -> int:
        """Bytes from one part to the next."""
        return _offsets(self.tensors, self.count, self.depth)[1]

    def place(self, slot: int, part: int) -> tuple[int, int]:
        """Of the part of a group's `slot`-th layer: (the block among the entry's, the place in it)."""
        return divmod(slot * self.count + part, self.per_block)


WHOLE_BLOCKS = Parts()  # of groups whose entry is one block


def layer_bytes(tensors: Sequence[StateTensor]) -> int:
    """Bytes of one layer's tensors, without any gap."""
    return sum(tensor.num_bytes for tensor in tensors)


def least_block_bytes(tensors: Sequence[StateTensor]) -> int:
    """Bytes of a block that holds one layer's tensors whole."""
    return _offsets(tuple(tensors), 1, 1)[1]


def choose_parts(tensors: tuple[StateTensor, ...], num_layers: int, block_bytes: int) -> Parts:
    """The cut with which an entry of `num_layers` takes the fewest blocks of `block_bytes`; of such the fewest parts.

    Leading axes stay together where that wastes little: a head of a state is then one run of bytes. Raises ValueError
    for blocks that hold not even a single row of each tensor.
    """
    best: Parts | None = None
    for depth in range(1, max(len(tensor.shape) for tensor in tensors) + 1):
        found = _best_at(tensors, num_layers, block_bytes, depth)
        if found is not None and (best is None or found.blocks < best.blocks):
            best = found
        if best is not None and waste(best, num_layers, block_bytes) <= _FAIR_WASTE:
            return best
    if best is None:
        raise ValueError(
            f"blocks of {block_bytes} bytes are too small for what a layer keeps as a state "
            f"({layer_bytes(tensors)} bytes): raise block_size"
        )
    return best


def waste(parts: Parts, num_layers: int, block_bytes: int) -> float:
    """The share of an entry's bytes that nothing is stored in, 0 to 1."""
    return 1.0 - num_layers * layer_bytes(parts.tensors) / (parts.blocks * block_bytes)


def _best_at(tensors: tuple[StateTensor, ...], num_layers: int, block_bytes: int, depth: int) -> Parts | None:
    best: tuple[int, int, int] | None = None  # blocks, count, per_block
    most = min(max(math.prod(tensor.shape[:depth]) for tensor in tensors), _MOST_PARTS)
    for count in range(1, most + 1):
        per_block = block_bytes // _offsets(tensors, count, depth)[1]
        if per_block:
            found = (-(-num_layers * count // per_block), count, per_block)
            best = found if best is None else min(best, found)
    if best is None:
        return None
    blocks, count, per_block = best
    return Parts(tensors=tensors, count=count, depth=depth, per_block=per_block, blocks=blocks)


def _part_shape(tensor: StateTensor, count: int, depth: int) -> tuple[int, ...]:
    return -(-math.prod(tensor.shape[:depth]) // count), *tensor.shape[depth:]


def _offsets(tensors: tuple[StateTensor, ...], count: int, depth: int) -> tuple[tuple[int, ...], int]:
    """(per tensor its begin in a part, where the next part begins), in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        size = dataclasses.replace(tensor, shape=_part_shape(tensor, count, depth)).num_bytes
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(offsets), end
