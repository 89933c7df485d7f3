"""The mapping between two caches: which bytes of a peer's blocks belong where in one's own.

Owns who of a peer's ranks gives which heads of which layers, which of its blocks are asked for, and the copies from
their rows to one's own. Pure functions of two descriptions; rows are bytes on the host. Tokens are counted from a
request's first one, so block sizes, layouts, kernel blocks and ranks of the two sides may differ in any way. Invariant:
each element of the tokens that are copied is written once, and no other byte of a row is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv_connector.peers.description import CacheDescription, GroupDescription

Bytes = npt.NDArray[np.uint8]  # rows of blocks: [blocks, block_bytes]
_MOST_ROOMS = 4  # that a batch may take to spare what comes twice
Place = tuple[int, int]  # a cache group, and a block's place in a request's list of it


class Part(NamedTuple):
    """Layers and heads that one peer gives: of one group there, for one group here."""

    source: int  # cache group there
    target: int  # cache group here
    layers: tuple[int, ...]
    first_head: int  # of the model's
    num_heads: int


class Tokens(NamedTuple):
    """Tokens `start` to `end` - 1 of a request."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Below 1: none."""
        return self.end - self.start


def divide(own: CacheDescription, peers: Sequence[CacheDescription]) -> list[list[Part]]:
    """What each peer gives, so that together they give all that `own` holds: each head of each layer comes from one.

    Of ranks that have the same head, the readers take one after the other. Raises ValueError for what nobody has.
    """
    runs: list[dict[tuple[int, int, int, int], list[int]]] = [{} for _ in peers]
    for target, group in enumerate(own.groups):
        for layer in group.layers:
            have = [(number, source) for number, peer in enumerate(peers) for source in _groups_of(peer, layer, group)]
            head, last = group.first_head, group.first_head + group.num_heads
            while head < last:
                able = [pair for pair in have if _has_head(peers[pair[0]].groups[pair[1]], head)]
                if not able:
                    raise ValueError(f"has nothing of KV head {head} of layer {layer}")
                number, source = able[own.rank % len(able)]
                giver = peers[number].groups[source]
                end = min(last, giver.first_head + giver.num_heads)
                runs[number].setdefault((source, target, head, end - head), []).append(layer)
                head = end
    return [
        [Part(source, target, tuple(layers), head, count) for (source, target, head, count), layers in own_runs.items()]
        for own_runs in runs
    ]


def _groups_of(cache: CacheDescription, layer: int, like: GroupDescription) -> list[int]:
    return [n for n, group in enumerate(cache.groups) if layer in group.layers and group.kind == like.kind]


def _has_head(group: GroupDescription, head: int) -> bool:
    return group.first_head <= head < group.first_head + group.num_heads


def batches(own: CacheDescription, peers: Sequence[CacheDescription], tokens: Tokens, room: int) -> Iterator[Tokens]:
    """`tokens` in ranges that no block of `own` crosses, each of about `room` bytes of the widest cache.

    No block of a peer either, and so none comes twice, unless block sizes with few common multiples would take much
    more room.
    """
    caches = (own, *peers)
    unit = _common_size(caches)
    if _bytes_of(caches, unit) > _MOST_ROOMS * room:
        unit = _common_size([own])
    step = unit * max(room // _bytes_of(caches, unit), 1)
    for start in range(tokens.start // unit * unit, tokens.end, step):
        yield Tokens(max(start, tokens.start), min(start + step, tokens.end))


def _common_size(caches: Sequence[CacheDescription]) -> int:
    return math.lcm(*(group.block_size for cache in caches for group in cache.groups))


def _bytes_of(caches: Sequence[CacheDescription], num_tokens: int) -> int:
    """Of so many tokens in the widest cache."""
    return max(
        sum(-(-num_tokens // group.block_size) * cache.block_bytes for group in cache.groups) for cache in caches
    )


def first_read(group: GroupDescription, position: int) -> int:
    """The first token that a query at `position` sees."""
    if group.window:
        return max(position - group.window + 1, 0)
    return position // group.chunk * group.chunk if group.chunk else 0


def span(group: GroupDescription, place: int, tokens: Tokens) -> Tokens:
    """Of the block at `place` those of `tokens`."""
    start = place * group.block_size
    return Tokens(max(start, tokens.start), min(start + group.block_size, tokens.end))


def needed_places(
    peer: CacheDescription, own: CacheDescription, parts: Sequence[Part], targets: Sequence[Place], tokens: Tokens
) -> list[Place]:
    """The blocks of a peer that have something of the blocks `targets` here, each once, within `tokens`."""
    found: dict[Place, None] = {}
    for part in parts:
        size = peer.groups[part.source].block_size
        for group, place in targets:
            if group == part.target:
                start, end = span(own.groups[group], place, tokens)
                found |= {(part.source, index): None for index in range(start // size, -(-end // size)) if start < end}
    return list(found)


def copy(
    peer: CacheDescription,
    own: CacheDescription,
    parts: Sequence[Part],
    sources: tuple[Sequence[Place], Bytes],
    targets: tuple[Sequence[Place], Bytes],
    tokens: Tokens,
) -> int:
    """Copy what `parts` say of `tokens` from the rows of a peer's blocks to rows of one's own: how many bytes.

    sources, targets: which blocks, and the row of each. Tokens of which no block is there are left out.
    """
    count = 0
    for part in parts:
        giver, taker = peer.groups[part.source], own.groups[part.target]
        rows = {place: row for row, (group, place) in enumerate(sources[0]) if group == part.source}
        wanted = [(place, row) for row, (group, place) in enumerate(targets[0]) if group == part.target]
        states = _states(giver, taker, rows, wanted, tokens)
        slots = [(giver.layers.index(layer), taker.layers.index(layer)) for layer in part.layers]
        by_kernel: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for source, target in slots:
            kernels = giver.kernel_block_sizes[source], taker.kernel_block_sizes[target]
            by_kernel.setdefault(kernels, []).append((source, target))
        for kernels, own_slots in by_kernel.items():
            pages = _Page.of(peer, giver, kernels[0]), _Page.of(own, taker, kernels[1])
            for cells in _cells(pages, states, part):
                for source, target in own_slots:
                    _view(targets[1], target, pages[1], cells.size)[cells.target_row, cells.target] = _view(
                        sources[1], source, pages[0], cells.size
                    )[cells.source_row, cells.source]
                count += len(own_slots) * len(cells.source) * cells.size
    return count


def num_bytes(own: CacheDescription, targets: Sequence[Place], tokens: Tokens) -> int:
    """Of `tokens` in these blocks, with all heads and layers that `own` holds."""
    count = 0
    for index, place in targets:
        group = own.groups[index]
        start, end = span(group, place, tokens)
        per = group.tokens_per_state
        num_states = max(-(-end // per) - start // per, 0)
        count += num_states * len(group.layers) * group.num_heads * group.head_bytes
    return count


class _States(NamedTuple):
    """States that are copied: [n] each."""

    source_row: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]  # place in the block there
    target_row: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]


def _states(
    giver: GroupDescription,
    taker: GroupDescription,
    rows: dict[int, int],
    wanted: Sequence[tuple[int, int]],
    tokens: Tokens,
) -> _States:
    """All states of `tokens` that both sides have, in order of the targets."""
    per = taker.tokens_per_state
    numbers, target_rows = [], []
    for place, row in wanted:
        start, end = span(taker, place, tokens)
        own = np.arange(start // per, max(-(-end // per), start // per), dtype=np.int64)
        numbers.append(own)
        target_rows.append(np.full(len(own), row, np.int64))
    states = np.concatenate(numbers or [np.empty(0, np.int64)])
    target_row = np.concatenate(target_rows or [np.empty(0, np.int64)])
    source_row = np.array([rows.get(place, -1) for place in (states // giver.size).tolist()], np.int64)
    there = source_row >= 0
    states = states[there]
    return _States(source_row[there], states % giver.size, target_row[there], states % taker.size)


class _Page(NamedTuple):
    """How the bytes of one layer lie in a block."""

    token_major: bool
    size: int  # states
    kernel: int  # states of a kernel block
    first_head: int
    num_heads: int
    head_bytes: int

    @classmethod
    def of(cls, cache: CacheDescription, group: GroupDescription, kernel_block_size: int) -> _Page:
        kernel = kernel_block_size // group.tokens_per_state
        if group.num_heads == 1:  # its tokens follow each other, however they are split
            kernel = group.size
        return cls(cache.token_major, group.size, kernel, group.first_head, group.num_heads, group.head_bytes)

    @property
    def run(self) -> int:
        """States of one head that follow each other."""
        if self.num_heads == 1:
            return self.size
        return 1 if self.token_major else self.kernel

    def offsets(self, places: npt.NDArray[np.int64], head: int) -> npt.NDArray[np.int64]:
        """Where a head's states lie in the page, in heads' bytes."""
        own = head - self.first_head
        if self.token_major:
            return places * self.num_heads + own
        part, inner = np.divmod(places, self.kernel)
        return (part * self.num_heads + own) * self.kernel + inner


class _Cells(NamedTuple):
    """Runs of `size` bytes that are copied in all layers alike: [n] rows, and [n] places of runs in their pages."""

    size: int
    source_row: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    target_row: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]


def _cells(pages: tuple[_Page, _Page], states: _States, part: Part) -> Iterator[_Cells]:
    """The longest runs that lie together on both sides: several states of a head, or several heads of a state."""
    source, target = pages
    count = part.num_heads
    length, width = math.gcd(source.run, target.run), 1
    if source.token_major and target.token_major and count > length:
        length, width = 1, count
    starts = np.arange(len(states.source))
    if length > 1:
        whole = _whole_runs(states, length)
        yield from _of_heads(pages, states, part, starts[whole], length, 1)
        single = np.ones(len(starts), bool)  # the ends, where a run is not whole
        single[(starts[whole][:, None] + np.arange(length)).ravel()] = False
        starts = starts[single]
    yield from _of_heads(pages, states, part, starts, 1, width)


def _whole_runs(states: _States, length: int) -> npt.NDArray[np.bool_]:
    """Which states begin a run of `length` on both sides, all of which are copied."""
    begins = states.target % length == 0  # and of the source: blocks of both begin at the first token
    last = np.arange(len(states.source)) + length - 1
    inside = last < len(states.source)
    last = np.minimum(last, max(len(states.source) - 1, 0))
    together = (
        (states.source[last] - states.source == length - 1)
        & (states.target[last] - states.target == length - 1)
        & (states.source_row[last] == states.source_row)
        & (states.target_row[last] == states.target_row)
    )
    return begins & inside & together


def _of_heads(
    pages: tuple[_Page, _Page], states: _States, part: Part, starts: npt.NDArray[np.int64], length: int, width: int
) -> Iterator[_Cells]:
    """Cells of `length` states by `width` heads that begin at `starts`."""
    if not len(starts):
        return
    source, target = pages
    size = length * width * source.head_bytes
    heads = range(part.first_head, part.first_head + part.num_heads, width)
    for head in heads:
        yield _Cells(
            size,
            states.source_row[starts],
            source.offsets(states.source[starts], head),
            states.target_row[starts],
            target.offsets(states.target[starts], head),
        )


def _view(rows: Bytes, slot: int, page: _Page, size: int) -> npt.NDArray[np.void]:
    """Runs of `size` bytes of a layer's pages, one at each place of a head and state: [blocks, places]."""
    width = page.num_heads * page.size * page.head_bytes
    shape = len(rows), (width - size) // page.head_bytes + 1
    return np.ndarray(shape, f"V{size}", rows, slot * width, (rows.strides[0], page.head_bytes))
