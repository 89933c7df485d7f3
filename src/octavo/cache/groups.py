"""Cache groups: which layers share a block table, and what a block holds of them.

Owns CacheGroup, the rule that deals a model's layers into groups, and the block sizes that bring the groups' pages to
one size. Layers of a group keep the same of a sequence (all tokens, a window, a chunk, one recurrent state), so one
block table serves them. All groups draw from one pool: a block has the bytes of the group that needs most, and block id
b means the same bytes to every group. Does not know who owns which block. Invariants: every layer is in exactly one
group; the block sizes of a model's groups divide each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from octavo.checkpoint.arch import Arch

WHOLE = 1 << 30  # block size of a group whose one block is a request's state, however long the request
KINDS = ("full", "sliding", "chunked", "mla", "mamba", "encoder_only")
_ALIGNMENT = 256  # bytes: of recurrent states, and of blocks whose pages differ in size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that share one block table. `layers[s]` uses the s-th page of a block."""

    kind: str  # one of KINDS
    window: int = 0  # sliding: tokens that a query sees, itself included
    chunk: int = 0  # chunked: a query at p sees tokens p // chunk * chunk .. p
    block_size: int  # tokens per manager block; WHOLE where blocks are not made of tokens
    layers: tuple[int, ...]
    num_heads: int = 1  # KV heads
    num_channels: int = 1  # elements of one head and state: K then V, or mla's one latent and its key
    tokens_per_state: int = 1  # tokens that one stored state stands for: more than 1 in compressed caches
    state_bytes: int = 0  # mamba: of one layer and request
    zero_fresh_blocks: bool = False  # for operators that read bytes that nobody has written

    @property
    def states_per_block(self) -> int:
        """Stored states of a block, one per token unless they are compressed."""
        return self.block_size // self.tokens_per_state

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one block of one layer. itemsize: of a cached element; recurrent state has its own."""
        if self.kind == "encoder_only":
            return 0
        if self.state_bytes:
            return _round_up(self.state_bytes, _ALIGNMENT)
        return self.num_heads * self.states_per_block * self.num_channels * itemsize

    def num_blocks(self, num_tokens: int) -> int:
        """Entries of a request's block list that `num_tokens` tokens need."""
        return 0 if self.kind == "encoder_only" else -(-num_tokens // self.block_size)


class TableSpec(NamedTuple):
    """A block table: the layers of one cache group that one backend serves, and what it counts in."""

    group: int  # index of the cache group
    layers: tuple[int, ...]
    kernel_block_size: int | None  # tokens; None: the layers keep nothing
    backend: str = ""


def table_of_each(groups: Sequence[CacheGroup], sizes: Sequence[int | None] = ()) -> list[TableSpec]:
    """One table per group. sizes: their kernel block sizes (default: blocks are not split)."""
    return [
        TableSpec(index, group.layers, size)
        for index, (group, size) in enumerate(zip(groups, sizes or [g.block_size for g in groups], strict=True))
    ]


def make_groups(arch: Arch, block_size: int, itemsize: int = 2) -> tuple[CacheGroup, ...]:
    """Deal the layers of `arch` into groups, full attention first. itemsize: bytes of a cached element.

    Layers that keep the same form a class. The smallest class sets the group size (so that few pages of a block stay
    empty) unless the largest class is at most half as large again: then one group per class wastes less. Layers of a
    class are dealt round robin. Raises ValueError for states that cannot be cut at `block_size` tokens.
    """
    classes: dict[CacheGroup, list[int]] = {}
    for layer in range(arch.num_layers):
        classes.setdefault(_class_of(arch, layer, block_size), []).append(layer)
    cached = [len(layers) for kind, layers in classes.items() if kind.kind != "encoder_only"] or [arch.num_layers]
    size = max(cached) if max(cached) * 2 <= min(cached) * 3 else min(cached)
    groups = []
    for kind in sorted(classes, key=lambda kind: (KINDS.index(kind.kind), kind.window, kind.chunk)):
        layers = classes[kind]
        num_groups = 1 if kind.kind == "encoder_only" else -(-len(layers) // size)
        groups += [dataclasses.replace(kind, layers=tuple(layers[first::num_groups])) for first in range(num_groups)]
    return unify_page_sizes(groups, itemsize)


def _class_of(arch: Arch, layer: int, block_size: int) -> CacheGroup:
    """The group of one layer, without its layers."""
    facts = arch.layers[layer]
    if facts.state_bytes:
        return CacheGroup(
            kind="mamba", block_size=WHOLE, layers=(), state_bytes=facts.state_bytes, zero_fresh_blocks=True
        )
    if not facts.causal:
        return CacheGroup(kind="encoder_only", block_size=WHOLE, layers=())
    if block_size % facts.tokens_per_state:
        raise ValueError(
            f"block_size={block_size} must be a multiple of tokens_per_state={facts.tokens_per_state} of layer {layer}"
        )
    plain = "mla" if arch.latent else "full"
    return CacheGroup(
        kind="sliding" if facts.window else "chunked" if facts.chunk else plain,
        window=facts.window,
        chunk=facts.chunk,
        block_size=block_size,
        layers=(),
        num_heads=arch.num_kv_heads,
        num_channels=arch.cache_channels,
        tokens_per_state=facts.tokens_per_state,
    )


def unify_page_sizes(groups: Sequence[CacheGroup], itemsize: int) -> tuple[CacheGroup, ...]:
    """Let blocks of small pages hold more tokens: twice as many until the page would pass the largest one.

    Pages that still differ afterwards need a layout in which the layers of a block lie together.
    """
    largest = max(group.page_bytes(itemsize) for group in groups)
    unified = []
    for group in groups:
        size, page = group.block_size, group.page_bytes(itemsize)
        while group.kind not in ("mamba", "encoder_only") and 2 * page <= largest:
            size, page = 2 * size, 2 * page
        unified.append(dataclasses.replace(group, block_size=size))
    return tuple(unified)


def pages_differ(groups: Sequence[CacheGroup], itemsize: int) -> bool:
    """Whether the groups' pages have more than one size."""
    return len({group.page_bytes(itemsize) for group in groups if group.kind != "encoder_only"}) > 1


def block_bytes(groups: Sequence[CacheGroup], itemsize: int) -> int:
    """Bytes of one block: the pages of the group that needs most."""
    largest = max(len(group.layers) * group.page_bytes(itemsize) for group in groups)
    return _round_up(largest, _ALIGNMENT) if pages_differ(groups, itemsize) else largest


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
