"""The support of a draw: which tokens could be drawn in a token's place, for rows that ask.

Owns which rows ask, and the way from logits to token ids. Chooses no token and changes no logits. Invariant:
a support holds the token that was drawn; it is what the draw saw: what is left by masks, penalties and truncation.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.sampling import cut_
from octavo.ops.sampling.truncation import TruncationRows
from octavo.plan import NewRow
from octavo.sampling.rows import IntArray, RowSet, SampleBatch, Selection

_SHIFTS = tuple(1 << bit for bit in range(8))


class Supports(msgspec.Struct, frozen=True):
    """Of some logits rows of a step."""

    at_np: IntArray  # [n] places among the S logits rows
    greedy: NDArray[np.bool_]  # [n]: only the token that was drawn could be
    bits: torch.Tensor  # [n, ceil(vocab_size / 8)] uint8, bit i of byte b: token 8 b + i
    vocab_size: int


class SupportRows:
    """The rows that ask."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """None at first."""
        self._rows = RowSet(max_num_rows, device)
        self._greedy = np.zeros(max_num_rows, np.bool_)
        self._vocab_size = vocab_size

    def add(self, new: NewRow) -> None:
        """Note whether a row asks."""
        if new.sampling.return_sampling_mask:
            self._rows.add(new.row)
            self._greedy[new.row] = new.sampling.greedy

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)

    def wanted(self, rows_np: IntArray) -> bool:
        """Whether any of these table rows asks."""
        return self._rows.has_any(rows_np)

    def of(self, logits: torch.Tensor, batch: SampleBatch, truncation: TruncationRows | None) -> list[Supports]:
        """What is left of the rows that ask: at most one entry. logits: [S, V] as they are drawn from, but for cuts."""
        selection: Selection | None = self._rows.select(batch.rows_np)
        if selection is None:
            return []
        own = logits.index_select(0, selection.at)
        if truncation is not None:
            cut_(own, batch.rows.index_select(0, selection.at), truncation)
        left = torch.nn.functional.pad(own > -torch.inf, (0, -own.shape[1] % 8)).view(len(own), -1, 8)
        bits = (left * left.new_tensor(_SHIFTS, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
        greedy = self._greedy[batch.rows_np[selection.at_np]]
        return [Supports(selection.at_np, greedy, bits, self._vocab_size)]


def to_ids(found: list[Supports], tokens: IntArray) -> dict[int, bytes]:
    """By place among the S logits rows, ids as int32; empty: all tokens. tokens: [S] drawn, by place. On the host."""
    ids: dict[int, bytes] = {}
    for own in found:
        for at, greedy, line in zip(own.at_np.tolist(), own.greedy.tolist(), own.bits.numpy(), strict=True):
            if greedy:
                ids[at] = np.array([tokens[at]], "<i4").tobytes()
                continue
            places = line.nonzero()[0]  # few, where a truncation is narrow
            expanded = np.unpackbits(line[places], bitorder="little").reshape(len(places), 8)
            known = (places[:, None] * 8 + np.arange(8))[expanded.astype(bool)]
            ids[at] = b"" if len(known) == own.vocab_size else known.astype("<i4").tobytes()
    return ids
