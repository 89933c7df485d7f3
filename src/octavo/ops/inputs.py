"""Batch inputs: gather a step's tokens from the persistent rows, and commit what was sampled.

Owns the eager form of the input kernels, for CPU tensors through their numpy views. Knows rows, lengths and slots, not
requests. Invariant: the result depends on the rows' device state alone; the host passes only which rows run and how
many tokens each computes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


def gather_inputs(
    rows: IntArray,
    num_tokens: IntArray,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
) -> IntArray:
    """Fill the leading parts of the static input tensors for R rows with T tokens in all.

    rows, num_tokens: [R]; token_ids: [max_num_rows, max_model_len] int32; num_computed: [max_num_rows] int32;
    input_ids, positions: [>= T] int64; query_start: [>= R + 1] int32; seq_lens: [>= R] int32. Row i's tokens are its
    next `num_tokens[i]` after `num_computed`. Returns the row of each token, [T].
    """
    num_rows = len(rows)
    start = num_computed.numpy()[rows]
    np.add(start, num_tokens, out=seq_lens.numpy()[:num_rows], casting="unsafe")
    query_start_np = query_start.numpy()
    np.cumsum(num_tokens, out=query_start_np[1 : num_rows + 1])
    total = int(query_start_np[num_rows])
    if total == num_rows:  # one token each: nothing to repeat
        token_row, position = rows, start
    else:
        token_row = np.repeat(rows, num_tokens)
        position = np.arange(total) - np.repeat(query_start_np[:num_rows] - start, num_tokens)
    positions.numpy()[:total] = position
    input_ids.numpy()[:total] = token_ids.numpy()[token_row, position]
    return token_row


def map_slots(
    token_row: IntArray, positions: IntArray, table: torch.Tensor, block_size: int, slot_mapping: torch.Tensor
) -> None:
    """Fill slot_mapping[:T] (int64) with each token's place in the cache: block * block_size + offset."""
    index, offset = np.divmod(positions, block_size)
    blocks = table.numpy()[token_row, index].astype(np.int64)
    np.add(blocks * block_size, offset, out=slot_mapping.numpy()[: len(positions)])


def commit_tokens(
    rows: IntArray,
    num_tokens: IntArray,
    sampled_rows: IntArray,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """Append sampled[i] (int64, [S]) to row sampled_rows[i] and count the step's tokens as computed."""
    num_computed.numpy()[rows] += num_tokens.astype(np.int32)
    lengths = total_len.numpy()
    at = lengths[sampled_rows]
    token_ids.numpy()[sampled_rows, at] = sampled.numpy()
    lengths[sampled_rows] = at + 1
