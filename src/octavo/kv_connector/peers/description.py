"""CacheDescription: what one engine, or one of its ranks, tells another of its cache, so that blocks can pass.

Owns what is told (where K and V of a layer, a head and a token lie in a block) and what two sides must have in common.
Heads and layers are counted in the whole model, so a rank says which of them it has. Knows no memory and no torch.
Invariant: the bytes of an element have one place in a block, which follows from the description alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from octavo.cache.groups import CacheGroup, TableSpec


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table. Block b of layer `layers[s]` is the s-th page of block b."""

    kind: str  # of CacheGroup
    block_size: int  # tokens
    tokens_per_state: int = 1  # tokens that one K and V stands for
    window: int = 0
    chunk: int = 0
    layers: list[int]
    kernel_block_sizes: list[int]  # tokens, of each layer
    first_head: int = 0  # of the model's
    num_heads: int
    total_heads: int  # of the model
    head_bytes: int  # of K and V of one head and state
    parts: str = ""  # how entries of states and inputs lie in blocks

    @property
    def size(self) -> int:
        """States of a block."""
        return self.block_size // self.tokens_per_state

    @property
    def page_bytes(self) -> int:
        """Of a block in one layer."""
        return self.num_heads * self.size * self.head_bytes


class CacheDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one worker."""

    layout: str
    block_bytes: int
    groups: list[GroupDescription]
    facts: dict[str, str]  # what the bits of K and V follow from, beside tokens: name -> value
    rank: int = 0
    num_ranks: int = 1  # of the engine: all of them fetch what one of its requests needs

    @property
    def token_major(self) -> bool:
        """Whether a token's heads lie together in a page."""
        return self.layout.index("N") < self.layout.index("H")


NO_DESCRIPTION = CacheDescription(layout="LBNHC", block_bytes=0, groups=[], facts={})  # of a cache that is not told of


_MOST = (1 << 31) - 1
_LEAST = {
    "block_size": 1,
    "tokens_per_state": 1,
    "window": 0,
    "chunk": 0,
    "first_head": 0,
    "num_heads": 1,
    "total_heads": 1,
    "head_bytes": 1,
}


def heads_of_rank(total_heads: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First and number of the KV heads of a tensor-parallel rank: one that others have too where there are too few."""
    if total_heads >= num_ranks:
        count = total_heads // num_ranks
        return rank * count, count
    return rank * total_heads // num_ranks, 1


def describe(
    groups: Sequence[CacheGroup],
    tables: Sequence[TableSpec],
    layout: str,
    *,
    block_bytes: int,
    itemsize: int,
    facts: Mapping[str, str],
    rank: int = 0,
    num_ranks: int = 1,
) -> CacheDescription:
    """The cache of a rank. groups: the whole model's; block_bytes: the rank's; itemsize: of a cached element."""
    sizes: dict[int, int] = {}
    for table in tables:
        sizes |= dict.fromkeys(table.layers, table.kernel_block_size or 0)
    described = []
    for group in groups:
        first, count = heads_of_rank(group.num_heads, rank, num_ranks)
        described.append(
            GroupDescription(
                kind=group.kind,
                block_size=group.block_size,
                tokens_per_state=group.tokens_per_state,
                window=group.window,
                chunk=group.chunk,
                layers=list(group.layers),
                kernel_block_sizes=[sizes[layer] for layer in group.layers],
                first_head=first,
                num_heads=count,
                total_heads=group.num_heads,
                head_bytes=group.num_channels * itemsize,
                parts="" if group.is_attention else repr(group.parts),
            )
        )
    return CacheDescription(
        layout=layout, block_bytes=block_bytes, groups=described, facts=dict(facts), rank=rank, num_ranks=num_ranks
    )


def differences(theirs: CacheDescription, own: CacheDescription) -> list[str]:
    """What keeps blocks of one cache from being used in the other, each with both values; empty: nothing."""
    found = []
    for name in {**own.facts, **theirs.facts}:
        their_value, own_value = theirs.facts.get(name, "nothing"), own.facts.get(name, "nothing")
        if their_value != own_value:
            found.append(f"its {name} is {their_value!r}, yours {own_value!r}")
    theirs_of = {layer: group for group in theirs.groups if not group.parts for layer in group.layers}
    for group in own.groups:
        for layer in group.layers if not group.parts else ():
            other = theirs_of.get(layer, group)
            for what in ("kind", "head_bytes", "total_heads", "tokens_per_state", "window", "chunk"):
                if getattr(other, what) != getattr(group, what):
                    found.append(f"its {what} of layer {layer} is {getattr(other, what)}, yours {getattr(group, what)}")
    if any(group.parts for group in own.groups) and not has_same_rows(theirs, own):
        limit = "and what layers keep as states passes only where these are equal"
        found.append(f"its cache is {_shown(theirs)}, yours {_shown(own)}, {limit}")
    return found


def flaws(cache: CacheDescription) -> list[str]:
    """What of a description that a peer tells can be true of no cache; empty: nothing."""
    found = []
    if sorted(cache.layout) != sorted(NO_DESCRIPTION.layout):
        found.append(f"its layout is {cache.layout[:20]!r}")
    if not 0 <= cache.rank < cache.num_ranks:
        found.append(f"its rank is {cache.rank} of {cache.num_ranks}")
    if not cache.groups:
        found.append("its cache has no group of layers")
    for number, group in enumerate(cache.groups):
        for name, low in _LEAST.items():
            value = getattr(group, name)
            if not low <= value <= _MOST:
                found.append(f"its {name} of group {number} is {value}: must be from {low} to {_MOST}")
        if found:
            return found
        if group.block_size % group.tokens_per_state:
            found.append(f"its block_size of group {number} is {group.block_size}, of {group.tokens_per_state} a state")
        if group.first_head + group.num_heads > group.total_heads:
            found.append(f"its heads of group {number} end beyond its {group.total_heads}")
        found += _flaws_of_layers(cache, group, number)
    return found


def _flaws_of_layers(cache: CacheDescription, group: GroupDescription, number: int) -> list[str]:
    """Of the pages of a block."""
    if not group.layers or len(set(group.layers)) < len(group.layers):
        return [f"its layers of group {number} are none, or one stands there twice"]
    kernels = group.kernel_block_sizes
    if (
        len(kernels) != len(group.layers)
        or min(kernels) < 0
        or any(size and group.block_size % size for size in kernels)
    ):
        return [f"its kernel_block_sizes of group {number} do not divide its block_size, {group.block_size}"]
    pages = len(group.layers) * group.page_bytes
    if not group.parts and not pages <= cache.block_bytes <= _MOST:
        return [f"its block_bytes are {cache.block_bytes}, and group {number} has {pages} in a block"]
    return []


def _shown(cache: CacheDescription) -> str:
    sizes = dict.fromkeys(group.block_size for group in cache.groups)
    kernels = dict.fromkeys(size for group in cache.groups for size in group.kernel_block_sizes if size)
    shown = [", ".join(map(str, found)) for found in (sizes, kernels)]
    text = f"of layout {cache.layout}, blocks of {shown[0]} and kernel blocks of {shown[1]} tokens"
    return text + f" on {cache.num_ranks} ranks" * (cache.num_ranks > 1)


def has_same_rows(theirs: CacheDescription, own: CacheDescription) -> bool:
    """Whether a block's bytes, page by page, mean the same in both: then blocks pass as they are.

    Whether the pages of a block lie together or apart does not matter.
    """
    return (theirs.block_bytes, _rows(theirs)) == (own.block_bytes, _rows(own))


def _rows(cache: CacheDescription) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for group in cache.groups:
        one_head = group.num_heads == 1  # then neither the order of heads and tokens nor a split of blocks shows
        split = (0, *([] if one_head or cache.token_major else group.kernel_block_sizes))
        order = True if one_head else cache.token_major
        rows.append((order, split, msgspec.structs.replace(group, kernel_block_sizes=[])))
    return rows
