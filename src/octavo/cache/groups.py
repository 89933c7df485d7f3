"""Cache groups: which layers share a block table, and what a block holds of them.

Owns CacheGroup, the rule that deals a model's layers into groups by what their specs say, and the block sizes that
bring the pages of attention to one size. Layers of a group keep the same of a sequence (all tokens, a window, a chunk,
states at the borders of chunks), so one block table serves them. All groups draw from one pool: a block has the bytes
of the attention group that needs most, and block id b means the same bytes to every group. An entry is what one step of
`block_size` tokens needs of a group: one block, or for states and their inputs several (`octavo.cache.parts`). Does not
know who owns which block. Invariants: a layer of attention is in exactly one group, one with a state in the two of its
state and of its inputs, one that keeps nothing in none; the block sizes of a model's groups divide each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.parts import WHOLE_BLOCKS, Parts, choose_parts, least_block_bytes
from octavo.cache.specs import AttentionSpec, LayerSpec, StateSpec, StateTensor

KINDS = ("full", "sliding", "chunked", "mla", "encoder_only", "inputs", "state")
_ALIGNMENT = 256  # bytes: of blocks whose pages differ in size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that share one block table. Of attention, `layers[s]` uses the s-th page of a block."""

    kind: str  # one of KINDS
    window: int = 0  # sliding: tokens that a query sees, itself included
    chunk: int = 0  # chunked: a query at p sees tokens p // chunk * chunk .. p; inputs: the chunk of their states
    block_size: int  # tokens per entry; state: from one border at which there may be a state to the next
    layers: tuple[int, ...]
    num_heads: int = 1  # KV heads
    num_channels: int = 1  # elements of one head and token: K then V, or mla's one latent and its key
    tokens_per_state: int = 1  # tokens that one stored K and V stands for: more than 1 in compressed caches
    parts: Parts = WHOLE_BLOCKS  # state, inputs: how an entry lies in blocks
    unit: int = 1  # state: an entry's blocks are reserved when the last so many tokens before its border begin
    interval: int = 1  # state: every so manieth border is kept to be found again; 0: the last ones of a request
    zero_fresh_blocks: bool = False  # for operators that read bytes that nobody has written

    @property
    def is_attention(self) -> bool:
        """Whether an attention backend serves it."""
        return self.kind not in ("inputs", "state")

    @property
    def states_per_block(self) -> int:
        """Stored K and V of a block, one per token unless they are compressed."""
        return self.block_size // self.tokens_per_state

    def page_bytes(self, itemsize: int) -> int:
        """Of attention: bytes of one block of one layer. itemsize: of a cached element."""
        if self.kind == "encoder_only":
            return 0
        return self.num_heads * self.states_per_block * self.num_channels * itemsize

    def used_bytes(self, itemsize: int) -> int:
        """Bytes that it needs of a block."""
        if not self.is_attention:
            return self.parts.per_block * self.parts.unit_bytes
        return len(self.layers) * self.page_bytes(itemsize)

    def num_entries(self, num_tokens: int) -> int:
        """Entries of a request's table that `num_tokens` tokens need."""
        if self.kind == "encoder_only":
            return 0
        if self.kind == "state":
            return -(-num_tokens // self.unit) * self.unit // self.block_size
        return -(-num_tokens // self.block_size)

    def num_written(self, num_tokens: int) -> int:
        """Blocks of a request's list that `num_tokens` tokens have written, null blocks among them."""
        state = self.kind == "state"
        return num_tokens // self.block_size * self.parts.blocks if state else self.num_blocks(num_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of a request's list that `num_tokens` tokens need, null blocks among them."""
        return self.num_entries(num_tokens) * self.parts.blocks


class TableSpec(NamedTuple):
    """A block table: the layers of one cache group that one backend serves, and what it counts in."""

    group: int  # index of the cache group
    layers: tuple[int, ...]
    kernel_block_size: int | None  # tokens; None: no attention kernel reads it
    backend: str = ""  # empty: a table of states or of their inputs


def table_of_each(groups: Sequence[CacheGroup], sizes: Sequence[int | None] = ()) -> list[TableSpec]:
    """One table per group. sizes: their kernel block sizes (default: blocks are not split)."""
    return [
        TableSpec(index, group.layers, size if group.is_attention else None)
        for index, (group, size) in enumerate(zip(groups, sizes or [g.block_size for g in groups], strict=True))
    ]


def make_groups(
    specs: Sequence[LayerSpec],
    block_size: int,
    itemsize: int = 2,
    *,
    snapshot_interval: int = 1,
    drafts: bool = False,
) -> tuple[CacheGroup, ...]:
    """Deal layers with `specs` into groups, full attention first, states last. itemsize: bytes of a cached element.

    Layers of attention that keep the same form a class. The smallest class sets the group size (so that few pages of a
    block stay empty) unless the largest class is at most half as large again: then one group per class wastes less.
    Layers of a class are dealt round robin. snapshot_interval: CacheGroup.interval. drafts: a row keeps a state
    until it is known to have passed the next border, so the one behind that gets blocks no earlier than it is written.
    Raises ValueError for states that cannot be cut at `block_size` tokens, and where no layer keeps anything.
    """
    classes: dict[CacheGroup, list[int]] = {}
    states: dict[StateSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, AttentionSpec):
            classes.setdefault(_class_of(spec, layer, block_size), []).append(layer)
        elif isinstance(spec, StateSpec):
            states.setdefault(spec, []).append(layer)
    if not classes and not states:
        raise ValueError("no layer of the model keeps anything of a sequence: a model needs attention or states")
    cached = [len(layers) for kind, layers in classes.items() if kind.kind != "encoder_only"] or [len(specs)]
    size = max(cached) if max(cached) * 2 <= min(cached) * 3 else min(cached)
    groups = []
    for kind in sorted(classes, key=lambda kind: (KINDS.index(kind.kind), kind.window, kind.chunk)):
        layers = classes[kind]
        num_groups = 1 if kind.kind == "encoder_only" else -(-len(layers) // size)
        groups += [dataclasses.replace(kind, layers=tuple(layers[first::num_groups])) for first in range(num_groups)]
    attention = unify_page_sizes(groups, itemsize) if groups else ()
    of_states = _state_groups(states, attention, block_size, itemsize, snapshot_interval)
    if drafts:
        of_states = [dataclasses.replace(group, unit=1) for group in of_states]
    return (*attention, *of_states)


def _class_of(spec: AttentionSpec, layer: int, block_size: int) -> CacheGroup:
    """The group of one layer of attention, without its layers."""
    if not (spec.causal or spec.sees_block):  # it sees the whole prompt in one step, and keeps nothing
        return CacheGroup(kind="encoder_only", block_size=block_size, layers=())
    if block_size % spec.tokens_per_state:
        raise ValueError(
            f"block_size={block_size} must be a multiple of tokens_per_state={spec.tokens_per_state} of layer {layer}"
        )
    plain = "mla" if spec.value_size else "full"
    return CacheGroup(
        kind="sliding" if spec.window else "chunked" if spec.chunk else plain,
        window=spec.window,
        chunk=spec.chunk,
        block_size=block_size,
        layers=(),
        num_heads=spec.num_kv_heads,
        num_channels=spec.channels,
        tokens_per_state=spec.tokens_per_state,
    )


def _state_groups(
    states: dict[StateSpec, list[int]], attention: Sequence[CacheGroup], block_size: int, itemsize: int, interval: int
) -> list[CacheGroup]:
    """Two groups for the layers of each spec: inputs, then states. Blocks are those of attention, if there are any.

    Where there are none they hold what a block of tokens brings to one layer.
    """
    sizes = [group.block_size for group in attention] + [block_size] * bool(states) + [spec.chunk for spec in states]
    for size in sizes:
        if max(sizes) % size:
            raise ValueError(
                f"blocks of {size} tokens do not divide blocks of {max(sizes)}, where the model's states advance every "
                f"{', '.join(str(spec.chunk) for spec in states)} tokens: set block_size to a power of two"
            )
    inputs = {spec: tuple(_of_block(tensor, block_size) for tensor in spec.inputs) for spec in states}
    room = block_bytes(attention, itemsize) or max(map(least_block_bytes, inputs.values()), default=0)
    room = _round_up(room, _ALIGNMENT)
    groups = []
    for spec, layers in states.items():
        groups.append(
            CacheGroup(
                kind="inputs",
                chunk=spec.chunk,
                block_size=block_size,
                layers=tuple(layers),
                parts=choose_parts(inputs[spec], len(layers), room),
                zero_fresh_blocks=spec.reads_uninitialized,
            )
        )
    for spec, layers in states.items():
        groups.append(
            CacheGroup(
                kind="state",
                block_size=spec.chunk,
                layers=tuple(layers),
                parts=choose_parts(spec.states, len(layers), room),
                unit=min(sizes),
                interval=interval,
                zero_fresh_blocks=spec.reads_uninitialized,
            )
        )
    return groups


def _of_block(tensor: StateTensor, block_size: int) -> StateTensor:
    """What a block of tokens has of something that each token has."""
    return dataclasses.replace(tensor, shape=(block_size, *tensor.shape))


def unify_page_sizes(groups: Sequence[CacheGroup], itemsize: int) -> tuple[CacheGroup, ...]:
    """Let blocks of small pages hold more tokens: twice as many until the page would pass the largest one.

    Pages that still differ afterwards need a layout in which the layers of a block lie together.
    """
    largest = max(group.page_bytes(itemsize) for group in groups)
    unified = []
    for group in groups:
        size, page = group.block_size, group.page_bytes(itemsize)
        while group.kind != "encoder_only" and 2 * page <= largest:
            size, page = 2 * size, 2 * page
        unified.append(dataclasses.replace(group, block_size=size))
    return tuple(unified)


def pages_differ(groups: Sequence[CacheGroup], itemsize: int) -> bool:
    """Whether a block has pages of more than one size: then all bytes of a block must lie together."""
    pages = {group.page_bytes(itemsize) for group in groups if group.is_attention and group.kind != "encoder_only"}
    return len(pages) > 1 or not all(group.is_attention for group in groups)


def block_bytes(groups: Sequence[CacheGroup], itemsize: int) -> int:
    """Bytes of one block: what the group that needs most needs; 0 where none needs any."""
    largest = max((group.used_bytes(itemsize) for group in groups), default=0)
    return _round_up(largest, _ALIGNMENT) if pages_differ(groups, itemsize) else largest


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
