"""Rows: where the sequences of a pack lie, as kernels read it, and their division into tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Sequences one behind the other. All tensors are [rows] int32."""

    lengths: tuple[int, ...]
    first_slot: int  # of all; from it on every slot is some row's
    token: Tensor  # a row's first, among all
    slot: Tensor  # of that token; the others follow
    length: Tensor
    room: Tensor  # slots of a row, at least its length
    _tiles: dict[tuple[int, bool], Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        tokens: Sequence[int],
        slots: Sequence[int],
        rooms: Sequence[int],
        device: torch.device,
    ) -> Rows:
        """From the host's numbers."""
        token, slot, length, room = (
            torch.tensor(list(each), dtype=torch.int32).to(device) for each in (tokens, slots, lengths, rooms)
        )
        return cls(tuple(lengths), slots[0], token, slot, length, room)

    def tiles(self, size: int, *, last_first: bool) -> Tensor:
        """Tiles of `size` tokens, [tiles, 2] int32: row, first token. The ones with most work before them come first.

        last_first: work is what lies before a tile, as a causal query has it; else what lies behind.
        """
        key = size, last_first
        if key not in self._tiles:
            found = [(row, begin) for row, length in enumerate(self.lengths) for begin in range(0, length, size)]
            found.sort(key=lambda tile: -(tile[1] if last_first else self.lengths[tile[0]] - tile[1]))
            self._tiles[key] = torch.tensor(found, dtype=torch.int32).to(self.token.device)
        return self._tiles[key]
