"""What a step's inputs are gathered from and into: tensors of the persistent rows, of the cache groups and of the step.

Owns plain data, most of which `octavo.ops.inputs` fills, on a CPU or a GPU. Knows rows and slots, not requests.
Invariant: every tensor stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch


class GroupTables:
    """Per cache group: the persistent block table, the batch's copy of it, and the slots. All stay where they are."""

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        slots: torch.Tensor,
        block_sizes: Sequence[int],
    ) -> None:
        """tables, outs: [rows, columns] int32; slots: [groups, max_num_tokens] int64; block_sizes: tokens per block."""
        self.tables, self.outs, self.slots, self.block_sizes = tuple(tables), tuple(outs), slots, tuple(block_sizes)
        self.max_columns = max((out.shape[1] for out in outs), default=1)
        # what a kernel reads: [groups, 7] int64
        self.addresses = torch.tensor(
            [
                [table.data_ptr(), table.stride(0), out.data_ptr(), out.stride(0), slot.data_ptr(), size, out.shape[1]]
                for table, out, slot, size in zip(tables, outs, slots, block_sizes, strict=True)
            ],
            dtype=torch.int64,
        ).to(slots.device)


class RowTensors(msgspec.Struct, frozen=True):
    """What a step reads and changes of the persistent rows, int32."""

    token_ids: torch.Tensor  # [max_num_rows, max_model_len]
    total_len: torch.Tensor  # [max_num_rows], known tokens
    num_computed: torch.Tensor  # [max_num_rows]


class LogitTokens(msgspec.Struct, frozen=True):
    """The L tokens whose hidden states give logits: of each of R rows the last one, and its drafts where it has some.

    They are a batch of their own: a row's are its last queries. Of padding rows: any token, and no query.
    """

    tokens: torch.Tensor  # [L] int64, which of the step's tokens they are, in ascending order
    rows: torch.Tensor  # [L] int64, the table row of each
    positions: torch.Tensor  # [L] int64, where the token goes that is drawn from each
    query_start: torch.Tensor  # [R + 1] int32, of these tokens
    max_per_row: int = 1  # a bound


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One step on the device: R rows and T tokens, padding included."""

    max_query_len: int  # a bound
    rows: torch.Tensor  # [R] int64
    query_start: torch.Tensor  # [R + 1] int32
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    seq_lens: torch.Tensor  # [R] int32
    next_positions: torch.Tensor  # [R] int64, where a token goes that a row samples: its seq_len
    turn: torch.Tensor  # [1] int32, which of the two results this step fills: 1 and 0 in turn
    # both on the host, in memory that the device can write; K drafts of a row at most
    results: torch.Tensor  # [2, >= R, 1 + K] int64, token | failed << 32: by sample, or with drafts by entry
    counts: torch.Tensor  # [2, >= R] int64, with drafts: how many of an entry's tokens count


class PassTensors(msgspec.Struct, frozen=True):
    """What a step's passes are laid out into, with room for the most rows and tokens. All stay where they are.

    Pass 0 is over each row's last token that counts, whose entry is stored already: it has no slots. Pass p is over the
    token behind it, p places on.
    """

    last: torch.Tensor  # [rows] int64: which of the step's tokens the last one is that counts
    tokens: torch.Tensor  # [rows] int64: the last known token of each row
    behind: torch.Tensor  # [tokens] int64: the token behind each of the step's
    positions: torch.Tensor  # [passes, rows] int64
    next_positions: torch.Tensor  # [passes, rows] int64, each position + 1
    seq_lens: torch.Tensor  # [passes, rows] int32, the same
    slots: torch.Tensor  # [groups, passes, rows] int64


class DraftRows(msgspec.Struct, frozen=True):
    """Whose drafts are drawn, and how: drafts number `place` of R rows, written where a row is live and has room."""

    rows: torch.Tensor  # [R] int64
    live: tuple[torch.Tensor, torch.Tensor]  # (sample_of, lengths) of the step, [R] int32: sampled, and no padding
    table: RowTensors
    place: int
    temperatures: torch.Tensor  # of all rows, as the seeds
    seeds: torch.Tensor
    noise: float  # what part of the temperature counts, 0: the likeliest token is taken
    vocab_size: int  # of the target
