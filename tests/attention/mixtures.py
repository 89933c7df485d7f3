"""Mixed steps of every kind, padded as a graph holds them: for the flex backend's tests on a CPU and on a GPU."""

from __future__ import annotations

import dataclasses

import torch

from octavo.attention.base import AttentionInputs

NUM_ROWS, NUM_TOKENS, MAX_LONG = 12, 256, 4  # of the graph
MIXTURES = {  # (tokens, queries) of each row, rows of one query first
    "no rows that decode": [(64, 64), (190, 130)],
    "all but one decode": [(180, 1), (3, 1), (17, 1), (64, 1), (65, 1), (1, 1), (99, 1), (120, 90)],
    "prompts of one token": [(1, 1), (1, 1), (40, 40)],
    "nothing else": [(1, 1), (150, 1), (7, 1)],
    "a prompt alone": [(100, 100)],
    "short prompts": [(2, 2), (150, 2), (3, 3), (66, 9)],
    "a single query": [(33, 1)],
    "full": [*[(20 * row, 1) for row in range(1, 9)], (190, 2), (128, 66), (70, 70), (200, 110)],
}


def padded(inputs: AttentionInputs) -> AttentionInputs:
    """What the graph's view of the buffers holds of a step: padding rows have no tokens, padding tokens no row."""
    rows, tokens = NUM_ROWS - inputs.num_rows, NUM_TOKENS - inputs.num_tokens
    assert inputs.rows is not None, "as an engine gives them"
    pad = torch.nn.functional.pad
    return dataclasses.replace(
        inputs,
        num_rows=NUM_ROWS,
        num_tokens=NUM_TOKENS,
        max_query_len=NUM_TOKENS,
        max_long=MAX_LONG,
        max_seq_len=inputs.block_table.shape[1] * inputs.block_size,
        query_start=pad(inputs.query_start, (0, rows), value=inputs.num_tokens),
        seq_lens=pad(inputs.seq_lens, (0, rows)),
        block_table=pad(inputs.block_table, (0, 0, 0, rows)),
        slot_mapping=pad(inputs.slot_mapping, (0, tokens), value=-1),
        rows=pad(inputs.rows, (0, rows)),
        call_checked=False,
    )
