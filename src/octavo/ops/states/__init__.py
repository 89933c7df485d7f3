"""States: what recurrent layers keep in blocks, read and written by block table.

Owns where an item lies (a state at a border, or what one token brings), and the reference implementations that move
items: plain torch, on any device, which waits for a GPU. Knows no requests and no formula of a layer. Invariants: an
item that is read has blocks, and was written; nothing is written to the null block, which stands where a table keeps
nothing; a row's items depend on its own tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Store(NamedTuple):
    """One tensor of what a layer keeps in the blocks of a group; see `octavo.cache.parts` for how it is cut."""

    data: torch.Tensor  # [num_blocks, parts in a block, run, *axes that are not cut]
    shape: tuple[int, ...]  # of an item: a state, or what a token brings
    lines: int  # of an item: leading axes that are cut, as one
    first_part: int  # the layer's, among the parts of an entry
    blocks: int  # of an entry

    def places(
        self, table: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of N items (block, part in it, line of that), [N, lines] each. For the arguments see `gather_items`."""
        _, per_block, run = self.data.shape[:3]
        line = offsets[:, None] * self.lines + torch.arange(self.lines, device=offsets.device)
        part = self.first_part + line // run
        column = entries[:, None] * self.blocks + part // per_block
        return table[rows[:, None], column].long(), part % per_block, line % run


def store_of(data: torch.Tensor, shape: tuple[int, ...], *, depth: int, first_part: int, blocks: int) -> Store:
    """`depth`: leading axes of an item that are cut into runs."""
    return Store(data, shape, math.prod(shape[:depth]), first_part, blocks)


def gather_items(
    store: Store, table: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """[N, *shape]: the items at `offsets` of `entries` of table rows `rows`, [N] int64 each.

    table: [rows, columns] int32, block ids; an entry has `store.blocks` columns.
    """
    block, part, line = store.places(table, rows, entries, offsets)
    assert bool((block > 0).all()), "what is read of a state or of its inputs was kept"
    return store.data[block, part, line].reshape(len(rows), *store.shape)


def store_items(
    store: Store,
    table: torch.Tensor,
    rows: torch.Tensor,
    entries: torch.Tensor,
    offsets: torch.Tensor,
    items: torch.Tensor,
) -> None:
    """Write items [N, *shape] to where `gather_items` finds them, but for those whose blocks are null."""
    block, part, line = store.places(table, rows, entries, offsets)
    kept = (block > 0).all(1).nonzero().flatten()
    lines = items[kept].reshape(len(kept), store.lines, *store.data.shape[3:])
    store.data[block[kept], part[kept], line[kept]] = lines.to(store.data.dtype)


def gather_states(
    stores: Sequence[Store], table: torch.Tensor, rows: torch.Tensor, borders: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, ...]:
    """Of each store [N, *shape]: the states of table rows `rows` at `borders`, multiples of `chunk` tokens, [N] int64.

    Zeros at border 0, where nothing is kept.
    """
    some = (borders > 0).nonzero().flatten()
    entries = borders[some] // chunk - 1
    found = []
    for store in stores:
        states = store.data.new_zeros(len(rows), *store.shape)
        states[some] = gather_items(store, table, rows[some], entries, torch.zeros_like(entries))
        found.append(states)
    return tuple(found)


def store_states(
    stores: Sequence[Store],
    table: torch.Tensor,
    rows: torch.Tensor,
    borders: torch.Tensor,
    chunk: int,
    states: Sequence[torch.Tensor],
) -> None:
    """Write states, per store [N, *shape], at `borders` above 0, as far as the table keeps them."""
    entries = borders // chunk - 1
    for store, values in zip(stores, states, strict=True):
        store_items(store, table, rows, entries, torch.zeros_like(entries), values)


def store_inputs(
    stores: Sequence[Store],
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Write what tokens bring, per store [N, *shape], at `positions` of table rows `rows`, as far as it is kept.

    block_size: tokens of an entry.
    """
    for store, values in zip(stores, inputs, strict=True):
        store_items(store, table, rows, positions // block_size, positions % block_size, values)


def gather_open_inputs(
    stores: Sequence[Store], table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, chunk: int, block_size: int
) -> tuple[torch.Tensor, ...]:
    """Of each store [N, chunk, *shape]: what the tokens of the open chunk brought, where rows have `lengths` tokens.

    Zeros from a row's last token on.
    """
    borders = lengths // chunk * chunk
    positions = borders[:, None] + torch.arange(chunk, device=lengths.device)
    at, within = (positions < lengths[:, None]).nonzero(as_tuple=True)
    position = positions[at, within]
    found = []
    for store in stores:
        inputs = store.data.new_zeros(len(rows), chunk, *store.shape)
        inputs[at, within] = gather_items(store, table, rows[at], position // block_size, position % block_size)
        found.append(inputs)
    return tuple(found)
